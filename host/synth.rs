//! Made-up q, k, v with the value statistics of a video diffusion transformer, for tests and benchmarks.
//!
//! The block means of the values remove the shares of energy that the paper reports for Wan2.2 (Sec. 3.2,
//! Fig. 4): 8% in sequence order, 12% in 4 x 4 x 8 cubes, 36% after k-means. A value token is a sum whose parts
//! differ in who can remove them:
//!
//! - a constant vector: any block mean;
//! - a smooth field on the latent grid, its correlation reaching two or three places: cubes more than rows;
//! - the prototype of the token's class, classes changing every place or so: only an order that looks at values;
//! - noise of its own: nobody;
//! - in 0.5% of the tokens a spike several times the usual norm in 3 to 6 channels of one of a few kinds, the
//!   paper's value outliers.
//!
//! Queries and keys share an embedding of position and class, so that attention is local and drawn to its own
//! class, and have a few large constant channels. Kinds, channels and prototypes differ from head to head.

use rand::rngs::ChaCha8Rng;
use rand::seq::index::sample;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;

/// Independent fields that make up the position part of queries and keys, and how far each is correlated.
const POSITION_FIELDS: (usize, [f32; 3]) = (24, [1.5, 2.0, 2.0]);

/// Score of a query and a key of the same direction, in nats.
const SHARPNESS: f32 = 9.25;

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Synth {
    /// Latent grid [t, h, w]; tokens are its places in raster order.
    pub grid: [usize; 3],
    /// Channels of a head.
    pub head_dim: usize,
    /// Seed; every (seed, head) gives other data, the same on every run.
    pub seed: u64,
    /// Share of a value token's energy in the constant vector.
    pub constant: f32,
    /// Share in the smooth field.
    pub smooth: f32,
    /// Share in the class prototypes; what the three leave is noise.
    pub class: f32,
    /// Number of classes.
    pub classes: usize,
}

/// One head, each tensor row-major [tokens, head_dim].
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

impl Synth {
    /// The default: 8 x 32 x 32 = 8,192 tokens of 128 channels.
    pub fn small(seed: u64) -> Self {
        Self {
            grid: [8, 32, 32],
            head_dim: 128,
            seed,
            constant: 0.06,
            smooth: 0.17,
            class: 0.294,
            classes: 16,
        }
    }

    /// Wan2.2 at 720p and 81 frames: 21 x 45 x 80 = 75,600 tokens of 128 channels.
    pub fn wan(seed: u64) -> Self {
        Self { grid: [21, 45, 80], constant: 0.066, class: 0.266, classes: 64, ..Self::small(seed) }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.grid.iter().product()
    }

    /// Heads `0..heads` one after the other, each tensor row-major [heads, tokens, head_dim].
    pub fn heads(&self, heads: usize) -> Head {
        let each: Vec<Head> = (0..heads).into_par_iter().map(|head| self.head(head)).collect();
        let join = |tensor: fn(&Head) -> &[f32]| each.iter().flat_map(tensor).copied().collect();
        Head { q: join(|h| &h.q), k: join(|h| &h.k), v: join(|h| &h.v) }
    }

    /// One head.
    pub fn head(&self, head: usize) -> Head {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(head as u64);
        let class = self.class_of_tokens(&mut rng);
        let v = self.values(&class, &mut rng);
        let [q, k] = self.queries_and_keys(&class, &mut rng);
        Head { q, k, v }
    }

    /// The class of every token: the largest of smooth random scores, some classes more frequent than others.
    fn class_of_tokens(&self, rng: &mut ChaCha8Rng) -> Vec<usize> {
        let mut prior: Vec<f32> = (0..self.classes).map(|c| -0.6 * (1.0 + c as f32).ln()).collect();
        rand::seq::SliceRandom::shuffle(&mut prior[..], rng);
        let (mut best, mut class) = (vec![f32::NEG_INFINITY; self.tokens()], vec![0; self.tokens()]);
        for (c, prior) in prior.into_iter().enumerate() {
            let score = self.field([1.0, 0.7, 0.7], rng);
            for ((best, class), score) in best.iter_mut().zip(&mut class).zip(score) {
                if score + prior > *best {
                    (*best, *class) = (score + prior, c);
                }
            }
        }
        class
    }

