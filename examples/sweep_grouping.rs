//! Sweeps clusters and iterations of the value grouping over real and made-up heads.
//!
//! `cargo run --release --example sweep_grouping -- [FILE.safetensors ...] [--synth small] [--synth wan]`
//!
//! Every figure is a mean over the heads of an input: the share of energy that block means remove
//! (`grouping::stats`), the error of V in E4M3 with a scale per channel and in NVFP4 along the tokens, both
//! after demeaning and as a ratio to the sequence order, and the time of the grouping of one head on all
//! cores. The warm start is from the centroids of `--previous` (the same head at an earlier denoising step),
//! or else of the same values with `--drift` of their energy replaced by noise. `docs/grouping.md` says what
//! came out.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use half::f16;
use kernels_gpu::formats::{e4m3, nvfp4};
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;
use vc_attention::grouping::{self, BLOCK, Grouping, GroupingConfig, MAX_CLUSTERS, TokenOrder, stats};
use vc_attention::io::InputFile;
use vc_attention::synth::Synth;
use vc_attention::tensor::Layout;

const ITERATIONS: [usize; 7] = [1, 2, 3, 4, 6, 8, 10];

/// Sweep clusters and iterations of the value grouping.
#[derive(Parser)]
struct Args {
    /// Files with q, k and v [heads, tokens, dim] and perhaps a grid; the bundled ones when nothing is named.
    files: Vec<PathBuf>,
    /// Made-up heads, too.
    #[arg(long)]
    synth: Vec<Preset>,
    /// File with the values of an earlier denoising step, for the warm start.
    #[arg(long)]
    previous: Option<PathBuf>,
    /// Without --previous: share of the values' energy that changed since.
    #[arg(long, default_value_t = 0.05)]
    drift: f32,
    /// At most this many heads of an input.
    #[arg(long, default_value_t = 6)]
    heads: usize,
    /// Every figure as CSV instead of tables of the E4M3 error ratio.
    #[arg(long)]
    csv: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Preset {
    Small,
    Wan,
}

/// Values [heads][tokens * dim], now and at the previous refresh.
struct Input {
    name: String,
    dim: usize,
    grid: Option<[usize; 3]>,
    now: Vec<Vec<f32>>,
    before: Vec<Vec<f32>>,
}

#[derive(Clone, Copy, PartialEq)]
struct Key {
    order: &'static str,
    clusters: usize,
    warm: bool,
    iterations: usize,
}

/// Share per block, share in total, E4M3 error, NVFP4 error, milliseconds.
type Figures = [f64; 5];

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = Args::parse();
    if args.files.is_empty() && args.synth.is_empty() {
        let bundled = ["tiny-dit/qkv_07", "dinov2/photo_layer02_head3", "dinov2/video_layer08_head3"];
        args.files = bundled.map(|name| format!("data/{name}.safetensors").into()).to_vec();
    }
    let mut inputs = Vec::new();
    for file in &args.files {
        inputs.push(from_file(file, &args)?);
    }
    inputs.extend(args.synth.iter().map(|&preset| from_synth(preset, &args)));
    if args.csv {
        println!("input,tokens,heads,order,clusters,start,iterations,share,share_total,e4m3,nvfp4,ms");
    }
    for input in &inputs {
        let rows = sweep(input);
        if args.csv { print_csv(input, &rows) } else { print_markdown(input, &rows) }
    }
    Ok(())
}

fn from_file(path: &Path, args: &Args) -> Result<Input, Box<dyn Error>> {
    let (now, dim, grid) = read_v(path, args.heads)?;
    let before = match &args.previous {
        Some(path) => read_v(path, args.heads)?.0,
        None => now.iter().map(|v| drifted(v, dim, args.drift)).collect(),
    };
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Input { name, dim, grid, now, before })
}

fn from_synth(preset: Preset, args: &Args) -> Input {
    let (name, synth) = match preset {
        Preset::Small => ("synth small", Synth::small(0)),
        Preset::Wan => ("synth wan", Synth::wan(0)),
    };
    let now: Vec<_> = (0..args.heads).map(|head| synth.head(head).v).collect();
    let before = now.iter().map(|v| drifted(v, synth.head_dim, args.drift)).collect();
    Input { name: name.into(), dim: synth.head_dim, grid: Some(synth.grid), now, before }
}

type Values = (Vec<Vec<f32>>, usize, Option<[usize; 3]>);

