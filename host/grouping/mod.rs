//! Which value tokens share a block of 128: token orders for V-Smooth (paper Sec. 3.2).

/// How the key and value tokens of a head are ordered before they are cut into blocks of 128.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenOrder {
    /// As they come.
    #[default]
    Sequence,
    /// Static 4 x 4 x 8 cubes of the latent grid (DeltaQuant's partition).
    Cube,
    /// Sorted by the label of a k-means over the value tokens (the paper's).
    KMeans,
    /// k-means, then every cluster's size rounded to a multiple of 128, the surplus moved in one pass (ours).
    Rounded,
    /// k-means with clusters of exactly 128 tokens (the paper's costly alternative).
    Balanced,
}

/// What decides the token order of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GroupingConfig {
    /// The order.
    pub order: TokenOrder,
    /// Number of clusters; chosen from the number of tokens when absent.
    pub clusters: Option<usize>,
    /// Iterations of the k-means; 4 from a cold start and 2 from a warm one when absent.
    pub iterations: Option<usize>,
    /// Seed of the cold start.
    pub seed: u64,
}

impl GroupingConfig {
    /// The tokens as they come.
    pub const fn sequence() -> Self {
        Self { order: TokenOrder::Sequence, clusters: None, iterations: None, seed: 0 }
    }

    /// The paper's k-means with the default number of clusters and iterations.
    pub const fn kmeans() -> Self {
        Self { order: TokenOrder::KMeans, ..Self::sequence() }
    }
}
