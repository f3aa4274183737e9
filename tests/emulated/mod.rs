//! One attention call three ways: the kernel under emulation, the CPU backend, and f64 on the same operands; and the
//! properties that every attention kernel has ([`checks`]).

#[allow(dead_code, reason = "each test program has its kernel")]
pub mod checks;
pub mod fp4;

use half::{bf16, f16};
use kernels_gpu::emulation::{Fault, Launch, Memory, Schedule};
use kernels_gpu::formats::e4m3;
use kernels_gpu::kernels::tiles::{self, HEAD_DIM, KEYS, MEAN_BLOCKS, ROWS};
use kernels_gpu::kernels::{Entry, FP4_DECODED, FP4_NATIVE, MMA, SM90, SM100};
use kernels_gpu::kernels::{attention_fp4, attention_mma, attention_sm90, attention_sm100, call};
use kernels_gpu::layout::scale_groups;
use kernels_gpu::numerics::{mean, units};
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::num::NonZeroU32;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::{Codes, Cpu, Dequantized};
use vc_attention::fidelity::reference::{Operands, attention_head};
use vc_attention::grouping::GroupingConfig;
use vc_attention::recipe::{Probabilities, QkFormat, Recipe, RowSums, ScoreType, vc};
use vc_attention::{Layout, NonFinite, Options, OutputType, Plan, Problem, TensorView, run};

/// Which attention kernel.
#[allow(dead_code, reason = "each test program has its kernel")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Family {
    /// Hopper's.
    Sm90,
    /// The warp-level one, which has no promotion interval.
    Mma,
    /// That of B200 and B300, which has none either.
    Sm100,
    /// NVFP4 by block-scaled products.
    Fp4Native,
    /// NVFP4 decoded to f16.
    Fp4Decoded,
}

impl Family {
    /// Formats of queries and keys that it takes.
    fn formats(self) -> &'static [Qk] {
        match self {
            Family::Sm90 | Family::Mma | Family::Sm100 => &[Qk::F16, Qk::E4m3, Qk::Int8],
            Family::Fp4Native | Family::Fp4Decoded => &[Qk::Nvfp4],
        }
    }

    /// Ways from scores to probabilities that it has.
    fn weights(self) -> &'static [Weights] {
        match self {
            Family::Sm90 | Family::Mma => &[Weights::ExpCast, Weights::Quadratic, Weights::Exact],
            Family::Sm100 => &[Weights::ExpCast, Weights::Exact],
            Family::Fp4Native | Family::Fp4Decoded => &[Weights::Exact],
        }
    }
}

/// From scores to probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// The packed encoder.
    ExpCast,
    /// The quadratic encoder.
    Quadratic,
    /// Exponentials.
    Exact,
}

/// Format of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Qk {
    F16,
    E4m3,
    Int8,
    /// Of everything: `vc4`.
    Nvfp4,
}

/// A call: which entry, which sizes, which options.
#[derive(Clone, Debug)]
pub struct Case {
    pub family: Family,
    pub qk: Qk,
    pub weights: Weights,
    /// With block means.
    pub smooth: bool,
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_tokens: usize,
    pub kv_tokens: usize,
    pub head_dim: usize,
    pub kv_lens: Option<Vec<usize>>,
    pub out: Out,
    pub promote: u32,
    pub schedule: Schedule,
    /// (batch, kv head)s that are marked as not finite.
    pub poisoned: Vec<usize>,
    /// A row of the first head whose tile holds a NaN.
    pub nan_row: Option<usize>,
    /// Multiplies the queries: how far scores spread.
    pub sharpness: f32,
}

/// Output type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Out {
    F32,
    F16,
    Bf16,
}

impl Case {
    /// One head of the family's first format, ExpCast where it has it, with means.
    pub fn new(family: Family, q_tokens: usize, kv_tokens: usize) -> Self {
        let qk = family.formats()[0];
        Self {
            family,
            qk,
            weights: family.weights()[0],
            smooth: true,
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            q_tokens,
            kv_tokens,
            head_dim: HEAD_DIM,
            kv_lens: None,
            out: Out::F32,
            promote: 4,
            schedule: Schedule::Oldest,
            poisoned: Vec::new(),
            nan_row: None,
            sharpness: 2.0,
        }
    }

