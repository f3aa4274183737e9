//! The cases that every kernel must pass, and the probes for one that does not.

use anyhow::Result;
use cudarc::driver::{DevicePtr, DevicePtrMut};
use half::{bf16, f16};
use kernels_gpu::kernels::tiles::{HEAD_DIM, KEYS};

use crate::Cli;
use crate::gpu::{Arguments, Gpu, Kernel};
use crate::operands::{Operands, Problem, Shape, Variant};
use crate::reference::{self, Outcome};
use crate::report::{diagnose, rel_l2};

/// Largest distance to the emulated kernel: its f16 scores round after every k step, the emulation's once, so a few
/// codes in a hundred differ by one (a ninth of the weight under ExpCast). Twice the largest that was measured.
const NEAR_EMULATION: f64 = 0.006;
/// Largest difference of an LSE: under ExpCast one code of one of two equal keys, ln(1 + 1/16); with exact exponentials
/// the rounding of the largest f16 scores of these cases.
const NEAR_LSE: [f64; 2] = [0.061, 0.02];
/// Largest relative difference of a row max: one step of f16.
const NEAR_ROW_MAX: f64 = 0.001;
/// Floor of the rule "at most twice the error of the emulation".
const FLOOR: f64 = 1e-3;

/// What the kernel is asked for besides its operands.
#[derive(Clone, Copy, Debug)]
struct Call {
    promote: u32,
    out_type: u32,
    poisoned: bool,
    /// Heads innermost in the output, as bshd.
    token_major: bool,
    /// Channels of the output.
    head_dim: usize,
}

const PLAIN: Call = Call { promote: 1, out_type: 0, poisoned: false, token_major: false, head_dim: HEAD_DIM };
/// What the output holds before a call; no kernel writes it.
const UNTOUCHED: u8 = 0xee;

/// Runs a kernel once and brings everything back: 128 channels a row, NaN where the kernel should have written and
/// did not or the other way round, and 0 beyond its channels.
fn run(
    gpu: &Gpu,
    kernel: &Kernel,
    problem: &Problem,
    o: &Operands,
    call: Call,
) -> Result<(Outcome, Vec<f32>)> {
    let (s, stream) = (problem.shape, &gpu.stream);
    let (q, k) = (stream.clone_htod(&o.q_tiles)?, stream.clone_htod(&o.k_tiles)?);
    let (v, means) = (stream.clone_htod(&o.v_tiles)?, stream.clone_htod(&o.mean_tiles)?);
    let scale = stream.clone_htod(&o.scale)?;
    let lens = stream.clone_htod(&problem.lens.iter().map(|l| *l as u32).collect::<Vec<_>>())?;
    let poisoned = stream.clone_htod(&vec![call.poisoned as u32; s.batch * s.kv_heads])?;
    let rows = s.batch * s.q_heads * s.q;
    // With fewer channels, a gap behind every row shows whether the kernel keeps to them.
    let pitch = if call.head_dim < HEAD_DIM { call.head_dim + 8 } else { HEAD_DIM };
    let width = if call.out_type == 0 { 4 } else { 2 };
    let mut out = stream.clone_htod(&vec![UNTOUCHED; rows * pitch * width])?;
    let mut lse = stream.clone_htod(&vec![1e30f32; rows])?;
    let mut row_max = stream.alloc_zeros::<u32>(s.batch * s.q_heads)?;
    let (d, tokens, heads) = (pitch as i64, s.q as i64, s.q_heads as i64);
    let out_strides = match call.token_major {
        true => [heads * tokens * d, d, heads * d],
        false => [heads * tokens * d, tokens * d, d],
    };
    let pointers = [
        q.device_ptr(stream).0,
        k.device_ptr(stream).0,
        v.device_ptr(stream).0,
        means.device_ptr(stream).0,
        // Factors of INT8, which `tests/gpu` checks.
        0,
        0,
        scale.device_ptr(stream).0,
        lens.device_ptr(stream).0,
        poisoned.device_ptr(stream).0,
        out.device_ptr_mut(stream).0,
        lse.device_ptr_mut(stream).0,
        0,
        row_max.device_ptr_mut(stream).0,
    ];
    let arguments = Arguments {
        pointers,
        q_tokens: s.q as u32,
        kv_tokens: s.kv as u32,
        q_heads: s.q_heads as u32,
        kv_heads: s.kv_heads as u32,
        batch: s.batch as u32,
        head_dim: call.head_dim as u32,
        out_strides,
        promote: call.promote,
        out_type: call.out_type,
    };
    gpu.launch(kernel, &arguments)?;
    stream.synchronize()?;
    let bytes = stream.clone_dtoh(&out)?;
    let element = |at: usize, c: usize| -> f64 {
        let i = at + c;
        let untouched = c < pitch && bytes[width * i..][..width].iter().all(|b| *b == UNTOUCHED);
        match call.out_type {
            _ if c >= pitch => 0.0,
            _ if untouched != (c >= call.head_dim) => f64::NAN,
            _ if untouched => 0.0,
            0 => f32::from_le_bytes(bytes[4 * i..][..4].try_into().expect("4 bytes")) as f64,
            1 => f16::from_le_bytes(bytes[2 * i..][..2].try_into().expect("2 bytes")).to_f64(),
            _ => bf16::from_le_bytes(bytes[2 * i..][..2].try_into().expect("2 bytes")).to_f64(),
        }
    };
    let mut result = Outcome { out: Vec::with_capacity(rows * HEAD_DIM), ..Outcome::default() };
    for row in 0..rows {
        let (b, h, t) = (row / s.q / s.q_heads, row / s.q % s.q_heads, row % s.q);
        let at = b as i64 * out_strides[0] + h as i64 * out_strides[1] + t as i64 * out_strides[2];
        result.out.extend((0..HEAD_DIM).map(|c| element(at as usize, c)));
    }
    result.lse = stream.clone_dtoh(&lse)?.into_iter().map(f64::from).collect();
    let row_max = stream.clone_dtoh(&row_max)?.into_iter().map(f32::from_bits).collect();
    Ok((result, row_max))
}

