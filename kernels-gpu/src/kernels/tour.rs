//! Numbers the clusters of a k-means so that neighbours in the sorted order are alike: cheapest insertion into a
//! path through the centroids, step for step and sum for sum that of the CPU (`host/grouping/tour.rs`, which
//! says why).
//!
//! After the last iteration `kmeans_distances` and `kmeans_tour` run, then the sort of [`order`](super::order)
//! once more, whose first kernel gives the labels their new numbers. Targets and their norms keep the old
//! numbers; a warm start makes them anew from the centroids.
//!
//! Clusters of a head are counted as in [`kmeans`](super::kmeans); what lies behind them is not touched.
//!
//! | name | type | what |
//! |---|---|---|
//! | `kv_lens` | u32 `[batch]`, or null | tokens that count |
//! | `centroids` | f32 `[batch, kv_heads, clusters, 128]` | centroids; `kmeans_tour` brings them into the new order |
//! | `distances` | f32 `[batch, kv_heads, clusters, clusters]` | squared distances of centroids; only those below the diagonal are written and read |
//! | `starts` | u32 `[batch, kv_heads, clusters + 1]` | of `order_scan` for the labels that the centroids are the means of |
//! | `numbers` | u16 `[batch, kv_heads, clusters]` | receives the new number of every cluster |
//! | `kv_tokens`, `kv_heads`, `head_dim` | u32 | sizes; channels from `head_dim` on are zeros and stay what they are |
//! | `clusters` | u32 | clusters, 1 to 1024 |
//! | `per_cluster` | u32 | tokens a cluster at least, or 0 |
//!
//! Grids, in x: `kmeans_distances` ceil(`clusters` / 32)^2 * batch * `kv_heads` blocks of 256 threads,
//! `kmeans_tour` one block of 1024 threads per (batch, kv head).

use super::input::{CHANNELS, valid_tokens};
use super::kmeans::{MAX_CLUSTERS, clusters_of};
use crate::ptx::SharedAddr;
use crate::ptx::collective::{sync_threads, warp_max_u32};
use crate::ptx::memory::{load_global_v4, load_shared_v4, store_shared_v4};
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

/// Rows and columns of a tile of distances; a thread has 2 x 2 of them.
const TILE: u32 = 32;
/// Threads of a block of `kmeans_distances`.
const TILE_THREADS: u32 = 256;
/// Bytes from one centroid to the next in shared memory: 16 more than a row, so that one column of 8 centroids
/// lies on different banks.
const PITCH: u32 = 4 * CHANNELS + 16;
/// Rows of distances in shared memory. A row is written one step before its own and read until its step ends,
/// when others may be a step further: three would do, a power of two is cheaper to wrap.
const ROWS: u32 = 4;
/// No cluster: the end of the path.
const NONE: u32 = 0xffff;

crate::ptx::shared_symbol!(
    /// Of kmeans_distances: the centroids of the tile's rows, then of its columns.
    fn centroid_tiles, "vc_distances", 16, 33792
);
crate::ptx::shared_symbol!(
    /// Of kmeans_tour: a word a cluster, ROWS rows of distances, and twice a pair of words a warp.
    fn tour, "vc_tour", 16, 20992
);
const _: () = assert!(2 * TILE * PITCH == 33792);
const _: () = assert!(4 * (1 + ROWS) * MAX_CLUSTERS + 2 * 8 * MAX_CLUSTERS / 32 == 20992);

/// The word of a cluster: whether it has members, and in the end its new number.
#[inline(always)]
fn word(cluster: u32) -> SharedAddr {
    tour().add(4 * cluster)
}

/// The distance of centroid `row` to that of `cluster`.
#[inline(always)]
fn distance(row: u32, cluster: u32) -> SharedAddr {
    tour().add(4 * ((1 + row % ROWS) * MAX_CLUSTERS + cluster))
}

/// The best offer of a warp. Two sets take turns, so that one barrier a step is enough.
#[inline(always)]
fn best(step: u32, warp: u32) -> SharedAddr {
    tour().add(4 * (1 + ROWS) * MAX_CLUSTERS + 8 * (step % 2 * (MAX_CLUSTERS / 32) + warp))
}

