//! What a denoising schedule keeps on the GPU: labels out of one plan and into another.

use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::backend::cuda::{Buffer, Cuda, DeviceOperands, Grouping};
use vc_attention::grouping::{KeptOrder, group_from};
use vc_attention::schedule::{Schedule, ScheduleConfig, Site};
use vc_attention::{DType, Error, Plan, Problem};

use crate::call::{OnGpu, Wanted};
use crate::common::{Case, F32_LSE, o, recipe, relative};
use crate::device::{Gpu, gpu};
use crate::inputs::plain;

/// A plan's labels in a buffer of their own.
fn saved(gpu: &Gpu, call: &OnGpu) -> Buffer {
    let buffer = gpu.upload(&vec![0xEEu8; call.plan.labels_bytes()]);
    // SAFETY: the buffer has the labels' size and outlives the stream's work, which `result` waits for.
    unsafe { call.plan.save_labels(gpu.stream(), buffer.ptr()) }.expect("copies");
    gpu.stream().synchronize().expect("the copy is done");
    buffer
}

fn load(gpu: &Gpu, call: &OnGpu, labels: &Buffer) -> DeviceOperands {
    // SAFETY: labels of a plan of the same shape, recipe and lengths; `operands` waits for the stream.
    unsafe { call.plan.load_labels(gpu.stream(), &call.tensors, labels.ptr()) }.expect("loads");
    call.operands()
}

#[test]
fn labels_bring_an_order_back_on_another_plan() {
    let Some(gpu) = gpu() else { return };
    let lens = [1900, 2500];
    let (first, second) = (
        plain(Case::new([2, 2, 2], [70, 2500], 128), 90, DType::Bf16),
        plain(Case::new([2, 2, 2], [70, 2500], 128), 91, DType::Bf16),
    );
    let recipe = recipe("vc16-expcast");
    let call = |inputs: &crate::inputs::Inputs| {
        OnGpu::new(&gpu, &Problem { kv_lens: Some(&lens), ..inputs.problem() }, &recipe, Wanted::default())
    };
    let (made, other) = (call(&first), call(&second));
    // SAFETY: a plan that has not grouped copies nothing.
    let refused = unsafe { made.plan.save_labels(gpu.stream(), 256) };
    assert!(matches!(refused, Err(Error::Option { option: "grouping", .. })), "{refused:?}");
    let expected = made.group(Grouping::Cold);
    let labels = saved(&gpu, &made);
    let found = load(&gpu, &other, &labels);
    for (b, &len) in lens.iter().enumerate() {
        for head in 0..2 {
            let at = (2 * b + head) * 2500;
            assert_eq!(found.order[at..][..len], expected.order[at..][..len], "batch {b}, head {head}");
            assert_eq!(found.labels[at..][..len], expected.labels[at..][..len], "batch {b}, head {head}");
        }
    }
    // Reuse keeps it; a refresh starts from the loaded clusters, as the CPU's does. The values know nothing of these labels, so
    // all clusters begin near each other and a rounding moves tokens: most of them have to agree, and a cold start must not.
    assert_eq!(other.group(Grouping::Reuse).order, found.order);
    let refreshed = other.group(Grouping::Warm);
    let afresh = call(&second).group(Grouping::Cold);
    let clusters = vc_attention::grouping::default_clusters(2500);
    let now = Problem { kv_lens: Some(&lens), ..second.problem() };
    for (b, &len) in lens.iter().enumerate() {
        for head in 0..2 {
            let at = (2 * b + head) * 2500;
            let kept = KeptOrder::new(&expected.labels[at..][..len], clusters).expect("labels of the GPU");
            let v = now.v.read_head(b, head, len);
            let cpu = group_from(&v, 128, &recipe.grouping, &kept).expect("refreshes");
            // The path through the clusters may number them otherwise once a token moves: the partitions are compared.
            let moved = |labels: &[u16]| len - agreeing(&cpu.labels, &labels[at..][..len], clusters);
            let (warm, cold) = (moved(&refreshed.labels), moved(&afresh.labels));
            let case = format!(
                "batch {b}, head {head}: of {len} tokens {warm} lie in other clusters than the CPU's refresh"
            );
            println!("{case} has them in, {cold} after a cold start");
            assert!(warm * 5 <= len && warm * 2 < cold, "{case}, {cold} after a cold start");
        }
    }
}