fn read_v(path: &Path, heads: usize) -> Result<Values, Box<dyn Error>> {
    let file = InputFile::open(path)?;
    let (_, _, v) = file.problem_tensors(Layout::Bhsd)?;
    let [_, of, tokens, dim] = v.shape();
    Ok(((0..of.min(heads)).map(|head| v.read_head(0, head, tokens)).collect(), dim, file.grid()?))
}

/// The values with a share of every channel's energy replaced by noise.
fn drifted(v: &[f32], dim: usize, share: f32) -> Vec<f32> {
    let mut energy = vec![0.0; dim];
    v.chunks_exact(dim).for_each(|row| energy.iter_mut().zip(row).for_each(|(e, x)| *e += x * x));
    let tokens = (v.len() / dim) as f32;
    let noise: Vec<f32> = energy.iter().map(|e| (share * e / tokens).sqrt()).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut normal = || rng.sample::<f32, _>(StandardNormal);
    let mix = |(i, &x)| (1.0 - share).sqrt() * x + noise[i % dim] * normal();
    v.iter().enumerate().map(mix).collect()
}

/// Mean figures over the heads; errors are ratios to the sequence order.
fn sweep(input: &Input) -> Vec<(Key, Figures)> {
    let mut rows: Vec<(Key, Figures)> = Vec::new();
    let heads = input.now.len();
    for (head, (now, before)) in input.now.iter().zip(&input.before).enumerate() {
        eprintln!("{}: head {} of {heads}", input.name, head + 1);
        let figures = of_head(input, now, before);
        let base = figures[0].1;
        for (at, (key, mut f)) in figures.into_iter().enumerate() {
            f[2] /= base[2];
            f[3] /= base[3];
            if head == 0 {
                rows.push((key, [0.0; 5]));
            }
            rows[at].1.iter_mut().zip(f).for_each(|(mean, x)| *mean += x / heads as f64);
        }
    }
    rows
}

/// All figures of one head, the sequence order first.
fn of_head(input: &Input, now: &[f32], before: &[f32]) -> Vec<(Key, Figures)> {
    let (dim, tokens) = (input.dim, now.len() / input.dim);
    let group = |config: &GroupingConfig, v: &[f32], warm: Option<&[f32]>| {
        let start = Instant::now();
        let grouping = grouping::group(v, dim, config, input.grid, warm).expect("a valid configuration");
        (grouping, start.elapsed().as_secs_f64() * 1e3)
    };
    let mut out = Vec::new();
    let mut note = |key: Key, order: &[u32], ms: f64| {
        let shares = stats::shares(now, dim, order, stats::MeanBits::Sixteen);
        let [e4m3, nvfp4] = errors(now, dim, order);
        out.push((key, [shares.per_block, shares.total, e4m3, nvfp4, ms]));
    };
    let fixed =
        [("sequence", TokenOrder::Sequence), ("cube", TokenOrder::Cube), ("balanced", TokenOrder::Balanced)];
    for (name, order) in fixed {
        if order != TokenOrder::Cube || input.grid.is_some() {
            let (grouping, ms) = group(&GroupingConfig { order, ..GroupingConfig::sequence() }, now, None);
            let key = Key { order: name, clusters: grouping.clusters, warm: false, iterations: 0 };
            note(key, &grouping.order, ms);
        }
    }
    let mut ks: Vec<usize> =
        [4, 8, 16, 32, 64, 128, 256].into_iter().chain([512, 256, 128].map(|n| tokens / n)).collect();
    ks.retain(|&k| (1..=MAX_CLUSTERS.min(tokens / 16)).contains(&k));
    ks.sort_unstable();
    ks.dedup();
    for (clusters, warm) in ks.into_iter().flat_map(|k| [(k, false), (k, true)]) {
        let kmeans = GroupingConfig { clusters: Some(clusters), ..GroupingConfig::kmeans() };
        let mut centroids = warm.then(|| group(&kmeans, before, None).0.centroids);
        // n iterations are one iteration n times over, each from the centroids of the one before.
        let (one, mut spent) = (GroupingConfig { iterations: Some(1), ..kmeans }, 0.0);
        for iterations in 1..=ITERATIONS[ITERATIONS.len() - 1] {
            let (grouping, ms) = group(&one, now, centroids.as_deref());
            if ITERATIONS.contains(&iterations) {
                let key = |order| Key { order, clusters, warm, iterations };
                let rounded = GroupingConfig { order: TokenOrder::Rounded, ..one };
                let (rounded, rounded_ms) = group(&rounded, now, centroids.as_deref());
                note(key("kmeans"), &grouping.order, spent + ms);
                note(key("kmeans, numbered at random"), &numbered_at_random(&grouping), spent + ms);
                note(key("rounded"), &rounded.order, spent + rounded_ms);
            }
            spent += ms;
            centroids = Some(grouping.centroids);
        }
    }
    out
}

