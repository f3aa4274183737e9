//! The arithmetic of asynchronous products: of a warpgroup's, 64 x N x 32 bytes, and the parts that tcgen05 shares.

use half::f16 as Half;
use std::vec;
use std::vec::Vec;

use super::descriptor::STEP;
use crate::formats::{e4m3, f16};

/// Rows of D.
pub(super) const ROWS: usize = 64;

/// Element type of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    /// binary16.
    F16,
    /// FP8.
    E4m3,
    /// Signed bytes.
    S8,
}

/// Element type of the accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulator {
    /// Two columns in a register, rounded after every product.
    F16,
    /// One column in a register.
    F32,
    /// One column in a register, exact.
    S32,
}

/// A product's shape and types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Its name in PTX, behind `wgmma.mma_async.sync.aligned.`.
    pub(crate) name: &'static str,
    /// Columns of D.
    pub(crate) columns: usize,
    /// Types of A and B.
    pub(crate) element: Element,
    /// Type of D.
    pub(crate) accumulator: Accumulator,
}

impl Kind {
    /// Registers of D in a thread.
    pub(super) fn registers(self) -> usize {
        match self.accumulator {
            Accumulator::F16 => self.columns / 4,
            Accumulator::F32 | Accumulator::S32 => self.columns / 2,
        }
    }
}

/// The elements of [`STEP`] bytes of one row, as f32 (of bytes exact).
pub(super) fn decode(element: Element, row: &[u8; STEP as usize], into: &mut Vec<f32>) {
    match element {
        Element::F16 => {
            into.extend(row.as_chunks::<2>().0.iter().map(|b| Half::from_le_bytes(*b).to_f32()));
        }
        Element::E4m3 => into.extend(row.iter().map(|b| e4m3::decode(*b))),
        Element::S8 => into.extend(row.iter().map(|b| f32::from(*b as i8))),
    }
}

/// D as f32 values or integers, [`ROWS`] x columns, from and to the registers of 128 threads.
///
/// Register i of thread t in warp w: figure of PTX ISA 9.7.15.5.1.1, rows 16w + t/4 and 8 below, columns
/// 8j + 2(t%4) + {0, 1}.
fn each_register(kind: Kind, mut f: impl FnMut(usize, usize, usize)) {
    for thread in 0..128 {
        let row = thread / 32 * 16 + thread % 32 / 4;
        let column = thread % 4 * 2;
        for register in 0..kind.registers() {
            let at = match kind.accumulator {
                Accumulator::F16 => (row + register % 2 * 8) * kind.columns + register / 2 * 8 + column,
                Accumulator::F32 | Accumulator::S32 => {
                    (row + register / 2 % 2 * 8) * kind.columns + register / 4 * 8 + column + register % 2
                }
            };
            f(thread, register, at);
        }
    }
}

/// The sums of a k step in f32: `a` and `b` are rows of `k` elements, the result is [rows of a, rows of b].
pub(super) fn step(k: usize, a: &[f32], b: &[f32]) -> Vec<f32> {
    let n = b.len() / k;
    let mut columns = vec![0.0f32; k * n];
    for (j, row) in b.chunks_exact(k).enumerate() {
        row.iter().enumerate().for_each(|(i, x)| columns[i * n + j] = *x);
    }
    let mut step = vec![0.0f32; a.len() / k * n];
    for (row, out) in a.chunks_exact(k).zip(step.chunks_exact_mut(n)) {
        for (x, b) in row.iter().zip(columns.chunks_exact(n)) {
            out.iter_mut().zip(b).for_each(|(o, b)| *o += x * b);
        }
    }
    step
}

/// An element of D after the sum of a k step was added; an f16 is in the lower half.
pub(super) fn add(accumulator: Accumulator, old: u32, step: f32) -> u32 {
    match accumulator {
        Accumulator::F16 => {
            let sum = f16::round(Half::from_bits(old as u16).to_f32() + step);
            u32::from(Half::from_f32(sum).to_bits())
        }
        Accumulator::F32 => (f32::from_bits(old) + step).to_bits(),
        // 32 products of two bytes are exact in f32.
        Accumulator::S32 => (old as i32).wrapping_add(step as i32) as u32,
    }
}

/// D = A B (+ D). `a` is [`ROWS`] rows and `b` N rows of elements along K, `d` the registers of 128 threads.
///
/// A step's products are summed in f32 and added to D, which is rounded where it is f16. The hardware keeps some
/// more or fewer bits on the way (of FP8 about 14 survive each addition).
pub(super) fn multiply(kind: Kind, a: &[f32], b: &[f32], d: &mut [Vec<u32>], accumulate: bool) {
    let step = step(a.len() / ROWS, a, b);
    each_register(kind, |thread, register, at| {
        let old = if accumulate { d[thread][register] } else { 0 };
        let low = add(kind.accumulator, old, step[at]);
        d[thread][register] = match kind.accumulator {
            Accumulator::F16 => low | add(kind.accumulator, old >> 16, step[at + 1]) << 16,
            Accumulator::F32 | Accumulator::S32 => low,
        };
    });
}
