//! Operand tiles of the attention kernels: what the quantizers write is exactly what Hopper's and the warp-level one load.
//!
//! Every tile is one contiguous run of bytes in global memory, already in the order that shared memory and the
//! matrix descriptors want, so that one 1-D bulk copy brings it in and no tensor map is needed. All functions
//! give byte offsets inside a tile; head_dim is 128 throughout.
//!
//! | tile | holds | bytes | layout |
//! |---|---|---|---|
//! | Q, FP16 | 64 rows | 16,384 | two halves of 64 channels; a half is 64 rows of 128 bytes, swizzled |
//! | Q, E4M3 | 64 rows | 8,192 | 64 rows of 128 bytes, swizzled |
//! | K, FP16 | 128 keys | 32,768 | two halves of 64 channels; a half is 128 rows of 128 bytes, swizzled |
//! | K, E4M3 | 128 keys | 16,384 | 128 rows of 128 bytes, swizzled |
//! | V^T, E4M3 | 128 tokens | 16,384 | 128 channels of 128 bytes, tokens in [`token_position`] order, swizzled |
//! | means, FP16 | 16 key blocks | 4,096 | core matrices of 8 channels x 8 blocks, see [`mean_offset`] |
//! | Q, NVFP4 | 64 rows | 4,608 | 64 rows of 64 bytes, [swizzled](swizzle_64); then 8 scales a row |
//! | K, NVFP4 | 128 keys | 9,216 | 128 rows of 64 bytes, swizzled, keys in [`key_row`] order; then 8 scales a row |
//! | V^T, NVFP4 | 128 tokens | 9,472 | 128 channels of 64 bytes, swizzled; then 8 scales a channel; then the f16 means of the channels |
//!
//! *Swizzled* is the 128-byte swizzle of the matrix descriptor: the 16-byte chunk c of row r lies at chunk
//! c ^ (r % 8) of its row. That of rows of 64 bytes is c ^ (r / 2 % 4). NVFP4 lies two elements to a byte, the even one in
//! the low half, and the scale of elements 16i on of a row is byte i of its 8.
//!
//! Per head the tiles follow each other without gaps: Q has 2 x ceil(q_tokens / 128) tiles, K and V have
//! ceil(kv_tokens / 128), means ceil(ceil(kv_tokens / 128) / 16). Padding keys are zeros in K and in V, padding
//! blocks zeros in the means; padding rows of Q may hold anything.

use crate::formats::nvfp4;

/// Channels of a head.
pub const HEAD_DIM: usize = 128;
/// Keys of a K or V tile, and tokens that share one block mean.
pub const KEYS: usize = 128;
/// Query rows of a Q tile.
pub const ROWS: usize = 64;
/// Key blocks whose means share a tile.
pub const MEAN_BLOCKS: usize = 16;

/// Bytes of a Q tile in FP16.
pub const Q_F16_BYTES: usize = ROWS * HEAD_DIM * 2;
/// Bytes of a Q tile in E4M3.
pub const Q_E4M3_BYTES: usize = ROWS * HEAD_DIM;
/// Bytes of a K tile in FP16.
pub const K_F16_BYTES: usize = KEYS * HEAD_DIM * 2;
/// Bytes of a K tile in E4M3.
pub const K_E4M3_BYTES: usize = KEYS * HEAD_DIM;
/// Bytes of a V^T tile.
pub const V_BYTES: usize = HEAD_DIM * KEYS;
/// Bytes of a row of 128 NVFP4 elements without its scales.
pub const FP4_ROW: usize = HEAD_DIM / 2;
/// Scales of a row of 128 NVFP4 elements.
pub const FP4_SCALES: usize = HEAD_DIM / nvfp4::BLOCK;
/// Bytes of a Q tile in NVFP4.
pub const Q_FP4_BYTES: usize = ROWS * (FP4_ROW + FP4_SCALES);
/// Bytes of a K tile in NVFP4.
pub const K_FP4_BYTES: usize = KEYS * (FP4_ROW + FP4_SCALES);
/// Where the means lie in a V^T tile in NVFP4.
pub const V_FP4_MEANS: usize = HEAD_DIM * (FP4_ROW + FP4_SCALES);
/// Bytes of a V^T tile in NVFP4.
pub const V_FP4_BYTES: usize = V_FP4_MEANS + HEAD_DIM * 2;
/// Bytes of a means tile.
pub const MEAN_BYTES: usize = MEAN_BLOCKS * HEAD_DIM * 2;

/// Byte `byte` of row `row` in a tile of swizzled 128-byte rows.
#[inline(always)]
pub const fn swizzle_128(row: usize, byte: usize) -> usize {
    row * 128 + ((byte / 16) ^ (row % 8)) * 16 + byte % 16
}

/// Byte `byte` of row `row` in a tile of swizzled 64-byte rows: 8 rows of one 16-byte chunk touch all banks.
#[inline(always)]
pub const fn swizzle_64(row: usize, byte: usize) -> usize {
    row * FP4_ROW + ((byte / 16) ^ (row / 2 % 4)) * 16 + byte % 16
}

