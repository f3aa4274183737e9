//! Nearest centroids of value tokens: the product of tokens and centroids, and the argmin over it.
//!
//! The distance is |c|^2 - 2 v.c in f32 (|v|^2 is the same for every centroid of a token and left out). Tokens
//! go through in runs of [`RUN`], each run one single-threaded product, so that no sum depends on the number
//! of threads.

use gemm::Parallelism;
use rayon::prelude::*;

/// Tokens of one product.
const RUN: usize = 512;

/// Centroids in the form that the distance needs.
struct Targets {
    /// -2 c, row-major [k, dim].
    scaled: Vec<f32>,
    /// |c|^2.
    norms: Vec<f32>,
    dim: usize,
}

impl Targets {
    fn new<'a>(centroids: impl Iterator<Item = &'a [f32]>, dim: usize) -> Self {
        let (mut scaled, mut norms) = (Vec::new(), Vec::new());
        for c in centroids {
            norms.push(c.iter().map(|x| x * x).sum());
            scaled.extend(c.iter().map(|x| -2.0 * x));
        }
        Self { scaled, norms, dim }
    }

    /// Writes -2 c.v, row-major [k, tokens], for the tokens in `rows`, row-major [tokens, dim].
    fn products(&self, rows: &[f32], out: &mut Vec<f32>) {
        let (k, d, n) = (self.norms.len(), self.dim, rows.len() / self.dim);
        assert!(rows.len() == n * d && self.scaled.len() == k * d);
        out.clear();
        out.resize(k * n, 0.0);
        // SAFETY: the three matrices are [k, n], [k, d] and [d, n] (the transpose of row-major [n, d]) with the
        // strides given; their lengths are k n (resized above), k d and n d (asserted above), and `out` is
        // exclusive.
        unsafe {
            gemm::gemm(
                k,
                n,
                d,
                out.as_mut_ptr(),
                1,
                n as isize,
                false,
                self.scaled.as_ptr(),
                1,
                d as isize,
                rows.as_ptr(),
                d as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// Label of the nearest centroid for every token of `v`, row-major [tokens, dim]; ties go to the lower label,
/// and so does a distance that is not a number.
pub(super) fn labels(v: &[f32], dim: usize, centroids: &[f32]) -> Vec<u16> {
    let targets = Targets::new(centroids.chunks_exact(dim), dim);
    let mut labels = vec![0u16; v.len() / dim];
    v.par_chunks(RUN * dim).zip(labels.par_chunks_mut(RUN)).for_each_init(
        Vec::new,
        |products, (rows, labels)| {
            targets.products(rows, products);
            let n = labels.len();
            let (mut best, mut label) = ([f32::INFINITY; RUN], [0u32; RUN]);
            for (j, (row, &norm)) in products.chunks_exact(n).zip(&targets.norms).enumerate() {
                for ((best, label), &product) in best.iter_mut().zip(&mut label).zip(row) {
                    let distance = norm + product;
                    let nearer = distance < *best;
                    *best = if nearer { distance } else { *best };
                    *label = if nearer { j as u32 } else { *label };
                }
            }
            labels.iter_mut().zip(label).for_each(|(to, from)| *to = from as u16);
        },
    );
    labels
}

/// Where a token would go, and what it loses if it has to go elsewhere.
#[derive(Clone, Copy)]
pub(super) struct Bid {
    /// Nearest open cluster.
    pub best: u16,
    /// Second nearest open cluster; `best` when there is no other.
    pub second: u16,
    /// Distance to the second minus distance to the best.
    pub regret: f32,
}

/// Bids of `tokens` among the clusters that are `open`, at least one; ties go to the lower label.
pub(super) fn bids(v: &[f32], dim: usize, tokens: &[u32], centroids: &[f32], open: &[bool]) -> Vec<Bid> {
    let names: Vec<u16> = (0..open.len()).filter(|&c| open[c]).map(|c| c as u16).collect();
    let targets = Targets::new(names.iter().map(|&c| &centroids[usize::from(c) * dim..][..dim]), dim);
    let run = |(rows, products): &mut (Vec<f32>, Vec<f32>), tokens: &[u32]| {
        rows.clear();
        tokens.iter().for_each(|&token| rows.extend_from_slice(&v[token as usize * dim..][..dim]));
        targets.products(rows, products);
        let n = tokens.len();
        let (mut best, mut second) = ([(f32::INFINITY, 0u32); RUN], [(f32::INFINITY, 0u32); RUN]);
        for (j, (row, &norm)) in products.chunks_exact(n).zip(&targets.norms).enumerate() {
            for ((best, second), &product) in best.iter_mut().zip(&mut second).zip(row) {
                let candidate = (norm + product, j as u32);
                if candidate.0 < best.0 {
                    *second = *best;
                    *best = candidate;
                } else if candidate.0 < second.0 {
                    *second = candidate;
                }
            }
        }
        let bid = |(best, second): (&(f32, u32), &(f32, u32))| Bid {
            best: names[best.1 as usize],
            second: names[second.1 as usize],
            regret: second.0 - best.0,
        };
        best.iter().zip(&second).take(n).map(bid).collect::<Vec<_>>()
    };
    tokens.par_chunks(RUN).map_init(Default::default, run).flatten_iter().collect()
}
