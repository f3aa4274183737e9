//! What a denoising loop does: a schedule groups the value tokens on early steps, lets an order serve several, and
//! starts a refresh from the clusters before.
//!
//! `cargo run --release --example denoising_loop`

use vc_attention::backend::cpu::Cpu;
use vc_attention::fidelity::{compare, reference};
use vc_attention::schedule::{Schedule, ScheduleConfig, Site};
use vc_attention::{Error, Layout, Options, OutputType, Problem, Recipe, TensorView};

const SHAPE: [usize; 4] = [1, 2, 2048, 64];
/// Denoising steps: groups at 0, 4 and 8.
const STEPS: usize = 40;

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
    let options = Options { output: OutputType::F32, lse: false };
    let mut schedule = Schedule::new(ScheduleConfig::paper(STEPS), Recipe::default_for_cpu())?;
    println!("step  order       ms   energy in means   rel_l2");
    for step in 0..12 {
        let [q, k, v] = [1, 2, 3].map(|seed| drifting(step, seed));
        let view = |name, x| TensorView::new(name, x, SHAPE, Layout::Bhsd);
        let problem =
            Problem::new(view("q", q.as_slice())?, view("k", k.as_slice())?, view("v", v.as_slice())?);
        // A model has many layers and two guidance branches: each is a site of its own.
        let done = schedule.attend(&Cpu, step, Site::default(), &problem, options)?;
        let exact = reference::attention(&problem, &problem.validate()?);
        println!(
            "{step:4}  {:7} {:6.2}   {:15.3}   {:.5}",
            format!("{:?}", done.decision.source),
            done.report.group.as_secs_f64() * 1e3,
            done.report.mean_share.unwrap_or(0.0),
            compare(&done.output.o.view(), &exact.o).rel_l2
        );
    }
    println!("{} bytes kept for {:?}", schedule.bytes(), SHAPE);
    Ok(())
}
