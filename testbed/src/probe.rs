//! Where a recipe loses: its error call by call along the reference's trajectory, with exact attention carrying the
//! model forward, so that every row sees the same inputs and no error feeds another.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use vc_attention_candle::{Options, Recipe, vc_attn};

use crate::attention::scale;
use crate::bundle::Bundle;
use crate::model::Attend;
use crate::sampler::{Branch, Stepped};

/// Steps whose input state the reference has: the noise, and the states behind the steps before.
pub const STEPS: [usize; 4] = [0, 1, 11, 21];

/// Squared distances of one recipe's outputs from exact attention on the same q, k and v, rounded to bf16; f32
/// outputs.
#[derive(Clone, Debug, Default)]
pub struct Loss {
    /// Sum of |o - o_ref|^2 / |o_ref|^2 over the calls.
    relative: f64,
    calls: usize,
    /// Squared error of every query row over the mean energy of its call's rows.
    rows: Vec<f64>,
}

impl Loss {
    fn add(&mut self, other: &Loss) {
        self.relative += other.relative;
        self.calls += other.calls;
        self.rows.extend(&other.rows);
    }

    /// Root mean square of |o - o_ref| / |o_ref| over the calls.
    pub fn rel_l2(&self) -> f64 {
        (self.relative / self.calls as f64).sqrt()
    }

    /// Share of the squared error that the worst tenth of the query rows hold, each call's rows weighed by the
    /// call's mean output energy: 0.1 if all rows err alike.
    pub fn worst_tenth(&self) -> f64 {
        let mut rows = self.rows.clone();
        rows.sort_by(|a, b| b.total_cmp(a));
        let worst: f64 = rows.iter().take(rows.len().div_ceil(10)).sum();
        worst / rows.iter().sum::<f64>()
    }
}

/// Losses by (row, step, layer).
pub type Losses = BTreeMap<(usize, usize, usize), Loss>;

/// The sum over the entries that `matches`.
pub fn total(losses: &Losses, matches: impl Fn(&(usize, usize, usize)) -> bool) -> Loss {
    let mut total = Loss::default();
    losses.iter().filter(|(key, _)| matches(key)).for_each(|(_, loss)| total.add(loss));
    total
}

/// Runs prompt 0 at `steps`, all layers and both guidance branches, and every recipe beside it. Orders are grouped
/// anew at every call.
///
/// # Errors
/// When the reference has no state for a step, or of the attention.
pub fn probe(
    bundle: &Bundle,
    recipes: &[Recipe],
    steps: &[usize],
    mut progress: impl FnMut(usize),
) -> Result<Losses> {
    let mut probe = Probe { recipes, step: 0, grid: bundle.model.config().grid(), losses: Losses::new() };
    let times = bundle.sampler.times();
    for &step in steps {
        let state = match step.checked_sub(1) {
            None => "noise.0".to_owned(),
            Some(before) => format!("bf16_x.{before}"),
        };
        let x = bundle.reference(&state).with_context(|| {
            format!("the reference has the states before steps {STEPS:?} only, not before {step}")
        })?;
        for (branch, prompt) in [(Branch::Conditional, Some(bundle.prompt(0))), (Branch::Unconditional, None)]
        {
            probe.enter(step, branch);
            bundle.model.velocity(x, times[step], prompt.as_ref(), &mut probe)?;
        }
        progress(step);
    }
    Ok(probe.losses)
}

struct Probe<'a> {
    recipes: &'a [Recipe],
    step: usize,
    grid: [usize; 3],
    losses: Losses,
}

impl Stepped for Probe<'_> {
    fn enter(&mut self, step: usize, _: Branch) {
        self.step = step;
    }
}

impl Attend for Probe<'_> {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        // The values of bf16 in f32, so that outputs are f32.
        let rounded = |x: &Tensor| x.to_dtype(DType::BF16)?.to_dtype(DType::F32);
        let (q, k, v) = (rounded(q)?, rounded(k)?, rounded(v)?);
        let scale = scale(&q)?;
        let attend =
            |recipe: &Recipe| vc_attn(&q, &k, &v, scale, &Options::new(recipe.clone()).with_grid(self.grid));
        let exact = attend(&Recipe::parse("exact")?)?;
        let (_, _, _, dim) = exact.dims4()?;
        let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let reference = values(&exact)?;
        let energy: f64 = reference.iter().map(|&x| f64::from(x).powi(2)).sum();
        let rows = reference.len() / dim;
        for (i, recipe) in self.recipes.iter().enumerate() {
            let o = values(&attend(recipe)?)?;
            let distance = |(a, b): (&[f32], &[f32])| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
            };
            let errors: Vec<f64> =
                o.chunks_exact(dim).zip(reference.chunks_exact(dim)).map(distance).collect();
            let loss = Loss {
                relative: errors.iter().sum::<f64>() / energy,
                calls: 1,
                rows: errors.iter().map(|e| e / (energy / rows as f64)).collect(),
            };
            self.losses.entry((i, self.step, layer)).or_default().add(&loss);
        }
        Ok(exact)
    }
}