    /// The same call through each of the kernel's entries.
    pub fn entries(&self) -> Vec<Self> {
        self.entries_with(self.family.weights())
    }

    /// The same call through each entry but those of the quadratic encoder, which differ from the packed one's in the
    /// codes alone.
    pub fn main_entries(&self) -> Vec<Self> {
        let weights = self.family.weights().iter().copied().filter(|w| *w != Weights::Quadratic);
        self.entries_with(&weights.collect::<Vec<_>>())
    }

    fn entries_with(&self, weights: &[Weights]) -> Vec<Self> {
        let formats = self.family.formats();
        let each = formats.iter().flat_map(|&qk| weights.iter().map(move |&w| (qk, w)));
        let each = each.flat_map(|(qk, weights)| [false, true].map(|smooth| (qk, weights, smooth)));
        each.map(|(qk, weights, smooth)| Self { qk, weights, smooth, ..self.clone() }).collect()
    }

    pub fn name(&self) -> String {
        if self.qk == Qk::Nvfp4 {
            let product = if self.family == Family::Fp4Native { "native" } else { "decoded" };
            return format!("attention_fp4_{product}_{}", if self.smooth { "smooth" } else { "plain" });
        }
        format!(
            "attention_{}_{}_{}_{}",
            match self.family {
                Family::Sm90 => "sm90",
                Family::Mma => "mma",
                Family::Sm100 => "sm100",
                Family::Fp4Native | Family::Fp4Decoded => unreachable!("those of NVFP4"),
            },
            match self.qk {
                Qk::F16 => "f16",
                Qk::E4m3 => "e4m3",
                Qk::Int8 => "i8",
                Qk::Nvfp4 => unreachable!("named above"),
            },
            match self.weights {
                Weights::ExpCast => "expcast",
                Weights::Quadratic => "quadratic",
                Weights::Exact => "exp2",
            },
            if self.smooth { "smooth" } else { "plain" }
        )
    }

    /// What the CPU backend runs: the recipe of the same numerics, tokens in their own order.
    fn recipe(&self) -> Recipe {
        if self.qk == Qk::Nvfp4 {
            return Recipe { demean: self.smooth, grouping: GroupingConfig::sequence(), ..vc::vc4() };
        }
        let (p, row_sums) = match self.weights {
            Weights::ExpCast => (vc::EXPCAST, RowSums::Decoded),
            Weights::Quadratic => (vc::QUADRATIC, RowSums::Decoded),
            Weights::Exact => (Probabilities::E4m3 { peak: 256.0 }, RowSums::Exact),
        };
        let (qk, scores) = match self.qk {
            Qk::F16 => (QkFormat::F16, ScoreType::F16),
            Qk::E4m3 => (QkFormat::E4m3PerHead, ScoreType::F16),
            Qk::Int8 => (QkFormat::Int8, ScoreType::F32),
            Qk::Nvfp4 => unreachable!("returned above"),
        };
        Recipe {
            qk,
            scores,
            p,
            rotate_qk: qk != QkFormat::F16,
            demean: self.smooth,
            row_sums,
            grouping: GroupingConfig::sequence(),
            ..vc::vc16()
        }
    }
}

/// What came out, heads in order, [batch, q_heads, q_tokens(, head_dim)].
pub struct Outcome {
    pub o: Vec<f32>,
    pub lse: Vec<f32>,
    /// Largest |row max| of every query head, in code units.
    pub row_max: Vec<f32>,
    /// The CPU backend's.
    pub cpu_o: Vec<f32>,
    pub cpu_lse: Vec<f32>,
    pub cpu_row_max: f32,
    /// f64 on the dequantized operands (LSE with what centring K took).
    pub exact_o: Vec<f64>,
    pub exact_lse: Vec<f64>,
}

fn normal(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| StandardNormal.sample(rng)).collect()
}

