//! NVFP4 operands by the emulated quantizers, and what they stand for bit for bit.

use kernels_gpu::emulation::{Launch, Memory, Schedule};
use kernels_gpu::formats::{e2m1, e4m3, nvfp4};
use kernels_gpu::kernels::tiles::{
    self, FP4_ROW, FP4_SCALES, HEAD_DIM, K_FP4_BYTES, KEYS, Q_FP4_BYTES, ROWS, V_FP4_BYTES, V_FP4_MEANS,
};
use kernels_gpu::kernels::{Entry, PREPARE, PREPARE_FP4, quantize_fp4, smooth_v, stats};
use kernels_gpu::numerics::units;
use vc_attention::backend::cpu::Codes;

/// A 16-bit tensor and its strides of batch, head and token.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    pub bits: &'a [u16],
    pub strides: [i64; 3],
}

/// What is quantized.
pub struct Call<'a> {
    /// bf16, else f16.
    pub bf16: bool,
    pub q: Input<'a>,
    pub k: Input<'a>,
    pub v: Input<'a>,
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_tokens: usize,
    pub kv_tokens: usize,
    pub head_dim: usize,
    /// Position -> token, `[batch, kv_heads, kv_tokens]`.
    pub order: Option<&'a [u32]>,
    pub kv_lens: Option<&'a [u32]>,
    pub demean: bool,
    /// Cosines and sines of q, those of k: `[tokens, head_dim / 2]` each.
    pub rope: Option<&'a [Vec<f32>; 4]>,
    pub scale: f32,
    pub schedule: Schedule,
    /// A (batch * q_heads + head, row) of Q that is not finite: all of it becomes NaN.
    pub broken: Option<(usize, usize)>,
}

/// What the quantizers wrote.
pub struct Operands {
    pub q: Vec<u8>,
    pub k: Vec<u8>,
    pub v: Vec<u8>,
    pub v_tensor: Vec<f32>,
    pub q_factor: Vec<f32>,
    pub k_scale: Vec<f32>,
    pub v_scale: Vec<f32>,
    #[allow(dead_code, reason = "only the test of the quantizers looks at it")]
    pub lse_shift: Vec<f32>,
    /// Largest magnitudes of the heads of Q.
    q_amax: Vec<f32>,
    q_blocks: usize,
    kv_blocks: usize,
}

/// Runs an entry on `blocks` blocks in x and fails on a fault.
macro_rules! run {
    ($call:expr, $gpu:expr, $blocks:expr, $module:ident::[$for_bf16:ident, $for_f16:ident]($($argument:expr),* $(,)?)) => {{
        let name = if $call.bf16 { stringify!($for_bf16) } else { stringify!($for_f16) };
        let entry: &Entry =
            PREPARE.iter().chain(PREPARE_FP4).find(|e| e.name == name).expect("an entry of the modules");
        Launch::of(entry)
            .grid([$blocks as u32, 1, 1])
            .schedule($call.schedule)
            // SAFETY: buffers and sizes as the kernel's module says; the emulation checks them.
            .run(&$gpu, || unsafe {
                if $call.bf16 { $module::$for_bf16($($argument),*) } else { $module::$for_f16($($argument),*) }
            })
            .unwrap_or_else(|fault| panic!("{name}: {fault}"))
    }};
}

