//! Bulk asynchronous copies (PTX ISA 9.7.9.25.4): one thread moves a contiguous run of bytes, and a barrier
//! in shared memory hears of their arrival.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use crate::ptx::SharedAddr;
    use crate::ptx::mbarrier::Barrier;

    /// `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`: starts a copy of `bytes` bytes
    /// from global to this block's shared memory; `barrier` counts them as they land.
    ///
    /// # Safety
    /// `to`, `from` and `bytes` are multiples of 16; both ranges are valid, and nobody touches `to` until
    /// the barrier's phase completes. The barrier expects these bytes.
    #[inline(always)]
    pub unsafe fn global_to_shared(to: SharedAddr, from: *const u8, bytes: u32, barrier: Barrier) {
        // SAFETY: ranges and alignment are the caller's contract.
        unsafe {
            asm!(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{from}], {bytes}, [{barrier}];",
                to = in(reg32) to.0, from = in(reg64) from, bytes = in(reg32) bytes, barrier = in(reg32) barrier.addr().0,
                options(nostack)
            )
        }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions;
    use crate::ptx::SharedAddr;
    use crate::ptx::mbarrier::Barrier;

    /// `cp.async.bulk`: the bytes may not be touched from here until the barrier's phase was waited for, and
    /// arrive when nothing else can happen.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn global_to_shared(to: SharedAddr, from: *const u8, bytes: u32, barrier: Barrier) {
        instructions::bulk_copy(to.0, from, bytes, barrier.addr().0);
    }
}
