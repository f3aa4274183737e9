//! Numerics of VC-Attention that host and GPU share, one definition each, and its GPU kernels.
//!
//! The crate is `no_std` and needs only `core`: the same source is compiled for the host and for
//! `nvptx64-nvidia-cuda`, so that a number format or an encoder has one definition and CPU and GPU
//! agree bit for bit. Nothing here calls a math library: every operation is an IEEE addition,
//! multiplication or division (never contracted into a fused one), an integer operation or a select,
//! and so has the same result everywhere.
//!
//! - [`formats`]: the number formats of the operands, their encoders, decoders and "round through".
//! - [`numerics`]: what happens to values: ExpCast, exp2, Hadamard, RoPE, means, code units.
//! - [`layout`]: where values lie: token order inside 16, swizzle, tile sizes, scale groups.
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]
#![cfg_attr(
    target_arch = "nvptx64",
    expect(
        internal_features,
        reason = "link_llvm_intrinsics: no stable way to a convergent operation, see ptx::collective"
    )
)]

pub mod formats;
pub mod kernels;
pub mod layout;
pub mod numerics;
pub mod ptx;