impl Call<'_> {
    /// Q, K and V by the kernels, as a plan of `vc4` launches them.
    pub fn quantize(&self) -> Operands {
        let mut gpu = Memory::new();
        let [q, k, v] = [("q", self.q), ("k", self.k), ("v", self.v)]
            .map(|(name, x)| gpu.input(name, x.bits).cast::<u8>());
        let order = self.order.map_or(std::ptr::null(), |x| gpu.input("order", x));
        let lens = self.kv_lens.map_or(std::ptr::null(), |x| gpu.input("kv_lens", x));
        let (heads, kv_total) = (self.batch * self.q_heads, self.batch * self.kv_heads);
        let (q_blocks, kv_blocks) = (self.q_tokens.div_ceil(128), self.kv_tokens.div_ceil(KEYS));
        let sums = gpu.output::<f32>("sums", kv_total * kv_blocks * HEAD_DIM);
        let k_mean = gpu.output::<f32>("k_mean", kv_total * HEAD_DIM);
        let poisoned = gpu.in_out("poisoned", &vec![0u32; kv_total]);
        let q_amax = gpu.in_out("q_amax", &vec![0u32; heads]);
        let k_amax = gpu.in_out("k_amax", &vec![0u32; kv_total]);
        let q_tiles = gpu.output::<u8>("q tiles", heads * q_blocks * 2 * Q_FP4_BYTES);
        let k_tiles = gpu.output::<u8>("k tiles", kv_total * kv_blocks * K_FP4_BYTES);
        let v_tiles = gpu.output::<u8>("v tiles", kv_total * kv_blocks * V_FP4_BYTES);
        let q_factor = gpu.output::<f32>("q_factor", heads);
        let k_scale = gpu.output::<f32>("k_scale", kv_total);
        let v_tensor = gpu.output::<f32>("v_tensor", kv_total);
        let v_scale = gpu.output::<f32>("v_scale", kv_total * HEAD_DIM);
        let lse_shift = gpu.output::<f32>("lse_shift", heads * self.q_tokens);
        let means = gpu.output::<f32>("means", kv_total * kv_blocks * HEAD_DIM);
        let means = if self.demean { means } else { std::ptr::null_mut() };
        let v_amax = gpu.in_out("v_amax", &vec![0u32; kv_total * 2 * HEAD_DIM]);
        let shares = gpu.output::<f32>("shares", kv_total * kv_blocks);

        let [qb, qh, qt] = self.q.strides;
        let [kb, kh, kt] = self.k.strides;
        let [vb, vh, vt] = self.v.strides;
        let [nq, nk, hq, hk, d] =
            [self.q_tokens, self.kv_tokens, self.q_heads, self.kv_heads, self.head_dim].map(|n| n as u32);
        let [q_cos, q_sin, k_cos, k_sin] = match self.rope {
            Some(tables) => {
                std::array::from_fn(|i| gpu.input(["q_cos", "q_sin", "k_cos", "k_sin"][i], &tables[i]))
            }
            None => [std::ptr::null(); 4],
        };
        let rotation = d.next_power_of_two().max(16);
        run!(self, gpu, kv_blocks.div_ceil(8) * kv_total, stats::[k_stats_bf16, k_stats_f16](
            k, k_cos, k_sin, lens, sums, poisoned, kb, kh, kt, nk, hk, d
        ));
        run!(self, gpu, kv_total, stats::[k_mean, k_mean](sums, lens, k_mean, nk, hk));
        run!(self, gpu, 2 * q_blocks * heads, quantize_fp4::[fp4_amax_q_bf16, fp4_amax_q_f16](
            q, q_cos, q_sin, q_amax, qb, qh, qt, nq, hq, d, rotation
        ));
        run!(self, gpu, 2 * q_blocks * heads, quantize_fp4::[quantize_q_fp4_from_bf16, quantize_q_fp4_from_f16](
            q, q_cos, q_sin, k_mean, q_amax, q_tiles, q_factor, lse_shift, qb, qh, qt, nq, hq, hk, d, rotation,
            self.scale
        ));
        run!(self, gpu, 2 * kv_blocks * kv_total, quantize_fp4::[fp4_amax_k_bf16, fp4_amax_k_f16](
            k, k_cos, k_sin, k_mean, lens, k_amax, kb, kh, kt, nk, hk, d, rotation
        ));
        run!(self, gpu, 2 * kv_blocks * kv_total, quantize_fp4::[quantize_k_fp4_from_bf16, quantize_k_fp4_from_f16](
            k, order, k_cos, k_sin, k_mean, lens, k_amax, k_tiles, k_scale, kb, kh, kt, nk, hk, d, rotation
        ));
        run!(self, gpu, kv_blocks.div_ceil(8) * kv_total, smooth_v::[v_stats_fp4_bf16, v_stats_fp4_f16](
            v, order, lens, means, v_amax, shares, poisoned, vb, vh, vt, nk, hk, d
        ));
        run!(self, gpu, kv_total, quantize_fp4::[fp4_v_scale, fp4_v_scale](v_amax, v_tensor, v_scale));
        run!(self, gpu, kv_blocks * kv_total, quantize_fp4::[smooth_v_fp4_bf16, smooth_v_fp4_f16](
            v, order, lens, means, v_tensor, v_tiles, vb, vh, vt, nk, hk, d
        ));
        assert!(gpu.read(poisoned).iter().all(|flag| *flag == 0), "nothing is poisoned");
        Operands {
            q: gpu.read(q_tiles),
            k: gpu.read(k_tiles),
            v: gpu.read(v_tiles),
            v_tensor: gpu.read(v_tensor),
            q_factor: gpu.read(q_factor),
            k_scale: gpu.read(k_scale),
            v_scale: gpu.read(v_scale),
            lse_shift: gpu.read(lse_shift),
            q_amax: gpu.read(q_amax).into_iter().map(f32::from_bits).collect(),
            q_blocks,
            kv_blocks,
        }
    }
}