    fn values(&self, class: &[usize], rng: &mut ChaCha8Rng) -> Vec<f32> {
        let (n, d) = (self.tokens(), self.head_dim);
        let mut constant: Vec<f32> = (0..d).map(|_| normal(rng) * (0.8 * normal(rng)).exp()).collect();
        scale_rows(&mut constant, d, 1.0);

        let smooth = self.mixed_fields(12, [2.2; 3], rng);

        // Prototypes of rank 48, so that classes are not all orthogonal; of log-normal norm.
        let mut prototypes = product(&normals(self.classes * 48, rng), &normals(48 * d, rng), d);
        for prototype in prototypes.chunks_exact_mut(d) {
            scale_rows(prototype, d, (0.1 * normal(rng)).exp());
        }
        let classes = self.centered_rows(class, &prototypes);

        let channel: Vec<f32> = (0..d).map(|_| (0.45 * normal(rng).clamp(-2.0, 2.0)).exp()).collect();
        let mut noise = normals(n * d, rng);
        noise.chunks_exact_mut(d).for_each(|row| row.iter_mut().zip(&channel).for_each(|(x, c)| *x *= c));
        scale_rows(&mut noise, d, 1.0);

        let mut v = vec![0.0; n * d];
        for row in v.chunks_exact_mut(d) {
            accumulate(row, &constant, self.constant.sqrt());
        }
        accumulate(&mut v, &smooth, self.smooth.sqrt());
        accumulate(&mut v, &classes, self.class.sqrt());
        accumulate(&mut v, &noise, (1.0 - self.constant - self.smooth - self.class).max(0.0).sqrt());
        self.add_outliers(&mut v, rng);
        // An RMS of a half per element is usual for values in bf16.
        v.iter_mut().for_each(|x| *x *= 0.5 * (d as f32).sqrt());
        v
    }

    /// Adds spikes of 2.5 to 4.5 times a token's norm to 0.5% of the tokens.
    fn add_outliers(&self, v: &mut [f32], rng: &mut ChaCha8Rng) {
        let d = self.head_dim;
        let kinds: Vec<Vec<(usize, f32)>> = (0..4)
            .map(|_| {
                let channels = rng.random_range(3..=6).min(d);
                let spike =
                    sample(rng, d, channels).into_iter().map(|c| (c, sign(rng) * rng.random_range(0.6..1.4)));
                let spike: Vec<(usize, f32)> = spike.collect();
                let norm = spike.iter().map(|(_, x)| x * x).sum::<f32>().sqrt();
                spike.into_iter().map(|(c, x)| (c, x / norm)).collect()
            })
            .collect();
        for token in sample(rng, self.tokens(), self.tokens() / 200) {
            let (kind, norm) = (&kinds[rng.random_range(0..kinds.len())], rng.random_range(2.5..4.5));
            kind.iter().for_each(|&(c, x)| v[token * d + c] += norm * x);
        }
    }

    fn queries_and_keys(&self, class: &[usize], rng: &mut ChaCha8Rng) -> [Vec<f32>; 2] {
        let (n, d) = (self.tokens(), self.head_dim);
        let mut shared = self.mixed_fields(POSITION_FIELDS.0, POSITION_FIELDS.1, rng);
        let classes = self.centered_rows(class, &normals(self.classes * d, rng));
        accumulate(&mut shared, &classes, 0.8);

        // |q| |k| / sqrt(d) = SHARPNESS.
        let norm = (SHARPNESS * (d as f32).sqrt()).sqrt();
        let mut own = || {
            let mut x = normals(n * d, rng);
            scale_rows(&mut x, d, 0.8);
            accumulate(&mut x, &shared, 1.0);
            x.chunks_exact_mut(d).for_each(|row| scale_rows(row, d, norm));
            x
        };
        let (mut q, mut k) = (own(), own());
        let rms = norm / (d as f32).sqrt();
        for channel in sample(rng, d, 3.min(d)) {
            let (in_q, in_k) = (5.0 * rms * sign(rng), 12.0 * rms * sign(rng));
            q.iter_mut().skip(channel).step_by(d).for_each(|x| *x += in_q);
            k.iter_mut().skip(channel).step_by(d).for_each(|x| *x += in_k);
        }
        [q, k]
    }

