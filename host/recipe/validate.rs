//! Which choices of a [`Recipe`] go together, and why others do not.

use super::*;
use crate::error::{Error, Result};
use crate::grouping::TokenOrder;

/// Most clusters of a grouping: labels are kept in two bytes at most, and at 75,600 tokens there are 591 blocks.
const MAX_CLUSTERS: usize = 1024;

/// Most iterations of a k-means; it has long converged by then.
const MAX_ITERATIONS: usize = 1000;

/// Octaves below the row maximum in which E4M3 probabilities of 256 are normal numbers or nearly so.
const MAX_OCTAVES: u8 = 16;

impl Recipe {
    /// Whether the choices go together; those of every named recipe do.
    ///
    /// - f16 scores are for operands that an f16 accumulator takes and whose scales fold into them: F16, or E4M3
    ///   with one scale per head; and not for a centred Q, whose mean's product is added in f32.
    /// - Both operands of the second product come in one format, E4M3 or NVFP4, as the instruction wants them;
    ///   either may be left in f32 to look at the error of the other alone.
    /// - Under ExpCast the code of a row's maximum, `rne(120 + beta)`, has to be 120: beta lies in (-0.5, 0.5). At
    ///   119 the largest weight of every row would decode to 240 instead of 256. The f32 encoder also takes -0.5
    ///   itself, since 119.5 rounds to the even 120; the packed one rounds `beta - m` to f16 first, which then
    ///   falls on 119 for some maxima. The pinned one keeps 120 by construction and takes -1 to 0.5; the quadratic
    ///   one has its offset built in, 0.27 above the cliff, and takes (-0.2, 0.5).
    /// - Blocks with exact scores lie within 1 to 16 octaves of the row maximum.
    /// - E4M3 probabilities peak at 256 or 448.
    /// - The numbers of clusters (1 to 1024) and iterations (1 to 1000) are for orders that cluster; `balanced`
    ///   has one cluster a block and takes no number of its own.
    ///
    /// The token order `cube` needs a grid, which is known at the call.
    ///
    /// # Errors
    /// [`Error::Recipe`] with the first pair of choices that do not go together, and why.
    pub fn validate(&self) -> Result<()> {
        self.check_scores()
            .and_then(|()| self.check_product())
            .and_then(|()| self.check_grouping())
            .map_err(|reason| Error::Recipe { recipe: self.name.clone(), reason })
    }

    fn check_scores(&self) -> Result<(), String> {
        if self.scores == ScoreType::F32 {
            return Ok(());
        }
        if !matches!(self.qk, QkFormat::F16 | QkFormat::E4m3PerHead) {
            return Err(format!(
                "f16 scores need Q and K in f16 or in e4m3 with one scale per head (`qk=f16` or `qk=e4m3-head`), \
                 given `qk={}`; `scores=f32` goes with every format",
                parse::name_of_qk(self.qk)
            ));
        }
        if self.center_q {
            return Err("a centred Q adds the product of its mean in f32 and needs `scores=f32`, given \
                        `scores=f16`"
                .into());
        }
        Ok(())
    }

    fn check_product(&self) -> Result<(), String> {
        let v = parse::name_of_v(self.v);
        let e4m3_v = !matches!(self.v, VFormat::Nvfp4);
        let nvfp4_v = matches!(self.v, VFormat::Nvfp4 | VFormat::F32);
        match self.p {
            Probabilities::F32 => Ok(()),
            Probabilities::E4m3 { peak } if peak != 256.0 && peak != 448.0 => {
                Err(format!("E4M3 probabilities peak at 256 or 448, given {peak}"))
            }
            Probabilities::E4m3 { .. } if !e4m3_v => {
                Err(format!("E4M3 probabilities need an E4M3 (or f32) V, given `v={v}`"))
            }
            Probabilities::ExpCast { .. } if !e4m3_v => {
                Err(format!("ExpCast writes E4M3 probabilities and needs an E4M3 (or f32) V, given `v={v}`"))
            }
            Probabilities::Nvfp4 if !nvfp4_v => {
                Err(format!("NVFP4 probabilities need an NVFP4 (or f32) V, given `v={v}`"))
            }
            Probabilities::ExpCast { exact: ExactScores::Near { octaves }, .. }
                if !(1..=MAX_OCTAVES).contains(&octaves) =>
            {
                Err(format!("`exact` is 1 to {MAX_OCTAVES} octaves, given {octaves}"))
            }
            Probabilities::ExpCast { beta, encoder, .. } => check_beta(beta, encoder),
            Probabilities::E4m3 { .. } | Probabilities::Nvfp4 => Ok(()),
        }
    }

    fn check_grouping(&self) -> Result<(), String> {
        let GroupingConfig { order, clusters, iterations, seed: _ } = self.grouping;
        let clusters_needed = matches!(order, TokenOrder::KMeans | TokenOrder::Rounded);
        let order_name = parse::name_of_order(order);
        match clusters {
            Some(k) if !clusters_needed => Err(format!(
                "a number of clusters needs an order that chooses it (`order=kmeans` or `order=rounded`), given \
                 `k={k}` with `order={order_name}`"
            )),
            Some(k) if !(1..=MAX_CLUSTERS).contains(&k) => {
                Err(format!("the number of clusters `k` is 1 to {MAX_CLUSTERS}, given {k}"))
            }
            _ => Ok(()),
        }?;
        match iterations {
            Some(n) if matches!(order, TokenOrder::Sequence | TokenOrder::Cube) => Err(format!(
                "iterations need an order that clusters (`order=kmeans`, `order=rounded` or `order=balanced`), \
                 given `iterations={n}` with `order={order_name}`"
            )),
            Some(n) if !(1..=MAX_ITERATIONS).contains(&n) => {
                Err(format!("`iterations` is 1 to {MAX_ITERATIONS}, given {n}"))
            }
            _ => Ok(()),
        }
    }
}

fn check_beta(beta: f32, encoder: Encoder) -> Result<(), String> {
    let (fits, range) = match encoder {
        Encoder::F32 => ((-0.5..0.5).contains(&beta), "-0.5 <= beta < 0.5 with the f32 encoder"),
        Encoder::Packed => (beta > -0.5 && beta < 0.5, "-0.5 < beta < 0.5 with the packed encoder"),
        Encoder::Pinned => ((-1.0..0.5).contains(&beta), "-1 <= beta < 0.5 with the pinned encoder"),
        Encoder::Quadratic => (beta > -0.2 && beta < 0.5, "-0.2 < beta < 0.5 with the quadratic encoder"),
    };
    if fits {
        return Ok(());
    }
    Err(format!(
        "beta: expected {range}, so that the code of a row's maximum is 120 (at 119 the largest weight of every \
         row would decode to 240 instead of 256), given {beta}"
    ))
}
