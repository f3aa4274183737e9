//! The network: patches of a clip to tokens, blocks of attention and MLP under AdaLN-zero modulation, and back.
//!
//! It follows Wan2.x where that matters to attention: RMS norm of queries and keys over the full width, 3-D rotary
//! embedding on interleaved pairs, full attention over all tokens of the clip in raster order (t, h, w). Weights
//! are bf16 on disk and f32 here; all arithmetic is f32 but what an [`Attend`] does.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_nn::{Linear, Module, VarBuilder, ops, rotary_emb};
use serde::Deserialize;

use crate::prompt::Prompt;

/// Sizes, as the metadata of the weights has them.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    /// Frames of a clip that the model was trained on.
    pub frames: usize,
    /// Height and width of a frame in pixels.
    pub size: usize,
    /// Height and width of a patch; a patch has one frame.
    pub patch: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Attention heads.
    pub heads: usize,
    /// Blocks.
    pub depth: usize,
    /// Width of the MLP.
    pub ffn: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of the RMS norms of queries and keys.
    pub eps: f64,
    /// Epsilon of the layer norms.
    pub layer_norm_eps: f64,
}

impl Config {
    /// Latent grid [t, h, w] of a clip.
    pub fn grid(&self) -> [usize; 3] {
        let side = self.size / self.patch;
        [self.frames, side, side]
    }

    /// Shape of a clip, [channels, frames, height, width].
    pub fn clip(&self) -> [usize; 4] {
        [3, self.frames, self.size, self.size]
    }
}

/// The attention of a model: `q`, `k` and `v` are (1, tokens, heads, head_dim) in any strides, and so is the result.
pub trait Attend {
    /// Attention of one layer.
    ///
    /// # Errors
    /// Of the attention.
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;
}

/// The network with its weights.
#[derive(Debug)]
pub struct Model {
    config: Config,
    embed: Linear,
    time: [Linear; 3],
    conditions: Vec<Tensor>,
    unconditional: Tensor,
    blocks: Vec<Block>,
    head_modulation: Tensor,
    head: Linear,
    /// Cosines and sines [tokens, head_dim / 2].
    rope: [Tensor; 2],
}

#[derive(Debug)]
struct Block {
    qkv: Linear,
    out: Linear,
    norm_q: Tensor,
    norm_k: Tensor,
    fc1: Linear,
    fc2: Linear,
    modulation: Tensor,
}

/// Width of the sinusoidal embedding of the time.
const TIME_DIM: usize = 256;

impl Model {
    /// Takes the weights by their names in the file.
    ///
    /// # Errors
    /// When one is missing or has another shape.
    pub fn new(config: Config, weights: &VarBuilder) -> candle_core::Result<Self> {
        let (dim, pixels) = (config.dim, 3 * config.patch * config.patch);
        let linear = |from, to, name: &str| candle_nn::linear(from, to, weights.pp(name));
        let conditions = Prompt::FACTORS
            .iter()
            .map(|(name, count)| weights.get((*count, dim), &format!("cond.{name}.weight")))
            .collect::<candle_core::Result<_>>()?;
        let blocks = (0..config.depth)
            .map(|i| Block::new(&config, &weights.pp(format!("blocks.{i}"))))
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            embed: linear(pixels, dim, "embed")?,
            time: [linear(TIME_DIM, dim, "t1")?, linear(dim, dim, "t2")?, linear(dim, 6 * dim, "tproj")?],
            conditions,
            unconditional: weights.get(dim, "null")?,
            blocks,
            head_modulation: weights.get((2, dim), "head_mod")?,
            head: linear(dim, pixels, "head")?,
            rope: rope(&config, weights.device())?,
            config,
        })
    }

    /// Its sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        self.embed.weight().device()
    }

    /// The velocity at `x`, a clip [3, frames, height, width], and time `t` (1 is noise, 0 is the clip); without a
    /// prompt, the unconditional one of classifier-free guidance.
    ///
    /// # Errors
    /// When the clip has other sizes, or of the attention.
    pub fn velocity(
        &self,
        x: &Tensor,
        t: f32,
        prompt: Option<&Prompt>,
        attention: &mut dyn Attend,
    ) -> Result<Tensor> {
        ensure!(x.dims() == self.config.clip(), "a clip of {:?}, given {:?}", self.config.clip(), x.dims());
        let e = self.embedding(t, prompt)?;
        let modulation = self.time[2].forward(&e.silu()?)?.reshape((6, self.config.dim))?;
        let mut x = self.embed.forward(&self.patches(x)?)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block
                .forward(&x, &modulation, &self.config, &self.rope, &mut |q, k, v| {
                    attention.attend(layer, q, k, v)
                })
                .with_context(|| format!("layer {layer}"))?;
        }
        let m = self.head_modulation.broadcast_add(&e)?;
        let x = modulated(&x, &m.i(0)?, &m.i(1)?, self.config.layer_norm_eps)?;
        self.clip(&self.head.forward(&x)?)
    }

    /// Time and prompt, [1, dim].
    fn embedding(&self, t: f32, prompt: Option<&Prompt>) -> candle_core::Result<Tensor> {
        let half = TIME_DIM / 2;
        let angle = |i: usize| t * 1000.0 * (-10000f32.ln() * i as f32 / half as f32).exp();
        let wave: Vec<f32> =
            (0..half).map(|i| angle(i).cos()).chain((0..half).map(|i| angle(i).sin())).collect();
        let wave = Tensor::from_vec(wave, (1, TIME_DIM), self.device())?;
        let e = self.time[1].forward(&self.time[0].forward(&wave)?.silu()?)?;
        let condition = match prompt {
            None => self.unconditional.clone(),
            Some(prompt) => {
                let rows = self.conditions.iter().zip(prompt.factors()).map(|(table, row)| table.i(row));
                rows.reduce(|a, b| a? + b?).expect("a prompt has factors")?
            }
        };
        e.broadcast_add(&condition)
    }

    /// [3, t, h, w] -> [1, tokens, 3 * patch * patch]; channels of a token in the order (c, row, column).
    fn patches(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let ([t, h, w], p) = (self.config.grid(), self.config.patch);
        x.reshape((3, t, h, p, w, p))?.permute([1, 2, 4, 0, 3, 5])?.reshape((1, t * h * w, 3 * p * p))
    }

    /// The inverse of [`Model::patches`].
    fn clip(&self, y: &Tensor) -> Result<Tensor> {
        let ([t, h, w], p) = (self.config.grid(), self.config.patch);
        let y = y.reshape((t, h, w, 3, p, p))?.permute([3, 0, 1, 4, 2, 5])?;
        Ok(y.reshape((3, t, h * p, w * p))?)
    }
}

