//! The order of tokens inside every 16 that makes packed scores an FP8 A fragment.
//!
//! A `wgmma` leaves the scores of 64 queries by N keys so that lane `t` of warp `w` holds rows
//! `16w + t/4` and 8 below, columns `8j + 2(t%4)` and the next, for every `j` (PTX ISA, "Matrix
//! fragments for wgmma.mma_async.m64nNk8"). As the left operand of the second product the
//! probabilities must be in an A fragment, where a lane's register holds 4 *consecutive* k, from
//! `4(t%4)` and from `16 + 4(t%4)` (same section, `.m64nNk32`). Sums over tokens do not ask for their
//! order: if V is stored with the tokens of every 16 in [`TOKEN_ORDER`], the 4 scores that a lane holds
//! of those 16 *are* its 4 consecutive k, and no value changes lanes.

use super::TOKEN_GROUP;

/// The token (within its 16) that lies at each position along k.
pub const TOKEN_ORDER: [usize; TOKEN_GROUP] = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];

/// The position along k (within its 16) of each token: the inverse of [`TOKEN_ORDER`].
pub const TOKEN_POSITION: [usize; TOKEN_GROUP] = {
    let mut position = [0; TOKEN_GROUP];
    let mut k = 0;
    while k < TOKEN_GROUP {
        position[TOKEN_ORDER[k]] = k;
        k += 1;
    }
    position
};

/// The token that lies at position `k`, over any number of groups of 16.
#[inline(always)]
pub const fn token_at(k: usize) -> usize {
    k / TOKEN_GROUP * TOKEN_GROUP + TOKEN_ORDER[k % TOKEN_GROUP]
}

/// The position of a token, over any number of groups of 16.
#[inline(always)]
pub const fn position_of(token: usize) -> usize {
    token / TOKEN_GROUP * TOKEN_GROUP + TOKEN_POSITION[token % TOKEN_GROUP]
}
