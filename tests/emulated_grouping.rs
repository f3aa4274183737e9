//! The grouping kernels, run thread by thread on the host (`docs/emulation.md`), against the CPU's grouping: the
//! same labels, order and centroids, bit for bit.
//!
//! The kernels compare tokens with centroids rounded to the type of V, the CPU with the centroids themselves. So the
//! values here are either far from every boundary between clusters, or whole numbers whose distances are exact.

use half::bf16;
use kernels_gpu::emulation::{Fault, Launch, Memory, Schedule};
use kernels_gpu::kernels::kmeans::{
    kmeans_assign_bf16, kmeans_seed_bf16, kmeans_sums_bf16, kmeans_targets_bf16, kmeans_update_bf16,
};
use kernels_gpu::kernels::order::{order_count, order_scan, order_scatter};
use kernels_gpu::kernels::tour::{kmeans_distances, kmeans_tour};
use kernels_gpu::kernels::{PREPARE, tiles::HEAD_DIM};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use vc_attention::grouping::{Grouping, GroupingConfig, group};

const SEED: u64 = 0x1234_5678_9abc_def0;

/// Values of heads side by side, and how they are grouped.
struct Case {
    /// [heads, tokens, dim].
    v: Vec<f32>,
    tokens: usize,
    dim: usize,
    /// Tokens that count; the last batch has all.
    valid: usize,
    clusters: usize,
    iterations: usize,
    schedule: Schedule,
}

/// What the kernels leave of one head.
struct Device {
    order: Vec<u32>,
    labels: Vec<u16>,
    centroids: Vec<f32>,
}

impl Case {
    /// Two heads as two batches, the first with `valid` tokens; values near one of `kinds` points.
    fn new(tokens: usize, valid: usize, dim: usize, clusters: usize, kinds: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64((tokens * 1000 + clusters) as u64);
        let points: Vec<f32> = (0..2 * kinds * dim).map(|_| rng.random_range(-9..=9) as f32 * 16.0).collect();
        let mut v = Vec::new();
        for (head, count) in [valid, tokens].into_iter().enumerate() {
            for token in 0..tokens {
                // Seeds come from equal strata of the tokens that count: a point a stratum is one a cluster.
                let stratum = (0..clusters).rfind(|j| j * count / clusters <= token).unwrap_or(0);
                let kind = if kinds < clusters { token % kinds } else { stratum };
                let point = &points[(head * kinds + kind) * dim..][..dim];
                v.extend(point.iter().map(|p| p + rng.random_range(-1..=1) as f32));
            }
        }
        Self { v, tokens, dim, valid, clusters, iterations: 1, schedule: Schedule::Oldest }
    }

    fn lens(&self) -> [usize; 2] {
        [self.valid, self.tokens]
    }

    fn own_clusters(&self, head: usize) -> usize {
        self.clusters.min(self.lens()[head])
    }

    /// What the CPU makes of every head.
    fn cpu(&self, warm: Option<&[Grouping]>) -> Vec<Grouping> {
        let config = GroupingConfig {
            clusters: Some(self.clusters),
            iterations: Some(self.iterations),
            seed: SEED,
            ..GroupingConfig::kmeans()
        };
        let head = |head: usize| {
            let v = &self.v[head * self.tokens * self.dim..][..self.lens()[head] * self.dim];
            let warm = warm.map(|w| &w[head].centroids[..]).filter(|w| !w.is_empty());
            group(v, self.dim, &config, None, warm).expect("a valid call")
        };
        (0..2).map(head).collect()
    }

