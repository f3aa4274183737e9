//! Number formats of the operands: what a value becomes when it is stored, and what it then stands for.
//!
//! Every format offers `encode` (to its bits), `decode` (back to `f32`) and, where values are emulated
//! in `f32`, a branch-free `round` or `round_code` that is `decode(encode(x))` without the detour and
//! that LLVM vectorizes in a plain loop over a slice.

pub mod e2m1;
pub mod e4m3;
pub mod f16;
pub mod int8;
mod minifloat;
pub mod nvfp4;
