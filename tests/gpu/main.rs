//! The CUDA backend on this machine's GPU: stages bit for bit against the CPU's, the grouping, the attention, and
//! what an application that embeds a plan relies on.
//!
//! Without a GPU every test says so on stderr and passes; `VCA_REQUIRE_GPU=1` makes that a failure. Tests whose
//! names begin with `sanitize_` are the small ones for `compute-sanitizer`. `cargo xtask gpu-bundle` packs this
//! binary for a machine without Rust; real inputs are then found by `VCA_DATA` or beside the program.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/rope.rs"]
mod rotary;

mod attention;
mod call;
mod device;
mod embedding;
mod fp4;
mod grouping;
mod inputs;
mod large;
mod rope;
mod sanitize;
mod schedule;
mod stages;
mod warp_level;
