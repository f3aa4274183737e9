//! What the threads of a warp or a block do together, as LLVM's intrinsics (PTX ISA 9.7.9.6 `shfl`, 9.7.13.1
//! `bar.sync`, 9.7.13.3 `bar.warp.sync`, 9.7.13.9 `vote`, 9.7.13.10 `match`, 9.7.13.12 `redux`).
//!
//! Not as inline PTX: LLVM may copy an `asm!` block into both sides of a branch (it does, where two tests of one
//! condition stand before and after it), and threads that take different sides then wait for each other in
//! different places, or exchange nothing. Its intrinsics are marked *convergent* and stay where they are. (rustc's
//! own jump threading minds neither; `xtask` switches it off.)

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::{asm, nvptx};

    const ALL: u32 = u32::MAX;

    unsafe extern "C" {
        #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
        fn shfl_bfly(lanes: u32, value: u32, mask: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
        fn shfl_up(lanes: u32, value: u32, distance: u32, clamp: u32) -> u32;
        #[link_name = "llvm.nvvm.vote.any.sync"]
        fn vote_any(lanes: u32, yes: bool) -> bool;
        #[link_name = "llvm.nvvm.redux.sync.umax"]
        fn redux_max(value: u32, lanes: u32) -> u32;
        #[link_name = "llvm.nvvm.match.any.sync.i32"]
        fn match_any(lanes: u32, value: u32) -> u32;
        #[link_name = "llvm.nvvm.bar.warp.sync"]
        fn bar_warp(lanes: u32);
    }

    /// `shfl.sync.bfly.b32`: the value of the lane whose number differs by `MASK`.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn shuffle_xor<const MASK: u32>(value: u32) -> u32 {
        // SAFETY: the whole warp takes part.
        unsafe { shfl_bfly(ALL, value, MASK, 31) }
    }

    /// `shfl.sync.up.b32`: the value of the lane `DISTANCE` before; the first lanes get their own.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn shuffle_up<const DISTANCE: u32>(value: u32) -> u32 {
        // SAFETY: the whole warp takes part.
        unsafe { shfl_up(ALL, value, DISTANCE, 0) }
    }

    /// `vote.sync.any.pred`: whether any lane says yes.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn any(yes: bool) -> bool {
        // SAFETY: the whole warp takes part.
        unsafe { vote_any(ALL, yes) }
    }

    /// `redux.sync.max.u32`: the largest value of the warp.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn warp_max_u32(value: u32) -> u32 {
        // SAFETY: the whole warp takes part.
        unsafe { redux_max(value, ALL) }
    }

    /// `match.any.sync.b32`: the lanes that hold the same value, this one among them, as a mask.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn matching(value: u32) -> u32 {
        // SAFETY: the whole warp takes part.
        unsafe { match_any(ALL, value) }
    }

    /// `%lanemask_lt`: the lanes before this one.
    #[inline(always)]
    pub fn lanes_before() -> u32 {
        let lanes: u32;
        // SAFETY: reads a constant of the thread.
        unsafe { asm!("mov.u32 {}, %lanemask_lt;", out(reg32) lanes, options(pure, nomem, nostack)) }
        lanes
    }

    /// `bar.warp.sync`: the lanes meet; their writes to shared memory are visible after it.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn sync_warp() {
        // SAFETY: the whole warp takes part.
        unsafe { bar_warp(ALL) }
    }

    /// `bar.sync 0`: all threads of the block meet; their writes to shared memory are visible after it.
    ///
    /// # Safety
    /// Every thread of the block executes it.
    #[inline(always)]
    pub unsafe fn sync_threads() {
        // SAFETY: all threads take part.
        unsafe { nvptx::_syncthreads() }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions::{thread_index, warp};

    pub use crate::ptx::shuffle::{any, shuffle_xor, warp_max_u32};
    pub use crate::ptx::special::sync_threads;

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

    /// `bar.warp.sync`: the lanes meet; their writes to shared memory are visible after it.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn sync_warp() {
        warp("bar.warp.sync", 0, 0, true);
    }
}
