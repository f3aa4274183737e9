//! Rotary position embedding on interleaved pairs: `(x[2i], x[2i+1])` turned by an angle per pair.
//!
//! The caller brings the tables of cosines and sines, one entry per pair: which positions and
//! frequencies they come from (one axis or three) is the model's affair. Products and sums are plain,
//! not fused: `x' = x c - y s`, `y' = x s + y c`.

/// Turns one row in place; `cos` and `sin` have half its length.
///
/// # Panics
///
/// If the lengths do not match.
#[inline]
pub fn apply(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (pairs, rest) = row.as_chunks_mut::<2>();
    assert!(
        rest.is_empty() && cos.len() == pairs.len() && sin.len() == pairs.len(),
        "RoPE takes one cosine and one sine for every pair of channels"
    );
    for ((pair, &c), &s) in pairs.iter_mut().zip(cos).zip(sin) {
        let [x, y] = *pair;
        *pair = [x * c - y * s, x * s + y * c];
    }
}
