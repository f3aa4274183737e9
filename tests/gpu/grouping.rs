//! The k-means and the sort on the GPU: exact where they are exact, near ties where they are not.

use kernels_gpu::kernels::tiles::HEAD_DIM;
use rayon::prelude::*;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::backend::cuda::{DeviceOperands, Grouping};
use vc_attention::grouping::stable_argsort;
use vc_attention::grouping::stats::{MeanBits, shares};
use vc_attention::{DType, Layout, Plan, Problem, Recipe};

use crate::call::{OnGpu, Wanted};
use crate::common::{Case, F32_LSE, recipe, same_bits};
use crate::device::{Gpu, gpu};
use crate::inputs::{Gaps, Inputs, plain, real};

/// A distance is |t|^2 - 2 v.t with 128 products in f32: labels whose distances differ by less than this share
/// of |v|^2 + |t|^2 are a tie.
const TIE: f64 = 1e-5;

fn kmeans(k: usize, iterations: usize) -> Recipe {
    recipe(&format!("vc16-expcast+k={k}+iterations={iterations}"))
}

/// The valid value tokens of one head, widened.
fn tokens(problem: &Problem, index: usize) -> Vec<f32> {
    let heads = problem.v.shape()[1];
    problem.v.read_head(index / heads, index % heads, problem.kv_len(index / heads))
}

/// What one head was given by the grouping.
struct Head<'a> {
    order: &'a [u32],
    labels: &'a [u16],
    /// [clusters, 128]
    centroids: &'a [f32],
}

fn head<'a>(x: &'a DeviceOperands, problem: &Problem, index: usize, k: usize) -> Head<'a> {
    let (n, heads) = (problem.v.shape()[2], problem.v.shape()[1]);
    let valid = problem.kv_len(index / heads);
    let stored = k.min(n);
    Head {
        order: &x.order[index * n..][..valid],
        labels: &x.labels[index * n..][..valid],
        centroids: &x.centroids[index * stored * HEAD_DIM..][..stored.min(valid) * HEAD_DIM],
    }
}

/// Whatever the labels are: they are in range, and the order is their stable argsort.
fn check_order(head: &Head, k: usize, case: &str) {
    let clusters = k.min(head.labels.len());
    let bad = head.labels.iter().position(|&label| usize::from(label) >= clusters);
    assert!(bad.is_none(), "{case}: token {bad:?} has a label beyond {clusters} clusters");
    let want = stable_argsort(head.labels);
    let first = want.iter().zip(head.order).position(|(a, b)| a != b);
    assert!(first.is_none(), "{case}: not the stable argsort of the labels from position {first:?} on");
}

/// `x` as the matrix unit gets it.
fn rounded(x: f32, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_f32(x).to_f64(),
        DType::Bf16 => half::bf16::from_f32(x).to_f64(),
        DType::F32 => x.into(),
    }
}

/// What one iteration made of the centroids `before` it, clusters under the numbers that they had then: the GPU is
/// free to number them afresh, so that neighbours are alike.
struct Step<'a> {
    head: &'a Head<'a>,
    before: &'a [f32],
    v: &'a [f32],
    dim: usize,
    /// Nearest of `before` to every token, and how much further the cluster is that it was given.
    nearest: Vec<usize>,
    /// Number before of every cluster with members.
    old: Vec<Option<usize>>,
}

impl<'a> Step<'a> {
    /// Distances in f64 to the centroids as the matrix unit gets them.
    fn new(
        head: &'a Head,
        before: &'a [f32],
        v: &'a [f32],
        dim: usize,
        dtype: DType,
    ) -> (Self, Vec<Vec<f64>>) {
        let targets: Vec<Vec<f64>> = before
            .chunks_exact(HEAD_DIM)
            .map(|c| c[..dim].iter().map(|&x| rounded(x, dtype)).collect())
            .collect();
        let norms: Vec<f64> = targets.iter().map(|t| norm(t)).collect();
        let distances: Vec<Vec<f64>> = v
            .par_chunks_exact(dim)
            .map(|v| {
                let distance = |(t, norm): (&Vec<f64>, &f64)| {
                    norm - 2.0 * v.iter().zip(t).map(|(&v, t)| f64::from(v) * t).sum::<f64>()
                };
                targets.iter().zip(&norms).map(distance).collect()
            })
            .collect();
        let nearest: Vec<usize> = distances
            .iter()
            .map(|d| (0..d.len()).min_by(|&a, &b| d[a].total_cmp(&d[b])).expect("a cluster"))
            .collect();
        let mut votes = vec![std::collections::BTreeMap::<usize, usize>::new(); targets.len()];
        for (&label, &nearest) in head.labels.iter().zip(&nearest) {
            *votes[usize::from(label)].entry(nearest).or_default() += 1;
        }
        let winner =
            |votes: &std::collections::BTreeMap<usize, usize>| votes.iter().max_by_key(|v| v.1).map(|v| *v.0);
        let old = votes.iter().map(winner).collect();
        (Self { head, before, v, dim, nearest, old }, distances)
    }

