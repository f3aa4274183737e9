//! Asynchronous copies of the thread (PTX ISA 9.7.9.25.3, `cp.async`), on every GPU from sm_80: each brings 16 bytes from
//! global to shared memory, and a thread waits for its own, in groups.
//!
//! They are writes of the generic proxy: after its wait they are the thread's, and other threads see them behind a
//! barrier, as with any store.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use crate::ptx::SharedAddr;

    /// `cp.async.cg.shared.global [to], [from], 16`: past L1.
    ///
    /// # Safety
    /// 16 bytes at multiples of 16 on both sides; nobody touches those at `to` until this thread has waited and those
    /// that touch them have met it at a barrier.
    #[inline(always)]
    pub unsafe fn copy_16(to: SharedAddr, from: *const u8) {
        // SAFETY: both ranges are the caller's contract.
        unsafe {
            asm!("cp.async.cg.shared.global [{}], [{}], 16;", in(reg32) to.0, in(reg64) from, options(nostack))
        }
    }

    /// `cp.async.commit_group`: this thread's copies since the last one are a group, an empty one too.
    #[inline(always)]
    pub fn commit_group() {
        // SAFETY: touches no memory of its own.
        unsafe { asm!("cp.async.commit_group;", options(nostack)) }
    }

    /// `cp.async.wait_group`: all but the last `PENDING` groups of this thread are complete.
    #[inline(always)]
    pub fn wait_group<const PENDING: u32>() {
        // SAFETY: a wait.
        unsafe { asm!("cp.async.wait_group {};", const PENDING, options(nostack)) }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions;
    use crate::ptx::SharedAddr;

    /// `cp.async`: the bytes may not be touched from here until the thread has waited, and arrive then.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn copy_16(to: SharedAddr, from: *const u8) {
        instructions::async_copy(to.0, from);
    }

    /// `cp.async.commit_group`.
    #[track_caller]
    pub fn commit_group() {
        instructions::async_commit();
    }

    /// `cp.async.wait_group`.
    #[track_caller]
    pub fn wait_group<const PENDING: u32>() {
        instructions::async_wait(PENDING);
    }
}
