//! Sizes at which 32-bit arithmetic ends: 160,000 tokens and beyond, strides and buffers past 2^31 elements.

use std::ptr::{null, null_mut};

use cudarc::driver::{result, sys};
use half::bf16;
use rayon::prelude::*;
use vc_attention::backend::cuda::{
    Buffer, DevicePlan, DevicePtr, Grouping, PROMOTE, Rope, Spec, Strides, Tensors,
};
use vc_attention::{DType, Layout, Problem, Shape, TensorView};

use crate::attention::check;
use crate::call::{OnGpu, Result, Twin, Wanted, between};
use crate::common::{Rng, recipe};
use crate::device::{Gpu, gpu};

const DIM: usize = 128;

/// Rows of N(0, 1) in bfloat16 around one of a few centres, the same on any number of threads.
fn rows(count: usize, seed: u64) -> Vec<bf16> {
    let centres: Vec<Vec<f32>> = (0..16).map(|c| Rng(seed ^ (c << 40)).normals(DIM)).collect();
    let row = |i: usize| {
        let mut rng = Rng(seed.wrapping_mul(0x1234_5678_9ABC_DEF1) ^ ((i as u64) << 20));
        let centre = &centres[rng.below(16)];
        centre.iter().map(|c| bf16::from_f32(0.5 * c + rng.normal())).collect::<Vec<_>>()
    };
    (0..count).into_par_iter().flat_map_iter(row).collect()
}

fn view<'a>(name: &'static str, x: &'a [bf16], heads: usize) -> TensorView<'a> {
    TensorView::new(name, x, [1, heads, x.len() / DIM / heads, DIM], Layout::Bhsd).expect("whole rows")
}

/// A copy of `rows` rows between host and device, its ends left to the caller.
fn rows_of(rows: usize) -> sys::CUDA_MEMCPY2D {
    use sys::CUmemorytype::CU_MEMORYTYPE_HOST;
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CU_MEMORYTYPE_HOST,
        srcHost: null(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: 2 * DIM,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CU_MEMORYTYPE_HOST,
        dstHost: null_mut(),
        dstDevice: 0,
        dstArray: null_mut(),
        dstPitch: 2 * DIM,
        WidthInBytes: 2 * DIM,
        Height: rows,
    }
}

/// Copies rows that lie next to each other on the host to rows `stride` elements apart on the device.
fn scatter(gpu: &Gpu, rows: &[bf16], to: DevicePtr, stride: usize) {
    gpu.device.context().bind_to_thread().expect("binds");
    let copy = sys::CUDA_MEMCPY2D {
        srcHost: rows.as_ptr().cast(),
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstDevice: to,
        dstPitch: 2 * stride,
        ..rows_of(rows.len() / DIM)
    };
    // SAFETY: the caller's buffer reaches the last row.
    unsafe { sys::cuMemcpy2D_v2(&copy) }.result().expect("copies");
    gpu.device.context().synchronize().expect("the copy arrives");
}

/// The reverse of [`scatter`].
fn gather(rows: &mut [bf16], from: DevicePtr, stride: usize) {
    let copy = sys::CUDA_MEMCPY2D {
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcDevice: from,
        srcPitch: 2 * stride,
        dstHost: rows.as_mut_ptr().cast(),
        ..rows_of(rows.len() / DIM)
    };
    // SAFETY: the caller's buffer reaches the last row.
    unsafe { sys::cuMemcpy2D_v2(&copy) }.result().expect("copies");
}

fn buffer(gpu: &Gpu, bytes: usize) -> Buffer {
    Buffer::new(&gpu.device, bytes)
        .unwrap_or_else(|e| panic!("this test needs {bytes} bytes on the device: {e}"))
}

/// Runs a plan on raw tensors and waits.
fn run(gpu: &Gpu, spec: Spec, tensors: &Tensors) {
    let plan = DevicePlan::new(&gpu.device, spec).expect("plans");
    // SAFETY: the callers' buffers reach what their strides say.
    unsafe { plan.run(gpu.stream(), tensors, Grouping::Cold) }.expect("launches");
    gpu.stream().synchronize().expect("runs");
}

fn contiguous_spec(shape: Shape, text: &str, output: DType) -> Spec {
    let strides =
        |heads: usize, tokens: usize| [(heads * tokens * DIM) as i64, (tokens * DIM) as i64, DIM as i64];
    let (q, kv) = (strides(shape.q_heads, shape.q_tokens), strides(shape.kv_heads, shape.kv_tokens));
    let scale = 1.0 / (DIM as f32).sqrt();
    Spec {
        shape,
        recipe: recipe(text),
        scale,
        input: DType::Bf16,
        output,
        q,
        k: kv,
        v: kv,
        o: q,
        promote: PROMOTE,
    }
}

