//! candle's tensors as those of `vc_attention`, in place.

use candle_core::{CpuStorage, Layout, Result, Tensor, bail};
use vc_attention::{DType, Elements, NonFinite, Problem, TensorView};

use crate::error::to_candle;
use crate::options::Options;

/// Storage of q, k and v with their layouts.
pub(crate) type Storages<'a, S> = [(&'a S, &'a Layout); 3];

/// Names of the tensors, for messages.
pub(crate) const NAMES: [&str; 3] = ["q", "k", "v"];

/// A layout (batch, seq, heads, head_dim) in the order (batch, heads, tokens, head_dim) of `vc_attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axes {
    /// Sizes.
    pub shape: [usize; 4],
    /// Strides in elements.
    pub strides: [usize; 4],
    /// First element.
    pub offset: usize,
}

impl Axes {
    pub(crate) fn of(name: &'static str, layout: &Layout) -> Result<Self> {
        let (&[b, n, h, d], &[sb, sn, sh, sd]) = (layout.dims(), layout.stride()) else {
            bail!(
                "vc_attn: {name} must have the shape (batch, seq, heads, head_dim), not {:?}",
                layout.shape()
            )
        };
        Ok(Self { shape: [b, h, n, d], strides: [sb, sh, sn, sd], offset: layout.start_offset() })
    }

    /// Strides along (batch, heads, tokens), as the GPU kernels take them: the channels lie next to each other.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn device_strides(&self, name: &'static str) -> Result<[i64; 3]> {
        let [batch, head, token, channel] = self.strides;
        if channel != 1 {
            bail!(
                "vc_attn: the channels of {name} must lie next to each other on the GPU, their stride is {channel}: \
                 call `.contiguous()` first"
            )
        }
        let mut strides = [0; 3];
        for ((to, from), size) in strides.iter_mut().zip([batch, head, token]).zip(self.shape) {
            // Nothing steps along an axis of one, whatever stride a reshape left there.
            let stride = if size == 1 { 0 } else { from };
            // 16 bytes of a 16-bit type, which the kernels read at a time.
            if !stride.is_multiple_of(8) {
                bail!(
                    "vc_attn: the strides of {name} must be multiples of 8 elements on the GPU, given (batch, heads, \
                     seq) {:?}: call `.contiguous()` first",
                    [batch, head, token]
                )
            }
            *to = stride as i64;
        }
        if !self.offset.is_multiple_of(8) {
            bail!(
                "vc_attn: {name} must start at a multiple of 8 elements of its storage on the GPU, it starts at {}: \
                 call `.force_contiguous()` first",
                self.offset
            )
        }
        Ok(strides)
    }
}

/// The element type, where attention has it.
pub(crate) fn dtype(dtype: candle_core::DType) -> Result<DType> {
    match dtype {
        candle_core::DType::F32 => Ok(DType::F32),
        candle_core::DType::F16 => Ok(DType::F16),
        candle_core::DType::BF16 => Ok(DType::Bf16),
        other => bail!("vc_attn: q, k and v must be f32, f16 or bf16, not {other:?}"),
    }
}

/// What can be said before any device is asked: four axes each and one element type.
pub(crate) fn check(tensors: [&Tensor; 3]) -> Result<()> {
    let q = tensors[0].dtype();
    dtype(q)?;
    for (name, tensor) in NAMES.into_iter().zip(tensors) {
        Axes::of(name, tensor.layout())?;
        if tensor.dtype() != q {
            bail!("vc_attn: {name} must have the element type of q, {q:?}, not {:?}", tensor.dtype())
        }
    }
    Ok(())
}

fn view<'a>(name: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<TensorView<'a>> {
    fn from<T>(x: &[T], offset: usize) -> &[T] {
        x.get(offset..).unwrap_or_default()
    }
    let Axes { shape, strides, offset } = Axes::of(name, layout)?;
    let elements: Elements = match storage {
        CpuStorage::F32(x) => from(x, offset).into(),
        CpuStorage::F16(x) => from(x, offset).into(),
        CpuStorage::BF16(x) => from(x, offset).into(),
        _ => bail!("vc_attn: {name} must be f32, f16 or bf16"),
    };
    TensorView::strided(name, elements, shape, strides).map_err(to_candle)
}

/// Hands `body` the call on CPU storages as a [`Problem`]: views of the storages with their strides and offsets,
/// nothing copied. Everything that runs on the CPU goes through here.
///
/// Values that are not finite propagate, as they do on the GPU.
pub(crate) fn with_problem<R>(
    storages: Storages<CpuStorage>,
    scale: f32,
    options: &Options,
    body: impl FnOnce(&Problem) -> vc_attention::Result<R>,
) -> Result<R> {
    let [q, k, v] = storages;
    let problem = Problem {
        kv_lens: options.kv_lens.as_deref(),
        scale: Some(scale),
        grid: options.grid,
        nonfinite: NonFinite::Propagate,
        ..Problem::new(view("q", q.0, q.1)?, view("k", k.0, k.1)?, view("v", v.0, v.1)?)
    };
    body(&problem).map_err(to_candle)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::Axes;

    fn axes(tensor: &Tensor) -> Axes {
        Axes::of("q", tensor.layout()).unwrap()
    }

    #[test]
    fn device_strides_are_those_of_the_layout_or_say_what_to_do() {
        let x = Tensor::zeros((2, 10, 3, 48), DType::BF16, &Device::Cpu).unwrap();
        let fits = |x: &Tensor| axes(x).device_strides("q").map_err(|e| e.to_string());
        assert_eq!(fits(&x), Ok([1440, 48, 144]));
        let heads_first = Tensor::zeros((2, 3, 10, 48), DType::BF16, &Device::Cpu).unwrap();
        assert_eq!(fits(&heads_first.transpose(1, 2).unwrap()), Ok([1440, 480, 48]));
        assert_eq!(fits(&x.narrow(1, 3, 7).unwrap()), Ok([1440, 48, 144]));
        assert_eq!(fits(&x.narrow(3, 8, 40).unwrap()), Ok([1440, 48, 144]));
        assert_eq!(axes(&x.narrow(3, 8, 40).unwrap()).offset, 8);
        // Strides of axes of one do not count.
        let odd = Tensor::zeros((1, 10, 1, 44), DType::BF16, &Device::Cpu).unwrap().narrow(3, 0, 40).unwrap();
        assert!(fits(&odd).unwrap_err().contains("multiples of 8 elements"));
        assert_eq!(fits(&odd.narrow(1, 2, 1).unwrap().narrow(3, 0, 40).unwrap()), Ok([0; 3]));
        // One packed projection of q, k and v, cut along the channels.
        let packed = Tensor::zeros((2, 10, 3 * 96), DType::BF16, &Device::Cpu).unwrap();
        let k = packed.narrow(2, 96, 96).unwrap().reshape((2, 10, 2, 48));
        assert_eq!(fits(&k.unwrap()), Ok([960, 48, 96]));

        let swapped = Tensor::zeros((2, 10, 40, 3), DType::BF16, &Device::Cpu).unwrap().t().unwrap();
        assert!(fits(&swapped).unwrap_err().contains("their stride is 3: call `.contiguous()`"));
        let shifted = x.narrow(3, 4, 40).unwrap();
        assert!(fits(&shifted).unwrap_err().contains("it starts at 4: call `.force_contiguous()`"));
    }
}
