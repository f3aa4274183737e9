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

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use half::f16 as Half;

    /// The f16 nearest to `x`, ties to even; every NaN is the one that the GPU makes.
    pub(crate) fn bits(x: f64) -> u16 {
        // Not `Half::from_f64`, which drops the lower half of the significand. By way of the f32 next to `x` whose last
        // bit is odd, unless `x` is an f32: that keeps every tie and side of a tie of f16.
        let near = x as f32;
        let inexact = f64::from(near) != x && near.is_finite() && near.to_bits() & 1 == 0;
        let away = f64::from(near).abs() < x.abs();
        let odd = near.to_bits().wrapping_add(if away { 1 } else { u32::MAX });
        let odd = if inexact { f32::from_bits(odd) } else { near };
        if x.is_nan() { 0x7fff } else { Half::from_f32(odd).to_bits() }
    }

    /// Both halves of two registers through `f`, exact in f64 before it rounds.
    fn each(a: u32, b: u32, f: impl Fn(f64, f64) -> f64) -> u32 {
        let value = |x: u32| Half::from_bits(x as u16).to_f64();
        u32::from(bits(f(value(a), value(b)))) | u32::from(bits(f(value(a >> 16), value(b >> 16)))) << 16
    }

    /// `add.rn.f16x2`
    pub fn add(a: u32, b: u32) -> u32 {
        each(a, b, |a, b| a + b)
    }

    /// `sub.rn.f16x2`
    pub fn sub(a: u32, b: u32) -> u32 {
        each(a, b, |a, b| a - b)
    }

    /// `mul.rn.f16x2`
    pub fn mul(a: u32, b: u32) -> u32 {
        each(a, b, |a, b| a * b)
    }

    /// `max.f16x2`: of a NaN and a number, the number.
    pub fn max(a: u32, b: u32) -> u32 {
        each(a, b, |a, b| if a.is_nan() || b.is_nan() { f64::max(a, b) } else { larger(a, b) })
    }

    /// `max.NaN.f16x2`: a NaN on either side stays.
    pub fn max_nan(a: u32, b: u32) -> u32 {
        each(a, b, |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { larger(a, b) })
    }

    /// The larger of two numbers, +0 above -0.
    fn larger(a: f64, b: f64) -> f64 {
        if a > b || a == b && b.is_sign_negative() { a } else { b }
    }

    /// `fma.rn.f16x2`: `a * b + c`, rounded once.
    pub fn fma(a: u32, b: u32, c: u32) -> u32 {
        let half = |a: u32, b: u32, c: u32| {
            let value = |x: u32| Half::from_bits(x as u16).to_f64();
            // The product is exact. The sum may not be: rounded to odd it still rounds right to f16.
            let (product, c) = (value(a) * value(b), value(c));
            let sum = product + c;
            let error = (product - (sum - c)) + (c - (sum - (sum - c)));
            let inexact = error != 0.0 && sum.is_finite() && sum.to_bits() & 1 == 0;
            let odd =
                if (error > 0.0) == (sum > 0.0) { sum.to_bits() + 1 } else { sum.to_bits().wrapping_sub(1) };
            u32::from(bits(if inexact { f64::from_bits(odd) } else { sum }))
        };
        half(a, b, c) | half(a >> 16, b >> 16, c >> 16) << 16
    }

    /// `fma.rn.sat.f16x2`: `a * b + c`, rounded once, then clamped to 0..=1; NaN becomes 0.
    pub fn fma_sat(a: u32, b: u32, c: u32) -> u32 {
        each(fma(a, b, c), 0, |x, _| if x > 0.0 { x.min(1.0) } else { 0.0 })
    }

    /// `ex2.approx.f16x2`, rounded correctly; the hardware is within 2^-9.9 of it.
    pub fn exp2(a: u32) -> u32 {
        each(a, a, |a, _| a.exp2())
    }
}
