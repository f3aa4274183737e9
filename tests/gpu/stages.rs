//! Operands bit for bit against the CPU's: Q, K and V tiles, tiles of block means, scales and means.

use kernels_gpu::formats::e4m3;
use kernels_gpu::kernels::tiles::{self, HEAD_DIM, KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES};
use vc_attention::backend::cpu::{Codes, Cpu};
use vc_attention::backend::cuda::{DeviceOperands, Grouping};
use vc_attention::recipe::QkFormat;
use vc_attention::{DType, Layout, NonFinite, Problem, Recipe};

use crate::call::{OnGpu, Twin, Wanted};
use crate::common::{Case, Rng, recipe};
use crate::device::{Gpu, both, gpu};
use crate::inputs::{Gaps, Inputs, plain};

/// V-Smooth and the plain kernel's operands, FP16 and E4M3 (rotated) Q and K.
const RECIPES: [&str; 4] =
    ["vc16-expcast", "vc8-fp8qk", "vc16-expcast+demean=off", "vc8-fp8qk+demean=off+rotate=off"];
const TYPES: [DType; 2] = [DType::Bf16, DType::F16];
const DIMS: [usize; 6] = [40, 64, 72, 80, 96, 128];

/// Compares elements and remembers what it saw.
pub struct Comparison<'a> {
    what: &'a str,
    compared: usize,
    differing: usize,
    first: Vec<String>,
}

impl<'a> Comparison<'a> {
    pub fn new(what: &'a str) -> Self {
        Self { what, compared: 0, differing: 0, first: Vec::new() }
    }

    /// One element; `place` and `decode` are asked where bits differ.
    pub fn bits(&mut self, got: u32, want: u32, decode: impl Fn(u32) -> f32, place: impl FnOnce() -> String) {
        self.compared += 1;
        if got != want {
            self.differing += 1;
            if self.first.len() < 6 {
                let place = place();
                let (g, w) = (decode(got), decode(want));
                self.first.push(format!("{place}: got {got:#x} ({g}), want {want:#x} ({w})"));
            }
        }
    }

    pub fn finish(self, case: &str) {
        let Self { what, compared, differing, first } = self;
        assert!(
            differing == 0,
            "{case}: {what}: {differing} of {compared} elements differ:\n  {}",
            first.join("\n  ")
        );
    }
}

/// Format of a Q or K tile.
#[derive(Clone, Copy)]
pub struct Format {
    width: usize,
    encode: fn(f32) -> u32,
    decode: fn(u32) -> f32,
}

const F16: Format = Format {
    width: 2,
    encode: |x| half::f16::from_f32(x).to_bits().into(),
    decode: |bits| half::f16::from_bits(bits as u16).to_f32(),
};
const E4M3: Format =
    Format { width: 1, encode: |x| e4m3::encode(x).into(), decode: |bits| e4m3::decode(bits as u8) };

const INT8: Format =
    Format { width: 1, encode: |x| (x as i8 as u8).into(), decode: |bits| f32::from(bits as u8 as i8) };

/// The element at a byte offset.
fn element(bytes: &[u8], at: usize, width: usize) -> u32 {
    if width == 1 { bytes[at].into() } else { u16::from_le_bytes([bytes[at], bytes[at + 1]]).into() }
}

/// Tokens that fill whole tiles, each at its place: `at(token, channel)` gives its byte.
struct Tiled<'a> {
    bytes: &'a [u8],
    tokens: usize,
    format: Format,
    /// Valid tokens and channels of the CPU's codes, row-major; beyond them are zeros of either sign.
    codes: &'a [f32],
    valid: usize,
    dim: usize,
}

impl Tiled<'_> {
    fn compare(&self, to: &mut Comparison, head: &str, at: impl Fn(usize, usize) -> usize, tile: usize) {
        let Format { width, encode, decode } = self.format;
        for token in 0..self.tokens {
            for channel in 0..HEAD_DIM {
                let mut got = element(self.bytes, at(token, channel), width);
                let inside = token < self.valid && channel < self.dim;
                let want = if inside { encode(self.codes[token * self.dim + channel]) } else { 0 };
                if !inside {
                    got &= !(1 << (8 * width - 1));
                }
                to.bits(got, want, decode, || {
                    let kind = if inside { "" } else { " (padding)" };
                    format!("{head} tile {} row {} channel {channel}{kind}", token / tile, token % tile)
                });
            }
        }
    }
}

