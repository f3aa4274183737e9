//! What the preprocessing kernels read: strided 16-bit tensors, in chunks of 8 channels.
//!
//! A *chunk* is 16 bytes, one vector access; a row of 128 channels has 16. Kernels work on 128 channels; those
//! from `head_dim` on read as zeros. Element (batch, head, token, channel) of a tensor lies at
//! `batch * strides[0] + head * strides[1] + token * strides[2] + channel`, in elements and 64 bits; base and
//! strides are multiples of 8 elements (16 bytes), and so is `head_dim`, at most 128.

use crate::ptx::convert;
use crate::ptx::extrema::{max_nan_bf16x2, min_nan_bf16x2, min_nan_f16x2};
use crate::ptx::f16x2::max_nan as max_nan_f16x2;
use crate::ptx::memory::load_global_v4;
use crate::ptx::mma;
use crate::ptx::stream;

/// Channels of a chunk.
pub const CHUNK: u32 = 8;
/// Chunks of a row.
pub const CHUNKS: u32 = 16;
/// Channels of a row.
pub const CHANNELS: u32 = CHUNK * CHUNKS;

/// A 16-bit element type. Pairs lie in a register, the lower channel in the lower half.
pub trait Element {
    /// Bits of an exponent field that is all ones: a NaN or an infinity.
    const EXPONENT: u32;
    /// Both values in f32; exact.
    fn unpack(pair: u32) -> [f32; 2];
    /// Two values, rounded to nearest even.
    fn pack(low: f32, high: f32) -> u32;
    /// The larger of each half; NaN stays.
    fn max(a: u32, b: u32) -> u32;
    /// The smaller of each half; NaN stays.
    fn min(a: u32, b: u32) -> u32;
    /// Plus infinity in both halves.
    const INFINITY: u32 = Self::EXPONENT * 0x1_0001;
    /// Minus infinity in both halves.
    const MINUS_INFINITY: u32 = Self::INFINITY | 0x8000_8000;
    /// D += A B of [`mma`].
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    unsafe fn multiply(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
}

/// bfloat16.
pub struct Bf16;

impl Element for Bf16 {
    const EXPONENT: u32 = 0x7f80;

    #[inline(always)]
    fn unpack(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }
    #[inline(always)]
    fn pack(low: f32, high: f32) -> u32 {
        convert::bf16x2(low, high)
    }
    #[inline(always)]
    fn max(a: u32, b: u32) -> u32 {
        max_nan_bf16x2(a, b)
    }
    #[inline(always)]
    fn min(a: u32, b: u32) -> u32 {
        min_nan_bf16x2(a, b)
    }
    #[inline(always)]
    unsafe fn multiply(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the caller's contract.
        unsafe { mma::m16n8k16_f32_bf16(d, a, b) }
    }
}

/// binary16.
pub struct F16;

impl Element for F16 {
    const EXPONENT: u32 = 0x7c00;

    #[inline(always)]
    fn unpack(pair: u32) -> [f32; 2] {
        let (low, high) = convert::f32_of_f16x2(pair);
        [low, high]
    }
    #[inline(always)]
    fn pack(low: f32, high: f32) -> u32 {
        convert::f16x2(low, high)
    }
    #[inline(always)]
    fn max(a: u32, b: u32) -> u32 {
        max_nan_f16x2(a, b)
    }
    #[inline(always)]
    fn min(a: u32, b: u32) -> u32 {
        min_nan_f16x2(a, b)
    }
    #[inline(always)]
    unsafe fn multiply(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the caller's contract.
        unsafe { mma::m16n8k16_f32_f16(d, a, b) }
    }
}

/// The largest magnitudes of a chunk and of `so_far`, by halves; NaN stays.
#[inline(always)]
pub fn largest<E: Element>(so_far: u32, chunk: &[u32; 4]) -> u32 {
    chunk.iter().fold(so_far, |m, &pair| E::max(m, magnitudes(pair)))
}

/// Both values of a pair without their signs.
#[inline(always)]
fn magnitudes(pair: u32) -> u32 {
    pair & 0x7fff_7fff
}

/// Whether a pair holds a NaN or an infinity.
#[inline(always)]
pub fn has_nonfinite<E: Element>(pair: u32) -> bool {
    let field = E::EXPONENT;
    pair & field == field || (pair >> 16) & field == field
}

/// The values of a chunk in f32.
#[inline(always)]
pub fn unpack_chunk<E: Element>(chunk: [u32; 4]) -> [f32; CHUNK as usize] {
    let mut values = [0.0; CHUNK as usize];
    for i in 0..chunk.len() {
        [values[2 * i], values[2 * i + 1]] = E::unpack(chunk[i]);
    }
    values
}

/// 8 f32 of a chunk from global memory at a multiple of 16 bytes.
///
/// # Safety
/// 32 readable bytes that nobody writes while the kernel runs.
#[inline(always)]
pub unsafe fn load_f32_chunk(from: *const f32) -> [f32; CHUNK as usize] {
    // SAFETY: the range is the caller's.
    let (low, high) = unsafe { (load_global_v4(from.cast()), load_global_v4(from.add(4).cast())) };
    let mut values = [0.0; CHUNK as usize];
    for i in 0..4 {
        values[i] = f32::from_bits(low[i]);
        values[4 + i] = f32::from_bits(high[i]);
    }
    values
}

/// Writes 8 f32 of a chunk to global memory at a multiple of 16 bytes.
///
/// # Safety
/// 32 writable bytes.
#[inline(always)]
pub unsafe fn store_f32_chunk(to: *mut f32, x: &[f32; CHUNK as usize]) {
    let bits = |i: usize| [x[i].to_bits(), x[i + 1].to_bits(), x[i + 2].to_bits(), x[i + 3].to_bits()];
    // SAFETY: the range is the caller's.
    unsafe {
        crate::ptx::memory::store_global_v4(to.cast(), bits(0));
        crate::ptx::memory::store_global_v4(to.add(4).cast(), bits(4));
    }
}

/// The rows of one (batch, head).
#[derive(Clone, Copy)]
pub struct Head {
    base: *const u8,
    token_bytes: i64,
    head_dim: u32,
}

impl Head {
    /// The head of a tensor with these strides (batch, head, token; in elements).
    #[inline(always)]
    pub fn new(tensor: *const u8, strides: [i64; 3], batch: u32, head: u32, head_dim: u32) -> Self {
        let at = batch as i64 * strides[0] + head as i64 * strides[1];
        Self { base: tensor.wrapping_offset(2 * at as isize), token_bytes: 2 * strides[2], head_dim }
    }

