//! Where values lie: what the quantizers write is what the attention kernels load.

pub mod fragment;
pub mod scale_groups;
pub mod swizzle;

/// Keys that an attention kernel takes per step of its online softmax.
pub const KEY_TILE: usize = 128;

/// Query rows of one warpgroup: the M of every `wgmma`.
pub const QUERY_TILE: usize = 64;

/// Tokens of V that share a mean and are quantized together (the paper's `B_v`): one key tile.
pub const VALUE_BLOCK: usize = KEY_TILE;

/// Tokens in the unit of [`fragment::TOKEN_ORDER`].
pub const TOKEN_GROUP: usize = 16;
