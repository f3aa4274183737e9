//! What an application relies on that embeds a plan: graphs, streams, threads, memory that does not grow, errors
//! that say what is wrong.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, stream as raw};
use cudarc::driver::sys;
use vc_attention::backend::Backend;
use vc_attention::backend::cuda::{Cuda, Device, DevicePlan, Grouping, Spec, Stream, Tensors};
use vc_attention::{DType, Error, Layout, Plan, Problem, Recipe, Shape};

use crate::attention::KERNELS;
use crate::call::{OnGpu, Wanted, spec};
use crate::common::{Case, F32_LSE, recipe};
use crate::device::{Gpu, gpu, gpu_alone};
use crate::inputs::{Gaps, Inputs, plain};

/// As the driver's own assembler built them: no spills, and registers for as many blocks as the contract says.
#[test]
fn kernels_as_built() {
    let Some(gpu) = gpu() else { return };
    gpu.device.load_all().unwrap();
    println!("{}, loaded in {:?}", gpu.device.name(), gpu.device.load_time());
    for f in gpu.device.functions() {
        let entry = f.entry;
        println!(
            "{:36} {:3} registers, {} bytes local, {} shared",
            entry.name, f.registers, f.local_bytes, f.static_shared
        );
        assert_eq!(f.local_bytes, 0, "{} spills or has a stack", entry.name);
        let warps = entry.threads.div_ceil(32) * entry.min_ctas_per_sm;
        let registers = (f.registers as u32 * 32).next_multiple_of(256) * warps;
        assert!(registers <= 65_536, "{}: {} blocks do not fit", entry.name, entry.min_ctas_per_sm);
    }
}

fn handle(stream: Stream) -> sys::CUstream {
    stream.0.cast()
}

/// An instantiated graph of one call.
struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures under the strictest mode: an allocation, a synchronization or a launch on the default stream fails.
    fn of(gpu: &Gpu, call: impl FnOnce()) -> Self {
        let stream = handle(gpu.stream());
        gpu.device.context().bind_to_thread().expect("binds");
        // SAFETY: the stream and the graph live here; the call only launches.
        unsafe {
            raw::begin_capture(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)
                .expect("captures");
            call();
            let graph = raw::end_capture(stream).expect("nothing in the call breaks the capture");
            let exec =
                result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).expect("instantiates");
            Self { graph, exec }
        }
    }

    fn nodes(&self) -> usize {
        let mut count = 0;
        // SAFETY: asks for the number alone.
        unsafe { sys::cuGraphGetNodes(self.graph, std::ptr::null_mut(), &mut count) }
            .result()
            .expect("counts");
        count
    }

    fn launch(&self, stream: Stream) {
        // SAFETY: graph and stream are alive, the tensors of the captured call too.
        unsafe { result::graph::launch(self.exec, handle(stream)) }.expect("replays");
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `of`, destroyed once; no replay is on its way when a test is over.
        let _ = unsafe { (result::graph::exec_destroy(self.exec), result::graph::destroy(self.graph)) };
    }
}

/// A replay gives the bits of a direct call, also for other values in the same tensors: the whole call is in the
/// graph.
#[test]
fn graph_capture() {
    let Some(gpu) = gpu_alone() else { return };
    let case = Case::new([2, 4, 2], [300, 1000], 96);
    let [before, after] = [70, 71].map(|seed| plain(case, seed, DType::Bf16));
    for text in KERNELS {
        let recipe = recipe(text);
        let [want_before, want_after] = [&before, &after]
            .map(|x| OnGpu::new(&gpu, &x.problem(), &recipe, Wanted::default()).run(Grouping::Cold).bytes);
        let call = OnGpu::new(&gpu, &before.problem(), &recipe, Wanted::default());
        let graph = Graph::of(&gpu, || call.launch(Grouping::Cold));
        assert!(graph.nodes() > 10, "{text}: {} nodes", graph.nodes());
        for (inputs, want) in [(&before, &want_before), (&after, &want_after), (&before, &want_before)] {
            call.replace(&inputs.problem());
            graph.launch(gpu.stream());
            assert!(call.result().bytes == *want, "{text}: a replay differs from a direct call");
        }
    }
}

/// Waits, with a limit, for the sender; runs on the driver's thread.
unsafe extern "C" fn hold(release: *mut c_void) {
    // SAFETY: the test passes a receiver that lives for ever.
    let release = unsafe { &*release.cast::<Receiver<()>>() };
    let _ = release.recv_timeout(Duration::from_secs(5));
}