/// The backend refreshes on a plan of its own what a plan refreshes in place: the same labels, and the old ones stay.
#[test]
fn a_refresh_on_another_plan_is_the_same() {
    let Some(gpu) = gpu() else { return };
    let cuda = Cuda::new(0).expect("the GPU is there");
    let case = Case::new([1, 2, 2], [70, 2500], 128);
    let (first, second) = (plain(case, 92, DType::Bf16), plain(case, 93, DType::Bf16));
    let recipe = recipe("vc16-expcast");
    let [made, now] = [&first, &second].map(|x| OnGpu::new(&gpu, &x.problem(), &recipe, Wanted::default()));
    let before = made.group(Grouping::Cold).labels;
    // SAFETY: both calls have the same sizes; `operands` waits for the stream.
    unsafe { made.plan.group(gpu.stream(), &now.tensors, Grouping::Warm) }.expect("launches");
    let expected = made.operands().labels;
    assert_ne!(before, expected);
    let plan = Plan::new(&first.problem(), &recipe, F32_LSE).expect("a valid plan");
    let old = cuda.group(&plan, &first.problem(), None).expect("groups");
    let refreshed = cuda.group(&plan, &second.problem(), Some(&old)).expect("refreshes");
    let labels =
        |order| -> Vec<u16> { cuda.keep(order).expect("reads").iter().flat_map(KeptOrder::labels).collect() };
    assert_eq!((labels(&refreshed), labels(&old)), (expected, before));
}

/// Tokens on which two partitions agree, every cluster of the first matched with the one of the second that most of its
/// tokens lie in.
fn agreeing(a: &[u16], b: &[u16], clusters: usize) -> usize {
    let mut both = vec![0; clusters * clusters];
    a.iter().zip(b).for_each(|(&a, &b)| both[usize::from(a) * clusters + usize::from(b)] += 1);
    both.chunks_exact(clusters).map(|row| row.iter().copied().max().unwrap_or(0)).sum()
}

#[test]
fn partitions_agree_whatever_their_numbers() {
    assert_eq!(agreeing(&[0, 0, 1, 2], &[2, 2, 0, 1], 3), 4);
    assert_eq!(agreeing(&[0, 0, 1, 2], &[2, 1, 0, 1], 3), 3);
}

/// A clip on the GPU's backend is the CPU's, step by step, within the tolerance of the kernels.
#[test]
fn schedules_agree() {
    let Some(_gpu) = gpu() else { return };
    let cuda = Cuda::new(0).expect("the GPU is there");
    let config = ScheduleConfig { refresh: 2, ..ScheduleConfig::paper(16) };
    let recipe = recipe("vc16-expcast");
    let mut on_gpu = Schedule::<Cuda>::new(config, recipe.clone()).expect("valid");
    let mut on_cpu = Schedule::<Cpu>::new(config, recipe).expect("valid");
    for step in 0..6 {
        let inputs = plain(Case::new([1, 2, 2], [200, 1500], 64), 95 + step as u64, DType::F16);
        let problem = inputs.problem();
        let site = Site::default();
        let gpu = on_gpu.attend(&cuda, step, site, &problem, F32_LSE).expect("runs");
        let cpu = on_cpu.attend(&Cpu, step, site, &problem, F32_LSE).expect("runs");
        assert_eq!(gpu.decision, cpu.decision, "step {step}");
        let error = relative(&o(&gpu.output), &o(&cpu.output));
        println!("step {step}: {:?}, {error:.4} from the CPU", gpu.decision.source);
        assert!(error < 0.05, "step {step}: {error} from the CPU's output");
    }
    assert_eq!((on_gpu.counts(), on_gpu.bytes()), (on_cpu.counts(), on_cpu.bytes()));
}
