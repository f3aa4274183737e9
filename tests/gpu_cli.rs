//! The program beside a GPU, on a driver that is faked: what it chooses, what falls back to the CPU, what it says.
//! What kernels compute is tested where there is a GPU.

#![cfg(all(target_os = "linux", feature = "cuda"))]

mod fake_driver;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use fake_driver::DRIVER;
use serde_json::Value;
use tempfile::TempDir;
use vc_attention::{DType, Layout, Recipe, Tensor, io};

/// `vca` on the faked driver; `defect` is one of those that the driver knows, or nothing.
fn vca(defect: &str) -> Command {
    let mut command = Command::cargo_bin("vca").unwrap();
    command.env("LD_LIBRARY_PATH", DRIVER.path()).env("FAKE_CUDA", defect).env_remove("VCA_BACKEND");
    command
}

fn input(folder: &TempDir, dtype: DType) -> PathBuf {
    let shape = [1, 2, 160, 64];
    let tensor = |seed: u32| {
        let mut state = seed;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 22) as f32 - 2.0
        };
        let values = (0..shape.iter().product()).map(|_: usize| value()).collect();
        Tensor::from_bhsd(values, shape, dtype, Layout::Bhsd)
    };
    let tensors = [tensor(3), tensor(5), tensor(7)];
    let outputs: Vec<_> = ["q", "k", "v"]
        .iter()
        .zip(&tensors)
        .map(|(name, tensor)| io::Output::tensor(name, tensor, 3).unwrap())
        .collect();
    let path = folder.path().join("input.safetensors");
    io::write(&path, &outputs, &BTreeMap::new()).unwrap();
    path
}

fn texts(output: &Output) -> (String, String) {
    (String::from_utf8(output.stdout.clone()).unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

/// A run that succeeds: standard output, standard error.
#[track_caller]
fn succeeds(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{err}");
    (out, err)
}

/// A run that fails with this exit code and a first line that holds all of `words`.
#[track_caller]
fn fails(command: &mut Command, code: i32, words: &[&str]) {
    let output = command.output().unwrap();
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(code), "{err}");
    let line = err.lines().next().unwrap_or_default();
    for word in words {
        assert!(line.contains(word), "`{word}` is not in: {err}");
    }
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn compare_marks_the_rows_that_the_kernels_do_not_cover() {
    let folder = tempfile::tempdir().unwrap();
    let (input, json) = (input(&folder, DType::Bf16), folder.path().join("out.json"));
    let (out, err) = succeeds(vca("").arg("compare").arg(&input).arg("--json").arg(&json));
    assert_eq!(err, "");
    assert!(out.contains("cuda (Fake GPU, compute capability 9.0)"), "{out}");
    let marked = |name: &str| {
        let row = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        row.into_iter().find(|row| row.first() == Some(&name)).unwrap()[1] == "*"
    };
    for recipe in Recipe::all() {
        // Ours, by one module of Hopper or another.
        assert_eq!(marked(&recipe.name), !recipe.name.starts_with("vc"), "{out}");
    }
    assert!(out.contains("* Not covered by the GPU kernels"), "{out}");

    let json = read_json(&json);
    assert_eq!(json["backend"], "cuda");
    let recipe = |name: &str| json["recipes"].as_array().unwrap().iter().find(|r| r["name"] == name).unwrap();
    // Kernels that do nothing leave zeros; the CPU's rows are right.
    assert_eq!(recipe("vc16")["rel_l2"], 1.0);
    assert!(recipe("exact")["rel_l2"].as_f64().unwrap() < 1e-5);
    // The faked clock: a millisecond a stage, of which preparation has three besides the grouping.
    assert_eq!((&recipe("vc16")["prepare_ms"], &recipe("vc16")["attend_ms"]), (&4.0.into(), &1.0.into()));
    assert!(recipe("vc16").get("backend").is_none());
}

#[test]
fn compare_takes_f32_to_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let (input, json) = (input(&folder, DType::F32), folder.path().join("out.json"));
    let (out, err) = succeeds(
        vca("").arg("compare").arg(&input).args(["--recipe", "exact,vc16,vc8-fp8qk", "--json"]).arg(&json),
    );
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(err.contains("f16 or bf16 on the GPU") && err.contains("computing on the CPU"), "{err}");
    assert!(!out.contains('*') && out.contains("emulation on the CPU"), "{out}");
    let json = read_json(&json);
    assert_eq!(json["backend"], "cpu");
    assert!(json["recipes"][1]["rel_l2"].as_f64().unwrap() < 0.05);
}

#[test]
fn attend_falls_back_unless_a_gpu_is_insisted_on() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (input(&folder, DType::Bf16), folder.path().join("out.safetensors"));
    let attend = |recipe: &str| {
        let mut command = vca("");
        command.arg("attend").arg(&input).arg("-o").arg(&out).args(["--recipe", recipe]);
        command
    };
    let (text, err) = succeeds(&mut attend("vc16-expcast"));
    assert!(text.contains("on Fake GPU") && err.is_empty(), "{text}{err}");
    let (text, err) = succeeds(&mut attend("sage3"));
    assert!(!text.contains("Fake GPU"), "{text}");
    assert!(err.contains("GPU kernels do not cover") && err.contains("computing on the CPU"), "{err}");
    fails(attend("sage3").args(["--backend", "cuda"]), 2, &["`sage3`", "GPU kernels do not cover"]);
    let (text, _) = succeeds(attend("vc16").args(["--backend", "cpu"]));
    assert!(!text.contains("Fake GPU"), "{text}");
    let (text, _) = succeeds(attend("vc16").env("VCA_BACKEND", "cpu"));
    assert!(!text.contains("Fake GPU"), "{text}");
}

