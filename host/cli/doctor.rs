//! `vca doctor`: what this machine and this build have.

use std::fs;

use clap::Args;
use serde::Serialize;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::{Layout, Recipe};

use super::failure::{Result, print};
use super::input::title;
use super::output;
use crate::data;

const EXAMPLES: &str = "\
Examples:
  vca doctor
  vca doctor --json";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    target: &'static str,
    rustc: &'static str,
    backend: &'static str,
    device: String,
    cpu_features: Vec<&'static str>,
    threads: usize,
    cuda: Cuda,
    bundled_input: String,
    recipes: Vec<String>,
    default_recipe: String,
    missing: Vec<String>,
}

#[derive(Serialize)]
struct Cuda {
    /// Whether this build can use a GPU.
    built: bool,
    /// Version of the NVIDIA kernel driver, where one is loaded.
    driver: Option<String>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let report = report()?;
    if arguments.json {
        return print(&output::json(&report)?);
    }
    print(&text(&report))
}

fn report() -> Result<Report> {
    let file = data::open()?;
    let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
    let shape = vc_attention::Problem::new(q, k, v).validate()?;
    let driver = driver();
    let mut missing = Vec::new();
    missing.push(match &driver {
        Some(version) => format!(
            "A GPU's driver ({version}) is here, but this build has no CUDA backend: everything runs on the CPU."
        ),
        None => "This build has no CUDA backend and this machine no NVIDIA driver: everything runs on the CPU.".into(),
    });
    if !cpu_features().contains(&"fma") {
        missing.push("The processor has no fused multiply-add: expect several times the usual time.".into());
    }
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        target: env!("VCA_TARGET"),
        rustc: env!("VCA_RUSTC"),
        backend: Cpu.name(),
        device: Cpu.device(),
        cpu_features: cpu_features(),
        threads: rayon::current_num_threads(),
        cuda: Cuda { built: false, driver },
        bundled_input: title(data::NAME, &shape),
        recipes: super::recipe_names(),
        default_recipe: Recipe::default_for_cpu().name,
        missing,
    })
}

/// What Linux says about a loaded NVIDIA kernel driver.
fn driver() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(version).map(Into::into)
}

/// The vector features that the CPU backend's dependencies choose their code by.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    [
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512fp16", is_x86_feature_detected!("avx512fp16")),
    ]
    .into_iter()
    .filter_map(|(name, here)| here.then_some(name))
    .collect()
}

/// The vector features that the CPU backend's dependencies choose their code by.
#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<&'static str> {
    // NEON, with its fused multiply-add, is part of the architecture.
    vec!["neon", "fma"]
}

/// The vector features that the CPU backend's dependencies choose their code by.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}

fn text(report: &Report) -> String {
    let lines = [
        ("version", format!("vca {} for {}, {}", report.version, report.target, report.rustc)),
        ("backend", format!("{}: {}", report.backend, report.device)),
        ("processor", report.cpu_features.join(", ")),
        ("cuda", if report.cuda.built { "built in" } else { "not in this build" }.into()),
        ("driver", report.cuda.driver.clone().unwrap_or_else(|| "none found".into())),
        ("bundled input", report.bundled_input.clone()),
        ("recipes", report.recipes.join(", ")),
        ("default recipe", report.default_recipe.clone()),
    ];
    let bold = anstyle::Style::new().bold();
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{bold}{name:15}{bold:#} {value}\n")).collect();
    text += "\nWhat is missing\n";
    text.extend(report.missing.iter().map(|line| format!("  {line}\n")));
    text
}
