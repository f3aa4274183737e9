//! Errors of `vc_attention` as candle's.

use vc_attention::Error;

/// The same message, with the name of the operation in front. Shapes in it are in the order of `vc_attention`, which
/// differs from the caller's, so it says which.
pub(crate) fn to_candle(error: Error) -> candle_core::Error {
    let axes = match &error {
        Error::Tensor { .. } | Error::NonFinite { .. } => " (axes: batch, heads, tokens, head_dim)",
        _ => "",
    };
    candle_core::Error::msg(format!("vc_attn: {error}{axes}"))
}