kernel! {
/// Squared distances of the centroids of every head, summed over the channels in order.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn kmeans_distances(
    kv_lens: *const u32,
    centroids: *const f32,
    distances: *mut f32,
    kv_tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    clusters: u32,
    per_cluster: u32,
) {
    let side = clusters.div_ceil(TILE);
    let (index, tile) = (block_idx_x() / (side * side), block_idx_x() % (side * side));
    let (first_row, first_column) = (tile / side * TILE, tile % side * TILE);
    if first_column > first_row {
        return;
    }
    // SAFETY: centroids of the head are read, distances of its clusters written; the block stays together.
    unsafe {
        let own = clusters_of(valid_tokens(kv_lens, index / kv_heads, kv_tokens), clusters, per_cluster);
        let base = index as usize * clusters as usize;
        let mut piece = thread_idx_x();
        while piece < 2 * TILE * CHANNELS / 4 {
            let (line, quad) = (piece / (CHANNELS / 4), piece % (CHANNELS / 4));
            let cluster = if line < TILE { first_row + line } else { first_column + line - TILE };
            let mut x = [0; 4];
            if cluster < own {
                let at = (base + cluster as usize) * CHANNELS as usize + 4 * quad as usize;
                x = load_global_v4(centroids.add(at).cast());
            }
            store_shared_v4(centroid_tiles().add(line * PITCH + 16 * quad), x);
            piece += TILE_THREADS;
        }
        sync_threads();
        let (row, column) = (thread_idx_x() / 16, thread_idx_x() % 16);
        let quad_of = |line: u32, quad: u32| load_shared_v4(centroid_tiles().add(line * PITCH + 16 * quad));
        let mut sums = [[0.0f32; 2]; 2];
        let mut quad = 0;
        while quad < head_dim / 4 {
            let a = [quad_of(row, quad), quad_of(row + 16, quad)];
            let b = [quad_of(TILE + column, quad), quad_of(TILE + column + 16, quad)];
            for channel in 0..4 {
                for i in 0..2 {
                    for j in 0..2 {
                        let x = f32::from_bits(a[i][channel]) - f32::from_bits(b[j][channel]);
                        sums[i][j] += x * x;
                    }
                }
            }
            quad += 1;
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                let (row, column) = (first_row + row + 16 * i as u32, first_column + column + 16 * j as u32);
                if row < own && column < row {
                    *distances.add((base + row as usize) * clusters as usize + column as usize) = sum;
                }
            }
        }
    }
}
}

/// Where a cluster could go: as two words of which the larger, the first before the second, is the better offer.
#[derive(Clone, Copy)]
struct Offer {
    /// Falls as the path gets longer; 0 for no offer.
    merit: u32,
    /// The place in the path, the first the largest, and the cluster behind it.
    place: u32,
}

impl Offer {
    const NO: Self = Self { merit: 0, place: 0 };

    /// A place between two clusters or at the end. A NaN is no offer: nothing is less.
    #[inline(always)]
    fn new(longer: f32, at: u32, next: u32) -> Self {
        let bits = longer.to_bits();
        let merit = if bits >> 31 == 1 { bits } else { 0x7fff_ffff - bits };
        Self { merit: if longer.is_nan() { 0 } else { merit }, place: (0xffff - at) << 16 | next }
    }

    /// The first place, where the search begins: nothing is less than a NaN.
    #[inline(always)]
    fn first(longer: f32, next: u32) -> Self {
        let offer = Self::new(longer, 0, next);
        if longer.is_nan() { Self { merit: u32::MAX, ..offer } } else { offer }
    }

    /// The best of the warp's.
    ///
    /// # Safety
    /// All 32 lanes execute it together.
    #[inline(always)]
    unsafe fn best_of_warp(self) -> Self {
        // SAFETY: the whole warp is here.
        unsafe {
            let merit = warp_max_u32(self.merit);
            Self { merit, place: warp_max_u32(if self.merit == merit { self.place } else { 0 }) }
        }
    }

    /// The place and the cluster behind it.
    #[inline(always)]
    fn place(self) -> (u32, u32) {
        (0xffff - (self.place >> 16), self.place & 0xffff)
    }
}

/// What a thread knows of its own cluster.
struct Stop {
    /// Whether it is on the path.
    joined: bool,
    /// Its place in the path; of a cluster without members, how many of those came before it.
    place: u32,
    /// The cluster behind it.
    next: u32,
    /// The distance to that.
    edge: f32,
}