    /// `rank` fields mixed into the channels by a random matrix; mean squared norm of a row 1.
    fn mixed_fields(&self, rank: usize, reach: [f32; 3], rng: &mut ChaCha8Rng) -> Vec<f32> {
        let (n, d) = (self.tokens(), self.head_dim);
        let mut fields = vec![0.0; n * rank];
        for f in 0..rank {
            let field = self.field(reach, rng);
            fields.iter_mut().skip(f).step_by(rank).zip(field).for_each(|(to, from)| *to = from);
        }
        let mut mixed = product(&fields, &normals(rank * d, rng), d);
        scale_rows(&mut mixed, d, 1.0);
        mixed
    }

    /// The row of its class for every token, minus the mean over the tokens; mean squared norm 1.
    fn centered_rows(&self, class: &[usize], rows: &[f32]) -> Vec<f32> {
        let d = self.head_dim;
        let mut x: Vec<f32> = class.iter().flat_map(|&c| &rows[c * d..][..d]).copied().collect();
        let mut mean = vec![0.0; d];
        x.chunks_exact(d).for_each(|row| accumulate(&mut mean, row, 1.0 / class.len() as f32));
        x.chunks_exact_mut(d).for_each(|row| accumulate(row, &mean, -1.0));
        scale_rows(&mut x, d, 1.0);
        x
    }

    /// A Gaussian random field on the grid (periodic), mean 0 and variance 1, whose autocorrelation falls off as
    /// a Gaussian of standard deviation `reach` places along [t, h, w].
    fn field(&self, reach: [f32; 3], rng: &mut ChaCha8Rng) -> Vec<f32> {
        let [_, h, w] = self.grid;
        let mut field = normals(self.tokens(), rng);
        for (axis, stride) in [h * w, w, 1].into_iter().enumerate() {
            // White noise under a filter of width s is correlated over s sqrt(2).
            smooth_axis(&mut field, self.grid[axis], stride, reach[axis] * std::f32::consts::FRAC_1_SQRT_2);
        }
        let n = field.len() as f32;
        let mean = field.iter().sum::<f32>() / n;
        field.iter_mut().for_each(|x| *x -= mean);
        scale_rows(&mut field, 1, 1.0);
        field
    }
}

/// Convolves every periodic line of `len` elements, `stride` apart, with a Gaussian of standard deviation `s`.
fn smooth_axis(x: &mut [f32], len: usize, stride: usize, s: f32) {
    let reach = (4.0 * s).ceil() as usize;
    let kernel: Vec<f32> = (0..=reach).map(|i| (-0.5 * (i as f32 / s).powi(2)).exp()).collect();
    let mut slab = vec![0.0; len * stride];
    for lines in x.chunks_exact_mut(len * stride) {
        slab.copy_from_slice(lines);
        for (at, to) in lines.chunks_exact_mut(stride).enumerate() {
            to.iter_mut().for_each(|x| *x *= kernel[0]);
            for (i, &weight) in kernel.iter().enumerate().skip(1) {
                for from in [(at + i) % len, (at + i * (len - 1)) % len] {
                    accumulate(to, &slab[from * stride..][..stride], weight);
                }
            }
        }
    }
}

/// Row-major [n, r] times [r, d].
fn product(a: &[f32], b: &[f32], d: usize) -> Vec<f32> {
    let r = b.len() / d;
    let mut out = vec![0.0; a.len() / r * d];
    for (row, weights) in out.chunks_exact_mut(d).zip(a.chunks_exact(r)) {
        weights.iter().zip(b.chunks_exact(d)).for_each(|(&weight, from)| accumulate(row, from, weight));
    }
    out
}

/// Scales all rows of `d` elements by one factor, so that the root mean square of their norms is `norm`.
fn scale_rows(x: &mut [f32], d: usize, norm: f32) {
    let energy = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / (x.len() / d) as f64;
    if energy > 0.0 {
        let factor = norm / energy.sqrt() as f32;
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

fn accumulate(to: &mut [f32], from: &[f32], weight: f32) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += weight * from);
}

fn normal(rng: &mut ChaCha8Rng) -> f32 {
    rng.sample(StandardNormal)
}

fn normals(count: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    rng.sample_iter(StandardNormal).take(count).collect()
}

fn sign(rng: &mut ChaCha8Rng) -> f32 {
    if rng.random() { 1.0 } else { -1.0 }
}
