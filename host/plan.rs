//! A call whose problem and recipe were checked against each other, with every open choice decided.

use kernels_gpu::numerics::hadamard;

use crate::error::{Error, Result};
use crate::problem::{Problem, Shape};
use crate::recipe::{QkFormat, Recipe, ScoreType};
use crate::tensor::DType;

/// Element type of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputType {
    /// That of q.
    #[default]
    Input,
    /// f32.
    F32,
}

/// What a caller wants besides the attention itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Element type of the output.
    pub output: OutputType,
    /// Return the log-sum-exp of every query row.
    pub lse: bool,
}

/// A checked call: what the stages of a [`Backend`](crate::backend::Backend) work from.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Sizes.
    pub shape: Shape,
    /// What is quantized how.
    pub recipe: Recipe,
    /// Factor on the scores.
    pub scale: f32,
    /// What the caller wants.
    pub options: Options,
    /// Element type of the output.
    pub dtype: DType,
    /// Channels of Q and K after zero padding: a power of two where they are rotated, else a multiple of what
    /// the format takes at a time.
    pub qk_dim: usize,
    /// Channels of V after zero padding: a power of two where it is rotated.
    pub v_dim: usize,
}

impl Plan {
    /// Checks the problem (see [`Problem::validate`]) and the recipe (see [`Recipe::validate`]).
    ///
    /// # Errors
    /// The first thing that does not fit.
    pub fn new(problem: &Problem, recipe: &Recipe, options: Options) -> Result<Self> {
        recipe.validate()?;
        let shape = problem.validate()?;
        let d = shape.head_dim;
        let rotated = d.next_power_of_two().max(hadamard::MIN_LEN);
        let qk_dim = if recipe.rotate_qk { rotated } else { d };
        let dtype = match options.output {
            OutputType::Input => problem.q.dtype(),
            OutputType::F32 => DType::F32,
        };
        Ok(Self {
            shape,
            recipe: recipe.clone(),
            scale: problem.scale(),
            options,
            dtype,
            qk_dim: qk_dim.next_multiple_of(k_step(recipe.qk)),
            v_dim: if recipe.rotate_v { rotated } else { d },
        })
    }

    /// Whether the stages may run on `problem`: its shapes are the planned ones and its lengths lie inside them.
    /// The tensors' values may differ, as they do from one denoising step to the next.
    ///
    /// # Errors
    /// The first tensor that does not fit.
    pub fn check(&self, problem: &Problem) -> Result<()> {
        let Shape { batch, q_heads, kv_heads, q_tokens, kv_tokens, head_dim } = self.shape;
        let q = [batch, q_heads, q_tokens, head_dim];
        let kv = [batch, kv_heads, kv_tokens, head_dim];
        for (tensor, view, planned) in [("q", problem.q, q), ("k", problem.k, kv), ("v", problem.v, kv)] {
            if view.shape() != planned {
                return Err(Error::Tensor {
                    tensor,
                    expected: format!("the planned shape {planned:?}"),
                    given: format!("shape {:?}", view.shape()),
                });
            }
        }
        match problem.kv_lens {
            Some(lens) if lens.len() != batch || lens.iter().any(|&len| len > kv_tokens) => {
                Err(Error::Tensor {
                    tensor: "kv_lens",
                    expected: format!("{batch} lengths of at most {kv_tokens}"),
                    given: format!("{lens:?}"),
                })
            }
            _ => Ok(()),
        }
    }

    /// Channels after which the Tensor Core rounds its accumulator, where that is narrower than f32.
    pub fn rounding_step(&self, scores: ScoreType) -> Option<usize> {
        (scores == ScoreType::F16).then(|| k_step(self.recipe.qk))
    }
}

/// Channels that one matrix instruction (or one scale of NVFP4) takes at a time.
fn k_step(format: QkFormat) -> usize {
    match format {
        QkFormat::F32 => 1,
        QkFormat::F16 | QkFormat::Nvfp4 => 16,
        QkFormat::Int8 | QkFormat::E4m3PerBlock | QkFormat::E4m3PerHead => 32,
    }
}