/// Runs the stages on the GPU, the CPU's on the GPU's order, and compares everything.
pub fn check(gpu: &Gpu, case: &str, problem: &Problem, recipe: &Recipe) {
    let call = OnGpu::new(gpu, problem, recipe, Wanted::default());
    call.launch(Grouping::Cold);
    let operands = call.operands();
    let twin_problem = Problem { nonfinite: NonFinite::Propagate, ..*problem };
    let twin = Twin::new(&twin_problem, recipe, &call.orders(&operands));
    let case = format!("{case}: {} from {:?}, {:?}", recipe.name, problem.q.dtype(), twin.plan.shape);
    compare(&case, &twin, &operands, format(recipe));
}

/// Of the recipe's Q and K tiles, unless they are NVFP4.
pub fn format(recipe: &Recipe) -> Format {
    match recipe.qk {
        QkFormat::F16 => F16,
        QkFormat::Int8 => INT8,
        _ => E4M3,
    }
}

pub fn compare(case: &str, twin: &Twin, operands: &DeviceOperands, format: Format) {
    let s = twin.plan.shape;
    let blocks = s.kv_tokens.div_ceil(KEYS);
    let (q_rows, kv_rows) = (s.q_tokens.next_multiple_of(2 * ROWS), blocks * KEYS);
    let (qk_dim, v_dim) = (twin.plan.qk_dim, twin.plan.v_dim);
    let row_bytes = HEAD_DIM * format.width;
    let codes = |batch, q_head| Cpu.codes(&twin.plan, [batch, q_head], &twin.q, &twin.k, &twin.v);

    let mut q = Comparison::new("Q");
    for head in 0..s.batch * s.q_heads {
        let [batch, q_head] = [head / s.q_heads, head % s.q_heads];
        let tiled = Tiled {
            bytes: &operands.q[head * q_rows * row_bytes..][..q_rows * row_bytes],
            tokens: q_rows,
            format,
            codes: codes(batch, q_head).q,
            valid: s.q_tokens,
            dim: qk_dim,
        };
        let offset = if format.width == 2 { tiles::q_tile_offset_f16 } else { tiles::q_tile_offset_e4m3 };
        let at = |row: usize, channel| row / ROWS * ROWS * row_bytes + offset(row % ROWS, channel);
        tiled.compare(&mut q, &format!("batch {batch} head {q_head}"), at, ROWS);
    }
    q.finish(case);

    let (mut k, mut v, mut means) = (Comparison::new("K"), Comparison::new("V"), Comparison::new("means"));
    let (mut scale, mut k_mean) = (Comparison::new("v_scale"), Comparison::new("k_mean"));
    for index in 0..s.batch * s.kv_heads {
        let [batch, kv_head] = [index / s.kv_heads, index % s.kv_heads];
        let head = format!("batch {batch} kv head {kv_head}");
        let Codes { k: k_codes, v: v_codes, k_mean: mean, v_scale, means: block_means, .. } =
            codes(batch, kv_head * (s.q_heads / s.kv_heads));
        let valid = k_codes.len() / qk_dim;

        let tiled = Tiled {
            bytes: &operands.k[index * kv_rows * row_bytes..][..kv_rows * row_bytes],
            tokens: kv_rows,
            format,
            codes: k_codes,
            valid,
            dim: qk_dim,
        };
        let offset = if format.width == 2 { tiles::k_tile_offset_f16 } else { tiles::k_tile_offset_e4m3 };
        let at = |key: usize, channel| key / KEYS * KEYS * row_bytes + offset(key % KEYS, channel);
        tiled.compare(&mut k, &head, at, KEYS);

        let tiled = Tiled {
            bytes: &operands.v[index * blocks * V_BYTES..][..blocks * V_BYTES],
            tokens: kv_rows,
            format: E4M3,
            codes: v_codes,
            valid,
            dim: v_dim,
        };
        let at = |token: usize, channel| token / KEYS * V_BYTES + tiles::v_tile_offset(token % KEYS, channel);
        tiled.compare(&mut v, &head, at, KEYS);

        let value = |row: &[f32], channel: usize, padding: f32| row.get(channel).copied().unwrap_or(padding);
        for channel in 0..HEAD_DIM {
            let at = index * HEAD_DIM + channel;
            let place = || format!("{head} channel {channel}");
            scale.bits(
                operands.v_scale[at].to_bits(),
                value(v_scale, channel, 1.0).to_bits(),
                f32::from_bits,
                place,
            );
            if twin.plan.recipe.center_k {
                let want = value(mean, channel, 0.0);
                k_mean.bits(operands.k_mean[at].to_bits(), want.to_bits(), f32::from_bits, place);
            }
        }
        if !twin.plan.recipe.demean {
            continue;
        }
        let tiles_per_head = blocks.div_ceil(MEAN_BLOCKS);
        let bytes =
            &operands.mean_tiles[index * tiles_per_head * MEAN_BYTES..][..tiles_per_head * MEAN_BYTES];
        let tiled = Tiled {
            bytes,
            tokens: tiles_per_head * MEAN_BLOCKS,
            format: F16,
            codes: block_means,
            valid: block_means.len() / v_dim,
            dim: v_dim,
        };
        let at = |block: usize, channel| {
            block / MEAN_BLOCKS * MEAN_BYTES + tiles::mean_offset(block % MEAN_BLOCKS, channel)
        };
        tiled.compare(&mut means, &head, at, MEAN_BLOCKS);
    }
    [k, v, means, scale, k_mean].into_iter().for_each(|c| c.finish(case));
}

