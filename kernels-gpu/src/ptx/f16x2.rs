//! Arithmetic on two f16 in one register (PTX ISA 9.7.4 and 9.7.3.22). The lower half is the element of the lower index.

/// The register that holds `bits` in both halves.
#[inline(always)]
pub const fn splat(bits: u16) -> u32 {
    bits as u32 * 0x1_0001
}

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
        /// `add.rn.f16x2`
        add,
        "add.rn.f16x2"
    );
    binary!(
        /// `sub.rn.f16x2`
        sub,
        "sub.rn.f16x2"
    );
    binary!(
        /// `mul.rn.f16x2`
        mul,
        "mul.rn.f16x2"
    );
    binary!(
        /// `max.f16x2`: of a NaN and a number, the number.
        max,
        "max.f16x2"
    );
    binary!(
        /// `max.NaN.f16x2`: a NaN on either side stays.
        max_nan,
        "max.NaN.f16x2"
    );

    /// `fma.rn.f16x2`: `a * b + c`, rounded once.
    #[inline(always)]
    pub fn fma(a: u32, b: u32, c: u32) -> u32 {
        let d: u32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!("fma.rn.f16x2 {}, {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack))
        }
        d
    }

    /// `fma.rn.sat.f16x2`: `a * b + c`, rounded once, then clamped to 0..=1; NaN becomes 0.
    #[inline(always)]
    pub fn fma_sat(a: u32, b: u32, c: u32) -> u32 {
        let d: u32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!("fma.rn.sat.f16x2 {}, {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack))
        }
        d
    }

    /// `ex2.approx.f16x2`: 2 to the power of each half, maximum relative error 2^-9.9.
    #[inline(always)]
    pub fn exp2(a: u32) -> u32 {
        let d: u32;
        // SAFETY: register in, register out.
        unsafe { asm!("ex2.approx.f16x2 {}, {};", out(reg32) d, in(reg32) a, options(pure, nomem, nostack)) }
        d
    }
}
