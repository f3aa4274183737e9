//! Minima and maxima of two 16-bit values in one register that keep a NaN (PTX ISA 9.7.4.9 and 9.7.4.10);
//! the maximum of f16 is [`f16x2::max_nan`](super::f16x2).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    macro_rules! binary {
        ($(#[$doc:meta])* $name:ident, $op:literal) => {
            $(#[$doc])*
            #[inline(always)]
            pub fn $name(a: u32, b: u32) -> u32 {
                let d: u32;
                // SAFETY: registers in, register out.
                unsafe { asm!(concat!($op, " {}, {}, {};"), out(reg32) d, in(reg32) a, in(reg32) b, options(pure, nomem, nostack)) }
                d
            }
        };
    }

    binary!(
        /// `max.NaN.bf16x2`
        max_nan_bf16x2,
        "max.NaN.bf16x2"
    );
    binary!(
        /// `min.NaN.bf16x2`
        min_nan_bf16x2,
        "min.NaN.bf16x2"
    );
    binary!(
        /// `min.NaN.f16x2`
        min_nan_f16x2,
        "min.NaN.f16x2"
    );
}
