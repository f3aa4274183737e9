//! The k-means and the sort on the GPU: exact where they are exact, near ties where they are not.

use kernels_gpu::kernels::tiles::HEAD_DIM;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::backend::cuda::{DeviceOperands, Grouping};
use vc_attention::grouping::stats::{MeanBits, shares};
use vc_attention::grouping::stable_argsort;
use vc_attention::{DType, Layout, Plan, Problem, Recipe};

use crate::call::{OnGpu, Wanted};
use crate::common::{Case, F32_LSE, recipe, same_bits};
use crate::device::{Gpu, gpu};
use crate::inputs::{Gaps, Inputs, plain, real};

/// A distance is |t|^2 - 2 v.t with 128 products in f32: labels whose distances differ by less than this share
/// of |v|^2 + |t|^2 are a tie.
const TIE: f64 = 4e-6;

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

/// Every label is that of a nearest target of `before`, ties aside; returns how many are not the very nearest.
fn check_labels(head: &Head, before: &[f32], v: &[f32], dim: usize, dtype: DType, case: &str) -> usize {
    let targets: Vec<Vec<f64>> =
        before.chunks_exact(HEAD_DIM).map(|c| c[..dim].iter().map(|&x| rounded(x, dtype)).collect()).collect();
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
    let norms: Vec<f64> = targets.iter().map(|t| norm(t)).collect();
    let mut ties = 0;
    for (token, (v, &label)) in v.chunks_exact(dim).zip(head.labels).enumerate() {
        let v: Vec<f64> = v.iter().map(|&x| x.into()).collect();
        let distance =
            |c: usize| norms[c] - 2.0 * v.iter().zip(&targets[c]).map(|(v, t)| v * t).sum::<f64>();
        let all: Vec<f64> = (0..targets.len()).map(distance).collect();
        let nearest = (0..all.len()).min_by(|&a, &b| all[a].total_cmp(&all[b])).expect("a cluster");
        if nearest == usize::from(label) {
            continue;
        }
        ties += 1;
        let gap = (all[usize::from(label)] - all[nearest]) / (norm(&v) + norms[nearest]);
        assert!(
            gap <= TIE,
            "{case}: token {token} has label {label} at {:.9}, but cluster {nearest} is at {:.9} (relative gap {gap:.2e})",
            all[usize::from(label)],
            all[nearest]
        );
    }
    ties
}

/// The centroids after an update are the CPU's for these labels: members by ascending token, in runs of 128.
fn check_update(head: &Head, before: &[f32], v: &[f32], dim: usize, case: &str) {
    let clusters = head.centroids.len() / HEAD_DIM;
    for cluster in 0..clusters {
        let members: Vec<usize> =
            (0..head.labels.len()).filter(|&t| usize::from(head.labels[t]) == cluster).collect();
        for channel in 0..HEAD_DIM {
            let at = cluster * HEAD_DIM + channel;
            let sum = members.chunks(128).fold(0.0f32, |total, run| {
                total + run.iter().fold(0.0f32, |sum, t| sum + if channel < dim { v[t * dim + channel] } else { 0.0 })
            });
            let want = if members.is_empty() { before[at] } else { sum / members.len() as f32 };
            assert!(
                head.centroids[at].to_bits() == want.to_bits(),
                "{case}: cluster {cluster} ({} members), channel {channel}: got {}, want {want}",
                members.len(),
                head.centroids[at]
            );
        }
    }
}

/// Iterations one at a time, each against the centroids that the one before left.
fn check_iterations(gpu: &Gpu, problem: &Problem, k: usize, case: &str) {
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
                ties += check_labels(&head, before, &v, dim, dtype, &case);
                assigned += head.labels.len();
                check_update(&head, before, &v, dim, &case);
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

/// The first iteration has the CPU's seeds: its clusters are the CPU's, a few ties aside, whatever their numbers.
#[test]
fn kmeans_starts_as_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (i, k) in [1, 8, 64, 300].into_iter().enumerate() {
        let inputs = plain(Case::new([1, 2, 2], [16, 4000], 128), 40 + i as u64, [DType::Bf16, DType::F16][i % 2]);
        let problem = inputs.problem();
        let recipe = kmeans(k, 1);
        let operands = OnGpu::new(&gpu, &problem, &recipe, Wanted::default()).group(Grouping::Cold);
        let plan = Plan::new(&problem, &recipe, F32_LSE).expect("valid");
        let cpu = Cpu.group(&plan, &problem, None).expect("groups");
        for (index, want) in cpu.0.iter().enumerate() {
            let head = head(&operands, &problem, index, k);
            // The CPU numbers its clusters afresh: a cluster of the GPU goes by the label that most have there.
            let mut votes = vec![vec![0usize; k]; k];
            head.labels.iter().zip(&want.labels).for_each(|(&a, &b)| votes[usize::from(a)][usize::from(b)] += 1);
            let agree: usize = votes.iter().map(|v| v.iter().max().copied().unwrap_or(0)).sum();
            let moved = head.labels.len() - agree;
            println!("k {k}, head {index}: {moved} of {} tokens in another cluster than on the CPU", head.labels.len());
            assert!(moved * 500 <= head.labels.len(), "k {k}, head {index}: {moved} tokens in another cluster");
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
    let whole = OnGpu::new(&gpu, &inputs.problem(), &kmeans(32, 4), Wanted::default()).group(Grouping::Cold);
    let halves = OnGpu::new(&gpu, &inputs.problem(), &kmeans(32, 2), Wanted::default());
    halves.group(Grouping::Cold);
    let second = halves.group(Grouping::Warm);
    assert_eq!(whole.labels, second.labels);
    assert!(same_bits(&whole.centroids, &second.centroids));
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
        println!("{name}: share {actual:.4} on the GPU's order (reported {reported:.4}), {cpu:.4} on the CPU's");
        assert!((reported - actual).abs() < 1e-3, "{name}: reports {reported}, its order has {actual}");
        assert!(actual > cpu - 0.01, "{name}: the GPU's order has {actual}, the CPU's {cpu}");
    }
}
