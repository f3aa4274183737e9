//! `cargo xtask candle`: type-checks and lints the CUDA half of vc-attention-candle on a machine without a toolkit.
//!
//! candle's kernels are compiled by nvcc when candle is built. A check needs none of their code, only files where its
//! build script puts them: a stand-in for nvcc that makes empty ones will do. What comes of it must never be linked
//! into a program, so it lies in a build folder of its own.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::bundle::make_executable;
use crate::root;

/// Answers what candle's and cudarc's build scripts ask of nvcc (the release stands on the fourth line), and makes
/// the file that `-o` names or, for `--ptx`, one per source in the output folder.
const NVCC: &str = r#"#!/bin/sh
# A stand-in: compiles nothing. Written by `cargo xtask candle`.
set -eu
output= folder=. source=
while [ $# -gt 0 ]; do
  case "$1" in
    --version)
      printf '%s\n' 'nvcc: stand-in of vc-attention' '-' '-' 'Cuda compilation tools, release 12.0, V12.0.0'
      exit ;;
    -o) output=$2; shift ;;
    --output-directory) folder=$2; shift ;;
    *) source=$1 ;;
  esac
  shift
done
if [ -z "$output" ]; then
  name=${source##*/}
  output=$folder/${name%.cu}.ptx
fi
: > "$output"
"#;

/// Runs clippy, which checks types first, over library, tests and example.
pub fn run() -> Result<()> {
    let target = root().join("target/candle-cuda");
    let bin = target.join("nvcc");
    let nvcc = bin.join("nvcc");
    write_if_new(&nvcc)?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(bin).chain(std::env::split_paths(&path)))?;
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(root())
        .args(["clippy", "-p", "vc-attention-candle", "--features", "cuda", "--all-targets"])
        .args(["--", "-D", "warnings"])
        .env("CARGO_TARGET_DIR", &target)
        .env("PATH", path)
        .env("NVCC", &nvcc)
        // The build script would ask nvidia-smi.
        .env("CUDA_COMPUTE_CAP", "90")
        .status();
    ensure!(
        status.context("cannot start cargo")?.success(),
        "the CUDA half of vc-attention-candle has errors"
    );
    Ok(())
}

/// Leaves a file that is there as it is: build scripts look at its time.
fn write_if_new(nvcc: &Path) -> Result<()> {
    if fs::read_to_string(nvcc).is_ok_and(|text| text == NVCC) {
        return Ok(());
    }
    let folder = nvcc.parent().context("nvcc lies in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(nvcc, NVCC).with_context(|| format!("cannot write {}", nvcc.display()))?;
    make_executable(nvcc)
}
