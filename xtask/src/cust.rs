//! `cargo xtask cust`: links `attend_with_cust` on a machine without a CUDA driver.
//!
//! `cust` links libcuda, which comes with the driver. The linker only wants to know which functions it has: a
//! stand-in with the names that `cust_raw` declares will do, under the name that the driver's own library goes by,
//! so that the program finds that one when it starts.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::bundle::executable;
use crate::root;

/// Builds the example and returns where it lies.
pub fn build() -> Result<PathBuf> {
    let stub = root().join("target/cuda-stub");
    make_stub(&stub.join("lib64"))?;
    let arguments = ["build", "-p", "vc-attention-cust", "--bin", "attend_with_cust"];
    executable(&arguments, "attend_with_cust", &[("CUDA_LIBRARY_PATH", &stub)])
}

/// Writes and compiles `libcuda.so` in `folder`.
fn make_stub(folder: &Path) -> Result<()> {
    let declarations = cust_raw()?.join("src/cuda.rs");
    let declarations =
        fs::read_to_string(&declarations).with_context(|| format!("no {}", declarations.display()))?;
    let mut source = String::new();
    for name in functions(&declarations) {
        writeln!(source, "void {name}(void) {{ __builtin_trap(); }}")?;
    }
    ensure!(!source.is_empty(), "cust_raw declares no function");
    fs::create_dir_all(folder)?;
    let (c, library) = (folder.join("cuda.c"), folder.join("libcuda.so"));
    fs::write(&c, source)?;
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&library).arg(&c);
    let status = cc.status().context("cannot start the C compiler, `cc` or $CC")?;
    ensure!(status.success(), "{} does not compile", c.display());
    Ok(())
}

/// Names of the driver's functions among Rust declarations.
fn functions(declarations: &str) -> impl Iterator<Item = &str> {
    let starts = declarations.lines().filter_map(|line| line.trim_start().strip_prefix("pub fn "));
    let names = starts.filter_map(|rest| Some(&rest[..rest.find('(')?]));
    names.filter(|name| name.starts_with("cu"))
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

/// The folder of the source of `cust_raw` that the lock file names.
fn cust_raw() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output =
        Command::new(cargo).current_dir(root()).args(["metadata", "--format-version=1", "--locked"]).output();
    let output = output.context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
    let package =
        metadata.packages.into_iter().find(|p| p.name == "cust_raw").context("cust_raw is no dependency")?;
    Ok(package.manifest_path.parent().context("a manifest lies in a folder")?.into())
}