/// q, k and v whose keys and values have token means worth removing and whose row maxima move from tile to tile.
fn inputs(case: &Case) -> [Vec<f32>; 3] {
    let mut rng = ChaCha8Rng::seed_from_u64(case.kv_tokens as u64 * 1000 + case.q_tokens as u64);
    let dim = case.head_dim;
    let rows = |heads: usize, tokens: usize| case.batch * heads * tokens * dim;
    let mut q = normal(&mut rng, rows(case.q_heads, case.q_tokens));
    q.iter_mut().for_each(|x| *x *= case.sharpness);
    let mut k = normal(&mut rng, rows(case.kv_heads, case.kv_tokens));
    let mut v = normal(&mut rng, rows(case.kv_heads, case.kv_tokens));
    let offset = normal(&mut rng, dim);
    for (token, (k, v)) in k.chunks_exact_mut(dim).zip(v.chunks_exact_mut(dim)).enumerate() {
        let growth = 0.5 + (token % case.kv_tokens) as f32 / case.kv_tokens as f32;
        for (c, offset) in offset.iter().enumerate() {
            k[c] = k[c] * growth + offset;
            v[c] += offset * (1.0 + (token / 128 % 3) as f32);
        }
    }
    if case.qk == Qk::Nvfp4 {
        // The emulated quantizers make the operands, and take 16 bits.
        return [q, k, v].map(|x| x.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect());
    }
    [q, k, v]
}

/// Operand tiles as the kernel takes them, and the scales beside.
struct Tiles {
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    means: Vec<u8>,
    /// NVFP4 only.
    v_tensor: Vec<f32>,
    /// INT8 and NVFP4 only.
    q_factor: Vec<f32>,
    /// INT8 and NVFP4 only.
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
}

/// Writes `code` in the format of Q and K at byte `at`.
fn put(qk: Qk, tile: &mut [u8], at: usize, code: f32) {
    let stored = match qk {
        Qk::E4m3 => {
            tile[at] = e4m3::encode(code);
            e4m3::decode(tile[at])
        }
        Qk::Int8 => {
            tile[at] = code as i8 as u8;
            f32::from(tile[at] as i8)
        }
        Qk::Nvfp4 => unreachable!("the emulated quantizers write it"),
        Qk::F16 => {
            let x = f16::from_f32(code);
            tile[at..at + 2].copy_from_slice(&x.to_le_bytes());
            x.to_f32()
        }
    };
    assert_eq!(stored, code, "a code of the format");
}

/// What multiplies the codes of a row to give its `values`, `unit` apart: 0 for a row of zeros.
fn factor(codes: &[f32], values: &[f64], unit: f64) -> f32 {
    let at = codes.iter().position(|c| *c != 0.0);
    // The product was made in f64: the quotient is off by an ulp of that.
    at.map_or(0.0, |at| (values[at] / unit / f64::from(codes[at])) as f32)
}

/// E4M3 codes, scales and 16-bit means of the values of one head, as the CPU backend makes them.
fn quantize_v(smooth: bool, v: &[f32], dim: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let mut amax = vec![0.0f32; dim];
    let mut amax_mean = vec![0.0f32; dim];
    let blocks: Vec<&[f32]> = v.chunks(KEYS * dim).collect();
    let mut means = vec![0.0f32; blocks.len() * dim];
    for (block, m) in blocks.iter().zip(means.chunks_exact_mut(dim)) {
        if smooth {
            mean::block_mean(block, dim, block.len() / dim, m);
        }
        for (i, x) in block.iter().enumerate() {
            let c = i % dim;
            amax[c] = amax[c].max((x - m[c]).abs());
            amax_mean[c] = amax_mean[c].max(m[c].abs());
        }
    }
    let scale: Vec<f32> = (0..dim)
        .map(|c| (amax[c] / e4m3::MAX).max(amax_mean[c] / 60000.0))
        .map(|s| if s > 0.0 { s } else { 1.0 })
        .collect();
    means.iter_mut().enumerate().for_each(|(i, m)| *m = f16::from_f32(*m / scale[i % dim]).to_f32());
    let residual = |(i, x): (usize, &f32)| {
        let c = i % dim;
        e4m3::round((x - means[i / dim / KEYS * dim + c] * scale[c]) / scale[c])
    };
    (v.iter().enumerate().map(residual).collect(), scale, means)
}

