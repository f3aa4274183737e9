//! The denoising schedule: which calls group, what is kept between them, and that what comes back is what was kept.

mod common;

use common::*;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::grouping::{BLOCK, GroupingConfig, KeptOrder, TokenOrder, group, group_from, stats};
use vc_attention::schedule::{Counts, Demeaning, Schedule, ScheduleConfig, Site, Source, Window};
use vc_attention::{DType, Error, Layout, Problem, Recipe, run, run_on_order};

const CASE: Case = Case::new([1, 2, 2], [40, 300], 16);

fn schedule(config: ScheduleConfig) -> Schedule<Cpu> {
    Schedule::new(config, recipe("vc16-expcast")).expect("a valid schedule")
}

fn layer(layer: u32) -> Site {
    Site { layer, ..Site::default() }
}

/// What every step of a clip does at one site.
fn sources(schedule: &mut Schedule<Cpu>, site: Site, steps: impl Iterator<Item = usize>) -> Vec<Source> {
    let tensors = CASE.outliers(1).f32();
    let call = |step| schedule.attend(&Cpu, step, site, &tensors.problem(), F32_LSE).expect("a valid call");
    steps.map(call).map(|done| done.decision.source).collect()
}

/// The steps that grouped, cold or warm.
fn grouped(sources: &[Source]) -> Vec<usize> {
    let fresh = |s: &Source| matches!(s, Source::Cold | Source::Warm | Source::Early);
    sources.iter().enumerate().filter(|(_, s)| fresh(s)).map(|(step, _)| step).collect()
}

#[test]
fn the_paper_groups_every_fourth_step_of_the_first_quarter() {
    for (steps, expected) in [
        (1, vec![0]),
        (4, vec![0]),
        (8, vec![0]),
        (17, vec![0, 4]),
        (40, vec![0, 4, 8]),
        (50, vec![0, 4, 8, 12]),
    ] {
        let mut schedule = schedule(ScheduleConfig::paper(steps));
        let sources = sources(&mut schedule, layer(0), 0..steps);
        assert_eq!(grouped(&sources), expected, "{steps} steps");
        assert_eq!(sources[0], Source::Cold);
        assert!(expected[1..].iter().all(|&step| sources[step] == Source::Warm), "{sources:?}");
        let (groupings, reused) = (expected.len(), steps - expected.len());
        let counts = Counts { cold: 1, warm: groupings - 1, reused, ..Counts::default() };
        assert_eq!(schedule.counts(), counts);
    }
}

#[test]
fn windows_and_refreshes_are_the_callers() {
    let paper = ScheduleConfig::paper(16);
    for (config, expected) in [
        (ScheduleConfig { refresh: 1, ..paper }, (0..4).collect::<Vec<_>>()),
        (ScheduleConfig { refresh: 2, ..paper }, vec![0, 2]),
        (ScheduleConfig { window: Window::All, ..paper }, vec![0, 4, 8, 12]),
        (ScheduleConfig { window: Window::All, refresh: 1, ..paper }, (0..16).collect()),
        (ScheduleConfig { window: Window::Every(4), ..paper }, vec![0, 4, 8, 12]),
        (ScheduleConfig { window: Window::Every(6), ..paper }, vec![0, 6, 12]),
        (ScheduleConfig { window: Window::Every(3), ..paper }, vec![0, 3, 6, 9, 12, 15]),
        (ScheduleConfig { window: Window::Every(4), refresh: 9, ..paper }, vec![0, 4, 8, 12]),
        (ScheduleConfig { window: Window::First(9), refresh: 3, ..paper }, vec![0, 3, 6]),
    ] {
        assert_eq!(grouped(&sources(&mut schedule(config), layer(0), 0..16)), expected, "{config:?}");
    }
    let cold = ScheduleConfig { warm: false, window: Window::All, ..paper };
    let sources = sources(&mut schedule(cold), layer(0), 0..16);
    assert!(grouped(&sources).iter().all(|&step| sources[step] == Source::Cold), "{sources:?}");
}

/// A sampler that skips steps (caching) still refreshes at the first step that is due.
#[test]
fn skipped_steps_do_not_lose_a_refresh() {
    let steps = [0, 3, 5, 6, 9, 11];
    let found = sources(&mut schedule(ScheduleConfig::paper(40)), layer(0), steps.into_iter());
    assert_eq!(
        found,
        [Source::Cold, Source::Reused, Source::Warm, Source::Reused, Source::Warm, Source::Reused]
    );
}