    /// Every label is that of a nearest centroid, ties aside; returns how many are not the very nearest.
    fn check_labels(&self, distances: &[Vec<f64>], case: &str) -> usize {
        let mut taken = self.old.iter().flatten().collect::<Vec<_>>();
        taken.sort_unstable();
        let twice = taken.windows(2).find(|pair| pair[0] == pair[1]);
        assert!(twice.is_none(), "{case}: cluster {twice:?} became two");
        let mut ties = 0;
        for (token, (&label, &nearest)) in self.head.labels.iter().zip(&self.nearest).enumerate() {
            let given = self.old[usize::from(label)].expect("a cluster with a member");
            if given == nearest {
                continue;
            }
            ties += 1;
            let d = &distances[token];
            let v: Vec<f64> = self.v[token * self.dim..][..self.dim].iter().map(|&x| x.into()).collect();
            let t: Vec<f64> =
                self.before[nearest * HEAD_DIM..][..self.dim].iter().map(|&x| x.into()).collect();
            let gap = (d[given] - d[nearest]) / (norm(&v) + norm(&t));
            assert!(
                gap <= TIE,
                "{case}: token {token} went to cluster {given} at {:.9}, but {nearest} is at {:.9} (relative gap {gap:.2e})",
                d[given],
                d[nearest]
            );
        }
        ties
    }

