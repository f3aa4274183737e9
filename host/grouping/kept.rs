//! What is kept of an order between denoising steps: its labels, in one byte a token.

use super::{Grouping, stable_argsort};
use crate::error::{Error, Result};

/// The labels of one head's order, in one byte a token where there are at most 256 clusters, in two otherwise.
///
/// A permutation takes four bytes a token: 1 GB for the layers of Wan2.2 (40 layers x 40 heads x 75,600 tokens x 2
/// branches of the guidance). Labels take 242 MB, the order is their [`stable_argsort`], and centroids need not be kept:
/// they are the means under the labels ([`group_from`](super::group_from)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptOrder {
    clusters: usize,
    labels: Labels,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Labels {
    Bytes(Box<[u8]>),
    Words(Box<[u16]>),
}

impl Default for Labels {
    fn default() -> Self {
        Labels::Bytes(Box::default())
    }
}

impl KeptOrder {
    /// Keeps `labels`, one for every token, each below `clusters`.
    ///
    /// # Errors
    /// When a label is not below `clusters`, or `clusters` is more than labels can count (65,536).
    pub fn new(labels: &[u16], clusters: usize) -> Result<Self> {
        let misfit =
            |expected: String, given: String| Err(Error::Tensor { tensor: "labels", expected, given });
        if clusters > 1 << 16 {
            return misfit("at most 65536 clusters".into(), clusters.to_string());
        }
        if let Some(label) = labels.iter().find(|&&label| usize::from(label) >= clusters) {
            return misfit(format!("labels below {clusters}"), label.to_string());
        }
        let labels = if clusters <= 1 << 8 {
            Labels::Bytes(labels.iter().map(|&label| label as u8).collect())
        } else {
            Labels::Words(labels.into())
        };
        Ok(Self { clusters, labels })
    }

    /// Number of clusters, empty ones included.
    pub fn clusters(&self) -> usize {
        self.clusters
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        match &self.labels {
            Labels::Bytes(labels) => labels.len(),
            Labels::Words(labels) => labels.len(),
        }
    }

    /// Cluster of every token.
    pub fn labels(&self) -> Vec<u16> {
        match &self.labels {
            Labels::Bytes(labels) => labels.iter().map(|&label| u16::from(label)).collect(),
            Labels::Words(labels) => labels.to_vec(),
        }
    }

    /// The order again: [`stable_argsort`] of the labels. Centroids are not part of it.
    pub fn grouping(&self) -> Grouping {
        let labels = self.labels();
        Grouping {
            order: stable_argsort(&labels),
            labels,
            centroids: Vec::new(),
            clusters: self.clusters,
            iterations: 0,
        }
    }

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        match &self.labels {
            Labels::Bytes(labels) => labels.len(),
            Labels::Words(labels) => 2 * labels.len(),
        }
    }

    /// Bytes of several orders.
    pub fn bytes_of(orders: &[Self]) -> usize {
        size_of_val(orders) + orders.iter().map(Self::bytes).sum::<usize>()
    }
}
