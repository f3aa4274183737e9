//! Which value tokens share a block of 128: token orders for V-Smooth (paper Sec. 3.2).
//!
//! [`group`] takes the value tokens of one head and returns the permutation pi under which keys and values are
//! read (queries keep their order). Without a mask attention does not depend on the order of its keys, so every
//! order is exact; what changes is how much of a block its mean removes ([`stats`]).
//!
//! Everything here gives the same bits on every run and with any number of threads.

mod capacity;
mod cube;
mod kept;
mod kmeans;
mod nearest;
mod sort;
pub mod stats;
mod tour;

use crate::error::{Error, Result};

pub use cube::CUBE;
pub use kept::KeptOrder;
pub use sort::stable_argsort;

/// Tokens of a block: the key tile of the attention kernels and the reach of a block mean (the paper's B_v).
pub const BLOCK: usize = kernels_gpu::layout::VALUE_BLOCK;

/// Largest number of clusters of a k-means.
pub const MAX_CLUSTERS: usize = 1024;

/// Tokens of a cluster of `kmeans`, at least, when no number of clusters is given.
pub const TOKENS_PER_CLUSTER: usize = 64;

/// Iterations of a k-means from a cold start.
pub const COLD_ITERATIONS: usize = 4;

/// Iterations of a k-means from given centroids.
pub const WARM_ITERATIONS: usize = 2;

/// How the key and value tokens of a head are ordered before they are cut into blocks of 128.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TokenOrder {
    /// As they come.
    #[default]
    Sequence,
    /// Static 4 x 4 x 8 cubes of the latent grid (DeltaQuant's partition).
    Cube,
    /// Sorted by the label of a k-means over the value tokens (the paper's); clusters that are alike are
    /// numbered next to each other, since a block may hold the end of one and the beginning of the next (ours).
    KMeans,
    /// k-means, then every cluster's size rounded to a multiple of 128, the surplus moved in one pass (ours).
    Rounded,
    /// k-means with clusters of exactly 128 tokens (the paper's costly alternative).
    Balanced,
}

impl TokenOrder {
    /// Whether the order comes from clusters of the values, so that it can grow old and be refreshed.
    pub const fn clusters(self) -> bool {
        matches!(self, TokenOrder::KMeans | TokenOrder::Rounded | TokenOrder::Balanced)
    }
}

/// What decides the token order of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GroupingConfig {
    /// The order.
    pub order: TokenOrder,
    /// Number of clusters, 1 to [`MAX_CLUSTERS`], at most one a token; [`default_clusters`] when absent. The
    /// order `balanced` has one cluster a block and takes no number.
    pub clusters: Option<usize>,
    /// Iterations of the k-means; [`COLD_ITERATIONS`] or [`WARM_ITERATIONS`] when absent.
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

/// A token order and what it was derived from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grouping {
    /// pi: position -> token, a permutation of the tokens.
    pub order: Vec<u32>,
    /// Cluster of every token; `order` is [`stable_argsort`] of it. Empty for the orders without clusters.
    pub labels: Vec<u16>,
    /// Centroids, row-major [clusters, head_dim]: the warm start of the next refresh.
    pub centroids: Vec<f32>,
    /// Number of clusters, empty ones included.
    pub clusters: usize,
    /// Assignments of all tokens to centroids that were run (k-means stops when no label changes).
    pub iterations: usize,
}

/// Number of clusters of the k-means for a head of `tokens` valid tokens when none is given: one for 64 tokens,
/// at most 128 (`docs/grouping.md` has the sweep that this comes from).
///
/// The order `rounded` has one for each block instead and at most 256, `balanced` one for each block.
pub fn default_clusters(tokens: usize) -> usize {
    (tokens / TOKENS_PER_CLUSTER).clamp(1, 128)
}

/// Orders the value tokens of one head.
///
/// `v` is row-major [tokens, head_dim] and holds the valid tokens only (none gives an empty order); `grid` is
/// the latent grid [t, h, w] whose raster order the tokens are in, needed by `cube`; `warm` are the centroids
/// of the previous refresh, row-major [clusters, head_dim], instead of a cold start. With `warm` and no number
/// of clusters in `config`, there are as many clusters as before.
///
/// Values that are not finite do not fail; where they end up is not specified.
///
/// # Errors
/// When `v` or `warm` are not whole rows or `warm` has not the asked-for number of clusters; when clusters or
/// iterations are outside their range; when `cube` has no grid or one with fewer places than tokens.
pub fn group(
    v: &[f32],
    head_dim: usize,
    config: &GroupingConfig,
    grid: Option<[usize; 3]>,
    warm: Option<&[f32]>,
) -> Result<Grouping> {
    let tokens = rows("v", v, head_dim)?;
    if u32::try_from(tokens).is_err() {
        return Err(Error::Tensor {
            tensor: "v",
            expected: "fewer than 2^32 tokens".into(),
            given: format!("{tokens} tokens"),
        });
    }
    let order = |order| Ok(Grouping { order, ..Grouping::default() });
    match config.order {
        TokenOrder::Sequence => order((0..tokens as u32).collect()),
        TokenOrder::Cube => order(cube::order(checked_grid(grid, tokens)?, tokens)),
        _ if tokens == 0 => order(Vec::new()),
        TokenOrder::KMeans | TokenOrder::Rounded | TokenOrder::Balanced => {
            let clusters = clusters(tokens, head_dim, config, warm)?;
            let centroids = match warm {
                Some(warm) => warm.to_vec(),
                None => kmeans::seed(v, head_dim, clusters, config.seed),
            };
            clustered(v, head_dim, config, centroids, warm.is_some())
        }
    }
}