    /// Whether a chunk holds channels of the tensor.
    #[inline(always)]
    pub fn has(&self, chunk: u32) -> bool {
        chunk * CHUNK < self.head_dim
    }

    /// A chunk of a token; zeros from `head_dim` on, and unless it is `wanted`.
    ///
    /// # Safety
    /// A wanted token is one of the tensor's.
    #[inline(always)]
    pub unsafe fn load(&self, token: u32, chunk: u32, wanted: bool) -> [u32; 4] {
        let at = token as i64 * self.token_bytes + chunk as i64 * 16;
        // SAFETY: inside the tensor, which no preprocessing kernel writes.
        unsafe { stream::load_v4_if(wanted & self.has(chunk), self.base.wrapping_offset(at as isize)) }
    }
}

/// Tokens that count of a batch.
///
/// # Safety
/// `kv_lens` is null or has a word for the batch.
#[inline(always)]
pub unsafe fn valid_tokens(kv_lens: *const u32, batch: u32, kv_tokens: u32) -> u32 {
    if kv_lens.is_null() {
        return kv_tokens;
    }
    // SAFETY: one word a batch by contract.
    unsafe { *kv_lens.add(batch as usize) }.min(kv_tokens)
}

/// The token at a position of a head's order, a null order being the sequence. Without meaning unless `wanted`.
///
/// # Safety
/// The order covers a wanted position.
#[inline(always)]
pub unsafe fn token_at(order: *const u32, position: u32, wanted: bool) -> u32 {
    // SAFETY: covered by contract.
    let token =
        unsafe { stream::load_u32_if(wanted & !order.is_null(), order.wrapping_add(position as usize)) };
    if order.is_null() { position } else { token }
}

/// Visits one chunk of the tokens at `count` positions from `first` on, in order, with 8 loads in flight.
///
/// # Safety
/// The order covers the positions.
#[inline(always)]
pub unsafe fn walk(
    head: &Head,
    chunk: u32,
    order: *const u32,
    first: u32,
    count: u32,
    mut visit: impl FnMut(u32, [u32; 4]),
) {
    const AHEAD: u32 = 8;
    let mut position = first;
    let end = first + count;
    // SAFETY: positions below `first + count`.
    unsafe {
        while position + AHEAD <= end {
            let mut tokens = [0; AHEAD as usize];
            for (i, token) in tokens.iter_mut().enumerate() {
                *token = token_at(order, position + i as u32, true);
            }
            let mut chunks = [[0; 4]; AHEAD as usize];
            for (chunk_of, &token) in chunks.iter_mut().zip(&tokens) {
                *chunk_of = head.load(token, chunk, true);
            }
            for (&token, &chunk) in tokens.iter().zip(&chunks) {
                visit(token, chunk);
            }
            position += AHEAD;
        }
        while position < end {
            let token = token_at(order, position, true);
            visit(token, head.load(token, chunk, true));
            position += 1;
        }
    }
}

/// Turns the 4 interleaved pairs of a chunk by the angles of the token.
///
/// # Safety
/// `cos` and `sin` are tables `[tokens, head_dim / 2]` that hold the token, and the chunk is below `head_dim`.
#[inline(always)]
pub unsafe fn turn(
    x: &mut [f32; CHUNK as usize],
    cos: *const f32,
    sin: *const f32,
    token: u32,
    head: &Head,
    chunk: u32,
) {
    let at = token as usize * (head.head_dim as usize / 2) + chunk as usize * (CHUNK as usize / 2);
    // SAFETY: 4 angles of the token; rows of head_dim / 2 f32 are multiples of 16 bytes.
    let (c, s) = unsafe { (load_global_v4(cos.add(at).cast()), load_global_v4(sin.add(at).cast())) };
    for i in 0..4 {
        let (c, s) = (f32::from_bits(c[i]), f32::from_bits(s[i]));
        let (a, b) = (x[2 * i], x[2 * i + 1]);
        (x[2 * i], x[2 * i + 1]) = (a * c - b * s, a * s + b * c);
    }
}
