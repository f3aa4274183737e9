//! The recipes once more, from the table in the documentation and nothing else: one head, at most one block of 128
//! keys in sequence order, plain loops, full softmax, `half::f16` where the hardware has binary16, sums in f64.

use std::f32::consts::LOG2_E;

use half::{bf16, f16};

/// Q, K and their scores.
#[derive(Clone, Copy, PartialEq)]
pub enum Qk {
    F16,
    E4m3,
    Int8,
    Nvfp4,
}

/// Probabilities.
#[derive(Clone, Copy, PartialEq)]
pub enum P {
    E4m3 { peak: f64 },
    ExpCast { beta: f32 },
    Nvfp4,
}

pub struct Scalar {
    pub qk: Qk,
    pub rotate: bool,
    pub p: P,
    pub demean: bool,
}

pub const VC16_EXPCAST: Scalar =
    Scalar { qk: Qk::F16, rotate: false, p: P::ExpCast { beta: -0.484375 }, demean: true };
pub const VC8: Scalar = Scalar { qk: Qk::Int8, rotate: true, p: P::E4m3 { peak: 256.0 }, demean: true };
pub const VC8_EXPCAST: Scalar = Scalar { p: P::ExpCast { beta: -0.484375 }, ..VC8 };
pub const VC8_FP8QK: Scalar = Scalar { qk: Qk::E4m3, ..VC8_EXPCAST };
pub const SAGE2: Scalar = Scalar { qk: Qk::Int8, rotate: false, p: P::E4m3 { peak: 448.0 }, demean: false };
pub const VC4: Scalar = Scalar { qk: Qk::Nvfp4, rotate: true, p: P::Nvfp4, demean: true };

/// What a byte without sign stands for in E4M3.
fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
    if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * f64::from(exponent - 7).exp2() }
}

/// The nearest of `values` (rising, index parity is the parity of the code), ties to the even one, saturating.
fn nearest(x: f64, values: &[f64]) -> f64 {
    let a = x.abs();
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        let (d, best_d) = ((a - v).abs(), (a - values[best]).abs());
        if d < best_d || (d == best_d && i % 2 == 0) {
            best = i;
        }
    }
    values[best].copysign(x)
}

fn e4m3(x: f64) -> f64 {
    let values: Vec<f64> = (0..=126).map(e4m3_value).collect();
    nearest(x, &values)
}

