//! What holds for every attention kernel.
//!
//! Tolerances, of relative L2 errors over the whole output:
//!
//! - against f64: 1.05 times the CPU backend's own error plus 1e-4;
//! - against the CPU backend: 1e-6 (the order of f32 sums) where the two compute the same, 5e-4 where the kernel
//!   takes short cuts from the second tile on: with ExpCast of f16 scores it rescales between references rounded to f16,
//!   with means it keeps their row sums in f16 while rescaling;
//! - INT8 on Hopper takes a sum and its bias through one f32 multiply-add, which is up to 0.75 of a unit of the sum off: 5e-7
//!   of the row max in code units more against f64, 2e-3 against the CPU backend, LSE 4e-3 (1e-5 of a larger row max in code units) on average and of a row one code of ExpCast, or 5e-6 of the row max in code units;
//! - LSE: 1e-5 against the CPU backend (3 epsilon where that is more), 6e-3 with ExpCast of f16 scores (half the f16
//!   spacing of a row max below 256, in nats);
//! - NVFP4: output and LSE of every row within 1e-5 of the CPU backend's, but for rows where a score's last bits put a
//!   probability, or the scale of 16, on the other side of a boundary ([`within_codes`]).

use half::{bf16, f16};
use kernels_gpu::emulation::Schedule;
use kernels_gpu::numerics::units;

use super::{Case, Family, Out, Outcome, Qk, Weights, attend, rel_l2};

/// Runs a case; a fault is a failure.
pub fn run(case: &Case) -> Outcome {
    attend(case).unwrap_or_else(|fault| panic!("{} {case:?}\n{fault}", case.name()))
}

/// Runs a case and holds it to the tolerances.
pub fn check(case: &Case) -> Outcome {
    let name = format!("{} {case:?}", case.name());
    let outcome = run(case);
    let kernel = rel_l2(&outcome.o, outcome.exact_o.iter().copied());
    let cpu = rel_l2(&outcome.cpu_o, outcome.exact_o.iter().copied());
    // Hopper's takes a sum and its bias of 1.5 * 2^23 through one f32 multiply-add: up to 0.75 of a unit of the sum.
    let biased = case.family == Family::Sm90 && case.qk == Qk::Int8;
    let row_max = outcome.row_max.iter().copied().fold(0.0, f32::max);
    let floor = if biased { 1e-4 + 5e-7 * f64::from(row_max) } else { 1e-4 };
    assert!(kernel <= 1.05 * cpu + floor, "{name}: {kernel:.2e} from f64, the CPU backend {cpu:.2e}");
    if case.qk == Qk::Nvfp4 {
        within_codes(case, &name, &outcome);
        return outcome;
    }
    let between = rel_l2(&outcome.o, outcome.cpu_o.iter().map(|&x| f64::from(x)));
    let references = case.weights != Weights::Exact && matches!(case.qk, Qk::F16 | Qk::E4m3);
    let same = case.kv_tokens <= 128 || !references && !case.smooth;
    // The argument of an exponential of INT8 scores is one fused multiply-add on B200, two roundings on the CPU.
    let fused = case.family == Family::Sm100 && case.weights == Weights::Exact && case.qk == Qk::Int8;
    let limit = if biased {
        2e-3
    } else if !same {
        5e-4
    } else if fused {
        2e-6
    } else {
        1e-6
    };
    assert!(between <= limit, "{name}: {between:.2e} from the CPU backend");
    let limit = match (references, biased, case.weights) {
        (true, ..) => 6e-3,
        // A code next to a boundary, of a row's heaviest key.
        (_, true, Weights::ExpCast | Weights::Quadratic) => 0.09,
        (_, true, Weights::Exact) => (5e-6 * row_max).max(1e-5),
        _ => 1e-5f32,
    };
    for (i, (&a, &b)) in outcome.lse.iter().zip(&outcome.cpu_lse).enumerate() {
        let limit = limit.max(3.0 * f32::EPSILON * b.abs());
        assert!(a == b || (a - b).abs() <= limit, "{name}: LSE {i} is {a}, the CPU backend's {b}");
    }
    if biased {
        let pairs = outcome.lse.iter().zip(&outcome.cpu_lse).filter(|(a, b)| a != b);
        let off: f32 = pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / outcome.lse.len() as f32;
        assert!(
            off <= (1e-5 * row_max).max(4e-3),
            "{name}: LSE are {off:.1e} from the CPU backend's on average"
        );
        let (of, cpu) = (row_max, outcome.cpu_row_max);
        assert!(
            (of - cpu).abs() <= 1e-5 * cpu,
            "{name}: the largest row max is {of}, the CPU backend's {cpu}"
        );
    } else {
        assert_eq!(row_max, outcome.cpu_row_max, "{name}: the largest row max");
    }
    outcome
}

