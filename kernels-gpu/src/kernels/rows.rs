//! A row of Q or K in the registers of four lanes: rotation, scales and codes.
//!
//! Lane l of a quad holds the chunks l, l + 4, l + 8 and l + 12 of its row, so that a load or a store of the four
//! lanes covers 64 bytes in a row. The low 3 bits of a channel then number a value inside a chunk, the next 2 the
//! lane and the top 2 the chunk: of the 7 stages of a rotation over 128 channels, 5 stay inside a thread.

use super::input::{CHUNK, Element, Head, load_f32_chunk, turn, unpack_chunk};
use crate::formats::int8;
use crate::numerics::hadamard;
use crate::ptx::collective::shuffle_xor;
use crate::ptx::convert::{self, fma};
use crate::ptx::memory::store_global_v4;
use crate::ptx::quotient::correct_quotient;
use crate::ptx::stream::store_v2;

/// Lanes that share a row.
pub const LANES: u32 = 4;
/// Chunks of a lane.
pub const OWN: usize = 4;
/// Channels of a lane.
pub const VALUES: usize = OWN * CHUNK as usize;

/// The part of a row that one lane holds.
#[derive(Clone, Copy)]
pub struct Part {
    /// Values, chunk by chunk.
    pub x: [f32; VALUES],
    /// The lane in its quad.
    pub lane: u32,
}

impl Part {
    /// The chunk that values 8 `i`.. are of.
    #[inline(always)]
    pub fn chunk(&self, i: usize) -> u32 {
        self.lane + LANES * i as u32
    }

    /// Loads the row of a token, zeros unless it is `wanted`.
    ///
    /// # Safety
    /// A wanted token is one of the head's.
    #[inline(always)]
    pub unsafe fn load(head: &Head, token: u32, lane: u32, wanted: bool) -> [[u32; 4]; OWN] {
        let mut raw = [[0; 4]; OWN];
        for (i, raw) in raw.iter_mut().enumerate() {
            // SAFETY: a token of the head.
            *raw = unsafe { head.load(token, lane + LANES * i as u32, wanted) };
        }
        raw
    }

    /// The values of what [`load`](Self::load) returned.
    #[inline(always)]
    pub fn unpack<E: Element>(raw: &[[u32; 4]; OWN], lane: u32) -> Self {
        let mut x = [0.0; VALUES];
        for (x, &raw) in x.as_chunks_mut().0.iter_mut().zip(raw) {
            *x = unpack_chunk::<E>(raw);
        }
        Self { x, lane }
    }

    /// RoPE with the angles of the token; null tables change nothing.
    ///
    /// # Safety
    /// The tables hold the token.
    #[inline(always)]
    pub unsafe fn turn(&mut self, cos: *const f32, sin: *const f32, token: u32, head: &Head) {
        if cos.is_null() {
            return;
        }
        let lane = self.lane;
        for (i, x) in self.x.as_chunks_mut::<{ CHUNK as usize }>().0.iter_mut().enumerate() {
            let chunk = lane + LANES * i as u32;
            if head.has(chunk) {
                // SAFETY: angles of the token and of a chunk below head_dim.
                unsafe { turn(x, cos, sin, token, head, chunk) }
            }
        }
    }

    /// x -= mean, 128 values of which this lane takes its own.
    ///
    /// # Safety
    /// 128 readable f32 at a multiple of 16 bytes.
    #[inline(always)]
    pub unsafe fn subtract(&mut self, mean: *const f32) {
        let lane = self.lane;
        for (i, x) in self.x.as_chunks_mut::<{ CHUNK as usize }>().0.iter_mut().enumerate() {
            // SAFETY: chunks of the 128 values.
            let mean = unsafe { load_f32_chunk(mean.add(((lane + LANES * i as u32) * CHUNK) as usize)) };
            x.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
        }
    }

    /// The inner product with 128 values: every lane adds its own in the order of its channels, each product
    /// fused into the sum; then lanes 0 + 1 and 2 + 3, then both.
    ///
    /// # Safety
    /// 128 readable f32 at a multiple of 16 bytes; all lanes of the warp execute it together.
    #[inline(always)]
    pub unsafe fn dot(&self, with: *const f32) -> f32 {
        let mut sum = 0.0;
        // SAFETY: chunks of the 128 values; the whole warp takes part.
        unsafe {
            for (i, x) in self.x.as_chunks::<{ CHUNK as usize }>().0.iter().enumerate() {
                let with = load_f32_chunk(with.add((self.chunk(i) * CHUNK) as usize));
                for (&x, &with) in x.iter().zip(&with) {
                    sum = fma(x, with, sum);
                }
            }
            sum += f32::from_bits(shuffle_xor::<1>(sum.to_bits()));
            sum + f32::from_bits(shuffle_xor::<2>(sum.to_bits()))
        }
    }