/// What a case may differ by beyond the rule.
#[derive(Clone, Copy)]
struct Tolerance {
    /// Rounding of the output type, relative.
    output: f64,
    /// Of an LSE, absolute.
    lse: f64,
}

/// The largest difference of two LSEs.
fn lse_off(got: &Outcome, want: &Outcome) -> f64 {
    let lse = got.lse.iter().zip(&want.lse).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
    lse.fold(0.0, |worst: f64, e| if e.is_nan() { e } else { worst.max(e) })
}

/// Compares one run with the references; prints a line, and on failure where it differs.
fn compare(
    name: &str,
    problem: &Problem,
    got: &(Outcome, Vec<f32>),
    refs: &(Outcome, Outcome),
    tolerance: Tolerance,
) -> bool {
    let (exact, emulated) = refs;
    let (out, row_max) = got;
    let error = rel_l2(&out.out, &exact.out);
    let allowed = 2.0 * rel_l2(&emulated.out, &exact.out) + FLOOR + tolerance.output;
    let near = rel_l2(&out.out, &emulated.out);
    let lse = lse_off(out, emulated);
    let tokens = problem.shape.q;
    let max_off = row_max.iter().enumerate().map(|(head, got)| {
        let rows = &emulated.max[head * tokens..(head + 1) * tokens];
        let want = rows.iter().filter(|m| m.is_finite()).fold(0.0f64, |a, m| a.max(m.abs()));
        (*got as f64 - want).abs() / want.max(1.0)
    });
    let max_off = max_off.fold(0.0, f64::max);
    let good = error <= allowed
        && near <= NEAR_EMULATION + tolerance.output
        && lse <= tolerance.lse
        && max_off <= NEAR_ROW_MAX;
    println!(
        "  {} {name}: rel_l2 {error:.5} (allowed {allowed:.5}), to the emulation {near:.5}, LSE off by {lse:.5}, row max by {max_off:.5}",
        if good { "ok  " } else { "FAIL" }
    );
    if !good {
        diagnose(&out.out, &emulated.out, tokens);
        let first = out.lse.iter().zip(&emulated.lse).take(4).map(|(a, b)| format!("{a:.3}/{b:.3}"));
        println!("    LSE got/want of the first rows: {}", first.collect::<Vec<_>>().join(" "));
    }
    good
}

