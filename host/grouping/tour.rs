//! Numbers clusters so that neighbours in the sorted order are alike. Ours, not in the paper.
//!
//! Clusters do not end where blocks end, so a block holds the end of one cluster and the beginning of the next.
//! What it loses by that is proportional to the squared distance of their centroids. k-means leaves the numbers
//! of the clusters open; numbering them along a short path through the centroids costs O(k^2), nothing per
//! token, and brings most of what clusters of whole blocks would (`docs/grouping.md`).

use rayon::prelude::*;

/// Clusters along the path, empty ones at the end.
///
/// Cheapest insertion: clusters join one after the other by number, each where it lengthens the path least (the
/// first such place; length is the sum of squared distances).
pub(super) fn tour(centroids: &[f32], dim: usize, occupied: &[bool]) -> Vec<u16> {
    let k = occupied.len();
    let row = |c: usize| &centroids[c * dim..][..dim];
    let square = |a: usize, b: usize| row(a).iter().zip(row(b)).map(|(x, y)| (x - y) * (x - y)).sum::<f32>();
    let lines = (0..k).into_par_iter().map(|a| (0..k).map(|b| square(a, b)).collect());
    let distance: Vec<Vec<f32>> = lines.collect();
    let between = |a: u16, b: u16| distance[usize::from(a)][usize::from(b)];

    let (members, empty): (Vec<u16>, Vec<u16>) = (0..k as u16).partition(|&c| occupied[usize::from(c)]);
    let mut path: Vec<u16> = Vec::with_capacity(k);
    for new in members {
        let Some(&last) = path.last() else {
            path.push(new);
            continue;
        };
        let (mut at, mut least) = (0, between(path[0], new));
        for (place, pair) in path.windows(2).enumerate() {
            let longer = between(pair[0], new) + between(new, pair[1]) - between(pair[0], pair[1]);
            if longer < least {
                (at, least) = (place + 1, longer);
            }
        }
        if between(last, new) < least {
            at = path.len();
        }
        path.insert(at, new);
    }
    path.extend(empty);
    path
}

/// Gives the clusters in `path` the numbers 0, 1, ..., in `labels` and in `centroids`.
pub(super) fn renumber(path: &[u16], labels: &mut [u16], centroids: &mut Vec<f32>, dim: usize) {
    let mut number = vec![0u16; path.len()];
    path.iter().enumerate().for_each(|(new, &old)| number[usize::from(old)] = new as u16);
    labels.iter_mut().for_each(|label| *label = number[usize::from(*label)]);
    *centroids = path.iter().flat_map(|&old| &centroids[usize::from(old) * dim..][..dim]).copied().collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_on_a_line_come_in_its_order() {
        let centroids = [5.0, 1.0, 9.0, 3.0, -4.0, 7.0, 100.0];
        let mut occupied = [true; 7];
        occupied[3] = false;
        let path = tour(&centroids, 1, &occupied);
        assert_eq!(path, [4, 1, 0, 5, 2, 6, 3]);
    }

    #[test]
    fn renumbering_keeps_every_token_with_its_centroid() {
        let (mut labels, mut centroids) = (vec![2, 0, 1, 2], vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
        let before: Vec<Vec<f32>> =
            labels.iter().map(|&l| centroids[usize::from(l) * 2..][..2].to_vec()).collect();
        renumber(&[1, 2, 0], &mut labels, &mut centroids, 2);
        assert_eq!(labels, [1, 2, 0, 1]);
        let after: Vec<Vec<f32>> =
            labels.iter().map(|&l| centroids[usize::from(l) * 2..][..2].to_vec()).collect();
        assert_eq!(before, after);
    }

    #[test]
    fn centroids_that_are_not_numbers_still_give_a_permutation() {
        let mut path = tour(&[f32::NAN, 1.0, f32::INFINITY, 2.0], 1, &[true; 4]);
        path.sort_unstable();
        assert_eq!(path, [0, 1, 2, 3]);
    }
}