    /// The rotation of [`hadamard::rotate`] over the first `length` channels (0, or a power of two from 16 to
    /// 128): the same operations in the same order, hence the same bits.
    ///
    /// # Safety
    /// All lanes of the warp execute it together, with the same length.
    #[inline(always)]
    pub unsafe fn rotate(&mut self, length: u32) {
        if length == 0 {
            return;
        }
        self.butterflies::<1>();
        self.butterflies::<2>();
        self.butterflies::<4>();
        // SAFETY: the whole warp takes part.
        unsafe {
            self.butterflies_across::<1>();
            if length > 16 {
                self.butterflies_across::<2>();
            }
        }
        if length > 32 {
            self.butterflies::<8>();
        }
        if length > 64 {
            self.butterflies::<16>();
        }
        let norm = hadamard::norm(length as usize);
        self.x.iter_mut().for_each(|x| *x *= norm);
    }

    /// (a, b) <- (a + b, a - b) on values that lie `STRIDE` apart in this thread.
    #[inline(always)]
    fn butterflies<const STRIDE: usize>(&mut self) {
        for low in 0..VALUES {
            if low & STRIDE == 0 {
                let (a, b) = (self.x[low], self.x[low | STRIDE]);
                (self.x[low], self.x[low | STRIDE]) = (a + b, a - b);
            }
        }
    }

    /// The same on values of lanes that lie `MASK` apart.
    #[inline(always)]
    unsafe fn butterflies_across<const MASK: u32>(&mut self) {
        // As a product with a sign fused into the sum, which rounds as the sum or the difference does.
        let sign = if self.lane & MASK == 0 { 1.0 } else { -1.0 };
        for x in &mut self.x {
            // SAFETY: the whole warp takes part.
            let other = f32::from_bits(unsafe { shuffle_xor::<MASK>(x.to_bits()) });
            *x = fma(sign, *x, other);
        }
    }

    /// The largest magnitude of this lane; NaN does not count.
    #[inline(always)]
    pub fn amax(&self) -> f32 {
        self.x.iter().fold(0.0f32, |amax, x| amax.max(x.abs()))
    }

    /// The largest magnitude of the row.
    ///
    /// # Safety
    /// All lanes of the warp execute it together.
    #[inline(always)]
    pub unsafe fn row_amax(&self) -> f32 {
        let m = self.amax();
        // SAFETY: the whole warp takes part.
        unsafe {
            let m = m.max(f32::from_bits(shuffle_xor::<1>(m.to_bits())));
            m.max(f32::from_bits(shuffle_xor::<2>(m.to_bits())))
        }
    }
}

/// What a row becomes.
pub trait Code {
    /// Rows of one scale group carry its INT8 scale; otherwise values are multiplied by `side` alone.
    const INT8: bool;
    /// Bytes of a value.
    const BYTES: usize;
    /// Magnitudes above it are outside the format.
    const LIMIT: f32;
    /// Writes 8 values to where their chunk lies.
    ///
    /// # Safety
    /// 8 * [`BYTES`](Self::BYTES) writable bytes at a multiple of as many.
    unsafe fn store(to: *mut u8, x: &[f32; CHUNK as usize]);
}

/// FP16.
pub struct Half;

impl Code for Half {
    const INT8: bool = false;
    const BYTES: usize = 2;
    const LIMIT: f32 = crate::formats::f16::MAX;

    #[inline(always)]
    unsafe fn store(to: *mut u8, x: &[f32; CHUNK as usize]) {
        let pair = |i: usize| convert::f16x2(x[2 * i], x[2 * i + 1]);
        // SAFETY: the caller's contract.
        unsafe { store_global_v4(to, [pair(0), pair(1), pair(2), pair(3)]) }
    }
}

/// FP16 with BF16's 8 significant bits: [`round_key`](crate::formats::f16::round_key).
pub struct HalfKey;

