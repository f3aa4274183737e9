//! The CUDA backend around its kernels, on a driver that is faked: what is planned, uploaded, kept and handed on. What
//! kernels compute is tested where there is a GPU.

#![cfg(all(target_os = "linux", feature = "cuda"))]

mod common;
mod fake_driver;

use common::{Case, F32_LSE, o, recipe};
use fake_driver::here;
use kernels_gpu::formats::nvfp4::tensor_scale;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::backend::cuda::{Buffer, Cuda, DevicePlan, Rope, Session, Spec, Tensors};
use vc_attention::grouping::KeptOrder;
use vc_attention::schedule::{Schedule, ScheduleConfig, Site, Source};
use vc_attention::{DType, Error, Layout, Options, OutputType, Plan, Problem, run, run_on_order};

/// Three clusters.
const CASE: Case = Case::new([1, 2, 2], [40, 200], 64);
const NARROW: Options = Options { output: OutputType::Input, lse: false };

fn gpu() -> Cuda {
    Cuda::new(0).expect("the faked driver")
}

/// A plan of [`CASE`], and its tensors.
fn device_plan(gpu: &Cuda, text: &str) -> DevicePlan {
    let shape = vc_attention::Shape::new(CASE.q_shape(), CASE.kv_shape(), CASE.kv_shape()).unwrap();
    let spec = Spec::contiguous(shape, recipe(text), 0.125, DType::Bf16, DType::Bf16);
    DevicePlan::new(gpu.gpu(), spec).unwrap()
}

fn tensors_in(buffers: &[Buffer; 4]) -> Tensors {
    let [q, k, v, o] = buffers.each_ref().map(Buffer::ptr);
    Tensors { q, k, v, o, lse: 0, kv_lens: 0, rope: Rope::default() }
}

/// Labels of both heads: what the faked kernels keep but for the first token, which they assign to cluster 1.
fn kept() -> Vec<KeptOrder> {
    let labels: Vec<u16> = (0..200).map(|t| if t == 0 { 0 } else { t % 3 }).collect();
    vec![KeptOrder::new(&labels, 3).unwrap(); 2]
}

fn labels(gpu: &Cuda, order: &Session) -> Vec<u16> {
    gpu.keep(order).expect("reads the labels")[0].labels()
}

#[test]
fn a_refresh_leaves_the_order_that_it_starts_from() {
    if !here("a_refresh_leaves_the_order_that_it_starts_from", "traces") {
        return;
    }
    let gpu = gpu();
    let tensors = CASE.outliers(1).tensors(DType::Bf16, Layout::Bhsd);
    let problem = tensors.problem();
    let plan = Plan::new(&problem, &recipe("vc16-expcast"), F32_LSE).unwrap();
    let start = kept()[0].labels();
    let restored = gpu.restore(&plan, &problem, &kept()).unwrap();
    let first = gpu.group(&plan, &problem, Some(&restored)).unwrap();
    let second = gpu.group(&plan, &problem, Some(&first)).unwrap();
    assert_eq!(labels(&gpu, &restored), start, "a refresh changed the order that it started from");
    for refreshed in [&first, &second, &gpu.refresh(&plan, &problem, &kept()).unwrap()] {
        let found = labels(&gpu, refreshed);
        assert_eq!((found[0], &found[1..]), (1, &start[1..]), "grouped, and from the labels before");
    }
    // Labels of other lengths are no start: those in fresh memory are 0.
    let short = Problem { kv_lens: Some(&[150]), ..tensors.problem() };
    let cold = labels(&gpu, &gpu.group(&plan, &short, Some(&restored)).unwrap());
    assert!(cold.len() == 150 && cold[1..].iter().all(|&label| label == 0), "{cold:?}");
}

