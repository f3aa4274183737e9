//! `cargo xtask kernels`: from kernel source to committed, gated PTX.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use kernels_gpu::kernels::{Entry, FP4_DECODED, FP4_NATIVE, MMA, PREPARE, PREPARE_FP4, SM90, SM100, SM103};

use crate::budget::{Budget, Cost};
use crate::toolchain::Toolchain;
use crate::{ptx, ptxas, root};

/// A module that is built and committed.
struct Module {
    arch: &'static str,
    /// Which attention kernels it holds: the value of `cfg(attention)` in `kernels-gpu`.
    family: &'static str,
    /// Target features beyond those of the architecture: the PTX version where the kernels need a later one.
    features: Option<&'static str>,
    /// Its entries.
    tables: &'static [&'static [Entry]],
    /// Entries by the beginning of their names that must fit fewer times on a multiprocessor than their table says: ptxas
    /// needs more registers for this architecture.
    fewer: &'static [(&'static str, u32)],
}

impl Module {
    fn entries(&self) -> Vec<Entry> {
        let mut entries = self.tables.concat();
        for entry in &mut entries {
            if let Some((_, blocks)) = self.fewer.iter().find(|(start, _)| entry.name.starts_with(start)) {
                entry.min_ctas_per_sm = *blocks;
            }
        }
        entries
    }
}

/// Every architecture that PTX is committed for.
const ARCHITECTURES: &[Module] = &[
    Module {
        arch: "sm_90a",
        family: "sm90",
        features: None,
        tables: &[SM90, FP4_DECODED, PREPARE, PREPARE_FP4],
        fewer: &[],
    },
    // PTX 8.7 has FP8 products with f16 accumulators.
    Module {
        arch: "sm_89",
        family: "mma",
        features: Some("+ptx87"),
        tables: &[MMA, FP4_DECODED, PREPARE, PREPARE_FP4],
        fewer: &[],
    },
    Module {
        arch: "sm_120a",
        family: "sm120",
        features: Some("+ptx87"),
        tables: &[MMA, FP4_NATIVE, PREPARE, PREPARE_FP4],
        fewer: &[("quantize_q", 3), ("quantize_k_f16", 3), ("quantize_k_e4m3", 3), ("quantize_k_i8", 1)],
    },
    Module {
        arch: "sm_100a",
        family: "sm100",
        features: None,
        tables: &[SM100, PREPARE],
        fewer: SM100_FEWER,
    },
    Module {
        arch: "sm_103a",
        family: "sm103",
        features: None,
        tables: &[SM103, PREPARE],
        fewer: SM100_FEWER,
    },
];

/// The quantizers of Q and K need a few registers more on sm_100a and sm_103a: one block less has to fit.
const SM100_FEWER: &[(&str, u32)] =
    &[("quantize_q", 3), ("quantize_k_f16", 3), ("quantize_k_e4m3", 3), ("quantize_k_i8", 1)];

/// Builds, gates and writes the kernels of every architecture, or compares them with what is committed.
pub fn run(check: bool, only: Option<&str>) -> Result<()> {
    let toolchain = Toolchain::find()?;
    let assembler = ptxas::find()?;
    let committed = root().join("kernels-gpu/ptx");
    let scratch = tempfile::tempdir()?;
    let mut budget = Budget { ptxas: ptxas_version(&assembler)?, kernels: BTreeMap::new() };

    let chosen = |module: &&Module| only.is_none_or(|only| only == module.arch);
    let known: Vec<_> = ARCHITECTURES.iter().map(|m| m.arch).collect();
    ensure!(ARCHITECTURES.iter().any(|m| chosen(&m)), "no such architecture; there are {}", known.join(", "));
    for module in ARCHITECTURES.iter().filter(chosen) {
        let Module { arch, family, features, .. } = module;
        let entries = &module.entries();
        let name = format!("vc_attention.{arch}.ptx");
        let text =
            ptx::finish(&toolchain.build(root(), arch, family, *features)?, &toolchain.version, entries)?;
        let fresh = scratch.path().join(&name);
        fs::write(&fresh, &text)?;
        let usage = ptxas::assemble(&assembler, &fresh, arch)?;
        budget.kernels.insert(arch.to_string(), costs(entries, &usage)?);
        let path = committed.join(format!("{name}.zst"));
        if check {
            compare(&path, &text, &toolchain.version)?;
        } else {
            fs::create_dir_all(&committed)?;
            fs::write(&path, compressed(&text))?;
        }
        println!("{name}: {} entries, {} KiB, gates passed", entries.len(), text.len() / 1024);
    }
    settle(&committed.join("budget.toml"), budget, check)
}

