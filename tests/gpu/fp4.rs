//! `vc4` on whatever GPU there is, by its own module and by that for sm_89: operands bit for bit, and the properties of the
//! other attention kernels.

use kernels_gpu::formats::{e2m1, e4m3, nvfp4};
use kernels_gpu::kernels::tiles::{
    self, FP4_ROW, FP4_SCALES, HEAD_DIM, K_FP4_BYTES, KEYS, Q_FP4_BYTES, ROWS, V_FP4_BYTES, V_FP4_MEANS,
};
use vc_attention::backend::cpu::Cpu;
use vc_attention::backend::cuda::{DeviceOperands, Grouping};
use vc_attention::{DType, Layout, NonFinite, Problem, Recipe};

use crate::attention::{
    gives_the_same_bits, in_every_output_type, of_a_broken_key_or_value, of_a_broken_query, of_all_lengths,
    of_any_scale, of_padded_batches,
};
use crate::call::{OnGpu, Twin, Wanted};
use crate::common::{Case, recipe};
use crate::device::{Gpu, both};
use crate::inputs::{Gaps, Inputs, plain};
use crate::stages::Comparison;

const KERNELS: [&str; 2] = ["vc4", "vc4+demean=off"];

/// Element `i` of row `row` of a tile whose scales begin behind `rows` rows.
fn value(tile: &[u8], rows: usize, row: usize, i: usize, tensor: f32) -> f32 {
    let byte = tile[tiles::swizzle_64(row, i / 2)];
    let scale = tile[rows * FP4_ROW + row * FP4_SCALES + i / nvfp4::BLOCK];
    e2m1::decode(byte >> (4 * (i % 2))) * (e4m3::decode(scale) * tensor)
}

/// Compares every value with the CPU's codes on the GPU's order.
fn check(gpu: &Gpu, case: &str, problem: &Problem, recipe: &Recipe) {
    let call = OnGpu::new(gpu, problem, recipe, Wanted::default());
    call.launch(Grouping::Cold);
    let operands = call.operands();
    let twin_problem = Problem { nonfinite: NonFinite::Propagate, ..*problem };
    let twin = Twin::new(&twin_problem, recipe, &call.orders(&operands));
    compare(&format!("{case}: {} on {:?}", recipe.name, twin.plan.shape), &twin, &operands);
}

pub fn compare(case: &str, twin: &Twin, operands: &DeviceOperands) {
    let s = twin.plan.shape;
    let (qk_dim, v_dim) = (twin.plan.qk_dim, twin.plan.v_dim);
    let codes = |batch, q_head| Cpu.codes(&twin.plan, [batch, q_head], &twin.q, &twin.k, &twin.v);
    let [q_scales, k_scales, v_scales] = &operands.tensor_scales;
    let (mut q, mut k) = (Comparison::new("Q"), Comparison::new("K"));
    let (mut v, mut means) = (Comparison::new("V"), Comparison::new("means"));
    // By value: of a zero the sign says nothing.
    let compare = |to: &mut Comparison, got: f32, want: f32, place: String| {
        to.bits((got + 0.0).to_bits(), (want + 0.0).to_bits(), f32::from_bits, || place);
    };
    let q_rows = s.q_tokens.next_multiple_of(2 * ROWS);
    for (head, &tensor) in q_scales.iter().enumerate() {
        let want = codes(head / s.q_heads, head % s.q_heads).q;
        for (row, c) in (0..q_rows).flat_map(|row| (0..HEAD_DIM).map(move |c| (row, c))) {
            let tile = &operands.q[(head * q_rows + row) / ROWS * Q_FP4_BYTES..];
            let want = if row < s.q_tokens && c < qk_dim { want[row * qk_dim + c] } else { 0.0 };
            let got = value(tile, ROWS, row % ROWS, c, tensor);
            compare(&mut q, got, want, format!("head {head} row {row} channel {c}"));
        }
    }
    assert_eq!(q_scales.len(), s.batch * s.q_heads, "{case}: scales of Q");
    let blocks = s.kv_tokens.div_ceil(KEYS);
    for index in 0..s.batch * s.kv_heads {
        let codes = codes(index / s.kv_heads, index % s.kv_heads * (s.q_heads / s.kv_heads));
        let keys = codes.k.len() / qk_dim;
        for (key, c) in (0..blocks * KEYS).flat_map(|key| (0..HEAD_DIM).map(move |c| (key, c))) {
            let (block, row) = (index * blocks + key / KEYS, key % KEYS);
            let place = || format!("kv head {index} position {key} channel {c}");
            let want = if key < keys && c < qk_dim { codes.k[key * qk_dim + c] } else { 0.0 };
            let tile = &operands.k[block * K_FP4_BYTES..];
            compare(&mut k, value(tile, KEYS, tiles::key_row(row), c, k_scales[index]), want, place());
            let tile = &operands.v[block * V_FP4_BYTES..];
            let want = if key < keys && c < v_dim { codes.v[key * v_dim + c] } else { 0.0 };
            compare(&mut v, value(tile, HEAD_DIM, c, row, v_scales[index]), want, place());
            if row == 0 {
                let known = twin.plan.recipe.demean && key < keys && c < v_dim;
                let want = if known { codes.means[key / KEYS * v_dim + c] } else { 0.0 };
                let at = V_FP4_MEANS + 2 * c;
                let got = half::f16::from_le_bytes([tile[at], tile[at + 1]]).to_f32();
                compare(&mut means, got, want, place());
            }
        }
    }
    [q, k, v, means].into_iter().for_each(|c| c.finish(case));
    assert!(operands.v_scale.iter().all(|s| *s == 1.0), "{case}: scales of the output's channels");
}