/// Every recipe and input type at one shape.
fn everywhere(gpu: &Gpu, name: &str, case: Case, order: &str) {
    for (i, text) in RECIPES.iter().enumerate() {
        for dtype in TYPES {
            let inputs = plain(case, 10 + i as u64, dtype);
            check(gpu, name, &inputs.problem(), &recipe(&format!("{text}+order={order}")));
        }
    }
}

#[test]
fn stages_in_sequence() {
    let Some(gpu) = gpu() else { return };
    for (i, dim) in DIMS.into_iter().enumerate() {
        let tokens = [[129, 1023], [1, 191], [64, 128], [200, 127], [65, 2100], [128, 384]][i];
        everywhere(&gpu, "sequence", Case::new([i % 3 + 1, 2, 2], tokens, dim), "sequence");
    }
}

/// INT8 queries and keys, by the quantizers of both modules that a Hopper GPU runs.
#[test]
fn stages_of_int8() {
    both(stages_of_int8_on);
}

fn stages_of_int8_on(gpu: &Gpu) {
    for (i, dim) in DIMS.into_iter().enumerate() {
        let tokens = [[129, 1023], [1, 191], [64, 128], [200, 127], [65, 2100], [128, 384]][i];
        for (j, dtype) in TYPES.into_iter().enumerate() {
            let inputs = plain(Case::new([i % 3 + 1, 4, 2], tokens, dim), 20 + j as u64, dtype);
            for text in ["vc8", "vc8-expcast+demean=off+order=sequence"] {
                check(gpu, "INT8", &inputs.problem(), &recipe(text));
            }
        }
    }
}

#[test]
fn stages_on_the_gpu_order() {
    let Some(gpu) = gpu() else { return };
    for (i, dim) in DIMS.into_iter().enumerate() {
        let tokens = [[100, 2047], [257, 1000], [33, 129], [7, 1025], [130, 700], [300, 4224]][i];
        everywhere(&gpu, "k-means", Case::new([i % 2 + 1, 3, 3], tokens, dim), "kmeans");
    }
}

#[test]
fn stages_of_few_tokens() {
    let Some(gpu) = gpu() else { return };
    for tokens in [1, 2, 15, 16, 17, 63, 127] {
        everywhere(&gpu, "few tokens", Case::new([1, 1, 1], [tokens, tokens], 128), "kmeans");
    }
}

#[test]
fn stages_of_grouped_queries() {
    let Some(gpu) = gpu() else { return };
    for heads in [[1, 4, 1], [2, 8, 1], [2, 8, 2], [3, 6, 3]] {
        everywhere(&gpu, "GQA", Case::new(heads, [190, 515], 64), "kmeans");
    }
}

#[test]
fn stages_of_strided_views() {
    let Some(gpu) = gpu() else { return };
    for (i, text) in RECIPES.iter().enumerate() {
        for (dtype, layout) in TYPES.into_iter().zip([Layout::Bshd, Layout::Bhsd]) {
            for gaps in [Gaps::None, Gaps::Some] {
                let case = Case::new([2, 4, 2], [150, 400], DIMS[i + 1]);
                let inputs = Inputs::new(&case.outliers(3), dtype, layout, gaps);
                let name = format!("{layout:?}, gaps {gaps:?}");
                check(&gpu, &name, &inputs.problem(), &recipe(text));
            }
        }
    }
}

