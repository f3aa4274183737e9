//! Training-free low-bit attention for video diffusion transformers.

pub mod error;
pub mod grouping;
pub mod problem;
pub mod recipe;
pub mod synth;
pub mod tensor;

pub use error::{Error, Result};
pub use problem::{NonFinite, Problem, Shape};
pub use recipe::Recipe;
pub use tensor::{DType, Elements, Layout, Tensor, TensorView};
