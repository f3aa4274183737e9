//! The attention of a denoising loop against the schedule of `vc_attention` itself, bit for bit.

#[path = "../../tests/common/mod.rs"]
mod common;

use candle_core::{DType, Device, Result, Tensor};
use common::{Case, recipe};
use vc_attention::backend::cpu::Cpu;
use vc_attention::schedule::Schedule;
use vc_attention::{Layout, NonFinite, Problem};
use vc_attention_candle::{Demeaning, Denoising, Options, ScheduleConfig, Site, Source, VcAttention};

const CASE: Case = Case::new([1, 2, 2], [50, 300], 32);

/// q, k and v of a step, (batch, seq, heads, head_dim) over heads-first memory, so that strides are not trivial.
fn tensors(seed: u64) -> Result<[Tensor; 3]> {
    let data = CASE.outliers(seed);
    let tensor = |x: &[f32], shape: [usize; 4]| {
        Tensor::from_slice(x, &shape, &Device::Cpu)?.to_dtype(DType::BF16)?.transpose(1, 2)
    };
    Ok([
        tensor(&data.q, CASE.q_shape())?,
        tensor(&data.k, CASE.kv_shape())?,
        tensor(&data.v, CASE.kv_shape())?,
    ])
}

fn denoising(name: &str, config: ScheduleConfig) -> Denoising {
    Denoising::new(VcAttention::new(Options::new(recipe(name))), config).expect("a valid schedule")
}

#[test]
fn a_loop_is_the_librarys_schedule() -> Result<()> {
    let config = ScheduleConfig { refresh: 2, demeaning: Demeaning::InWindow, ..ScheduleConfig::paper(16) };
    let mut ours = denoising("vc16-expcast", config);
    let mut library = Schedule::<Cpu>::new(config, recipe("vc16-expcast")).expect("valid");
    for step in 0..7 {
        for branch in 0..2 {
            let site = Site { branch, ..Site::default() };
            let seed = 100 + step as u64 * 2 + u64::from(branch);
            let [q, k, v] = tensors(seed)?;
            let o = ours.forward(step, site, &q, &k, &v, 0.2)?;
            let data = CASE.outliers(seed).tensors(vc_attention::DType::Bf16, Layout::Bhsd);
            let problem = Problem { scale: Some(0.2), nonfinite: NonFinite::Propagate, ..data.problem() };
            let expected = library.attend(&Cpu, step, site, &problem, Default::default()).expect("runs");
            assert_eq!(ours.last(), Some(expected.decision), "step {step}");
            let found: Vec<half::bf16> = o.transpose(1, 2)?.flatten_all()?.to_vec1()?;
            let expected = expected.output.o.view();
            let expected: Vec<f32> = (0..2).flat_map(|h| expected.read_head(0, h, 50)).collect();
            assert!(found.iter().zip(&expected).all(|(a, b)| a.to_f32().to_bits() == b.to_bits()));
        }
    }
    assert_eq!(ours.counts(), library.counts());
    assert!(ours.counts().plain == 6 && ours.counts().warm == 2, "{:?}", ours.counts());
    // A byte a token and head, and little else.
    assert!((1200..2000).contains(&ours.bytes()), "{}", ours.bytes());
    ours.reset();
    assert_eq!((ours.bytes(), ours.last()), (0, None));
    Ok(())
}

#[test]
fn drift_and_mixed_recipes_work_through_candle() -> Result<()> {
    let config = ScheduleConfig { drift: Some(0.8), ..ScheduleConfig::paper(8) };
    let mut ours = denoising("vc16-expcast", config);
    let [q, k, v] = tensors(1)?;
    let [.., moved] = tensors(2)?;
    let fast = recipe("vc8-fp8qk");
    let site = Site::default();
    let mut sources = Vec::new();
    for step in 0..8 {
        let v = if step < 5 { &v } else { &moved };
        ours.forward_as(&fast, step, site, &q, &k, v, 0.2)?;
        sources.push(ours.last().expect("a call was made").source);
    }
    let mut expected = [Source::Reused; 8];
    (expected[0], expected[6]) = (Source::Cold, Source::Early);
    assert_eq!(sources, expected, "moved at 5, mended at 6");
    assert!(ours.attention().observed()?.is_some_and(|seen| seen.mean_share.is_some()));
    Ok(())
}

#[test]
fn what_does_not_fit_is_said_and_changes_nothing() -> Result<()> {
    let mut ours = denoising("vc16-expcast", ScheduleConfig::paper(8));
    let [q, k, v] = tensors(3)?;
    ours.forward(0, Site::default(), &q, &k, &v, 0.2)?;
    let before = (ours.counts(), ours.bytes(), ours.last());
    let late = ours.forward(8, Site::default(), &q, &k, &v, 0.2).unwrap_err().to_string();
    assert!(late.contains("`step`") && late.contains("below the schedule's 8"), "{late}");
    let other = ours.forward_as(&recipe("vc8+k=3"), 1, Site::default(), &q, &k, &v, 0.2);
    assert!(other.unwrap_err().to_string().contains("token order"));
    let short = ours.forward(1, Site::default(), &q, &k, &v.narrow(1, 0, 7)?, 0.2);
    assert!(short.unwrap_err().to_string().contains("v"));
    assert_eq!((ours.counts(), ours.bytes(), ours.last()), before);
    let none = ScheduleConfig { steps: 0, ..ScheduleConfig::paper(8) };
    assert!(Denoising::new(VcAttention::new(Options::default()), none).is_err());
    Ok(())
}

/// Fewer padding tokens behind the same valid ones: another order in memory, so the site groups anew.
#[test]
fn other_padding_groups_anew() -> Result<()> {
    let options = Options::new(recipe("vc16-expcast")).with_kv_lens(vec![250]);
    let mut ours = Denoising::new(VcAttention::new(options), ScheduleConfig::paper(8))?;
    let [q, k, v] = tensors(4)?;
    let mut sources = Vec::new();
    for (step, tokens) in [300, 280, 280, 300].into_iter().enumerate() {
        let (k, v) = (k.narrow(1, 0, tokens)?, v.narrow(1, 0, tokens)?);
        ours.forward(step, Site::default(), &q, &k, &v, 0.2)?;
        sources.push(ours.last().expect("a call was made").source);
    }
    assert_eq!(sources, [Source::Cold, Source::Cold, Source::Reused, Source::Cold]);
    Ok(())
}

/// What a clone groups is its own.
#[test]
fn clones_go_their_own_ways() -> Result<()> {
    let config = ScheduleConfig { refresh: 1, ..ScheduleConfig::paper(8) };
    let mut ours = denoising("vc16-expcast", config);
    let ([q, k, v], [.., moved]) = (tensors(5)?, tensors(6)?);
    ours.forward(0, Site::default(), &q, &k, &v, 0.2)?;
    let mut alone = denoising("vc16-expcast", config);
    alone.forward(0, Site::default(), &q, &k, &v, 0.2)?;
    let mut clone = ours.clone();
    clone.forward(1, Site::default(), &q, &k, &moved, 0.2)?;
    assert_eq!(clone.last().expect("a call was made").source, Source::Warm);
    let bits = |denoising: &mut Denoising| -> Result<Vec<half::bf16>> {
        denoising.forward(2, Site::default(), &q, &k, &v, 0.2)?.flatten_all()?.to_vec1()
    };
    let (ours, alone, clone) = (bits(&mut ours)?, bits(&mut alone)?, bits(&mut clone)?);
    assert!(ours == alone, "the clone changed the order that it was cloned from");
    assert!(clone != alone, "the clone has an order of its own");
    Ok(())
}
