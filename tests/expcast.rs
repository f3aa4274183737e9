//! ExpCast's variants in the attention loop: which scores are exact, and what the encoders do to the error.

mod common;

use common::*;
use vc_attention::{Layout, Output, Problem, TensorView};

/// One head whose values are the identity, so that the output is the weights.
struct Weights {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

const KEYS: usize = 128;

impl Weights {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let v = (0..KEYS * KEYS).map(|i| if i % (KEYS + 1) == 0 { 1.0 } else { 0.0 }).collect();
        Self { q: rng.normals(32 * KEYS), k: rng.normals(KEYS * KEYS), v }
    }

    /// Weights over the largest of their row, [32, keys].
    fn of(&self, modifiers: &str) -> Vec<f32> {
        let view = |name, x, tokens| TensorView::new(name, x, [1, 1, tokens, KEYS], Layout::Bhsd).unwrap();
        let problem = Problem::new(
            view("q", self.q.as_slice(), 32),
            view("k", self.k.as_slice(), KEYS),
            view("v", self.v.as_slice(), KEYS),
        );
        let recipe = recipe(&format!("vc16+v=f32+demean=off+order=sequence+rowsum=decoded+{modifiers}"));
        let output = attend(&problem, &recipe);
        let rows = o_f32(&output).chunks_exact(KEYS);
        rows.flat_map(|row| {
            let largest = row.iter().copied().fold(0.0, f32::max);
            row.iter().map(move |p| p / largest)
        })
        .collect()
    }
}

#[test]
fn a_share_of_the_keys_has_the_weights_of_exact_exponentials() {
    let weights = Weights::new(1);
    // In f32 all three refer to the same maximum, whose weight is 256 in all.
    let [exact, cast] = ["p=e4m3", "p=expcast+encoder=f32"].map(|modifiers| weights.of(modifiers));
    assert!(exact.iter().zip(&cast).filter(|(a, b)| a != b).count() > exact.len() / 10);
    for (share, is_exact) in
        [("half", (|key| key / 8 % 2 == 1) as fn(usize) -> bool), ("quarter", |key| key / 8 % 4 == 3)]
    {
        let mixed = weights.of(&format!("p=expcast+encoder=f32+exact={share}"));
        for (i, &p) in mixed.iter().enumerate() {
            let expected = if is_exact(i % KEYS) { exact[i] } else { cast[i] };
            // Each was divided by the row's own sum and largest.
            assert!(
                (p - expected).abs() <= 1e-6 * expected,
                "{share}: weight {i} is {p}, expected {expected}"
            );
        }
    }
}

#[test]
fn with_every_block_near_its_maximum_expcast_is_exp_then_cast() {
    let tensors = Case::new([1, 2, 1], [70, 300], 64).normal(2).f32();
    let cast =
        |modifiers: &str| attend(&tensors.problem(), &recipe(&format!("vc16+rowsum=decoded{modifiers}")));
    let (exact, near) = (cast(""), cast("+p=expcast+encoder=f32+exact=16"));
    assert_eq!((exact.observed.exact_share, near.observed.exact_share), (0.0, 1.0));
    assert!(same_bits(o_f32(&exact), o_f32(&near)));
    assert!(!same_bits(o_f32(&exact), o_f32(&cast("+p=expcast+encoder=f32"))));
}

/// Scores of block j are `levels[j]` octaves for every query, a little less in all rows but one of every warp.
fn stairs(levels: &[f32], other_rows: f32) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    const DIM: usize = 32;
    let nats = std::f32::consts::LN_2 * (DIM as f32).sqrt();
    let q = (0..64 * DIM).map(|i| match (i % DIM, i / DIM % 16) {
        (0, _) => 1.0,
        // A second channel lowers the later blocks for all rows but the third of a warp.
        (1, row) if row != 2 => 1.0,
        _ => 0.0,
    });
    let k = (0..levels.len() * 128 * DIM).map(|i| match i % DIM {
        0 => levels[i / DIM / 128] * nats,
        1 if i / DIM >= 128 => other_rows * nats,
        _ => 0.0,
    });
    let v = Rng(3).normals(levels.len() * 128 * DIM);
    (q.collect(), k.collect(), v)
}

fn share(levels: &[f32], other_rows: f32, octaves: u32) -> f64 {
    let (q, k, v) = stairs(levels, other_rows);
    let view = |name, x, tokens| TensorView::new(name, x, [1, 1, tokens, 32], Layout::Bhsd).unwrap();
    let keys = levels.len() * 128;
    let problem = Problem::new(view("q", &q[..], 64), view("k", &k[..], keys), view("v", &v[..], keys));
    let output: Output =
        attend(&problem, &recipe(&format!("vc16-expcast+center=off+order=sequence+exact={octaves}")));
    output.observed.exact_share
}

#[test]
fn near_is_decided_block_by_block_without_knowing_later_maxima() {
    // Rising maxima: every block holds the largest score so far, whatever comes.
    assert_eq!(share(&[0.0, 5.0, 10.0, 15.0], 0.0, 1), 1.0);
    // Falling ones: the first alone, and with more octaves more.
    assert_eq!(share(&[15.0, 10.0, 5.0, 0.0], 0.0, 1), 0.25);
    assert_eq!(share(&[15.0, 10.0, 5.0, 0.0], 0.0, 4), 0.25);
    assert_eq!(share(&[15.0, 10.0, 5.0, 0.0], 0.0, 6), 0.5);
    assert_eq!(share(&[15.0, 10.0, 5.0, 0.0], 0.0, 16), 1.0);
    // A later maximum does not reach back.
    assert_eq!(share(&[10.0, 5.0, 15.0, 14.5], 0.0, 1), 0.75);
}

#[test]
fn one_row_near_its_maximum_decides_for_its_warp() {
    // The later blocks lie 8 octaves below for fifteen rows of sixteen, level for one.
    assert_eq!(share(&[8.0, 8.0], -8.0, 1), 1.0);
    // For that one too.
    assert_eq!(share(&[8.0, 0.0], 0.0, 1), 0.5);
}

#[test]
fn the_quadratic_encoder_takes_most_of_expcasts_error_back() {
    let tensors = Case::new([1, 2, 2], [256, 1024], 64).normal(4).f32();
    let reference = reference(&tensors.problem());
    for base in ["vc16", "vc8"] {
        let error = |modifiers: &str| {
            let text = format!("{base}+v=f32+demean=off+order=sequence+rowsum=decoded{modifiers}");
            relative(&o(&attend(&tensors.problem(), &recipe(&text))), &reference.o)
        };
        let [none, exact, cast, pinned, quadratic] =
            ["+p=f32", "+p=e4m3", "+p=expcast", "+p=expcast+encoder=pinned", "+p=expcast+encoder=quadratic"]
                .map(error);
        // Of P alone: what Q and K do is independent of it.
        let of_p = |x: f64| (x * x - none * none).sqrt();
        let back = (of_p(cast) - of_p(quadratic)) / (of_p(cast) - of_p(exact));
        assert!(
            (0.6..1.0).contains(&back),
            "{base}: {exact:.5} {quadratic:.5} {cast:.5}, {back:.2} of it back"
        );
        assert!((pinned / cast - 1.0).abs() < 0.02, "{base}: {pinned:.5} {cast:.5}");
    }
}
