//! Minima and maxima that keep a NaN, of two 16-bit values in one register (PTX ISA 9.7.4.9 and 9.7.4.10) and of f32
//! (9.7.3.12); the maximum of f16 is [`f16x2::max_nan`](super::f16x2).

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

    /// `max.NaN.f32`
    #[inline(always)]
    pub fn max_nan_f32(a: f32, b: f32) -> f32 {
        let d: f32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!("max.NaN.f32 {}, {}, {};", out(reg32) d, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
        }
        d
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use half::{bf16 as Bf16, f16 as Half};

    /// Both halves through `f`; a NaN on either side becomes the one that the GPU makes.
    fn each(a: u32, b: u32, value: impl Fn(u16) -> f32, larger: bool) -> u32 {
        let half = |a: u16, b: u16| {
            let (x, y) = (value(a), value(b));
            // Equal values differ at most in the sign of zero: the larger is the one without.
            let first = if x == y { x.is_sign_positive() } else { x > y };
            match (x.is_nan() || y.is_nan(), first == larger) {
                (true, _) => 0x7fff,
                (false, true) => a,
                (false, false) => b,
            }
        };
        u32::from(half(a as u16, b as u16)) | u32::from(half((a >> 16) as u16, (b >> 16) as u16)) << 16
    }

    /// `max.NaN.bf16x2`
    pub fn max_nan_bf16x2(a: u32, b: u32) -> u32 {
        each(a, b, |x| Bf16::from_bits(x).to_f32(), true)
    }

    /// `min.NaN.bf16x2`
    pub fn min_nan_bf16x2(a: u32, b: u32) -> u32 {
        each(a, b, |x| Bf16::from_bits(x).to_f32(), false)
    }

    /// `min.NaN.f16x2`
    pub fn min_nan_f16x2(a: u32, b: u32) -> u32 {
        each(a, b, |x| Half::from_bits(x).to_f32(), false)
    }

    /// `max.NaN.f32`
    pub fn max_nan_f32(a: f32, b: f32) -> f32 {
        // +0 is above -0; the NaN is the one that the GPU makes.
        let first = a > b || a == b && a.is_sign_positive();
        match (a.is_nan() || b.is_nan(), first) {
            (true, _) => f32::from_bits(0x7fff_ffff),
            (false, true) => a,
            (false, false) => b,
        }
    }
}
