//! What can run where, before anything does.

use candle_core::{DType, Device, Result, bail};
use vc_attention::{Recipe, Shape};

use crate::error::to_candle;
use crate::tensors::dtype;

/// Whether [`vc_attn`](crate::vc_attn) runs a recipe on a device, for an element type and a head dimension: lets a
/// model choose its attention when it is built. On a GPU the first question loads the kernels.
///
/// The GPU kernels take f16 and bf16, head dimensions that are multiples of 8 up to 128, and the recipes that
/// `docs/gpus.md` lists for the GPU. Strides and offsets are those of a call: there the channels of q, k and v lie next
/// to each other and every row starts at a multiple of 16 bytes.
///
/// # Errors
/// The reason why not.
///
/// ```
/// use candle_core::{DType, Device};
/// use vc_attention_candle::{Recipe, supports};
///
/// let recipe = Recipe::default_for_cpu();
/// assert!(supports(&Device::Cpu, DType::BF16, 128, &recipe).is_ok());
/// let reason = supports(&Device::Cpu, DType::F64, 128, &recipe).unwrap_err();
/// assert!(reason.to_string().contains("q, k and v must be f32, f16 or bf16, not F64"));
/// ```
pub fn supports(device: &Device, dtype_of: DType, head_dim: usize, recipe: &Recipe) -> Result<()> {
    let dtype = dtype(dtype_of)?;
    recipe.validate().map_err(to_candle)?;
    let one = [1, 1, 1, head_dim];
    Shape::new(one, one, one).map_err(to_candle)?;
    match device {
        Device::Cpu => Ok(()),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::cuda::supports(device, head_dim, dtype, recipe),
        other => {
            let _ = dtype;
            bail!("vc_attn: no kernels for {:?} in this build; the CPU can run it", other.location())
        }
    }
}