impl Tiles {
    /// Packs the operands of every head. Tiles behind the valid keys hold NaN: nobody may read them.
    fn pack(case: &Case, heads: &[Dequantized], codes: &[Codes], v: &[f32]) -> Self {
        let width = if case.qk == Qk::F16 { 2 } else { 1 };
        let (q_tile, k_tile) = (ROWS * HEAD_DIM * width, KEYS * HEAD_DIM * width);
        type Offset = fn(usize, usize) -> usize;
        let (q_offset, k_offset): (Offset, Offset) = match case.qk {
            Qk::F16 => (tiles::q_tile_offset_f16, tiles::k_tile_offset_f16),
            Qk::E4m3 | Qk::Int8 | Qk::Nvfp4 => (tiles::q_tile_offset_e4m3, tiles::k_tile_offset_e4m3),
        };
        let (q_tiles, kv_tiles) = (case.q_tokens.div_ceil(2 * ROWS) * 2, case.kv_tokens.div_ceil(KEYS));
        let kv_heads = case.batch * case.kv_heads;
        let mean_tiles = kv_tiles.div_ceil(MEAN_BLOCKS);
        let mut t = Self {
            // Padding rows of Q may hold anything.
            q: vec![0x7f; case.batch * case.q_heads * q_tiles * q_tile],
            k: vec![0x7f; kv_heads * kv_tiles * k_tile],
            v: vec![0x7f; kv_heads * kv_tiles * tiles::V_BYTES],
            means: vec![0x7f; kv_heads * mean_tiles * tiles::MEAN_BYTES],
            v_tensor: Vec::new(),
            q_factor: vec![f32::NAN; case.batch * case.q_heads * q_tiles * ROWS],
            k_scale: vec![f32::NAN; kv_heads * kv_tiles * scale_groups::K_GROUPS],
            v_scale: Vec::new(),
        };
        let nats = f64::from(units::NATS);
        let tiles_and_factors =
            t.q.chunks_exact_mut(q_tiles * q_tile).zip(t.q_factor.chunks_exact_mut(q_tiles * ROWS));
        for ((tiles, factors), (head, codes)) in tiles_and_factors.zip(heads.iter().zip(codes)) {
            for i in 0..case.q_tokens * HEAD_DIM {
                let (row, c) = (i / HEAD_DIM, i % HEAD_DIM);
                let code = if c < head.qk_dim { codes.q[row * head.qk_dim + c] } else { 0.0 };
                put(case.qk, &mut tiles[row / ROWS * q_tile..][..q_tile], q_offset(row % ROWS, c), code);
            }
            let rows = codes.q.chunks_exact(head.qk_dim).zip(head.q.chunks_exact(head.qk_dim));
            factors.iter_mut().zip(rows).for_each(|(f, (codes, values))| *f = factor(codes, values, nats));
        }
        if let Some(row) = case.nan_row {
            // 0x7f7f and 0x7f are NaN in two of the formats; what INT8 has no code for is in the factor.
            let at = row / ROWS * q_tile + q_offset(row % ROWS, 77);
            t.q[at..at + width].fill(0x7f);
            t.q_factor[row] = f32::NAN;
        }
        let group = case.q_heads / case.kv_heads;
        for index in 0..kv_heads {
            let (head, codes) = (&heads[index * group], &codes[index * group]);
            let (keys, dim) = (head.k.len() / head.qk_dim, case.head_dim);
            let used = keys.div_ceil(KEYS);
            let k = &mut t.k[index * kv_tiles * k_tile..][..used * k_tile];
            k.fill(0);
            for (i, code) in codes.k.iter().enumerate() {
                let (key, c) = (i / head.qk_dim, i % head.qk_dim);
                put(case.qk, &mut k[key / KEYS * k_tile..][..k_tile], k_offset(key % KEYS, c), *code);
            }
            let scales = &mut t.k_scale[index * kv_tiles * scale_groups::K_GROUPS..];
            scales[..used * scale_groups::K_GROUPS].fill(0.0);
            let rows = codes.k.chunks_exact(head.qk_dim).zip(head.k.chunks_exact(head.qk_dim));
            for (key, (codes, values)) in rows.enumerate() {
                let scale = &mut scales[scale_groups::k_group(key)];
                *scale = scale.max(factor(codes, values, 1.0));
            }
            let v = &v[index * case.kv_tokens * dim..][..keys * dim];
            let (codes, scale, means) = quantize_v(case.smooth, v, dim);
            let tiles = &mut t.v[index * kv_tiles * tiles::V_BYTES..][..used * tiles::V_BYTES];
            tiles.fill(0);
            for (i, code) in codes.iter().enumerate() {
                let (token, c) = (i / dim, i % dim);
                let mean = means[token / KEYS * dim + c];
                assert_eq!(
                    f64::from((code + mean) * scale[c]),
                    head.v[i],
                    "values as the CPU backend has them"
                );
                let tile = &mut tiles[token / KEYS * tiles::V_BYTES..][..tiles::V_BYTES];
                tile[tiles::v_tile_offset(token % KEYS, c)] = e4m3::encode(*code);
            }
            let into =
                &mut t.means[index * mean_tiles * tiles::MEAN_BYTES..][..mean_tiles * tiles::MEAN_BYTES];
            into[..used.div_ceil(MEAN_BLOCKS) * tiles::MEAN_BYTES].fill(0);
            for (i, mean) in means.iter().enumerate() {
                let (block, c) = (i / dim, i % dim);
                let at = block / MEAN_BLOCKS * tiles::MEAN_BYTES + tiles::mean_offset(block % MEAN_BLOCKS, c);
                into[at..at + 2].copy_from_slice(&f16::from_f32(*mean).to_le_bytes());
            }
            t.v_scale.extend(scale);
            t.v_scale.resize((index + 1) * HEAD_DIM, 1.0);
        }
        t
    }

