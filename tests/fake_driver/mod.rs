//! The faked driver of `libcuda.rs`, built for a test.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::process::Command;
use std::sync::LazyLock;

use tempfile::TempDir;

/// The folder that holds the faked `libcuda.so`.
pub static DRIVER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("libcuda.rs");
    std::fs::write(&source, include_str!("libcuda.rs")).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let status = Command::new(rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "-Copt-level=1", "-o"])
        .arg(folder.path().join("libcuda.so"))
        .arg(source)
        .status()
        .unwrap();
    assert!(status.success());
    folder
});

/// Whether this process is on the faked driver. If not, the test `name` runs in one that is, since a process is told when
/// it starts where to find libraries; `defect` is one of those that the driver knows, or nothing.
#[track_caller]
pub fn here(name: &str, defect: &str) -> bool {
    if std::env::var_os("FAKE_CUDA").is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env("LD_LIBRARY_PATH", DRIVER.path())
        .env("FAKE_CUDA", defect)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}
