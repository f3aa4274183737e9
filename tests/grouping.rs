//! Token orders: what must hold on any input, and what comes out on real and made-up heads.

use kernels_gpu::formats::e4m3;
use proptest::prelude::*;
use vc_attention::grouping::stats::{MeanBits, Shares, shares};
use vc_attention::grouping::{
    BLOCK, COLD_ITERATIONS, CUBE, Grouping, GroupingConfig, MAX_CLUSTERS, TokenOrder, default_clusters,
    group, stable_argsort,
};
use vc_attention::io::InputFile;
use vc_attention::synth::Synth;
use vc_attention::{Error, Layout};

const CLUSTERED: [TokenOrder; 3] = [TokenOrder::KMeans, TokenOrder::Rounded, TokenOrder::Balanced];

fn config(order: TokenOrder) -> GroupingConfig {
    GroupingConfig { order, ..GroupingConfig::sequence() }
}

fn kmeans(clusters: usize, iterations: usize) -> GroupingConfig {
    GroupingConfig { clusters: Some(clusters), iterations: Some(iterations), ..GroupingConfig::kmeans() }
}

/// Values in 16 loose clusters; cheap and the same everywhere.
fn values(tokens: usize, dim: usize) -> Vec<f32> {
    let mut state = 0x2545_F491u32;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    let centers: Vec<f32> = (0..16 * dim).map(|_| 2.0 * uniform()).collect();
    let class: Vec<usize> = (0..tokens).map(|_| ((uniform() + 0.5) * 15.99) as usize).collect();
    class.iter().flat_map(|&c| &centers[c * dim..][..dim]).map(|center| center + 2.0 * uniform()).collect()
}

fn is_permutation(order: &[u32], tokens: usize) -> bool {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..tokens as u32)
}

fn square(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2)).sum()
}

/// What k-means minimizes.
fn inertia(v: &[f32], dim: usize, grouping: &Grouping) -> f64 {
    let center = |label: u16| &grouping.centroids[usize::from(label) * dim..][..dim];
    v.chunks_exact(dim).zip(&grouping.labels).map(|(row, &label)| square(row, center(label))).sum()
}

fn in_pool<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool").install(work)
}