    /// NVFP4 operands of every head by the emulated quantizers, checked against `codes`. Tiles behind the valid keys hold
    /// NaN here too.
    fn quantize(case: &Case, scale: f32, inputs: [&[f32]; 3], codes: &[Codes]) -> Self {
        let bits = inputs.map(|x| x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect::<Vec<_>>());
        let input = |i: usize, heads: usize, tokens: usize| {
            let row = case.head_dim;
            let strides = [heads * tokens * row, tokens * row, row].map(|n| n as i64);
            fp4::Input { bits: &bits[i], strides }
        };
        let kv_lens: Option<Vec<u32>> = case.kv_lens.as_ref().map(|l| l.iter().map(|&l| l as u32).collect());
        let call = fp4::Call {
            bf16: true,
            q: input(0, case.q_heads, case.q_tokens),
            k: input(1, case.kv_heads, case.kv_tokens),
            v: input(2, case.kv_heads, case.kv_tokens),
            batch: case.batch,
            q_heads: case.q_heads,
            kv_heads: case.kv_heads,
            q_tokens: case.q_tokens,
            kv_tokens: case.kv_tokens,
            head_dim: case.head_dim,
            order: None,
            kv_lens: kv_lens.as_deref(),
            demean: case.smooth,
            rope: None,
            scale,
            schedule: case.schedule,
            broken: None,
        };
        let made = call.quantize();
        let context = format!("{case:?}");
        made.assert_codes(&call, &context, |b, h| codes[b * case.q_heads + h]);
        let (mut q, mut k, mut v) = (made.q, made.k, made.v);
        if let Some(row) = case.nan_row {
            let scales = row / ROWS * tiles::Q_FP4_BYTES + ROWS * tiles::FP4_ROW;
            q[scales + row % ROWS * tiles::FP4_SCALES..][..tiles::FP4_SCALES].fill(e4m3::NAN);
        }
        let blocks = case.kv_tokens.div_ceil(KEYS);
        for index in 0..case.batch * case.kv_heads {
            let keys = case.kv_lens.as_ref().map_or(case.kv_tokens, |l| l[index / case.kv_heads]);
            let (used, end) = (index * blocks + keys.div_ceil(KEYS), (index + 1) * blocks);
            k[used * tiles::K_FP4_BYTES..end * tiles::K_FP4_BYTES].fill(0x7f);
            v[used * tiles::V_FP4_BYTES..end * tiles::V_FP4_BYTES].fill(0x7f);
        }
        Self {
            q,
            k,
            v,
            means: Vec::new(),
            v_tensor: made.v_tensor,
            q_factor: made.q_factor,
            k_scale: made.k_scale,
            v_scale: made.v_scale,
        }
    }
}

