//! The permutation of a grouping: a stable counting sort of labels, and the runs of every cluster.
//!
//! `order_count` counts the labels of every chunk of 1024 tokens, `order_scan` turns the counts into places,
//! `order_scatter` writes every token to its place. Only integers are added, so the result is the one stable
//! order whatever runs when. Tokens that do not count have no place.
//!
//! Heads are numbered batch * heads + head; *chunks* is ceil(`kv_tokens` / 1024).
//!
//! Parameters:
//!
//! | name | type | what |
//! |---|---|---|
//! | `labels` | u16 `[batch, kv_heads, kv_tokens]` | cluster of every token that counts, below `clusters` |
//! | `numbers` | u16 `[batch, kv_heads, clusters]`, or null | of [`tour`](super::tour): `order_count` replaces every label by the number of its cluster |
//! | `kv_lens` | u32 `[batch]`, or null | tokens that count |
//! | `counts` | u32 `[batch, kv_heads, chunks, clusters]` | `order_count` writes the tokens of a chunk by cluster, `order_scan` makes of them those of the chunks before |
//! | `starts` | u32 `[batch, kv_heads, clusters + 1]` | receives the first position of every cluster, and behind them the tokens that count |
//! | `runs` | u32 `[batch, kv_heads, ceil(kv_tokens / 128) + clusters, 2]`, or null | receives first position and length of runs of at most 128 tokens of one cluster, in order |
//! | `run_starts` | u32 `[batch, kv_heads, clusters + 1]`, or null with `runs` | receives the first run of every cluster, and behind them the number of runs |
//! | `order` | u32 `[batch, kv_heads, kv_tokens]` | receives position -> token for the tokens that count |
//! | `kv_tokens`, `kv_heads` | u32 | sizes |
//! | `clusters` | u32 | labels, 1 to 1024 |
//!
//! Grids, in x: `order_count` and `order_scatter` chunks * batch * `kv_heads` blocks of 256 threads, `order_scan`
//! one block of 1024 threads per (batch, kv head).

use super::input::valid_tokens;
use super::kmeans::{MAX_CLUSTERS, RUN, TOKENS, max_runs};
use crate::ptx::SharedAddr;
use crate::ptx::collective::{lanes_before, matching, shuffle_up, sync_threads, sync_warp};
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Tokens of a warp of `order_scatter`.
const SEGMENT: u32 = TOKENS / WARPS;

crate::ptx::shared_symbol!(
    /// Of order_count: a counter a cluster.
    fn counters, "vc_order_count", 16, 4096
);
crate::ptx::shared_symbol!(
    /// Of order_scan: two totals of every warp.
    fn totals, "vc_order_scan", 16, 256
);
crate::ptx::shared_symbol!(
    /// Of order_scatter: a place per warp and cluster.
    fn places, "vc_order_scatter", 16, 32768
);

#[inline(always)]
fn counter(word: u32) -> SharedAddr {
    counters().add(4 * word)
}

#[inline(always)]
fn total(word: u32) -> SharedAddr {
    totals().add(4 * word)
}

#[inline(always)]
fn place(word: u32) -> SharedAddr {
    places().add(4 * word)
}

/// The chunk of a block: head, chunk and the tokens in it that count.
struct Chunk {
    index: u32,
    first: u32,
    end: u32,
    /// Where the chunk's counts begin.
    counts: usize,
}

impl Chunk {
    #[inline(always)]
    unsafe fn new(kv_lens: *const u32, kv_tokens: u32, kv_heads: u32, clusters: u32) -> Self {
        let chunks = kv_tokens.div_ceil(TOKENS);
        let (index, chunk) = (block_idx_x() / chunks, block_idx_x() % chunks);
        // SAFETY: the entry's contract.
        let valid = unsafe { valid_tokens(kv_lens, index / kv_heads, kv_tokens) };
        let counts = block_idx_x() as usize * clusters as usize;
        Self { index, first: chunk * TOKENS, end: valid.min((chunk + 1) * TOKENS), counts }
    }
}

kernel! {
/// Counts the labels of every chunk, by their new numbers where there are any.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn order_count(
    labels: *mut u16,
    numbers: *const u16,
    kv_lens: *const u32,
    counts: *mut u32,
    kv_tokens: u32,
    kv_heads: u32,
    clusters: u32,
) {
    // SAFETY: labels that count are read and renumbered, counts of the chunk written; the block stays together.
    unsafe {
        let chunk = Chunk::new(kv_lens, kv_tokens, kv_heads, clusters);
        let mut cluster = thread_idx_x();
        while cluster < clusters {
            shared::store_u32(counter(cluster), 0);
            cluster += THREADS;
        }
        sync_threads();
        let labels = labels.add(chunk.index as usize * kv_tokens as usize);
        let mut token = chunk.first + thread_idx_x();
        while token < chunk.end {
            let label = labels.add(token as usize);
            if !numbers.is_null() {
                *label = *numbers.add(chunk.index as usize * clusters as usize + *label as usize);
            }
            shared::add_u32(counter(*label as u32), 1);
            token += THREADS;
        }
        sync_threads();
        let mut cluster = thread_idx_x();
        while cluster < clusters {
            *counts.add(chunk.counts + cluster as usize) = shared::load_u32(counter(cluster));
            cluster += THREADS;
        }
    }
}
}