/// Orders the value tokens of one head, starting from the clusters of an earlier order of the same tokens: the
/// centroids are the means of the *current* values under `kept`'s labels, a cluster without tokens takes its cold
/// seed. So nothing but labels has to be kept between refreshes, and the start is half an iteration ahead of
/// the old centroids.
///
/// As [`group`] otherwise; the number of clusters is `kept`'s.
///
/// # Errors
/// When `v` are not whole rows, or not as many as `kept` has labels; when iterations are outside their range; when the
/// order does not come from clusters, or is `balanced` and `kept` has not one cluster a block.
pub fn group_from(v: &[f32], head_dim: usize, config: &GroupingConfig, kept: &KeptOrder) -> Result<Grouping> {
    let tokens = rows("v", v, head_dim)?;
    let labels = kept.labels();
    if labels.len() != tokens {
        return Err(Error::Tensor {
            tensor: "v",
            expected: format!("the {} tokens of the kept order", labels.len()),
            given: format!("{tokens} tokens"),
        });
    }
    if !config.order.clusters() {
        return option("order", "one that comes from clusters".into(), format!("{:?}", config.order));
    }
    if tokens == 0 {
        return Ok(Grouping::default());
    }
    if config.order == TokenOrder::Balanced && kept.clusters() != tokens.div_ceil(BLOCK) {
        let blocks = tokens.div_ceil(BLOCK);
        return option(
            "clusters",
            format!("one for each of {blocks} blocks with `balanced`"),
            kept.clusters(),
        );
    }
    let mut centroids = kmeans::seed(v, head_dim, kept.clusters().min(tokens), config.seed);
    // More clusters than tokens (a head that was grouped from more): the rest starts, empty, at the origin.
    centroids.resize(kept.clusters() * head_dim, 0.0);
    kmeans::update(v, head_dim, &labels, &mut centroids);
    clustered(v, head_dim, config, centroids, true)
}

fn clustered(
    v: &[f32],
    dim: usize,
    config: &GroupingConfig,
    mut centroids: Vec<f32>,
    warm: bool,
) -> Result<Grouping> {
    let clusters = centroids.len() / dim;
    let iterations = config.iterations.unwrap_or(if warm { WARM_ITERATIONS } else { COLD_ITERATIONS });
    if iterations == 0 {
        return option("iterations", "at least 1".into(), "0");
    }
    let (mut labels, mut iterations) = kmeans::lloyd(v, dim, &mut centroids, iterations);
    match config.order {
        TokenOrder::Rounded => {
            labels = capacity::rounded(v, dim, &mut centroids);
            iterations += 1;
        }
        TokenOrder::Balanced => {
            let (balanced, rounds) = capacity::balanced(v, dim, &mut centroids);
            labels = balanced;
            iterations += rounds;
        }
        _ => {
            let mut occupied = vec![false; clusters];
            labels.iter().for_each(|&label| occupied[usize::from(label)] = true);
            tour::renumber(&tour::tour(&centroids, dim, &occupied), &mut labels, &mut centroids, dim);
        }
    }
    Ok(Grouping { order: stable_argsort(&labels), labels, centroids, clusters, iterations })
}

/// The number of clusters of a head with at least one token.
fn clusters(tokens: usize, dim: usize, config: &GroupingConfig, warm: Option<&[f32]>) -> Result<usize> {
    let wanted = match (config.order, config.clusters) {
        (TokenOrder::Balanced, Some(given)) => {
            return option("clusters", "none with the order `balanced` (one a block)".into(), given);
        }
        (TokenOrder::Balanced, None) => Some(tokens.div_ceil(BLOCK)),
        (_, Some(given)) if !(1..=MAX_CLUSTERS).contains(&given) => {
            return option("clusters", format!("1 to {MAX_CLUSTERS}"), given);
        }
        (_, given) => given,
    };
    let default = match config.order {
        TokenOrder::Rounded => (tokens / BLOCK).clamp(1, 256),
        _ => default_clusters(tokens),
    };
    let cold = wanted.unwrap_or(default).min(tokens);
    if cold > 1 << 16 {
        return option("clusters", "at most 65536 blocks with the order `balanced`".into(), cold);
    }
    let Some(warm) = warm else { return Ok(cold) };
    let given = rows("centroids", warm, dim)?;
    let fits = match wanted {
        Some(wanted) => given == wanted || given == cold,
        None => (1..=MAX_CLUSTERS).contains(&given),
    };
    if fits {
        return Ok(given);
    }
    Err(Error::Tensor {
        tensor: "centroids",
        expected: wanted.map_or(format!("1 to {MAX_CLUSTERS} rows"), |wanted| format!("{wanted} rows")),
        given: format!("{given} rows"),
    })
}

fn rows(tensor: &'static str, x: &[f32], dim: usize) -> Result<usize> {
    if dim == 0 || !x.len().is_multiple_of(dim) {
        let given = format!("{} elements", x.len());
        return Err(Error::Tensor {
            tensor,
            expected: format!("whole rows of head_dim {dim}, at least 1"),
            given,
        });
    }
    Ok(x.len() / dim)
}

fn checked_grid(grid: Option<[usize; 3]>, tokens: usize) -> Result<[usize; 3]> {
    let expected = || format!("a grid [t, h, w] of at least {tokens} places for the token order `cube`");
    let Some(grid) = grid else { return option("grid", expected(), "none") };
    let places = grid.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
    if places.is_none_or(|places| places < tokens || places > u32::MAX as usize) {
        return option("grid", expected(), format!("{grid:?}"));
    }
    Ok(grid)
}

fn option<T>(option: &'static str, expected: String, given: impl ToString) -> Result<T> {
    Err(Error::Option { option, expected, given: given.to_string() })
}