/// The order that the same clusters give without a path through their centroids.
fn numbered_at_random(grouping: &Grouping) -> Vec<u32> {
    let mut numbers: Vec<u16> = (0..grouping.clusters as u16).collect();
    numbers.shuffle(&mut ChaCha8Rng::seed_from_u64(3));
    let labels: Vec<u16> = grouping.labels.iter().map(|&label| numbers[usize::from(label)]).collect();
    grouping::stable_argsort(&labels)
}

/// |V - V_q|^2 / |V|^2 in E4M3 with a scale per channel, and in NVFP4 along the tokens, after demeaning in
/// blocks with 16-bit means.
fn errors(v: &[f32], dim: usize, order: &[u32]) -> [f64; 2] {
    let channel = |c: usize| {
        let x: Vec<f32> = order.iter().map(|&token| v[token as usize * dim + c]).collect();
        let mut residual = x.clone();
        for block in residual.chunks_mut(BLOCK) {
            let mean = block.iter().sum::<f32>() / block.len() as f32;
            let mean = f16::from_f32(mean).to_f32();
            block.iter_mut().for_each(|x| *x -= mean);
        }
        (residual, x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>())
    };
    let channels: Vec<(Vec<f32>, f64)> = (0..dim).into_par_iter().map(channel).collect();
    let amax = |x: &[f32]| x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let largest = channels.iter().map(|(r, _)| amax(r)).fold(0.0, f32::max);
    let square = |x: f32, y: f32| f64::from(x - y).powi(2);
    let error = |(residual, _): &(Vec<f32>, f64)| {
        let scale = (amax(residual) / e4m3::MAX).max(f32::MIN_POSITIVE);
        let in_e4m3 = residual.iter().map(|&x| square(x, e4m3::round(x / scale) * scale)).sum::<f64>();
        let in_nvfp4 = residual.chunks(nvfp4::BLOCK).map(|x| {
            let mut block = [0.0; nvfp4::BLOCK];
            block[..x.len()].copy_from_slice(x);
            nvfp4::round_block(&mut block, nvfp4::tensor_scale(largest));
            x.iter().zip(block).map(|(&x, y)| square(x, y)).sum::<f64>()
        });
        [in_e4m3, in_nvfp4.sum()]
    };
    let each: Vec<[f64; 2]> = channels.par_iter().map(error).collect();
    let energy: f64 = channels.iter().map(|(_, energy)| energy).sum();
    [0, 1].map(|format| each.iter().map(|e| e[format]).sum::<f64>() / energy)
}

fn print_csv(input: &Input, rows: &[(Key, Figures)]) {
    for (key, [share, total, e4m3, nvfp4, ms]) in rows {
        println!(
            "{},{},{},\"{}\",{},{},{},{share:.4},{total:.4},{e4m3:.4},{nvfp4:.4},{ms:.2}",
            input.name,
            input.now[0].len() / input.dim,
            input.now.len(),
            key.order,
            key.clusters,
            if key.warm { "warm" } else { "cold" },
            key.iterations
        );
    }
}

/// One line for every order, k and start: the share at the most iterations, the E4M3 error ratio at all.
fn print_markdown(input: &Input, rows: &[(Key, Figures)]) {
    let tokens = input.now[0].len() / input.dim;
    println!("\n### {}: {} heads of {tokens} tokens\n", input.name, input.now.len());
    let heads = ITERATIONS.map(|n| n.to_string()).join(" | ");
    println!("| order | k | start | share | ms | {heads} |");
    println!("|---|---|---|---|---|{}", "---|".repeat(ITERATIONS.len()));
    for (key, [share, _, e4m3, _, ms]) in rows.iter().filter(|(key, _)| key.iterations == 0) {
        println!(
            "| {} | {} | | {share:.3} | {ms:.1} | {e4m3:.3} |{}",
            key.order,
            key.clusters,
            " |".repeat(6)
        );
    }
    for (last, [share, .., ms]) in rows.iter().filter(|(key, _)| key.iterations == 10) {
        let same = |key: &Key| Key { iterations: 10, ..*key } == *last && key.iterations > 0;
        let line: Vec<String> =
            rows.iter().filter(|(key, _)| same(key)).map(|(_, f)| format!("{:.3}", f[2])).collect();
        let start = if last.warm { "warm" } else { "cold" };
        println!(
            "| {} | {} | {start} | {share:.3} | {ms:.1} | {} |",
            last.order,
            last.clusters,
            line.join(" | ")
        );
    }
}
