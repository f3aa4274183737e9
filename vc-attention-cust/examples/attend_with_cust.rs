//! Attention on buffers of `cust`, compared with the CPU backend.
//!
//! `cargo xtask cust` builds it on a machine without CUDA. It needs an NVIDIA driver to start; it exits with 1 when
//! GPU and CPU disagree.

use std::error::Error;
use std::process::ExitCode;

use cust::context::CurrentContext;
use cust::prelude::*;
use half::bf16;
use vc_attention::backend::cpu::{Cpu, Orders};
use vc_attention::backend::cuda::{DevicePlan, Grouping, PROMOTE, Spec};
use vc_attention::synth::Synth;
use vc_attention::{
    DType, Elements, Layout, Options, OutputType, Plan, Problem, Recipe, Shape, TensorView, grouping,
    run_on_order,
};
use vc_attention_cust::{Call, Output, device, run};

const HEADS: usize = 2;

/// Largest relative distance between GPU and CPU: a score that rounds otherwise moves its weight by one code.
const NEAR: f64 = 0.02;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    // Two heads whose values cluster as those of a video model do, laid out (batch, tokens, heads, dim).
    let synth = Synth::small(1);
    let (tokens, dim) = (synth.tokens(), synth.head_dim);
    let shape = Shape {
        batch: 1,
        q_heads: HEADS,
        kv_heads: HEADS,
        q_tokens: tokens,
        kv_tokens: tokens,
        head_dim: dim,
    };
    let heads: Vec<_> = (0..HEADS).map(|head| synth.head(head)).collect();
    let interleave = |part: fn(&vc_attention::synth::Head) -> &[f32]| -> Vec<bf16> {
        let row = |i: usize| &part(&heads[i % HEADS])[i / HEADS * dim..][..dim];
        (0..HEADS * tokens).flat_map(row).map(|&x| bf16::from_f32(x)).collect()
    };
    let (q, k, v) = (interleave(|h| &h.q), interleave(|h| &h.k), interleave(|h| &h.v));
    let strides = [(tokens * HEADS * dim) as i64, dim as i64, (HEADS * dim) as i64];
    let recipe = Recipe::default_for_cpu();
    let view = |name, x| TensorView::new(name, x, [1, HEADS, tokens, dim], Layout::Bshd);
    let problem = Problem::new(view("q", q.as_slice())?, view("k", k.as_slice())?, view("v", v.as_slice())?);

    // The GPU, through cust from end to end.
    cust::init(CudaFlags::empty())?;
    let context = Context::new(Device::get_device(0)?)?;
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
    let spec = Spec {
        shape,
        recipe: recipe.clone(),
        scale: problem.scale(),
        input: DType::Bf16,
        output: DType::F32,
        q: strides,
        k: strides,
        v: strides,
        o: strides,
        promote: PROMOTE,
    };
    let plan = DevicePlan::new(&device(&context)?, spec)?;
    let upload = |x: &[bf16]| DeviceBuffer::from_slice(&x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    let (q, k, v) = (upload(&q)?, upload(&k)?, upload(&v)?);
    let mut o = DeviceBuffer::<f32>::zeroed(HEADS * tokens * dim)?;
    let mut lse = DeviceBuffer::<f32>::zeroed(HEADS * tokens)?;
    CurrentContext::synchronize()?;
    let call = Call { q: &q, k: &k, v: &v, o: Output::F32(&mut o), lse: Some(&mut lse), kv_lens: None };
    // SAFETY: all buffers live to the end of `main`, and the stream is waited for below.
    unsafe { run(&plan, &stream, call, Grouping::Cold)? };
    stream.synchronize()?;
    let (gpu, gpu_lse) = (o.as_host_vec()?, lse.as_host_vec()?);

    // The CPU on the order that the GPU chose.
    let order = plan.operands(vc_attention_cust::stream(&stream))?.order;
    let of_head = |order: &[u32]| grouping::Grouping { order: order.to_vec(), ..Default::default() };
    let orders = Orders(order.chunks(tokens).map(of_head).collect());
    let options = Options { output: OutputType::F32, lse: true };
    let cpu = run_on_order(&Cpu, &Plan::new(&problem, &recipe, options)?, &problem, orders)?.output;
    let view = cpu.o.view();
    let Elements::F32(cpu_o) = view.elements() else { return Err("asked for f32".into()) };

    let (mut distance, mut norm) = (0.0f64, 0.0f64);
    for (i, cpu) in cpu_o.chunks_exact(dim).enumerate() {
        let (head, token) = (i / tokens, i % tokens);
        for (gpu, cpu) in gpu[(token * HEADS + head) * dim..].iter().zip(cpu) {
            distance += f64::from(gpu - cpu).powi(2);
            norm += f64::from(*cpu).powi(2);
        }
    }
    let relative = (distance / norm).sqrt();
    let cpu_lse = cpu.lse.unwrap_or_default();
    let lse_off = gpu_lse.iter().zip(&cpu_lse).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
    println!(
        "{} on buffers of cust, {HEADS} heads x {tokens} tokens x {dim}: GPU and CPU differ by {relative:.5}, their LSE by {lse_off:.5}",
        recipe.name
    );
    let good = relative <= NEAR && lse_off <= NEAR as f32;
    println!("{}", if good { "they agree" } else { "they DISAGREE" });
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
