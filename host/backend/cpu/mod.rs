//! The CPU backend: the numerics of every recipe, rounded where the hardware rounds, on any machine.
//!
//! Operands are kept as the values of their low-bit codes in f32, so the matrix products are plain f32 products
//! and yet exact per pair; memory is O(tokens x head_dim). Work is split into tiles of 128 query rows.

mod attend;
mod gemm;
mod prepare;
pub(crate) mod simd;

use rayon::prelude::*;

use self::attend::{Range, TILE, Workspace, attend_tile};
use self::prepare::{KHead, QHead, VHead};
use super::{Backend, Observed, Output, check_finite_output};
use crate::error::{Error, Result};
use crate::grouping::{Grouping, KeptOrder, group, group_from};
use crate::plan::Plan;
use crate::problem::{NonFinite, Problem, Shape};
use crate::recipe::{QkFormat, ScoreType, VFormat};
use crate::tensor::{DType, Layout, Tensor};

pub(crate) use self::gemm::{Matrix, Write, gemm as multiply};
pub use self::prepare::BLOCK;

/// Row maximum, in code units, from which a head runs with f32 score accumulators: the spacing of binary16
/// reaches half a code there.
pub const F16_SCORE_LIMIT: f32 = 512.0;

/// Partial sum of a score over the channels, in code units, from which a head runs with f32 accumulators: the
/// spacing of binary16 reaches two codes there, which a small score would keep as its error if the rest of the
/// channels cancelled the sum.
pub const F16_PARTIAL_LIMIT: f32 = 2048.0;

/// Runs recipes on the CPU, on the threads of the current rayon pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Prepared queries of all heads.
pub struct Queries {
    made_as: ScoreChoices,
    heads: Vec<QHead>,
    /// Scale balance of every (batch, kv head).
    balance: Vec<f32>,
}

/// Prepared keys of every (batch, kv head).
pub struct Keys {
    made_as: ScoreChoices,
    heads: Vec<KHead>,
    /// Valid tokens of every (batch, kv head).
    lens: Vec<usize>,
}

/// Prepared values of every (batch, kv head).
pub struct Values {
    made_as: ValueChoices,
    heads: Vec<VHead>,
    /// Valid tokens of every (batch, kv head).
    lens: Vec<usize>,
}

/// Token orders of every (batch, kv head), batch-major; they cover the valid tokens.
#[derive(Clone, Debug)]
pub struct Orders(pub Vec<Grouping>);

impl Orders {
    fn lens(&self) -> Vec<usize> {
        self.0.iter().map(|g| g.order.len()).collect()
    }

    /// Whether every order is a permutation of the valid tokens of its (batch, kv head).
    fn check(&self, plan: &Plan, problem: &Problem) -> Result<()> {
        let misfit = |expected: String, given: String| Error::Tensor { tensor: "order", expected, given };
        let heads = plan.shape.batch * plan.shape.kv_heads;
        if self.0.len() != heads {
            let given = format!("{} orders", self.0.len());
            return Err(misfit(format!("one order for each of {heads} (batch, kv head)"), given));
        }
        self.0.par_iter().enumerate().try_for_each(|(index, grouping)| {
            let (order, tokens) = (&grouping.order, problem.kv_len(index / plan.shape.kv_heads));
            let mut seen = vec![false; tokens];
            let fresh =
                |&token: &u32| seen.get_mut(token as usize).is_some_and(|s| !std::mem::replace(s, true));
            if order.len() == tokens && order.iter().all(fresh) {
                return Ok(());
            }
            let given = format!("{} tokens that are not it in (batch, kv head) {index}", order.len());
            Err(misfit(format!("a permutation of {tokens} tokens"), given))
        })
    }
}

/// What Q and K were quantized for; `attend` refuses operands that were made for anything else.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ScoreChoices {
    shape: Shape,
    scale: f32,
    qk: QkFormat,
    scores: ScoreType,
    center_k: bool,
    center_q: bool,
    rotate_qk: bool,
}

