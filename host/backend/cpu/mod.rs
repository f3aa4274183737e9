//! The CPU backend: the numerics of every recipe, rounded where the hardware rounds, on any machine.
//!
//! Operands are kept as the values of their low-bit codes in f32, so the matrix products are plain f32 products
//! and yet exact per pair; memory is O(tokens x head_dim). Work is split into tiles of 128 query rows.

mod attend;
mod gemm;
mod prepare;
pub(crate) mod simd;

use rayon::prelude::*;

use self::attend::{TILE, Workspace, attend_tile};
use self::prepare::{KHead, QHead, VHead};
use super::{Backend, Observed, Output};
use crate::error::{Error, Result};
use crate::grouping::{Grouping, group};
use crate::plan::Plan;
use crate::problem::{NonFinite, Problem};
use crate::recipe::ScoreType;
use crate::tensor::{Layout, Tensor};

pub(crate) use self::gemm::{Matrix, Write, gemm as multiply};
pub use self::prepare::BLOCK;

/// Row maximum, in code units, from which f16 score accumulators are too coarse (half a code at 512).
pub const F16_SCORE_LIMIT: f32 = 512.0;

/// Runs recipes on the CPU, on the threads of the current rayon pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu;

/// Prepared queries of all heads.
pub struct Queries {
    heads: Vec<QHead>,
    /// Scale balance of every (batch, kv head).
    balance: Vec<f32>,
}

/// Prepared keys of every (batch, kv head).
pub struct Keys {
    heads: Vec<KHead>,
    order: Vec<Vec<u32>>,
}

/// Prepared values of every (batch, kv head).
pub struct Values {
    heads: Vec<VHead>,
}

/// Token orders of every (batch, kv head), batch-major; they cover the valid tokens.
#[derive(Clone, Debug)]
pub struct Orders(pub Vec<Grouping>);

/// Splits a batch-major head index.
fn batch_head(index: usize, heads: usize) -> [usize; 2] {
    [index / heads, index % heads]
}

impl Cpu {
    fn queries_of_group(
        plan: &Plan,
        problem: &Problem,
        index: usize,
        scores: ScoreType,
    ) -> (Vec<QHead>, f32) {
        let [batch, kv_head] = batch_head(index, plan.shape.kv_heads);
        let group = plan.shape.q_heads / plan.shape.kv_heads;
        let loaded: Vec<_> =
            (0..group).map(|i| prepare::load_q(plan, problem, batch, kv_head * group + i)).collect();
        let amax = loaded.iter().flat_map(|(x, _)| x).fold(0.0f32, |a, x| a.max(x.abs()));
        let balance = prepare::balance(plan, amax);
        (loaded.into_iter().map(|q| prepare::quantize_q(plan, q, scores, balance)).collect(), balance)
    }
}

impl Backend for Cpu {
    type Order = Orders;
    type Q = Queries;
    type K = Keys;
    type V = Values;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn device(&self) -> String {
        format!("{} threads, {:?}", rayon::current_num_threads(), pulp::Arch::new())
    }

    fn group(&self, plan: &Plan, problem: &Problem, warm: Option<&Orders>) -> Result<Orders> {
        let kv_heads = plan.shape.kv_heads;
        let warm = warm.filter(|w| w.0.len() == plan.shape.batch * kv_heads);
        (0..plan.shape.batch * kv_heads)
            .into_par_iter()
            .map(|index| {
                let [batch, head] = batch_head(index, kv_heads);
                let mut v = problem.v.read_head(batch, head, problem.kv_len(batch));
                // A head that is not finite yields NaN in any order; zeros keep the k-means defined.
                v.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
                let centroids = warm.map(|w| w.0[index].centroids.as_slice());
                group(&v, plan.shape.head_dim, &plan.recipe.grouping, problem.grid, centroids)
            })
            .collect::<Result<_>>()
            .map(Orders)
    }

    fn prepare_q(&self, plan: &Plan, problem: &Problem) -> Result<Queries> {
        let groups: Vec<_> = (0..plan.shape.batch * plan.shape.kv_heads)
            .into_par_iter()
            .map(|index| Self::queries_of_group(plan, problem, index, plan.recipe.scores))
            .collect();
        let balance = groups.iter().map(|g| g.1).collect();
        Ok(Queries { heads: groups.into_iter().flat_map(|g| g.0).collect(), balance })
    }

    fn prepare_k(&self, plan: &Plan, problem: &Problem, order: &Orders, q: &Queries) -> Result<Keys> {
        let heads = (0..plan.shape.batch * plan.shape.kv_heads)
            .into_par_iter()
            .map(|i| {
                let at = batch_head(i, plan.shape.kv_heads);
                prepare::k_head(plan, problem, at, &order.0[i].order, plan.recipe.scores, q.balance[i])
            })
            .collect();
        Ok(Keys { heads, order: order.0.iter().map(|g| g.order.clone()).collect() })
    }

