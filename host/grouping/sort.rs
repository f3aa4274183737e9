//! Counting sort of labels: the permutation that brings the tokens of a cluster together.

/// The positions of a stable counting sort: `order[starts[c]..starts[c + 1]]` are the tokens of cluster `c`,
/// ascending.
pub(super) struct Buckets {
    pub order: Vec<u32>,
    pub starts: Vec<usize>,
}

impl Buckets {
    /// Sorts tokens by label; every label is below `clusters`.
    pub fn new(labels: &[u16], clusters: usize) -> Self {
        let mut starts = vec![0; clusters + 1];
        labels.iter().for_each(|&label| starts[usize::from(label) + 1] += 1);
        for c in 0..clusters {
            starts[c + 1] += starts[c];
        }
        let (mut next, mut order) = (starts.clone(), vec![0; labels.len()]);
        for (token, &label) in labels.iter().enumerate() {
            let at = &mut next[usize::from(label)];
            order[*at] = token as u32;
            *at += 1;
        }
        Self { order, starts }
    }

    /// Tokens of a cluster, ascending.
    pub fn tokens(&self, cluster: usize) -> &[u32] {
        &self.order[self.starts[cluster]..self.starts[cluster + 1]]
    }
}

/// pi = argsort(z), stable: position -> token, tokens of equal label in ascending order (paper Eq. 3).
///
/// Labels take two bytes a token and a permutation four, so that a caller who keeps state between denoising
/// steps keeps labels and sorts again.
///
/// ```
/// use vc_attention::grouping::stable_argsort;
/// assert_eq!(stable_argsort(&[2, 0, 2, 1, 0]), [1, 4, 3, 0, 2]);
/// ```
pub fn stable_argsort(labels: &[u16]) -> Vec<u32> {
    let clusters = labels.iter().max().map_or(0, |&label| usize::from(label) + 1);
    Buckets::new(labels, clusters).order
}
