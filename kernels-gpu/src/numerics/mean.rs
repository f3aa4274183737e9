//! Means over tokens with the order of the additions fixed, so that CPU and GPU agree bit for bit.
//!
//! A block's sum starts at +0 and takes its rows one after the other; the mean of many tokens adds the
//! sums of blocks of [`BLOCK`] rows one after the other, again from +0. Every channel is on its own, so
//! any number of channels may run side by side. The mean is the sum divided (a true IEEE division) by
//! the number of valid rows. Sums are `f32`; the two levels keep their error that of some 128 + N / 128
//! additions instead of N.

use crate::layout::VALUE_BLOCK;

/// Rows whose sum is taken first: the value block, which is the key tile.
pub const BLOCK: usize = VALUE_BLOCK;

/// Channels that [`token_mean`] takes at a time, so that its sums live in registers and cache.
const CHANNELS: usize = 64;

/// The mean of the first `valid_rows` rows of a block `[rows, dim]` into `out` (`dim` values).
///
/// Rows from `valid_rows` on (a tail's padding, of any content) are not read. Without a valid row the
/// mean is 0.
///
/// # Panics
///
/// If `out` is not `dim` long or `rows` is shorter than `valid_rows * dim`.
#[inline]
pub fn block_mean(rows: &[f32], dim: usize, valid_rows: usize, out: &mut [f32]) {
    assert_eq!(out.len(), dim, "one mean per channel");
    out.fill(0.0);
    if dim == 0 {
        return;
    }
    for row in rows[..valid_rows * dim].chunks_exact(dim) {
        add(out, row);
    }
    divide(out, valid_rows);
}

/// The mean of the first `valid_rows` rows of `[tokens, dim]` into `out`: the centre of K.
///
/// As [`block_mean`], but with the two levels of sums that the module describes.
///
/// # Panics
///
/// If `out` is not `dim` long or `rows` is shorter than `valid_rows * dim`.
#[inline]
pub fn token_mean(rows: &[f32], dim: usize, valid_rows: usize, out: &mut [f32]) {
    assert_eq!(out.len(), dim, "one mean per channel");
    out.fill(0.0);
    if dim == 0 {
        return;
    }
    let rows = &rows[..valid_rows * dim];
    for (index, total) in out.chunks_mut(CHANNELS).enumerate() {
        let channels = index * CHANNELS..index * CHANNELS + total.len();
        for block in rows.chunks(BLOCK * dim) {
            let mut sums = [0.0; CHANNELS];
            let sums = &mut sums[..total.len()];
            for row in block.chunks_exact(dim) {
                add(sums, &row[channels.clone()]);
            }
            add(total, sums);
        }
        divide(total, valid_rows);
    }
}

/// `sums[c] += row[c]`: one step of either level, for callers whose rows do not lie in one slice.
#[inline]
pub fn add(sums: &mut [f32], row: &[f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum += x;
    }
}

/// Turns sums over `count` rows into means; 0 if `count` is 0.
#[inline]
pub fn divide(sums: &mut [f32], count: usize) {
    let count = count.max(1) as f32;
    for sum in sums {
        *sum /= count;
    }
}
