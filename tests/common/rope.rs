//! Rotary tables, and tensors turned by them on the host as the kernels turn them.

use kernels_gpu::numerics::rope;
use vc_attention::TensorView;

/// Cosines and sines of q, those of k, `[tokens, dim / 2]` each: different ones for q and k, so that no table passes for another.
pub fn tables(q_tokens: usize, kv_tokens: usize, dim: usize) -> [Vec<f32>; 4] {
    let ([q_cos, q_sin], [k_cos, k_sin]) = (pair(q_tokens, dim, 100.0), pair(kv_tokens, dim, 300.0));
    [q_cos, q_sin, k_cos, k_sin]
}

/// Cosines and sines of positions 0, 1, ... with frequencies `base`^(-2i / dim).
fn pair(tokens: usize, dim: usize, base: f64) -> [Vec<f32>; 2] {
    let pairs = (0..tokens).flat_map(|t| (0..dim / 2).map(move |i| (t as f64, i as f64)));
    let angles = pairs.map(|(t, i)| t * base.powf(-2.0 * i / dim as f64));
    angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip::<_, _, Vec<_>, Vec<_>>().into()
}

/// A tensor's values in (batch, heads, tokens, dim), turned in f32; as they are where the tables are empty.
pub fn turned(view: &TensorView, cos: &[f32], sin: &[f32]) -> Vec<f32> {
    let [batch, heads, tokens, dim] = view.shape();
    let head = |i: usize| view.read_head(i / heads, i % heads, tokens);
    let mut rows: Vec<f32> = (0..batch * heads).flat_map(head).collect();
    if !cos.is_empty() {
        for (i, row) in rows.chunks_exact_mut(dim).enumerate() {
            let pairs = i % tokens * (dim / 2)..(i % tokens + 1) * (dim / 2);
            rope::apply(row, &cos[pairs.clone()], &sin[pairs]);
        }
    }
    rows
}