#[test]
fn every_order_is_a_permutation_and_follows_its_labels() {
    for dim in [1, 7, 64, 128] {
        for tokens in [0, 1, 2, 127, 128, 129, 255, 640, 1500] {
            let (v, grid) = (values(tokens, dim), Some([3, 5, 100]));
            for order in [TokenOrder::Sequence, TokenOrder::Cube].into_iter().chain(CLUSTERED) {
                let grouping = group(&v, dim, &config(order), grid, None).expect("valid");
                assert!(is_permutation(&grouping.order, tokens), "{order:?}, {tokens} tokens, dim {dim}");
                assert_eq!(grouping.centroids.len(), grouping.clusters * dim);
                if grouping.clusters > 0 {
                    assert_eq!(grouping.order, stable_argsort(&grouping.labels));
                    assert!(grouping.labels.iter().all(|&label| usize::from(label) < grouping.clusters));
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn stable_argsort_is_a_stable_sort(labels in prop::collection::vec(0u16..40, 0..600)) {
        let mut expected: Vec<u32> = (0..labels.len() as u32).collect();
        expected.sort_by_key(|&token| labels[token as usize]);
        prop_assert_eq!(stable_argsort(&labels), expected);
    }
}

#[test]
fn stable_argsort_takes_any_label() {
    assert_eq!(stable_argsort(&[u16::MAX, 0, u16::MAX]), [1, 0, 2]);
    assert!(stable_argsort(&[]).is_empty());
}

#[test]
fn a_converged_kmeans_is_a_fixed_point() {
    let (dim, v) = (16, values(3000, 16));
    let grouping = group(&v, dim, &kmeans(12, 500), None, None).expect("valid");
    assert!(grouping.iterations < 500, "it stops when no label changes");
    let longer = group(&v, dim, &kmeans(12, 5000), None, None).expect("valid");
    assert_eq!(grouping, longer);

    // Every token sits with the nearest centroid, every centroid in the middle of its tokens.
    let mut members = vec![(0u32, vec![0.0f64; dim]); 12];
    for (row, &label) in v.chunks_exact(dim).zip(&grouping.labels) {
        let distance = |c: usize| square(row, &grouping.centroids[c * dim..][..dim]);
        let nearest = (0..12).map(distance).fold(f64::INFINITY, f64::min);
        assert!(distance(usize::from(label)) <= nearest + 1e-5);
        let (count, sum) = &mut members[usize::from(label)];
        *count += 1;
        sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    for ((count, sum), center) in members.iter().zip(grouping.centroids.chunks_exact(dim)) {
        assert!(*count > 0);
        sum.iter()
            .zip(center)
            .for_each(|(sum, &x)| assert!((sum / f64::from(*count) - f64::from(x)).abs() < 1e-5));
    }
}

#[test]
fn iterations_and_warm_starts_never_make_it_worse() {
    let (dim, v) = (32, values(5000, 32));
    let mut last = f64::INFINITY;
    let mut warm: Option<Vec<f32>> = None;
    for iteration in 1..=6 {
        let cold = group(&v, dim, &kmeans(20, iteration), None, None).expect("valid");
        let one_more = group(&v, dim, &kmeans(20, 1), None, warm.as_deref()).expect("valid");
        let now = inertia(&v, dim, &one_more);
        assert!(now <= last * (1.0 + 1e-6), "iteration {iteration}: {now} after {last}");
        assert!((now / inertia(&v, dim, &cold) - 1.0).abs() < 1e-3, "n iterations are n times one");
        (last, warm) = (now, Some(one_more.centroids));
    }
    // The next refresh: other values near these.
    let drifted: Vec<f32> = v.iter().zip(values(5001, 32)).map(|(x, y)| x + 0.1 * y).collect();
    let cold = group(&drifted, dim, &kmeans(20, COLD_ITERATIONS), None, None).expect("valid");
    let default = GroupingConfig { clusters: Some(20), ..GroupingConfig::kmeans() };
    let warm = group(&drifted, dim, &default, None, warm.as_deref()).expect("valid");
    assert_eq!(warm.iterations, 2);
    assert!(inertia(&drifted, dim, &warm) <= inertia(&drifted, dim, &cold) * 1.01);
}

#[test]
fn an_empty_cluster_keeps_its_centroid_and_comes_last() {
    let (dim, v) = (8, values(700, 8));
    let mut start = group(&v, dim, &kmeans(4, 3), None, None).expect("valid").centroids;
    start[dim..2 * dim].fill(1e4);
    let grouping = group(&v, dim, &kmeans(4, 3), None, Some(&start)).expect("valid");
    assert_eq!(grouping.centroids[3 * dim..], [1e4; 8]);
    assert!(grouping.labels.iter().all(|&label| label < 3));
}

#[test]
fn few_or_equal_tokens() {
    for order in CLUSTERED {
        let one = group(&[1.0, -2.0], 2, &config(order), None, None).expect("valid");
        assert_eq!((one.order, one.labels, one.centroids), (vec![0], vec![0], vec![1.0, -2.0]));
        let equal = group(&[0.25; 300 * 4], 4, &config(order), None, None).expect("valid");
        assert!(equal.centroids.iter().all(|&x| x == 0.25), "{order:?}");
        assert!(is_permutation(&equal.order, 300));
    }
    let equal = group(&[0.25; 300 * 4], 4, &kmeans(7, 4), None, None).expect("valid");
    assert!(equal.order.into_iter().eq(0..300), "ties go to the lower cluster, and the sort is stable");
    let many = group(&values(5, 3), 3, &kmeans(64, 4), None, None).expect("valid");
    assert_eq!(many.clusters, 5, "at most one cluster a token");
    assert!(is_permutation(&many.order, 5));
    let again =
        group(&values(5, 3), 3, &kmeans(64, 4), None, Some(&many.centroids)).expect("as many as before");
    assert_eq!(again.clusters, 5);
}

#[test]
fn values_that_are_not_finite_do_not_panic() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let mut v = values(400, 4);
        v[13] = bad;
        v[900..1000].fill(bad);
        for order in CLUSTERED {
            let grouping = group(&v, 4, &config(order), None, None).expect("valid");
            assert!(is_permutation(&grouping.order, 400), "{order:?} with {bad}");
        }
    }
}

#[test]
fn the_same_bits_with_any_number_of_threads() {
    let head = Synth { grid: [3, 24, 33], ..Synth::small(5) }.head(0);
    for order in CLUSTERED {
        let run = || group(&head.v, 128, &config(order), None, None).expect("valid");
        let one = in_pool(1, run);
        assert_eq!(one, in_pool(3, run), "{order:?}");
        assert_eq!(one, run(), "{order:?}");
        let other =
            group(&head.v, 128, &GroupingConfig { seed: 1, ..config(order) }, None, None).expect("valid");
        assert_ne!(one.order, other.order, "the seed has a say");
    }
}

#[test]
fn blocks_of_rounded_and_balanced_do_not_mix_clusters() {
    for tokens in [100, 128, 1024, 1025, 5000] {
        let v = values(tokens, 16);
        for clusters in [Some(1), Some(3), Some(16), Some(90), None] {
            let rounded = GroupingConfig { clusters, ..config(TokenOrder::Rounded) };
            let grouping = group(&v, 16, &rounded, None, None).expect("valid");
            for block in grouping.order.chunks(BLOCK) {
                let label = grouping.labels[block[0] as usize];
                assert!(
                    block.iter().all(|&token| grouping.labels[token as usize] == label),
                    "{tokens} {clusters:?}"
                );
            }
        }
        let balanced = group(&v, 16, &config(TokenOrder::Balanced), None, None).expect("valid");
        assert_eq!(balanced.clusters, tokens.div_ceil(BLOCK));
        let mut sizes = vec![0; balanced.clusters];
        balanced.labels.iter().for_each(|&label| sizes[usize::from(label)] += 1);
        let last = sizes.pop();
        assert!(sizes.iter().all(|&size| size == BLOCK), "{tokens}: {sizes:?}");
        assert_eq!(last, Some(tokens - sizes.len() * BLOCK));
    }
}

#[test]
fn cubes_come_one_after_the_other() {
    for (grid, tokens) in [([8, 8, 16], 1024), ([5, 6, 11], 330), ([5, 6, 11], 200), ([1, 1, 300], 300)] {
        let order =
            group(&values(tokens, 2), 2, &config(TokenOrder::Cube), Some(grid), None).expect("valid").order;
        let [_, h, w] = grid;
        let cube = |token: u32| {
            let (t, y, x) = (token as usize / (h * w), token as usize / w % h, token as usize % w);
            (t / CUBE[0], y / CUBE[1], x / CUBE[2])
        };
        let mut expected: Vec<u32> = (0..tokens as u32).collect();
        expected.sort_by_key(|&token| cube(token));
        assert_eq!(order, expected, "{grid:?}");
    }
}

#[test]
fn bad_options_are_named() {
    let v = values(300, 4);
    let option = |config: GroupingConfig, grid, expected: &str| match group(&v, 4, &config, grid, None) {
        Err(Error::Option { option, .. }) => assert_eq!(option, expected),
        other => panic!("{config:?}: {other:?}"),
    };
    for clusters in [0, MAX_CLUSTERS + 1, usize::MAX] {
        option(kmeans(clusters, 4), None, "clusters");
        option(GroupingConfig { order: TokenOrder::Rounded, ..kmeans(clusters, 4) }, None, "clusters");
    }
    option(GroupingConfig { clusters: Some(2), ..config(TokenOrder::Balanced) }, None, "clusters");
    option(kmeans(4, 0), None, "iterations");
    for grid in [None, Some([1, 1, 299]), Some([0, 10, 30]), Some([usize::MAX, 2, 2])] {
        option(config(TokenOrder::Cube), grid, "grid");
    }
    let tensor = |v: &[f32], dim, config: &GroupingConfig, warm, expected: &str| match group(
        v, dim, config, None, warm,
    ) {
        Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, expected),
        other => panic!("{config:?}: {other:?}"),
    };
    tensor(&v, 0, &kmeans(4, 4), None, "v");
    tensor(&v, 7, &kmeans(4, 4), None, "v");
    tensor(&v, 4, &kmeans(4, 4), Some(&[0.0; 15]), "centroids");
    tensor(&v, 4, &kmeans(4, 4), Some(&[0.0; 12]), "centroids");
    tensor(&v, 4, &GroupingConfig::kmeans(), Some(&[]), "centroids");
}

/// The residual of V after the 16-bit means of blocks in an order, and the energy of V.
fn residual(v: &[f32], dim: usize, order: &[u32], round: impl Fn(f64) -> f64) -> (Vec<f64>, f64) {
    let mut out = Vec::new();
    for block in order.chunks(BLOCK) {
        let rows = || block.iter().map(|&token| &v[token as usize * dim..][..dim]);
        let mean: Vec<f64> = (0..dim)
            .map(|c| round(rows().map(|r| f64::from(r[c])).sum::<f64>() / block.len() as f64))
            .collect();
        out.extend(rows().flat_map(|row| row.iter().zip(&mean).map(|(&x, mean)| f64::from(x) - mean)));
    }
    (out, v.iter().map(|&x| f64::from(x).powi(2)).sum())
}

#[test]
fn the_mean_removes_exactly_its_energy() {
    // Paper Eq. 5, right: |R|^2 = |V|^2 - B |mu|^2; 1000 tokens, so that the last block is short.
    let v = values(1000, 24);
    for order in CLUSTERED {
        let order = group(&v, 24, &config(order), None, None).expect("valid").order;
        let (residual, energy) = residual(&v, 24, &order, |mean| mean);
        let left = residual.iter().map(|x| x * x).sum::<f64>() / energy;
        assert!((1.0 - left - shares(&v, 24, &order, MeanBits::SixtyFour).total).abs() < 1e-13);
    }
}

#[test]
fn shares_of_plain_cases() {
    let order: Vec<u32> = (0..256).collect();
    let all = shares(&[0.5; 256 * 3], 3, &order, MeanBits::Sixteen);
    assert_eq!(all, Shares { per_block: 1.0, total: 1.0 });
    let alternating: Vec<f32> = (0..256).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
    assert_eq!(shares(&alternating, 1, &order, MeanBits::Sixteen), Shares { per_block: 0.0, total: 0.0 });
    let half_zero: Vec<f32> = (0..256).map(|i| if i < 128 { 1.0 } else { 0.0 }).collect();
    assert_eq!(shares(&half_zero, 1, &order, MeanBits::Sixteen), Shares { per_block: 0.5, total: 1.0 });
    assert_eq!(shares(&[], 3, &[], MeanBits::Sixteen), Shares { per_block: 0.0, total: 0.0 });
}

/// |V - V_q|^2 / |V|^2 with E4M3 residuals, a scale per channel.
fn e4m3_error(v: &[f32], dim: usize, order: &[u32]) -> f64 {
    let (residual, energy) = residual(v, dim, order, |mean| f64::from(half::f16::from_f64(mean).to_f32()));
    let mut amax = vec![0.0f64; dim];
    residual
        .chunks_exact(dim)
        .for_each(|row| amax.iter_mut().zip(row).for_each(|(m, x)| *m = m.max(x.abs())));
    let error = |(i, &x): (usize, &f64)| {
        let scale = amax[i % dim] / 448.0;
        (f64::from(e4m3::round((x / scale) as f32)) * scale - x).powi(2)
    };
    residual.iter().enumerate().map(error).sum::<f64>() / energy
}

#[test]
fn real_heads() {
    // Share of the sequence, cube and k-means order, mean over the heads: ranges about what was measured.
    let expected = [
        ("tiny-dit/qkv_07", [0.10..0.13, 0.14..0.18, 0.50..0.60]),
        ("dinov2/photo_layer02_head3", [0.20..0.40, 0.22..0.45, 0.50..0.75]),
        ("dinov2/video_layer08_head3", [0.30..0.50, 0.45..0.65, 0.60..0.80]),
    ];
    for (name, ranges) in expected {
        let file = InputFile::open(format!("data/{name}.safetensors")).expect("a bundled file");
        let (_, _, v) = file.problem_tensors(Layout::Bhsd).expect("q, k and v");
        let [_, heads, tokens, dim] = v.shape();
        let grid = file.grid().expect("a grid");
        let mut mean = [0.0; 3];
        for head in 0..heads {
            let v = v.read_head(0, head, tokens);
            let by = |order| group(&v, dim, &config(order), grid, None).expect("valid").order;
            let share = |order: &[u32]| shares(&v, dim, order, MeanBits::Sixteen);
            let [sequence, cube, kmeans, rounded, balanced] = [
                TokenOrder::Sequence,
                TokenOrder::Cube,
                TokenOrder::KMeans,
                TokenOrder::Rounded,
                TokenOrder::Balanced,
            ]
            .map(by);
            for (mean, order) in mean.iter_mut().zip([&sequence, &cube, &kmeans]) {
                *mean += share(order).per_block / heads as f64;
            }
            // E4M3's error follows the energy that is left, whatever is an outlier.
            let base = e4m3_error(&v, dim, &sequence);
            let ratio = |order: &[u32]| e4m3_error(&v, dim, order) / base;
            let law = |order: &[u32]| (1.0 - share(order).total) / (1.0 - share(&sequence).total);
            for order in [&cube, &kmeans, &rounded, &balanced] {
                assert!(
                    (ratio(order) / law(order) - 1.0).abs() < 0.06,
                    "{name} {head}: {} {}",
                    ratio(order),
                    law(order)
                );
            }
            assert!(ratio(&kmeans) < 0.7 && ratio(&rounded) < ratio(&kmeans) * 1.05, "{name} {head}");
            assert!(ratio(&balanced) < ratio(&kmeans) && ratio(&balanced) < ratio(&rounded), "{name} {head}");
        }
        for (share, range) in mean.iter().zip(&ranges) {
            assert!(range.contains(share), "{name}: {mean:?}");
        }
    }
}

#[test]
fn alike_clusters_are_neighbours() {
    let file = InputFile::open("data/tiny-dit/qkv_07.safetensors").expect("a bundled file");
    let (_, _, v) = file.problem_tensors(Layout::Bhsd).expect("q, k and v");
    let v = v.read_head(0, 0, 4096);
    let grouping = group(&v, 128, &GroupingConfig::kmeans(), None, None).expect("valid");
    let k = grouping.clusters as u16;
    assert_eq!(k, 64);
    // The same clusters with other numbers: label * 27 mod 64 puts former neighbours far apart.
    let scattered: Vec<u16> = grouping.labels.iter().map(|&label| label * 27 % k).collect();
    let left = |order: &[u32]| 1.0 - shares(&v, 128, order, MeanBits::Sixteen).total;
    let (ours, other) = (left(&grouping.order), left(&stable_argsort(&scattered)));
    assert!(ours < 0.85 * other, "{ours} of the energy left, {other} with scattered numbers");
}

#[test]
fn synthetic_heads_have_the_shares_of_the_paper() {
    // Paper Fig. 4: 8%, 12% and 36%.
    for (synth, heads) in [(Synth::small(0), 4), (Synth::small(1), 2), (Synth::wan(0), 1)] {
        for head in 0..heads {
            let v = synth.head(head).v;
            for (order, target) in
                [(TokenOrder::Sequence, 0.08), (TokenOrder::Cube, 0.12), (TokenOrder::KMeans, 0.36)]
            {
                let order_of =
                    group(&v, synth.head_dim, &config(order), Some(synth.grid), None).expect("valid").order;
                let share = shares(&v, synth.head_dim, &order_of, MeanBits::Sixteen).per_block;
                assert!((share - target).abs() < 0.02, "{:?} head {head} {order:?}: {share}", synth.grid);
            }
        }
    }
}

#[test]
fn synthetic_heads_come_from_seed_and_number_alone() {
    let synth = Synth { grid: [2, 9, 16], ..Synth::small(3) };
    let both = in_pool(3, || synth.heads(2));
    let each = [synth.head(0), synth.head(1)];
    assert_eq!(both.v, [each[0].v.clone(), each[1].v.clone()].concat());
    assert_eq!(both.q, [each[0].q.clone(), each[1].q.clone()].concat());
    assert_ne!(each[0].v, each[1].v);
    assert_ne!(each[0], Synth { seed: 4, ..synth.clone() }.head(0));
    let Synth { grid, head_dim, .. } = synth;
    assert_eq!(both.k.len(), 2 * grid.iter().product::<usize>() * head_dim);
    for tiny in [[1, 1, 1], [1, 1, 2], [2, 1, 3]] {
        let head = Synth { grid: tiny, head_dim: 2, ..Synth::small(0) }.head(0);
        assert!([head.q, head.k, head.v].concat().iter().all(|x| x.is_finite()), "{tiny:?}");
    }
}

#[test]
fn synthetic_attention_is_neither_flat_nor_a_copy() {
    let synth = Synth { grid: [4, 16, 32], ..Synth::small(0) };
    let (head, n, d) = (synth.head(0), synth.tokens(), synth.head_dim);
    let mut effective: Vec<f64> = (0..n)
        .step_by(31)
        .map(|i| {
            let q = &head.q[i * d..][..d];
            let dot = |k: &[f32]| q.iter().zip(k).map(|(x, y)| x * y).sum::<f32>() / (d as f32).sqrt();
            let scores: Vec<f32> = head.k.chunks_exact(d).map(dot).collect();
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let p: Vec<f64> = scores.iter().map(|s| f64::from(s - max).exp()).collect();
            p.iter().sum::<f64>().powi(2) / p.iter().map(|p| p * p).sum::<f64>()
        })
        .collect();
    effective.sort_by(f64::total_cmp);
    let median = effective[effective.len() / 2];
    assert!((20.0..n as f64 / 4.0).contains(&median), "a query sees about {median} of {n} keys");
}

#[test]
fn default_numbers_of_clusters() {
    assert_eq!([0, 63, 64, 4096, 8192, 75_600].map(default_clusters), [1, 1, 1, 64, 128, 128]);
    let v = values(1000, 2);
    let clusters = |order| group(&v, 2, &config(order), None, None).expect("valid").clusters;
    assert_eq!(CLUSTERED.map(clusters), [15, 7, 8]);
}
