//! Random attention problems, quantized and packed into the kernel's tiles on the CPU.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use half::{bf16, f16};
use kernels_gpu::formats::{self, e4m3};
use kernels_gpu::kernels::tiles::{self, HEAD_DIM, KEYS, MEAN_BLOCKS, ROWS};
use safetensors::{Dtype, SafeTensors};

/// The sizes of a problem.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Shape {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q: usize,
    pub kv: usize,
}

/// What a kernel does with its operands, read off its name.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Variant {
    pub e4m3_scores: bool,
    pub expcast: bool,
    pub smooth: bool,
}

impl Variant {
    /// Of the kernel of this name.
    pub fn of(name: &str) -> Self {
        let has = |part: &str| name.split('_').any(|p| p == part);
        Self { e4m3_scores: has("e4m3"), expcast: has("expcast"), smooth: has("smooth") }
    }
}

/// Unquantized heads: `[heads][tokens][128]`.
pub struct Problem {
    /// Sizes.
    pub shape: Shape,
    /// Keys that count, by batch.
    pub lens: Vec<usize>,
    /// Queries, times sqrt(scale * 8 log2 e).
    pub q: Vec<f32>,
    /// Keys, times the same.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

/// Quantized operands: the values for the reference, the tiles for the kernel.
pub struct Operands {
    /// Quantized queries and keys, decoded.
    pub q: Vec<f64>,
    /// As `q`.
    pub k: Vec<f64>,
    /// Decoded residual bytes, unscaled.
    pub residual: Vec<f64>,
    /// Decoded block means over the channel scale, `[heads][blocks][128]`.
    pub means: Vec<f64>,
    /// Channel scales `[heads][128]`.
    pub scale: Vec<f32>,
    /// Tiles of Q.
    pub q_tiles: Vec<u8>,
    /// Tiles of K.
    pub k_tiles: Vec<u8>,
    /// Tiles of V.
    pub v_tiles: Vec<u8>,
    /// Tiles of means.
    pub mean_tiles: Vec<u8>,
}

/// A standard normal number.
fn normal(rng: &mut Rng) -> f32 {
    let (a, b) = (1.0 - rng.f64(), rng.f64());
    ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
}

impl Problem {
    /// Normal queries and keys (`gain` times as large in the scores), values with means by channel and by stretches
    /// of 100 tokens, which straddle blocks.
    pub fn random(shape: Shape, lens: Option<Vec<usize>>, gain: f32, seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let unit =
            ((HEAD_DIM as f64).powf(-0.5) * 8.0 * std::f64::consts::LOG2_E).sqrt() as f32 * gain.sqrt();
        let rows = |heads: usize, tokens: usize| shape.batch * heads * tokens * HEAD_DIM;
        let q = (0..rows(shape.q_heads, shape.q)).map(|_| normal(&mut rng) * unit).collect();
        let k = (0..rows(shape.kv_heads, shape.kv)).map(|_| normal(&mut rng) * unit).collect();
        let mut mean = [0.0; HEAD_DIM];
        let mut v = Vec::with_capacity(rows(shape.kv_heads, shape.kv));
        for token in 0..shape.batch * shape.kv_heads * shape.kv {
            if token % 100 == 0 {
                mean = std::array::from_fn(|c| normal(&mut rng) + 0.02 * c as f32);
            }
            v.extend(mean.iter().map(|m| m + normal(&mut rng)));
        }
        Self { shape, lens: lens.unwrap_or(vec![shape.kv; shape.batch]), q, k, v }
    }

    /// The first head of a file's `q`, `k` and `v` (`[.., tokens, 128]`, f32, f16 or bf16), its tokens repeated up to
    /// `tokens`; K centred.
    pub fn from_file(file: &Path, tokens: usize) -> Result<Self> {
        let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let tensors = SafeTensors::deserialize(&bytes)?;
        let head = |name: &str| -> Result<Vec<f32>> {
            let tensor = tensors.tensor(name)?;
            let (shape, data) = (tensor.shape(), tensor.data());
            ensure!(
                shape.len() >= 2 && shape[shape.len() - 1] == HEAD_DIM,
                "{name} is {shape:?}, not [.., tokens, 128]"
            );
            let count = shape[shape.len() - 2] * HEAD_DIM;
            let two =
                |f: fn([u8; 2]) -> f32| data.as_chunks::<2>().0[..count].iter().map(|x| f(*x)).collect();
            let values: Vec<f32> = match tensor.dtype() {
                Dtype::F32 => {
                    data.as_chunks::<4>().0[..count].iter().map(|x| f32::from_le_bytes(*x)).collect()
                }
                Dtype::F16 => two(|x| f16::from_le_bytes(x).to_f32()),
                Dtype::BF16 => two(|x| bf16::from_le_bytes(x).to_f32()),
                other => bail!("{name} is {other:?}"),
            };
            Ok(values.iter().copied().cycle().take(tokens * HEAD_DIM).collect())
        };
        let unit = ((HEAD_DIM as f64).powf(-0.5) * 8.0 * std::f64::consts::LOG2_E).sqrt() as f32;
        let (mut q, mut k, v) = (head("q")?, head("k")?, head("v")?);
        for c in 0..HEAD_DIM {
            let mean = k.iter().skip(c).step_by(HEAD_DIM).sum::<f32>() / tokens as f32;
            k.iter_mut().skip(c).step_by(HEAD_DIM).for_each(|x| *x = (*x - mean) * unit);
        }
        q.iter_mut().for_each(|x| *x *= unit);
        let shape = Shape { batch: 1, q_heads: 1, kv_heads: 1, q: tokens, kv: tokens };
        Ok(Self { shape, lens: vec![tokens], q, k, v })
    }

