//! The denoising schedule in small: group the value tokens on the first step, reuse the order on the next ones,
//! and start later refreshes from the centroids of the one before.
//!
//! `cargo run --release --example group_once`

use vc_attention::backend::cpu::{Cpu, Orders};
use vc_attention::fidelity::{compare, reference};
use vc_attention::{
    Error, Layout, Options, OutputType, Plan, Problem, Recipe, TensorView, run, run_on_order,
};

const SHAPE: [usize; 4] = [1, 2, 2048, 64];
const REFRESH: usize = 4;

/// Deterministic noise with deviation near 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        let mut uniform = || {
            self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..12).map(|_| uniform()).sum()
    }
}

/// A tensor whose tokens fall into 16 kinds, interleaved, under noise that changes from step to step.
fn drifting(step: usize, seed: u64) -> Vec<f32> {
    let [_, heads, tokens, dim] = SHAPE;
    let mut kinds = Noise(seed);
    let centres: Vec<f32> = (0..16 * dim).map(|_| kinds.next()).collect();
    let mut noise = Noise(seed + 1000 * (step as u64 + 1));
    (0..heads * tokens * dim)
        .map(|i| centres[i / dim * 7 % 16 * dim + i % dim] + 0.7 * noise.next())
        .collect()
}

fn main() -> Result<(), Error> {
    let recipe = Recipe::default_for_cpu();
    let options = Options { output: OutputType::F32, lse: false };
    let mut order: Option<Orders> = None;
    println!("step  grouping                     ms   energy in means   rel_l2");
    for step in 0..10 {
        let [q, k, v] = [1, 2, 3].map(|seed| drifting(step, seed));
        let view = |name, x| TensorView::new(name, x, SHAPE, Layout::Bhsd);
        let problem =
            Problem::new(view("q", q.as_slice())?, view("k", k.as_slice())?, view("v", v.as_slice())?);
        let plan = Plan::new(&problem, &recipe, options)?;

        let (what, finished) = match order.take() {
            Some(order) if step % REFRESH != 0 => ("reused", run_on_order(&Cpu, &plan, &problem, order)?),
            Some(order) => ("refreshed from centroids", run(&Cpu, &plan, &problem, Some(&order))?),
            None => ("from scratch", run(&Cpu, &plan, &problem, None)?),
        };
        let exact = reference::attention(&problem, &plan.shape);
        println!(
            "{step:4}  {what:24} {:6.2}   {:15.3}   {:.5}",
            finished.report.group.as_secs_f64() * 1e3,
            finished.report.mean_share.unwrap_or(0.0),
            compare(&finished.output.o.view(), &exact.o).rel_l2
        );
        order = Some(finished.order);
    }
    Ok(())
}
