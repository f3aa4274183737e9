//! Lloyd's k-means over the value tokens of every head: seeding, assignment on the Tensor Core, update.
//!
//! An iteration is `kmeans_assign`, the sort of [`order`](super::order), `kmeans_sums` and `kmeans_update`. The
//! sort turns the update into sums over runs of rows, each in a fixed order and none by atomics: equal labels
//! give equal centroids, bit for bit those of the CPU, for any number of clusters.
//!
//! A cluster has two forms: its centroid in f32, which is the state that warm starts keep, and its *target*, the
//! centroid rounded to the element type of V, with the squared norm of the rounded one. A token goes to the
//! target with the smallest |t|^2 - 2 v.t, the product in f32; ties, and tokens without a finite distance, go
//! to the lower label.
//!
//! Values that are not finite count as 0 in seeds and sums, so that such a head cannot spoil a later warm start.
//!
//! Tensor and strides are those of [`input`](super::input); heads are numbered batch * heads + head. A head with
//! n tokens that count has min(n, `clusters`) clusters, or, with `per_cluster` above 0, at most
//! max(n / `per_cluster`, 1) of them; what lies behind them is not touched.
//!
//! Parameters that several entries share:
//!
//! | name | type | what |
//! |---|---|---|
//! | `v` | pointer | values |
//! | `kv_lens` | u32 `[batch]`, or null | tokens that count |
//! | `centroids` | f32 `[batch, kv_heads, clusters, 128]` | centroids |
//! | `targets` | 16-bit `[batch, kv_heads, clusters, 128]` | targets, of the type of `v` |
//! | `norms` | f32 `[batch, kv_heads, clusters]` | their squared norms |
//! | `v_batch`, `v_head`, `v_token` | i64 | strides of `v` |
//! | `kv_tokens`, `kv_heads`, `head_dim` | u32 | sizes |
//! | `clusters` | u32 | clusters, 1 to 1024 |
//! | `per_cluster` | u32 | tokens a cluster at least, or 0 |
//!
//! # `kmeans_seed_bf16`, `kmeans_seed_f16`: ceil(`clusters` / 8) * batch * `kv_heads` blocks of 128 threads in x
//! Writes `centroids`, `targets` and `norms` for a cold start: from each of as many equal strata of the sequence
//! as there are clusters one token, by a hash of (`seed`, stratum). `seed` is a u64.
//!
//! # `kmeans_targets_bf16`, `kmeans_targets_f16`: the same grid
//! Writes `targets` and `norms` for given `centroids` (a warm start).
//!
//! # `kmeans_assign_bf16`, `kmeans_assign_f16`: ceil(`kv_tokens` / 1024) * batch * `kv_heads` blocks of 256 threads
//! Writes `labels`, u16 `[batch, kv_heads, kv_tokens]`, for the tokens that count.
//!
//! # `kmeans_sums_bf16`, `kmeans_sums_f16`: ceil(*runs* / 8) * batch * `kv_heads` blocks of 128 threads
//! *runs* is ceil(`kv_tokens` / 128) + `clusters`, at least as many as there can be.
//!
//! | name | type | what |
//! |---|---|---|
//! | `order` | u32 `[batch, kv_heads, kv_tokens]` | of `order_scatter` |
//! | `runs` | u32 `[batch, kv_heads, runs, 2]` | of `order_scan`: first position and length of every run |
//! | `run_starts` | u32 `[batch, kv_heads, clusters + 1]` | of `order_scan` |
//! | `sums` | f32 `[batch, kv_heads, runs, 128]` | receives the sum of every run |
//!
//! # `kmeans_update_bf16`, `kmeans_update_f16`: the grid of `kmeans_seed`
//! Reads `sums`, `run_starts` and `starts` (u32 `[batch, kv_heads, clusters + 1]`, of `order_scan`), writes
//! `centroids`, `targets` and `norms`. An empty cluster keeps its own.

use super::input::{
    Bf16, CHANNELS, CHUNK, CHUNKS, Element, F16, Head, load_f32_chunk, store_f32_chunk, unpack_chunk,
    valid_tokens, walk,
};
use crate::ptx::SharedAddr;
use crate::ptx::collective::{shuffle_xor, sync_threads, sync_warp};
use crate::ptx::convert::fma;
use crate::ptx::memory::{load_global_v4, load_shared_v4, store_global_v4, store_shared_v4};
use crate::ptx::shared;
use crate::ptx::special::{block_idx_x, thread_idx_x};

