//! The peers' numerics, as they are published, for comparison.

use super::*;

/// f32 throughout.
pub fn exact() -> Recipe {
    Recipe {
        name: "exact".into(),
        qk: QkFormat::F32,
        scores: ScoreType::F32,
        center_k: false,
        center_q: false,
        rotate_qk: false,
        p: Probabilities::F32,
        v: VFormat::F32,
        rotate_v: false,
        grouping: GroupingConfig::sequence(),
        demean: false,
        row_sums: RowSums::Exact,
    }
}

/// Naive FP8: every operand rounded to E4M3 per block or channel, nothing smoothed (the paper's Table 4).
pub fn fp8() -> Recipe {
    Recipe {
        name: "fp8".into(),
        qk: QkFormat::E4m3PerBlock,
        p: Probabilities::E4m3 { peak: 256.0 },
        v: VFormat::E4m3PerChannel,
        ..exact()
    }
}

/// FlashAttention-3's FP8 path (Shah et al., 2024): one scale per head, Q and K rotated.
pub fn fa3_fp8() -> Recipe {
    Recipe {
        name: "fa3-fp8".into(),
        qk: QkFormat::E4m3PerHead,
        rotate_qk: true,
        p: Probabilities::E4m3 { peak: 256.0 },
        v: VFormat::E4m3PerHead,
        ..exact()
    }
}

/// SageAttention2's released INT8/FP8 configuration (Zhang et al., 2025a).
pub fn sage2() -> Recipe {
    Recipe {
        name: "sage2".into(),
        qk: QkFormat::Int8,
        center_k: true,
        p: Probabilities::E4m3 { peak: 448.0 },
        v: VFormat::E4m3PerChannel,
        ..exact()
    }
}

/// SageAttention3's NVFP4 (Zhang et al., 2025b): K and Q smoothed, P with two scale levels.
pub fn sage3() -> Recipe {
    Recipe {
        name: "sage3".into(),
        qk: QkFormat::Nvfp4,
        center_k: true,
        center_q: true,
        p: Probabilities::Nvfp4,
        v: VFormat::Nvfp4,
        ..exact()
    }
}

/// All baselines, the exact one first.
pub fn all() -> Vec<Recipe> {
    vec![exact(), fp8(), fa3_fp8(), sage2(), sage3()]
}
