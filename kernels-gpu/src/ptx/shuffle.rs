//! Exchange inside a warp (PTX ISA 9.7.9.6 `shfl`, 9.7.13.9 `vote`, 9.7.13.12 `redux`) and of bytes inside
//! a register (9.7.9.7 `prmt`).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    /// `shfl.sync.bfly.b32`: the value of the lane whose number differs by `MASK`.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn shuffle_xor<const MASK: u32>(value: u32) -> u32 {
        let other: u32;
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!("shfl.sync.bfly.b32 {}, {}, {}, 31, -1;", out(reg32) other, in(reg32) value, const MASK,
                options(nomem, nostack))
        }
        other
    }

    /// `shfl.sync.idx.b32` from lane 0. The assembler knows that the result is the same in all lanes, and keeps what
    /// is computed from it in uniform registers.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn broadcast(value: u32) -> u32 {
        let first: u32;
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!("shfl.sync.idx.b32 {}, {}, 0, 31, -1;", out(reg32) first, in(reg32) value, options(nomem, nostack))
        }
        first
    }

    /// `vote.sync.any.pred`: whether any lane says yes.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn any(yes: bool) -> bool {
        let anyone: u32;
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!(
                "{{",
                ".reg .pred mine, some;",
                "setp.ne.b32 mine, {}, 0;",
                "vote.sync.any.pred some, mine, -1;",
                "selp.b32 {}, 1, 0, some;",
                "}}",
                in(reg32) yes as u32, out(reg32) anyone, options(nomem, nostack)
            )
        }
        anyone != 0
    }

    /// `redux.sync.max.u32`: the largest value of the warp.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn warp_max_u32(value: u32) -> u32 {
        let max: u32;
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!("redux.sync.max.u32 {}, {}, -1;", out(reg32) max, in(reg32) value, options(nomem, nostack))
        }
        max
    }

    /// `prmt.b32`: nibble i of `select` says which byte of `[a, b]` (0-3, 4-7) becomes byte i.
    #[inline(always)]
    pub fn permute(a: u32, b: u32, select: u32) -> u32 {
        let d: u32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!("prmt.b32 {}, {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) select,
                options(pure, nomem, nostack))
        }
        d
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions::{thread_index, warp};

    /// `shfl.sync.bfly.b32`: the value of the lane whose number differs by `MASK`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn shuffle_xor<const MASK: u32>(value: u32) -> u32 {
        const { assert!(MASK < 32) }
        warp("shfl.sync.bfly", MASK, value.into(), false)[((thread_index() ^ MASK) % 32) as usize] as u32
    }

    /// `shfl.sync.idx.b32` from lane 0.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn broadcast(value: u32) -> u32 {
        warp("shfl.sync.idx", 0, value.into(), false)[0] as u32
    }

    /// `vote.sync.any.pred`: whether any lane says yes.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn any(yes: bool) -> bool {
        warp("vote.sync.any", 0, yes.into(), false).contains(&1)
    }

    /// `redux.sync.max.u32`: the largest value of the warp.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn warp_max_u32(value: u32) -> u32 {
        warp("redux.sync.max.u32", 0, value.into(), false).into_iter().fold(0, |a, b| a.max(b as u32))
    }

    /// `prmt.b32`: nibble i of `select` says which byte of `[a, b]` (0-3, 4-7) becomes byte i; with its bit 3 the
    /// byte's sign does, eight times.
    pub fn permute(a: u32, b: u32, select: u32) -> u32 {
        let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
        u32::from_le_bytes(core::array::from_fn(|i| {
            let nibble = select >> (4 * i);
            let byte = bytes[nibble as usize & 7];
            if nibble & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 }
        }))
    }
}