/// One head of more than 160,000 tokens: some rows against f64, then the same call on views whose last elements lie
/// beyond 2^31, which must give the same bits.
fn long_head(gpu: &Gpu, text: &str, tokens: usize, stride: usize) {
    let [q, k, v] = [1, 2, 3].map(|seed| rows(tokens, seed));
    let problem = Problem::new(view("q", &q, 1), view("k", &k, 1), view("v", &v, 1));
    let call = OnGpu::new(gpu, &problem, &recipe(text), Wanted::default());
    let whole = call.run(Grouping::Cold);

    // The first rows, which the balance of E4M3 looks at, some between, and the last.
    let chosen: Vec<usize> =
        (0..128).chain((128..tokens - 3).step_by(tokens / 40)).chain(tokens - 3..tokens).collect();
    let sample: Vec<bf16> = chosen.iter().flat_map(|&row| &q[row * DIM..][..DIM]).copied().collect();
    let sample_problem = Problem { q: view("q", &sample, 1), ..problem };
    let twin = Twin::new(&sample_problem, &recipe(text), &call.orders(&call.operands()));
    let cpu_max = twin.attend().observed.max_score;
    let result = Result {
        o: chosen.iter().flat_map(|&row| &whole.o[row * DIM..][..DIM]).copied().collect(),
        lse: chosen.iter().map(|&row| whole.lse[row]).collect(),
        bytes: Vec::new(),
        observed: whole.observed,
    };
    assert!(
        whole.observed.max_score >= cpu_max,
        "{text}: rows of the sample have larger scores than all rows"
    );
    // The largest score is that of all rows, not of the sample: no bound on it here.
    check(&between(&result, &twin), 2e-3, f64::INFINITY, &format!("{text}, {tokens} tokens"));
    drop((call, twin));

    assert!((tokens - 1) * stride > 1 << 31, "the last row lies below 2^31");
    let narrow =
        OnGpu::new(gpu, &problem, &recipe(text), Wanted { output: DType::Bf16, ..Wanted::default() });
    let want = narrow.run(Grouping::Cold).o;
    let shared = buffer(gpu, 2 * tokens * stride);
    let at = |place: usize| shared.ptr() + (2 * DIM * place) as u64;
    for (place, x) in [&q, &k, &v].into_iter().enumerate() {
        scatter(gpu, x, at(place), stride);
    }
    let strides: Strides = [0, 0, stride as i64];
    let shape =
        Shape { batch: 1, q_heads: 1, kv_heads: 1, q_tokens: tokens, kv_tokens: tokens, head_dim: DIM };
    let spec = contiguous_spec(shape, text, DType::Bf16);
    let tensors =
        Tensors { q: at(0), k: at(1), v: at(2), o: at(3), lse: 0, kv_lens: 0, rope: Rope::default() };
    run(gpu, Spec { q: strides, k: strides, v: strides, o: strides, ..spec }, &tensors);
    let mut got = vec![bf16::ZERO; tokens * DIM];
    gather(&mut got, at(3), stride);
    let differs = got.iter().zip(&want).position(|(got, want)| got.to_f32() != *want);
    let row = differs.map(|i| i / DIM);
    assert!(differs.is_none(), "{text}: strided and contiguous calls differ from row {row:?} on");
}

#[test]
fn large_head_f16() {
    let Some(gpu) = gpu() else { return };
    long_head(&gpu, "vc16-expcast", 163_841, 1 << 14);
}

#[test]
fn large_head_e4m3() {
    let Some(gpu) = gpu() else { return };
    long_head(&gpu, "vc8-fp8qk", 160_129, 1 << 14);
}

