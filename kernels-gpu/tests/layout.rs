//! The layouts, proven from the fragment maps of the matrix instructions.

use kernels_gpu::layout::fragment::{TOKEN_ORDER, TOKEN_POSITION, position_of, token_at};
use kernels_gpu::layout::{KEY_TILE, QUERY_TILE, TOKEN_GROUP, VALUE_BLOCK, scale_groups, swizzle};

/// Rows and columns of the accumulator of `m64nN` that a thread (of 128) holds, in register order
/// (PTX ISA, wgmma, matrix fragments for m64nNk8, D).
fn accumulator(thread: usize, n: usize) -> Vec<(usize, usize)> {
    let (warp, lane) = (thread / 32, thread % 32);
    let mut held = Vec::new();
    for j in 0..n / 8 {
        for row in [16 * warp + lane / 4, 16 * warp + lane / 4 + 8] {
            for column in [0, 1] {
                held.push((row, 8 * j + 2 * (lane % 4) + column));
            }
        }
    }
    held
}

/// Rows and k of the four A registers of `m64k32` (8-bit elements) that a thread holds, four bytes each,
/// lowest first (PTX ISA, wgmma, matrix fragments for m64nNk32, A).
fn a_fragment(thread: usize) -> [[(usize, usize); 4]; 4] {
    let (warp, lane) = (thread / 32, thread % 32);
    let register = |down: usize, right: usize| {
        core::array::from_fn(|byte| (16 * warp + lane / 4 + 8 * down, 16 * right + 4 * (lane % 4) + byte))
    };
    [register(0, 0), register(1, 0), register(0, 1), register(1, 1)]
}

#[test]
fn token_order_makes_scores_an_a_fragment_without_a_shuffle() {
    for thread in 0..128 {
        let scores = accumulator(thread, KEY_TILE);
        for step in 0..KEY_TILE / 32 {
            for register in a_fragment(thread) {
                for (row, k) in register {
                    // What the instruction reads at (row, k) is the score of the token stored at k.
                    let token = token_at(32 * step + k);
                    assert!(scores.contains(&(row, token)), "thread {thread} lacks ({row}, {token})");
                }
            }
        }
    }
}

#[test]
fn a_register_packs_neighbouring_accumulators() {
    // Two pairs of adjacent accumulator registers become the four bytes: what a pack instruction does.
    for thread in 0..128 {
        let scores = accumulator(thread, KEY_TILE);
        let at = |wanted: (usize, usize)| scores.iter().position(|&held| held == wanted).unwrap();
        for [(r0, k0), (r1, k1), (r2, k2), (r3, k3)] in a_fragment(thread) {
            let held = [(r0, k0), (r1, k1), (r2, k2), (r3, k3)].map(|(r, k)| at((r, token_at(k))));
            assert_eq!([held[1], held[2], held[3]], [held[0] + 1, held[0] + 4, held[0] + 5]);
        }
    }
}

#[test]
fn token_order_is_the_documented_one_and_inverts() {
    assert_eq!(TOKEN_ORDER, [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
    for i in 0..TOKEN_GROUP {
        assert_eq!(TOKEN_ORDER[TOKEN_POSITION[i]], i);
    }
    for k in 0..3 * KEY_TILE {
        assert_eq!(position_of(token_at(k)), k);
        assert_eq!(token_at(k) / TOKEN_GROUP, k / TOKEN_GROUP);
    }
}

#[test]
fn swizzle_moves_chunks_by_the_row_and_keeps_them_whole() {
    let mut taken = [false; 8 * 128];
    for row in 0..8 {
        for column in 0..128 {
            let offset = swizzle::offset(row, column);
            assert_eq!(offset / 128, row);
            assert_eq!(offset % 128 / 16, (column / 16) ^ row);
            assert_eq!(offset % 16, column % 16);
            assert!(!core::mem::replace(&mut taken[offset], true), "two bytes at {offset}");
            assert_eq!(swizzle::offset(row + 8, column), offset + 1024, "the pattern repeats after 8 rows");
        }
    }
}

#[test]
fn swizzle_spreads_a_column_over_all_banks() {
    for chunk in 0..8 {
        let mut chunks = [false; 8];
        for row in 0..8 {
            chunks[swizzle::offset(row, 16 * chunk) % 128 / 16] = true;
        }
        assert_eq!(chunks, [true; 8]);
    }
}

#[test]
fn a_thread_meets_one_q_scale_per_row_and_one_k_scale_per_tile() {
    for thread in 0..128 {
        let held = accumulator(thread, KEY_TILE);
        let mut q: Vec<usize> = held.iter().map(|&(row, _)| scale_groups::q_group(row)).collect();
        let mut k: Vec<usize> = held.iter().map(|&(_, column)| scale_groups::k_group(column)).collect();
        q.sort_unstable();
        q.dedup();
        k.sort_unstable();
        k.dedup();
        assert_eq!((q.len(), k.len()), (1, 1), "thread {thread}");
    }
}

#[test]
fn scale_groups_count_and_share_as_documented() {
    for rows in [1, 15, 16, 17, 128, 129, 1000] {
        assert!((0..rows).all(|row| scale_groups::q_group(row) < scale_groups::q_groups(rows)));
        assert!((0..rows).all(|row| scale_groups::k_group(row) < scale_groups::k_groups(rows)));
    }
    let members = |group: fn(usize) -> usize, rows: usize| {
        let mut count = vec![0; 8];
        (0..rows).for_each(|row| count[group(row)] += 1);
        count
    };
    assert_eq!(members(scale_groups::q_group, 16), [2; 8]);
    assert_eq!(members(scale_groups::k_group, 128)[..4], [32; 4]);
    assert_eq!((scale_groups::q_group(3), scale_groups::q_group(11), scale_groups::q_group(19)), (3, 3, 11));
    assert_eq!((scale_groups::k_group(6), scale_groups::k_group(127), scale_groups::k_group(128)), (3, 3, 4));
}

#[test]
fn tiles_fit_each_other() {
    assert_eq!((QUERY_TILE, KEY_TILE, VALUE_BLOCK), (64, 128, 128));
    assert_eq!(KEY_TILE % TOKEN_GROUP, 0);
}