impl ScoreChoices {
    fn of(plan: &Plan) -> Self {
        let r = &plan.recipe;
        Self {
            shape: plan.shape,
            scale: plan.scale,
            qk: r.qk,
            scores: r.scores,
            center_k: r.center_k,
            center_q: r.center_q,
            rotate_qk: r.rotate_qk,
        }
    }
}

/// What V was quantized for.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ValueChoices {
    shape: Shape,
    v: VFormat,
    rotate_v: bool,
    demean: bool,
}

impl ValueChoices {
    fn of(plan: &Plan) -> Self {
        let r = &plan.recipe;
        Self { shape: plan.shape, v: r.v, rotate_v: r.rotate_v, demean: r.demean }
    }
}

/// Operands must come from this plan (or one with the same choices) and, K and V, for the same lengths.
fn check_operands(plan: &Plan, q: &Queries, k: &Keys, v: &Values) -> Result<()> {
    let choices = ScoreChoices::of(plan);
    for (tensor, fits) in [
        ("q", q.made_as == choices),
        ("k", k.made_as == choices),
        ("v", v.made_as == ValueChoices::of(plan) && v.lens == k.lens),
    ] {
        if !fits {
            return Err(Error::Tensor {
                tensor,
                expected: "operands prepared under this plan, K and V for the same lengths".into(),
                given: "those of another plan or other lengths".into(),
            });
        }
    }
    Ok(())
}

/// What pulp's levels are called elsewhere.
fn vectors(level: &str) -> &str {
    match level {
        "V4" => "AVX-512",
        "V3" => "AVX2",
        "Neon" => "NEON",
        other => other,
    }
}

/// Splits a batch-major head index.
fn batch_head(index: usize, heads: usize) -> [usize; 2] {
    [index / heads, index % heads]
}

impl Cpu {
    fn queries_of_group(plan: &Plan, problem: &Problem, index: usize) -> (Vec<QHead>, f32) {
        let [batch, kv_head] = batch_head(index, plan.shape.kv_heads);
        let group = plan.shape.q_heads / plan.shape.kv_heads;
        let heads = kv_head * group..(kv_head + 1) * group;
        let balance = prepare::balance(plan, problem, batch, heads.clone());
        let quantize = |head| prepare::quantize_q(plan, prepare::load_q(plan, problem, batch, head), balance);
        (heads.into_par_iter().map(quantize).collect(), balance)
    }
}

impl Backend for Cpu {
    type Order = Orders;
    type Kept = Vec<KeptOrder>;
    type Q = Queries;
    type K = Keys;
    type V = Values;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> String {
        // `V3(V3 { sse: ... })`: the name of the level is enough.
        let level = format!("{:?}", pulp::Arch::new());
        let level = level.split(['(', ' ', '{']).next().unwrap_or_default();
        format!("{} threads, {} vectors", rayon::current_num_threads(), vectors(level))
    }

    fn group(&self, plan: &Plan, problem: &Problem, warm: Option<&Orders>) -> Result<Orders> {
        plan.check(problem)?;
        let kv_heads = plan.shape.kv_heads;
        if let Some(warm) = warm.filter(|w| w.0.len() != plan.shape.batch * kv_heads) {
            return Err(Error::Tensor {
                tensor: "order",
                expected: format!(
                    "a warm start for each of {} (batch, kv head)",
                    plan.shape.batch * kv_heads
                ),
                given: format!("{} orders", warm.0.len()),
            });
        }
        (0..plan.shape.batch * kv_heads)
            .into_par_iter()
            .map(|index| {
                let [batch, head] = batch_head(index, kv_heads);
                let mut v = problem.v.read_head(batch, head, problem.kv_len(batch));
                // A head that is not finite yields NaN in any order; zeros keep the k-means defined.
                v.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
                let (dim, config) = (plan.shape.head_dim, &plan.recipe.grouping);
                match warm.map(|w| &w.0[index]) {
                    Some(w) if !w.centroids.is_empty() => {
                        group(&v, dim, config, problem.grid, Some(&w.centroids))
                    }
                    // A restored order has labels only.
                    Some(w) if !w.labels.is_empty() && config.order.clusters() => {
                        group_from(&v, dim, config, &KeptOrder::new(&w.labels, w.clusters)?)
                    }
                    // An order without clusters, or of a head that had no token, has nothing to start from.
                    _ => group(&v, dim, config, problem.grid, None),
                }
            })
            .collect::<Result<_>>()
            .map(Orders)
    }

