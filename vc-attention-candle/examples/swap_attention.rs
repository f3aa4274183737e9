//! A small video transformer in candle whose attention is swapped: exact, and `vc_attn` with its token order kept
//! from one denoising step to the next.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, VarMap, linear, ops::softmax_last_dim, rms_norm};
use vc_attention_candle::{Grouping, Options, Order, Recipe, VcAttention, supports};

const HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const LAYERS: usize = 2;
const STEPS: usize = 8;
/// Latent frames, rows and columns: 512 tokens.
const GRID: [usize; 3] = [4, 8, 16];

/// What a model's attention can be.
enum Attention {
    /// candle's own: matmul, softmax, matmul.
    Exact,
    /// Low-bit, on one workspace for all layers.
    Vc(VcAttention),
}

/// A transformer layer, without the parts that do not matter here.
struct Layer {
    norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    /// This layer's token order; with classifier-free guidance in two calls, each branch would have its own.
    order: Order,
}

impl Layer {
    fn new(weights: VarBuilder) -> Result<Self> {
        let dim = HEADS * HEAD_DIM;
        let projection = |name: &str| linear(dim, dim, weights.pp(name));
        let [q, k, v, out] = [projection("q")?, projection("k")?, projection("v")?, projection("out")?];
        Ok(Self { norm: rms_norm(dim, 1e-6, weights.pp("norm"))?, q, k, v, out, order: Order::new() })
    }

    /// `x` is (batch, seq, dim), and so is the result.
    fn forward(&self, x: &Tensor, step: usize, attention: &Attention) -> Result<Tensor> {
        let (batch, seq, dim) = x.dims3()?;
        let y = self.norm.forward(x)?;
        // (batch, seq, heads, head_dim): a view of the projection, as `vc_attn` and `flash_attn` take it.
        let heads = |y: Tensor| y.reshape((batch, seq, HEADS, HEAD_DIM));
        let [q, k, v] =
            [heads(self.q.forward(&y)?)?, heads(self.k.forward(&y)?)?, heads(self.v.forward(&y)?)?];
        let scale = 1.0 / (HEAD_DIM as f32).sqrt();
        let y = match attention {
            Attention::Exact => exact(&q, &k, &v, scale)?,
            Attention::Vc(attention) => {
                // Grouped in the first quarter of the steps, from the clusters before; then the order stays.
                let grouping = if step < STEPS.div_ceil(4) { Grouping::Warm } else { Grouping::Reuse };
                attention.forward_on(&q, &k, &v, scale, &self.order, grouping)?
            }
        };
        x + self.out.forward(&y.reshape((batch, seq, dim))?)?
    }
}

fn exact(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2)?.contiguous());
    let scores = (q?.matmul(&k?.t()?)? * f64::from(scale))?;
    softmax_last_dim(&scores)?.matmul(&v?)?.transpose(1, 2)
}

/// Stands in for a sampler: every step goes a part of the way that the model points.
fn denoise(layers: &[Layer], noise: &Tensor, attention: &Attention) -> Result<Tensor> {
    layers.iter().for_each(|layer| layer.order.clear());
    let mut sample = noise.clone();
    for step in 0..STEPS {
        let y = layers.iter().try_fold(sample.clone(), |x, layer| layer.forward(&x, step, attention))?;
        if let Attention::Vc(attention) = attention
            && step == 0
        {
            // A GPU call cannot tell by itself that scores left the range of f16.
            attention.check()?;
        }
        sample = (&sample + ((y - &sample)? / STEPS as f64)?)?;
    }
    Ok(sample)
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available(0)?;
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let variables = VarMap::new();
    let weights = VarBuilder::from_varmap(&variables, dtype, &device);
    let layers: Vec<Layer> =
        (0..LAYERS).map(|i| Layer::new(weights.pp(format!("layer{i}")))).collect::<Result<_>>()?;

    let recipe = Recipe::default_for_cpu();
    let low_bit = match supports(&device, dtype, HEAD_DIM, &recipe) {
        Ok(()) => Attention::Vc(VcAttention::new(Options::new(recipe).with_grid(GRID))),
        Err(reason) => {
            eprintln!("{reason}");
            Attention::Exact
        }
    };
    let tokens: usize = GRID.iter().product();
    let noise = Tensor::randn(0f32, 1.0, (1, tokens, HEADS * HEAD_DIM), &device)?.to_dtype(dtype)?;
    let wanted = denoise(&layers, &noise, &Attention::Exact)?.to_dtype(DType::F32)?;
    let got = denoise(&layers, &noise, &low_bit)?.to_dtype(DType::F32)?;

    let norm = |x: &Tensor| x.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    let distance = norm(&(&got - &wanted)?)? / norm(&wanted)?;
    println!("relative distance of the samples after {STEPS} steps: {distance:.1e}");
    let kept: usize = layers.iter().map(|layer| layer.order.bytes()).sum();
    println!("kept token orders: {kept} bytes");
    assert_eq!(got.dim(D::Minus1)?, HEADS * HEAD_DIM);
    assert!(distance < 0.02, "low-bit attention changed the sample too much");
    Ok(())
}