#[test]
fn sites_do_not_share_and_a_late_model_groups_once() {
    let mut schedule = schedule(ScheduleConfig::paper(40));
    let sites = [
        layer(0),
        layer(1),
        Site { branch: 1, ..layer(0) },
        Site { model: 1, ..layer(0) }, // an expert that takes over
    ];
    for site in &sites[..3] {
        assert_eq!(sources(&mut schedule, *site, 0..2), [Source::Cold, Source::Reused], "{site:?}");
    }
    let late = sources(&mut schedule, sites[3], 25..40);
    assert_eq!(grouped(&late), [0], "once, behind the window: {late:?}");
    let bytes = schedule.bytes();
    assert!(bytes >= 4 * 2 * 300, "a byte a token: {bytes}");
    schedule.reset();
    assert_eq!((schedule.bytes(), schedule.counts()), (0, Counts::default()));
    assert_eq!(sources(&mut schedule, layer(0), 0..1), [Source::Cold]);
}

/// Without a reset a site that is called at an earlier step than before is in another clip, which owes nothing to the last
/// one, whenever that grouped last and however far it came.
#[test]
fn another_clip_on_the_same_schedule_groups_anew() {
    for (steps, of_them) in [(40, 40), (8, 8), (8, 2), (40, 10)] {
        let mut schedule = schedule(ScheduleConfig::paper(steps));
        sources(&mut schedule, layer(0), 0..of_them);
        let next = sources(&mut schedule, layer(0), 0..3);
        assert_eq!(next, [Source::Cold, Source::Reused, Source::Reused], "{of_them} of {steps} steps");
        assert_eq!(schedule.counts().cold, 2);
    }
    // A step again (a solver of second order) is the same clip; so a clip of one step needs a reset before the next.
    let mut schedule = schedule(ScheduleConfig::paper(40));
    let again = sources(&mut schedule, layer(0), [0, 0, 4, 4].into_iter());
    assert_eq!(again, [Source::Cold, Source::Reused, Source::Warm, Source::Reused]);
}

#[test]
fn other_lengths_or_heads_group_anew() {
    let mut schedule = schedule(ScheduleConfig::paper(40));
    let mut call = |case: Case, lens: Option<&[usize]>, step| {
        let tensors = case.outliers(2).f32();
        let problem = Problem { kv_lens: lens, ..tensors.problem() };
        let done = schedule.attend(&Cpu, step, layer(0), &problem, F32_LSE).expect("a valid call");
        assert_eq!(done.output.o.shape(), case.q_shape());
        done.decision.source
    };
    assert_eq!(call(CASE, None, 0), Source::Cold);
    assert_eq!(call(CASE, None, 1), Source::Reused);
    assert_eq!(call(CASE, Some(&[299]), 2), Source::Cold);
    assert_eq!(call(CASE, Some(&[299]), 3), Source::Reused);
    assert_eq!(call(CASE, Some(&[0]), 3), Source::Cold);
    assert_eq!(call(CASE, Some(&[0]), 3), Source::Reused, "no valid key, nothing to order");
    assert_eq!(call(Case { kv_tokens: 301, ..CASE }, None, 20), Source::Cold);
    assert_eq!(call(Case { kv_heads: 1, kv_tokens: 301, ..CASE }, None, 21), Source::Cold);
    assert_eq!(call(Case { batch: 2, kv_heads: 1, kv_tokens: 301, ..CASE }, None, 22), Source::Cold);
    // Queries may change freely: the order is of the keys.
    assert_eq!(
        call(Case { batch: 2, kv_heads: 1, kv_tokens: 301, q_tokens: 7, ..CASE }, None, 23),
        Source::Reused
    );
}

/// A reused order is the one that was made, bit for bit; so is the output.
#[test]
fn what_comes_back_is_what_was_kept() {
    for name in ["vc16-expcast", "vc8+order=rounded", "vc4+order=balanced", "vc8+k=300", "vc8+order=cube"] {
        let recipe = recipe(name);
        let case = Case::new([2, 2, 2], [30, 512], 32);
        let (first, second) = (case.outliers(3).f32(), case.outliers(4).f32());
        let grid = Some([2, 16, 16]);
        let (first, second) = (Problem { grid, ..first.problem() }, Problem { grid, ..second.problem() });
        let plan = vc_attention::Plan::new(&first, &recipe, F32_LSE).unwrap();
        let made = run(&Cpu, &plan, &first, None).unwrap();
        let kept = Cpu.keep(&made.order).unwrap();
        let restored = Cpu.restore(&plan, &second, &kept).unwrap();
        for (made, restored) in made.order.0.iter().zip(&restored.0) {
            assert_eq!((&made.order, &made.labels), (&restored.order, &restored.labels), "{name}");
        }
        let expected = run_on_order(&Cpu, &plan, &second, made.order).unwrap();

        let mut schedule = Schedule::new(ScheduleConfig::paper(8), recipe).unwrap();
        let one = schedule.attend(&Cpu, 0, layer(0), &first, F32_LSE).unwrap();
        let two = schedule.attend(&Cpu, 1, layer(0), &second, F32_LSE).unwrap();
        assert_eq!(o(&one.output), o(&made.output), "{name}");
        assert_eq!(o(&two.output), o(&expected.output), "{name}");
        assert_eq!(lse(&two.output), lse(&expected.output), "{name}");
    }
}