/// Runs a case every way.
pub fn attend(case: &Case) -> Result<Outcome, Fault> {
    let [q, k, v] = inputs(case);
    let dim = case.head_dim;
    let view = |name, x, heads, tokens| {
        TensorView::new(name, x, [case.batch, heads, tokens, dim], Layout::Bhsd).expect("a whole tensor")
    };
    let mut problem = Problem::new(
        view("q", q.as_slice(), case.q_heads, case.q_tokens),
        view("k", k.as_slice(), case.kv_heads, case.kv_tokens),
        view("v", v.as_slice(), case.kv_heads, case.kv_tokens),
    );
    problem.kv_lens = case.kv_lens.as_deref();
    problem.nonfinite = NonFinite::Propagate;
    let options = Options { output: OutputType::F32, lse: true };
    let plan = Plan::new(&problem, &case.recipe(), options).expect("a valid call");
    let cpu = run(&Cpu, &plan, &problem, None).expect("a valid call");

    let order = cpu.order;
    let qs = Cpu.prepare_q(&plan, &problem, &order).expect("a valid call");
    let ks = Cpu.prepare_k(&plan, &problem, &order, &qs).expect("a valid call");
    let vs = Cpu.prepare_v(&plan, &problem, &order).expect("a valid call");
    let heads: Vec<Dequantized> = (0..case.batch * case.q_heads)
        .map(|i| Cpu.dequantized(&plan, [i / case.q_heads, i % case.q_heads], &qs, &ks, &vs))
        .collect();

    // What centring K took from the LSE: scale q . mean(k).
    let mut lse_shift = Vec::new();
    for index in 0..case.batch * case.q_heads {
        let (batch, head) = (index / case.q_heads, index % case.q_heads);
        let keys = problem.kv_len(batch);
        let at = batch * case.kv_heads + head / (case.q_heads / case.kv_heads);
        let mut m = vec![0.0; dim];
        mean::token_mean(&k[at * case.kv_tokens * dim..], dim, keys, &mut m);
        for q in q[index * case.q_tokens * dim..][..case.q_tokens * dim].chunks_exact(dim) {
            let dot: f64 = q.iter().zip(&m).map(|(&q, &m)| f64::from(q) * f64::from(m)).sum();
            lse_shift.push((f64::from(plan.scale) * dot) as f32);
        }
    }

    let rows = case.batch * case.q_heads * case.q_tokens;
    let mut exact_o = vec![0.0; rows * dim];
    let mut exact_lse = vec![0.0; rows];
    let outputs =
        exact_o.chunks_exact_mut(case.q_tokens * dim).zip(exact_lse.chunks_exact_mut(case.q_tokens));
    for (head, (o, lse)) in heads.iter().zip(outputs) {
        let x = Operands { q: &head.q, k: &head.k, v: &head.v, qk_dim: head.qk_dim, v_dim: dim };
        attention_head(x, 1.0, o, lse);
    }
    exact_lse.iter_mut().zip(&lse_shift).for_each(|(l, s)| *l += f64::from(*s));

    let codes: Vec<Codes> = (0..case.batch * case.q_heads)
        .map(|i| Cpu.codes(&plan, [i / case.q_heads, i % case.q_heads], &qs, &ks, &vs))
        .collect();
    let tiles = match case.qk {
        Qk::Nvfp4 => Tiles::quantize(case, plan.scale, [&q, &k, &v], &codes),
        _ => Tiles::pack(case, &heads, &codes, &v),
    };
    let (o, lse, row_max) = emulate(case, &tiles, &lse_shift)?;
    let mut cpu_o = Vec::new();
    for index in 0..case.batch * case.q_heads {
        cpu_o.extend(cpu.output.o.view().read_head(
            index / case.q_heads,
            index % case.q_heads,
            case.q_tokens,
        ));
    }
    let cpu_lse = cpu.output.lse.expect("asked for");
    let cpu_row_max = cpu.output.observed.max_score;
    Ok(Outcome { o, lse, row_max, cpu_o, cpu_lse, cpu_row_max, exact_o, exact_lse })
}