kernel! {
/// Numbers the clusters: those with members along the path, the others behind them.
///
/// A thread a cluster. In every step one cluster joins: each that is on the path offers the place behind it,
/// the new one offers the first, and the best offer of the block, of equal ones the first place, is taken.
///
/// # Safety
/// Parameters and launch as the module says.
pub unsafe fn kmeans_tour(
    kv_lens: *const u32,
    starts: *const u32,
    distances: *const f32,
    centroids: *mut f32,
    numbers: *mut u16,
    kv_tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    clusters: u32,
    per_cluster: u32,
) {
    let index = block_idx_x();
    let cluster = thread_idx_x();
    let (warp, lane) = (cluster / 32, cluster % 32);
    let base = index as usize * clusters as usize;
    // SAFETY: what belongs to the clusters of the head; warps and the block stay together.
    unsafe {
        let own = clusters_of(valid_tokens(kv_lens, index / kv_heads, kv_tokens), clusters, per_cluster);
        let warps = own.div_ceil(32);
        if cluster < own {
            let starts = starts.add(base + index as usize + cluster as usize);
            shared::store_u32(word(cluster), (*starts < *starts.add(1)) as u32);
        }
        sync_threads();

        let load = |row: u32| {
            let wanted = cluster < row && row < own;
            if wanted {
                *distances.add((base + row as usize) * clusters as usize + cluster as usize)
            } else {
                0.0
            }
        };
        let far = |row, to| f32::from_bits(shared::load_u32(distance(row, to)));
        let mut stop = Stop { joined: false, place: 0, next: NONE, edge: 0.0 };
        let (mut head, mut members, mut empty) = (NONE, 0, 0);
        // This cluster's distances to the one that joins and to the one after it.
        let (mut mine, mut coming) = (0.0, load(1));
        let mut new = 0;
        while new < own {
            let joins = shared::load_u32(word(new)) != 0;
            if warp < warps {
                shared::store_u32(distance(new + 1, cluster), coming.to_bits());
                let mut offer = Offer::NO;
                if joins & stop.joined {
                    let longer =
                        if stop.next == NONE { mine } else { mine + far(new, stop.next) - stop.edge };
                    offer = Offer::new(longer, stop.place + 1, stop.next);
                } else if joins & (cluster == new) {
                    offer = Offer::first(if head == NONE { 0.0 } else { far(new, head) }, head);
                }
                let offer = offer.best_of_warp();
                if lane == 0 {
                    shared::store_u32(best(new, warp), offer.merit);
                    shared::store_u32(best(new, warp).add(4), offer.place);
                }
            }
            let later = load(new + 2);
            sync_threads();
            if warp < warps {
                let mut offer = Offer::NO;
                if lane < warps {
                    let [merit, place] = shared::load_v2(best(new, lane));
                    offer = Offer { merit, place };
                }
                let (at, next) = offer.best_of_warp().place();
                if joins {
                    if stop.joined & (stop.place + 1 == at) {
                        (stop.next, stop.edge) = (new, mine);
                    }
                    if stop.joined & (stop.place >= at) {
                        stop.place += 1;
                    }
                    if cluster == new {
                        let edge = if next == NONE { 0.0 } else { far(new, next) };
                        stop = Stop { joined: true, place: at, next, edge };
                    }
                    head = if at == 0 { new } else { head };
                    members += 1;
                } else {
                    stop.place = if cluster == new { empty } else { stop.place };
                    empty += 1;
                }
            }
            (mine, coming) = (coming, later);
            new += 1;
        }

        // The words have been read before the last barrier.
        if cluster < own {
            let number = if stop.joined { stop.place } else { members + stop.place };
            shared::store_u32(word(cluster), number);
            *numbers.add(base + cluster as usize) = number as u16;
        }
        sync_threads();
        permute(centroids.add(base * CHANNELS as usize), own, head_dim);
    }
}
}

/// Brings the centroids into the order of their numbers, 32 channels at a time: all rows are read before the
/// first is written.
///
/// # Safety
/// All 1024 threads execute it together, with the numbers of the `own` rows in [`word`].
#[inline(always)]
unsafe fn permute(centroids: *mut f32, own: u32, head_dim: u32) {
    const LINES: u32 = MAX_CLUSTERS / 32;
    let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
    let mut first = 0;
    while first < head_dim {
        let at = |row: u32| centroids.wrapping_add((row * CHANNELS + first + lane) as usize);
        let mut x = [0.0; LINES as usize];
        // SAFETY: rows below `own`, each read and written by one warp; the block stays together.
        unsafe {
            for (i, x) in x.iter_mut().enumerate() {
                let row = 32 * i as u32 + warp;
                if row < own {
                    *x = *at(row);
                }
            }
            sync_threads();
            for (i, &x) in x.iter().enumerate() {
                let row = 32 * i as u32 + warp;
                if row < own {
                    *at(shared::load_u32(word(row))) = x;
                }
            }
        }
        first += 32;
    }
}