#[test]
fn a_gpu_or_driver_that_is_refused_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let input = input(&folder, DType::Bf16);
    for (defect, words) in [
        ("no-device", "CUDA_ERROR_NO_DEVICE"),
        ("ampere", "compute capability 8.0"),
        ("old-driver", "the driver (CUDA 11.8) is too old"),
    ] {
        let compare = || {
            let mut command = vca(defect);
            command.arg("compare").arg(&input).args(["--recipe", "vc16"]);
            command
        };
        let (out, err) = succeeds(&mut compare());
        assert_eq!(err.lines().count(), 1, "{defect}: {err}");
        assert!(err.starts_with("note: ") && err.contains(words), "{defect}: {err}");
        assert!(out.contains("cpu ("), "{defect}: {out}");
        let (_, err) = succeeds(compare().args(["--backend", "cpu"]));
        assert_eq!(err, "", "{defect}");
        fails(compare().args(["--backend", "cuda"]), 1, &[words]);

        let (out, _) = succeeds(vca(defect).arg("doctor"));
        assert!(out.split("What is missing").nth(1).unwrap().contains(words), "{defect}: {out}");
    }
    fails(
        vca("").arg("compare").arg(&input).args(["--backend", "cuda", "--device", "3"]),
        1,
        &["GPU 3", "CUDA_ERROR_INVALID_DEVICE"],
    );
}

#[test]
fn doctor_reads_the_kernels_back() {
    let (out, _) = succeeds(vca("").args(["doctor", "--json"]));
    let report: Value = serde_json::from_str(&out).unwrap();
    let cuda = &report["cuda"];
    assert_eq!((&report["backend"], &cuda["driver_cuda"]), (&"cuda".into(), &"13.0".into()));
    assert_eq!(cuda["gpus"][0]["name"], "Fake GPU");
    assert_eq!(cuda["gpus"][0]["compute_capability"], "9.0");
    let kernels = cuda["loaded"]["kernels"].as_array().unwrap();
    let hopper = cuda["embedded"].as_array().unwrap().iter().find(|image| image["arch"] == "sm_90a").unwrap();
    assert_eq!(kernels.len() as u64, hopper["kernels"].as_u64().unwrap());
    assert_eq!((&kernels[0]["registers"], &kernels[0]["local_bytes"]), (&168.into(), &0.into()));
    assert_eq!(report["missing"], serde_json::json!([]));

    let (out, _) = succeeds(vca("").arg("doctor"));
    assert!(out.contains("serves CUDA 13.0") && out.contains("0: Fake GPU"), "{out}");
    assert!(out.contains("attention_sm90_f16_expcast_smooth"), "{out}");
    let (out, _) = succeeds(vca("spills").arg("doctor"));
    assert!(
        out.split("What is missing").nth(1).unwrap().contains("attention_sm90_f16_expcast_smooth"),
        "{out}"
    );
}

