//! The CPU backend against the clock.
//!
//! `gemm/...` is the yardstick: the two products of every head, whole, by the `gemm` crate on the same threads.
//! The exact recipe has to stay within 3 times that, every emulated recipe within 6 times the exact one.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::fidelity::reference;
use vc_attention::{DType, Layout, Options, Plan, Problem, Recipe, Tensor};

const HEADS: usize = 2;
const TOKENS: usize = 4096;
const DIM: usize = 128;

/// Well-spread values around zero with deviation near 1, the same on every run.
fn tensor(seed: u64) -> Tensor {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let values = (0..HEADS * TOKENS * DIM).map(|_| (0..12).map(|_| uniform()).sum()).collect();
    Tensor::from_bhsd(values, [1, HEADS, TOKENS, DIM], DType::F32, Layout::Bhsd)
}

/// S = Q K^T and O = S V of one head, nothing between them.
fn two_products(q: &[f32], k: &[f32], v: &[f32], s: &mut [f32], o: &mut [f32]) {
    let (n, d) = (TOKENS as isize, DIM as isize);
    let threads = gemm::Parallelism::Rayon(0);
    // SAFETY: row-major matrices of TOKENS x DIM (q, k, v, o) and TOKENS x TOKENS (s), all of that length.
    unsafe {
        assert!(s.len() == TOKENS * TOKENS && [q.len(), k.len(), v.len(), o.len()] == [TOKENS * DIM; 4]);
        let (sp, op) = (s.as_mut_ptr(), o.as_mut_ptr());
        let (q, k, v) = (q.as_ptr(), k.as_ptr(), v.as_ptr());
        gemm::gemm(
            TOKENS, TOKENS, DIM, sp, 1, n, false, q, 1, d, k, d, 1, 0.0, 1.0, false, false, false, threads,
        );
        gemm::gemm(
            TOKENS, DIM, TOKENS, op, 1, d, false, sp, 1, n, v, 1, d, 0.0, 1.0, false, false, false, threads,
        );
    }
}

fn whole_calls(c: &mut Criterion) {
    let tensors = [1, 2, 3].map(tensor);
    let [q, k, v] = &tensors;
    let problem = Problem::new(q.view(), k.view(), v.view());
    let shape = problem.validate().expect("valid");
    let mut group = c.benchmark_group("1x2x4096x128");
    group.sample_size(10).warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(8));
    group.throughput(Throughput::Elements(shape.flops() as u64));

    let heads: Vec<[Vec<f32>; 3]> =
        (0..HEADS).map(|h| tensors.each_ref().map(|t| t.view().read_head(0, h, TOKENS))).collect();
    let (mut s, mut o) = (vec![0.0; TOKENS * TOKENS], vec![0.0; TOKENS * DIM]);
    group.bench_function("gemm", |b| {
        b.iter(|| {
            for [q, k, v] in &heads {
                two_products(q, k, v, &mut s, &mut o);
                black_box(&mut o);
            }
        });
    });
    for recipe in Recipe::all() {
        let plan = Plan::new(&problem, &recipe, Options::default()).expect("valid");
        group.bench_function(BenchmarkId::new("recipe", &recipe.name), |b| {
            b.iter(|| black_box(vc_attention::run(&Cpu, &plan, &problem, None).expect("runs")));
        });
    }
    group.bench_function("reference f64", |b| b.iter(|| black_box(reference::attention(&problem, &shape))));
    group.finish();
}

fn stages(c: &mut Criterion) {
    let [q, k, v] = [1, 2, 3].map(tensor);
    let problem = Problem::new(q.view(), k.view(), v.view());
    let mut group = c.benchmark_group("stages");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    group.throughput(Throughput::Elements((HEADS * TOKENS * DIM) as u64));
    for name in ["vc8-expcast", "vc16-expcast", "vc4"] {
        let plan =
            Plan::new(&problem, &Recipe::parse(name).expect("a recipe"), Options::default()).expect("valid");
        let order = Cpu.group(&plan, &problem, None).expect("groups");
        let queries = Cpu.prepare_q(&plan, &problem, &order).expect("prepares");
        group.bench_function(BenchmarkId::new("group, cold", name), |b| {
            b.iter(|| black_box(Cpu.group(&plan, &problem, None)));
        });
        group.bench_function(BenchmarkId::new("group, warm", name), |b| {
            b.iter(|| black_box(Cpu.group(&plan, &problem, Some(&order))));
        });
        group.bench_function(BenchmarkId::new("prepare q", name), |b| {
            b.iter(|| black_box(Cpu.prepare_q(&plan, &problem, &order)));
        });
        group.bench_function(BenchmarkId::new("prepare k", name), |b| {
            b.iter(|| black_box(Cpu.prepare_k(&plan, &problem, &order, &queries)));
        });
        group.bench_function(BenchmarkId::new("prepare v", name), |b| {
            b.iter(|| black_box(Cpu.prepare_v(&plan, &problem, &order)));
        });
    }
    group.finish();
}

/// One thread, a slice that stays in the L1 cache.
fn numerics(c: &mut Criterion) {
    use kernels_gpu::formats::{e4m3, f16, int8, nvfp4};
    use kernels_gpu::numerics::{exp2::exp2, expcast, hadamard};

    let values: Vec<f32> = (0..4096).map(|i| -(i as f32) * 0.03).collect();
    let mut out = vec![0.0f32; values.len()];
    let mut group = c.benchmark_group("numerics");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    group.throughput(Throughput::Elements(values.len() as u64));
    let mut each = |name: &str, f: &dyn Fn(&mut [f32])| {
        group.bench_function(name, |b| {
            b.iter(|| {
                out.copy_from_slice(&values);
                f(&mut out);
                black_box(&mut out);
            });
        });
    };
    /// One value after the other, with the vector instructions of this CPU.
    macro_rules! map {
        ($f:expr) => {
            &|x: &mut [f32]| pulp::Arch::new().dispatch(|| x.iter_mut().for_each(|x| *x = $f(*x)))
        };
    }
    each("exp2", map!(exp2));
    each("e4m3 round", map!(e4m3::round));
    each("f16 round", map!(f16::round));
    each("int8 round", map!(|x| int8::round_code(x, 0.7)));
    each("expcast f32", map!(|x| expcast::value_from_units(x, expcast::PAPER_BETA)));
    each("expcast packed", map!(|x| expcast::packed_value(x, expcast::PACKED_BETA)));
    each("exp2 + e4m3 round", map!(|x| e4m3::round(256.0 * exp2(x * 0.125))));
    each("nvfp4 blocks", &|x| {
        pulp::Arch::new()
            .dispatch(|| x.as_chunks_mut().0.iter_mut().for_each(|b| nvfp4::round_block(b, 0.05)));
    });
    each("hadamard 128", &|x| {
        pulp::Arch::new().dispatch(|| x.chunks_exact_mut(128).for_each(hadamard::rotate))
    });
    group.finish();
}

criterion_group!(benches, whole_calls, stages, numerics);
criterion_main!(benches);
