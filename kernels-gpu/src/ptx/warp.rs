//! Lanes that look for their like and at those before them (PTX ISA 9.7.9.6 `shfl`, 9.7.13.10 `match`, 9.7.13.3
//! `bar.warp.sync`, 10 `%lanemask_lt`).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    /// `match.any.sync.b32`: the lanes that hold the same value, this one among them, as a mask.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn matching(value: u32) -> u32 {
        let lanes: u32;
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!("match.any.sync.b32 {}, {}, -1;", out(reg32) lanes, in(reg32) value, options(nomem, nostack))
        }
        lanes
    }

    /// `%lanemask_lt`: the lanes before this one.
    #[inline(always)]
    pub fn lanes_before() -> u32 {
        let lanes: u32;
        // SAFETY: reads a constant of the thread.
        unsafe { asm!("mov.u32 {}, %lanemask_lt;", out(reg32) lanes, options(pure, nomem, nostack)) }
        lanes
    }

    /// `shfl.sync.up.b32`: the value of the lane `DISTANCE` before; the first lanes get their own.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn shuffle_up<const DISTANCE: u32>(value: u32) -> u32 {
        let other: u32;
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!("shfl.sync.up.b32 {}, {}, {}, 0, -1;", out(reg32) other, in(reg32) value, const DISTANCE,
                options(nomem, nostack))
        }
        other
    }

    /// `bar.warp.sync`: the lanes meet; their writes to shared memory are visible after it.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn sync_warp() {
        // SAFETY: the whole warp takes part.
        unsafe { asm!("bar.warp.sync -1;", options(nostack)) }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions::{thread_index, warp};

    /// `match.any.sync.b32`: the lanes that hold the same value, this one among them, as a mask.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn matching(value: u32) -> u32 {
        let all = warp("match.any.sync", 0, value.into(), false);
        all.iter().enumerate().fold(0, |mask, (i, v)| mask | u32::from(*v == u64::from(value)) << i)
    }

    /// `%lanemask_lt`: the lanes before this one.
    #[track_caller]
    pub fn lanes_before() -> u32 {
        (1 << (thread_index() % 32)) - 1
    }

    /// `shfl.sync.up.b32`: the value of the lane `DISTANCE` before; the first lanes get their own.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn shuffle_up<const DISTANCE: u32>(value: u32) -> u32 {
        let lane = thread_index() % 32;
        let from = lane.checked_sub(DISTANCE).unwrap_or(lane);
        warp("shfl.sync.up", DISTANCE, value.into(), false)[from as usize] as u32
    }

    /// `bar.warp.sync`: the lanes meet; their writes to shared memory are visible after it.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn sync_warp() {
        warp("bar.warp.sync", 0, 0, true);
    }
}
