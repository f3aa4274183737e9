//! A call whose problem and recipe were checked against each other, with every open choice decided.

use crate::error::Result;
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
        let qk_dim = if recipe.rotate_qk { d.next_power_of_two() } else { d };
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
            v_dim: if recipe.rotate_v { d.next_power_of_two() } else { d },
        })
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