/// Whether the rows of NVFP4 are the CPU backend's, but for a few in which one code is another: a score is a sum of f32 in
/// another order, so that of 100,000 probabilities a few round to the neighbor.
fn within_codes(case: &Case, name: &str, outcome: &Outcome) {
    let dim = case.head_dim;
    let row_max = outcome.row_max.iter().copied().fold(0.0, f32::max);
    // The LSE is the row max and a logarithm, which may cancel.
    let lse_limit = f64::from((3.0 * f32::EPSILON * row_max * units::NATS).max(1e-5));
    let (mut others, mut worst) = (0, [0.0f64, 0.0]);
    let rows = outcome.o.chunks_exact(dim).zip(outcome.cpu_o.chunks_exact(dim));
    for ((o, cpu_o), (lse, cpu_lse)) in rows.zip(outcome.lse.iter().zip(&outcome.cpu_lse)) {
        let off = rel_l2(o, cpu_o.iter().map(|&x| f64::from(x)));
        let lse_off = if lse == cpu_lse { 0.0 } else { f64::from((lse - cpu_lse).abs()) };
        let fine = off <= 1e-5 && lse_off <= lse_limit;
        others += usize::from(!fine);
        worst = [worst[0].max(off), worst[1].max(lse_off)];
        assert!(
            off <= 0.1 && lse_off <= 0.05,
            "{name}: a row is {off:.2e} from the CPU backend's, its LSE {lse_off:.2e}"
        );
    }
    let allowed = 1 + outcome.lse.len() * case.kv_tokens / 20_000;
    assert!(
        others <= allowed,
        "{name}: {others} of {} rows are other codes', up to {worst:?}",
        outcome.lse.len()
    );
    let off = (row_max - outcome.cpu_row_max).abs();
    assert!(off <= 1e-5 * outcome.cpu_row_max.abs(), "{name}: the largest row max, {row_max}");
}

/// The output types are roundings of f32; everything else is the same bits.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub fn every_entry_at_odd_lengths(family: Family) {
    let shapes =
        [(1, 1), (64, 2), (127, 127), (128, 128), (200, 129), (64, 191), (1, 300), (200, 300), (129, 256)];
    let schedules = [Schedule::Oldest, Schedule::Newest, Schedule::Random(1)];
    for (i, (q, kv)) in shapes.into_iter().enumerate() {
        let case = Case::new(family, q, kv);
        // The quadratic encoder differs in the codes alone: a third of the lengths will do.
        for case in if i % 3 == 1 { case.entries() } else { case.main_entries() } {
            check(&Case { schedule: schedules[i % 3], promote: 1 + i as u32 % 3, ..case });
        }
    }
}

pub fn batches_of_grouped_heads_with_lengths(family: Family) {
    let lens = Some(vec![129, 191]);
    let case = Case {
        batch: 2,
        q_heads: 4,
        kv_heads: 2,
        kv_lens: lens,
        out: Out::F32,
        ..Case::new(family, 130, 300)
    };
    for case in case.main_entries() {
        check(&case);
    }
}

pub fn heads_of_fewer_channels_are_padded(family: Family) {
    for head_dim in [64, 72] {
        for case in Case::new(family, 66, 200).main_entries() {
            check(&Case { q_heads: 2, head_dim, ..case });
        }
    }
}

pub fn no_valid_key_gives_zeros(family: Family) {
    for case in Case::new(family, 127, 300).main_entries() {
        let case = Case { batch: 2, kv_lens: Some(vec![0, 127]), ..case };
        let outcome = check(&case);
        let (empty, full) = outcome.o.split_at(127 * 128);
        assert!(empty.iter().all(|x| *x == 0.0) && full.iter().any(|x| *x != 0.0), "{}", case.name());
        assert!(outcome.lse[..127].iter().all(|x| *x == f32::NEG_INFINITY), "{}", case.name());
    }
}

