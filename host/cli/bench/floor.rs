//! What the hardware would need at least: bytes that have to move, operations that have to be done.

use std::time::Duration;

use kernels_gpu::formats::nvfp4;
use serde::Serialize;
use vc_attention::Shape;
use vc_attention::recipe::{QkFormat, Recipe};

/// What an H200 can do.
#[derive(Clone, Copy, Serialize)]
pub struct Ceilings {
    /// Bytes a second to and from memory, as measured with a copy (4.8e12 in NVIDIA's data sheet).
    #[serde(rename = "memory_bytes_per_s")]
    pub memory: f64,
    /// Operations a second of dense FP16 products, NVIDIA's data sheet of the H200 SXM.
    #[serde(rename = "fp16_flop_per_s")]
    pub fp16: f64,
    /// The same for FP8.
    #[serde(rename = "fp8_flop_per_s")]
    pub fp8: f64,
}

/// The ceilings that floors are told against.
pub const H200: Ceilings = Ceilings { memory: 4.3e12, fp16: 989.4e12, fp8: 1978.9e12 };

/// What the floors are, for `--help`.
pub const HELP: &str = "\
Times on a GPU are its own (events on a stream), on bfloat16 tensors that are there, after a warm-up.\n\n\
Floors are an H200's: bytes at 4.3 TB/s (a copy measured on one; 4.8 in the data sheet), products at the dense \
peaks of NVIDIA's data sheet for the H200 SXM (989.4 TFLOP/s in FP16; 1978.9 in FP8, of which a kernel with nothing \
but the two products was measured to reach 1717). Every tensor counts as read once and every operand as written \
once; an iteration of the k-means reads V once, its order is written once. Of the attention loop only the two \
products count, 4 B H N N D operations, half of them at the rate of the format of Q and K (all of NVFP4 at that of FP16, \
to which it is decoded). A ratio below 1 means \
that a tensor came from the cache.\n\n\
The average of 40 steps is that of the paper's schedule: grouping from a cold start in one step, warm in two, the \
order reused in the others, everything else in each: (cold + 2 warm) / 40 + prepare + attention.";

/// Floors of the stages of a call.
#[derive(Clone, Copy, Debug)]
pub struct Floors {
    /// Reading the values once.
    pass: Duration,
    /// Writing the order once.
    order: Duration,
    pub q: Duration,
    pub k: Duration,
    pub v: Duration,
    pub attention: Duration,
}

impl Floors {
    /// Grouping with so many iterations.
    pub fn group(&self, iterations: usize) -> Duration {
        self.pass.mul_f64(iterations as f64) + self.order
    }

    /// Quantizing Q, K and V.
    pub fn prepare(&self) -> Duration {
        self.q + self.k + self.v
    }
}

/// Floors of a call on 16-bit tensors.
pub fn floors(shape: &Shape, recipe: &Recipe, ceilings: &Ceilings) -> Floors {
    /// Bytes of an element of an input, of a mean, of an index of the order.
    const INPUT: usize = 2;
    const MEAN: usize = 2;
    const INDEX: usize = 4;
    const BLOCK: usize = vc_attention::grouping::BLOCK;
    let Shape { batch, q_heads, kv_heads, q_tokens, kv_tokens, head_dim } = *shape;
    let queries = batch * q_heads * q_tokens;
    let keys = batch * kv_heads * kv_tokens;
    let fp4 = recipe.qk == QkFormat::Nvfp4;
    let moved = |bytes: usize| Duration::from_secs_f64(bytes as f64 / ceilings.memory);
    // Of elements and, of NVFP4, their scales.
    let quantized = |elements: usize, bits: u32| {
        let scales = if bits == 4 { elements / nvfp4::BLOCK } else { 0 };
        elements * INPUT + elements * bits as usize / 8 + scales
    };
    let means =
        if recipe.demean { batch * kv_heads * kv_tokens.div_ceil(BLOCK) * head_dim * MEAN } else { 0 };
    // Here NVFP4 is decoded to FP16.
    let qk_peak = if recipe.qk == QkFormat::F16 || fp4 { ceilings.fp16 } else { ceilings.fp8 };
    let pv_peak = if fp4 { ceilings.fp16 } else { ceilings.fp8 };
    let half = shape.flops() / 2.0;
    Floors {
        pass: moved(keys * head_dim * INPUT),
        order: moved(keys * INDEX),
        q: moved(quantized(queries * head_dim, recipe.bits_qk())),
        k: moved(quantized(keys * head_dim, recipe.bits_qk())),
        v: moved(quantized(keys * head_dim, if fp4 { 4 } else { 8 }) + means),
        attention: Duration::from_secs_f64(half / qk_peak + half / pv_peak),
    }
}

#[cfg(test)]
mod tests {
    use super::super::call::parse;
    use super::*;

    /// The figures of the design for the Wan call: 0.81 ms of preparation (0.99 with FP16 Q and K), a pass over V
    /// of 0.19 ms, 1.17e14 operations.
    #[test]
    fn the_wan_call_has_the_known_floors() {
        let shape = parse("wan2.2").unwrap().shape();
        let prepare = |name: &str| {
            let floors = floors(&shape, &Recipe::parse(name).unwrap(), &H200);
            floors.prepare().as_secs_f64() * 1e3
        };
        approx::assert_abs_diff_eq!(prepare("vc8-fp8qk"), 0.81, epsilon = 0.01);
        approx::assert_abs_diff_eq!(prepare("vc16-expcast"), 0.99, epsilon = 0.01);
        let fp8 = floors(&shape, &Recipe::parse("vc8-fp8qk").unwrap(), &H200);
        approx::assert_abs_diff_eq!(fp8.group(1).as_secs_f64() * 1e3, 0.18, epsilon = 0.01);
        approx::assert_relative_eq!(fp8.attention.as_secs_f64(), 1.1706e14 / 1978.9e12, max_relative = 1e-3);
        let fp16 = floors(&shape, &Recipe::parse("vc16").unwrap(), &H200);
        approx::assert_relative_eq!(
            fp16.attention.as_secs_f64() / fp8.attention.as_secs_f64(),
            1.5,
            max_relative = 1e-3
        );
    }
}
