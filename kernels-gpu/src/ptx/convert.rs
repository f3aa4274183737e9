//! Conversions (PTX ISA 9.7.9.21) and the scalar functions of f32 that Rust's `core` has not got (9.7.3).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    macro_rules! pair_of_f32 {
        ($(#[$doc:meta])* $name:ident, $op:literal, $register:ident, $bits:ty) => {
            $(#[$doc])*
            #[inline(always)]
            pub fn $name(low: f32, high: f32) -> $bits {
                let d: $bits;
                // SAFETY: registers in, register out.
                unsafe {
                    asm!(concat!($op, " {}, {}, {};"), out($register) d, in(reg32) high, in(reg32) low,
                        options(pure, nomem, nostack))
                }
                d
            }
        };
    }

    pair_of_f32!(
        /// `cvt.rn.satfinite.e4m3x2.f32`: two E4M3 bytes, `low` in the lower.
        e4m3x2,
        "cvt.rn.satfinite.e4m3x2.f32",
        reg16,
        u16
    );
    pair_of_f32!(
        /// `cvt.rn.f16x2.f32`
        f16x2,
        "cvt.rn.f16x2.f32",
        reg32,
        u32
    );
    pair_of_f32!(
        /// `cvt.rn.bf16x2.f32`
        bf16x2,
        "cvt.rn.bf16x2.f32",
        reg32,
        u32
    );

    /// Two `cvt.rn.satfinite.e4m3x2.f32`: four E4M3 bytes, the first in the lowest.
    #[inline(always)]
    pub fn e4m3x4(x: [f32; 4]) -> u32 {
        let d: u32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!(
                "{{",
                ".reg .b16 low, high;",
                "cvt.rn.satfinite.e4m3x2.f32 low, {x1}, {x0};",
                "cvt.rn.satfinite.e4m3x2.f32 high, {x3}, {x2};",
                "mov.b32 {d}, {{low, high}};",
                "}}",
                d = out(reg32) d, x0 = in(reg32) x[0], x1 = in(reg32) x[1], x2 = in(reg32) x[2], x3 = in(reg32) x[3],
                options(pure, nomem, nostack)
            )
        }
        d
    }

    /// Four `cvt.rn.satfinite.e2m1x2.f32` (sm_120a): eight E2M1 nibbles, the first in the lowest.
    #[inline(always)]
    pub fn e2m1x8(x: [f32; 8]) -> u32 {
        let d: u32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!(
                "{{",
                ".reg .b8 pair0, pair1, pair2, pair3;",
                "cvt.rn.satfinite.e2m1x2.f32 pair0, {x1}, {x0};",
                "cvt.rn.satfinite.e2m1x2.f32 pair1, {x3}, {x2};",
                "cvt.rn.satfinite.e2m1x2.f32 pair2, {x5}, {x4};",
                "cvt.rn.satfinite.e2m1x2.f32 pair3, {x7}, {x6};",
                "mov.b32 {d}, {{pair0, pair1, pair2, pair3}};",
                "}}",
                d = out(reg32) d, x0 = in(reg32) x[0], x1 = in(reg32) x[1], x2 = in(reg32) x[2], x3 = in(reg32) x[3],
                x4 = in(reg32) x[4], x5 = in(reg32) x[5], x6 = in(reg32) x[6], x7 = in(reg32) x[7],
                options(pure, nomem, nostack)
            )
        }
        d
    }

    /// `cvt.rn.satfinite.e4m3x2.f16x2`: two E4M3 bytes of two f16.
    #[inline(always)]
    pub fn e4m3x2_of_f16x2(pair: u32) -> u16 {
        let d: u16;
        // SAFETY: register in, register out.
        unsafe {
            asm!("cvt.rn.satfinite.e4m3x2.f16x2 {}, {};", out(reg16) d, in(reg32) pair, options(pure, nomem, nostack))
        }
        d
    }

    /// `cvt.f32.f16` of both halves, the lower first; exact.
    #[inline(always)]
    pub fn f32_of_f16x2(pair: u32) -> (f32, f32) {
        let (low, high): (f32, f32);
        // SAFETY: register in, registers out.
        unsafe {
            asm!(
                "{{",
                ".reg .b16 l, h;",
                "mov.b32 {{l, h}}, {};",
                "cvt.f32.f16 {}, l;",
                "cvt.f32.f16 {}, h;",
                "}}",
                in(reg32) pair, out(reg32) low, out(reg32) high, options(pure, nomem, nostack)
            )
        }
        (low, high)
    }

    /// `fma.rn.f32`: `a * b + c`, rounded once.
    #[inline(always)]
    pub fn fma(a: f32, b: f32, c: f32) -> f32 {
        let d: f32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!("fma.rn.f32 {}, {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack))
        }
        d
    }

    /// `max.NaN.f32`: a NaN on either side stays.
    #[inline(always)]
    pub fn max_nan(a: f32, b: f32) -> f32 {
        let d: f32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!("max.NaN.f32 {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
        }
        d
    }

    /// `ex2.approx.ftz.f32`: 2 to the power of `x`, maximum relative error 2^-22.
    #[inline(always)]
    pub fn exp2(x: f32) -> f32 {
        let d: f32;
        // SAFETY: register in, register out.
        unsafe {
            asm!("ex2.approx.ftz.f32 {}, {};", out(reg32) d, in(reg32) x, options(pure, nomem, nostack))
        }
        d
    }

    /// `lg2.approx.f32`: binary logarithm, maximum absolute error 2^-22 on [0.5, 2], else relative 2^-22.
    #[inline(always)]
    pub fn log2(x: f32) -> f32 {
        let d: f32;
        // SAFETY: register in, register out.
        unsafe { asm!("lg2.approx.f32 {}, {};", out(reg32) d, in(reg32) x, options(pure, nomem, nostack)) }
        d
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use half::{bf16 as Bf16, f16 as Half};

    use crate::formats::{e2m1, e4m3};
    use crate::ptx::f16x2::bits;

    /// `cvt.rn.satfinite.e4m3x2.f32`: two E4M3 bytes, `low` in the lower.
    pub fn e4m3x2(low: f32, high: f32) -> u16 {
        u16::from_le_bytes([e4m3::encode(low), e4m3::encode(high)])
    }

    /// `cvt.rn.f16x2.f32`
    pub fn f16x2(low: f32, high: f32) -> u32 {
        u32::from(bits(low.into())) | u32::from(bits(high.into())) << 16
    }

    /// `cvt.rn.bf16x2.f32`; a NaN becomes 0x7fff.
    pub fn bf16x2(low: f32, high: f32) -> u32 {
        let bits = |x: f32| if x.is_nan() { 0x7fff } else { Bf16::from_f32(x).to_bits() };
        u32::from(bits(low)) | u32::from(bits(high)) << 16
    }

    /// Two `cvt.rn.satfinite.e4m3x2.f32`: four E4M3 bytes, the first in the lowest.
    pub fn e4m3x4(x: [f32; 4]) -> u32 {
        u32::from(e4m3x2(x[0], x[1])) | u32::from(e4m3x2(x[2], x[3])) << 16
    }

    /// Four `cvt.rn.satfinite.e2m1x2.f32` (sm_120a): eight E2M1 nibbles, the first in the lowest.
    pub fn e2m1x8(x: [f32; 8]) -> u32 {
        x.iter().rev().fold(0, |word, &x| word << 4 | u32::from(e2m1::encode(x)))
    }

    /// `cvt.rn.satfinite.e4m3x2.f16x2`: two E4M3 bytes of two f16.
    pub fn e4m3x2_of_f16x2(pair: u32) -> u16 {
        let (low, high) = f32_of_f16x2(pair);
        e4m3x2(low, high)
    }

    /// `cvt.f32.f16` of both halves, the lower first; exact.
    pub fn f32_of_f16x2(pair: u32) -> (f32, f32) {
        (Half::from_bits(pair as u16).to_f32(), Half::from_bits((pair >> 16) as u16).to_f32())
    }

    /// `fma.rn.f32`: `a * b + c`, rounded once.
    pub fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    /// `max.NaN.f32`: a NaN on either side stays.
    pub fn max_nan(a: f32, b: f32) -> f32 {
        if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
    }

    /// `ex2.approx.ftz.f32`, rounded correctly but for double rounding; the hardware is within 2^-22 of it.
    pub fn exp2(x: f32) -> f32 {
        flush(f64::from(flush(x)).exp2() as f32)
    }

    /// `lg2.approx.f32`, rounded correctly but for double rounding; the hardware is within 2^-22 of it.
    pub fn log2(x: f32) -> f32 {
        f64::from(x).log2() as f32
    }

    /// `.ftz`: subnormals are 0 of their sign.
    fn flush(x: f32) -> f32 {
        if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
    }
}
