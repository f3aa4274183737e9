//! The program from outside.

use std::fs::{self, File};

use assert_cmd::Command;
use candle_core::Device;
use predicates::prelude::*;
use vc_testbed::bundle::Bundle;

fn testbed() -> Command {
    Command::cargo_bin("vc-testbed").unwrap()
}

/// One step without guidance: what comes out, and that nothing is made twice.
#[test]
fn generate_writes_pictures_and_measurements() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("clips");
    let run = || {
        let mut command = testbed();
        command.args([
            "generate",
            "--recipe",
            "vc8@refresh=2",
            "--prompt",
            "9",
            "--steps",
            "1",
            "--guidance",
            "1",
            "--backend",
            "cpu",
        ]);
        command.arg("-o").arg(&output);
        command
    };
    let table = || predicate::str::contains("vc8@refresh=2").and(predicate::str::contains("PSNR dB"));
    run().assert().success().stdout(table());
    let clips = output.join("prompt_009_steps_1_guidance_1");
    for name in ["exact.gif", "vc8_refresh=2.cpu.gif"] {
        let mut gif = gif::Decoder::new(File::open(clips.join(name)).unwrap()).unwrap();
        assert_eq!((gif.width(), gif.height()), (192, 192), "{name}");
        let mut frames = 0;
        while gif.read_next_frame().unwrap().is_some() {
            frames += 1;
        }
        assert_eq!(frames, 16, "{name}");
    }
    let sheet = || {
        let sheet = png::Decoder::new(std::io::BufReader::new(File::open(clips.join("sheet.png")).unwrap()));
        let sheet = sheet.read_info().unwrap();
        (sheet.info().width, sheet.info().height)
    };
    assert_eq!(sheet(), (8 * 194, 2 * 218));
    let line: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(output.join("clips.jsonl")).unwrap()).unwrap();
    assert_eq!((line["row"].as_str(), line["prompt"].as_u64()), (Some("vc8@refresh=2"), Some(9)));
    assert_eq!(line["backend"], "cpu");
    let psnr = line["psnr_db"].as_f64().unwrap();
    assert!((25.0..90.0).contains(&psnr), "{psnr}");
    assert_eq!(line["grouped"], 8, "every layer once");

    let before = fs::metadata(clips.join("exact.gif")).unwrap().modified().unwrap();
    run().assert().success().stdout(table()).stderr("");
    assert_eq!(fs::metadata(clips.join("exact.gif")).unwrap().modified().unwrap(), before);

    // As a run leaves it that is killed while it writes; then it goes on, with another row.
    let record = output.join("clips.jsonl");
    let whole = fs::read_to_string(&record).unwrap();
    fs::write(&record, format!("{whole}{}", &whole[..40])).unwrap();
    let reference = clips.join("exact.safetensors");
    let exact = fs::read(&reference).unwrap();
    fs::write(&reference, &exact[..exact.len() / 2]).unwrap();
    run()
        .args(["--recipe", "vc8-fp8qk+order=sequence"])
        .assert()
        .success()
        .stdout(table().and(predicate::str::contains("vc8-fp8qk+order=sequence")))
        .stderr(predicate::str::contains("clips.jsonl, line 2 was only half written"))
        .stderr(predicate::str::contains("exact.safetensors is made again"));
    assert_eq!(fs::read(&reference).unwrap(), exact, "made again, and the same");
    assert_eq!(sheet(), (8 * 194, 3 * 218), "the old row and the new one");
    let lines = fs::read_to_string(&record).unwrap();
    assert!(lines.starts_with(&whole) && lines.lines().count() == 2, "{lines}");

    let plot = folder.path().join("plot.png");
    testbed()
        .args(["table", "--markdown", "--against", "vc8@refresh=2", "--plot"])
        .args([&plot, &output])
        .assert()
        .success()
        .stdout(predicate::str::contains("95% (n >= 5)"))
        .stdout(predicate::str::contains(format!("| `vc8@refresh=2` | 1 | 1 | cpu | 1 | {psnr:.2} | - |")))
        .stdout(predicate::str::contains("| +0.00 (n = 1) |"));
    assert!(fs::metadata(&plot).unwrap().len() > 1000);
}

#[test]
fn wrong_usage_is_said_before_any_work() {
    for (arguments, told) in [
        (&["generate"][..], "--output"),
        (&["generate", "-o", "x", "--recipe", "vc99"], "vc99"),
        (&["generate", "-o", "x", "--recipe", "vc16@window=late"], "first:N"),
        (&["generate", "-o", "x", "--prompt", "3-1"], "from low to high"),
        (&["generate", "-o", "x", "--prompt", "one"], "a number"),
        (&["generate", "-o", "x", "--steps", "0"], "1..=1000"),
        (&["generate", "-o", "x", "--guidance", "nan"], "guidance"),
        (&["table"], "RECORDS"),
        (&["table", "/nowhere/clips.jsonl"], "/nowhere/clips.jsonl"),
        (&["check", "--steps", "41"], "1 to 40"),
        (&["generate", "-o", "x", "--steps", "8", "--recipe", "vc16@steps=0-8:vc8"], "steps below 8"),
        (&["generate", "-o", "x", "--recipe", "vc16@layers=8:vc8"], "layers below 8"),
    ] {
        testbed().args(arguments).assert().failure().stderr(predicate::str::contains(told));
    }
}

/// A short check says how far it went; one whose reference lacks something that is asked for fails before any work.
#[test]
fn check_says_what_it_checked() {
    testbed()
        .args(["check", "--steps", "1"])
        .assert()
        .success()
        .stdout(
            predicate::str::contains("exact@io=f32, step 0").and(predicate::str::contains("exact, step 0")),
        )
        .stdout(predicate::str::contains("behind steps [0]; no clip, which takes all 40 steps"));
    let folder = tempfile::tempdir().unwrap();
    let data = Bundle::folder();
    fs::copy(data.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let all = candle_core::safetensors::load(data.join("reference.safetensors"), &Device::Cpu).unwrap();
    for (missing, steps) in
        [("bf16_x.0", "1"), ("noise.0", "1"), ("bf16_x.10", "11"), ("fp32.0", "40"), ("bf16.1", "40")]
    {
        let mut some = all.clone();
        some.remove(missing).unwrap();
        candle_core::safetensors::save(&some, folder.path().join("reference.safetensors")).unwrap();
        let mut check = testbed();
        check.args(["check", "--steps", steps, "--data"]).arg(folder.path());
        check.assert().failure().stderr(predicate::str::contains(format!("no `{missing}`"))).stdout("");
    }
}
