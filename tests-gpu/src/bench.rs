//! Times by CUDA events.

use anyhow::Result;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};
use kernels_gpu::kernels::tiles::HEAD_DIM;

use crate::Cli;
use crate::gpu::{Arguments, Gpu, Kernel};
use crate::operands::{Problem, Shape, Variant};

/// Times every kernel at every size: one random head, copied to all heads (tiles of their own in memory).
pub fn run(gpu: &Gpu, kernels: &[Kernel], cli: &Cli, alive: &dyn Fn()) -> Result<()> {
    println!("kernel, tokens, heads, promotion: median ms (fastest) TFLOP/s (at the fastest), runs");
    for &tokens in &cli.tokens {
        let shape = Shape { batch: 1, q_heads: 1, kv_heads: 1, q: tokens, kv: tokens };
        let problem = match &cli.data {
            Some(file) => Problem::from_file(file, tokens)?,
            None => Problem::random(shape, None, 1.0, 1),
        };
        alive();
        // Two packings hold both kinds of scores and both kinds of values.
        let f16_smooth =
            Tiles::new(gpu, &problem, Variant { e4m3_scores: false, expcast: true, smooth: true }, cli)?;
        alive();
        let e4m3_plain =
            Tiles::new(gpu, &problem, Variant { e4m3_scores: true, expcast: true, smooth: false }, cli)?;
        alive();
        for kernel in (0..cli.rounds).flat_map(|_| kernels) {
            let variant = Variant::of(kernel.entry.name);
            let scores = if variant.e4m3_scores { &e4m3_plain } else { &f16_smooth };
            let values = if variant.smooth { &f16_smooth } else { &e4m3_plain };
            for &promote in &cli.promote {
                time(gpu, kernel, scores, values, tokens, promote, cli, alive)?;
            }
        }
    }
    Ok(())
}

struct Tiles {
    q: CudaSlice<u8>,
    k: CudaSlice<u8>,
    v: CudaSlice<u8>,
    means: CudaSlice<u8>,
    scale: CudaSlice<u8>,
}

impl Tiles {
    fn new(gpu: &Gpu, problem: &Problem, variant: Variant, cli: &Cli) -> Result<Self> {
        let o = problem.pack(variant);
        Ok(Self {
            q: gpu.repeat(&o.q_tiles, cli.heads)?,
            k: gpu.repeat(&o.k_tiles, cli.heads)?,
            v: gpu.repeat(&o.v_tiles, cli.heads)?,
            means: gpu.repeat(&o.mean_tiles, cli.heads)?,
            scale: gpu.repeat(bytes_of(&o.scale), cli.heads)?,
        })
    }
}

fn bytes_of(x: &[f32]) -> &[u8] {
    // SAFETY: any f32 is four bytes.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

impl Gpu {
    /// A buffer of `heads` copies of `bytes`.
    fn repeat(&self, bytes: &[u8], heads: usize) -> Result<CudaSlice<u8>> {
        let source = self.stream.clone_htod(bytes)?;
        let mut all = self.stream.alloc_zeros::<u8>(bytes.len() * heads)?;
        for head in 0..heads {
            let at = head * bytes.len();
            self.stream.memcpy_dtod(&source, &mut all.slice_mut(at..at + bytes.len()))?;
        }
        self.stream.synchronize()?;
        Ok(all)
    }
}

/// Warms up, then runs for the given time and prints the median.
#[expect(clippy::too_many_arguments, reason = "one call, above")]
fn time(
    gpu: &Gpu,
    kernel: &Kernel,
    scores: &Tiles,
    values: &Tiles,
    tokens: usize,
    promote: u32,
    cli: &Cli,
    alive: &dyn Fn(),
) -> Result<()> {
    let (stream, heads) = (&gpu.stream, cli.heads);
    let mut out = stream.alloc_zeros::<u8>(heads * tokens * HEAD_DIM * 2)?;
    let mut row_max = stream.alloc_zeros::<u32>(heads)?;
    let arguments = Arguments {
        pointers: [
            scores.q.device_ptr(stream).0,
            scores.k.device_ptr(stream).0,
            values.v.device_ptr(stream).0,
            values.means.device_ptr(stream).0,
            0,
            0,
            values.scale.device_ptr(stream).0,
            0,
            0,
            out.device_ptr_mut(stream).0,
            0,
            0,
            row_max.device_ptr_mut(stream).0,
        ],
        q_tokens: tokens as u32,
        kv_tokens: tokens as u32,
        q_heads: heads as u32,
        kv_heads: heads as u32,
        batch: 1,
        head_dim: HEAD_DIM as u32,
        out_strides: [(heads * tokens * HEAD_DIM) as i64, (tokens * HEAD_DIM) as i64, HEAD_DIM as i64],
        promote,
        out_type: 2,
    };
    let event = || stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    let (before, after) = (event()?, event()?);
    let once = || -> Result<f64> {
        before.record(stream)?;
        gpu.launch(kernel, &arguments)?;
        after.record(stream)?;
        let ms = before.elapsed_ms(&after)? as f64;
        alive();
        Ok(ms)
    };
    let warm = once()?.max(once()?);
    let runs = ((cli.seconds * 1e3 / warm) as usize).clamp(3, 200);
    let mut times = (0..runs).map(|_| once()).collect::<Result<Vec<_>>>()?;
    times.sort_by(f64::total_cmp);
    let (median, fastest) = (times[runs / 2], times[0]);
    let tflops = |ms: f64| 4.0 * (heads * tokens * tokens * HEAD_DIM) as f64 / ms / 1e9;
    println!(
        "{}, {tokens}, {heads}, {promote}: {median:.3} ms ({fastest:.3}) {:.0} TFLOP/s ({:.0}), {runs} runs",
        kernel.label,
        tflops(median),
        tflops(fastest)
    );
    Ok(())
}
