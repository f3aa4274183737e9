//! Numerics of VC-Attention that host and GPU share, one definition each, and its GPU kernels.
#![no_std]