impl Code for HalfKey {
    const INT8: bool = false;
    const BYTES: usize = 2;
    const LIMIT: f32 = crate::formats::f16::KEY_MAX;

    #[inline(always)]
    unsafe fn store(to: *mut u8, x: &[f32; CHUNK as usize]) {
        let mut keys = *x;
        for pair in keys.as_chunks_mut::<2>().0 {
            let rounded = convert::bf16x2(pair[0], pair[1]);
            *pair = [rounded << 16, rounded & 0xffff_0000].map(f32::from_bits);
        }
        // SAFETY: the caller's contract.
        unsafe { Half::store(to, &keys) }
    }
}

/// E4M3.
pub struct E4m3;

/// Four E4M3 bytes.
#[inline(always)]
pub fn e4m3x4(x: [f32; 4]) -> u32 {
    convert::e4m3x2(x[0], x[1]) as u32 | (convert::e4m3x2(x[2], x[3]) as u32) << 16
}

impl Code for E4m3 {
    const INT8: bool = false;
    const BYTES: usize = 1;
    const LIMIT: f32 = crate::formats::e4m3::MAX;

    #[inline(always)]
    unsafe fn store(to: *mut u8, x: &[f32; CHUNK as usize]) {
        let words = [e4m3x4([x[0], x[1], x[2], x[3]]), e4m3x4([x[4], x[5], x[6], x[7]])];
        // SAFETY: the caller's contract.
        unsafe { store_v2(to, words) }
    }
}

/// INT8; values are codes already.
pub struct Int8;

impl Code for Int8 {
    const INT8: bool = true;
    const BYTES: usize = 1;
    const LIMIT: f32 = f32::INFINITY;

    #[inline(always)]
    unsafe fn store(to: *mut u8, x: &[f32; CHUNK as usize]) {
        // Adding 1.5 * 2^23 leaves a small integer in the low bits, as two's complement.
        let byte = |i: usize| (x[i] + 12_582_912.0).to_bits() & 0xff;
        let word = |i: usize| byte(i) | byte(i + 1) << 8 | byte(i + 2) << 16 | byte(i + 3) << 24;
        // SAFETY: the caller's contract.
        unsafe { store_v2(to, [word(0), word(4)]) }
    }
}

/// Division by one number many times, with the bits of an IEEE division.
///
/// A quotient is estimated with the reciprocal and corrected twice by its exact remainder: after the first
/// correction it is one of the two neighbours of the true quotient, after the second the nearer of them
/// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). Divisors so
/// small that a remainder could be subnormal are scaled up, together with what is divided, by a power of two;
/// quotients below 2^-60 may be off in their last bit (no code depends on it).
#[derive(Clone, Copy)]
pub struct Divisor {
    /// The divisor times [`up`](Self::up).
    pub scaled: f32,
    /// The reciprocal of that.
    pub reciprocal: f32,
    /// A power of two.
    pub up: f32,
}

impl Divisor {
    /// For `divisor` above 0.
    #[inline(always)]
    pub fn new(divisor: f32) -> Self {
        /// 2^64.
        const UP: f32 = 18_446_744_073_709_551_616.0;
        let up = if divisor < 1.0 / UP { UP } else { 1.0 };
        let scaled = divisor * up;
        Self { scaled, reciprocal: 1.0 / scaled, up }
    }

    /// Whether the divisor had to be scaled up.
    #[inline(always)]
    pub fn is_tiny(&self) -> bool {
        self.up != 1.0
    }

    /// `x / divisor`, the sign of a zero included, for a quotient that does not overflow.
    #[inline(always)]
    pub fn divide(&self, x: f32) -> f32 {
        self.divide_scaled(x * self.up)
    }

    /// The same for an `x` that is scaled up already, as any is unless the divisor [is tiny](Self::is_tiny).
    #[inline(always)]
    pub fn divide_scaled(&self, x: f32) -> f32 {
        let q = x * self.reciprocal;
        let q = correct_quotient(q, x, self.scaled, self.reciprocal);
        correct_quotient(q, x, self.scaled, self.reciprocal)
    }

    /// The INT8 code of `x` under this scale: [`int8::round_code`] for a scale above 0.
    #[inline(always)]
    pub fn int8_code(&self, x: f32) -> f32 {
        const ROUND: f32 = 12_582_912.0;
        let q = self.divide(x).min(int8::MAX).max(-int8::MAX);
        (q + ROUND) - ROUND
    }
}
