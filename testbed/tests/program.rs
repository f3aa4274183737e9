//! The program from outside.

use std::fs::{self, File};

use assert_cmd::Command;
use predicates::prelude::*;

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
        ]);
        command.arg("-o").arg(&output);
        command
    };
    let table = || predicate::str::contains("vc8@refresh=2").and(predicate::str::contains("PSNR dB"));
    run().assert().success().stdout(table());
    let clips = output.join("prompt_009_steps_1");
    for name in ["exact.gif", "vc8_refresh=2.gif"] {
        let mut gif = gif::Decoder::new(File::open(clips.join(name)).unwrap()).unwrap();
        assert_eq!((gif.width(), gif.height()), (192, 192), "{name}");
        let mut frames = 0;
        while gif.read_next_frame().unwrap().is_some() {
            frames += 1;
        }
        assert_eq!(frames, 16, "{name}");
    }
    let sheet = png::Decoder::new(std::io::BufReader::new(File::open(clips.join("sheet.png")).unwrap()));
    let sheet = sheet.read_info().unwrap();
    assert_eq!((sheet.info().width, sheet.info().height), (8 * 194, 2 * 218));
    let line: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(output.join("clips.jsonl")).unwrap()).unwrap();
    assert_eq!((line["row"].as_str(), line["prompt"].as_u64()), (Some("vc8@refresh=2"), Some(9)));
    let psnr = line["psnr_db"].as_f64().unwrap();
    assert!((25.0..90.0).contains(&psnr), "{psnr}");
    assert_eq!(line["grouped"], 8, "every layer once");

    let before = fs::metadata(clips.join("exact.gif")).unwrap().modified().unwrap();
    run().assert().success().stdout(table());
    assert_eq!(fs::metadata(clips.join("exact.gif")).unwrap().modified().unwrap(), before);

    let plot = folder.path().join("plot.png");
    testbed()
        .args(["table", "--markdown", "--against", "vc8@refresh=2", "--plot"])
        .args([&plot, &output])
        .assert()
        .success()
        .stdout(predicate::str::contains("| `vc8@refresh=2` | 1 | 1 |"));
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
    ] {
        testbed().args(arguments).assert().failure().stderr(predicate::str::contains(told));
    }
}