/// Element (`row`, `channel`) of a Q tile in FP16.
#[inline(always)]
pub const fn q_tile_offset_f16(row: usize, channel: usize) -> usize {
    channel / 64 * (ROWS * 128) + swizzle_128(row, channel % 64 * 2)
}

/// Element (`row`, `channel`) of a Q tile in E4M3.
#[inline(always)]
pub const fn q_tile_offset_e4m3(row: usize, channel: usize) -> usize {
    swizzle_128(row, channel)
}

/// Element (`key`, `channel`) of a K tile in FP16.
#[inline(always)]
pub const fn k_tile_offset_f16(key: usize, channel: usize) -> usize {
    channel / 64 * (KEYS * 128) + swizzle_128(key, channel % 64 * 2)
}

/// Element (`key`, `channel`) of a K tile in E4M3.
#[inline(always)]
pub const fn k_tile_offset_e4m3(key: usize, channel: usize) -> usize {
    swizzle_128(key, channel)
}

/// Where token `token` (0..128) of a tile lies along a row of V^T.
///
/// Inside every 16 the positions hold the tokens 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15. A thread
/// owns the scores of tokens 2q, 2q + 1, 2q + 8, 2q + 9 of each 16, and in the A fragment of the next product
/// the positions 4q..4q + 4: with this order they are the same and no probability moves between threads.
#[inline(always)]
pub const fn token_position(token: usize) -> usize {
    let (group, t) = (token / 16 * 16, token % 16);
    group + t % 8 / 2 * 4 + t / 8 * 2 + t % 2
}

/// Element (`token`, `channel`) of a V^T tile.
#[inline(always)]
pub const fn v_tile_offset(token: usize, channel: usize) -> usize {
    swizzle_128(channel, token_position(token))
}

/// Element (key `block` 0..16, `channel`) of a means tile: K-major core matrices without swizzle, 8 channels of
/// 16 bytes (8 columns) each; the matrix of columns 8-15 follows 128 bytes on, the next 8 channels 256.
///
/// Column 2t + e + 8h holds block 4t + 2h + e: thread t of a row's four owns four consecutive blocks in the A
/// fragment, and two consecutive ones are the halves of one register.
#[inline(always)]
pub const fn mean_offset(block: usize, channel: usize) -> usize {
    let (half, column) = (block / 2 % 2, block / 4 * 2 + block % 2);
    channel / 8 * 256 + half * 128 + channel % 8 * 16 + column * 2
}

/// The row of a K tile in NVFP4 that holds key `key` (0..128), and the key that a row holds.
///
/// Columns 8a + 2q + {0, 1} of the 32 of four products belong to lane q of a row's four, for all a: they are keys
/// 8q + 2a + {0, 1}, the eight that the lane holds in a register of the next product's A fragment. So no probability
/// moves between lanes, tokens lie in V^T in their order, and the 16 that share a scale are the CPU backend's.
#[inline(always)]
pub const fn key_row(key: usize) -> usize {
    key / 32 * 32 + key % 8 / 2 * 8 + key % 32 / 8 * 2 + key % 2
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec;

    use super::*;

    /// Every element of a tile has `width` bytes of its own and the tile has no holes.
    fn fills(bytes: usize, rows: usize, columns: usize, width: usize, offset: fn(usize, usize) -> usize) {
        let mut taken = vec![false; bytes];
        for (row, column) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
            let at = offset(row, column);
            assert_eq!(at % width, 0);
            assert!(!core::mem::replace(&mut taken[at], true), "({row}, {column}) lies on another element");
        }
        assert_eq!(taken.iter().filter(|t| **t).count() * width, bytes);
    }

    #[test]
    fn tiles_have_neither_overlap_nor_holes() {
        fills(Q_F16_BYTES, ROWS, HEAD_DIM, 2, q_tile_offset_f16);
        fills(Q_E4M3_BYTES, ROWS, HEAD_DIM, 1, q_tile_offset_e4m3);
        fills(K_F16_BYTES, KEYS, HEAD_DIM, 2, k_tile_offset_f16);
        fills(K_E4M3_BYTES, KEYS, HEAD_DIM, 1, k_tile_offset_e4m3);
        fills(V_BYTES, KEYS, HEAD_DIM, 1, v_tile_offset);
        fills(MEAN_BYTES, MEAN_BLOCKS, HEAD_DIM, 2, mean_offset);
        fills(KEYS * FP4_ROW, KEYS, FP4_ROW, 1, swizzle_64);
        fills(KEYS * FP4_ROW, KEYS, FP4_ROW, 1, |key, byte| swizzle_64(key_row(key), byte));
    }

    #[test]
    fn keys_and_their_rows_are_each_others() {
        for key in 0..KEYS {
            assert_eq!(key_row(key_row(key)), key);
        }
    }

    #[test]
    fn tokens_stand_in_the_order_of_the_a_fragment() {
        let order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];
        for (position, token) in order.into_iter().enumerate() {
            assert_eq!(token_position(token), position);
            assert_eq!(token_position(112 + token), 112 + position);
        }
    }
}
