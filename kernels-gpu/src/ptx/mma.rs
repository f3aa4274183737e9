//! The warp's matrix products (PTX ISA 9.7.14.5, `mma`): 16-bit operands on every GPU from sm_80, signed bytes too, E4M3
//! from sm_89, with f16 accumulators from PTX 8.7.
//!
//! Lane t holds, with g = t / 4 and q = t % 4, in registers of e elements (2 of 16 bits, 4 of 8): of A (16 x 8e) rows g
//! (registers 0, 2) and g + 8 (1, 3), columns eq..eq + e (registers 0, 1) and 4e more (2, 3); of B (8e x 8) column g, rows
//! eq..eq + e and 4e more; of D (16 x 8) rows g and g + 8, columns 2q + {0, 1}: a register each, or both in one where D is
//! f16. A sum over k does not ask for its order: any assignment of values to columns of A will do that B's rows share.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $shape_and_types:literal, [$d:ty; 4]) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// All 32 lanes execute it together.
            #[inline(always)]
            pub unsafe fn $name(d: &mut [$d; 4], a: [u32; 4], b: [u32; 2]) {
                // SAFETY: the whole warp takes part.
                unsafe {
                    asm!(
                        concat!(
                            "mma.sync.aligned.", $shape_and_types,
                            " {{{0},{1},{2},{3}}}, {{{4},{5},{6},{7}}}, {{{8},{9}}}, {{{0},{1},{2},{3}}};"
                        ),
                        inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                        in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                        in(reg32) b[0], in(reg32) b[1], options(nomem, nostack)
                    )
                }
            }
        };
        ($(#[$doc:meta])* $name:ident, $shape_and_types:literal, packed) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// All 32 lanes execute it together.
            #[inline(always)]
            pub unsafe fn $name(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
                // SAFETY: the whole warp takes part.
                unsafe {
                    asm!(
                        concat!(
                            "mma.sync.aligned.", $shape_and_types,
                            " {{{0},{1}}}, {{{2},{3},{4},{5}}}, {{{6},{7}}}, {{{0},{1}}};"
                        ),
                        inout(reg32) d[0], inout(reg32) d[1],
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
        "m16n8k16.row.col.f32.bf16.bf16.f32",
        [f32; 4]
    );
    product!(
        /// D += A B for f16, accumulated in f32.
        m16n8k16_f32_f16,
        "m16n8k16.row.col.f32.f16.f16.f32",
        [f32; 4]
    );
    product!(
        /// D += A B for f16, accumulated in f16.
        m16n8k16_f16_f16,
        "m16n8k16.row.col.f16.f16.f16.f16",
        packed
    );
    product!(
        /// D += A B for E4M3, accumulated in f32.
        m16n8k32_f32_e4m3,
        "m16n8k32.row.col.f32.e4m3.e4m3.f32",
        [f32; 4]
    );
    product!(
        /// D += A B for E4M3, accumulated in f16.
        m16n8k32_f16_e4m3,
        "m16n8k32.row.col.f16.e4m3.e4m3.f16",
        packed
    );
    product!(
        /// D += A B for signed bytes, exact.
        m16n8k32_s32_s8,
        "m16n8k32.row.col.s32.s8.s8.s32",
        [u32; 4]
    );
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use half::{bf16 as Bf16, f16 as Half};

    use crate::emulation::instructions::{thread_index, warp_wide};
    use crate::formats::{e4m3, f16};

    /// A B at this lane's places of D, rows g and g + 8 by columns 2q and 2q + 1. A register holds `elements` values; the
    /// products are summed in f32 in the order of k.
    #[track_caller]
    fn multiply(
        name: &str,
        a: [u32; 4],
        b: [u32; 2],
        elements: usize,
        value: fn(u32, usize) -> f32,
    ) -> [f32; 4] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let all = warp_wide(name, 0, [pair(a[0], a[1]), pair(a[2], a[3]), pair(b[0], b[1])], false);
        let register = |lane: usize, i: usize| (all[lane][i / 2] >> (i % 2 * 32)) as u32;
        let (g, q) = (thread_index() as usize % 32 / 4, thread_index() as usize % 4);
        // A row or column along k: its four lanes hold `elements` values each, in one register and then in another.
        let line = |first: usize, registers: [usize; 2]| -> [f32; 32] {
            core::array::from_fn(|k| match k {
                k if k >= 8 * elements => 0.0,
                k => {
                    let (half, quad) = (k / (4 * elements), k % (4 * elements) / elements);
                    value(register(first + quad, registers[half]), k % elements)
                }
            })
        };
        let rows = [line(4 * g, [0, 2]), line(4 * g, [1, 3])];
        let columns = [line(8 * q, [4, 5]), line(8 * q + 4, [4, 5])];
        core::array::from_fn(|i| {
            let pairs = rows[i / 2].iter().zip(&columns[i % 2]).take(8 * elements);
            pairs.fold(0.0, |sum, (a, b)| sum + a * b)
        })
    }

    fn half(word: u32, part: usize) -> f32 {
        Half::from_bits((word >> (16 * part)) as u16).to_f32()
    }

    fn brain(word: u32, part: usize) -> f32 {
        Bf16::from_bits((word >> (16 * part)) as u16).to_f32()
    }

    fn byte(word: u32, part: usize) -> f32 {
        e4m3::decode(word.to_le_bytes()[part])
    }

    fn signed(word: u32, part: usize) -> f32 {
        f32::from(word.to_le_bytes()[part] as i8)
    }

    fn add(d: &mut [f32; 4], product: [f32; 4]) {
        d.iter_mut().zip(product).for_each(|(d, p)| *d += p);
    }

    /// Rounds once for every product, as the CPU backend does after every k step.
    fn add_f16(d: &mut [u32; 2], product: [f32; 4]) {
        for (d, p) in d.iter_mut().zip(product.as_chunks::<2>().0) {
            let sum = |i: usize| u32::from(Half::from_f32(f16::round(half(*d, i) + p[i])).to_bits());
            *d = sum(0) | sum(1) << 16;
        }
    }

    /// D += A B for bf16, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f32_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        add(d, multiply("mma.m16n8k16.f32.bf16", a, b, 2, brain));
    }

    /// D += A B for f16, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f32_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        add(d, multiply("mma.m16n8k16.f32.f16", a, b, 2, half));
    }

    /// D += A B for f16, accumulated in f16.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f16_f16(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
        add_f16(d, multiply("mma.m16n8k16.f16.f16", a, b, 2, half));
    }

    /// D += A B for E4M3, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k32_f32_e4m3(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        add(d, multiply("mma.m16n8k32.f32.e4m3", a, b, 4, byte));
    }

    /// D += A B for E4M3, accumulated in f16.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k32_f16_e4m3(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
        add_f16(d, multiply("mma.m16n8k32.f16.e4m3", a, b, 4, byte));
    }

    /// D += A B for signed bytes, exact.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k32_s32_s8(d: &mut [u32; 4], a: [u32; 4], b: [u32; 2]) {
        // 32 products of two bytes are exact in f32.
        let product = multiply("mma.m16n8k32.s32.s8", a, b, 4, signed);
        d.iter_mut().zip(product).for_each(|(d, p)| *d = d.wrapping_add(p as i32 as u32));
    }
}
