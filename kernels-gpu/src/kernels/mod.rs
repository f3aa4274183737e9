//! The GPU kernels and the facts that a host needs to launch them.

#![allow(
    clippy::manual_checked_ops,
    clippy::manual_clamp,
    reason = "a division behind its own check leaves no panic in the PTX, and min with max has clamp's value for numbers \
              without clamp's panic"
)]
#![allow(
    clippy::manual_is_multiple_of,
    clippy::needless_range_loop,
    reason = "lane and register arithmetic is written as the layouts are: remainders beside quotients, indices over several arrays"
)]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "the documentation of a kernel is for readers of its source"
)]

/// Defines the entries of a module: a kernel on the device, a function of the same parameters for the emulation.
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
macro_rules! kernel {
    ($(#[$attribute:meta])* pub unsafe fn $name:ident($($parameter:ident: $type:ty),* $(,)?) $body:block) => {
        $(#[$attribute])*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name($($parameter: $type),*) $body

        $(#[$attribute])*
        #[cfg(not(target_arch = "nvptx64"))]
        #[allow(clippy::too_many_arguments, reason = "what a launch passes")]
        pub unsafe fn $name($($parameter: $type),*) $body
    };
}

#[cfg(any(
    all(target_arch = "nvptx64", any(attention = "sm90", attention = "mma", attention = "sm120")),
    feature = "emulation"
))]
pub mod attention_fp4;
#[cfg(any(all(target_arch = "nvptx64", any(attention = "mma", attention = "sm120")), feature = "emulation"))]
pub mod attention_mma;
#[cfg(any(
    all(target_arch = "nvptx64", any(attention = "sm100", attention = "sm103")),
    feature = "emulation"
))]
pub mod attention_sm100;
#[cfg(any(all(target_arch = "nvptx64", attention = "sm90"), feature = "emulation"))]
pub mod attention_sm90;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod call;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
mod epilogue;
#[cfg(any(
    all(target_arch = "nvptx64", any(attention = "sm90", attention = "mma", attention = "sm120")),
    feature = "emulation"
))]
mod operand;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
mod softmax;
pub mod tiles;

pub mod head_balance;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod input;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod kmeans;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod order;
#[cfg(any(
    all(target_arch = "nvptx64", any(attention = "sm90", attention = "mma", attention = "sm120")),
    feature = "emulation"
))]
pub mod quantize_fp4;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod quantize_k;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod quantize_q;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod rows;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod smooth_v;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod stats;
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
pub mod tour;

/// How one kernel is launched. `cargo xtask kernels` writes the bounds into the PTX (Rust has no attribute
/// for them), the host launches with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the entry in the PTX module.
    pub name: &'static str,
    /// Threads a block, exactly (`.maxntid`).
    pub threads: u32,
    /// Blocks that must fit on one multiprocessor (`.minnctapersm`): bounds the registers.
    pub min_ctas_per_sm: u32,
    /// Dynamic shared memory a block in bytes.
    pub dynamic_shared: u32,
}

/// Entries of the Hopper module (`vc_attention.sm_90a.ptx`).
pub const SM90: &[Entry] = &[
    attention("attention_sm90_f16_expcast_smooth", SHARED_F16),
    attention("attention_sm90_f16_expcast_plain", SHARED_F16),
    attention("attention_sm90_f16_quadratic_smooth", SHARED_F16),
    attention("attention_sm90_f16_quadratic_plain", SHARED_F16),
    attention("attention_sm90_f16_exp2_smooth", SHARED_F16),
    attention("attention_sm90_f16_exp2_plain", SHARED_F16),
    attention("attention_sm90_e4m3_expcast_smooth", SHARED_E4M3),
    attention("attention_sm90_e4m3_expcast_plain", SHARED_E4M3),
    attention("attention_sm90_e4m3_quadratic_smooth", SHARED_E4M3),
    attention("attention_sm90_e4m3_quadratic_plain", SHARED_E4M3),
    attention("attention_sm90_e4m3_exp2_smooth", SHARED_E4M3),
    attention("attention_sm90_e4m3_exp2_plain", SHARED_E4M3),
    attention("attention_sm90_i8_expcast_smooth", SHARED_E4M3),
    attention("attention_sm90_i8_expcast_plain", SHARED_E4M3),
    attention("attention_sm90_i8_quadratic_smooth", SHARED_E4M3),
    attention("attention_sm90_i8_quadratic_plain", SHARED_E4M3),
    attention("attention_sm90_i8_exp2_smooth", SHARED_E4M3),
    attention("attention_sm90_i8_exp2_plain", SHARED_E4M3),
];