/// While the caller's stream is held up, a call returns and nothing of it runs.
#[test]
fn only_the_callers_stream() {
    let Some(gpu) = gpu_alone() else { return };
    let inputs = plain(Case::new([1, 2, 2], [300, 700], 64), 72, DType::F16);
    let call = OnGpu::new(&gpu, &inputs.problem(), &recipe("vc16-expcast"), Wanted::default());
    let want =
        OnGpu::new(&gpu, &inputs.problem(), &recipe("vc16-expcast"), Wanted::default()).run(Grouping::Cold);
    let (release, held) = channel::<()>();
    // Never freed: the driver's thread may still look at it when an assertion here has failed.
    let held: &'static Receiver<()> = Box::leak(Box::new(held));
    let stream = handle(gpu.stream());
    // SAFETY: `held` lives for ever, and only the driver's thread receives from it.
    unsafe { raw::launch_host_function(stream, hold, std::ptr::from_ref(held).cast_mut().cast()) }
        .expect("holds");
    let start = Instant::now();
    call.launch(Grouping::Cold);
    let took = start.elapsed();
    std::thread::sleep(Duration::from_millis(50));
    let untouched = call.untouched();
    release.send(()).expect("the stream waits");
    assert!(took < Duration::from_secs(1), "the call took {took:?}: it waits for the stream");
    assert!(untouched, "the output was written while the caller's stream was held up");
    assert!(call.result().bytes == want.bytes, "another result after the wait");
}

/// Two plans on two streams at once, from two threads, do not disturb each other.
#[test]
fn plans_side_by_side() {
    let Some(first) = gpu() else { return };
    let second = first.beside();
    fn of<'g>(gpu: &'g Gpu, seed: u64, text: &str) -> (OnGpu<'g>, Vec<u8>) {
        let inputs = plain(Case::new([1, 3, 3], [600, 2000], 128), seed, DType::Bf16);
        let call = OnGpu::new(gpu, &inputs.problem(), &recipe(text), Wanted::default());
        let alone = call.run(Grouping::Cold).bytes;
        (call, alone)
    }
    let (a, b) = (of(&first, 73, "vc16-expcast"), of(&second, 74, "vc8-fp8qk"));
    std::thread::scope(|scope| {
        for (call, alone) in [&a, &b] {
            scope.spawn(move || {
                for _ in 0..20 {
                    assert!(
                        call.run(Grouping::Cold).bytes == *alone,
                        "another plan's call changed this one's result"
                    );
                }
            });
        }
    });
}

/// 2,000 calls: no memory is taken and every hundredth result has the same bits.
#[test]
fn two_thousand_calls() {
    let Some(gpu) = gpu_alone() else { return };
    let inputs = plain(Case::new([1, 2, 2], [512, 640], 128), 75, DType::Bf16);
    for text in ["vc16-expcast", "vc8-fp8qk"] {
        let call = OnGpu::new(&gpu, &inputs.problem(), &recipe(text), Wanted::default());
        let first = call.run(Grouping::Cold).bytes;
        let free = || result::mem_get_info().expect("the driver tells").0;
        let before = free();
        for i in 1..=1000 {
            call.launch(Grouping::Cold);
            if i % 100 == 0 {
                assert!(call.result().bytes == first, "{text}: call {i} gives other bits");
            }
        }
        assert_eq!(before, free(), "{text}: free memory before and after 1,000 calls");
    }
}

/// The memory of a plan is what it says, and is given back.
#[test]
fn plans_give_back_their_memory() {
    let Some(gpu) = gpu_alone() else { return };
    let inputs = plain(Case::new([1, 2, 2], [512, 640], 128), 76, DType::Bf16);
    let spec = spec(&inputs.problem(), &recipe("vc16-expcast"), Wanted::default());
    let plan = || DevicePlan::new(&gpu.device, spec.clone()).expect("plans");
    drop(plan());
    let free = || result::mem_get_info().expect("the driver tells").0;
    let before = free();
    for _ in 0..100 {
        drop(plan());
    }
    assert_eq!(before, free(), "free memory before and after 100 plans");
}

fn plan_error(gpu: &Gpu, spec: Spec) -> Error {
    match DevicePlan::new(&gpu.device, spec) {
        Ok(plan) => panic!("planned: {:?}", plan.spec()),
        Err(e) => e,
    }
}