/// Static shared memory from ptxas and dynamic from the table, summed.
fn costs(entries: &[Entry], usage: &BTreeMap<String, ptxas::Usage>) -> Result<BTreeMap<String, Cost>> {
    let cost = |entry: &Entry| -> Result<(String, Cost)> {
        let used = usage.get(entry.name).with_context(|| format!("ptxas does not report {}", entry.name))?;
        Ok((
            entry.name.into(),
            Cost { registers: used.registers, shared: used.shared + entry.dynamic_shared },
        ))
    };
    entries.iter().map(cost).collect()
}

/// A module as zstd.
fn compressed(text: &str) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
}

/// The text of a committed module.
fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    ruzstd::decoding::StreamingDecoder::new(fs::File::open(path)?)?.read_to_string(&mut text)?;
    Ok(text)
}

/// The same compiler must give the same bytes; another one cannot be compared, which is said loudly.
fn compare(committed: &Path, text: &str, compiler: &str) -> Result<()> {
    let old = read(committed).with_context(|| format!("no {}", committed.display()))?;
    let made_by = ptx::compiler(&old).unwrap_or("an unnamed compiler");
    if made_by != compiler {
        eprintln!(
            "NOTICE: {} was made by {made_by}, this is {compiler}: not compared byte for byte.\n\
             NOTICE: run `cargo xtask kernels` and commit the result if this compiler is to be the project's.",
            committed.display()
        );
        return Ok(());
    }
    if old == text {
        return Ok(());
    }
    let line = old.lines().zip(text.lines()).position(|(a, b)| a != b);
    let line = line.unwrap_or(old.lines().count().min(text.lines().count()));
    bail!(
        "{} is not what the source compiles to (first difference in line {}): run `cargo xtask kernels`",
        committed.display(),
        line + 1
    )
}

/// Shows how the budget changed; under `check` a change is a failure, unless ptxas is another one.
fn settle(path: &Path, mut budget: Budget, check: bool) -> Result<()> {
    let old = match fs::read_to_string(path) {
        Ok(text) => Budget::parse(&text).with_context(|| format!("cannot read {}", path.display()))?,
        Err(_) => Budget::default(),
    };
    // What was not built stays as it was.
    for module in ARCHITECTURES.iter().filter(|m| !budget.kernels.contains_key(m.arch)).collect::<Vec<_>>() {
        budget.kernels.extend(old.kernels.get_key_value(module.arch).map(|(k, v)| (k.clone(), v.clone())));
    }
    let diff = budget.diff(&old);
    for line in &diff {
        println!("budget: {line}");
    }
    if !check {
        return Ok(fs::write(path, budget.to_text()?)?);
    }
    if budget.ptxas != old.ptxas {
        eprintln!("NOTICE: the budget is from ptxas {}, this is {}: not enforced", old.ptxas, budget.ptxas);
        return Ok(());
    }
    ensure!(diff.is_empty(), "the budget in {} is out of date: run `cargo xtask kernels`", path.display());
    Ok(())
}

/// `V13.0.88` from `ptxas --version`.
fn ptxas_version(ptxas: &Path) -> Result<String> {
    let output = Command::new(ptxas).arg("--version").output();
    let output = output.with_context(|| format!("cannot start {}", ptxas.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text
        .split_whitespace()
        .find(|w| w.starts_with('V') && w[1..].starts_with(|c: char| c.is_ascii_digit()));
    Ok(version.with_context(|| format!("no version in:\n{text}"))?.to_string())
}
