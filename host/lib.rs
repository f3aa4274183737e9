//! Training-free low-bit attention for video diffusion transformers: V-Smooth and ExpCast-FP8 (VC-Attention,
//! arXiv 2609.15810), the peers' numerics beside them, and the evidence for both.
//!
//! The flow is one way: [`Problem`] -> [`Recipe`] -> [`Plan`] -> [`backend::Backend`] (group, prepare Q, K and V,
//! attend) -> [`Output`]. [`attend`] does all of it; [`run`] hands out the stages' times and token orders,
//! [`run_on_order`] reuses an order, and a [`schedule::Schedule`] decides in a denoising loop when to do which.

#![deny(missing_docs)]

mod attention;
pub mod backend;
pub mod error;
pub mod fidelity;
pub mod grouping;
pub mod io;
pub mod outliers;
pub mod plan;
pub mod problem;
pub mod recipe;
pub mod schedule;
pub mod synth;
pub mod tensor;

pub use attention::{Report, Run, attend, run, run_on_order};
pub use backend::{Observed, Output};
pub use error::{Error, Result};
pub use plan::{Options, OutputType, Plan};
pub use problem::{NonFinite, Problem, Shape};
pub use recipe::Recipe;
pub use tensor::{DType, Elements, Layout, Tensor, TensorView};