/// Most clusters of a head.
pub const MAX_CLUSTERS: u32 = 1024;
/// Tokens of a block of `kmeans_assign`, and of a chunk of the sort.
pub const TOKENS: u32 = 1024;
/// Members of a cluster that are summed in a row before their sum joins the cluster's.
pub const RUN: u32 = 128;

/// Clusters of a head with `valid` tokens.
#[inline(always)]
pub fn clusters_of(valid: u32, clusters: u32, per_cluster: u32) -> u32 {
    let most = if per_cluster == 0 { clusters } else { clusters.min((valid / per_cluster).max(1)) };
    most.min(valid)
}

/// What all entries know of V and its clusters.
struct Clusters {
    v: *const u8,
    kv_lens: *const u32,
    centroids: *mut f32,
    targets: *mut u8,
    norms: *mut f32,
    strides: [i64; 3],
    kv_tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    clusters: u32,
    per_cluster: u32,
}

impl Clusters {
    /// Rows of a head.
    #[inline(always)]
    fn head(&self, index: u32) -> Head {
        Head::new(self.v, self.strides, index / self.kv_heads, index % self.kv_heads, self.head_dim)
    }

    /// Tokens that count of a head, and its clusters.
    #[inline(always)]
    unsafe fn sizes(&self, index: u32) -> (u32, u32) {
        // SAFETY: the entry's contract.
        let valid = unsafe { valid_tokens(self.kv_lens, index / self.kv_heads, self.kv_tokens) };
        (valid, clusters_of(valid, self.clusters, self.per_cluster))
    }

    /// The head and the cluster of 16 lanes, for grids of ceil(clusters / 8) blocks a head.
    #[inline(always)]
    fn mine(&self) -> (u32, u32) {
        let per_head = self.clusters.div_ceil(8);
        (block_idx_x() / per_head, block_idx_x() % per_head * 8 + thread_idx_x() / CHUNKS)
    }

    /// Where a cluster's row begins, in elements.
    #[inline(always)]
    fn row(&self, index: u32, cluster: u32) -> usize {
        (index as usize * self.clusters as usize + cluster as usize) * CHANNELS as usize
    }