/// Whatever the call before was planned for, this one's plan is its own.
#[test]
fn a_warm_call_of_another_type_writes_that_type() {
    if !here("a_warm_call_of_another_type_writes_that_type", "traces") {
        return;
    }
    let gpu = gpu();
    let (wide, half) = (CASE.outliers(2), CASE.outliers(3));
    let (wide, half) = (wide.tensors(DType::Bf16, Layout::Bhsd), half.tensors(DType::F16, Layout::Bhsd));
    let recipe = recipe("vc16-expcast");
    let plan = Plan::new(&wide.problem(), &recipe, F32_LSE).unwrap();
    let first = run(&gpu, &plan, &wide.problem(), None).unwrap();
    for tensors in [&wide, &half] {
        let problem = Problem { scale: Some(0.5), ..tensors.problem() };
        let plan = Plan::new(&problem, &recipe, NARROW).unwrap();
        let order = gpu.group(&plan, &problem, Some(&first.order)).unwrap();
        let output = run_on_order(&gpu, &plan, &problem, order).unwrap().output;
        // The faked kernel writes a 1 of the type that it is told.
        assert_eq!(o(&output)[..3], [1.0, 0.0, 0.0], "{:?}", plan.dtype);
    }
}

#[test]
fn a_refresh_plans_and_uploads_once() {
    if !here("a_refresh_plans_and_uploads_once", "") {
        return;
    }
    let gpu = gpu();
    // SAFETY: opens the faked driver, which is loaded already, and calls its counter.
    let allocations = || unsafe {
        let driver = libloading::Library::new("libcuda.so").unwrap();
        driver.get::<extern "C" fn() -> usize>(b"fake_allocations").unwrap()()
    };
    let tensors = CASE.outliers(4).tensors(DType::Bf16, Layout::Bhsd);
    let problem = tensors.problem();
    let config = ScheduleConfig { refresh: 1, ..ScheduleConfig::paper(12) };
    let mut schedule = Schedule::<Cuda>::new(config, recipe("vc16-expcast")).unwrap();
    let mut step = |step| {
        let before = allocations();
        let done = schedule.attend(&gpu, step, Site::default(), &problem, F32_LSE).unwrap();
        (done.decision.source, allocations() - before)
    };
    let (first, cold) = step(0);
    let (second, warm) = step(1);
    assert_eq!((first, second), (Source::Cold, Source::Warm));
    assert_eq!(warm, cold + 1, "the plan, the tensors, and the kept labels");
}

/// The CPU finishes such calls on the order that the GPU made.
#[test]
fn calls_beyond_f16_keep_their_order() {
    if !here("calls_beyond_f16_keep_their_order", "loud") {
        return;
    }
    let gpu = gpu();
    let tensors = CASE.outliers(5).tensors(DType::Bf16, Layout::Bhsd);
    let problem = tensors.problem();
    for name in ["vc16-expcast", "vc16-expcast+order=sequence"] {
        let plan = Plan::new(&problem, &recipe(name), F32_LSE).unwrap();
        let found = run_on_order(&gpu, &plan, &problem, gpu.restore(&plan, &problem, &kept()).unwrap());
        let on = |kept: &Vec<KeptOrder>| {
            let order = Cpu.restore(&plan, &problem, kept).unwrap();
            o(&run_on_order(&Cpu, &plan, &problem, order).unwrap().output)
        };
        let found = o(&found.unwrap().output);
        assert_eq!(found, on(&kept()), "{name}");
        let own = o(&run(&Cpu, &plan, &problem, None).unwrap().output);
        assert_eq!(found == own, name.ends_with("sequence"), "{name}: a grouping of the CPU's own");
    }
}

#[test]
fn a_share_that_cannot_be_read_is_an_error() {
    if !here("a_share_that_cannot_be_read_is_an_error", "unreadable") {
        return;
    }
    let gpu = gpu();
    let tensors = CASE.outliers(6).tensors(DType::Bf16, Layout::Bhsd);
    let problem = tensors.problem();
    let plan = Plan::new(&problem, &recipe("vc16-expcast"), F32_LSE).unwrap();
    let order = gpu.group(&plan, &problem, None).unwrap();
    let v = gpu.prepare_v(&plan, &problem, &order).unwrap();
    let share = gpu.mean_share(&v);
    assert!(
        matches!(&share, Err(Error::Device { reason }) if reason.contains("ILLEGAL_ADDRESS")),
        "{share:?}"
    );
}

