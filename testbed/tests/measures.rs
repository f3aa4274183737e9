//! Distances between clips, statistics over prompts, rows as text.

use candle_core::{Device, Tensor};
use vc_attention::schedule::{Demeaning, Window};
use vc_testbed::clip::{Distance, EQUAL_DB, distance};
use vc_testbed::prompt::Prompt;
use vc_testbed::record::{Entry, Record, read};
use vc_testbed::row::Row;
use vc_testbed::statistics::{Mean, Summary};

/// A clip of one 32 x 32 frame with the same plane in all channels; values of the plane are in [0, 1].
fn plane(f: impl Fn(f64, f64) -> f64) -> Tensor {
    let value = |i: usize| (2.0 * f((i % 32) as f64, (i / 32 % 32) as f64) - 1.0) as f32;
    Tensor::from_vec((0..3 * 32 * 32).map(value).collect::<Vec<_>>(), (3, 1, 32, 32), &Device::Cpu).unwrap()
}

/// Of the two planes below, from NumPy.
const SSIM: f64 = 0.936_268_5;
const PSNR: f64 = 25.161_682;

/// Against an implementation in NumPy with a two-dimensional window.
#[test]
fn distances_are_those_of_the_definitions() {
    let a = plane(|x, y| 0.5 + 0.4 * (0.3 * x + 0.2 * y).sin());
    let b = plane(|x, y| 0.5 + 0.4 * (0.3 * x + 0.2 * y + 0.15).sin() + 0.05 * (1.1 * x - 0.7 * y).cos());
    let Distance { psnr_db, ssim } = distance(&a, &b).unwrap();
    assert!((ssim - SSIM).abs() < 1e-5, "{ssim}");
    assert!((psnr_db - PSNR).abs() < 1e-3, "{psnr_db}");
    let same = distance(&a, &a).unwrap();
    assert!((same.ssim - 1.0).abs() < 1e-9 && same.psnr_db == EQUAL_DB);
    // Values beyond the range are what a screen shows of them.
    let bright = plane(|_, _| 1.0);
    let brighter = plane(|_, _| 7.0);
    assert_eq!(distance(&bright, &brighter).unwrap().psnr_db, EQUAL_DB);
    let nan = plane(|_, _| f64::NAN);
    assert!(distance(&a, &nan).is_err());
    let longer = Tensor::zeros((3, 2, 32, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
    assert!(distance(&a, &longer).is_err());
}

fn entry(row: &str, prompt: usize, psnr_db: f64) -> Entry {
    Entry {
        row: row.into(),
        prompt,
        steps: 8,
        guidance: 1.5,
        distance: Distance { psnr_db, ssim: 0.99 },
        mean_share: Some(0.4),
        grouped: 16,
        early: 0,
        kept_bytes: 1,
        attention_s: 1.0,
        total_s: 2.0,
        device: "none".into(),
    }
}

#[test]
fn intervals_cover_and_pairs_cancel_what_prompts_share() {
    // Prompts differ by 10 dB, rows by 1 dB at every prompt.
    let prompts = 16;
    let db = |p: usize| 50.0 + (p * 7 % 16) as f64 / 1.6;
    let entries: Vec<Entry> =
        (0..prompts).flat_map(|p| [entry("a", p, db(p)), entry("b", p, db(p) + 1.0)]).collect();
    let all = Summary::all(&entries);
    assert_eq!(all.iter().map(|s| s.row.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let (a, b) = (&all[0], &all[1]);
    let psnr = a.psnr();
    assert!(psnr.low < psnr.mean && psnr.mean < psnr.high && psnr.high - psnr.low > 1.0, "{psnr:?}");
    let expected = (0..prompts).map(db).sum::<f64>() / prompts as f64;
    assert!((psnr.mean - expected).abs() < 1e-12);
    assert_eq!(a.lowest_psnr(), 50.0);
    let (difference, count) = b.psnr_over(a).unwrap();
    assert_eq!(count, prompts);
    assert!([difference.mean, difference.low, difference.high].iter().all(|d| (d - 1.0).abs() < 1e-9));
    // The interval of a mean of n normal values is about 2 x 1.96 deviations over sqrt(n) wide.
    let values: Vec<f64> = (0..100).map(|i| f64::from(i * 37 % 100) / 100.0).collect();
    let mean = Mean::of(&values);
    let wide = 2.0 * 1.96 * 0.2887 / 10.0;
    assert!(((mean.high - mean.low) / wide - 1.0).abs() < 0.1, "{mean:?}");
    assert_eq!(Mean::of(&values), mean, "the same seed, the same interval");
}

#[test]
fn other_steps_are_other_rows_and_the_last_entry_counts() {
    let mut longer = entry("a", 0, 40.0);
    longer.steps = 40;
    let all = Summary::all(&[entry("a", 0, 1.0), longer, entry("a", 0, 2.0)]);
    assert_eq!(all.len(), 2);
    assert_eq!(all[0].psnr().mean, 2.0);
    assert!(all[0].psnr_over(&Summary::all(&[entry("b", 1, 1.0)])[0]).is_none(), "no prompt in common");
}

#[test]
fn records_grow_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clips.jsonl");
    let mut record = Record::open(&path).unwrap();
    record.add(entry("a", 0, 1.25)).unwrap();
    drop(record);
    let mut record = Record::open(&path).unwrap();
    record.add(entry("b", 3, 2.5)).unwrap();
    assert_eq!(read(&path).unwrap(), [entry("a", 0, 1.25), entry("b", 3, 2.5)]);
    assert!(record.entries()[0].same("a", 0, 8, 1.5) && !record.entries()[0].same("a", 0, 40, 1.5));
    std::fs::write(&path, "{}\n").unwrap();
    assert!(Record::open(&path).unwrap_err().to_string().contains("line 1"));
}

#[test]
fn rows_say_what_they_are() {
    let row: Row = "vc8-fp8qk@steps=0-9:vc16-expcast@layers=7:vc16@window=every:4@refresh=2".parse().unwrap();
    assert_eq!(row.recipe_at(3, 0).name, "vc16-expcast");
    assert_eq!(row.recipe_at(10, 0).name, "vc8-fp8qk");
    assert_eq!(row.recipe_at(3, 7).name, "vc16", "the last key that covers both");
    let schedule = row.schedule(40);
    assert_eq!((schedule.window, schedule.refresh), (Window::Every(4), 2));
    let paper: Row = "vc16@demean=window@warm=off@drift=0.9@io=f32".parse().unwrap();
    let schedule = paper.schedule(50);
    assert_eq!(schedule.window, Window::First(13));
    assert_eq!((schedule.demeaning, schedule.warm, schedule.drift), (Demeaning::InWindow, false, Some(0.9)));
    assert!(!paper.narrow);
    for wrong in [
        "vc99",
        "vc16@",
        "vc16@window",
        "vc16@window=first:0",
        "vc16@window=last",
        "vc16@refresh=0",
        "vc16@refresh=x",
        "vc16@drift=2",
        "vc16@warm=maybe",
        "vc16@steps=3-1:vc8",
        "vc16@steps=0-3",
        "vc16@steps=0-3:sage2",
        "vc16@colour=red",
    ] {
        assert!(wrong.parse::<Row>().is_err(), "{wrong}");
    }
}

#[test]
fn prompts_beyond_the_stored_ones_are_of_their_number() {
    let stored = [Prompt::new(100, &[])];
    assert_eq!(Prompt::new(0, &stored), stored[0]);
    assert_eq!(Prompt::new(9, &stored), Prompt::new(9, &[]));
    let distinct: std::collections::HashSet<String> =
        (8..40).map(|i| Prompt::new(i, &[]).to_string()).collect();
    assert!(distinct.len() > 28, "{} of 32 prompts are distinct", distinct.len());
    for i in 0..200 {
        let factors = Prompt::new(i, &[]).factors();
        assert!(factors.iter().zip(Prompt::FACTORS).all(|(f, (_, count))| *f < count));
    }
}