    /// The centroids are the CPU's for these labels: members by ascending token, in runs of 128; a cluster without
    /// one keeps its centroid.
    fn check_update(&self, case: &str) {
        let Self { head, before, v, dim, old, .. } = self;
        let mut kept: Vec<usize> = (0..old.len()).filter(|c| !old.contains(&Some(*c))).collect();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (cluster, got) in head.centroids.chunks_exact(HEAD_DIM).enumerate() {
            let members: Vec<usize> =
                (0..head.labels.len()).filter(|&t| usize::from(head.labels[t]) == cluster).collect();
            if members.is_empty() {
                let same = kept.iter().position(|&c| bits(got) == bits(&before[c * HEAD_DIM..][..HEAD_DIM]));
                let same = same.unwrap_or_else(|| panic!("{case}: the empty cluster {cluster} moved"));
                kept.swap_remove(same);
                continue;
            }
            for (channel, got) in got.iter().enumerate() {
                let x = |t: &usize| if channel < *dim { v[t * dim + channel] } else { 0.0 };
                let sum = members
                    .chunks(128)
                    .fold(0.0f32, |total, run| total + run.iter().fold(0.0f32, |sum, t| sum + x(t)));
                let want = sum / members.len() as f32;
                assert!(
                    got.to_bits() == want.to_bits(),
                    "{case}: cluster {cluster} ({} members), channel {channel}: got {got}, want {want}",
                    members.len()
                );
            }
        }
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum()
}

/// The same clusters under any numbers: every token has the centroid that it has in the other.
fn same_clusters(a: &DeviceOperands, b: &DeviceOperands, problem: &Problem, k: usize) -> bool {
    let heads = problem.v.shape()[0] * problem.v.shape()[1];
    (0..heads).all(|index| {
        let [a, b] = [a, b].map(|x| head(x, problem, index, k));
        a.labels.iter().zip(b.labels).all(|(&i, &j)| {
            let row = |h: &Head<'_>, i: u16| h.centroids[usize::from(i) * HEAD_DIM..][..HEAD_DIM].to_vec();
            same_bits(&row(&a, i), &row(&b, j))
        })
    })
}

/// Iterations one at a time, each against the centroids that the one before left.
pub fn check_iterations(gpu: &Gpu, problem: &Problem, k: usize, case: &str) {
    let (dim, dtype) = (problem.v.shape()[3], problem.v.dtype());
    let heads = problem.v.shape()[0] * problem.v.shape()[1];
    let call = OnGpu::new(gpu, problem, &kmeans(k, 1), Wanted::default());
    let mut before: Vec<Vec<f32>> = Vec::new();
    let (mut ties, mut assigned) = (0, 0);
    for iteration in 0..3 {
        let operands = call.group(if iteration == 0 { Grouping::Cold } else { Grouping::Warm });
        for index in 0..heads {
            let case = format!("{case}, k {k}, iteration {iteration}, head {index}");
            let head = head(&operands, problem, index, k);
            let v = tokens(problem, index);
            check_order(&head, k, &case);
            if let Some(before) = before.get(index) {
                let (step, distances) = Step::new(&head, before, &v, dim, dtype);
                ties += step.check_labels(&distances, &case);
                assigned += head.labels.len();
                step.check_update(&case);
            }
        }
        before = (0..heads).map(|index| head(&operands, problem, index, k).centroids.to_vec()).collect();
    }
    println!("{case}, k {k}: {ties} of {assigned} labels decided by rounding");
    assert!(ties * 200 <= assigned + 200, "{case}, k {k}: {ties} of {assigned} labels are ties");
}

#[test]
fn kmeans_iterations() {
    let Some(gpu) = gpu() else { return };
    for (i, k) in [1, 2, 3, 7, 16, 64, 100, 257, 1000, 1024].into_iter().enumerate() {
        let case = Case::new([i % 2 + 1, 2, 2], [16, 1500 + 37 * i], [128, 64, 40, 96][i % 4]);
        let inputs = plain(case, 20 + i as u64, [DType::Bf16, DType::F16][i % 2]);
        check_iterations(&gpu, &inputs.problem(), k, &format!("{case:?}"));
    }
}

#[test]
fn kmeans_of_strided_and_padded_values() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new([3, 2, 2], [16, 2100], 80);
    let mut data = case.outliers(30);
    let lens = [2100, 0, 1027];
    for (i, x) in data.v.iter_mut().enumerate() {
        let (batch, token) = (i / (2 * 2100 * 80), i / 80 % 2100);
        *x = if token < lens[batch] { *x } else { f32::NAN };
    }
    let inputs = Inputs::new(&data, DType::Bf16, Layout::Bshd, Gaps::Some);
    let problem = Problem { kv_lens: Some(&lens), ..inputs.problem() };
    for k in [5, 64, 1024] {
        check_iterations(&gpu, &problem, k, "kv_lens");
    }
}

#[test]
fn kmeans_with_more_clusters_than_tokens() {
    let Some(gpu) = gpu() else { return };
    for tokens in [1, 2, 9, 130] {
        let inputs = plain(Case::new([1, 2, 2], [8, tokens], 64), 31, DType::F16);
        check_iterations(&gpu, &inputs.problem(), 256, &format!("{tokens} tokens"));
    }
    let lens = [3, 700];
    let inputs = plain(Case::new([2, 1, 1], [8, 700], 64), 32, DType::Bf16);
    check_iterations(&gpu, &Problem { kv_lens: Some(&lens), ..inputs.problem() }, 300, "kv_lens");
}

#[test]
fn kmeans_of_equal_tokens() {
    let Some(gpu) = gpu() else { return };
    let mut data = Case::new([1, 1, 1], [8, 500], 64).normal(33);
    let first: Vec<f32> = data.v[..64].to_vec();
    data.v.chunks_exact_mut(64).for_each(|x| x.copy_from_slice(&first));
    let inputs = Inputs::new(&data, DType::F16, Layout::Bhsd, Gaps::None);
    let call = OnGpu::new(&gpu, &inputs.problem(), &kmeans(8, 4), Wanted::default());
    let operands = call.group(Grouping::Cold);
    assert!(operands.labels.iter().all(|&label| label == 0), "ties go to the lower label");
    check_order(&head(&operands, &inputs.problem(), 0, 8), 8, "equal tokens");
}