/// Output, LSE and row maxima.
type Emulated = (Vec<f32>, Vec<f32>, Vec<f32>);

/// Launches the case's entry; the output lies token by token (bshd) with a gap behind every head.
fn emulate(case: &Case, tiles: &Tiles, lse_shift: &[f32]) -> Result<Emulated, Fault> {
    let pitch = case.head_dim + 8;
    let (rows, heads) = (case.batch * case.q_heads * case.q_tokens, case.batch * case.q_heads);
    let mut gpu = Memory::new();
    let [q, k, v] = [("q", &tiles.q), ("k", &tiles.k), ("v", &tiles.v)].map(|(n, x)| gpu.input(n, x));
    let means: *const u8 = match case.qk {
        Qk::Nvfp4 => gpu.input("v_tensor", &tiles.v_tensor).cast(),
        _ if case.smooth => gpu.input("means", &tiles.means),
        _ => std::ptr::null(),
    };
    let v_scale = gpu.input("v_scale", &tiles.v_scale);
    let lens: Option<Vec<u32>> = case.kv_lens.as_ref().map(|l| l.iter().map(|&l| l as u32).collect());
    let kv_lens = lens.map_or(std::ptr::null(), |l| gpu.input("kv_lens", &l));
    let mut poison = vec![0u32; case.batch * case.kv_heads];
    case.poisoned.iter().for_each(|&i| poison[i] = 1);
    let poisoned = if case.poisoned.is_empty() { std::ptr::null() } else { gpu.input("poisoned", &poison) };
    let (out32, out16) = match case.out {
        Out::F32 => (gpu.output::<f32>("out", rows * pitch), std::ptr::null_mut()),
        Out::F16 | Out::Bf16 => (std::ptr::null_mut(), gpu.output::<u16>("out", rows * pitch)),
    };
    let out: *mut u8 = if case.out == Out::F32 { out32.cast() } else { out16.cast() };
    let lse = gpu.output::<f32>("lse", rows);
    let lse_shift = gpu.input("lse_shift", lse_shift);
    let row_max = gpu.in_out("row_max", &vec![0u32; heads]);

    let [q_factor, k_scale] = match case.qk {
        Qk::Int8 | Qk::Nvfp4 => {
            [("q_factor", &tiles.q_factor), ("k_scale", &tiles.k_scale)].map(|(n, x)| gpu.input(n, x))
        }
        Qk::F16 | Qk::E4m3 => [std::ptr::null(); 2],
    };
    let name = case.name();
    let entry: Entry = [SM90, MMA, SM100, FP4_NATIVE, FP4_DECODED]
        .concat()
        .into_iter()
        .find(|e| e.name == name)
        .expect("an entry of a module");
    let group = NonZeroU32::new((case.q_heads / case.kv_heads) as u32).expect("query heads share kv heads");
    let out_type = match case.out {
        Out::F32 => call::OUT_F32,
        Out::F16 => call::OUT_F16,
        Out::Bf16 => call::OUT_BF16,
    };
    let (token, head) = (case.q_heads * pitch, pitch);
    let batch = case.q_tokens * token;
    let rows_a_block = if case.family == Family::Sm100 { 4 * ROWS } else { 2 * ROWS };
    let grid = [case.q_tokens.div_ceil(rows_a_block), case.q_heads, case.batch].map(|n| n as u32);
    let [q_tokens, kv_tokens, q_heads, kv_heads, head_dim] =
        [case.q_tokens, case.kv_tokens, case.q_heads, case.kv_heads, case.head_dim].map(|n| n as u32);
    let strides = [batch, head, token].map(|n| n as i64);
    macro_rules! call {
        ($($module:ident: $($name:ident)*;)*) => {
            match name.as_str() {
                $($(stringify!($name) => $module::$name(
                    q, k, v, means, q_factor, k_scale, v_scale, kv_lens, poisoned, out, lse, lse_shift, row_max, q_tokens,
                    kv_tokens, q_heads, kv_heads, group, head_dim, strides[0], strides[1], strides[2], case.promote,
                    out_type,
                ),)*)*
                _ => unreachable!("every name of a case"),
            }
        };
    }
    Launch::of(&entry).grid(grid).schedule(case.schedule).run(&gpu, || {
        // SAFETY: tiles, outputs and sizes are those of the case.
        unsafe {
            call!(
                attention_sm90: attention_sm90_f16_expcast_smooth attention_sm90_f16_expcast_plain
                attention_sm90_f16_quadratic_smooth attention_sm90_f16_quadratic_plain
                attention_sm90_f16_exp2_smooth attention_sm90_f16_exp2_plain
                attention_sm90_e4m3_expcast_smooth attention_sm90_e4m3_expcast_plain
                attention_sm90_e4m3_quadratic_smooth attention_sm90_e4m3_quadratic_plain
                attention_sm90_e4m3_exp2_smooth attention_sm90_e4m3_exp2_plain
                attention_sm90_i8_expcast_smooth attention_sm90_i8_expcast_plain
                attention_sm90_i8_quadratic_smooth attention_sm90_i8_quadratic_plain
                attention_sm90_i8_exp2_smooth attention_sm90_i8_exp2_plain;
                attention_mma: attention_mma_f16_expcast_smooth attention_mma_f16_expcast_plain
                attention_mma_f16_quadratic_smooth attention_mma_f16_quadratic_plain
                attention_mma_f16_exp2_smooth attention_mma_f16_exp2_plain
                attention_mma_e4m3_expcast_smooth attention_mma_e4m3_expcast_plain
                attention_mma_e4m3_quadratic_smooth attention_mma_e4m3_quadratic_plain
                attention_mma_e4m3_exp2_smooth attention_mma_e4m3_exp2_plain
                attention_mma_i8_expcast_smooth attention_mma_i8_expcast_plain
                attention_mma_i8_quadratic_smooth attention_mma_i8_quadratic_plain
                attention_mma_i8_exp2_smooth attention_mma_i8_exp2_plain;
                attention_sm100: attention_sm100_f16_expcast_smooth attention_sm100_f16_expcast_plain
                attention_sm100_f16_exp2_smooth attention_sm100_f16_exp2_plain
                attention_sm100_e4m3_expcast_smooth attention_sm100_e4m3_expcast_plain
                attention_sm100_e4m3_exp2_smooth attention_sm100_e4m3_exp2_plain
                attention_sm100_i8_expcast_smooth attention_sm100_i8_expcast_plain
                attention_sm100_i8_exp2_smooth attention_sm100_i8_exp2_plain;
                attention_fp4: attention_fp4_native_smooth attention_fp4_native_plain
                attention_fp4_decoded_smooth attention_fp4_decoded_plain;
            )
        }
    })?;

    let all: Vec<f32> = match case.out {
        Out::F32 => gpu.read(out32),
        Out::F16 => gpu.read(out16).into_iter().map(|x| f16::from_bits(x).to_f32()).collect(),
        Out::Bf16 => gpu.read(out16).into_iter().map(|x| bf16::from_bits(x).to_f32()).collect(),
    };
    let mut o = Vec::with_capacity(rows * case.head_dim);
    for (b, h) in (0..case.batch).flat_map(|b| (0..case.q_heads).map(move |h| (b, h))) {
        for t in 0..case.q_tokens {
            o.extend(&all[b * batch + h * head + t * token..][..case.head_dim]);
        }
    }
    let gap = all.chunks_exact(pitch).flat_map(|row| &row[case.head_dim..]);
    assert!(gap.into_iter().all(|x| x.is_nan()), "nothing is written between the heads");
    Ok((o, gpu.read(lse), gpu.read(row_max).into_iter().map(f32::from_bits).collect()))
}

/// |a - b| / |b|.
pub fn rel_l2(a: &[f32], b: impl Iterator<Item = f64>) -> f64 {
    let (mut error, mut energy) = (0.0, 0.0);
    for (&a, b) in a.iter().zip(b) {
        error += (f64::from(a) - b).powi(2);
        energy += b * b;
    }
    if error == 0.0 { 0.0 } else { (error / energy).sqrt() }
}