/// Every message names what was expected and given.
#[test]
fn errors_of_a_plan() {
    let Some(gpu) = gpu() else { return };
    let inputs = plain(Case::new([1, 2, 2], [64, 64], 64), 77, DType::Bf16);
    let good = spec(&inputs.problem(), &recipe("vc16-expcast"), Wanted::default());
    let tensor = |spec: Spec, name: &str, needle: &str| match plan_error(&gpu, spec) {
        e @ Error::Tensor { tensor, .. } => {
            assert_eq!(tensor, name, "{e}");
            assert!(e.to_string().contains(needle), "`{e}` does not say `{needle}`");
        }
        e => panic!("wanted an error of tensor {name}, got {e:?}"),
    };
    tensor(Spec { input: DType::F32, ..good.clone() }, "q", "f32");
    tensor(Spec { q: [8192, 4096, 68], ..good.clone() }, "q", "multiples of 8");
    tensor(Spec { k: [8193, 4096, 64], ..good.clone() }, "k", "multiples of 8");
    tensor(Spec { v: [8192, 4100, 64], ..good.clone() }, "v", "multiples of 8");
    tensor(Spec { o: [8192, 4096, 65], ..good.clone() }, "o", "even");
    for head_dim in [36, 136, 256] {
        let shape = Shape { head_dim, ..good.shape };
        tensor(Spec { shape, ..good.clone() }, "q", &format!("head_dim {head_dim}"));
    }
    match plan_error(&gpu, Spec { promote: 0, ..good.clone() }) {
        Error::Option { option: "promote", .. } => {}
        e => panic!("{e:?}"),
    }
    // Recipes that no kernel of Hopper covers, and one that contradicts itself.
    for text in [
        "exact",
        "sage3",
        "vc4+rowsum=exact",
        "vc16+order=balanced",
        "vc16-expcast+beta=-0.35",
        "vc16+rotate-v=on",
    ] {
        match plan_error(&gpu, Spec { recipe: recipe(text), ..good.clone() }) {
            Error::Recipe { recipe, reason } => {
                assert_eq!(recipe, text);
                assert!(reason.contains("CPU backend"), "{text}: {reason}");
            }
            e => panic!("{text}: {e:?}"),
        }
    }
    let contradiction = Recipe { center_q: true, ..recipe("vc16") };
    assert!(matches!(plan_error(&gpu, Spec { recipe: contradiction, ..good.clone() }), Error::Recipe { .. }));
    // A petabyte of keys.
    let shape =
        Shape { batch: 64, q_heads: 64, kv_heads: 64, q_tokens: 128, kv_tokens: 1 << 22, ..good.shape };
    match plan_error(&gpu, Spec { shape, ..good }) {
        Error::Device { reason } => assert!(reason.contains("allocating"), "{reason}"),
        e => panic!("{e:?}"),
    }
    match Device::new(99) {
        Err(Error::Device { reason }) => assert!(reason.contains("GPU 99"), "{reason}"),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn errors_of_a_call() {
    let Some(gpu) = gpu() else { return };
    let inputs = plain(Case::new([1, 2, 2], [64, 64], 64), 78, DType::Bf16);
    let call = OnGpu::new(&gpu, &inputs.problem(), &recipe("vc16-expcast"), Wanted::default());
    // SAFETY: a call that is refused launches nothing, one that is not has the right tensors.
    let run = |tensors: &Tensors, grouping| unsafe { call.plan.run(gpu.stream(), tensors, grouping) };
    let good = call.tensors;
    let wrong = [
        ("q", Tensors { q: good.q + 8, ..good }),
        ("k", Tensors { k: 0, ..good }),
        ("v", Tensors { v: good.v + 2, ..good }),
        ("o", Tensors { o: good.o + 4, ..good }),
    ];
    for (name, tensors) in wrong {
        match run(&tensors, Grouping::Cold) {
            Err(Error::Tensor { tensor, .. }) => assert_eq!(tensor, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    match run(&good, Grouping::Reuse) {
        Err(Error::Option { option: "grouping", .. }) => {}
        other => panic!("an order was reused that was never made: {other:?}"),
    }
    // A refused call leaves the plan as it was: a warm start without centroids is a cold one.
    run(&good, Grouping::Warm).expect("groups");
    let warm = call.result().bytes;
    run(&good, Grouping::Cold).expect("groups again");
    assert!(call.result().bytes == warm, "the first warm start is not a cold one");
    run(&good, Grouping::Reuse).expect("reuses");
    assert!(call.result().bytes == warm, "a reused order gives another result");
}

/// The backend on host tensors says the same, before anything reaches the device.
#[test]
fn errors_of_the_backend() {
    let Some(_gpu) = gpu() else { return };
    let cuda = Cuda::new(0).expect("the GPU is there");
    assert_eq!(cuda.name(), "cuda");
    assert!(cuda.device().contains("compute capability"), "{}", cuda.device());
    let case = Case::new([1, 2, 2], [64, 64], 64);
    let [narrow, other, wide] = [DType::Bf16, DType::F16, DType::F32].map(|dtype| plain(case, 79, dtype));
    let group = |problem: &Problem| {
        let plan = Plan::new(problem, &recipe("vc16-expcast"), F32_LSE).expect("valid on the CPU");
        cuda.group(&plan, problem, None).map(|_| ())
    };
    let mixed = Problem { k: other.k.view(), ..narrow.problem() };
    assert!(matches!(group(&mixed), Err(Error::Tensor { tensor: "k", .. })), "{:?}", group(&mixed));
    assert!(matches!(group(&wide.problem()), Err(Error::Tensor { tensor: "q", .. })));
    let odd = Inputs::new(&Case::new([1, 1, 1], [8, 8], 12).normal(80), DType::F16, Layout::Bhsd, Gaps::None);
    assert!(matches!(group(&odd.problem()), Err(Error::Tensor { tensor: "q", .. })));
}
