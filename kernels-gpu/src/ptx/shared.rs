//! Words of shared memory (PTX ISA 9.7.9.8, 9.7.9.12) and reductions on them (9.7.13.7). Integer reductions
//! give the same result in any order.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use crate::ptx::SharedAddr;

    /// `ld.shared.b32`.
    ///
    /// # Safety
    /// 4 readable bytes of shared memory at a multiple of 4.
    #[inline(always)]
    pub unsafe fn load_u32(from: SharedAddr) -> u32 {
        let word: u32;
        // SAFETY: the range is the caller's contract.
        unsafe { asm!("ld.shared.b32 {}, [{}];", out(reg32) word, in(reg32) from.0, options(nostack)) }
        word
    }

    /// `ld.shared.v2.b32`.
    ///
    /// # Safety
    /// 8 readable bytes of shared memory at a multiple of 8.
    #[inline(always)]
    pub unsafe fn load_v2(from: SharedAddr) -> [u32; 2] {
        let (a, b): (u32, u32);
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("ld.shared.v2.b32 {{{}, {}}}, [{}];", out(reg32) a, out(reg32) b, in(reg32) from.0, options(nostack))
        }
        [a, b]
    }

    /// `st.shared.b32`.
    ///
    /// # Safety
    /// 4 writable bytes of shared memory at a multiple of 4.
    #[inline(always)]
    pub unsafe fn store_u32(to: SharedAddr, word: u32) {
        // SAFETY: the range is the caller's contract.
        unsafe { asm!("st.shared.b32 [{}], {};", in(reg32) to.0, in(reg32) word, options(nostack)) }
    }

    macro_rules! reduction {
        ($(#[$doc:meta])* $name:ident, $op:literal) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// A writable word of shared memory at a multiple of 4.
            #[inline(always)]
            pub unsafe fn $name(at: SharedAddr, value: u32) {
                // SAFETY: the word is the caller's contract.
                unsafe { asm!(concat!($op, " [{}], {};"), in(reg32) at.0, in(reg32) value, options(nostack)) }
            }
        };
    }

    reduction!(
        /// `red.shared.max.u32`
        max_u32,
        "red.relaxed.cta.shared.max.u32"
    );
    reduction!(
        /// `red.shared.add.u32`
        add_u32,
        "red.relaxed.cta.shared.add.u32"
    );
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions;
    use crate::ptx::SharedAddr;

    /// `ld.shared.b32`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn load_u32(from: SharedAddr) -> u32 {
        u32::from_le_bytes(instructions::load_shared(from.0))
    }

    /// `ld.shared.v2.b32`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn load_v2(from: SharedAddr) -> [u32; 2] {
        let both = u64::from_le_bytes(instructions::load_shared(from.0));
        [both as u32, (both >> 32) as u32]
    }

    /// `st.shared.b32`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn store_u32(to: SharedAddr, word: u32) {
        instructions::store_shared(to.0, word.to_le_bytes());
    }

    /// `red.shared.max.u32`
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn max_u32(at: SharedAddr, value: u32) {
        instructions::reduce_shared(at.0, |old| old.max(value));
    }

    /// `red.shared.add.u32`
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn add_u32(at: SharedAddr, value: u32) {
        instructions::reduce_shared(at.0, |old| old.wrapping_add(value));
    }
}