/// Element `i` of row `row` of a tile whose scales begin behind `rows` rows.
fn value(tile: &[u8], rows: usize, row: usize, i: usize, tensor: f32) -> f32 {
    let byte = tile[tiles::swizzle_64(row, i / 2)];
    let scale = tile[rows * FP4_ROW + row * FP4_SCALES + i / nvfp4::BLOCK];
    e2m1::decode(byte >> (4 * (i % 2))) * (e4m3::decode(scale) * tensor)
}

impl Operands {
    /// Compares every value with the CPU backend's `codes` of a (batch, query head).
    pub fn assert_codes<'c>(&self, call: &Call, context: &str, codes: impl Fn(usize, usize) -> Codes<'c>) {
        let group = call.q_heads / call.kv_heads;
        for head in 0..call.batch * call.q_heads {
            let codes = codes(head / call.q_heads, head % call.q_heads);
            let dim = codes.q.len() / call.q_tokens;
            let tensor = nvfp4::tensor_scale(self.q_amax[head]);
            assert_eq!(
                self.q_factor[head],
                tensor * (call.scale * units::PER_NAT),
                "{context}: factor of {head}"
            );
            for row in 0..self.q_blocks * 2 * ROWS {
                let tile = &self.q[(head * self.q_blocks * 2 + row / ROWS) * Q_FP4_BYTES..];
                for c in 0..HEAD_DIM {
                    let inside = row < call.q_tokens && c < dim;
                    let want = if inside { codes.q[row * dim + c] } else { 0.0 };
                    let found = value(tile, ROWS, row % ROWS, c, tensor);
                    if call.broken == Some((head, row)) {
                        assert!(
                            found.is_nan(),
                            "{context}: q head {head}, row {row}, channel {c}: {found}, not NaN"
                        );
                        continue;
                    }
                    assert_eq!(found, want, "{context}: q head {head}, row {row}, channel {c}");
                }
            }
        }
        for index in 0..call.batch * call.kv_heads {
            let codes = codes(index / call.kv_heads, index % call.kv_heads * group);
            let (tensor_k, tensor_v) = (self.k_scale[index], self.v_tensor[index]);
            let qk_dim = codes.q.len() / call.q_tokens;
            let (keys, v_dim) = (codes.k.len() / qk_dim, codes.v_scale.len());
            for key in 0..self.kv_blocks * KEYS {
                let (block, row) = (index * self.kv_blocks + key / KEYS, key % KEYS);
                let (k, v) = (&self.k[block * K_FP4_BYTES..], &self.v[block * V_FP4_BYTES..]);
                for c in 0..HEAD_DIM {
                    let place = format!("{context}: kv head {index}, position {key}, channel {c}");
                    let want = if key < keys && c < qk_dim { codes.k[key * qk_dim + c] } else { 0.0 };
                    assert_eq!(value(k, KEYS, tiles::key_row(row), c, tensor_k), want, "k, {place}");
                    let want = if key < keys && c < v_dim { codes.v[key * v_dim + c] } else { 0.0 };
                    assert_eq!(value(v, HEAD_DIM, c, row, tensor_v), want, "v, {place}");
                    let at = V_FP4_MEANS + 2 * c;
                    let mean = half::f16::from_le_bytes([v[at], v[at + 1]]).to_f32();
                    let known = call.demean && key < keys && c < v_dim;
                    let want = if known { codes.means[key / KEYS * v_dim + c] } else { 0.0 };
                    assert!(
                        mean == want || key >= keys && key / KEYS * KEYS < keys,
                        "mean, {place}: {mean}, {want}"
                    );
                }
            }
            assert!(codes.v_scale.iter().all(|s| *s == 1.0));
        }
        assert!(self.v_scale.iter().all(|s| *s == 1.0), "{context}: scales of the output's channels");
    }
}
