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

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use half::{bf16 as Bf16, f16 as Half};

    use crate::emulation::instructions::{thread_index, warp};

    /// The two 16-bit values of each of `words` packed registers of every lane.
    fn exchange<const N: usize>(name: &str, words: [u32; N], value: fn(u16) -> f32) -> [[[f32; 2]; N]; 32] {
        let mut all = [[[0.0; 2]; N]; 32];
        for (pair, chunk) in words.chunks(2).enumerate() {
            let brought = u64::from(chunk[0]) | chunk.get(1).map_or(0, |w| u64::from(*w) << 32);
            for (all, bits) in all.iter_mut().zip(warp(name, pair as u32, brought, false)) {
                for (i, word) in [bits as u32, (bits >> 32) as u32].iter().take(chunk.len()).enumerate() {
                    all[2 * pair + i] = [value(*word as u16), value((word >> 16) as u16)];
                }
            }
        }
        all
    }

    /// D += A B; products are summed in f32 in the order of k and added to D.
    #[track_caller]
    fn multiply(name: &str, d: &mut [f32; 4], a: [u32; 4], b: [u32; 2], value: fn(u16) -> f32) {
        let (a, b) = (exchange(name, a, value), exchange(name, b, value));
        let (g, q) = (thread_index() as usize % 32 / 4, thread_index() as usize % 4);
        for (i, d) in d.iter_mut().enumerate() {
            let (row, column) = (i / 2, 2 * q + i % 2);
            let mut sum = 0.0;
            for k in 0..16 {
                let (half, quad, part) = (k / 8, k % 8 / 2, k % 2);
                sum += a[4 * g + quad][2 * half + row][part] * b[4 * column + quad][half][part];
            }
            *d += sum;
        }
    }

    /// D += A B for bf16, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f32_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        multiply("mma.m16n8k16.bf16", d, a, b, |x| Bf16::from_bits(x).to_f32());
    }

    /// D += A B for f16, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f32_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        multiply("mma.m16n8k16.f16", d, a, b, |x| Half::from_bits(x).to_f32());
    }
}