    fn keep(&self, order: &Orders) -> Result<Vec<KeptOrder>> {
        order.0.iter().map(|g| KeptOrder::new(&g.labels, g.clusters)).collect()
    }

    fn restore(&self, plan: &Plan, problem: &Problem, kept: &Vec<KeptOrder>) -> Result<Orders> {
        if !plan.recipe.grouping.order.clusters() {
            return self.group(plan, problem, None);
        }
        let orders = Orders(kept.par_iter().map(KeptOrder::grouping).collect());
        orders.check(plan, problem)?;
        Ok(orders)
    }

    fn kept_bytes(kept: &Vec<KeptOrder>) -> usize {
        KeptOrder::bytes_of(kept)
    }

    fn prepare_q(&self, plan: &Plan, problem: &Problem, _: &Orders) -> Result<Queries> {
        plan.check(problem)?;
        let groups: Vec<_> = (0..plan.shape.batch * plan.shape.kv_heads)
            .into_par_iter()
            .map(|index| Self::queries_of_group(plan, problem, index))
            .collect();
        let balance = groups.iter().map(|g| g.1).collect();
        let heads = groups.into_iter().flat_map(|g| g.0).collect();
        Ok(Queries { made_as: ScoreChoices::of(plan), heads, balance })
    }

    fn prepare_k(&self, plan: &Plan, problem: &Problem, order: &Orders, q: &Queries) -> Result<Keys> {
        plan.check(problem)?;
        order.check(plan, problem)?;
        if q.made_as != ScoreChoices::of(plan) {
            return Err(Error::Tensor {
                tensor: "q",
                expected: "queries prepared under this plan".into(),
                given: "those of another".into(),
            });
        }
        let heads = (0..plan.shape.batch * plan.shape.kv_heads)
            .into_par_iter()
            .map(|i| {
                let at = batch_head(i, plan.shape.kv_heads);
                prepare::k_head(plan, problem, at, &order.0[i].order, q.balance[i])
            })
            .collect();
        Ok(Keys { made_as: ScoreChoices::of(plan), heads, lens: order.lens() })
    }

    fn prepare_v(&self, plan: &Plan, problem: &Problem, order: &Orders) -> Result<Values> {
        plan.check(problem)?;
        order.check(plan, problem)?;
        let heads = (0..plan.shape.batch * plan.shape.kv_heads)
            .into_par_iter()
            .map(|i| prepare::v_head(plan, problem, batch_head(i, plan.shape.kv_heads), &order.0[i].order))
            .collect();
        Ok(Values { made_as: ValueChoices::of(plan), heads, lens: order.lens() })
    }

