//! NVFP4: E2M1 elements in blocks of 16 along the reduction axis, two levels of scales.
//!
//! An element stands for `e2m1 * e4m3(block) * tensor`: the block scale is an E4M3 byte, the tensor
//! scale an `f32` per tensor (or per row, for probabilities). With `tensor = amax / (448 * 6)` the
//! largest block takes the largest E4M3 scale, and every element fits.
//!
//! The order of operations is part of the format, so that CPU and GPU agree bit for bit: true IEEE
//! divisions, `(amax / 6) / tensor` for the block scale, `x / (decode(byte) * tensor)` for an element.
//!
//! Finite input never decodes to NaN: blocks of zeros, and blocks too small to have a scale, decode to
//! 0. Input that is not finite never vanishes: E2M1 cannot hold it, so the block's scale byte becomes
//! the E4M3 NaN and the whole block decodes to NaN, on the Tensor Core too.

use super::{e2m1, e4m3};

/// Elements that share a block scale.
pub const BLOCK: usize = 16;

/// The second-level scale of a tensor whose largest magnitude is `amax`: `amax / (448 * 6)`.
#[inline]
pub fn tensor_scale(amax: f32) -> f32 {
    amax / (e4m3::MAX * e2m1::MAX)
}

/// The E4M3 byte of the scale of a block whose largest magnitude is `amax16`.
///
/// It is the byte of `(amax16 / 6) / tensor_scale`, but `0x01` (`2^-9`, the smallest) where that would
/// round to 0: the block's largest elements may survive that way. `0x00` for a block of zeros or a
/// tensor scale of 0, the NaN byte if either argument is not finite.
#[inline]
pub fn block_scale(amax16: f32, tensor_scale: f32) -> u8 {
    if !(amax16.is_finite() && tensor_scale.is_finite()) {
        return e4m3::NAN;
    }
    if amax16 == 0.0 || tensor_scale == 0.0 {
        return 0;
    }
    e4m3::encode(amax16 / e2m1::MAX / tensor_scale).max(1)
}

/// Quantizes a block: its scale byte, and its elements two to a byte, the even one in the low half.
#[inline]
pub fn quantize_block(block: &[f32; BLOCK], tensor_scale: f32) -> (u8, [u8; BLOCK / 2]) {
    let (byte, scale) = scales(block, tensor_scale);
    let nibble = |i: usize| e2m1::encode(element(block[i], scale));
    (byte, core::array::from_fn(|i| nibble(2 * i) | nibble(2 * i + 1) << 4))
}

/// The values that a block's bytes stand for.
#[inline]
pub fn dequantize_block(scale_byte: u8, packed: &[u8; BLOCK / 2], tensor_scale: f32) -> [f32; BLOCK] {
    let scale = e4m3::decode(scale_byte) * tensor_scale;
    core::array::from_fn(|i| e2m1::decode(packed[i / 2] >> (4 * (i % 2))) * scale)
}

/// Quantizes and dequantizes a block in place, without packing: the form for emulation on the CPU.
#[inline]
pub fn round_block(block: &mut [f32; BLOCK], tensor_scale: f32) {
    let (_, scale) = scales(block, tensor_scale);
    for x in block {
        *x = e2m1::round(element(*x, scale)) * scale;
    }
}

/// The block's scale byte and the `f32` that an E2M1 unit stands for.
#[inline(always)]
fn scales(block: &[f32; BLOCK], tensor_scale: f32) -> (u8, f32) {
    // As integers, because the bits of magnitudes order NaN above infinity above every number:
    // a float maximum would let NaN vanish.
    let amax = block.iter().fold(0, |amax, x| amax.max(x.to_bits() as i32 & i32::MAX));
    let byte = block_scale(f32::from_bits(amax as u32), tensor_scale);
    (byte, e4m3::decode(byte) * tensor_scale)
}

/// An element in units of its block; 0 where the scale is 0, so that no 0 / 0 arises.
#[inline(always)]
fn element(x: f32, scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { x / scale }
}
