//! The NVFP4 attention kernel in both its forms, and its quantizers, run thread by thread on the host (`docs/emulation.md`):
//! operands bit for bit, outputs against the CPU backend's `vc4` and against f64 on the same dequantized operands.

mod emulated;
#[path = "common/rope.rs"]
mod rope;

use emulated::{Case, Family, checks, fp4};
use half::{bf16, f16};
use kernels_gpu::emulation::Schedule;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::recipe::{Recipe, vc};
use vc_attention::{Elements, Layout, NonFinite, Options, Plan, Problem, TensorView};

const BOTH: [Family; 2] = [Family::Fp4Native, Family::Fp4Decoded];

/// Small calls, which the order of names puts first: most of what is wrong shows here at once.
#[test]
fn a_few_calls() {
    for case in BOTH.iter().flat_map(|&family| Case::new(family, 40, 300).entries()) {
        checks::check(&case);
    }
}

#[test]
fn every_entry_at_odd_lengths() {
    BOTH.into_iter().for_each(checks::every_entry_at_odd_lengths);
}

#[test]
fn batches_of_grouped_heads_with_lengths() {
    BOTH.into_iter().for_each(checks::batches_of_grouped_heads_with_lengths);
}

#[test]
fn heads_of_fewer_channels_are_padded() {
    BOTH.into_iter().for_each(checks::heads_of_fewer_channels_are_padded);
}

#[test]
fn no_valid_key_gives_zeros() {
    BOTH.into_iter().for_each(checks::no_valid_key_gives_zeros);
}

#[test]
fn rings_of_tiles_and_means_go_around() {
    BOTH.into_iter().for_each(checks::rings_of_tiles_and_means_go_around);
}

#[test]
fn output_types_round_the_same_values() {
    BOTH.into_iter().for_each(checks::output_types_round_the_same_values);
}

#[test]
fn the_order_of_threads_changes_nothing() {
    BOTH.into_iter().for_each(checks::the_order_of_threads_changes_nothing);
}

#[test]
fn poisoned_heads_are_nan_and_others_unchanged() {
    BOTH.into_iter().for_each(checks::poisoned_heads_are_nan_and_others_unchanged);
}

#[test]
fn a_nan_in_a_query_stays_in_its_row() {
    BOTH.into_iter().for_each(checks::a_nan_in_a_query_stays_in_its_row);
}

/// Scores are f32: none is too large, and flat rows put all their weights on one code.
#[test]
fn scores_have_no_range() {
    for family in BOTH {
        for sharpness in [0.0, 20.0, 200.0] {
            let outcome = checks::check(&Case { sharpness, ..Case::new(family, 40, 300) });
            assert!(outcome.row_max[0] >= 20.0 * sharpness, "largest |row max| {}", outcome.row_max[0]);
        }
    }
}

/// l is of the weights that multiply V. Against f64 on the same operands their rounding is in it: of a flat row it takes away
/// 1.6%, small probabilities beside a large one of their 16 going to 0.
#[test]
fn the_lse_bias_of_nvfp4_is_small() {
    for family in BOTH {
        let outcome = checks::check(&Case { sharpness: 1.0, ..Case::new(family, 100, 900) });
        let off = outcome.lse.iter().zip(&outcome.exact_lse).map(|(a, b)| f64::from(*a) - b);
        let bias = off.sum::<f64>() / outcome.lse.len() as f64;
        assert!((-0.03..0.01).contains(&bias), "mean LSE error {bias}");
    }
}

/// Both forms multiply the same codes: what differs is the order of f32 sums.
#[test]
fn both_forms_agree() {
    let case = |family| Case { q_heads: 2, ..Case::new(family, 130, 500) };
    let [native, decoded] = BOTH.map(|family| checks::check(&case(family)));
    let near = native.o.chunks(128).zip(decoded.o.chunks(128));
    let off = near.map(|(a, b)| emulated::rel_l2(a, b.iter().map(|&x| f64::from(x))));
    let other = off.filter(|off| *off > 1e-5).count();
    assert!(other <= 6, "{other} of 260 rows");
}

/// Strided tensors of both types, an order of the tokens, lengths, padding: every code, scale and mean.
#[test]
fn operands_are_those_of_the_cpu() {
    check_operands(false);
}

/// A token's angle goes with it to its place in the order, and the scale of a head is that of turned values.
#[test]
fn rope_is_applied_before_everything() {
    check_operands(true);
}