#[test]
fn stages_of_padded_batches() {
    let Some(gpu) = gpu() else { return };
    for (i, lens) in [[0, 300, 700], [1, 128, 699], [129, 127, 0], [640, 513, 2]].iter().enumerate() {
        for text in RECIPES {
            for order in ["sequence", "kmeans+k=7"] {
                let data = Case::new([3, 2, 1], [70, 700], DIMS[i + 2]).outliers(4);
                let mut data = data;
                // What is not valid must not be read into anything.
                let head = 700 * data.case.dim;
                for (batch, &len) in lens.iter().enumerate() {
                    let end = (batch + 1) * head;
                    data.k[batch * head + len * data.case.dim..end].fill(f32::NAN);
                    data.v[batch * head + len * data.case.dim..end].fill(f32::INFINITY);
                }
                let inputs = Inputs::new(&data, TYPES[i % 2], Layout::Bhsd, Gaps::None);
                let problem = Problem { kv_lens: Some(lens), ..inputs.problem() };
                check(
                    &gpu,
                    &format!("kv_lens {lens:?}"),
                    &problem,
                    &recipe(&format!("{text}+order={order}")),
                );
            }
        }
    }
}

#[test]
fn stages_of_any_scale() {
    let Some(gpu) = gpu() else { return };
    let inputs = plain(Case::new([1, 2, 2], [140, 300], 96), 5, DType::Bf16);
    for scale in [-0.1, 0.0, 1e-6, 1.0, -3.0] {
        for text in RECIPES {
            let problem = Problem { scale: Some(scale), ..inputs.problem() };
            check(&gpu, &format!("scale {scale}"), &problem, &recipe(text));
        }
    }
}

/// Zeros, equal tokens, magnitudes at both ends of f16, subnormals: quotients and scales at their corners.
#[test]
fn stages_of_odd_values() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new([1, 2, 2], [130, 260], 64);
    let mut rng = Rng(6);
    let random = case.outliers(7);
    let equal = rng.normals(64);
    type Change<'a> = &'a dyn Fn(usize, f32) -> f32;
    let make: [(&str, Change); 6] = [
        ("zeros", &|_, _| 0.0),
        ("equal tokens", &|i, _| equal[i % 64]),
        ("tiny", &|_, x| x * 1e-7),
        ("one loud channel", &|i, x| if i % 64 == 3 { 3.0 * x } else { 1e-4 * x }),
        ("negative zeros", &|i, x| if i % 2 == 0 { -0.0 } else { x }),
        ("one token of many", &|i, x| if i / 64 % 130 == 17 { x } else { 0.0 }),
    ];
    for (name, f) in make {
        let mut data = random.clone();
        for x in [&mut data.q, &mut data.k, &mut data.v] {
            x.iter_mut().enumerate().for_each(|(i, x)| *x = f(i, *x));
        }
        // Magnitudes of V are free, those of Q and K must stay inside E4M3.
        data.v.iter_mut().skip(3).step_by(64).for_each(|x| *x *= 100.0);
        for dtype in TYPES {
            let inputs = Inputs::new(&data, dtype, Layout::Bhsd, Gaps::None);
            for text in RECIPES {
                check(&gpu, name, &inputs.problem(), &recipe(text));
            }
        }
    }
}

/// The comparison itself, without a GPU: the CPU's codes in the device's layout pass, and one wrong bit does not.
mod comparison {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use vc_attention::backend::Backend;
    use vc_attention::backend::cpu::Orders;

    use super::*;

    /// Puts rows of codes where the device has them.
    fn place(to: &mut [u8], codes: &[f32], dim: usize, format: Format, at: impl Fn(usize, usize) -> usize) {
        for (token, row) in codes.chunks_exact(dim).enumerate() {
            for (channel, &x) in row.iter().enumerate() {
                let (at, bits) = (at(token, channel), (format.encode)(x).to_le_bytes());
                to[at..at + format.width].copy_from_slice(&bits[..format.width]);
            }
        }
    }

