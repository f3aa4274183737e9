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