fn e2m1(x: f64) -> f64 {
    nearest(x, &[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
}

fn half_of(x: f64) -> f64 {
    f16::from_f64(x).to_f64()
}

/// NVFP4 of 16 neighbours.
fn nvfp4(block: &mut [f32], tensor_scale: f32) {
    let amax = block.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    if amax == 0.0 {
        return block.fill(0.0);
    }
    let scale = e4m3(f64::from(amax / 6.0 / tensor_scale)).max(e4m3_value(1)) as f32 * tensor_scale;
    block.iter_mut().for_each(|x| *x = e2m1(f64::from(*x / scale)) as f32 * scale);
}

fn amax<'a>(x: impl IntoIterator<Item = &'a f32>) -> f32 {
    x.into_iter().fold(0.0, |a, x| a.max(x.abs()))
}

/// Mean over the rows: a sum from the first to the last in f32, then a division.
fn mean(x: &[Vec<f32>], dim: usize) -> Vec<f32> {
    (0..dim).map(|c| x.iter().fold(0.0f32, |sum, row| sum + row[c]) / x.len() as f32).collect()
}

/// Zero-padded to a power of two of at least `least` channels, butterflies from stride 1, then 1 / sqrt(n).
fn rotate(row: &[f32], least: usize) -> Vec<f32> {
    let n = row.len().next_power_of_two().max(least);
    let mut x = row.to_vec();
    x.resize(n, 0.0);
    let mut stride = 1;
    while stride < n {
        for i in (0..n).filter(|i| i & stride == 0) {
            (x[i], x[i + stride]) = (x[i] + x[i + stride], x[i] - x[i + stride]);
        }
        stride *= 2;
    }
    let norm = (1.0 / (n as f64).sqrt()) as f32;
    x.iter().map(|x| x * norm).collect()
}

/// Scores in code units.
fn scores(r: &Scalar, mut q: Vec<Vec<f32>>, mut k: Vec<Vec<f32>>, scale: f32) -> Vec<Vec<f64>> {
    // Of the first 128 rows as they come.
    let amax_q = amax(q.iter().take(128).flatten());
    if r.rotate {
        let least = if r.qk == Qk::Nvfp4 { 16 } else { 32 };
        q = q.iter().map(|x| rotate(x, least)).collect();
        k = k.iter().map(|x| rotate(x, least)).collect();
    }
    let units = scale * (8.0 * LOG2_E);
    let side = f64::from(scale.abs() * (8.0 * LOG2_E)).sqrt() as f32;
    match r.qk {
        Qk::F16 | Qk::E4m3 => {
            let balance = if r.qk == Qk::E4m3 { (4.0 - (amax_q * side).log2().floor()).exp2() } else { 1.0 };
            // A key in FP16 has BF16's 8 significant bits.
            let step = if r.qk == Qk::E4m3 { 32 } else { 16 };
            let [round, round_key]: [fn(f64) -> f64; 2] = match r.qk {
                Qk::E4m3 => [e4m3, e4m3],
                _ => [half_of, |x| half_of(bf16::from_f64(x).to_f64())],
            };
            let side_q = (side * balance).copysign(scale);
            let side_k = side / balance;
            let code = |x: &Vec<f32>, side: f32, round: fn(f64) -> f64| -> Vec<f64> {
                x.iter().map(|x| round(f64::from(x * side))).collect()
            };
            let q: Vec<_> = q.iter().map(|x| code(x, side_q, round)).collect();
            let k: Vec<_> = k.iter().map(|x| code(x, side_k, round_key)).collect();
            let score = |q: &Vec<f64>, k: &Vec<f64>| {
                q.chunks(step)
                    .zip(k.chunks(step))
                    .fold(0.0, |s, (q, k)| half_of(s + q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()))
            };
            q.iter().map(|q| k.iter().map(|k| score(q, k)).collect()).collect()
        }
        Qk::Int8 => {
            let quantize = |x: &[Vec<f32>], group: fn(usize) -> usize| -> Vec<(f32, Vec<f64>)> {
                let scale = |g| {
                    amax(x.iter().enumerate().filter(|(i, _)| group(*i) == g).flat_map(|(_, x)| x)) / 127.0
                };
                let codes = |(i, x): (usize, &Vec<f32>)| {
                    let s = scale(group(i));
                    let code = |x: &f32| match s {
                        0.0 => 0.0,
                        _ => f64::from(x / s).round_ties_even().clamp(-127.0, 127.0),
                    };
                    (s, x.iter().map(code).collect())
                };
                x.iter().enumerate().map(codes).collect()
            };
            let q = quantize(&q, |row| row / 16 * 8 + row % 8);
            let k = quantize(&k, |row| row % 8 / 2);
            let score = |(sq, q): &(f32, Vec<f64>), (sk, k): &(f32, Vec<f64>)| {
                let dot = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                f64::from(dot as f32 * (sq * units * sk))
            };
            q.iter().map(|q| k.iter().map(|k| score(q, k)).collect()).collect()
        }
        Qk::Nvfp4 => {
            for x in [&mut q, &mut k] {
                let tensor_scale = amax(x.iter().flatten()) / 2688.0;
                x.iter_mut().flat_map(|x| x.chunks_mut(16)).for_each(|block| nvfp4(block, tensor_scale));
            }
            let dot = |q: &[f32], k: &[f32]| -> f64 {
                q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
            };
            let score = |q: &Vec<f32>, k: &Vec<f32>| f64::from(dot(q, k) as f32 * units);
            q.iter().map(|q| k.iter().map(|k| score(q, k)).collect()).collect()
        }
    }
}

/// One row of scores to weights; returns the weights and what the normalizer adds up.
fn weights(r: &Scalar, s: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let m = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp = |peak: f64| -> Vec<f64> { s.iter().map(|s| peak * ((s - m) / 8.0).exp2()).collect() };
    match r.p {
        P::E4m3 { peak } => {
            let exact = exp(peak);
            (exact.iter().map(|&p| e4m3(p)).collect(), exact)
        }
        P::ExpCast { beta } => {
            // f16 scores are packed as they are, f32 ones after the maximum was taken off.
            let in_f16 = matches!(r.qk, Qk::F16 | Qk::E4m3);
            let n = f16::from_f64(if in_f16 { f64::from(beta) - m } else { f64::from(beta) });
            let value = |s: &f64| {
                let s = f16::from_f64(if in_f16 { *s } else { f64::from((s - m) as f32) });
                let y = (s + n) + f16::from_f32(1144.0);
                let y = if y < f16::from_f32(1024.0) { f16::from_f32(1024.0) } else { y };
                e4m3_value(y.to_bits() as u8)
            };
            let p: Vec<f64> = s.iter().map(value).collect();
            (p.clone(), p)
        }
        P::Nvfp4 => {
            let mut p: Vec<f32> = exp(2688.0).iter().map(|&p| p as f32).collect();
            p.chunks_mut(16).for_each(|block| nvfp4(block, 1.0));
            let p: Vec<f64> = p.into_iter().map(f64::from).collect();
            (p.clone(), p)
        }
    }
}

/// Output [q tokens, dim] and LSE of one head: q, k, v row-major with `dim` channels.
pub fn attention(r: &Scalar, [q, k, v]: [&[f32]; 3], dim: usize, scale: f32) -> (Vec<f64>, Vec<f64>) {
    let rows = |x: &[f32]| -> Vec<Vec<f32>> { x.chunks(dim).map(<[f32]>::to_vec).collect() };
    let (q, mut k, v) = (rows(q), rows(k), rows(v));
    assert!(k.len() <= 128, "one block of keys");
    let k_mean = mean(&k, dim);
    k.iter_mut().for_each(|x| x.iter_mut().zip(&k_mean).for_each(|(x, m)| *x -= m));

    // V: the residual against the mean as it is stored, and a scale per channel.
    let mu = if r.demean { mean(&v, dim) } else { vec![0.0; dim] };
    let nv = r.p == P::Nvfp4;
    let mut channels: Vec<(f32, f32, Vec<f32>)> = (0..dim)
        .map(|c| {
            let largest = v.iter().fold(0.0f32, |a, x| a.max((x[c] - mu[c]).abs()));
            let s = (largest / 448.0).max(mu[c].abs() / 60000.0);
            let s = if nv || s == 0.0 { 1.0 } else { s };
            let stored = half_of(f64::from(mu[c] / s)) as f32;
            let residual = v.iter().map(|x| x[c] - stored * s).collect();
            (s, stored, residual)
        })
        .collect();
    let tensor_scale = amax(channels.iter().flat_map(|c| &c.2)) / 2688.0;
    for (s, _, residual) in &mut channels {
        if nv {
            residual.chunks_mut(16).for_each(|block| nvfp4(block, tensor_scale));
        } else {
            residual.iter_mut().for_each(|x| *x = e4m3(f64::from(*x / *s)) as f32);
        }
    }

    let peak = match r.p {
        P::E4m3 { peak } => peak,
        P::ExpCast { .. } => 256.0,
        P::Nvfp4 => 2688.0,
    };
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for (row, s) in q.iter().zip(scores(r, q.clone(), k, scale)) {
        let (p, summed) = weights(r, &s);
        let l: f64 = summed.iter().sum();
        let r16 = if nv { l } else { half_of(l) };
        for (s, mu, residual) in &channels {
            let product: f64 = p.iter().zip(residual).map(|(p, x)| p * f64::from(*x)).sum();
            o.push((product + r16 * f64::from(*mu)) / l * f64::from(*s));
        }
        let m = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let q_mean: f64 = row.iter().zip(&k_mean).map(|(q, m)| f64::from(*q) * f64::from(*m)).sum();
        lse.push(m * std::f64::consts::LN_2 / 8.0 + (l / peak).ln() + f64::from(scale) * q_mean);
    }
    (o, lse)
}