impl Block {
    fn new(config: &Config, weights: &VarBuilder) -> candle_core::Result<Self> {
        let dim = config.dim;
        let linear = |from, to, name: &str| candle_nn::linear(from, to, weights.pp(name));
        Ok(Self {
            qkv: linear(dim, 3 * dim, "qkv")?,
            out: linear(dim, dim, "out")?,
            norm_q: weights.get(dim, "norm_q.weight")?,
            norm_k: weights.get(dim, "norm_k.weight")?,
            fc1: linear(dim, config.ffn, "fc1")?,
            fc2: linear(config.ffn, dim, "fc2")?,
            modulation: weights.get((6, dim), "mod")?,
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        modulation: &Tensor,
        config: &Config,
        [cos, sin]: &[Tensor; 2],
        attention: &mut dyn FnMut(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (_, tokens, dim) = x.dims3()?;
        let heads = (1, tokens, config.heads, dim / config.heads);
        let m = self.modulation.add(modulation)?;

        let y = modulated(x, &m.i(0)?, &m.i(1)?, config.layer_norm_eps)?;
        let qkv = self.qkv.forward(&y)?;
        let part = |i: usize| qkv.narrow(2, i * dim, dim);
        // Normalized over the full width, rotated head by head.
        let rotated = |x: Tensor, weight: &Tensor| -> candle_core::Result<Tensor> {
            let x = ops::rms_norm(&x.contiguous()?, weight, config.eps as f32)?;
            let x = x.reshape(heads)?.transpose(1, 2)?.contiguous()?;
            rotary_emb::rope_i(&x, cos, sin)?.transpose(1, 2)
        };
        let (q, k) = (rotated(part(0)?, &self.norm_q)?, rotated(part(1)?, &self.norm_k)?);
        let v = part(2)?.reshape(heads)?;
        let o = attention(&q, &k, &v)?.to_dtype(DType::F32)?.reshape((1, tokens, dim))?;
        let x = (x + self.out.forward(&o)?.broadcast_mul(&m.i(2)?)?)?;

        let y = modulated(&x, &m.i(3)?, &m.i(4)?, config.layer_norm_eps)?;
        let y = self.fc2.forward(&self.fc1.forward(&y)?.gelu()?)?;
        Ok((x + y.broadcast_mul(&m.i(5)?)?)?)
    }
}

/// Layer norm without parameters, then `(1 + scale) x + shift`: one layer norm with them.
fn modulated(x: &Tensor, shift: &Tensor, scale: &Tensor, eps: f64) -> candle_core::Result<Tensor> {
    ops::layer_norm(x, &(scale + 1.0)?.contiguous()?, &shift.contiguous()?, eps as f32)
}

/// Cosines and sines of every token's angles: the pairs of a head are split over (t, h, w) as Wan does,
/// c - 2 (c / 3), c / 3 and c / 3 of c = head_dim / 2.
fn rope(config: &Config, device: &Device) -> candle_core::Result<[Tensor; 2]> {
    let pairs = config.dim / config.heads / 2;
    let parts = [pairs - 2 * (pairs / 3), pairs / 3, pairs / 3];
    let [t, h, w] = config.grid();
    let mut angles = Vec::with_capacity(t * h * w * pairs);
    for position in (0..t).flat_map(|t| (0..h).flat_map(move |h| (0..w).map(move |w| [t, h, w]))) {
        for (at, part) in position.into_iter().zip(parts) {
            angles.extend((0..part).map(|i| at as f64 / config.rope_theta.powf(i as f64 / part as f64)));
        }
    }
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = angles.iter().map(|&a| f(a) as f32).collect();
        Tensor::from_vec(values, (t * h * w, pairs), device)
    };
    Ok([table(f64::cos)?, table(f64::sin)?])
}
