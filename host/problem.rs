//! One attention call as data: its tensors, its valid lengths, its scale; and what makes it valid.

use crate::error::{Error, Result};
use crate::tensor::{TensorView, count};

/// Largest head dimension of the CPU backend.
pub const MAX_HEAD_DIM: usize = 256;

/// Most elements of a tensor: as many f32 as one allocation holds.
const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<f32>();

/// What to do about a NaN or an infinity among the inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// An error that names tensor and position.
    #[default]
    Reject,
    /// One in a query row makes that output row NaN; one in a valid key or value makes all rows of the
    /// query heads that read this (batch, kv head) NaN. Nothing else changes.
    Propagate,
}

/// `softmax(scale q k^T) v` without a mask, for every batch and head.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'a> {
    /// Queries, (batch, q heads, q tokens, head_dim).
    pub q: TensorView<'a>,
    /// Keys, (batch, kv heads, kv tokens, head_dim); q heads is a multiple of kv heads (GQA, MQA).
    pub k: TensorView<'a>,
    /// Values, the shape of the keys.
    pub v: TensorView<'a>,
    /// Valid keys per batch; the rest take part in nothing. All of them when absent.
    pub kv_lens: Option<&'a [usize]>,
    /// Factor on the scores, of any sign; 1 / sqrt(head_dim) when absent.
    pub scale: Option<f32>,
    /// Latent grid [t, h, w] of the key tokens, in raster order; the token order `cube` needs it.
    pub grid: Option<[usize; 3]>,
    /// What to do about values that are not finite.
    pub nonfinite: NonFinite,
}

/// The sizes of a valid [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Batch.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Query tokens.
    pub q_tokens: usize,
    /// Key and value tokens.
    pub kv_tokens: usize,
    /// Channels of a head.
    pub head_dim: usize,
}

impl Shape {
    /// The sizes of a call whose tensors have these shapes, each [batch, heads, tokens, head_dim].
    ///
    /// # Errors
    /// The first tensor that does not fit the others.
    pub fn new(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self> {
        let tensor = |tensor, expected: String, given: String| Err(Error::Tensor { tensor, expected, given });
        let ([b, hq, nq, d], [bk, hk, nk, dk]) = (q, k);
        for (name, shape) in [("q", q), ("k", k), ("v", v)] {
            if shape.contains(&0) {
                return tensor(name, "no empty axis".into(), format!("shape {shape:?}"));
            }
            // A broadcast axis can be longer than memory; its copy in f32, which the output may be, must not.
            if count(shape).is_none_or(|n| n > MAX_ELEMENTS) {
                return tensor(name, format!("at most {MAX_ELEMENTS} elements"), format!("shape {shape:?}"));
            }
        }
        if d > MAX_HEAD_DIM {
            return tensor("q", format!("head_dim of at most {MAX_HEAD_DIM}"), format!("head_dim {d}"));
        }
        if bk != b || dk != d {
            return tensor("k", format!("batch {b} and head_dim {d} as in q"), format!("shape {k:?}"));
        }
        if hq % hk != 0 {
            return tensor("k", format!("a number of heads that divides q's {hq}"), format!("{hk} heads"));
        }
        if v != k {
            return tensor("v", format!("the shape of k {k:?}"), format!("shape {v:?}"));
        }
        if u32::try_from(nk).is_err() {
            return tensor("k", "fewer than 2^32 tokens".into(), format!("{nk} tokens"));
        }
        Ok(Self { batch: b, q_heads: hq, kv_heads: hk, q_tokens: nq, kv_tokens: nk, head_dim: d })
    }

    /// Whether the rest of a call fits these sizes: valid keys per batch, the factor on the scores, the latent
    /// grid [t, h, w] of the keys.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(
        &self,
        kv_lens: Option<&[usize]>,
        scale: Option<f32>,
        grid: Option<[usize; 3]>,
    ) -> Result<()> {
        check_lens(kv_lens, self.batch, self.kv_tokens)?;
        if let Some(scale) = scale.filter(|s| !s.is_finite()) {
            return Err(Error::Option {
                option: "scale",
                expected: "a finite number".into(),
                given: scale.to_string(),
            });
        }
        if let Some(grid) = grid
            && grid.iter().try_fold(1usize, |n, &x| n.checked_mul(x)) != Some(self.kv_tokens)
        {
            return Err(Error::Option {
                option: "grid",
                expected: format!("a grid [t, h, w] whose product is the {} key tokens", self.kv_tokens),
                given: format!("{grid:?}"),
            });
        }
        Ok(())
    }

    /// The kv head that query head `q_head` reads: the query heads are split evenly, in order.
    pub fn kv_head(&self, q_head: usize) -> usize {
        q_head / (self.q_heads / self.kv_heads)
    }

    /// Floating-point operations of the two matrix products, 4 b h n_q n_kv d.
    pub fn flops(&self) -> f64 {
        [self.batch, self.q_heads, self.q_tokens, self.kv_tokens, self.head_dim]
            .iter()
            .fold(4.0, |f, &x| f * x as f64)
    }
}

impl<'a> Problem<'a> {
    /// A call on whole tensors with the default scale.
    pub fn new(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Self { q, k, v, kv_lens: None, scale: None, grid: None, nonfinite: NonFinite::Reject }
    }

    /// The factor on the scores: the one given, or 1 / sqrt(head_dim).
    pub fn scale(&self) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (self.q.shape()[3] as f32).sqrt())
    }

    /// Valid keys of a batch.
    ///
    /// # Panics
    /// When `kv_lens` has no entry for the batch, which [`Problem::validate`] refuses.
    pub fn kv_len(&self, batch: usize) -> usize {
        self.kv_lens.map_or(self.k.shape()[2], |lens| lens[batch])
    }

    /// Checks shapes, lengths, scale and grid, and (unless they may propagate) that the values that take part
    /// are finite.
    ///
    /// # Errors
    /// The first thing that does not fit.
    pub fn validate(&self) -> Result<Shape> {
        let shape = Shape::new(self.q.shape(), self.k.shape(), self.v.shape())?;
        shape.check(self.kv_lens, self.scale, self.grid)?;
        if self.nonfinite == NonFinite::Reject {
            self.check_finite()?;
        }
        Ok(shape)
    }

    /// Checks that there is one length a batch, none beyond the keys.
    pub(crate) fn check_lens(&self) -> Result<()> {
        let [batch, _, tokens, _] = self.k.shape();
        check_lens(self.kv_lens, batch, tokens)
    }

    fn check_finite(&self) -> Result<()> {
        for (tensor, view, valid) in
            [("q", &self.q, None), ("k", &self.k, self.kv_lens), ("v", &self.v, self.kv_lens)]
        {
            if let Some((position, value)) = view.find_nonfinite(valid) {
                return Err(Error::NonFinite { tensor, position, value });
            }
        }
        Ok(())
    }
}

fn check_lens(kv_lens: Option<&[usize]>, batch: usize, tokens: usize) -> Result<()> {
    let misfit = |expected, given| Err(Error::Tensor { tensor: "kv_lens", expected, given });
    match kv_lens {
        Some(lens) if lens.len() != batch => {
            misfit(format!("one length for each of {batch} batches"), format!("{} lengths", lens.len()))
        }
        Some(lens) => match lens.iter().find(|&&len| len > tokens) {
            Some(len) => misfit(format!("lengths of at most {tokens}"), format!("length {len}")),
            None => Ok(()),
        },
        None => Ok(()),
    }
}
