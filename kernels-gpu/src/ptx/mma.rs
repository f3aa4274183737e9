//! The warp's matrix products (PTX ISA 9.7.14.5, `mma`): 16-bit operands on every GPU from sm_80, signed bytes too, E4M3
//! from sm_89, with f16 accumulators from PTX 8.7, block-scaled E2M1 on sm_120a.
//!
//! Lane t holds, with g = t / 4 and q = t % 4, in registers of e elements (2 of 16 bits, 4 of 8, 8 of 4): of A (16 x 8e) rows g
//! (registers 0, 2) and g + 8 (1, 3), columns eq..eq + e (registers 0, 1) and 4e more (2, 3); of B (8e x 8) column g, rows
//! eq..eq + e and 4e more; of D (16 x 8) rows g and g + 8, columns 2q + {0, 1}: a register each, or both in one where D is
//! f16. A sum over k does not ask for its order: any assignment of values to columns of A will do that B's rows share.
//!
//! *Block scales* (9.7.14.3, `.scale_vec::4X`): a row of A and a column of B have four E4M3 scales along k, one for 16, the
//! first in the lowest byte of a register. Those of rows g and g + 8 of A are in lanes 4g + 2i and 4g + 2i + 1, those of column
//! g of B in lane 4g + i, where i is the selector of A (0, 1) or of B (0..4); the register of other lanes is not read.

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

    /// D += A B for E2M1 with block scales, accumulated in f32; `LANES_A` and `LANE_B` select the lanes whose scales are read.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    pub unsafe fn m16n8k64_f32_nvfp4<const LANES_A: u32, const LANE_B: u32>(
        d: &mut [f32; 4],
        a: [u32; 4],
        scales_a: u32,
        b: [u32; 2],
        scales_b: u32,
    ) {
        const { assert!(LANES_A < 2 && LANE_B < 4) }
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!(
                "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 \
                 {{{0},{1},{2},{3}}}, {{{4},{5},{6},{7}}}, {{{8},{9}}}, {{{0},{1},{2},{3}}}, \
                 {{{10}}}, {{0, {11}}}, {{{12}}}, {{0, {13}}};",
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3],
                in(reg32) b[0], in(reg32) b[1], in(reg32) scales_a, const LANES_A, in(reg32) scales_b, const LANE_B,
                options(nomem, nostack)
            )
        }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use half::{bf16 as Bf16, f16 as Half};

    use crate::emulation::instructions::{thread_index, warp, warp_wide};
    use crate::formats::{e2m1, e4m3, f16, nvfp4};

    /// The rows g and g + 8 of A and the columns 2q and 2q + 1 of B, of `K` values, that meet in this lane's D.
    #[track_caller]
    fn lines<const K: usize>(
        name: &str,
        a: [u32; 4],
        b: [u32; 2],
        value: fn(u32, usize) -> f32,
    ) -> [[[f32; K]; 2]; 2] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let all = warp_wide(name, 0, [pair(a[0], a[1]), pair(a[2], a[3]), pair(b[0], b[1])], false);
        let register = |lane: usize, i: usize| (all[lane][i / 2] >> (i % 2 * 32)) as u32;
        let (g, q) = (thread_index() as usize % 32 / 4, thread_index() as usize % 4);
        // Its four lanes hold as many values each, in one register and then in another.
        let elements = K / 8;
        let line = |first: usize, registers: [usize; 2]| -> [f32; K] {
            core::array::from_fn(|k| {
                let (half, quad) = (k / (4 * elements), k % (4 * elements) / elements);
                value(register(first + quad, registers[half]), k % elements)
            })
        };
        let rows = [line(4 * g, [0, 2]), line(4 * g, [1, 3])];
        [rows, [line(8 * q, [4, 5]), line(8 * q + 4, [4, 5])]]
    }

    /// A B at this lane's places of D; the products are summed in f32 in the order of k.
    #[track_caller]
    fn multiply<const K: usize>(
        name: &str,
        a: [u32; 4],
        b: [u32; 2],
        value: fn(u32, usize) -> f32,
    ) -> [f32; 4] {
        let [rows, columns] = lines::<K>(name, a, b, value);
        core::array::from_fn(|i| {
            let pairs = rows[i / 2].iter().zip(&columns[i % 2]);
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

    fn nibble(word: u32, part: usize) -> f32 {
        e2m1::decode((word >> (4 * part)) as u8)
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
        add(d, multiply::<16>("mma.m16n8k16.f32.bf16", a, b, brain));
    }

    /// D += A B for f16, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f32_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        add(d, multiply::<16>("mma.m16n8k16.f32.f16", a, b, half));
    }

    /// D += A B for f16, accumulated in f16.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k16_f16_f16(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
        add_f16(d, multiply::<16>("mma.m16n8k16.f16.f16", a, b, half));
    }

    /// D += A B for E4M3, accumulated in f32.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k32_f32_e4m3(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        add(d, multiply::<32>("mma.m16n8k32.f32.e4m3", a, b, byte));
    }

    /// D += A B for E4M3, accumulated in f16.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k32_f16_e4m3(d: &mut [u32; 2], a: [u32; 4], b: [u32; 2]) {
        add_f16(d, multiply::<32>("mma.m16n8k32.f16.e4m3", a, b, byte));
    }

    /// D += A B for signed bytes, exact.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k32_s32_s8(d: &mut [u32; 4], a: [u32; 4], b: [u32; 2]) {
        // 32 products of two bytes are exact in f32.
        let product = multiply::<32>("mma.m16n8k32.s32.s8", a, b, signed);
        d.iter_mut().zip(product).for_each(|(d, p)| *d = d.wrapping_add(p as i32 as u32));
    }

    /// D += A B for E2M1 with block scales, accumulated in f32: exact sums of 16, scaled and added in the order of k.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn m16n8k64_f32_nvfp4<const LANES_A: u32, const LANE_B: u32>(
        d: &mut [f32; 4],
        a: [u32; 4],
        scales_a: u32,
        b: [u32; 2],
        scales_b: u32,
    ) {
        const { assert!(LANES_A < 2 && LANE_B < 4) }
        const NAME: &str = "mma.m16n8k64.nvfp4";
        let [rows, columns] = lines::<64>(NAME, a, b, nibble);
        let both = u64::from(scales_a) | u64::from(scales_b) << 32;
        let scales = warp(NAME, LANES_A << 2 | LANE_B, both, false);
        let (g, q) = (thread_index() as usize % 32 / 4, thread_index() as usize % 4);
        for (i, d) in d.iter_mut().enumerate() {
            let of_row = scales[4 * g + 2 * LANES_A as usize + i / 2] as u32;
            let of_column = (scales[4 * (2 * q + i % 2) + LANE_B as usize] >> 32) as u32;
            // The format has no sign: its top bit is not looked at.
            let scale = |word: u32, block: usize| e4m3::decode(word.to_le_bytes()[block] & 0x7f);
            let blocks = rows[i / 2].chunks(nvfp4::BLOCK).zip(columns[i % 2].chunks(nvfp4::BLOCK));
            *d += blocks.enumerate().fold(0.0, |sum, (block, (a, b))| {
                let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                sum + dot * scale(of_row, block) * scale(of_column, block)
            });
        }
    }
}