/// The first iteration has the CPU's seeds: its clusters are the CPU's, a few ties aside, and so are their numbers.
#[test]
fn kmeans_starts_as_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (i, k) in [1, 8, 64, 300].into_iter().enumerate() {
        let inputs =
            plain(Case::new([1, 2, 2], [16, 4000], 128), 40 + i as u64, [DType::Bf16, DType::F16][i % 2]);
        let problem = inputs.problem();
        let recipe = kmeans(k, 1);
        let operands = OnGpu::new(&gpu, &problem, &recipe, Wanted::default()).group(Grouping::Cold);
        let plan = Plan::new(&problem, &recipe, F32_LSE).expect("valid");
        let cpu = Cpu.group(&plan, &problem, None).expect("groups");
        for (index, want) in cpu.0.iter().enumerate() {
            let head = head(&operands, &problem, index, k);
            // One token elsewhere may change all numbers: a cluster of the GPU goes by the label that most have there.
            let mut votes = vec![vec![0usize; k]; k];
            head.labels
                .iter()
                .zip(&want.labels)
                .for_each(|(&a, &b)| votes[usize::from(a)][usize::from(b)] += 1);
            let agree: usize = votes.iter().map(|v| v.iter().max().copied().unwrap_or(0)).sum();
            let moved = head.labels.len() - agree;
            println!(
                "k {k}, head {index}: {moved} of {} tokens in another cluster than on the CPU",
                head.labels.len()
            );
            assert!(
                moved * 500 <= head.labels.len(),
                "k {k}, head {index}: {moved} tokens in another cluster"
            );
            // With the same clusters, the path that numbers them is the CPU's, bit for bit.
            if moved == 0 {
                assert_eq!(head.labels, want.labels, "k {k}, head {index}: the same clusters, other numbers");
                assert!(same_bits(head.centroids, &want.centroids), "k {k}, head {index}: centroids");
            }
        }
    }
}

#[test]
fn kmeans_is_deterministic() {
    let Some(gpu) = gpu() else { return };
    let inputs = plain(Case::new([2, 3, 3], [16, 3001], 128), 50, DType::Bf16);
    let recipe = kmeans(64, 4);
    let call = OnGpu::new(&gpu, &inputs.problem(), &recipe, Wanted::default());
    let first = call.group(Grouping::Cold);
    for _ in 0..4 {
        let again = call.group(Grouping::Cold);
        assert_eq!(first.labels, again.labels);
        assert_eq!(first.order, again.order);
        assert!(same_bits(&first.centroids, &again.centroids), "centroids differ from run to run");
    }
    let other = OnGpu::new(&gpu, &inputs.problem(), &recipe, Wanted::default()).group(Grouping::Cold);
    assert_eq!(first.labels, other.labels, "a plan elsewhere in memory groups otherwise");
}

/// A cold start of four iterations is one of two and a warm start of two more.
#[test]
fn kmeans_continues_where_it_stopped() {
    let Some(gpu) = gpu() else { return };
    let inputs = plain(Case::new([1, 2, 2], [16, 2500], 96), 51, DType::F16);
    let problem = inputs.problem();
    let whole = OnGpu::new(&gpu, &problem, &kmeans(32, 4), Wanted::default()).group(Grouping::Cold);
    let halves = OnGpu::new(&gpu, &problem, &kmeans(32, 2), Wanted::default());
    halves.group(Grouping::Cold);
    let second = halves.group(Grouping::Warm);
    assert!(same_clusters(&whole, &second, &problem, 32), "4 iterations are not 2 and 2");
    let reused = halves.group(Grouping::Reuse);
    assert_eq!(second.order, reused.order, "Reuse changed the order");
}

/// Energy that the block means hold under the GPU's order, on real inputs: as the GPU reports it, as it is, and
/// as the CPU's own order has it.
#[test]
fn kmeans_removes_the_energy() {
    let Some(gpu) = gpu() else { return };
    for name in crate::attention::REAL {
        let file = real(name);
        let (q, k, v) = file.problem_tensors(Layout::Bhsd).expect("sound");
        let problem = Problem::new(q, k, v);
        let recipe = recipe("vc16-expcast");
        let call = OnGpu::new(&gpu, &problem, &recipe, Wanted::default());
        let result = call.run(Grouping::Cold);
        let plan = Plan::new(&problem, &recipe, F32_LSE).expect("valid");
        let mean = |orders: &vc_attention::backend::cpu::Orders| {
            let share = |(index, g): (usize, &vc_attention::grouping::Grouping)| {
                shares(&tokens(&problem, index), v.shape()[3], &g.order, MeanBits::SixtyFour).per_block
            };
            orders.0.iter().enumerate().map(share).sum::<f64>() / orders.0.len() as f64
        };
        let reported = result.observed.mean_share.expect("V-Smooth reports its share");
        let actual = mean(&call.orders(&call.operands()));
        let cpu = mean(&Cpu.group(&plan, &problem, None).expect("groups"));
        println!(
            "{name}: share {actual:.4} on the GPU's order (reported {reported:.4}), {cpu:.4} on the CPU's"
        );
        assert!((reported - actual).abs() < 1e-3, "{name}: reports {reported}, its order has {actual}");
        assert!(actual > cpu - 0.01, "{name}: the GPU's order has {actual}, the CPU's {cpu}");
    }
}