    fn attend(&self, plan: &Plan, problem: &Problem, q: &Queries, k: &Keys, v: &Values) -> Result<Output> {
        plan.check(problem)?;
        check_operands(plan, q, k, v)?;
        let shape = plan.shape;
        let (group, d) = (shape.q_heads / shape.kv_heads, shape.head_dim);
        let rows = shape.batch * shape.q_heads * shape.q_tokens;
        let mut o = vec![0.0f32; rows * d];
        let mut lse = vec![f32::NEG_INFINITY; rows];
        let (range, f32_fallbacks) = o
            .par_chunks_mut(group * shape.q_tokens * d)
            .zip(lse.par_chunks_mut(group * shape.q_tokens))
            .enumerate()
            .map(|(index, (o, lse))| -> (Range, usize) {
                let heads = &q.heads[index * group..][..group];
                let (keys, v) = (&k.heads[index], &v.heads[index]);
                let operands = Operands { q: heads, k: keys, v };
                let narrow = plan.recipe.scores == ScoreType::F16;
                if narrow && keys.factor.is_empty() && heads.iter().all(|q| q.factor.is_empty()) {
                    let range = attend_group(plan, problem, index, ScoreType::F16, operands, o, lse);
                    // A NaN, from scores that overflowed, counts as out of range.
                    if range.row_max < F16_SCORE_LIMIT && range.partial < F16_PARTIAL_LIMIT {
                        return (range, 0);
                    }
                }
                let range = attend_group(plan, problem, index, ScoreType::F32, operands, o, lse);
                (range, usize::from(narrow))
            })
            .reduce(Default::default, |a, b| (a.0.merge(b.0), a.1 + b.1));
        bring_into_range(&mut o, plan.dtype, problem.v.dtype());
        if problem.nonfinite == NonFinite::Reject {
            check_finite_output(&o, [shape.batch, shape.q_heads, shape.q_tokens, d])?;
        }
        let shape = [shape.batch, shape.q_heads, shape.q_tokens, d];
        let o = Tensor::from_bhsd(o, shape, plan.dtype, Layout::Bhsd);
        let exact_share = range.exact as f64 / range.blocks.max(1) as f64;
        let observed = Observed { max_score: range.row_max, f32_fallbacks, exact_share };
        Ok(Output { o, lse: plan.options.lse.then_some(lse), observed })
    }

    fn mean_share(&self, v: &Values) -> Result<Option<f64>> {
        let shares: Vec<f64> = v.heads.iter().flat_map(|v| v.shares.iter().copied()).collect();
        Ok((!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64))
    }
}

/// What the low-bit operands of one query head stand for, in f64.
#[derive(Clone, Debug)]
pub struct Dequantized {
    /// Queries, [q_tokens, qk_dim]; q k^T comes out in nats, the scale included.
    pub q: Vec<f64>,
    /// Keys in grouped order, [kv_len, qk_dim].
    pub k: Vec<f64>,
    /// Values in grouped order, block means restored, [kv_len, head_dim].
    pub v: Vec<f64>,
    /// Channels of q and k: twice the plan's where Q's block means are kept apart.
    pub qk_dim: usize,
}

/// The low-bit operands of one query head as the values of their codes, each exact in its format: what a GPU has
/// to write bit for bit. Empty where the head has no valid key, or one that is not finite.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// Queries, [q_tokens, [`Plan::qk_dim`]]; zeros in a row that is not finite.
    pub q: &'a [f32],
    /// Keys in grouped order, [kv_len, [`Plan::qk_dim`]].
    pub k: &'a [f32],
    /// Token mean that was taken from the keys, `[head_dim]`; empty where none was.
    pub k_mean: &'a [f32],
    /// Values or their residuals in grouped order, [kv_len rounded up to 16, [`Plan::v_dim`]].
    pub v: &'a [f32],
    /// Factor of every channel of V, [[`Plan::v_dim`]].
    pub v_scale: &'a [f32],
    /// Block means divided by the channel's factor, [blocks, [`Plan::v_dim`]]; empty without demeaning.
    pub means: &'a [f32],
}

