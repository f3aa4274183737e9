//! Embeds the committed PTX of every architecture (`kernels-gpu/ptx/*.ptx.zst`, made by `cargo xtask kernels`) as it lies
//! there, and the facts about the build that `vca doctor` shows. Needs neither a GPU nor a CUDA toolkit.

use std::{env, fs, path::Path, process::Command};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let folder = Path::new(&root).join("kernels-gpu/ptx");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut table = String::from("&[\n");
    let mut files: Vec<_> = fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.to_string_lossy().ends_with(".ptx.zst"))
        .collect();
    files.sort();
    let out = env::var("OUT_DIR").expect("set by cargo");
    for path in files {
        println!("cargo::rerun-if-changed={}", path.display());
        // NAME.sm_90a.ptx.zst
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let arch = name.split('.').nth(1).unwrap_or_default();
        table += &format!("    ({arch:?}, include_bytes!({:?})),\n", path.display().to_string());
    }
    table += "]\n";
    fs::write(Path::new(&out).join("embedded_ptx.rs"), table).expect("OUT_DIR is writable");

    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().ok();
    let version = version.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned()).unwrap_or_default();
    println!("cargo::rustc-env=VCA_RUSTC={version}");
    println!("cargo::rustc-env=VCA_TARGET={}", env::var("TARGET").expect("set by cargo"));
}