/// The second batch lies beyond 2^31 elements, in the inputs and in the output.
#[test]
fn large_batch_stride() {
    let Some(gpu) = gpu() else { return };
    const TOKENS: usize = 300;
    const STRIDE: usize = (1 << 31) + 64;
    let [q, k, v] = [4, 5, 6].map(|seed| rows(2 * TOKENS, seed));
    let problem = Problem::new(
        TensorView::new("q", q.as_slice(), [2, 1, TOKENS, DIM], Layout::Bhsd).expect("whole rows"),
        TensorView::new("k", k.as_slice(), [2, 1, TOKENS, DIM], Layout::Bhsd).expect("whole rows"),
        TensorView::new("v", v.as_slice(), [2, 1, TOKENS, DIM], Layout::Bhsd).expect("whole rows"),
    );
    let want = OnGpu::new(
        &gpu,
        &problem,
        &recipe("vc16-expcast"),
        Wanted { output: DType::Bf16, ..Wanted::default() },
    )
    .run(Grouping::Cold)
    .o;
    // q, k, v and o next to each other in each batch.
    let size = TOKENS * DIM;
    let shared = buffer(&gpu, 2 * (STRIDE + 4 * size));
    let at = |place: usize, batch: usize| shared.ptr() + 2 * (place * size + batch * STRIDE) as u64;
    for (place, x) in [&q, &k, &v].into_iter().enumerate() {
        (0..2).for_each(|batch| scatter(&gpu, &x[batch * size..][..size], at(place, batch), DIM));
    }
    let strides: Strides = [STRIDE as i64, size as i64, DIM as i64];
    let shape =
        Shape { batch: 2, q_heads: 1, kv_heads: 1, q_tokens: TOKENS, kv_tokens: TOKENS, head_dim: DIM };
    let spec = contiguous_spec(shape, "vc16-expcast", DType::Bf16);
    let tensors = Tensors {
        q: at(0, 0),
        k: at(1, 0),
        v: at(2, 0),
        o: at(3, 0),
        lse: 0,
        kv_lens: 0,
        rope: Rope::default(),
    };
    run(&gpu, Spec { q: strides, k: strides, v: strides, o: strides, ..spec }, &tensors);
    for batch in 0..2 {
        let mut got = vec![bf16::ZERO; size];
        gather(&mut got, at(3, batch), DIM);
        let same = got.iter().zip(&want[batch * size..]).all(|(got, want)| got.to_f32() == *want);
        assert!(same, "batch {batch} differs from the contiguous call");
    }
}

/// Keys, values and their tiles of more than 2^32 bytes: the last heads hold other values than all before them,
/// so that an offset that wraps around would show.
#[test]
fn large_operands() {
    let Some(gpu) = gpu() else { return };
    const TOKENS: usize = 75_600;
    const HEADS: usize = 224;
    const OTHERS: usize = 4;
    const Q_TOKENS: usize = 130;
    let size = 2 * TOKENS * DIM;
    let (kv, q) = (rows(2 * TOKENS, 7), rows(Q_TOKENS, 8));
    let text = "vc16-expcast+iterations=1";

    // Keys are their own values here: half the memory.
    let two_q = [q.as_slice(), &q].concat();
    let two = OnGpu::new(
        &gpu,
        &Problem::new(view("q", &two_q, 2), view("k", &kv, 2), view("v", &kv, 2)),
        &recipe(text),
        Wanted::default(),
    );
    let want = two.run(Grouping::Cold);

    let heads = gpu.upload(&kv);
    let all = buffer(&gpu, HEADS * size);
    for head in 0..HEADS {
        let from = heads.ptr() + if head < HEADS - OTHERS { 0 } else { size as u64 };
        // SAFETY: both buffers hold the head.
        unsafe { result::memcpy_dtod_sync(all.ptr() + (head * size) as u64, from, size) }.expect("copies");
    }
    let queries = gpu.upload(&(0..HEADS).flat_map(|_| q.iter().copied()).collect::<Vec<_>>());
    let o = buffer(&gpu, 4 * HEADS * Q_TOKENS * DIM);
    let lse = buffer(&gpu, 4 * HEADS * Q_TOKENS);
    let shape = Shape {
        batch: 1,
        q_heads: HEADS,
        kv_heads: HEADS,
        q_tokens: Q_TOKENS,
        kv_tokens: TOKENS,
        head_dim: DIM,
    };
    let tensors = Tensors {
        q: queries.ptr(),
        k: all.ptr(),
        v: all.ptr(),
        o: o.ptr(),
        lse: lse.ptr(),
        kv_lens: 0,
        rope: Rope::default(),
    };
    gpu.device.context().synchronize().expect("the copies arrive");
    run(&gpu, contiguous_spec(shape, text, DType::F32), &tensors);
    let got: Vec<f32> = o.to_vec(HEADS * Q_TOKENS * DIM).expect("reads back");
    let got_lse: Vec<f32> = lse.to_vec(HEADS * Q_TOKENS).expect("reads back");
    for head in 0..HEADS {
        let like = usize::from(head >= HEADS - OTHERS);
        let same = |got: &[f32], want: &[f32], width: usize| {
            let (got, want) = (&got[head * width..][..width], &want[like * width..][..width]);
            got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits())
        };
        let (o, lse) = (same(&got, &want.o, Q_TOKENS * DIM), same(&got_lse, &want.lse, Q_TOKENS));
        assert!(
            o.is_none() && lse.is_none(),
            "head {head} differs from the same head alone: o at {o:?}, lse at {lse:?}"
        );
    }
}