    /// What the kernels make of every head: a cold start, or a warm one from `warm`.
    fn device(&self, warm: Option<&[Grouping]>) -> Result<Vec<Device>, Fault> {
        let (n, k, heads) = (self.tokens, self.clusters, 2);
        let values: Vec<u16> = self.v.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        let mut padded = vec![0.0f32; heads * k * HEAD_DIM];
        for (head, grouping) in warm.unwrap_or_default().iter().enumerate() {
            let rows = padded[head * k * HEAD_DIM..].chunks_exact_mut(HEAD_DIM);
            for (to, from) in rows.zip(grouping.centroids.chunks_exact(self.dim)) {
                to[..self.dim].copy_from_slice(from);
            }
        }
        let mut gpu = Memory::new();
        let v = gpu.input("v", &values).cast::<u8>();
        let lens = gpu.input("kv_lens", &self.lens().map(|n| n as u32));
        let centroids = gpu.in_out("centroids", &padded);
        let targets = gpu.output::<u16>("targets", heads * k * HEAD_DIM).cast::<u8>();
        let norms = gpu.output::<f32>("norms", heads * k);
        let labels = gpu.output::<u16>("labels", heads * n);
        let counts = gpu.output::<u32>("counts", heads * n.div_ceil(1024) * k);
        let starts = gpu.output::<u32>("starts", heads * (k + 1));
        let most = n.div_ceil(128) + k;
        let runs = gpu.output::<u32>("runs", heads * 2 * most);
        let run_starts = gpu.output::<u32>("run_starts", heads * (k + 1));
        let sums = gpu.output::<f32>("sums", heads * most * HEAD_DIM);
        let order = gpu.output::<u32>("order", heads * n);
        let distances = gpu.output::<f32>("distances", heads * k * k);
        let numbers = gpu.output::<u16>("numbers", heads * k);

        let launch = |name: &str, blocks: usize, kernel: &dyn Fn()| {
            let entry = PREPARE.iter().find(|e| e.name == name).expect("an entry of the module");
            let launch = Launch::new(entry.threads, 0).grid([(blocks * heads) as u32, 1, 1]);
            launch.schedule(self.schedule).run(&gpu, kernel)
        };
        let (batch, token) = ((n * self.dim) as i64, self.dim as i64);
        let (tokens, dim, clusters) = (n as u32, self.dim as u32, k as u32);
        let (chunks, rows) = (n.div_ceil(1024), k.div_ceil(8));
        // One kv head a batch; no limit by the number of tokens a cluster.
        macro_rules! gpu {
            ($name:ident, $blocks:expr, $($argument:expr),*) => {
                // SAFETY: the buffers have the sizes of the contract; the emulation checks the accesses.
                launch(stringify!($name), $blocks, &|| unsafe { $name($($argument),*) })?
            };
        }
        let sort = |numbers: *const u16| -> Result<(), Fault> {
            gpu!(order_count, chunks, labels, numbers, lens, counts, tokens, 1, clusters);
            gpu!(order_scan, 1, counts, starts, runs, run_starts, tokens, clusters);
            gpu!(order_scatter, chunks, labels, lens, counts, starts, order, tokens, 1, clusters);
            Ok(())
        };
        if warm.is_some() {
            gpu!(kmeans_targets_bf16, rows, lens, centroids, targets, norms, tokens, 1, clusters, 0);
        } else {
            gpu! {
                kmeans_seed_bf16, rows, v, lens, centroids, targets, norms, batch, batch, token, tokens, 1, dim,
                clusters, 0, SEED
            }
        }
        for _ in 0..self.iterations {
            gpu! {
                kmeans_assign_bf16, chunks, v, lens, targets, norms, labels, batch, batch, token, tokens, 1, dim,
                clusters, 0
            }
            sort(std::ptr::null())?;
            gpu! {
                kmeans_sums_bf16, most.div_ceil(8), v, lens, order, runs, run_starts, sums, batch, batch, token,
                tokens, 1, dim, clusters, 0
            }
            gpu! {
                kmeans_update_bf16, rows, lens, sums, run_starts, starts, centroids, targets, norms, tokens, 1,
                clusters, 0
            }
        }
        let tiles = k.div_ceil(32) * k.div_ceil(32);
        gpu!(kmeans_distances, tiles, lens, centroids, distances, tokens, 1, dim, clusters, 0);
        gpu!(kmeans_tour, 1, lens, starts, distances, centroids, numbers, tokens, 1, dim, clusters, 0);
        sort(numbers)?;

        let (order, labels, centroids) = (gpu.read(order), gpu.read(labels), gpu.read(centroids));
        let head = |head: usize| {
            let (valid, own) = (self.lens()[head], self.own_clusters(head));
            let rows = centroids[head * k * HEAD_DIM..].chunks_exact(HEAD_DIM).take(own);
            Device {
                order: order[head * n..][..valid].to_vec(),
                labels: labels[head * n..][..valid].to_vec(),
                centroids: rows.flat_map(|row| &row[..self.dim]).copied().collect(),
            }
        };
        Ok((0..heads).map(head).collect())
    }

    /// Both, compared; returns the CPU's.
    fn check(&self, warm: Option<&[Grouping]>) -> Vec<Grouping> {
        let cpu = self.cpu(warm);
        let device = self.device(warm).unwrap_or_else(|fault| panic!("{fault}"));
        for (head, (cpu, device)) in cpu.iter().zip(&device).enumerate() {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(device.labels, cpu.labels, "labels of head {head}");
            assert_eq!(device.order, cpu.order, "order of head {head}");
            assert_eq!(bits(&device.centroids), bits(&cpu.centroids), "centroids of head {head}");
        }
        cpu
    }
}

#[test]
fn cold_and_warm_starts_give_the_cpus_grouping() {
    let mut case = Case::new(700, 391, 24, 12, 12);
    case.iterations = 3;
    let cold = case.check(None);
    case.iterations = 2;
    case.schedule = Schedule::Random(5);
    case.check(Some(&cold));
}

#[test]
fn the_path_spans_warps_and_tiles() {
    // 40 clusters in the second head, 33 in the first, which has no more tokens.
    let mut case = Case::new(80, 33, 16, 40, 40);
    for schedule in [Schedule::Oldest, Schedule::Newest] {
        case.schedule = schedule;
        case.check(None);
    }
}

#[test]
fn clusters_without_tokens_come_last() {
    let mut case = Case::new(60, 30, 8, 9, 4);
    // Equal tokens have equal distances, and all go to the lowest label of their kind.
    case.v.iter_mut().for_each(|x| *x = (*x / 16.0).round());
    for grouping in case.check(None) {
        assert!(grouping.labels.iter().all(|&label| label < 4), "{:?}", grouping.labels);
    }
}

#[test]
fn a_head_without_tokens_is_left_alone() {
    Case::new(20, 0, 8, 3, 3).check(None);
}

#[test]
fn ties_of_the_path_go_to_its_first_place() {
    // Points of a small cube: most places lengthen the path alike.
    let mut case = Case::new(64, 50, 8, 32, 32);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    case.v.chunks_exact_mut(8).for_each(|v| v.fill_with(|| rng.random_range(0..=1) as f32));
    case.check(None);
}