    /// What a GPU would have written, one kv head at a time.
    fn packed(twin: &Twin, format: Format) -> DeviceOperands {
        let s = twin.plan.shape;
        let blocks = s.kv_tokens.div_ceil(KEYS);
        let mut out = DeviceOperands {
            order: Vec::new(),
            labels: Vec::new(),
            centroids: Vec::new(),
            q: Vec::new(),
            k: Vec::new(),
            k_mean: Vec::new(),
            v: Vec::new(),
            mean_tiles: Vec::new(),
            v_scale: Vec::new(),
            tensor_scales: Default::default(),
        };
        let wide = format.width == 2;
        for head in 0..s.batch * s.q_heads {
            let codes =
                Cpu.codes(&twin.plan, [head / s.q_heads, head % s.q_heads], &twin.q, &twin.k, &twin.v);
            let tile = ROWS * HEAD_DIM * format.width;
            let mut q = vec![0; s.q_tokens.div_ceil(2 * ROWS) * 2 * tile];
            let offset = if wide { tiles::q_tile_offset_f16 } else { tiles::q_tile_offset_e4m3 };
            place(&mut q, codes.q, twin.plan.qk_dim, format, |t, c| t / ROWS * tile + offset(t % ROWS, c));
            out.q.extend(q);
            if !(head % s.q_heads).is_multiple_of(s.q_heads / s.kv_heads) {
                continue;
            }
            let tile = KEYS * HEAD_DIM * format.width;
            let mut k = vec![0; blocks * tile];
            let offset = if wide { tiles::k_tile_offset_f16 } else { tiles::k_tile_offset_e4m3 };
            place(&mut k, codes.k, twin.plan.qk_dim, format, |t, c| t / KEYS * tile + offset(t % KEYS, c));
            out.k.extend(k);
            let mut v = vec![0; blocks * V_BYTES];
            let valid = codes.k.len() / twin.plan.qk_dim * twin.plan.v_dim;
            place(&mut v, &codes.v[..valid], twin.plan.v_dim, E4M3, |t, c| {
                t / KEYS * V_BYTES + tiles::v_tile_offset(t % KEYS, c)
            });
            out.v.extend(v);
            let mut means = vec![0; blocks.div_ceil(MEAN_BLOCKS) * MEAN_BYTES];
            place(&mut means, codes.means, twin.plan.v_dim, F16, |b, c| {
                b / MEAN_BLOCKS * MEAN_BYTES + tiles::mean_offset(b % MEAN_BLOCKS, c)
            });
            out.mean_tiles.extend(means);
            let padded = |x: &[f32], padding: f32| {
                x.iter().copied().chain(std::iter::repeat(padding)).take(HEAD_DIM).collect::<Vec<_>>()
            };
            out.k_mean.extend(padded(codes.k_mean, 0.0));
            out.v_scale.extend(padded(codes.v_scale, 1.0));
        }
        out
    }

    fn passes(twin: &Twin, operands: &DeviceOperands, format: Format) -> Result<(), String> {
        catch_unwind(AssertUnwindSafe(|| compare("case", twin, operands, format)))
            .map_err(|e| e.downcast_ref::<String>().cloned().unwrap_or_default())
    }

    #[test]
    fn comparison_notices_one_bit() {
        for (text, format) in RECIPES.iter().zip([F16, E4M3, F16, E4M3]) {
            let recipe = recipe(&format!("{text}+order=sequence"));
            let lens = [300, 129];
            let inputs = plain(Case::new([2, 4, 2], [70, 300], 72), 1, DType::Bf16);
            let problem = Problem { kv_lens: Some(&lens), ..inputs.problem() };
            let plan = vc_attention::Plan::new(&problem, &recipe, crate::common::F32_LSE).expect("valid");
            let orders: Orders = Cpu.group(&plan, &problem, None).expect("sequence");
            let twin = Twin::new(&problem, &recipe, &orders);
            let right = packed(&twin, format);
            passes(&twin, &right, format).expect("the CPU's own codes are right");

            type Spoil = fn(&mut DeviceOperands);
            let wrong: [(&str, Spoil); 6] = [
                ("Q", |x| x.q[100] ^= 1),
                ("K", |x| x.k[20_000] ^= 1),
                ("V", |x| *x.v.last_mut().expect("V") ^= 1),
                ("means", |x| x.mean_tiles[3 * MEAN_BYTES + 256] ^= 1),
                ("v_scale", |x| x.v_scale[200] *= 1.0 + f32::EPSILON),
                ("k_mean", |x| x.k_mean[130] += 1.0),
            ];
            for (what, spoil) in wrong {
                let mut operands = right.clone();
                spoil(&mut operands);
                let unread = what == "means" && !recipe.demean || what == "k_mean" && !recipe.center_k;
                match passes(&twin, &operands, format) {
                    Ok(()) => assert!(unread, "{text}: one wrong bit in {what} went unnoticed"),
                    Err(message) => {
                        assert!(message.contains(&format!("{what}: 1 of")), "{text}, {what}: {message}")
                    }
                }
            }
        }
    }
}