/// A refresh from labels starts at the means of the current values under them: one more iteration by hand.
#[test]
fn a_refresh_starts_from_the_means_under_the_labels() {
    let (case, dim) = (Case::new([1, 1, 1], [1, 1500], 24), 24);
    let (before, now) = (case.outliers(5).v, case.outliers(6).v);
    let config = |iterations| GroupingConfig {
        clusters: Some(12),
        iterations: Some(iterations),
        ..GroupingConfig::kmeans()
    };
    let old = group(&before, dim, &config(4), None, None).unwrap();
    let kept = KeptOrder::new(&old.labels, old.clusters).unwrap();
    let mut means = vec![0.0f32; 12 * dim];
    for cluster in 0..12u16 {
        let members: Vec<usize> = (0..1500).filter(|&t| old.labels[t] == cluster).collect();
        assert!(!members.is_empty());
        for c in 0..dim {
            let sum: f64 = members.iter().map(|t| f64::from(now[t * dim + c])).sum();
            means[usize::from(cluster) * dim + c] = (sum / members.len() as f64) as f32;
        }
    }
    let by_hand = group(&now, dim, &config(2), None, Some(&means)).unwrap();
    let refreshed = group_from(&now, dim, &config(2), &kept).unwrap();
    let differ = by_hand.labels.iter().zip(&refreshed.labels).filter(|(a, b)| a != b).count();
    assert!(differ <= 3, "{differ} of 1500 labels differ by the rounding of the means");
}

/// From labels a refresh is at least as good as from the old centroids, on values that drift.
#[test]
fn labels_start_a_refresh_as_well_as_centroids() {
    let (case, dim) = (Case::new([1, 1, 1], [1, 4096], 32), 32);
    let before = case.outliers(7).v;
    let now: Vec<f32> = before.iter().zip(case.normal(8).v).map(|(x, noise)| x + 0.3 * noise).collect();
    let cold = group(&before, dim, &GroupingConfig::kmeans(), None, None).unwrap();
    let share = |grouping: &vc_attention::grouping::Grouping| {
        stats::shares(&now, dim, &grouping.order, stats::MeanBits::Sixteen).per_block
    };
    let kept = KeptOrder::new(&cold.labels, cold.clusters).unwrap();
    let labels = share(&group_from(&now, dim, &GroupingConfig::kmeans(), &kept).unwrap());
    let centroids = share(&group(&now, dim, &GroupingConfig::kmeans(), None, Some(&cold.centroids)).unwrap());
    let stale = share(&kept.grouping());
    assert!(labels > 0.98 * centroids, "{labels} from labels, {centroids} from centroids");
    assert!(labels > stale, "{labels} refreshed, {stale} as kept");
}

#[test]
fn demeaning_stops_behind_the_window_where_asked() {
    let tensors = CASE.outliers(9).f32();
    let problem = tensors.problem();
    let config = ScheduleConfig { demeaning: Demeaning::InWindow, ..ScheduleConfig::paper(8) };
    let mut paper = schedule(config);
    let mut ours = schedule(ScheduleConfig::paper(8));
    for step in 0..8 {
        let [inside, always] = [&mut paper, &mut ours]
            .map(|s| s.attend(&Cpu, step, layer(0), &problem, F32_LSE).expect("a valid call"));
        assert_eq!(inside.decision.demean, step < 2);
        assert!(always.decision.demean);
        assert_eq!(inside.report.mean_share.is_some(), step < 2);
        assert!(always.report.mean_share.is_some());
        if step < 2 {
            assert_eq!(o(&inside.output), o(&always.output));
        } else {
            assert_ne!(o(&inside.output), o(&always.output));
        }
    }
    assert_eq!((paper.counts().plain, ours.counts().plain), (6, 0));
}

