//! The warp's matrix product of 16-bit operands (PTX ISA 9.7.14.5.8, `mma.m16n8k16`), on every GPU from sm_80.
//!
//! Lane t holds, with g = t / 4 and q = t % 4: of A (16 x 16) rows g (registers 0, 2) and g + 8 (1, 3), columns
//! 2q + {0, 1} (registers 0, 1) and 8 more (2, 3); of B (16 x 8) column g, rows 2q + {0, 1} and 8 more; of D
//! (16 x 8) row g (0, 1) and g + 8 (2, 3), columns 2q + {0, 1}. A sum over k does not ask for its order: any
//! assignment of values to columns of A will do that B's rows share.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $types:literal) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// All 32 lanes execute it together.
            #[inline(always)]
            pub unsafe fn $name(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
                // SAFETY: the whole warp takes part.
                unsafe {
                    asm!(
                        concat!(
                            "mma.sync.aligned.m16n8k16.row.col.", $types,
                            " {{{0},{1},{2},{3}}}, {{{4},{5},{6},{7}}}, {{{8},{9}}}, {{{0},{1},{2},{3}}};"
                        ),
                        inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                        in(reg32) b[0], in(reg32) b[1], options(nomem, nostack)
                    )
                }
            }
        };
    }

    product!(
        /// D += A B for bf16, accumulated in f32.
        m16n8k16_f32_bf16,
        "f32.bf16.bf16.f32"
    );
    product!(
        /// D += A B for f16, accumulated in f32.
        m16n8k16_f32_f16,
        "f32.f16.f16.f32"
    );
}