/// A plan's stages may be called from any thread, in any context, and refuse what they cannot read or write.
#[test]
fn stages_bind_their_context_and_check_their_tensors() {
    if !here("stages_bind_their_context_and_check_their_tensors", "") {
        return;
    }
    let gpu = gpu();
    let plan = device_plan(&gpu, "vc16-expcast");
    let buffers = [(); 4].map(|()| Buffer::new(gpu.gpu(), 2 * 2 * 200 * 64).unwrap());
    let tensors = tensors_in(&buffers);
    let Tensors { q, o, .. } = tensors;
    let (plan, stream) = (&plan, gpu.stream());
    type Stage<'a> = (&'a str, Box<dyn Fn(&Tensors) -> vc_attention::Result<()> + Sync + 'a>);
    // SAFETY: the buffers have the sizes of the plan; the faked kernels are through when a call returns.
    let stages: [Stage; 5] = unsafe {
        [
            ("group", Box::new(|t| plan.group(stream, t, vc_attention::backend::cuda::Grouping::Cold))),
            ("prepare_q", Box::new(|t| plan.prepare_q(stream, t))),
            ("prepare_k", Box::new(|t| plan.prepare_k(stream, t))),
            ("prepare_v", Box::new(|t| plan.prepare_v(stream, t))),
            ("attend", Box::new(|t| plan.attend(stream, t))),
        ]
    };
    for (name, stage) in stages {
        let odd = stage(&Tensors { o: o + 8, ..tensors });
        assert!(matches!(odd, Err(Error::Tensor { tensor: "o", .. })), "{name}: {odd:?}");
        let none = stage(&Tensors { v: 0, ..tensors });
        assert!(matches!(none, Err(Error::Tensor { tensor: "v", .. })), "{name}: {none:?}");
        let rope = Rope { k_cos: q, k_sin: q, ..Rope::default() };
        for (rope, missing) in [
            (Rope { q_sin: q, ..rope }, "q_cos"),
            (Rope { q_cos: q, ..rope }, "q_sin"),
            (Rope { k_cos: 0, ..rope }, "k_cos"),
            (Rope { k_sin: q + 8, ..rope }, "k_sin"),
        ] {
            let refused = stage(&Tensors { rope, ..tensors });
            let named = matches!(refused, Err(Error::Tensor { tensor, .. }) if tensor == missing);
            assert!(named, "{name}, {missing}: {refused:?}");
        }
        stage(&Tensors { rope, ..tensors }).expect("tables of the keys alone are taken");
        // A thread that has no context yet.
        std::thread::scope(|scope| scope.spawn(|| stage(&tensors)).join().unwrap()).expect(name);
    }
}

/// Every kernel that reads q or k gets the rotary tables of that tensor.
#[test]
fn kernels_get_the_tables_of_their_tensor() {
    if !here("kernels_get_the_tables_of_their_tensor", "rope") {
        return;
    }
    let gpu = gpu();
    let buffers = [(); 4].map(|()| Buffer::new(gpu.gpu(), 2 * 2 * 200 * 64).unwrap());
    let tables = [1.0f32, 2.0, 3.0, 4.0].map(|x| Buffer::from_slice(gpu.gpu(), &[x; 200 * 32]).unwrap());
    let [q_cos, q_sin, k_cos, k_sin] = tables.each_ref().map(Buffer::ptr);
    let tensors = Tensors { rope: Rope { q_cos, q_sin, k_cos, k_sin }, ..tensors_in(&buffers) };
    for text in ["vc16-expcast", "vc8-fp8qk", "vc8", "vc4"] {
        let plan = device_plan(&gpu, text);
        // SAFETY: the buffers have the sizes of the plan; the faked kernels are through when the call returns.
        unsafe { plan.prepare(gpu.stream(), &tensors) }.unwrap();
        let found = plan.operands(gpu.stream()).unwrap();
        // The faked kernels write the first angles that they are given.
        let first = |x: &[u8]| [0, 4].map(|at| f32::from_le_bytes([x[at], x[at + 1], x[at + 2], x[at + 3]]));
        assert_eq!([first(&found.q), first(&found.k)], [[1.0, 2.0], [3.0, 4.0]], "{text}: quantizers");
        assert_eq!(found.k_mean[..2], [3.0, 4.0], "{text}: statistics of K");
        if text == "vc4" {
            let [q, k, _] = found.tensor_scales;
            assert_eq!(
                (q, k),
                (vec![tensor_scale(1.0), tensor_scale(2.0)], vec![3.0, 4.0]),
                "largest magnitudes"
            );
        }
    }
}
