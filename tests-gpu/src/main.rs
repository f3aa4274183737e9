//! `gpu-check`: the attention kernels against an emulation in f64 on the same quantized operands, and their times.
//!
//! One self-contained program (the PTX is inside, libcuda is loaded at run time) for a machine with a GPU and
//! without Rust: `gpu-check` checks, `gpu-check --bench` times, `gpu-check --probe` answers where a wrong kernel
//! takes its values from.

mod bench;
mod cases;
mod gpu;
mod operands;
mod reference;
mod report;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Parser;

#[derive(Parser)]
#[command(about = "Check and time the attention kernels on this machine's GPU")]
struct Cli {
    /// Time the kernels instead of checking them.
    #[arg(long)]
    bench: bool,
    /// One-hot and uniform attention with a report on which token and channel each value came from.
    #[arg(long)]
    probe: bool,
    /// What the hardware's FP8 accumulation loses at full length, by the interval of promotion.
    #[arg(long)]
    accumulation: bool,
    /// Only kernels whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Tokens of a benchmark or of `--accumulation`, several times for several.
    #[arg(long, default_values_t = [16384, 75600])]
    tokens: Vec<usize>,
    /// Heads of a benchmark.
    #[arg(long, default_value_t = 40)]
    heads: usize,
    /// Key blocks between promotions in a benchmark, several times for several.
    #[arg(long, default_values_t = [1, 4])]
    promote: Vec<u32>,
    /// Seconds to run each benchmark for.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// A module in place of the one inside, several times to compare several: kernels of the same name run in turn.
    #[arg(long, value_name = "FILE")]
    ptx: Vec<std::path::PathBuf>,
    /// Time on the first head of this file's `q`, `k`, `v` (safetensors, tokens repeated up to the length), not on
    /// normal numbers: how often a row max moves depends on it.
    #[arg(long, value_name = "FILE")]
    data: Option<std::path::PathBuf>,
    /// Benchmarks of everything that many times.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Print every case, not only kernels and failures.
    #[arg(long)]
    verbose: bool,
}

/// Milliseconds since start at the last sign of life.
static ALIVE: AtomicU64 = AtomicU64::new(0);

/// Ends the program with a message when the GPU has not answered for a minute: a barrier that nobody arrives at
/// would otherwise hang until somebody kills it, without a word.
fn watch(start: Instant) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let silent = start.elapsed().as_millis() as u64 - ALIVE.load(Ordering::Relaxed);
            if silent > 60_000 {
                eprintln!("HANG: no answer from the GPU for 60 s in the case printed last");
                std::process::exit(3);
            }
        }
    });
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let start = Instant::now();
    watch(start);
    let alive = || ALIVE.store(start.elapsed().as_millis() as u64, Ordering::Relaxed);
    let gpu = gpu::Gpu::open(&cli.ptx)?;
    let kernels: Vec<_> = gpu.kernels(&cli.only)?;
    if kernels.is_empty() {
        bail!("no kernel's name contains {:?}", cli.only);
    }
    if cli.bench {
        return bench::run(&gpu, &kernels, &cli, &alive);
    }
    if cli.accumulation {
        return cases::accumulation(&gpu, &kernels, &cli, &alive);
    }
    if cli.probe {
        return cases::probe(&gpu, &kernels, &alive);
    }
    let failed = cases::check(&gpu, &kernels, cli.verbose, &alive)?;
    if failed > 0 {
        bail!("{failed} cases FAILED");
    }
    println!("all cases passed");
    Ok(())
}