    /// Writes the target of a centroid of which every one of 16 lanes has a chunk.
    ///
    /// The squared norm: every lane adds its squares in order, each fused; then lanes 1, 2, 4, 8 apart.
    #[inline(always)]
    unsafe fn store_target<E: Element>(&self, index: u32, cluster: u32, x: &[f32; 8], write: bool) {
        let chunk = thread_idx_x() % CHUNKS;
        let mut rounded = [0; 4];
        let mut norm = 0.0;
        for i in 0..4 {
            rounded[i] = E::pack(x[2 * i], x[2 * i + 1]);
            let [low, high] = E::unpack(rounded[i]);
            norm = fma(high, high, fma(low, low, norm));
        }
        // SAFETY: the whole warp is here; rows of the head's clusters.
        unsafe {
            norm += f32::from_bits(shuffle_xor::<1>(norm.to_bits()));
            norm += f32::from_bits(shuffle_xor::<2>(norm.to_bits()));
            norm += f32::from_bits(shuffle_xor::<4>(norm.to_bits()));
            norm += f32::from_bits(shuffle_xor::<8>(norm.to_bits()));
            if write {
                let row = self.row(index, cluster);
                store_global_v4(self.targets.add(2 * (row + (chunk * CHUNK) as usize)), rounded);
                if chunk == 0 {
                    *self.norms.add(row / CHANNELS as usize) = norm;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn seed<E: Element>(&self, seed: u64) {
        let (index, cluster) = self.mine();
        let chunk = thread_idx_x() % CHUNKS;
        // SAFETY: a token that counts is read, rows of the head's clusters written; the warp stays together.
        unsafe {
            let (valid, clusters) = self.sizes(index);
            let write = cluster < clusters;
            let mut x = [0.0; 8];
            if write {
                let (j, k, n) = (cluster as u64, clusters as u64, valid as u64);
                let (from, to) = (j * n / k, (j + 1) * n / k);
                let token = from + ((hash(seed, cluster) as u64 * (to - from)) >> 32);
                x = finite_chunk::<E>(self.head(index).load(token as u32, chunk, true));
                store_f32_chunk(self.centroids.add(self.row(index, cluster) + (chunk * CHUNK) as usize), &x);
            }
            self.store_target::<E>(index, cluster, &x, write);
        }
    }

    #[inline(always)]
    unsafe fn targets<E: Element>(&self) {
        let (index, cluster) = self.mine();
        let chunk = thread_idx_x() % CHUNKS;
        // SAFETY: rows of the head's clusters; the warp stays together.
        unsafe {
            let write = cluster < self.sizes(index).1;
            let mut x = [0.0; 8];
            if write {
                x = load_f32_chunk(self.centroids.add(self.row(index, cluster) + (chunk * CHUNK) as usize));
            }
            self.store_target::<E>(index, cluster, &x, write);
        }
    }

    #[inline(always)]
    unsafe fn update<E: Element>(&self, sums: *const f32, run_starts: *const u32, starts: *const u32) {
        let (index, cluster) = self.mine();
        let at = (thread_idx_x() % CHUNKS * CHUNK) as usize;
        // SAFETY: sums of the head's runs are read, rows of its clusters written; the warp stays together.
        unsafe {
            let runs = max_runs(self.kv_tokens, self.clusters);
            let bounds = index as usize * (self.clusters as usize + 1) + cluster as usize;
            let (mut members, mut run, mut end) = (0, 0, 0);
            if cluster < self.sizes(index).1 {
                members = *starts.add(bounds + 1) - *starts.add(bounds);
                (run, end) = (*run_starts.add(bounds), *run_starts.add(bounds + 1));
            }
            let mut total = [0.0f32; 8];
            while run < end {
                let row = (index as usize * runs as usize + run as usize) * CHANNELS as usize;
                let sum = load_f32_chunk(sums.add(row + at));
                for i in 0..8 {
                    total[i] += sum[i];
                }
                run += 1;
            }
            let moved = members > 0;
            if moved {
                for x in &mut total {
                    *x /= members as f32;
                }
                store_f32_chunk(self.centroids.add(self.row(index, cluster) + at), &total);
            }
            self.store_target::<E>(index, cluster, &total, moved);
        }
    }
}

/// Runs that `kv_tokens` tokens in `clusters` clusters can have.
#[inline(always)]
pub fn max_runs(kv_tokens: u32, clusters: u32) -> u32 {
    kv_tokens.div_ceil(RUN) + clusters
}

/// The values of a chunk, 0 for those that are not finite.
#[inline(always)]
fn finite_chunk<E: Element>(chunk: [u32; 4]) -> [f32; 8] {
    let mut x = unpack_chunk::<E>(chunk);
    for x in &mut x {
        *x = if x.is_finite() { *x } else { 0.0 };
    }
    x
}

/// 32 well-mixed bits of (seed, stratum): both words of the seed and the counter through MurmurHash3's
/// finalizer.
#[inline(always)]
fn hash(seed: u64, j: u32) -> u32 {
    let mix = |x: u32| {
        let x = (x ^ x >> 16).wrapping_mul(0x85EB_CA6B);
        let x = (x ^ x >> 13).wrapping_mul(0xC2B2_AE35);
        x ^ x >> 16
    };
    mix(mix(mix(j.wrapping_add(0x9E37_79B9)) ^ seed as u32) ^ (seed >> 32) as u32)
}

/// Targets in shared memory at a time.
const TILE: u32 = 128;
/// Bytes from one target to the next: 64 more than a row, so that two neighbours' 16-byte chunks of one column
/// group lie on different banks.
const PITCH: u32 = 2 * CHANNELS + 64;
/// Tokens of a warp at a time: the rows of one product.
const ROWS: u32 = 16;
/// Threads of a block of `kmeans_assign`.
const THREADS: u32 = 256;

crate::ptx::shared_symbol!(
    /// TILE rows of PITCH bytes, then TILE norms.
    fn assign_shared, "vc_kmeans", 16, 41472
);

#[inline(always)]
fn shared_norms() -> SharedAddr {
    assign_shared().add(TILE * PITCH)
}

/// The rows of a warp's 16 tokens in registers: lane t holds, of rows t / 4 and t / 4 + 8, the chunks
/// t % 4 + {0, 4, 8, 12}. Two pairs of a chunk are the columns of one product, in an order of channels that is
/// not theirs but that the targets share.
type Tokens = [[[u32; 4]; 4]; 2];

/// The nearest target so far.
#[derive(Clone, Copy)]
struct Nearest {
    distance: f32,
    label: u32,
}

impl Nearest {
    #[inline(always)]
    fn offer(&mut self, distance: f32, label: u32) {
        // A NaN is not nearer; labels come in ascending order, so that a tie stays with the lower.
        let nearer = distance < self.distance;
        self.distance = if nearer { distance } else { self.distance };
        self.label = if nearer { label } else { self.label };
    }

    /// The nearest of the four lanes that share a row.
    #[inline(always)]
    unsafe fn of_quad(mut self) -> u32 {
        macro_rules! from_lane {
            ($mask:literal) => {
                // SAFETY: the whole warp is here.
                let (d, label) = unsafe {
                    (
                        f32::from_bits(shuffle_xor::<$mask>(self.distance.to_bits())),
                        shuffle_xor::<$mask>(self.label),
                    )
                };
                if d < self.distance || d == self.distance && label < self.label {
                    self = Self { distance: d, label };
                }
            };
        }
        from_lane!(1);
        from_lane!(2);
        self.label
    }
}

impl Clusters {
    #[inline(always)]
    unsafe fn load_tokens(&self, head: &Head, first: u32, valid: u32) -> Tokens {
        let lane = thread_idx_x() % 32;
        let mut rows = [[[0; 4]; 4]; 2];
        for half in 0..2 {
            let token = first + lane / 4 + 8 * half as u32;
            for i in 0..4 {
                // SAFETY: a token that counts.
                rows[half][i] = unsafe { head.load(token, lane % 4 + 4 * i as u32, token < valid) };
            }
        }
        rows
    }

    /// Brings the targets from `first` on, as many as there are and fit, into shared memory; behind them zeros
    /// with an infinite norm, up to a multiple of 16.
    #[inline(always)]
    unsafe fn fill(&self, index: u32, first: u32, clusters: u32) {
        let rows = (clusters - first).min(TILE).next_multiple_of(16);
        let mut piece = thread_idx_x();
        // SAFETY: rows of the head's clusters; the block's own shared memory.
        unsafe {
            while piece < rows * CHUNKS {
                let (row, chunk) = (piece / CHUNKS, piece % CHUNKS);
                let mut x = [0; 4];
                if first + row < clusters {
                    let at = 2 * (self.row(index, first + row) + (chunk * CHUNK) as usize);
                    x = load_global_v4(self.targets.add(at));
                }
                store_shared_v4(assign_shared().add(row * PITCH + chunk * 16), x);
                piece += THREADS;
            }
            let row = thread_idx_x();
            if row < rows {
                let mut norm = f32::INFINITY;
                if first + row < clusters {
                    norm = *self.norms.add(self.row(index, first + row) / CHANNELS as usize);
                }
                shared::store_u32(shared_norms().add(row * 4), norm.to_bits());
            }
        }
    }

    /// Offers the targets in shared memory to the tokens of the warp.
    #[inline(always)]
    unsafe fn compare<E: Element>(
        &self,
        rows: &Tokens,
        nearest: &mut [Nearest; 2],
        first: u32,
        targets: u32,
    ) {
        let lane = thread_idx_x() % 32;
        let mut column = 0;
        while column < targets {
            // Keeps the products, which are inline PTX, out of any branch (see `collective`).
            // SAFETY: the whole warp is here.
            unsafe { sync_warp() }
            // Two products side by side: their chains of 8 hide each other.
            let mut d = [[0.0; 4]; 2];
            for i in 0..4 {
                for side in 0..2 {
                    let row = column + 8 * side as u32 + lane / 4;
                    // SAFETY: inside the filled rows; the whole warp is here.
                    unsafe {
                        let t =
                            load_shared_v4(assign_shared().add(row * PITCH + (lane % 4 + 4 * i as u32) * 16));
                        let (low, high) = (&rows[0][i], &rows[1][i]);
                        E::multiply(&mut d[side], [low[0], high[0], low[1], high[1]], [t[0], t[1]]);
                        E::multiply(&mut d[side], [low[2], high[2], low[3], high[3]], [t[2], t[3]]);
                    }
                }
            }
            for side in 0..2 {
                let at = column + 8 * side as u32 + lane % 4 * 2;
                // SAFETY: inside the filled norms.
                let norm = unsafe { shared::load_v2(shared_norms().add(at * 4)) };
                for row in 0..2 {
                    for pair in 0..2 {
                        let distance = fma(-2.0, d[side][2 * row + pair], f32::from_bits(norm[pair]));
                        nearest[row].offer(distance, first + at + pair as u32);
                    }
                }
            }
            column += 16;
        }
    }

    #[inline(always)]
    unsafe fn assign<E: Element>(&self, labels: *mut u16) {
        let blocks = self.kv_tokens.div_ceil(TOKENS);
        let (index, block) = (block_idx_x() / blocks, block_idx_x() % blocks);
        let (warp, lane) = (thread_idx_x() / 32, thread_idx_x() % 32);
        let head = self.head(index);
        // SAFETY: tokens that count are read and labelled; the block stays together.
        unsafe {
            let (valid, clusters) = self.sizes(index);
            let end = valid.min((block + 1) * TOKENS);
            let mut token = block * TOKENS;
            let one_tile = clusters <= TILE;
            if one_tile && token < end {
                self.fill(index, 0, clusters);
                sync_threads();
            }
            let mut next = self.load_tokens(&head, token + warp * ROWS, valid);
            while token < end {
                let rows = next;
                let mine = token + warp * ROWS;
                token += THREADS / 32 * ROWS;
                // The next rows are on their way while these are compared.
                next = self.load_tokens(&head, token + warp * ROWS, if token < end { valid } else { 0 });
                let mut nearest = [Nearest { distance: f32::INFINITY, label: 0 }; 2];
                let mut first = 0;
                while first < clusters {
                    if !one_tile {
                        sync_threads();
                        self.fill(index, first, clusters);
                        sync_threads();
                    }
                    let targets = (clusters - first).min(TILE);
                    self.compare::<E>(&rows, &mut nearest, first, targets);
                    first += TILE;
                }
                let nearest = [nearest[0].of_quad(), nearest[1].of_quad()];
                if lane % 4 == 0 {
                    let to = labels.add(index as usize * self.kv_tokens as usize);
                    for half in 0..2 {
                        let token = mine + lane / 4 + 8 * half as u32;
                        if token < valid {
                            *to.add(token as usize) = nearest[half] as u16;
                        }
                    }
                }
            }
        }
    }

    /// Sums the rows of every run: 16 lanes a run.
    #[inline(always)]
    unsafe fn sums<E: Element>(
        &self,
        order: *const u32,
        runs: *const u32,
        run_starts: *const u32,
        sums: *mut f32,
    ) {
        let most = max_runs(self.kv_tokens, self.clusters);
        let per_head = most.div_ceil(8);
        let index = block_idx_x() / per_head;
        let run = block_idx_x() % per_head * 8 + thread_idx_x() / CHUNKS;
        let chunk = thread_idx_x() % CHUNKS;
        let head = self.head(index);
        // SAFETY: runs of the head, whose positions the order covers.
        unsafe {
            let clusters = self.sizes(index).1 as usize;
            if run >= *run_starts.add(index as usize * (self.clusters as usize + 1) + clusters) {
                return;
            }
            let at = index as usize * most as usize + run as usize;
            let (first, count) = (*runs.add(2 * at), *runs.add(2 * at + 1));
            let order = order.add(index as usize * self.kv_tokens as usize);
            let mut total = [0.0f32; 8];
            walk(&head, chunk, order, first, count, |_, x| {
                let x = finite_chunk::<E>(x);
                for i in 0..8 {
                    total[i] += x[i];
                }
            });
            store_f32_chunk(sums.add(at * CHANNELS as usize + (chunk * CHUNK) as usize), &total);
        }
    }
}

macro_rules! entries {
    ($element:ty, $seed:ident, $targets:ident, $assign:ident, $sums:ident, $update:ident) => {
        kernel! {
        #[doc = concat!("Cold start on [`", stringify!($element), "`] values.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $seed(
            v: *const u8,
            kv_lens: *const u32,
            centroids: *mut f32,
            targets: *mut u8,
            norms: *mut f32,
            v_batch: i64,
            v_head: i64,
            v_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
            clusters: u32,
            per_cluster: u32,
            seed: u64,
        ) {
            let strides = [v_batch, v_head, v_token];
            let call = Clusters {
                v, kv_lens, centroids, targets, norms, strides, kv_tokens, kv_heads, head_dim, clusters, per_cluster,
            };
            // SAFETY: the entry's contract.
            unsafe { call.seed::<$element>(seed) }
        }
        }

        kernel! {
        #[doc = concat!("Targets for [`", stringify!($element), "`] values from given centroids.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $targets(
            kv_lens: *const u32,
            centroids: *const f32,
            targets: *mut u8,
            norms: *mut f32,
            kv_tokens: u32,
            kv_heads: u32,
            clusters: u32,
            per_cluster: u32,
        ) {
            let call = Clusters {
                v: core::ptr::null(), kv_lens, centroids: centroids.cast_mut(), targets, norms, strides: [0; 3],
                kv_tokens, kv_heads, head_dim: 0, clusters, per_cluster,
            };
            // SAFETY: the entry's contract.
            unsafe { call.targets::<$element>() }
        }
        }

        kernel! {
        #[doc = concat!("Labels of [`", stringify!($element), "`] values.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $assign(
            v: *const u8,
            kv_lens: *const u32,
            targets: *const u8,
            norms: *const f32,
            labels: *mut u16,
            v_batch: i64,
            v_head: i64,
            v_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
            clusters: u32,
            per_cluster: u32,
        ) {
            let strides = [v_batch, v_head, v_token];
            let call = Clusters {
                v, kv_lens, centroids: core::ptr::null_mut(), targets: targets.cast_mut(), norms: norms.cast_mut(),
                strides, kv_tokens, kv_heads, head_dim, clusters, per_cluster,
            };
            // SAFETY: the entry's contract.
            unsafe { call.assign::<$element>(labels) }
        }
        }

        kernel! {
        #[doc = concat!("Sums over the runs of [`", stringify!($element), "`] values in their order.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $sums(
            v: *const u8,
            kv_lens: *const u32,
            order: *const u32,
            runs: *const u32,
            run_starts: *const u32,
            sums: *mut f32,
            v_batch: i64,
            v_head: i64,
            v_token: i64,
            kv_tokens: u32,
            kv_heads: u32,
            head_dim: u32,
            clusters: u32,
            per_cluster: u32,
        ) {
            let strides = [v_batch, v_head, v_token];
            let (centroids, norms) = (core::ptr::null_mut(), core::ptr::null_mut());
            let call = Clusters {
                v, kv_lens, centroids, targets: core::ptr::null_mut(), norms, strides, kv_tokens, kv_heads, head_dim,
                clusters, per_cluster,
            };
            // SAFETY: the entry's contract.
            unsafe { call.sums::<$element>(order, runs, run_starts, sums) }
        }
        }

        kernel! {
        #[doc = concat!("Centroids and targets of [`", stringify!($element), "`] values from the sums of their runs.")]
        ///
        /// # Safety
        /// Parameters and launch as the module says.
        pub unsafe fn $update(
            kv_lens: *const u32,
            sums: *const f32,
            run_starts: *const u32,
            starts: *const u32,
            centroids: *mut f32,
            targets: *mut u8,
            norms: *mut f32,
            kv_tokens: u32,
            kv_heads: u32,
            clusters: u32,
            per_cluster: u32,
        ) {
            let call = Clusters {
                v: core::ptr::null(), kv_lens, centroids, targets, norms, strides: [0; 3], kv_tokens, kv_heads,
                head_dim: 0, clusters, per_cluster,
            };
            // SAFETY: the entry's contract.
            unsafe { call.update::<$element>(sums, run_starts, starts) }
        }
        }
    };
}

entries!(
    Bf16,
    kmeans_seed_bf16,
    kmeans_targets_bf16,
    kmeans_assign_bf16,
    kmeans_sums_bf16,
    kmeans_update_bf16
);
entries!(F16, kmeans_seed_f16, kmeans_targets_f16, kmeans_assign_f16, kmeans_sums_f16, kmeans_update_f16);