pub fn rings_of_tiles_and_means_go_around(family: Family) {
    // 35 tiles: every slot of K and V many times, the slots of means (one for 16 tiles) a second time.
    let schedules = [Schedule::Oldest, Schedule::Newest, Schedule::Random(3)];
    // INT8 has a loop of its own on Hopper only.
    let loops = if family == Family::Sm90 { 3 } else { 2 };
    for (&qk, schedule) in family.formats().iter().zip(schedules).take(loops) {
        let intervals: &[u32] = if family == Family::Sm90 { &[1, 4, 1000] } else { &[1] };
        for &promote in intervals {
            check(&Case { qk, schedule, promote, ..Case::new(family, 65, 35 * 128 - 1) });
        }
    }
}

pub fn output_types_round_the_same_values(family: Family) {
    let wide = check(&Case::new(family, 65, 300));
    for out in [Out::F16, Out::Bf16] {
        let narrow = run(&Case { out, ..Case::new(family, 65, 300) });
        let rounded = wide.o.iter().map(|&x| match out {
            Out::Bf16 => bf16::from_f32(x).to_f32(),
            _ => f16::from_f32(x).to_f32(),
        });
        assert_eq!(bits(&narrow.o), bits(&rounded.collect::<Vec<_>>()), "{out:?}");
        assert_eq!(bits(&narrow.lse), bits(&wide.lse));
    }
}

pub fn the_order_of_threads_changes_nothing(family: Family) {
    let first = Case::new(family, 200, 500);
    let mut other = Case { kv_tokens: 700, weights: Weights::Exact, ..first.clone() };
    other.qk = family.formats().get(1).copied().unwrap_or(first.qk);
    for case in [first, other] {
        let first = check(&case);
        for schedule in [Schedule::Newest, Schedule::Random(7), Schedule::Random(8), Schedule::Random(9)] {
            let other = check(&Case { schedule, ..case.clone() });
            assert_eq!(bits(&first.o), bits(&other.o), "{schedule:?}");
            assert_eq!(bits(&first.lse), bits(&other.lse), "{schedule:?}");
        }
    }
}

pub fn poisoned_heads_are_nan_and_others_unchanged(family: Family) {
    for case in (Case { q_heads: 4, kv_heads: 2, ..Case::new(family, 3, 130) }).main_entries() {
        let clean = run(&case);
        let dirty = run(&Case { poisoned: vec![1], ..case.clone() });
        let half = clean.o.len() / 2;
        let unchanged = bits(&dirty.o[..half]) == bits(&clean.o[..half]);
        assert!(unchanged, "{}: heads beside a poisoned one", case.name());
        assert!(dirty.o[half..].iter().all(|x| x.is_nan()), "{}: poisoned heads", case.name());
        assert!(dirty.lse[6..].iter().all(|x| x.is_nan()) && !dirty.lse[..6].iter().any(|x| x.is_nan()));
    }
}

pub fn a_nan_in_a_query_stays_in_its_row(family: Family) {
    // Of one tile the masked keys are numbers beside the NaN.
    for case in [200, 100].iter().flat_map(|&keys| Case::new(family, 70, keys).main_entries()) {
        let clean = run(&case);
        let dirty = run(&Case { nan_row: Some(66), ..case.clone() });
        for (row, (a, b)) in clean.o.chunks(128).zip(dirty.o.chunks(128)).enumerate() {
            let fine = if row == 66 { b.iter().all(|x| x.is_nan()) } else { bits(a) == bits(b) };
            assert!(fine, "{}: row {row} with a NaN in row 66", case.name());
        }
        assert!(dirty.row_max[0].is_nan(), "the largest row max hides a NaN");
    }
}

pub fn the_lse_bias_of_expcast_is_small(family: Family) {
    // The contract: about -0.4% of l. A byte's own error is up to 7.5%, so only the mean says it.
    let outcome = check(&Case { sharpness: 1.0, ..Case::new(family, 200, 900) });
    let differences = outcome.lse.iter().zip(&outcome.exact_lse).map(|(a, b)| f64::from(*a) - b);
    let bias = differences.sum::<f64>() / outcome.lse.len() as f64;
    assert!((-0.006..0.002).contains(&bias), "mean LSE error {bias}");
}

/// f16 scores end at 512 code units (44 nats), where the CPU backend leaves them too; INT8 ones are f32.
pub fn int8_scores_have_no_range(family: Family) {
    for sharpness in [20.0, 200.0] {
        for weights in [Weights::ExpCast, Weights::Quadratic, Weights::Exact] {
            let case = Case { qk: Qk::Int8, weights, sharpness, ..Case::new(family, 40, 300) };
            let outcome = check(&case);
            assert!(outcome.row_max[0] > 20.0 * sharpness, "largest |row max| {}", outcome.row_max[0]);
        }
    }
}