impl Cpu {
    /// The operands of one query head as they would be stored.
    ///
    /// # Panics
    /// When the head does not exist or the operands come from another plan.
    pub fn codes<'a>(
        &self,
        plan: &Plan,
        [batch, q_head]: [usize; 2],
        q: &'a Queries,
        k: &'a Keys,
        v: &'a Values,
    ) -> Codes<'a> {
        let index = batch * plan.shape.kv_heads + plan.shape.kv_head(q_head);
        let (k, v) = (&k.heads[index], &v.heads[index]);
        Codes {
            q: &q.heads[batch * plan.shape.q_heads + q_head].codes,
            k: &k.codes,
            k_mean: &k.mean,
            v: &v.codes,
            v_scale: &v.scale,
            means: &v.means,
        }
    }

    /// The values that the kernel's operands stand for, for one query head: what separates the error of the
    /// kernel from the error of the method. NaN where an operand was not finite.
    ///
    /// # Panics
    /// When the head does not exist or the operands come from another plan.
    pub fn dequantized(
        &self,
        plan: &Plan,
        [batch, q_head]: [usize; 2],
        q: &Queries,
        k: &Keys,
        v: &Values,
    ) -> Dequantized {
        let index = batch * plan.shape.kv_heads + plan.shape.kv_head(q_head);
        let q = &q.heads[batch * plan.shape.q_heads + q_head];
        let (rows, keys) = (plan.shape.q_tokens, k.lens[index]);
        let (k, v) = (&k.heads[index], &v.heads[index]);
        let (dim, v_dim, d) = (plan.qk_dim, plan.v_dim, plan.shape.head_dim);
        if k.nonfinite || v.nonfinite {
            let qk_dim = if plan.recipe.center_q { 2 * dim } else { dim };
            let nan = |n: usize| vec![f64::NAN; n];
            return Dequantized { q: nan(rows * qk_dim), k: nan(keys * qk_dim), v: nan(keys * d), qk_dim };
        }
        let scaled = |codes: &[f32], factor: &[f32], extra: &dyn Fn(usize) -> Vec<f64>| {
            let rows = codes.chunks_exact(dim).enumerate();
            rows.flat_map(|(i, row)| {
                let f = factor.get(i).map_or(1.0, |&f| f64::from(f));
                let row: Vec<f64> = row.iter().map(|&x| f64::from(x) * f).collect();
                [row, extra(i)].concat()
            })
            .collect::<Vec<f64>>()
        };
        let nats = f64::from(kernels_gpu::numerics::units::NATS);
        let scale = f64::from(plan.scale);
        let q64_dim = if plan.recipe.center_q { 2 * dim } else { dim };
        let widen = |x: &[f32], f: f64| x.iter().map(|&x| f64::from(x) * f).collect::<Vec<f64>>();
        let mut q64 = scaled(&q.codes, &q.factor, &|i| {
            // These means are in the units of q: nats and code units differ by the factor taken out below.
            q.block_means.chunks_exact(dim).nth(i / TILE).map_or(Vec::new(), |m| widen(m, scale / nats))
        });
        q64.iter_mut().for_each(|x| *x *= nats);
        for (row, _) in q64.chunks_exact_mut(q64_dim).zip(&q.nonfinite).filter(|(_, bad)| **bad) {
            row.fill(f64::NAN);
        }
        let k64 = scaled(&k.codes, &k.factor, &|i| {
            k.unquantized.chunks_exact(dim).nth(i).map_or(Vec::new(), |k| widen(k, 1.0))
        });
        let mut values = v.codes[..keys * v_dim].to_vec();
        for (i, row) in values.chunks_exact_mut(v_dim).enumerate() {
            let mean = v.means.chunks_exact(v_dim).nth(i / BLOCK);
            for (c, x) in row.iter_mut().enumerate() {
                *x = (*x + mean.map_or(0.0, |m| m[c])) * v.scale[c];
            }
        }
        if plan.recipe.rotate_v {
            prepare::rotate_rows(&mut values, v_dim);
        }
        let v64 = values.chunks_exact(v_dim).flat_map(|row| widen(&row[..d], 1.0)).collect();
        Dequantized { q: q64, k: k64, v: v64, qk_dim: q64_dim }
    }
}