/// A producer warpgroup and two of 64 query rows each, one block a multiprocessor.
const fn attention(name: &'static str, dynamic_shared: u32) -> Entry {
    Entry { name, threads: 384, min_ctas_per_sm: 1, dynamic_shared }
}

/// Shared memory of the attention kernel: 2 Q tiles, `stages` of K, V and ones rows, 2 tiles of means, barriers.
const fn shared(q: usize, k: usize, stages: usize) -> u32 {
    (2 * q + stages * (k + tiles::V_BYTES + ONES_BYTES) + 2 * tiles::MEAN_BYTES + BARRIER_BYTES) as u32
}

/// 8 rows of ones behind every V^T tile: their products are row sums.
pub(crate) const ONES_BYTES: usize = 8 * tiles::KEYS;
/// Room for the barriers of [`attention_sm90`].
const BARRIER_BYTES: usize = 256;
/// K and V tiles in flight with FP16 keys.
pub(crate) const STAGES_F16: usize = 3;
/// K and V tiles in flight with E4M3 keys.
pub(crate) const STAGES_E4M3: usize = 4;
const SHARED_F16: u32 = shared(tiles::Q_F16_BYTES, tiles::K_F16_BYTES, STAGES_F16);
const SHARED_E4M3: u32 = shared(tiles::Q_E4M3_BYTES, tiles::K_E4M3_BYTES, STAGES_E4M3);

