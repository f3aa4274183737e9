//! `cargo xtask gpu-bundle`: one folder that checks and times the kernels on a GPU machine without Rust.
//!
//! It holds the integration test `gpu`, `gpu-check`, `vca` and, where it was asked for, the example of
//! `vc-attention-cust`, all stripped; the inputs that they read; and the script `run`, which finds everything
//! beside itself, so the folder may be copied anywhere.

use std::fs;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::root;

/// Most that a bundle may weigh: it is sent along with every run on a lent machine.
const LIMIT: u64 = 40_000_000;

/// The script that starts things on the GPU machine.
const RUN: &str = include_str!("bundle/run.sh");

/// What goes in: cargo's arguments, the target's name, the file's name in the bundle.
const PROGRAMS: &[(&[&str], &str, &str)] = &[
    (&["test", "--no-run", "-p", "vc-attention", "--test", "gpu"], "gpu", "tests-gpu"),
    (&["build", "-p", "tests-gpu", "--bin", "gpu-check"], "gpu-check", "gpu-check"),
    (&["build", "-p", "vc-attention", "--bin", "vca"], "vca", "vca"),
];

/// Gathers the bundle in `folder`, which is replaced.
pub fn run(folder: &Path, cust: bool) -> Result<()> {
    let programs = PROGRAMS.iter().map(|(cargo, target, name)| Ok((executable(cargo, target, &[])?, *name)));
    let mut programs = programs.collect::<Result<Vec<_>>>()?;
    if cust {
        programs.push((crate::cust::build()?, "attend_with_cust"));
    }
    replace(folder)?;
    for (from, name) in &programs {
        strip(from, &folder.join(name))?;
    }
    copy_tree(&root().join("data"), &folder.join("data"))?;
    let script = folder.join("run");
    fs::write(&script, RUN).with_context(|| format!("cannot write {}", script.display()))?;
    make_executable(&script)?;

    let bytes = size(folder)?;
    for (_, name) in &programs {
        println!("{:>12} bytes  {name}", fs::metadata(folder.join(name))?.len());
    }
    println!("{bytes:>12} bytes in {}", folder.display());
    ensure!(bytes < LIMIT, "the bundle has {bytes} bytes, more than {LIMIT}");
    Ok(())
}

/// A line of cargo's JSON messages.
#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// Builds in release mode and returns the executable of a target.
pub fn executable(arguments: &[&str], target: &str, environment: &[(&str, &Path)]) -> Result<PathBuf> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let (command, rest) = arguments.split_first().context("a cargo command")?;
    cargo
        .current_dir(root())
        .arg(command)
        .args(["--release", "--message-format=json-render-diagnostics"])
        .args(rest);
    environment.iter().for_each(|(name, value)| _ = cargo.env(name, value));
    let mut child = cargo.stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
    let output = child.stdout.take().context("cargo's output")?;
    let mut found = None;
    for line in std::io::BufReader::new(output).lines() {
        let message: Message = serde_json::from_str(&line?).context("cargo's messages have another form")?;
        if message.target.is_some_and(|t| t.name == target) {
            found = message.executable.or(found);
        }
    }
    ensure!(child.wait()?.success(), "cargo {} failed", arguments.join(" "));
    found.with_context(|| format!("cargo {} made no executable `{target}`", arguments.join(" ")))
}

/// Empties `folder` if it is a bundle (or nothing), and makes it.
fn replace(folder: &Path) -> Result<()> {
    if folder.exists() {
        let ours = folder.join("run").is_file() || fs::read_dir(folder)?.next().is_none();
        ensure!(ours, "{} exists and is no bundle: name another folder", folder.display());
        fs::remove_dir_all(folder).with_context(|| format!("cannot replace {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// Copies a program without its symbols; line tables alone are larger than the code.
fn strip(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("strip").arg("-o").arg(to).arg(from).status();
    let status = status.context("cannot start `strip` (binutils, which comes with the C compiler)")?;
    if !status.success() {
        bail!("strip {} failed", from.display());
    }
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("no {}", from.display()))? {
        let path = entry?.path();
        let to = to.join(path.file_name().context("a file has a name")?);
        if path.is_dir() {
            copy_tree(&path, &to)?;
        } else {
            fs::copy(&path, &to).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(())
}

/// Bytes of all files below a folder.
fn size(folder: &Path) -> Result<u64> {
    fs::read_dir(folder)?.try_fold(0, |sum, entry| {
        let entry = entry?;
        let bytes = if entry.path().is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
        Ok(sum + bytes)
    })
}

/// Gives a file the run bit.
#[cfg(unix)]
pub fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("no {}", file.display()))
}

/// Nothing to do here.
#[cfg(not(unix))]
pub fn make_executable(_: &Path) -> Result<()> {
    bail!("the bundle is made on the system of the GPU machine, Linux")
}