/// Values that move away from their clusters trigger a refresh; values that stay, or no detector, do not.
#[test]
fn drift_refreshes_early() {
    let case = Case::new([1, 1, 1], [20, 1024], 32);
    let (before, after) = (case.outliers(10).f32(), case.outliers(11).f32());
    let config = ScheduleConfig { drift: Some(0.8), ..ScheduleConfig::paper(40) };
    let run = |config, moves: bool, at: usize| {
        let mut schedule = schedule(config);
        let call = |step: usize| {
            let tensors = if moves && step >= at { &after } else { &before };
            schedule.attend(&Cpu, step, layer(0), &tensors.problem(), F32_LSE).expect("a valid call")
        };
        let sources: Vec<Source> = (0..20).map(call).map(|done| done.decision.source).collect();
        (grouped(&sources), schedule.counts().early)
    };
    assert_eq!(run(config, true, 13), (vec![0, 4, 8, 14], 1), "seen at 13, mended at 14");
    assert_eq!(run(config, true, 7), (vec![0, 4, 8], 0), "seen at 7, a refresh was due at 8 anyway");
    assert_eq!(run(config, false, 0), (vec![0, 4, 8], 0));
    assert_eq!(run(ScheduleConfig::paper(40), true, 13), (vec![0, 4, 8], 0));
}

#[test]
fn recipes_mixed_by_step_share_the_orders() {
    let tensors = CASE.outliers(12).f32();
    let problem = tensors.problem();
    let mut schedule = schedule(ScheduleConfig::paper(8));
    let fast = recipe("vc8-fp8qk");
    let mixed: Vec<_> = (0..8)
        .map(|step| {
            let recipe = if step < 3 { schedule.recipe().clone() } else { fast.clone() };
            schedule.attend_as(&recipe, &Cpu, step, layer(0), &problem, F32_LSE).expect("a valid call")
        })
        .collect();
    assert_eq!((schedule.counts().cold, schedule.counts().reused), (1, 7));
    assert_eq!(o(&mixed[0].output), o(&mixed[2].output));
    assert_ne!(o(&mixed[2].output), o(&mixed[3].output));
    let other = recipe("vc8+k=3");
    let error = schedule.attend_as(&other, &Cpu, 1, layer(0), &problem, F32_LSE);
    assert!(matches!(error, Err(Error::Recipe { .. })), "{error:?}");
}

#[test]
fn recipes_without_clusters_have_nothing_to_keep() {
    let tensors = CASE.outliers(13).f32();
    for name in ["sage2", "exact", "vc8+order=sequence"] {
        let mut schedule = Schedule::new(ScheduleConfig::paper(8), recipe(name)).unwrap();
        for step in 0..8 {
            let done = schedule.attend(&Cpu, step, layer(0), &tensors.problem(), F32_LSE).unwrap();
            assert_eq!(done.decision.source, Source::Fixed, "{name}");
        }
        assert_eq!((schedule.counts().fixed, schedule.bytes()), (8, 0), "{name}");
    }
}

/// Wan2.2: 40 layers x 40 heads x 75,600 tokens x 2 branches, under 300 MB.
#[test]
fn the_orders_of_wan_take_less_than_300_megabytes() {
    let tokens = 75_600;
    let clusters = vc_attention::grouping::default_clusters(tokens);
    let labels: Vec<u16> = (0..tokens).map(|t| (t * 7 % clusters) as u16).collect();
    let head = KeptOrder::new(&labels, clusters).unwrap();
    assert_eq!(head.labels(), labels);
    let heads = vec![head; 40];
    assert!(Cpu::kept_bytes(&heads) * 40 * 2 < 300_000_000, "{}", Cpu::kept_bytes(&heads) * 80);
    let wide = KeptOrder::new(&[511, 0, 256], 512).unwrap();
    assert_eq!((wide.labels(), wide.bytes(), wide.tokens()), (vec![511, 0, 256], 6, 3));
}