    /// The same keys and values under `rows` of the queries, spread evenly.
    pub fn with_queries(mut self, rows: usize) -> Self {
        let step = self.shape.q / rows;
        self.q = self.q.chunks(HEAD_DIM).step_by(step).take(rows).flatten().copied().collect();
        self.shape.q = rows;
        self
    }

    /// Quantizes and packs for a kernel variant.
    pub fn pack(&self, variant: Variant) -> Operands {
        let s = self.shape;
        let (q_bytes, k_bytes) = match variant.e4m3_scores {
            true => (tiles::Q_E4M3_BYTES, tiles::K_E4M3_BYTES),
            false => (tiles::Q_F16_BYTES, tiles::K_F16_BYTES),
        };
        let (q_tiles, blocks) = (s.q.div_ceil(2 * ROWS) * 2, s.kv.div_ceil(KEYS));
        let groups = blocks.div_ceil(MEAN_BLOCKS);
        let (q_heads, kv_heads) = (s.batch * s.q_heads, s.batch * s.kv_heads);
        let mut o = Operands {
            q: vec![0.0; self.q.len()],
            k: vec![0.0; self.k.len()],
            residual: vec![0.0; self.v.len()],
            means: vec![0.0; kv_heads * blocks * HEAD_DIM],
            scale: vec![1.0; kv_heads * HEAD_DIM],
            q_tiles: vec![0; q_heads * q_tiles * q_bytes],
            k_tiles: vec![0; kv_heads * blocks * k_bytes],
            v_tiles: vec![0; kv_heads * blocks * tiles::V_BYTES],
            mean_tiles: vec![0; kv_heads * groups * tiles::MEAN_BYTES],
        };
        // Scores: one element at a time, the same for Q and K but for the tile's rows and the rounding to FP16.
        let put = |x: f32, tile: &mut [u8], [f16_at, e4m3_at]: [usize; 2], round: fn(f32) -> f32| -> f64 {
            if variant.e4m3_scores {
                tile[e4m3_at] = e4m3::encode(x);
                e4m3::decode(tile[e4m3_at]) as f64
            } else {
                let h = f16::from_f32(round(x));
                tile[f16_at..f16_at + 2].copy_from_slice(&h.to_le_bytes());
                h.to_f64()
            }
        };
        for i in 0..self.q.len() {
            let (head, token, c) = (i / HEAD_DIM / s.q, i / HEAD_DIM % s.q, i % HEAD_DIM);
            let tile = &mut o.q_tiles[(head * q_tiles + token / ROWS) * q_bytes..][..q_bytes];
            let r = token % ROWS;
            o.q[i] = put(
                self.q[i],
                tile,
                [tiles::q_tile_offset_f16(r, c), tiles::q_tile_offset_e4m3(r, c)],
                formats::f16::round,
            );
        }
        for i in 0..self.k.len() {
            let (head, token, c) = (i / HEAD_DIM / s.kv, i / HEAD_DIM % s.kv, i % HEAD_DIM);
            let tile = &mut o.k_tiles[(head * blocks + token / KEYS) * k_bytes..][..k_bytes];
            let r = token % KEYS;
            o.k[i] = put(
                self.k[i],
                tile,
                [tiles::k_tile_offset_f16(r, c), tiles::k_tile_offset_e4m3(r, c)],
                formats::f16::round_key,
            );
        }
        for head in 0..kv_heads {
            self.pack_values(head, variant, &mut o);
        }
        o
    }

    /// Block means, residuals and channel scales of one kv head.
    fn pack_values(&self, head: usize, variant: Variant, o: &mut Operands) {
        let (kv, len) = (self.shape.kv, self.lens[head / self.shape.kv_heads]);
        let blocks = kv.div_ceil(KEYS);
        let groups = blocks.div_ceil(MEAN_BLOCKS);
        for c in 0..HEAD_DIM {
            let value = |token: usize| self.v[(head * kv + token) * HEAD_DIM + c];
            let mut mean = vec![0.0f32; blocks];
            if variant.smooth {
                for (j, m) in mean.iter_mut().enumerate().take(len.div_ceil(KEYS)) {
                    let tokens = j * KEYS..((j + 1) * KEYS).min(len);
                    *m = tokens.clone().map(value).sum::<f32>() / tokens.len() as f32;
                }
            }
            let amax = (0..len).map(|t| (value(t) - mean[t / KEYS]).abs()).fold(0.0, f32::max);
            let mumax = mean.iter().fold(0.0f32, |a, m| a.max(m.abs()));
            let scale = (amax / 448.0).max(mumax / 60000.0);
            let scale = if scale == 0.0 { 1.0 } else { scale };
            o.scale[head * HEAD_DIM + c] = scale;
            for t in 0..len {
                let byte = e4m3::encode((value(t) - mean[t / KEYS]) / scale);
                let tile = (head * blocks + t / KEYS) * tiles::V_BYTES;
                o.v_tiles[tile + tiles::v_tile_offset(t % KEYS, c)] = byte;
                o.residual[(head * kv + t) * HEAD_DIM + c] = e4m3::decode(byte) as f64;
            }
            for (j, m) in mean.iter().enumerate() {
                let h = f16::from_f32(m / scale);
                let at = (head * groups + j / MEAN_BLOCKS) * tiles::MEAN_BYTES
                    + tiles::mean_offset(j % MEAN_BLOCKS, c);
                o.mean_tiles[at..at + 2].copy_from_slice(&h.to_le_bytes());
                o.means[(head * blocks + j) * HEAD_DIM + c] = h.to_f64();
            }
        }
    }
}