/// Entries of the warp-level kernel, in the modules of every architecture that has none of its own.
pub const MMA: &[Entry] = &[
    warp_level("attention_mma_f16_expcast_smooth", tiles::K_F16_BYTES, MMA_STAGES_F16),
    warp_level("attention_mma_f16_expcast_plain", tiles::K_F16_BYTES, MMA_STAGES_F16),
    warp_level("attention_mma_f16_quadratic_smooth", tiles::K_F16_BYTES, MMA_STAGES_F16),
    warp_level("attention_mma_f16_quadratic_plain", tiles::K_F16_BYTES, MMA_STAGES_F16),
    warp_level("attention_mma_f16_exp2_smooth", tiles::K_F16_BYTES, MMA_STAGES_F16),
    warp_level("attention_mma_f16_exp2_plain", tiles::K_F16_BYTES, MMA_STAGES_F16),
    warp_level("attention_mma_e4m3_expcast_smooth", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_e4m3_expcast_plain", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_e4m3_quadratic_smooth", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_e4m3_quadratic_plain", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_e4m3_exp2_smooth", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_e4m3_exp2_plain", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_i8_expcast_smooth", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_i8_expcast_plain", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_i8_quadratic_smooth", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_i8_quadratic_plain", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_i8_exp2_smooth", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
    warp_level("attention_mma_i8_exp2_plain", tiles::K_E4M3_BYTES, MMA_STAGES_8_BIT),
];

/// 8 warps of 16 query rows, one block a multiprocessor; K and V tiles in at most 99 KiB, which is what a block of
/// sm_86, sm_89 and sm_120 may have.
const fn warp_level(name: &'static str, k: usize, stages: usize) -> Entry {
    let dynamic_shared = (stages * (k + tiles::V_BYTES)) as u32;
    assert!(dynamic_shared <= 99 * 1024);
    Entry { name, threads: 256, min_ctas_per_sm: 1, dynamic_shared }
}

/// K and V tiles in flight with FP16 keys in [`attention_mma`].
pub(crate) const MMA_STAGES_F16: usize = 2;
/// K and V tiles in flight with keys of 8 bits in [`attention_mma`].
pub(crate) const MMA_STAGES_8_BIT: usize = 3;

/// NVFP4 attention by block-scaled products, in the module for sm_120a.
pub const FP4_NATIVE: &[Entry] = &[
    fp4("attention_fp4_native_smooth", 0, FP4_STAGES_NATIVE),
    fp4("attention_fp4_native_plain", 0, FP4_STAGES_NATIVE),
];

/// NVFP4 attention on operands decoded to f16, in the modules for sm_89 and sm_90a.
pub const FP4_DECODED: &[Entry] = &[
    fp4("attention_fp4_decoded_smooth", FP4_DECODED_BYTES, FP4_STAGES_DECODED),
    fp4("attention_fp4_decoded_plain", FP4_DECODED_BYTES, FP4_STAGES_DECODED),
];

/// As [`warp_level`], with K and V tiles of NVFP4 behind `decoded` bytes.
const fn fp4(name: &'static str, decoded: usize, stages: usize) -> Entry {
    let dynamic_shared = (decoded + stages * (tiles::K_FP4_BYTES + tiles::V_FP4_BYTES)) as u32;
    assert!(dynamic_shared <= 99 * 1024);
    Entry { name, threads: 256, min_ctas_per_sm: 1, dynamic_shared }
}

/// K and V tiles in flight in [`attention_fp4`], block-scaled.
pub(crate) const FP4_STAGES_NATIVE: usize = 4;
/// K and V tiles in flight in [`attention_fp4`], decoded: the next ones arrive while the last are multiplied in f16.
pub(crate) const FP4_STAGES_DECODED: usize = 1;
/// Decoded K, V^T and means.
pub(crate) const FP4_DECODED_BYTES: usize = 2 * tiles::K_F16_BYTES + 2 * tiles::HEAD_DIM;

/// Entries of the module for B200 (`vc_attention.sm_100a.ptx`): those of [`SM103`] and INT8.
pub const SM100: &[Entry] = &[
    attention_sm100("attention_sm100_f16_expcast_smooth", SM100_SHARED_F16),
    attention_sm100("attention_sm100_f16_expcast_plain", SM100_SHARED_F16),
    attention_sm100("attention_sm100_f16_exp2_smooth", SM100_SHARED_F16),
    attention_sm100("attention_sm100_f16_exp2_plain", SM100_SHARED_F16),
    attention_sm100("attention_sm100_e4m3_expcast_smooth", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_e4m3_expcast_plain", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_e4m3_exp2_smooth", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_e4m3_exp2_plain", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_i8_expcast_smooth", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_i8_expcast_plain", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_i8_exp2_smooth", SM100_SHARED_8_BIT),
    attention_sm100("attention_sm100_i8_exp2_plain", SM100_SHARED_8_BIT),
];

/// Entries of the module for B300 (`vc_attention.sm_103a.ptx`).
pub const SM103: &[Entry] = SM100.split_at(8).0;

/// Two softmax warpgroups of 128 query rows each, one that corrects, and the warps that issue and load; one block a
/// multiprocessor.
const fn attention_sm100(name: &'static str, dynamic_shared: u32) -> Entry {
    Entry { name, threads: 512, min_ctas_per_sm: 1, dynamic_shared }
}

/// Shared memory of [`attention_sm100`]: 256 rows of Q, `stages` of K and V, 2 tiles of means, ones, two words a row, barriers.
const fn sm100_shared(q: usize, k: usize, stages: usize) -> u32 {
    let tiles = 4 * q + stages * (k + tiles::V_BYTES) + 2 * tiles::MEAN_BYTES;
    (tiles + SM100_ONES_BYTES + 2 * 256 * 4 + SM100_BARRIER_BYTES) as u32
}

/// 16 rows of 32 ones: the operand whose products are row sums.
pub(crate) const SM100_ONES_BYTES: usize = 16 * 32;
/// Room for the barriers of [`attention_sm100`] and the address of its Tensor Memory.
const SM100_BARRIER_BYTES: usize = 512;
/// K and V tiles in flight with FP16 keys.
pub(crate) const SM100_STAGES_F16: usize = 3;
/// K and V tiles in flight with keys of 8 bits.
pub(crate) const SM100_STAGES_8_BIT: usize = 4;
const SM100_SHARED_F16: u32 = sm100_shared(tiles::Q_F16_BYTES, tiles::K_F16_BYTES, SM100_STAGES_F16);
const SM100_SHARED_8_BIT: u32 = sm100_shared(tiles::Q_E4M3_BYTES, tiles::K_E4M3_BYTES, SM100_STAGES_8_BIT);

/// Entries that prepare operands: the same source for every architecture from sm_89 (E4M3 conversions).
pub const PREPARE: &[Entry] = &[
    prepare("balance_bf16", 256, 1),
    prepare("balance_f16", 256, 1),
    prepare("k_stats_bf16", 128, 6),
    prepare("k_stats_f16", 128, 6),
    prepare("k_mean", 128, 8),
    prepare("quantize_q_f16_from_bf16", 256, 4),
    prepare("quantize_q_f16_from_f16", 256, 4),
    prepare("quantize_q_e4m3_from_bf16", 256, 4),
    prepare("quantize_q_e4m3_from_f16", 256, 4),
    prepare("quantize_q_i8_from_bf16", 256, 4),
    prepare("quantize_q_i8_from_f16", 256, 4),
    prepare("quantize_k_f16_from_bf16", 256, 4),
    prepare("quantize_k_f16_from_f16", 256, 4),
    prepare("quantize_k_e4m3_from_bf16", 256, 4),
    prepare("quantize_k_e4m3_from_f16", 256, 4),
    prepare("quantize_k_i8_from_bf16", 512, 2),
    prepare("quantize_k_i8_from_f16", 512, 2),
    prepare("v_stats_bf16", 128, 6),
    prepare("v_stats_f16", 128, 6),
    prepare("v_scale", 128, 8),
    prepare("smooth_v_bf16", 128, 5),
    prepare("smooth_v_f16", 128, 5),
    prepare("kmeans_seed_bf16", 128, 4),
    prepare("kmeans_seed_f16", 128, 4),
    prepare("kmeans_targets_bf16", 128, 8),
    prepare("kmeans_targets_f16", 128, 8),
    prepare("kmeans_assign_bf16", 256, 2),
    prepare("kmeans_assign_f16", 256, 2),
    prepare("kmeans_sums_bf16", 128, 8),
    prepare("kmeans_sums_f16", 128, 8),
    prepare("kmeans_update_bf16", 128, 8),
    prepare("kmeans_update_f16", 128, 8),
    prepare("kmeans_distances", 256, 4),
    prepare("kmeans_tour", 1024, 1),
    prepare("order_count", 256, 4),
    prepare("order_scan", 1024, 1),
    prepare("order_scatter", 256, 4),
];

/// Entries that prepare NVFP4 operands, in the modules that have a kernel for them.
pub const PREPARE_FP4: &[Entry] = &[
    prepare("fp4_amax_q_bf16", 256, 3),
    prepare("fp4_amax_q_f16", 256, 3),
    prepare("fp4_amax_k_bf16", 256, 3),
    prepare("fp4_amax_k_f16", 256, 3),
    prepare("quantize_q_fp4_from_bf16", 256, 3),
    prepare("quantize_q_fp4_from_f16", 256, 3),
    prepare("quantize_k_fp4_from_bf16", 256, 3),
    prepare("quantize_k_fp4_from_f16", 256, 3),
    prepare("v_stats_fp4_bf16", 128, 6),
    prepare("v_stats_fp4_f16", 128, 6),
    prepare("fp4_v_scale", 128, 8),
    prepare("smooth_v_fp4_bf16", 128, 4),
    prepare("smooth_v_fp4_f16", 128, 4),
];

/// A kernel with static shared memory only.
const fn prepare(name: &'static str, threads: u32, min_ctas_per_sm: u32) -> Entry {
    Entry { name, threads, min_ctas_per_sm, dynamic_shared: 0 }
}