#[test]
fn what_does_not_fit_is_said_and_changes_nothing() {
    let paper = ScheduleConfig::paper(8);
    for (config, option) in [
        (ScheduleConfig { steps: 0, ..paper }, "steps"),
        (ScheduleConfig { refresh: 0, ..paper }, "refresh"),
        (ScheduleConfig { window: Window::First(0), ..paper }, "window"),
        (ScheduleConfig { window: Window::Every(0), ..paper }, "window"),
        (ScheduleConfig { drift: Some(f64::NAN), ..paper }, "drift"),
        (ScheduleConfig { drift: Some(1.5), ..paper }, "drift"),
    ] {
        let error = Schedule::<Cpu>::new(config, recipe("vc8")).map(|_| ());
        assert!(matches!(&error, Err(Error::Option { option: o, .. }) if *o == option), "{error:?}");
    }
    let broken = Recipe { qk: vc_attention::recipe::QkFormat::Int8, ..recipe("vc16") };
    assert!(matches!(Schedule::<Cpu>::new(paper, broken), Err(Error::Recipe { .. })));

    let mut schedule = schedule(paper);
    let tensors = CASE.outliers(14).f32();
    schedule.attend(&Cpu, 0, layer(0), &tensors.problem(), F32_LSE).unwrap();
    let before = (schedule.counts(), schedule.bytes());
    let late = schedule.attend(&Cpu, 8, layer(0), &tensors.problem(), F32_LSE);
    assert!(matches!(late, Err(Error::Option { option: "step", .. })), "{late:?}");
    let lens = schedule.attend(
        &Cpu,
        1,
        layer(0),
        &Problem { kv_lens: Some(&[1, 2, 3]), ..tensors.problem() },
        F32_LSE,
    );
    assert!(matches!(lens, Err(Error::Tensor { tensor: "kv_lens", .. })), "{lens:?}");
    let mut poisoned = CASE.outliers(14);
    poisoned.v[5] = f32::NAN;
    let nan = schedule.attend(&Cpu, 4, layer(1), &poisoned.f32().problem(), F32_LSE);
    assert!(matches!(nan, Err(Error::NonFinite { tensor: "v", .. })), "{nan:?}");
    assert_eq!((schedule.counts(), schedule.bytes()), before);

    for (labels, clusters) in [(&[0u16, 3][..], 3), (&[0][..], 0), (&[][..], (1 << 16) + 1)] {
        let error = KeptOrder::new(labels, clusters);
        assert!(matches!(error, Err(Error::Tensor { tensor: "labels", .. })), "{error:?}");
    }
    let kept = KeptOrder::new(&[0, 1, 0], 2).unwrap();
    for order in [TokenOrder::Sequence, TokenOrder::Cube, TokenOrder::Balanced] {
        let config = GroupingConfig { order, ..GroupingConfig::sequence() };
        let error = group_from(&[0.0; 6], 2, &config, &kept);
        assert!(matches!(error, Err(Error::Option { .. })), "{order:?}: {error:?}");
    }
    let misfit = group_from(&[0.0; 8], 2, &GroupingConfig::kmeans(), &kept);
    assert!(matches!(misfit, Err(Error::Tensor { tensor: "v", .. })), "{misfit:?}");
}

/// Two samplers in one process, interleaved, do what each does alone.
#[test]
fn samplers_do_not_disturb_each_other() {
    let tensors = [CASE.outliers(15), CASE.outliers(16)].map(|data| data.tensors(DType::Bf16, Layout::Bshd));
    let alone = |i: usize| {
        let mut schedule = schedule(ScheduleConfig::paper(8));
        (0..8)
            .map(|step| {
                o(&schedule.attend(&Cpu, step, layer(0), &tensors[i].problem(), F32_LSE).unwrap().output)
            })
            .collect::<Vec<_>>()
    };
    let expected = [alone(0), alone(1)];
    let mut both = [schedule(ScheduleConfig::paper(8)), schedule(ScheduleConfig::paper(8))];
    let [first, second] = &expected;
    for (step, expected) in first.iter().zip(second).enumerate() {
        let outputs = [0, 1].map(|i| {
            let done = both[i].attend(&Cpu, step, layer(0), &tensors[i].problem(), F32_LSE).unwrap();
            o(&done.output)
        });
        assert_eq!([&outputs[0], &outputs[1]], [expected.0, expected.1]);
    }
}

/// Cube and sequence orders do not come from clusters; all others do.
#[test]
fn orders_know_whether_they_come_from_clusters() {
    let all = [
        (TokenOrder::Sequence, false),
        (TokenOrder::Cube, false),
        (TokenOrder::KMeans, true),
        (TokenOrder::Rounded, true),
        (TokenOrder::Balanced, true),
    ];
    let v = CASE.normal(17).v;
    let head = &v[..BLOCK * 2 * 16];
    for (order, clusters) in all {
        assert_eq!(order.clusters(), clusters);
        let config = GroupingConfig { order, ..GroupingConfig::sequence() };
        let grouping = group(head, 16, &config, Some([2, 8, 16]), None).unwrap();
        assert_eq!(!grouping.labels.is_empty(), clusters, "{order:?}");
    }
}
