//! Special registers (PTX ISA 10), the block barrier (9.7.13.1) and register reallocation (9.7.19.5).
//! Names follow rust-cuda's `cuda_std` where it has one.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    macro_rules! register {
        ($(#[$doc:meta])* $name:ident, $register:literal) => {
            $(#[$doc])*
            #[inline(always)]
            pub fn $name() -> u32 {
                let value: u32;
                // SAFETY: reads a constant of the thread.
                unsafe { asm!(concat!("mov.u32 {}, %", $register, ";"), out(reg32) value, options(nomem, nostack)) }
                value
            }
        };
    }

    register!(
        /// `%tid.x`, read at every call: a value that is wanted rarely need not stay in a register.
        thread_idx_x,
        "tid.x"
    );
    register!(
        /// `%ctaid.x`, read at every call.
        block_idx_x,
        "ctaid.x"
    );
    register!(
        /// `%ctaid.y`, read at every call.
        block_idx_y,
        "ctaid.y"
    );
    register!(
        /// `%ctaid.z`, read at every call.
        block_idx_z,
        "ctaid.z"
    );

    /// `bar.sync 0`: all threads of the block meet; their writes to shared memory are visible after it.
    ///
    /// # Safety
    /// Every thread of the block executes it.
    #[inline(always)]
    pub unsafe fn sync_threads() {
        // SAFETY: all threads take part.
        unsafe { asm!("bar.sync 0;", options(nostack)) }
    }

    /// `bar.sync ID, THREADS`: `THREADS` threads (whole warps) meet at barrier `ID` (1-15).
    ///
    /// # Safety
    /// Exactly that many threads execute it with this `ID`.
    #[inline(always)]
    pub unsafe fn sync_named<const ID: u32, const THREADS: u32>() {
        // SAFETY: the caller's threads take part.
        unsafe { asm!("bar.sync {}, {};", const ID, const THREADS, options(nostack)) }
    }

    /// `bar.arrive ID, THREADS`: counts as an arrival at barrier `ID` without waiting.
    ///
    /// # Safety
    /// Exactly that many threads arrive or wait with this `ID`.
    #[inline(always)]
    pub unsafe fn arrive_named<const ID: u32, const THREADS: u32>() {
        // SAFETY: the caller's threads take part.
        unsafe { asm!("bar.arrive {}, {};", const ID, const THREADS, options(nostack)) }
    }

    /// `setmaxnreg.dec`: this warpgroup gives registers back, down to `REGISTERS` a thread.
    ///
    /// # Safety
    /// All warps of the warpgroup execute it; `REGISTERS` is a multiple of 8 in 24..=256, not above what
    /// they have. The entry has launch bounds.
    #[inline(always)]
    pub unsafe fn release_registers<const REGISTERS: u32>() {
        // SAFETY: the warpgroup takes part.
        unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {};", const REGISTERS, options(nostack)) }
    }

    /// `setmaxnreg.inc`: this warpgroup waits until it can have `REGISTERS` registers a thread.
    ///
    /// # Safety
    /// As [`release_registers`], and not below what they have.
    #[inline(always)]
    pub unsafe fn claim_registers<const REGISTERS: u32>() {
        // SAFETY: the warpgroup takes part.
        unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {};", const REGISTERS, options(nostack)) }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions;

    /// `%tid.x`.
    #[track_caller]
    pub fn thread_idx_x() -> u32 {
        instructions::thread_index()
    }

    /// `%ctaid.x`.
    #[track_caller]
    pub fn block_idx_x() -> u32 {
        instructions::block_index()[0]
    }

    /// `%ctaid.y`.
    #[track_caller]
    pub fn block_idx_y() -> u32 {
        instructions::block_index()[1]
    }

    /// `%ctaid.z`.
    #[track_caller]
    pub fn block_idx_z() -> u32 {
        instructions::block_index()[2]
    }

    /// `bar.sync 0`: all threads of the block meet.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn sync_threads() {
        instructions::barrier_sync(0, None);
    }

    /// `bar.sync ID, THREADS`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn sync_named<const ID: u32, const THREADS: u32>() {
        const { assert!(ID > 0 && ID < 16) }
        instructions::barrier_sync(ID, Some(THREADS));
    }

    /// `bar.arrive ID, THREADS`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn arrive_named<const ID: u32, const THREADS: u32>() {
        const { assert!(ID > 0 && ID < 16) }
        instructions::barrier_arrive(ID, THREADS);
    }

    /// `setmaxnreg.dec`: back to the multiprocessor's other warpgroups.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn release_registers<const REGISTERS: u32>() {
        instructions::set_registers(REGISTERS, false);
    }

    /// `setmaxnreg.inc`: waits until the registers are there.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn claim_registers<const REGISTERS: u32>() {
        instructions::set_registers(REGISTERS, true);
    }
}