/// The sum of `values` of all threads before this one, each its own.
///
/// # Safety
/// All 1024 threads execute it together.
#[inline(always)]
unsafe fn sums_before(values: [u32; 2]) -> [u32; 2] {
    let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
    let mut sums = values;
    // SAFETY: the whole block is here.
    unsafe {
        macro_rules! add_from {
            ($distance:literal) => {
                for sum in &mut sums {
                    let before = shuffle_up::<$distance>(*sum);
                    *sum += if lane >= $distance { before } else { 0 };
                }
            };
        }
        add_from!(1);
        add_from!(2);
        add_from!(4);
        add_from!(8);
        add_from!(16);
        if lane == 31 {
            shared::store_u32(total(2 * warp), sums[0]);
            shared::store_u32(total(2 * warp + 1), sums[1]);
        }
        sync_threads();
        let mut before = [sums[0] - values[0], sums[1] - values[1]];
        let mut earlier = 0;
        while earlier < warp {
            before[0] += shared::load_u32(total(2 * earlier));
            before[1] += shared::load_u32(total(2 * earlier + 1));
            earlier += 1;
        }
        before
    }
}

kernel! {
/// Places of clusters and chunks: one thread a cluster.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn order_scan(
    counts: *mut u32,
    starts: *mut u32,
    runs: *mut u32,
    run_starts: *mut u32,
    kv_tokens: u32,
    clusters: u32,
) {
    const AHEAD: u32 = 8;
    let index = block_idx_x() as usize;
    let cluster = thread_idx_x();
    let chunks = kv_tokens.div_ceil(TOKENS);
    let mut members = 0;
    // SAFETY: counts, starts and runs of the head; the block stays together.
    unsafe {
        if cluster < clusters {
            let counts = counts.add(index * chunks as usize * clusters as usize + cluster as usize);
            let at = |chunk: u32| counts.add(chunk as usize * clusters as usize);
            let mut chunk = 0;
            while chunk + AHEAD <= chunks {
                let mut own = [0; AHEAD as usize];
                for (i, own) in own.iter_mut().enumerate() {
                    *own = *at(chunk + i as u32);
                }
                for (i, own) in own.iter().enumerate() {
                    *at(chunk + i as u32) = members;
                    members += own;
                }
                chunk += AHEAD;
            }
            while chunk < chunks {
                let own = *at(chunk);
                *at(chunk) = members;
                members += own;
                chunk += 1;
            }
        }
        let own_runs = members.div_ceil(RUN);
        let [start, run] = sums_before([members, own_runs]);
        let bounds = index * (clusters as usize + 1) + cluster as usize;
        if cluster >= clusters {
            return;
        }
        *starts.add(bounds) = start;
        if cluster == clusters - 1 {
            *starts.add(bounds + 1) = start + members;
        }
        if runs.is_null() {
            return;
        }
        *run_starts.add(bounds) = run;
        if cluster == clusters - 1 {
            *run_starts.add(bounds + 1) = run + own_runs;
        }
        let mut i = 0;
        while i < own_runs {
            let to = runs.add(2 * (index * max_runs(kv_tokens, clusters) as usize + (run + i) as usize));
            *to = start + i * RUN;
            *to.add(1) = (members - i * RUN).min(RUN);
            i += 1;
        }
    }
}
}

kernel! {
/// Writes every token that counts to its place.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn order_scatter(
    labels: *const u16,
    kv_lens: *const u32,
    counts: *const u32,
    starts: *const u32,
    order: *mut u32,
    kv_tokens: u32,
    kv_heads: u32,
    clusters: u32,
) {
    let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
    // SAFETY: labels that count are read, their places written; warps and the block stay together.
    unsafe {
        let chunk = Chunk::new(kv_lens, kv_tokens, kv_heads, clusters);
        let labels = labels.add(chunk.index as usize * kv_tokens as usize);
        let order = order.add(chunk.index as usize * kv_tokens as usize);
        let mut slot = thread_idx_x();
        while slot < WARPS * clusters {
            shared::store_u32(place(slot), 0);
            slot += THREADS;
        }
        sync_threads();
        // Every warp has a segment of the chunk; tokens of a segment stay in order because 32 of them at a time
        // take the next places of their cluster.
        let token = |step: u32| chunk.first + warp * SEGMENT + step * 32 + lane;
        let mut mine = [u32::MAX; (SEGMENT / 32) as usize];
        for (step, label) in mine.iter_mut().enumerate() {
            let token = token(step as u32);
            if token < chunk.end {
                *label = *labels.add(token as usize) as u32;
                shared::add_u32(place(warp * clusters + *label), 1);
            }
        }
        sync_threads();
        let mut cluster = thread_idx_x();
        while cluster < clusters {
            let bounds = chunk.index as usize * (clusters as usize + 1) + cluster as usize;
            let mut next = *starts.add(bounds) + *counts.add(chunk.counts + cluster as usize);
            for warp in 0..WARPS {
                let own = shared::load_u32(place(warp * clusters + cluster));
                shared::store_u32(place(warp * clusters + cluster), next);
                next += own;
            }
            cluster += THREADS;
        }
        sync_threads();
        for (step, &label) in mine.iter().enumerate() {
            let like = matching(label);
            let rank = (like & lanes_before()).count_ones();
            let counts = label != u32::MAX;
            let leads = counts & (rank == 0);
            let slot = place(warp * clusters + if counts { label } else { 0 });
            let first = shared::load_u32(slot);
            // All have read their place before the first of a cluster moves it on.
            sync_warp();
            if leads {
                shared::store_u32(slot, first + like.count_ones());
            }
            sync_warp();
            if counts {
                *order.add((first + rank) as usize) = token(step as u32);
            }
        }
    }
}
}

const _: () = assert!(WARPS * MAX_CLUSTERS * 4 == 32768, "order_scatter's shared memory holds every cluster");