/// All cases on all kernels; returns how many failed.
pub fn check(gpu: &Gpu, kernels: &[Kernel], verbose: bool, alive: &dyn Fn()) -> Result<usize> {
    let mut failed = 0;
    for kernel in kernels {
        println!("{}", kernel.label);
        let variant = Variant::of(kernel.entry.name);
        let mut seed = 0;
        let mut case = |name: &str, shape, lens, gain, call: Call, rounding: f64| -> Result<bool> {
            seed += 1;
            if verbose {
                println!("  ...  {name}");
            }
            let problem = Problem::random(shape, lens, gain, seed);
            let operands = problem.pack(variant);
            alive();
            let got = run(gpu, kernel, &problem, &operands, call)?;
            alive();
            let mut refs = reference::attention(&problem, &operands, variant);
            alive();
            for out in [&mut refs.0.out, &mut refs.1.out] {
                out.chunks_mut(HEAD_DIM).for_each(|row| row[call.head_dim..].fill(0.0));
            }
            let tolerance = Tolerance { output: rounding, lse: NEAR_LSE[!variant.expcast as usize] };
            Ok(compare(name, &problem, &got, &refs, tolerance))
        };
        let mut count = |good: bool| failed += !good as usize;

        for (i, kv) in [1, 2, 127, 128, 129, 191, 239, 1023, 2048, 4224].into_iter().enumerate() {
            for (j, q) in [1, 64, 127, 200].into_iter().enumerate() {
                let heads = (i + j) % 3 + 1;
                let shape = Shape { batch: 1, q_heads: heads, kv_heads: heads, q, kv };
                count(case(&format!("{heads} heads, q {q}, kv {kv}"), shape, None, 1.0, PLAIN, 0.0)?);
            }
        }
        let shape = Shape { batch: 1, q_heads: 2, kv_heads: 2, q: 200, kv: 2500 };
        count(case("peaked, scores 4 times as large", shape, None, 4.0, PLAIN, 0.0)?);
        for (out_type, name, rounding) in [(1, "f16", 5e-4), (2, "bf16", 4e-3)] {
            let call = Call { out_type, token_major: true, ..PLAIN };
            count(case(&format!("{name} output, token-major"), shape, None, 1.0, call, rounding)?);
        }
        let narrow = Shape { batch: 1, q_heads: 2, kv_heads: 2, q: 130, kv: 300 };
        for (head_dim, out_type, rounding) in [(64, 0, 0.0), (72, 1, 5e-4), (8, 2, 4e-3)] {
            let call = Call { out_type, token_major: out_type == 1, head_dim, ..PLAIN };
            count(case(&format!("head_dim {head_dim}"), narrow, None, 1.0, call, rounding)?);
        }
        let gqa = Shape { batch: 2, q_heads: 4, kv_heads: 2, q: 150, kv: 700 };
        count(case(
            "batch 2, 4 query heads on 2, kv_lens 700, 389",
            gqa,
            Some(vec![700, 389]),
            1.0,
            PLAIN,
            0.0,
        )?);
        count(case("kv_lens 0, 128", gqa, Some(vec![0, 128]), 1.0, PLAIN, 0.0)?);
        failed += special(gpu, kernel, variant, alive)?;
        let shape = Shape { batch: 1, q_heads: 2, kv_heads: 2, q: 200, kv: 2500 };
        promotions(gpu, kernel, &Problem::random(shape, None, 1.0, 77), variant, alive)?;
    }
    Ok(failed)
}

/// [`promotions`] at full length: 128 query rows of one head.
pub fn accumulation(gpu: &Gpu, kernels: &[Kernel], cli: &Cli, alive: &dyn Fn()) -> Result<()> {
    const ROWS: usize = 128;
    for &tokens in &cli.tokens {
        let problem = match &cli.data {
            Some(file) => Problem::from_file(file, tokens)?.with_queries(ROWS),
            None => {
                let shape = Shape { batch: 1, q_heads: 1, kv_heads: 1, q: ROWS, kv: tokens };
                Problem::random(shape, None, 1.0, 1)
            }
        };
        for kernel in kernels {
            println!("{}, {tokens} tokens", kernel.label);
            promotions(gpu, kernel, &problem, Variant::of(kernel.entry.name), alive)?;
        }
    }
    Ok(())
}

/// What the hardware's FP8 accumulation loses with the interval of promotion, which no bound here judges: the
/// distance to the emulation, which accumulates exactly, beside the loss that every interval has.
fn promotions(
    gpu: &Gpu,
    kernel: &Kernel,
    problem: &Problem,
    variant: Variant,
    alive: &dyn Fn(),
) -> Result<()> {
    let operands = problem.pack(variant);
    alive();
    let (exact, emulated) = reference::attention(problem, &operands, variant);
    alive();
    println!("       promoted every | rel_l2 to exact softmax | to the emulation | LSE off by");
    for promote in [1, 2, 4, 8, 1000] {
        let (got, _) = run(gpu, kernel, problem, &operands, Call { promote, ..PLAIN })?;
        let (error, near) = (rel_l2(&got.out, &exact.out), rel_l2(&got.out, &emulated.out));
        println!("       {promote:14} | {error:23.5} | {near:16.5} | {:10.5}", lse_off(&got, &emulated));
    }
    Ok(())
}

