//! Which rows of Q and K share an INT8 scale (SageAttention2's per-thread groups).
//!
//! The groups follow the accumulator's layout, so that a thread meets one Q scale per row it holds and
//! one K scale per key tile: Q rows `r` and `r + 8` of a 16-row tile share a scale, and so do the 32
//! keys of 128 whose `(k % 8) / 2` is the same.

use super::KEY_TILE;

/// Rows of a tile of Q within which groups are formed.
pub const Q_TILE: usize = 16;
/// Groups of Q per tile.
pub const Q_GROUPS: usize = 8;
/// Groups of K per key tile.
pub const K_GROUPS: usize = 4;

/// The scale group of a row of Q, counted over the whole head.
#[inline(always)]
pub const fn q_group(row: usize) -> usize {
    row / Q_TILE * Q_GROUPS + row % Q_GROUPS
}

/// The scale group of a row of K, counted over the whole head.
#[inline(always)]
pub const fn k_group(row: usize) -> usize {
    row / KEY_TILE * K_GROUPS + row % 8 / 2
}

/// Scale groups of a head with this many rows of Q; the last tile may be short, with groups unused.
#[inline(always)]
pub const fn q_groups(rows: usize) -> usize {
    rows.div_ceil(Q_TILE) * Q_GROUPS
}

/// Scale groups of a head with this many rows of K; the last tile may be short, with groups unused.
#[inline(always)]
pub const fn k_groups(rows: usize) -> usize {
    rows.div_ceil(KEY_TILE) * K_GROUPS
}
