//! Lloyd's k-means over the value tokens of one head, the same bits whatever the number of threads.

use rayon::prelude::*;

use super::nearest;
use super::sort::Buckets;

/// Members of a cluster that are added up in a row before their sum joins the cluster's.
const RUN: usize = 128;

/// Cold start: one token from each of `k` equal strata of the sequence, `k` at most the number of tokens.
///
/// A hash of seed and stratum picks the token inside the stratum, so that a GPU thread finds its token alone.
pub(super) fn seed(v: &[f32], dim: usize, k: usize, seed: u64) -> Vec<f32> {
    let tokens = v.len() / dim;
    let pick = |j: usize| {
        let (from, to) = (j * tokens / k, (j + 1) * tokens / k);
        from + ((u64::from(hash(seed, j as u32)) * (to - from) as u64) >> 32) as usize
    };
    (0..k).flat_map(|j| &v[pick(j) * dim..][..dim]).copied().collect()
}

/// 32 well-mixed bits of (seed, j): both words of the seed and the counter through MurmurHash3's finalizer.
fn hash(seed: u64, j: u32) -> u32 {
    let mix = |x: u32| {
        let x = (x ^ x >> 16).wrapping_mul(0x85EB_CA6B);
        let x = (x ^ x >> 13).wrapping_mul(0xC2B2_AE35);
        x ^ x >> 16
    };
    mix(mix(mix(j.wrapping_add(0x9E37_79B9)) ^ seed as u32) ^ (seed >> 32) as u32)
}

/// At most `iterations` rounds of assignment and update; stops after an assignment that changes no label.
/// Returns the labels of the last assignment and the number of assignments.
pub(super) fn lloyd(v: &[f32], dim: usize, centroids: &mut [f32], iterations: usize) -> (Vec<u16>, usize) {
    let mut labels = Vec::new();
    for done in 0..iterations {
        let new = nearest::labels(v, dim, centroids);
        if new == labels {
            return (labels, done + 1);
        }
        labels = new;
        update(v, dim, &labels, centroids);
    }
    (labels, iterations)
}

/// Moves every centroid to the mean of its members in f32; an empty cluster keeps its centroid.
///
/// Order of the sum: members by ascending token, in runs of [`RUN`] from zero, then the runs in order. That is
/// what a GPU gets from the sorted tokens with one thread a channel, and no atomics.
pub(super) fn update(v: &[f32], dim: usize, labels: &[u16], centroids: &mut [f32]) {
    let buckets = Buckets::new(labels, centroids.len() / dim);
    let means = centroids.par_chunks_exact_mut(dim).enumerate();
    means.for_each_init(
        || (vec![0.0f32; dim], vec![0.0f32; dim]),
        |(total, run), (cluster, mean)| {
            let members = buckets.tokens(cluster);
            if members.is_empty() {
                return;
            }
            total.fill(0.0);
            for tokens in members.chunks(RUN) {
                run.fill(0.0);
                tokens.iter().for_each(|&token| add(run, &v[token as usize * dim..][..dim]));
                add(total, run);
            }
            mean.iter_mut().zip(&*total).for_each(|(mean, total)| *mean = total / members.len() as f32);
        },
    );
}

fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_one_token_of_each_stratum() {
        // Every token's value is its own number.
        for (tokens, k) in [(1, 1), (7, 7), (100, 7), (75_600, 128), (1000, 1000)] {
            let v: Vec<f32> = (0..tokens).map(|token| token as f32).collect();
            for s in [0, 1, u64::MAX, 1 << 32] {
                for (j, token) in seed(&v, 1, k, s).into_iter().enumerate() {
                    assert!((j * tokens / k..(j + 1) * tokens / k).contains(&(token as usize)));
                }
            }
            if tokens > k {
                assert_ne!(seed(&v, 1, k, 0), seed(&v, 1, k, 1));
                assert_ne!(seed(&v, 1, k, 0), seed(&v, 1, k, 1 << 32), "both words of the seed count");
            }
        }
    }

    #[test]
    fn the_hash_wraps_and_spreads() {
        // The finalizer maps 0 to 0, at every stage.
        assert_eq!(hash(0, 0x61C8_8647), 0, "0x61C88647 + 0x9E3779B9 = 2^32");
        let mean = (0..1024).map(|j| f64::from(hash(7, j)) / 2f64.powi(32)).sum::<f64>() / 1024.0;
        assert!((mean - 0.5).abs() < 0.03, "{mean}");
    }

    #[test]
    fn sums_are_taken_in_runs_of_128_members() {
        // 1 + 2^-24 rounds to 1, the first run stays there; the second run adds up to 2^-17 on its own.
        let mut v = vec![2f32.powi(-24); 256];
        v[0] = 1.0;
        let mut mean = [0.0];
        update(&v, 1, &[0; 256], &mut mean);
        assert_eq!(mean[0], (1.0 + 2f32.powi(-17)) / 256.0);
    }
}
