//! Numerics of VC-Attention that host and GPU share, one definition each, and its GPU kernels.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

pub mod kernels;
pub mod ptx;