/// With `turn`, the kernels turn Q and K by tables, and the CPU backend takes them turned, in f32.
fn check_operands(turn: bool) {
    let (batch, q_heads, kv_heads) = (2, 4, 2);
    let schedules = [Schedule::Oldest, Schedule::Newest, Schedule::Random(5)];
    let shapes = [
        (75, 300, 128, Some([300, 129])),
        (129, 191, 72, None),
        (1, 1, 64, None),
        (20, 130, 96, Some([0, 17])),
    ];
    for (i, (q_tokens, kv_tokens, head_dim, lens)) in shapes.into_iter().enumerate() {
        for (bf16_bits, demean) in [(true, true), (false, false), (false, true)] {
            let recipe = Recipe { demean, ..vc::vc4() };
            let mut rng = ChaCha8Rng::seed_from_u64(i as u64);
            // Token by token, NaN between the heads.
            let pitch = head_dim + 8;
            let mut tensor = |heads: usize, tokens: usize| -> Vec<u16> {
                let mut bits = Vec::new();
                for row in 0..batch * tokens * heads {
                    for c in 0..head_dim {
                        let noise: f32 = StandardNormal.sample(&mut rng);
                        let x = noise * (1.0 + (c % 7) as f32) + (row / heads / 150 % 3) as f32;
                        bits.push(if bf16_bits {
                            bf16::from_f32(x).to_bits()
                        } else {
                            f16::from_f32(x).to_bits()
                        });
                    }
                    bits.extend([0x7fff; 8]);
                }
                bits
            };
            let [mut q, k, v] =
                [tensor(q_heads, q_tokens), tensor(kv_heads, kv_tokens), tensor(kv_heads, kv_tokens)];
            // An infinity in the second head of the second batch, of the first and the last shape.
            let broken = (i % 3 == 0).then_some((q_heads + 1, q_tokens - 2));
            if let Some((head, row)) = broken {
                let token = head / q_heads * q_tokens + row;
                q[(token * q_heads + head % q_heads) * pitch + 5] = if bf16_bits { 0xff80 } else { 0xfc00 };
            }
            let [as_bf16, as_f16] = [bf16_bits, !bf16_bits];
            let wide: [Vec<bf16>; 3] =
                [&q, &k, &v].map(|x| x.iter().filter(|_| as_bf16).map(|&b| bf16::from_bits(b)).collect());
            let narrow: [Vec<f16>; 3] =
                [&q, &k, &v].map(|x| x.iter().filter(|_| as_f16).map(|&b| f16::from_bits(b)).collect());
            let view = |name, i: usize, heads: usize, tokens: usize| {
                let elements = if as_bf16 { Elements::Bf16(&wide[i]) } else { Elements::F16(&narrow[i]) };
                let strides = [tokens * heads * pitch, pitch, heads * pitch, 1];
                TensorView::strided(name, elements, [batch, heads, tokens, head_dim], strides)
                    .expect("a valid view")
            };
            let mut problem = Problem::new(
                view("q", 0, q_heads, q_tokens),
                view("k", 1, kv_heads, kv_tokens),
                view("v", 2, kv_heads, kv_tokens),
            );
            let tables = rope::tables(q_tokens, kv_tokens, head_dim);
            let turned;
            if turn {
                let [q_cos, q_sin, k_cos, k_sin] = &tables;
                turned = [rope::turned(&problem.q, q_cos, q_sin), rope::turned(&problem.k, k_cos, k_sin)];
                let view = |name, i: usize, heads, tokens| {
                    let shape = [batch, heads, tokens, head_dim];
                    TensorView::new(name, turned[i].as_slice(), shape, Layout::Bhsd).expect("a whole tensor")
                };
                problem.q = view("q", 0, q_heads, q_tokens);
                problem.k = view("k", 1, kv_heads, kv_tokens);
            }
            problem.kv_lens = lens.as_ref().map(|l| l.as_slice());
            problem.nonfinite = NonFinite::Propagate;
            let plan = Plan::new(&problem, &recipe, Options::default()).expect("a valid call");
            let orders = Cpu.group(&plan, &problem, None).expect("a valid call");
            let qs = Cpu.prepare_q(&plan, &problem, &orders).expect("a valid call");
            let ks = Cpu.prepare_k(&plan, &problem, &orders, &qs).expect("a valid call");
            let vs = Cpu.prepare_v(&plan, &problem, &orders).expect("a valid call");
            let mut order = vec![u32::MAX; batch * kv_heads * kv_tokens];
            for (to, from) in order.chunks_exact_mut(kv_tokens).zip(&orders.0) {
                to[..from.order.len()].copy_from_slice(&from.order);
            }
            let input = |bits, heads: usize, tokens: usize| fp4::Input {
                bits,
                strides: [tokens * heads * pitch, pitch, heads * pitch].map(|n| n as i64),
            };
            let kv_lens = lens.map(|l| l.map(|l| l as u32));
            let call = fp4::Call {
                bf16: bf16_bits,
                q: input(&q, q_heads, q_tokens),
                k: input(&k, kv_heads, kv_tokens),
                v: input(&v, kv_heads, kv_tokens),
                batch,
                q_heads,
                kv_heads,
                q_tokens,
                kv_tokens,
                head_dim,
                order: Some(&order),
                kv_lens: kv_lens.as_ref().map(|l| l.as_slice()),
                demean,
                rope: turn.then_some(&tables),
                scale: plan.scale,
                schedule: schedules[i % 3],
                broken,
            };
            let context = format!("{bf16_bits} {demean} {turn} {lens:?} {q_tokens} {kv_tokens} {head_dim}");
            let made = call.quantize();
            made.assert_codes(&call, &context, |b, h| Cpu.codes(&plan, [b, h], &qs, &ks, &vs));

            // What centring K took from the LSE.
            for head in 0..batch * q_heads {
                let (b, h) = (head / q_heads, head % q_heads);
                let mean = Cpu.codes(&plan, [b, h], &qs, &ks, &vs).k_mean;
                let rows = problem.q.read_head(b, h, q_tokens);
                let rows = rows.chunks_exact(head_dim).enumerate();
                for (row, q) in rows.filter(|(row, _)| !mean.is_empty() && broken != Some((head, *row))) {
                    let terms = q.iter().zip(mean).map(|(q, m)| f64::from(*q) * f64::from(*m));
                    let (dot, size) = terms.fold((0.0, 0.0), |(dot, size), x| (dot + x, size + x.abs()));
                    let (found, scale) = (made.lse_shift[head * q_tokens + row], f64::from(plan.scale));
                    let off = (f64::from(found) - scale * dot).abs();
                    assert!(off <= 1e-6 * scale * size, "{context}: lse_shift of row {row}");
                }
            }
        }
    }
}
