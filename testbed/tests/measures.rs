//! Distances between clips, statistics over prompts, rows as text.

use candle_core::{Device, Tensor};
use vc_attention::Error;
use vc_attention::schedule::{Demeaning, Window};
use vc_testbed::clip::{Distance, EQUAL_DB, distance};
use vc_testbed::picture;
use vc_testbed::prompt::Prompt;
use vc_testbed::record::{Entry, Record, Setting, read};
use vc_testbed::row::Row;
use vc_testbed::statistics::{FEWEST, Mean, Summary};

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
    let zeros = |shape: (usize, usize, usize, usize)| {
        Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap()
    };
    assert!(distance(&a, &zeros((3, 2, 32, 32))).is_err());
    let folder = tempfile::tempdir().unwrap();
    for none in [(3, 1, 10, 32), (3, 1, 32, 10), (3, 0, 32, 32), (0, 1, 32, 32), (3, 1, 0, 0)] {
        let error = distance(&zeros(none), &zeros(none)).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Error::Tensor { tensor: "clip", .. })), "{error}");
        let drawn = picture::animation(&folder.path().join("none.gif"), &zeros(none));
        assert_eq!(drawn.is_err(), none.0 * none.1 * none.2 * none.3 == 0, "{none:?}");
    }
    assert_eq!(distance(&zeros((3, 1, 11, 11)), &zeros((3, 1, 11, 11))).unwrap().psnr_db, EQUAL_DB);
}

fn setting(row: &str) -> Setting {
    Setting { row: row.into(), steps: 8, guidance: 1.5, backend: "cpu".into() }
}

fn entry(row: &str, prompt: usize, psnr_db: f64) -> Entry {
    Entry {
        setting: setting(row),
        prompt,
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
    assert_eq!(all.iter().map(|s| s.setting.row.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let (a, b) = (&all[0], &all[1]);
    let psnr = a.psnr();
    let [low, high] = psnr.interval.unwrap();
    assert!(low < psnr.mean && psnr.mean < high && high - low > 1.0, "{psnr:?}");
    let expected = (0..prompts).map(db).sum::<f64>() / prompts as f64;
    assert!((psnr.mean - expected).abs() < 1e-12);
    assert_eq!(a.lowest_psnr(), 50.0);
    let (difference, count) = b.psnr_over(a).unwrap();
    assert_eq!(count, prompts);
    let [low, high] = difference.interval.unwrap();
    assert!([difference.mean, low, high].iter().all(|d| (d - 1.0).abs() < 1e-9));
    // The interval of a mean of n normal values is about 2 x 1.96 deviations over sqrt(n) wide.
    let values: Vec<f64> = (0..100).map(|i| f64::from(i * 37 % 100) / 100.0).collect();
    let mean = Mean::of(&values);
    let wide = 2.0 * 1.96 * 0.2887 / 10.0;
    let [low, high] = mean.interval.unwrap();
    assert!(((high - low) / wide - 1.0).abs() < 0.1, "{mean:?}");
    assert_eq!(Mean::of(&values), mean, "the same seed, the same interval");
    // Of a few prompts there is a mean and nothing more.
    assert_eq!(Mean::of(&values[..FEWEST - 1]).interval, None);
    assert!(Mean::of(&values[..FEWEST]).interval.is_some());
    assert_eq!(Mean::of(&[7.0]).mean, 7.0);
    assert!(Mean::of(&[]).mean.is_nan());
}

#[test]
fn other_settings_are_other_rows_and_the_last_entry_counts() {
    let other = |setting| Entry { setting, ..entry("a", 0, 40.0) };
    let others = [
        other(Setting { steps: 40, ..setting("a") }),
        other(Setting { guidance: 1.0, ..setting("a") }),
        other(Setting { backend: "cuda".into(), ..setting("a") }),
    ];
    let entries = [&[entry("a", 0, 1.0)], &others[..], &[entry("a", 0, 2.0)]].concat();
    let all = Summary::all(&entries);
    assert_eq!(all.len(), 4);
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
    assert_eq!(read(&path).unwrap().entries, [entry("a", 0, 1.25), entry("b", 3, 2.5)]);
    assert_eq!(record.find(&setting("a"), 0), Some(&entry("a", 0, 1.25)));
    for other in [
        Setting { steps: 40, ..setting("a") },
        Setting { guidance: 1.0, ..setting("a") },
        Setting { backend: "cuda".into(), ..setting("a") },
        setting("b"),
    ] {
        assert_eq!(record.find(&other, 0), None, "{other:?}");
    }
    std::fs::write(&path, "{}\n").unwrap();
    assert!(Record::open(&path).unwrap_err().to_string().contains("line 1"));
}

/// Whatever a run that was killed left of the last line, the next one goes on behind the lines before.
#[test]
fn a_half_written_last_line_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clips.jsonl");
    let mut record = Record::open(&path).unwrap();
    record.add(entry("a", 0, 1.25)).unwrap();
    record.add(entry("b", 3, 2.5)).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let first = whole.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    for end in first + 1..whole.len() {
        std::fs::write(&path, &whole[..end]).unwrap();
        // Only the end of the line is missing: the entry is there.
        let complete = end == whole.len() - 1;
        assert_eq!(read(&path).unwrap().broken, (!complete).then_some(2), "{end}");
        let mut record = Record::open(&path).unwrap();
        assert_eq!(
            (record.broken(), record.entries().len()),
            ((!complete).then_some(2), 1 + usize::from(complete))
        );
        record.add(entry("c", 1, 9.0)).unwrap();
        let found = read(&path).unwrap();
        assert_eq!((found.broken, found.entries.len()), (None, 2 + usize::from(complete)), "{end}");
        assert_eq!(found.entries.last(), Some(&entry("c", 1, 9.0)));
    }
}

/// Lines from before there was a second backend.
#[test]
fn records_without_a_backend_are_the_cpus() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clips.jsonl");
    let line = serde_json::to_string(&entry("a", 0, 1.25)).unwrap();
    let old = line.replace(r#""backend":"cpu","#, "");
    assert_ne!(line, old);
    std::fs::write(&path, old + "\n").unwrap();
    assert_eq!(read(&path).unwrap().entries, [entry("a", 0, 1.25)]);
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
fn rows_reach_no_further_than_clip_and_model() {
    let fits = |row: &str| row.parse::<Row>().unwrap().fits(8, 4);
    for row in ["vc16", "vc16@steps=0-7:vc8@layers=3:vc8"] {
        fits(row).unwrap();
    }
    for (row, of) in [
        ("vc16@steps=0-8:vc8", "steps"),
        ("vc16@steps=9:vc8", "steps"),
        ("vc16@steps=0:vc8@layers=2-4:vc8", "layers"),
    ] {
        let error = fits(row).unwrap_err();
        assert!(matches!(&error, Error::Option { option, .. } if *option == of), "{error}");
        assert!(error.to_string().contains(row), "{error}");
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
