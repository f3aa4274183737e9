//! Project tasks in place of shell scripts: `cargo xtask --help`.

mod budget;
mod bundle;
mod cust;
mod kernels;
mod mutants;
mod ptx;
mod ptxas;
mod toolchain;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Project tasks of vc-attention", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the GPU kernels to PTX, pass them through ptxas and its gates, and write kernels-gpu/ptx.
    ///
    /// Needs a compiler for nvptx64-nvidia-cuda with the source of `core` and ptxas; says what to install
    /// when either is missing. A plain `cargo build` of the project needs neither.
    Kernels {
        /// Change nothing: rebuild elsewhere, fail unless PTX and budget equal the committed ones.
        #[arg(long)]
        check: bool,
        /// Only this architecture.
        #[arg(long, value_name = "ARCH")]
        only: Option<String>,
    },
    /// Gather the GPU tests, `gpu-check`, `vca` and their inputs in one folder for a machine with a GPU and no Rust.
    ///
    /// There, `./run` says what it can do.
    GpuBundle {
        /// The folder; a bundle that is there is replaced.
        #[arg(short, long, value_name = "DIR", default_value = ".bundle")]
        output: PathBuf,
        /// Also the example of vc-attention-cust, which does not start without a driver.
        #[arg(long)]
        cust: bool,
    },
    /// Link the example of vc-attention-cust on a machine without a CUDA driver, against a stand-in for libcuda.
    Cust,
    /// Plant faults into copies of the kernels (kernels-gpu/mutants.toml) and run the emulated tests on each.
    Mutants {
        /// Only those whose names contain this.
        filter: Option<String>,
    },
    /// Put the pinned ptxas under target/ptxas, from its wheel on PyPI.
    Ptxas {
        /// Unpack this wheel of nvidia-cuda-nvcc instead of downloading one.
        #[arg(long, value_name = "FILE")]
        wheel: Option<PathBuf>,
    },
}

/// The workspace's folder.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies inside the workspace")
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Kernels { check, only } => kernels::run(check, only.as_deref()),
        Task::GpuBundle { output, cust } => bundle::run(&output, cust),
        Task::Cust => {
            println!("{}", cust::build()?.display());
            Ok(())
        }
        Task::Mutants { filter } => mutants::run(filter.as_deref()),
        Task::Ptxas { wheel } => ptxas::install(wheel.as_deref()),
    }
}
