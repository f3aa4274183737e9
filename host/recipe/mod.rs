//! What is quantized how: a [`Recipe`] is a value, composed from a few independent choices.
//!
//! [`vc`] holds ours, [`baselines`] the peers' numerics; both are the same struct with other fields, run by
//! the same pipeline. [`Recipe::parse`] reads a name with modifiers, such as
//! `vc8-expcast+order=cube+beta=-0.35`.

pub mod baselines;
mod parse;
mod validate;
pub mod vc;

pub use parse::{MODIFIERS, Modifier};

use crate::grouping::GroupingConfig;

/// How Q and K are quantized and where their scales sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkFormat {
    /// Not quantized.
    F32,
    /// binary16 in code units (sqrt(|scale| 8 log2 e) on both sides), K rounded to BF16's 8 significant bits first: no scales.
    F16,
    /// INT8 with SageAttention2's per-thread granularity: Q per 16-row tile by (row mod 8), K per 128 rows by
    /// (row mod 8) / 2.
    Int8,
    /// E4M3, one scale per 128 rows.
    E4m3PerBlock,
    /// E4M3, one scale per head.
    E4m3PerHead,
    /// NVFP4 along the channels: E2M1, an E4M3 scale per 16, an FP32 scale per head.
    Nvfp4,
}

/// Type in which the Tensor Core accumulates q k^T.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoreType {
    /// f32 (s32 for INT8, which is exact).
    F32,
    /// f16 in code units, rounded after every k step of the instruction (16 channels for FP16, 32 for E4M3);
    /// heads whose row maxima reach 512 code units run with f32 instead.
    F16,
}

/// How a probability becomes an operand of the second product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Probabilities {
    /// Not quantized.
    F32,
    /// E4M3 of `peak` * exp(s - m).
    E4m3 {
        /// Value of the row maximum: 256 or 448.
        peak: f32,
    },
    /// ExpCast-FP8 (paper Eq. 7): the E4M3 byte from one multiply-add on the score.
    ExpCast {
        /// Offset in codes.
        beta: f32,
        /// Arithmetic from score to byte.
        encoder: Encoder,
        /// Scores that get an exact exponential all the same.
        exact: ExactScores,
    },
    /// NVFP4 with two scale levels (SageAttention3): the row so that its maximum is 448 * 6, then E4M3 per 16.
    Nvfp4,
}

/// Arithmetic in which ExpCast writes its byte (`docs/expcast.md` has costs and row bounds).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoder {
    /// One fused multiply-add in f32 (the paper's).
    F32,
    /// Two f16x2 adds (ours): the running maximum plus beta, then 1144 to round to whole codes.
    Packed,
    /// Four f16x2 instructions (ours): the row maximum keeps code 120, beta comes in over the first code below it.
    Pinned,
    /// Five f16x2 instructions (ours): a parabola in every octave instead of a line, nearly exp-then-cast.
    Quadratic,
}

/// Which scores get an exact exponential, rounded to E4M3, beside ExpCast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExactScores {
    /// None.
    None,
    /// Those of every [`WARP_ROWS`] x 128 block in which some row has a score within this many octaves of its
    /// running maximum, the block's own scores included: what a warp can decide as it meets the block.
    Near {
        /// 1 to 16.
        octaves: u8,
    },
    /// Keys 8 to 15 of every 16: every other score register of a warpgroup.
    Half,
    /// Keys 24 to 31 of every 32.
    Quarter,
}

/// Query rows of a warp of the Hopper kernel.
pub const WARP_ROWS: usize = 16;

/// How V (or its residual) is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VFormat {
    /// Not quantized.
    F32,
    /// E4M3, one scale per channel of a head.
    E4m3PerChannel,
    /// E4M3, one scale per head.
    E4m3PerHead,
    /// NVFP4 along the tokens, an FP32 scale per head.
    Nvfp4,
}

/// Which probabilities the normalizer l and the row sums of the mean restoration add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowSums {
    /// The f32 exponentials, before quantization.
    Exact,
    /// The quantized probabilities, decoded: the weights that the second product uses.
    Decoded,
}

/// One composition of choices; every field may be changed, [`Recipe::validate`] says what does not go together.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Name, with its modifiers when it was parsed with some.
    pub name: String,
    /// Format of Q and K.
    pub qk: QkFormat,
    /// Accumulator of q k^T.
    pub scores: ScoreType,
    /// Subtract the token mean of K (softmax does not change; the LSE gets it back).
    pub center_k: bool,
    /// Subtract the mean of every 128 rows of Q and add its product with K back in f32 (SageAttention3).
    pub center_q: bool,
    /// Orthonormal Hadamard rotation of Q and K over the channels.
    pub rotate_qk: bool,
    /// Format of P.
    pub p: Probabilities,
    /// Format of V.
    pub v: VFormat,
    /// Orthonormal Hadamard rotation of V over the channels, undone on the output (the paper's ablation).
    pub rotate_v: bool,
    /// Order of the key and value tokens.
    pub grouping: GroupingConfig,
    /// Subtract the mean of every 128 value tokens and restore it from the row sums (V-Smooth, paper Sec. 3.2).
    pub demean: bool,
    /// Source of l and of the row sums.
    pub row_sums: RowSums,
}

impl Recipe {
    /// Bits of an element of Q and K.
    pub fn bits_qk(&self) -> u32 {
        match self.qk {
            QkFormat::F32 => 32,
            QkFormat::F16 => 16,
            QkFormat::Int8 | QkFormat::E4m3PerBlock | QkFormat::E4m3PerHead => 8,
            QkFormat::Nvfp4 => 4,
        }
    }

    /// Bits of an element of P and V (the wider of the two).
    pub fn bits_pv(&self) -> u32 {
        let p = match self.p {
            Probabilities::F32 => 32,
            Probabilities::E4m3 { .. } | Probabilities::ExpCast { .. } => 8,
            Probabilities::Nvfp4 => 4,
        };
        let v = match self.v {
            VFormat::F32 => 32,
            VFormat::E4m3PerChannel | VFormat::E4m3PerHead => 8,
            VFormat::Nvfp4 => 4,
        };
        p.max(v)
    }

    /// The eleven named recipes, in the order of the documentation.
    pub fn all() -> Vec<Recipe> {
        let mut all = baselines::all();
        all.extend(vc::all());
        all
    }

    /// The default on the CPU and on Hopper: [`vc::vc16_expcast`].
    pub fn default_for_cpu() -> Recipe {
        vc::vc16_expcast()
    }
}