#[test]
fn fp4_stages() {
    both(|gpu| {
        let tokens = [[129, 1023], [1, 191], [64, 128], [200, 127], [65, 2100], [1, 1]];
        for (i, dim) in [40, 64, 72, 80, 96, 128].into_iter().enumerate() {
            let case = Case::new([i % 3 + 1, 4, 2], tokens[i], dim);
            for (j, dtype) in [DType::Bf16, DType::F16].into_iter().enumerate() {
                let layout = [Layout::Bhsd, Layout::Bshd][(i + j) % 2];
                let inputs = Inputs::new(&case.outliers(20 + j as u64), dtype, layout, Gaps::Some);
                for text in ["vc4", "vc4+demean=off+order=sequence", "vc4+rotate=off"] {
                    check(gpu, "stages", &inputs.problem(), &recipe(text));
                }
            }
        }
    });
}

#[test]
fn fp4_stages_of_padded_batches() {
    both(|gpu| {
        for lens in [[0, 300, 700], [1, 128, 699], [129, 127, 0]] {
            let mut data = Case::new([3, 2, 1], [70, 700], 64).outliers(4);
            // What is not valid must not be read into anything.
            for (batch, &len) in lens.iter().enumerate() {
                let range = (batch * 700 + len) * 64..(batch + 1) * 700 * 64;
                data.k[range.clone()].fill(f32::NAN);
                data.v[range].fill(f32::INFINITY);
            }
            let inputs = Inputs::new(&data, DType::Bf16, Layout::Bhsd, Gaps::None);
            let problem = Problem { kv_lens: Some(&lens), ..inputs.problem() };
            check(gpu, &format!("kv_lens {lens:?}"), &problem, &recipe("vc4+k=7"));
        }
    });
}

#[test]
fn fp4_stages_of_any_scale() {
    both(|gpu| {
        let inputs = plain(Case::new([1, 2, 2], [140, 300], 96), 5, DType::Bf16);
        for scale in [-0.1, 0.0, 1e-6, 1.0, -3.0] {
            let problem = Problem { scale: Some(scale), ..inputs.problem() };
            check(gpu, &format!("scale {scale}"), &problem, &recipe("vc4"));
        }
    });
}

#[test]
fn fp4_of_all_lengths() {
    both(|gpu| of_all_lengths(gpu, &KERNELS));
}

#[test]
fn fp4_in_every_output_type() {
    both(|gpu| in_every_output_type(gpu, &KERNELS));
}

#[test]
fn fp4_of_padded_batches() {
    both(|gpu| of_padded_batches(gpu, &KERNELS));
}

#[test]
fn fp4_of_any_scale() {
    both(|gpu| of_any_scale(gpu, &KERNELS));
}

#[test]
fn fp4_of_a_broken_query() {
    both(|gpu| of_a_broken_query(gpu, &KERNELS));
}

#[test]
fn fp4_of_a_broken_key_or_value() {
    both(|gpu| of_a_broken_key_or_value(gpu, &KERNELS));
}

#[test]
fn fp4_gives_the_same_bits() {
    both(|gpu| gives_the_same_bits(gpu, &KERNELS));
}
