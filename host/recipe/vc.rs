//! The recipes of VC-Attention (arXiv 2609.15810) and ours on top of it.

pub use kernels_gpu::numerics::expcast::PACKED_BETA;

use super::*;

/// Our ExpCast: the packed encoder at its own beta.
pub const EXPCAST: Probabilities =
    Probabilities::ExpCast { beta: PACKED_BETA, encoder: Encoder::Packed, exact: ExactScores::None };

/// The quadratic encoder at its own beta.
pub const QUADRATIC: Probabilities =
    Probabilities::ExpCast { beta: 0.0, encoder: Encoder::Quadratic, exact: ExactScores::None };

/// V-Smooth with INT8 Q and K and exact exponentials: the paper's most faithful 8-bit configuration.
pub fn vc8() -> Recipe {
    Recipe {
        name: "vc8".into(),
        qk: QkFormat::Int8,
        scores: ScoreType::F32,
        center_k: true,
        center_q: false,
        rotate_qk: true,
        p: Probabilities::E4m3 { peak: 256.0 },
        v: VFormat::E4m3PerChannel,
        rotate_v: false,
        grouping: GroupingConfig::kmeans(),
        demean: true,
        row_sums: RowSums::Exact,
    }
}

/// [`vc8`] with ExpCast: the paper's fast 8-bit configuration (with our encoder and beta).
pub fn vc8_expcast() -> Recipe {
    Recipe { name: "vc8-expcast".into(), p: EXPCAST, row_sums: RowSums::Decoded, ..vc8() }
}

/// E4M3 Q and K with f16 scores: the fastest on Hopper, less accurate than INT8 or FP16.
pub fn vc8_fp8qk() -> Recipe {
    Recipe { name: "vc8-fp8qk".into(), qk: QkFormat::E4m3PerHead, scores: ScoreType::F16, ..vc8_expcast() }
}

/// FP16 Q and K with f16 scores and exact exponentials.
pub fn vc16() -> Recipe {
    Recipe { name: "vc16".into(), qk: QkFormat::F16, scores: ScoreType::F16, rotate_qk: false, ..vc8() }
}

/// [`vc16`] with ExpCast: the balanced default on the CPU and on Hopper.
pub fn vc16_expcast() -> Recipe {
    Recipe { name: "vc16-expcast".into(), p: EXPCAST, row_sums: RowSums::Decoded, ..vc16() }
}

/// V-Smooth at 4 bits: NVFP4 everywhere, row sums of the quantized probabilities.
pub fn vc4() -> Recipe {
    Recipe {
        name: "vc4".into(),
        qk: QkFormat::Nvfp4,
        p: Probabilities::Nvfp4,
        v: VFormat::Nvfp4,
        row_sums: RowSums::Decoded,
        ..vc8()
    }
}

/// All of ours.
pub fn all() -> Vec<Recipe> {
    vec![vc8(), vc8_expcast(), vc8_fp8qk(), vc16(), vc16_expcast(), vc4()]
}
