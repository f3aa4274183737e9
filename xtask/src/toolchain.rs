//! The seam to the device compiler: which rustc builds the kernels, and with which flags.
//!
//! rustc's own `nvptx64-nvidia-cuda` target needs nightly features and the source of `core`. Two
//! installations have both: Debian's rustc-web packages beside any rustup, and a rustup nightly with the
//! component rust-src. Everything else about the device build is the same for both.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// rustc 1.96 is the first whose inline PTX and `-Cpanic=immediate-abort` the kernels were built with.
const OLDEST: (u32, u32) = (1, 96);

/// The triple of the device target.
const TARGET: &str = "nvptx64-nvidia-cuda";

const INSTALL: &str = "no compiler for the GPU kernels: install one of\n  \
    Debian:  apt-get install --no-install-recommends rustc-web cargo-web rust-web-src   (1.96 or later)\n  \
    rustup:  rustup toolchain install nightly --component rust-src\n\
    (only whoever changes the kernels needs it: the PTX is part of the repository)";

/// A compiler that can build the kernels.
pub struct Toolchain {
    /// The command line in front of cargo's arguments.
    cargo: Vec<String>,
    /// The compiler that cargo shall call; none when rustup's cargo picks its own.
    rustc: Option<PathBuf>,
    /// What made the PTX, in one line: release, commit and LLVM version.
    pub version: String,
}

impl Toolchain {
    /// Finds an installed compiler: Debian's first, since its release is pinned by the distribution.
    pub fn find() -> Result<Self> {
        let debian = ["/usr/bin/rustc".to_string()];
        let rustup = ["rustup", "run", "nightly", "rustc"].map(String::from);
        if let Some(version) = usable(&debian)? {
            return Ok(Self {
                cargo: vec!["/usr/bin/cargo".into()],
                rustc: Some("/usr/bin/rustc".into()),
                version,
            });
        }
        if let Some(version) = usable(&rustup)? {
            let cargo = ["rustup", "run", "nightly", "cargo"].map(String::from).to_vec();
            return Ok(Self { cargo, rustc: None, version });
        }
        bail!(INSTALL)
    }

    /// Compiles `kernels-gpu` for `arch` (`sm_90a`), with the attention kernels of `family` and the target features
    /// `features` (`+ptx87`), and returns the PTX text as the compiler wrote it.
    ///
    /// Full unrolling is what keeps register arrays in registers; immediate-abort keeps panic texts and
    /// their paths out of the PTX, which makes the bytes independent of the folder. rustc's own jump threading
    /// is off: it knows nothing of convergent operations, and copies a barrier or a shuffle between two tests of
    /// one condition into both sides, where the threads of a warp wait for each other in different places.
    pub fn build(&self, root: &Path, arch: &str, family: &str, features: Option<&str>) -> Result<String> {
        let target_dir = root.join("target/kernels").join(arch);
        let mut cargo = Command::new(&self.cargo[0]);
        cargo.args(&self.cargo[1..]).current_dir(root);
        for inherited in ["RUSTUP_TOOLCHAIN", "RUSTC", "RUSTC_WRAPPER", "CARGO_ENCODED_RUSTFLAGS"] {
            cargo.env_remove(inherited);
        }
        if let Some(rustc) = &self.rustc {
            cargo.env("RUSTC", rustc);
        }
        cargo
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_TARGET_DIR", &target_dir)
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env(
                "RUSTFLAGS",
                format!(
                    "-Ctarget-cpu={arch} -Clinker=/bin/true -Zunstable-options -Cpanic=immediate-abort \
                     -Zmir-enable-passes=-JumpThreading{}",
                    features.map_or(String::new(), |f| format!(" -Ctarget-feature={f}"))
                ),
            )
            .args(["rustc", "--release", "--lib", "-p", "kernels-gpu", "--target", TARGET])
            .args(["-Zbuild-std=core", "--crate-type", "cdylib", "--", "--emit=asm"])
            .arg("-Cllvm-args=-unroll-threshold=100000 -unroll-full-max-count=1024")
            .args(["--cfg", &format!("attention=\"{family}\"")]);
        let status = cargo.status().with_context(|| format!("cannot start {}", self.cargo[0]))?;
        ensure!(status.success(), "the kernels do not compile for {arch}");
        let asm = target_dir.join(TARGET).join("release/deps/kernels_gpu.s");
        std::fs::read_to_string(&asm).with_context(|| format!("no PTX at {}", asm.display()))
    }
}

/// The version line of a compiler that is installed, recent enough and has the source of `core`.
fn usable(rustc: &[String]) -> Result<Option<String>> {
    let ask = |args: &[&str]| -> Option<String> {
        let mut command = Command::new(&rustc[0]);
        let output = command.args(&rustc[1..]).args(args).env_remove("RUSTUP_TOOLCHAIN").output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let (Some(verbose), Some(sysroot)) = (ask(&["-vV"]), ask(&["--print", "sysroot"])) else {
        return Ok(None);
    };
    if !Path::new(&sysroot).join("lib/rustlib/src/rust/library/core").is_dir() {
        return Ok(None);
    }
    let field = |name: &str| verbose.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
    let release = field("release:").context("rustc -vV names no release")?;
    let commit = field("commit-hash:").unwrap_or("unknown");
    let llvm = field("LLVM version:").context("rustc -vV names no LLVM version")?;
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    let recent = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= OLDEST;
    Ok(recent.then(|| format!("rustc {release} ({}), LLVM {llvm}", commit.get(..9).unwrap_or(commit))))
}