/// The checks themselves, without a GPU: a right iteration passes, one wrong label or bit does not.
mod checks {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::common::Rng;

    const DIM: usize = 64;
    const TOKENS: usize = 600;
    const CLUSTERS: usize = 7;

    fn passes(labels: &[u16], centroids: &[f32], before: &[f32], v: &[f32]) -> bool {
        let order = stable_argsort(labels);
        let head = Head { order: &order, labels, centroids };
        catch_unwind(AssertUnwindSafe(|| {
            check_order(&head, CLUSTERS, "case");
            let (step, distances) = Step::new(&head, before, v, DIM, DType::F32);
            step.check_labels(&distances, "case");
            step.check_update("case");
        }))
        .is_ok()
    }

    fn nearest(before: &[f32], v: &[f32]) -> u16 {
        let distance = |c: &[f32]| v.iter().zip(c).map(|(v, c)| (v - c) * (v - c)).sum::<f32>();
        let of = |c: u16| distance(&before[usize::from(c) * HEAD_DIM..]);
        (0..CLUSTERS as u16).min_by(|&a, &b| of(a).total_cmp(&of(b))).expect("clusters")
    }

    /// Means of the members, the last cluster empty.
    fn updated(labels: &[u16], before: &[f32], v: &[f32]) -> Vec<f32> {
        let mut centroids = before.to_vec();
        for cluster in 0..CLUSTERS {
            let members: Vec<usize> = (0..TOKENS).filter(|&t| usize::from(labels[t]) == cluster).collect();
            for channel in 0..if members.is_empty() { 0 } else { DIM } {
                let mut total = 0.0f32;
                for run in members.chunks(128) {
                    total += run.iter().map(|t| v[t * DIM + channel]).fold(0.0, |sum, x| sum + x);
                }
                centroids[cluster * HEAD_DIM + channel] = total / members.len() as f32;
            }
        }
        centroids
    }

    #[test]
    fn checks_notice_one_token() {
        let mut rng = Rng(9);
        let v = rng.normals(TOKENS * DIM);
        let mut before = vec![0.0; CLUSTERS * HEAD_DIM];
        for (i, c) in before.chunks_exact_mut(HEAD_DIM).enumerate() {
            c[..DIM].copy_from_slice(&v[i * 80 * DIM..][..DIM]);
        }
        before[(CLUSTERS - 1) * HEAD_DIM..][..DIM].fill(100.0);
        let labels: Vec<u16> = v.chunks_exact(DIM).map(|v| nearest(&before, v)).collect();
        let centroids = updated(&labels, &before, &v);
        assert!(passes(&labels, &centroids, &before, &v), "a right iteration is refused");

        // Clusters under other numbers are the same clusters.
        let renumbered: Vec<u16> = labels.iter().map(|l| (l + 3) % CLUSTERS as u16).collect();
        let mut moved = centroids.clone();
        moved.rotate_right(3 * HEAD_DIM);
        assert!(passes(&renumbered, &moved, &before, &v), "numbers matter");

        let mut wrong = labels.clone();
        wrong[123] = (wrong[123] + 1) % (CLUSTERS as u16 - 1);
        assert!(!passes(&wrong, &updated(&wrong, &before, &v), &before, &v), "a wrong label goes unnoticed");
        for at in [5, (CLUSTERS - 1) * HEAD_DIM] {
            let mut wrong = centroids.clone();
            wrong[at] = f32::from_bits(wrong[at].to_bits() + 1);
            assert!(!passes(&labels, &wrong, &before, &v), "a wrong bit at {at} goes unnoticed");
        }
        let mut backwards = centroids.clone();
        backwards[0] = 0.0;
        assert!(!passes(&labels, &backwards, &before, &v), "a missing channel goes unnoticed");
    }
}
