//! What can be wrong with an input, said so that the caller can mend it.

use std::path::PathBuf;

/// Result of this crate's fallible calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A bad input. Every message names the tensor (or file, or option), what was expected and what was given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shape, length or stride of a tensor does not fit.
    #[error("tensor `{tensor}`: expected {expected}, given {given}")]
    Tensor {
        /// Name of the tensor: `q`, `k`, `v`, `o`, `lse`, `kv_lens`, or of a rotary table: `q_cos`, `q_sin`, `k_cos`, `k_sin`.
        tensor: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What came.
        given: String,
    },
    /// A NaN or an infinity among the values that take part.
    #[error(
        "tensor `{tensor}`: expected finite values, given {value} at [batch {}, head {}, token {}, channel {}]",
        position[0], position[1], position[2], position[3]
    )]
    NonFinite {
        /// Name of the tensor.
        tensor: &'static str,
        /// Batch, head, token, channel of the first such value.
        position: [usize; 4],
        /// The value itself.
        value: f32,
    },
    /// An option (scale, grid, number of clusters, ...) outside its range.
    #[error("option `{option}`: expected {expected}, given {given}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What came.
        given: String,
    },
    /// A recipe that does not exist or cannot be composed.
    #[error("recipe `{recipe}`: {reason}")]
    Recipe {
        /// The recipe as it was written.
        recipe: String,
        /// Why it cannot be used.
        reason: String,
    },
    /// A file that cannot be opened, read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file that is not what it should be: truncated, a wrong dtype, a missing tensor, a lying header.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was expected and what was found.
        reason: String,
    },
    /// A GPU, its driver or its memory.
    #[error("device: {reason}")]
    Device {
        /// What was tried and what came of it.
        reason: String,
    },
}
