//! NVFP4 operands: every head's scale first, then the tiles.

use kernels_gpu::formats::nvfp4;

use super::{DevicePlan, Tensors};
use crate::backend::cuda::driver::{Arguments, Stream};
use crate::error::Result;

impl DevicePlan {
    pub(super) unsafe fn quantize_q_fp4(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        let centred = self.spec.recipe.center_k;
        let shift = if centred && tensors.lse != 0 { self.ptr(self.at.lse_shift) } else { 0 };
        let s = &self.spec.shape;
        let blocks = 2 * self.sizes.q_blocks * self.sizes.q_heads;
        self.memory.fill(self.at.q_amax, 0, stream)?;
        // SAFETY: by the caller; the sections have the sizes of the kernels' tables.
        unsafe {
            let arguments = Arguments::new()
                .with(tensors.q)
                .with(tensors.rope.q_cos)
                .with(tensors.rope.q_sin)
                .with(self.ptr(self.at.q_amax));
            let arguments = self
                .strides(arguments, self.spec.q)
                .with(s.q_tokens as u32)
                .with(s.q_heads as u32)
                .with(s.head_dim as u32)
                .with(self.rotation());
            self.launch(stream, &format!("fp4_amax_q_{}", self.names.input), blocks, arguments)?;
            let arguments = Arguments::new()
                .with(tensors.q)
                .with(tensors.rope.q_cos)
                .with(tensors.rope.q_sin)
                .with(if centred { self.ptr(self.at.k_mean) } else { 0 })
                .with(self.ptr(self.at.q_amax))
                .with(self.ptr(self.at.q))
                .with(self.ptr(self.at.q_factor))
                .with(shift);
            let arguments = self
                .q_sizes(self.strides(arguments, self.spec.q))
                .with(self.rotation())
                .with(self.spec.scale);
            self.launch(stream, &format!("quantize_q_fp4_from_{}", self.names.input), blocks, arguments)
        }
    }

    pub(super) unsafe fn prepare_k_fp4(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        let mean = if self.spec.recipe.center_k { self.ptr(self.at.k_mean) } else { 0 };
        let blocks = 2 * self.sizes.key_blocks * self.sizes.kv_heads;
        self.memory.fill(self.at.k_amax, 0, stream)?;
        // SAFETY: as in `quantize_q_fp4`.
        unsafe {
            let arguments = Arguments::new()
                .with(tensors.k)
                .with(tensors.rope.k_cos)
                .with(tensors.rope.k_sin)
                .with(mean)
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.k_amax));
            let arguments = self.kv_sizes(self.strides(arguments, self.spec.k)).with(self.rotation());
            self.launch(stream, &format!("fp4_amax_k_{}", self.names.input), blocks, arguments)?;
            let arguments = Arguments::new()
                .with(tensors.k)
                .with(self.order())
                .with(tensors.rope.k_cos)
                .with(tensors.rope.k_sin)
                .with(mean)
                .with(tensors.kv_lens)
                .with(self.ptr(self.at.k_amax))
                .with(self.ptr(self.at.k))
                .with(self.ptr(self.at.k_scale));
            let arguments = self.kv_sizes(self.strides(arguments, self.spec.k)).with(self.rotation());
            self.launch(stream, &format!("quantize_k_fp4_from_{}", self.names.input), blocks, arguments)
        }
    }

    /// What follows `v_stats_fp4`.
    pub(super) unsafe fn smooth_v_fp4(&self, stream: Stream, tensors: &Tensors) -> Result<()> {
        // SAFETY: as in `quantize_q_fp4`.
        unsafe {
            let arguments = Arguments::new()
                .with(self.ptr(self.at.v_amax))
                .with(self.ptr(self.at.v_tensor))
                .with(self.ptr(self.at.v_scale));
            self.launch(stream, "fp4_v_scale", self.sizes.kv_heads, arguments)?;
            let arguments = Arguments::new()
                .with(tensors.v)
                .with(self.order())
                .with(tensors.kv_lens)
                .with(self.block_means())
                .with(self.ptr(self.at.v_tensor))
                .with(self.ptr(self.at.v));
            let arguments = self.kv_sizes(self.strides(arguments, self.spec.v));
            let blocks = self.sizes.key_blocks * self.sizes.kv_heads;
            self.launch(stream, &format!("smooth_v_fp4_{}", self.names.input), blocks, arguments)
        }
    }

    /// The scales of the heads of Q, K and V.
    pub(super) fn tensor_scales(&self) -> Result<[Vec<f32>; 3]> {
        if !self.names.family.fp4() {
            return Ok(Default::default());
        }
        let q_amax: Vec<f32> = self.memory.read(self.at.q_amax)?;
        let q = q_amax.into_iter().map(nvfp4::tensor_scale).collect();
        Ok([q, self.memory.read(self.at.k_scale)?, self.memory.read(self.at.v_tensor)?])
    }
}
