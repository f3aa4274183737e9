//! Clusters of given sizes: the orders `rounded` and `balanced`, in which blocks do not mix clusters.
//!
//! Both rest on one capacity-limited assignment. In rounds every token without a place bids for its nearest
//! cluster that has room; where more bid than fit, those stay who would lose most by going to their second
//! choice.

use super::nearest::{Bid, bids};
use super::sort::Buckets;
use super::{BLOCK, kmeans};

/// Assignments with updates of the order `balanced` after its plain k-means.
const BALANCED_ROUNDS: usize = 8;

/// Rounds the size of every cluster to a multiple of [`BLOCK`] and moves only the surplus tokens. The one
/// cluster that takes the ragged rest of the tokens, if there is one, becomes the last.
pub(super) fn rounded(v: &[f32], dim: usize, centroids: &mut [f32]) -> Vec<u16> {
    let k = centroids.len() / dim;
    let mut first = all_bids(v, dim, centroids);
    let mut room = vec![0; k];
    first.iter().for_each(|bid| room[usize::from(bid.best)] += 1);
    round_sizes(&mut room);
    if let Some(ragged) = room.iter().position(|room| room % BLOCK != 0) {
        let name = |cluster: u16| match usize::from(cluster) {
            c if c == ragged => (k - 1) as u16,
            c if c > ragged => cluster - 1,
            _ => cluster,
        };
        first.iter_mut().for_each(|bid| (bid.best, bid.second) = (name(bid.best), name(bid.second)));
        centroids[ragged * dim..].rotate_left(dim);
        room[ragged..].rotate_left(1);
    }
    place(v, dim, centroids, first, room)
}

/// Blocks for every cluster by largest remainder; what is left of the tokens goes to the largest cluster.
fn round_sizes(sizes: &mut [usize]) {
    let tokens: usize = sizes.iter().sum();
    let blocks: usize = sizes.iter().map(|size| size / BLOCK).sum();
    let mut by_remainder: Vec<usize> = (0..sizes.len()).collect();
    by_remainder.sort_by_key(|&c| std::cmp::Reverse(sizes[c] % BLOCK));
    sizes.iter_mut().for_each(|size| *size -= *size % BLOCK);
    by_remainder.iter().take(tokens / BLOCK - blocks).for_each(|&c| sizes[c] += BLOCK);
    let largest = (0..sizes.len()).rev().max_by_key(|&c| sizes[c]);
    if let Some(largest) = largest {
        sizes[largest] += tokens % BLOCK;
    }
}

/// Clusters of exactly [`BLOCK`] tokens (the last takes the rest) from the centroids of a plain k-means, which
/// move along. Returns labels and the number of assignments.
pub(super) fn balanced(v: &[f32], dim: usize, centroids: &mut [f32]) -> (Vec<u16>, usize) {
    let (tokens, k) = (v.len() / dim, centroids.len() / dim);
    let mut room = vec![BLOCK; k];
    room[k - 1] = tokens - (k - 1) * BLOCK;
    let mut labels = Vec::new();
    for done in 0..BALANCED_ROUNDS {
        let first = all_bids(v, dim, centroids);
        let new = place(v, dim, centroids, first, room.clone());
        if new == labels {
            return (labels, done + 1);
        }
        labels = new;
        kmeans::update(v, dim, &labels, centroids);
    }
    (labels, BALANCED_ROUNDS)
}

fn all_bids(v: &[f32], dim: usize, centroids: &[f32]) -> Vec<Bid> {
    let tokens: Vec<u32> = (0..(v.len() / dim) as u32).collect();
    bids(v, dim, &tokens, centroids, &vec![true; centroids.len() / dim])
}

/// Gives every token a cluster with room, starting from its bid among all clusters; `room` adds up to the
/// number of tokens.
fn place(v: &[f32], dim: usize, centroids: &[f32], mut bid: Vec<Bid>, mut room: Vec<usize>) -> Vec<u16> {
    let mut labels = vec![0u16; bid.len()];
    let mut waiting: Vec<u32> = (0..bid.len() as u32).collect();
    loop {
        let open: Vec<bool> = room.iter().map(|&room| room > 0).collect();
        let closed = |cluster: u16| !open[usize::from(cluster)];
        let stale = |&token: &u32| closed(bid[token as usize].best) || closed(bid[token as usize].second);
        let stale: Vec<u32> = waiting.iter().copied().filter(stale).collect();
        for (&token, new) in stale.iter().zip(bids(v, dim, &stale, centroids, &open)) {
            bid[token as usize] = new;
        }
        let choice: Vec<u16> = waiting.iter().map(|&token| bid[token as usize].best).collect();
        let bidders = Buckets::new(&choice, room.len());
        let mut left = Vec::new();
        for (cluster, room) in room.iter_mut().enumerate() {
            let mut tokens: Vec<u32> =
                bidders.tokens(cluster).iter().map(|&at| waiting[at as usize]).collect();
            if tokens.len() > *room {
                tokens.sort_by(|&a, &b| bid[b as usize].regret.total_cmp(&bid[a as usize].regret));
                left.extend(tokens.drain(*room..));
            }
            *room -= tokens.len();
            tokens.iter().for_each(|&token| labels[token as usize] = cluster as u16);
        }
        if left.is_empty() {
            return labels;
        }
        left.sort_unstable();
        waiting = left;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_by_largest_remainder() {
        let rounded = |mut sizes: Vec<usize>| {
            round_sizes(&mut sizes);
            sizes
        };
        assert_eq!(rounded(vec![128, 256]), [128, 256]);
        assert_eq!(rounded(vec![100, 28]), [128, 0]);
        assert_eq!(rounded(vec![64, 64, 128]), [128, 0, 128], "the lower cluster at equal remainders");
        assert_eq!(rounded(vec![300, 90, 130]), [256 + 8, 128, 128], "the rest goes to the largest");
        assert_eq!(rounded(vec![3, 4]), [7, 0], "fewer tokens than a block");
    }

    #[test]
    fn those_stay_who_would_lose_most() {
        // Centroids 0 and 10; all tokens are nearer to 0, which has room for two.
        let v = [4.0, 1.0, 3.0, 2.0];
        let centroids = [0.0, 10.0];
        let labels = place(&v, 1, &centroids, all_bids(&v, 1, &centroids), vec![2, 2]);
        assert_eq!(labels, [1, 0, 1, 0]);
    }
}