    fn prepare_v(&self, plan: &Plan, problem: &Problem, order: &Orders) -> Result<Values> {
        let heads = (0..plan.shape.batch * plan.shape.kv_heads)
            .into_par_iter()
            .map(|i| prepare::v_head(plan, problem, batch_head(i, plan.shape.kv_heads), &order.0[i].order))
            .collect();
        Ok(Values { heads })
    }

    fn attend(&self, plan: &Plan, problem: &Problem, q: &Queries, k: &Keys, v: &Values) -> Result<Output> {
        let shape = plan.shape;
        let (group, d) = (shape.q_heads / shape.kv_heads, shape.head_dim);
        let rows = shape.batch * shape.q_heads * shape.q_tokens;
        let mut o = vec![0.0f32; rows * d];
        let mut lse = vec![f32::NEG_INFINITY; rows];
        let observed = o
            .par_chunks_mut(group * shape.q_tokens * d)
            .zip(lse.par_chunks_mut(group * shape.q_tokens))
            .enumerate()
            .map(|(index, (o, lse))| {
                let heads = &q.heads[index * group..][..group];
                let (keys, v) = (&k.heads[index], &v.heads[index]);
                let scores = plan.recipe.scores;
                let saturated = keys.saturated || heads.iter().any(|q| q.saturated);
                if !saturated {
                    let max_score =
                        attend_group(plan, problem, index, scores, Operands { q: heads, k: keys, v }, o, lse);
                    // A NaN, from scores that overflowed, counts as out of range.
                    if scores == ScoreType::F32 || max_score < F16_SCORE_LIMIT {
                        return Observed { max_score, f32_fallbacks: 0 };
                    }
                }
                let (heads, balance) = Self::queries_of_group(plan, problem, index, ScoreType::F32);
                let at = batch_head(index, shape.kv_heads);
                let keys = prepare::k_head(plan, problem, at, &k.order[index], ScoreType::F32, balance);
                let max_score = attend_group(
                    plan,
                    problem,
                    index,
                    ScoreType::F32,
                    Operands { q: &heads, k: &keys, v },
                    o,
                    lse,
                );
                Observed { max_score, f32_fallbacks: 1 }
            })
            .reduce(Observed::default, |a, b| Observed {
                max_score: a.max_score.max(b.max_score),
                f32_fallbacks: a.f32_fallbacks + b.f32_fallbacks,
            });
        if problem.nonfinite == NonFinite::Reject {
            check_output(&o, plan)?;
        }
        let shape = [shape.batch, shape.q_heads, shape.q_tokens, d];
        let o = Tensor::from_bhsd(o, shape, plan.dtype, Layout::Bhsd);
        Ok(Output { o, lse: plan.options.lse.then_some(lse), observed })
    }

    fn mean_share(&self, v: &Values) -> Option<f64> {
        let shares: Vec<f64> = v.heads.iter().flat_map(|v| v.shares.iter().copied()).collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
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

impl Cpu {
    /// The values that the kernel's operands stand for, for one query head: what separates the error of the
    /// kernel from the error of the method.
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
        let (k, v) = (&k.heads[index], &v.heads[index]);
        let (dim, v_dim, d) = (plan.qk_dim, plan.v_dim, plan.shape.head_dim);
        let keys = k.codes.len() / dim;
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
        let widen = |x: &[f32], f: f64| x.iter().map(|&x| f64::from(x) * f).collect::<Vec<f64>>();
        let mut q64 = scaled(&q.codes, &q.factor, &|i| {
            // These means are in the units of q: nats and code units differ by the factor taken out below.
            q.block_means.chunks_exact(dim).nth(i / TILE).map_or(Vec::new(), |m| widen(m, scale / nats))
        });
        q64.iter_mut().for_each(|x| *x *= nats);
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
        let qk_dim = if plan.recipe.center_q { 2 * dim } else { dim };
        Dequantized { q: q64, k: k64, v: v64, qk_dim }
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
/// [group, q_tokens]. Returns the largest |row maximum| in code units.
fn attend_group(
    plan: &Plan,
    problem: &Problem,
    index: usize,
    scores: ScoreType,
    Operands { q, k, v }: Operands,
    o: &mut [f32],
    lse: &mut [f32],
) -> f32 {
    if k.nonfinite || v.nonfinite {
        o.fill(f32::NAN);
        lse.fill(f32::NAN);
        return 0.0;
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
                    stats.max_score
                },
            )
        })
        // A NaN must win over every number.
        .reduce(|| 0.0, |a, b| if a <= b || b.is_nan() { b } else { a })
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

/// Finite inputs whose products leave f32 must not come back as NaN without a word.
fn check_output(o: &[f32], plan: &Plan) -> Result<()> {
    if prepare::all_finite(o) {
        return Ok(());
    }
    let at = o.iter().position(|x| !x.is_finite()).unwrap_or(0);
    let (d, n, h) = (plan.shape.head_dim, plan.shape.q_tokens, plan.shape.q_heads);
    let position = [at / (d * n * h), at / (d * n) % h, at / d % n, at % d];
    Err(Error::NonFinite { tensor: "o", position, value: o[at] })
}