#[test]
fn each_gpu_has_its_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let input = input(&folder, DType::Bf16);
    for (gpu, capability, arch, attention) in [
        ("", "9.0", "sm_90a", "attention_sm90_f16_expcast_smooth"),
        ("", "9.0", "sm_90a", "attention_sm90_i8_expcast_smooth"),
        ("ada", "8.9", "sm_89", "attention_mma_i8_expcast_smooth"),
        ("rtx-blackwell", "12.0", "sm_120a", "attention_mma_i8_expcast_smooth"),
        ("b200", "10.0", "sm_100a", "attention_sm100_i8_expcast_smooth"),
        ("b300", "10.3", "sm_103a", "attention_sm100_f16_exp2_plain"),
        // In no row: the warp-level kernels serve what comes.
        ("later", "13.0", "sm_89", "attention_mma_f16_exp2_plain"),
    ] {
        let (out, _) = succeeds(vca(gpu).args(["doctor", "--json"]));
        let report: Value = serde_json::from_str(&out).unwrap();
        let cuda = &report["cuda"];
        assert_eq!(cuda["gpus"][0]["compute_capability"], capability);
        let names: Vec<_> =
            cuda["loaded"]["kernels"].as_array().unwrap().iter().map(|k| &k["name"]).collect();
        assert!(names.iter().any(|name| **name == attention), "{gpu}: {names:?}");
        let rows = cuda["dispatch"].as_array().unwrap();
        let here: Vec<_> = rows.iter().filter(|row| row["runs_here"] == true).collect();
        // All take NVFP4 from another family, unless they are datacenter Blackwell.
        let modules: &[&str] = match gpu {
            "" => &["sm_90a", "sm_90a"],
            "ada" => &["sm_89", "sm_89"],
            "rtx-blackwell" => &["sm_120a", "sm_120a"],
            "later" => &[],
            _ => &[arch],
        };
        let archs: Vec<_> = here.iter().map(|row| row["arch"].as_str().unwrap()).collect();
        assert_eq!(archs, modules, "{gpu}");
        for row in here {
            assert_eq!(row["default_recipe"], "vc16-expcast");
            let untested = row["state"] == "logic emulated, instruction text assembled only";
            assert_eq!(untested, !gpu.is_empty(), "{gpu}: {row}");
        }
        // There are no INT8 products on B300.
        for recipe in ["vc8", "vc8-expcast", "vc8-fp8qk", "vc16", "vc16-expcast+demean=off"] {
            let mut attend = vca(gpu);
            attend.arg("attend").arg(&input).arg("-o").arg(folder.path().join("out.safetensors"));
            attend.args(["--recipe", recipe, "--backend", "cuda"]);
            if gpu == "b300" && ["vc8", "vc8-expcast"].contains(&recipe) {
                fails(&mut attend, 2, &[recipe, "GPU kernels do not cover", "f16 or e4m3-head"]);
            } else {
                assert!(succeeds(&mut attend).0.contains("on Fake GPU"), "{gpu}: {recipe}");
            }
        }
    }
    let (out, _) = succeeds(vca("ada").arg("doctor"));
    let rows = out.split("Which GPU runs what").nth(1).unwrap();
    assert!(rows.contains("L40S, RTX 4090 (compute capability 8.9): runs here; logic emulated"), "{out}");
    assert!(rows.contains("A100, RTX 3090 (compute capability 8.0, 8.6, 8.7): not supported"), "{out}");
}

#[test]
fn bench_prints_stages_floors_and_the_average_step() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("out.json");
    let (out, err) = succeeds(
        vca("")
            .args(["bench", "--shape", "1,2,512,128", "--runs", "3", "--promote", "4", "--json"])
            .arg(&json),
    );
    assert_eq!(err, "");
    for recipe in ["vc16-expcast", "vc8-fp8qk", "vc16"] {
        assert!(
            out.lines().any(|line| line.trim_start().starts_with(recipe) && line.contains("floor")),
            "{out}"
        );
    }
    assert!(out.contains("sums to f32 every 4 key blocks"), "{out}");
    let json = read_json(&json);
    let call = &json["calls"][0];
    assert_eq!((&call["runs"], &call["tokens"], &call["promote"]), (&3.into(), &512.into(), &4.into()));
    let median = |name: &str| {
        let stages = call["stages"].as_array().unwrap();
        stages.iter().find(|s| s["stage"] == name).unwrap()["median_ms"].as_f64().unwrap()
    };
    // The faked clock: a millisecond a stage.
    assert_eq!([median("group, cold"), median("prepare Q, K, V"), median("attention")], [1.0, 3.0, 1.0]);
    assert_eq!((median("whole call, cold"), median("whole call, order reused")), (5.0, 1.0));
    approx::assert_relative_eq!(median("average of 40 steps"), 4.0 + 3.0 / 40.0, max_relative = 1e-6);

    let (out, _) =
        succeeds(vca("").args(["bench", "--shape", "1,1,512,64", "--lengths", "256,1000", "--runs", "1"]));
    assert!(out.contains(" 256 ") && out.contains(" 1,000 ") && !out.contains("ratio"), "{out}");
    fails(vca("").args(["bench", "--recipe", "sage3"]), 2, &["`sage3`", "GPU kernels do not cover"]);
}

#[test]
fn bench_takes_the_values_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let input = input(&folder, DType::F16);
    let bench = |shape: &str| {
        let mut command = vca("");
        command.args(["bench", "--shape", shape, "--runs", "1", "--recipe", "vc16", "--data"]).arg(&input);
        command
    };
    let (out, _) = succeeds(&mut bench("1,3,400,64"));
    assert!(out.contains("values of") && out.contains("input.safetensors"), "{out}");
    fails(&mut bench("1,3,400,128"), 2, &["head_dim 128", "given 64"]);
    fails(bench("1,3,400,64").arg("--json").arg(&input), 2, &["is the input"]);
}