/// Same bits twice, NaN and infinity in a query row, a poisoned head.
fn special(gpu: &Gpu, kernel: &Kernel, variant: Variant, alive: &dyn Fn()) -> Result<usize> {
    let shape = Shape { batch: 1, q_heads: 2, kv_heads: 2, q: 130, kv: 1000 };
    let mut problem = Problem::random(shape, None, 1.0, 99);
    let operands = problem.pack(variant);
    let bits = |o: &(Outcome, Vec<f32>)| o.0.out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let first = bits(&run(gpu, kernel, &problem, &operands, PLAIN)?);
    let same = (0..5).map(|_| Ok(bits(&run(gpu, kernel, &problem, &operands, PLAIN)?) == first));
    let same = same.collect::<Result<Vec<_>>>()?.into_iter().all(|s| s);
    let mut failed = say("same bits in 6 runs", same, "");
    alive();

    let poisoned = run(gpu, kernel, &problem, &operands, Call { poisoned: true, ..PLAIN })?;
    let all_nan = poisoned.0.out.iter().all(|x| x.is_nan());
    failed += say("poisoned head is NaN", all_nan, "");

    // Row 5 of head 1 gets a NaN, row 70 of head 0 an infinity (which E4M3 cannot hold).
    let nan_row = shape.q + 5;
    problem.q[nan_row * HEAD_DIM + 3] = f32::NAN;
    let infinite_row = (!variant.e4m3_scores).then_some(70);
    if let Some(row) = infinite_row {
        problem.q[row * HEAD_DIM + 100] = f32::INFINITY;
    }
    let got = run(gpu, kernel, &problem, &problem.pack(variant), PLAIN)?;
    let mut wrong = Vec::new();
    for (row, values) in got.0.out.chunks(HEAD_DIM).enumerate() {
        let bad = row == nan_row || Some(row) == infinite_row;
        let as_before = values.iter().zip(&first[row * HEAD_DIM..]).all(|(x, b)| x.to_bits() == *b);
        if bad && !values.iter().all(|x| x.is_nan()) || !bad && !as_before {
            wrong.push(row);
        }
    }
    let detail = format!("rows {:?}", wrong.iter().take(10).collect::<Vec<_>>());
    failed += say("NaN and infinity in q stay in their rows", wrong.is_empty(), &detail);
    alive();
    Ok(failed)
}

fn say(name: &str, good: bool, detail: &str) -> usize {
    println!(
        "  {} {name}{}",
        if good { "ok  " } else { "FAIL" },
        if good { String::new() } else { format!(": {detail}") }
    );
    !good as usize
}

/// Row i looks at key i alone: says which token each output row really is, and which channel.
pub fn probe(gpu: &Gpu, kernels: &[Kernel], alive: &dyn Fn()) -> Result<()> {
    for kernel in kernels {
        let variant = Variant::of(kernel.entry.name);
        println!("{}", kernel.label);
        let shape = Shape { batch: 1, q_heads: 1, kv_heads: 1, q: 2 * KEYS, kv: 2 * KEYS };
        let mut problem = Problem::random(shape, None, 1.0, 7);
        for x in &mut problem.k {
            *x = if *x < 0.0 { -1.0 } else { 1.0 };
        }
        problem.q = problem.k.iter().map(|k| 2.0 * k).collect();
        let operands = problem.pack(variant);
        alive();
        let (got, row_max) = run(gpu, kernel, &problem, &operands, PLAIN)?;
        alive();
        let (_, emulated) = reference::attention(&problem, &operands, variant);
        println!(
            "  one-hot: rel_l2 {:.5}, row max {row_max:?} (256 expected)",
            rel_l2(&got.out, &emulated.out)
        );
        let rows: Vec<&[f64]> = got.out.chunks(HEAD_DIM).collect();
        let wants: Vec<&[f64]> = emulated.out.chunks(HEAD_DIM).collect();
        let mut moved = Vec::new();
        for (i, row) in rows.iter().enumerate() {
            let distance = |j: &usize| row.iter().zip(wants[*j]).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            let nearest = (0..wants.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
            if nearest != i || distance(&nearest).is_nan() || distance(&nearest) > 1.0 {
                moved.push(format!("{i}->{nearest} ({:.2})", distance(&nearest)));
            }
        }
        println!(
            "  rows that are not their own token (row->nearest token (squared distance)): {}",
            moved.len()
        );
        println!("    {}", moved.iter().take(48).cloned().collect::<Vec<_>>().join(" "));
        if rel_l2(&got.out, &emulated.out) > 0.01 || got.out.iter().any(|x| x.is_nan()) {
            diagnose(&got.out, &emulated.out, shape.q);
        }

        problem.q.fill(0.0);
        let operands = problem.pack(variant);
        let (got, _) = run(gpu, kernel, &problem, &operands, PLAIN)?;
        alive();
        let (_, emulated) = reference::attention(&problem, &operands, variant);
        println!("  uniform: rel_l2 {:.5}", rel_l2(&got.out, &emulated.out));
        let first: Vec<_> = (0..6).map(|c| format!("{:.4}/{:.4}", got.out[c], emulated.out[c])).collect();
        println!(
            "    first channels got/want: {}; LSE {:.4}/{:.4}",
            first.join(" "),
            got.lse[0],
            emulated.lse[0]
        );
        if rel_l2(&got.out, &emulated.out) > 0.01 || got.out.iter().any(|x| x.is_nan()) {
            diagnose(&got.out, &emulated.out, shape.q);
        }
    }
    Ok(())
}