/// Operands of one (batch, kv head): the query heads that read it, its keys, its values.
#[derive(Clone, Copy)]
struct Operands<'a> {
    q: &'a [QHead],
    k: &'a KHead,
    v: &'a VHead,
}

/// All query heads of one (batch, kv head), tile by tile; `o` is [group, q_tokens, head_dim] and `lse`
/// [group, q_tokens].
fn attend_group(
    plan: &Plan,
    problem: &Problem,
    index: usize,
    scores: ScoreType,
    Operands { q, k, v }: Operands,
    o: &mut [f32],
    lse: &mut [f32],
) -> Range {
    if k.nonfinite || v.nonfinite {
        o.fill(f32::NAN);
        lse.fill(f32::NAN);
        return Range::default();
    }
    let (d, dim, tokens) = (plan.shape.head_dim, plan.v_dim, plan.shape.q_tokens);
    let [batch, kv_head] = batch_head(index, plan.shape.kv_heads);
    let tiles = o.par_chunks_mut(tokens * d).zip(lse.par_chunks_mut(tokens)).zip(q).enumerate();
    tiles
        .flat_map(|(i, ((o, lse), q))| {
            let head = kv_head * (plan.shape.q_heads / plan.shape.kv_heads) + i;
            let tiles = o.par_chunks_mut(TILE * d).zip(lse.par_chunks_mut(TILE)).enumerate();
            tiles.map_init(
                || (Workspace::new(plan), vec![0.0; TILE * dim]),
                move |(ws, out), (tile, (o, lse))| {
                    let first = tile * TILE;
                    let out = &mut out[..lse.len() * dim];
                    let stats = attend_tile(plan, scores, q, k, v, first, out, ws);
                    if plan.recipe.rotate_v {
                        prepare::rotate_rows(out, dim);
                    }
                    for (row, (o, from)) in o.chunks_exact_mut(d).zip(out.chunks_exact(dim)).enumerate() {
                        o.copy_from_slice(&from[..d]);
                        lse[row] = stats.lse[row];
                        if q.nonfinite[first + row] {
                            o.fill(f32::NAN);
                            lse[row] = f32::NAN;
                        }
                    }
                    if plan.options.lse && !k.mean.is_empty() {
                        add_mean_term(problem, [batch, head, first], plan.scale, &k.mean, lse);
                    }
                    stats.range
                },
            )
        })
        .reduce(Range::default, Range::merge)
}

/// Gives the LSE back what centring K took: scale * q . mean(k).
fn add_mean_term(
    problem: &Problem,
    [batch, head, first]: [usize; 3],
    scale: f32,
    mean: &[f32],
    lse: &mut [f32],
) {
    let mut q = vec![0.0; mean.len()];
    for (row, lse) in lse.iter_mut().enumerate() {
        problem.q.read_row(batch, head, first + row, &mut q);
        let dot: f64 = q.iter().zip(mean).map(|(&q, &m)| f64::from(q) * f64::from(m)).sum();
        *lse = (f64::from(*lse) + f64::from(scale) * dot) as f32;
    }
}

/// What an output of a narrower type than f32 becomes when it is stored. An output is a mean of values, so with
/// values of the same type only their rounding to few bits can lift it beyond the type's range: the largest
/// finite value is then nearer than infinity. Wider values may be truly beyond, which is infinity.
fn bring_into_range(o: &mut [f32], output: DType, values: DType) {
    let (max, smallest_beyond) = match output {
        DType::F32 => return,
        DType::F16 => (half::f16::MAX.to_f32(), 65520.0),
        // Halfway to the next power of two that bfloat16 does not have.
        DType::Bf16 => (half::bf16::MAX.to_f32(), f32::from_bits(0x7F7F_8000)),
    };
    let stored = if output == values { max } else { f32::INFINITY };
    simd::vectorized(|| {
        for o in o {
            let beyond = o.is_finite() && o.abs() >= smallest_beyond;
            *o = if beyond { stored.copysign(*o) } else { *o };
        }
    });
}
