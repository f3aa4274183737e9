//! The preprocessing kernels, run thread by thread on the host (`docs/emulation.md`): what they write is what the CPU
//! backend's operands stand for, bit for bit, and grouping keeps its contracts.

#[path = "common/rope.rs"]
mod rope;

use half::{bf16, f16};
use kernels_gpu::emulation::{Launch, Memory, Schedule};
use kernels_gpu::formats::e4m3;
use kernels_gpu::kernels::tiles::{self, KEYS, MEAN_BLOCKS, MEAN_BYTES, ROWS, V_BYTES};
use kernels_gpu::kernels::{Entry, PREPARE, kmeans, order, quantize_k, quantize_q, smooth_v, stats, tour};
use kernels_gpu::layout::scale_groups;
use kernels_gpu::numerics::{mean, units};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::{Cpu, Dequantized};
use vc_attention::grouping::stable_argsort;
use vc_attention::recipe::{QkFormat, Recipe, vc};
use vc_attention::{Elements, Layout, Options, Plan, Problem, TensorView};

/// Channels of every row in the tiles.
const CHANNELS: usize = 128;

/// Sizes of a call, on tensors that lie token by token with a gap behind every head.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_tokens: usize,
    kv_tokens: usize,
    head_dim: usize,
}

/// Bits of a 16-bit tensor [batch, tokens, heads, head_dim + 8].
struct Input {
    bits: Vec<u16>,
    heads: usize,
    tokens: usize,
    dim: usize,
}

impl Input {
    fn random(
        rng: &mut ChaCha8Rng,
        bf16_bits: bool,
        batch: usize,
        heads: usize,
        tokens: usize,
        dim: usize,
    ) -> Self {
        let offset: Vec<f32> = (0..dim).map(|_| rng.sample(StandardNormal)).collect();
        let mut bits = Vec::new();
        for i in 0..batch * tokens * heads {
            for offset in &offset {
                let noise: f32 = StandardNormal.sample(rng);
                let x = noise + offset * (1.0 + (i / heads / 150 % 3) as f32);
                bits.push(if bf16_bits { bf16::from_f32(x).to_bits() } else { f16::from_f32(x).to_bits() });
            }
            // Between the heads lies NaN: nobody may read it.
            bits.extend([0x7fff; 8]);
        }
        Self { bits, heads, tokens, dim }
    }

    /// Strides of batch, head and token.
    fn strides(&self) -> [usize; 3] {
        let pitch = self.dim + 8;
        [self.tokens * self.heads * pitch, pitch, self.heads * pitch]
    }

    fn view<'a>(&'a self, name: &'static str, typed: &'a Typed, batch: usize) -> TensorView<'a> {
        let [b, h, t] = self.strides();
        let shape = [batch, self.heads, self.tokens, self.dim];
        let elements = match typed {
            Typed::Bf16(x) => Elements::Bf16(x),
            Typed::F16(x) => Elements::F16(x),
        };
        TensorView::strided(name, elements, shape, [b, h, t, 1]).expect("a valid view")
    }

    fn typed(&self, bf16_bits: bool) -> Typed {
        if bf16_bits {
            Typed::Bf16(self.bits.iter().map(|&b| bf16::from_bits(b)).collect())
        } else {
            Typed::F16(self.bits.iter().map(|&b| f16::from_bits(b)).collect())
        }
    }
}

enum Typed {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

/// The launch of an entry with `blocks` blocks in x.
fn launch(name: &str, blocks: usize, schedule: Schedule) -> Launch {
    let entry: &Entry = PREPARE.iter().find(|e| e.name == name).expect("an entry of the module");
    Launch::of(entry).grid([blocks as u32, 1, 1]).schedule(schedule)
}

/// Runs a kernel and fails on a fault.
macro_rules! run {
    ($gpu:expr, $schedule:expr, $blocks:expr, $module:ident::$name:ident($($argument:expr),* $(,)?)) => {
        launch(stringify!($name), $blocks, $schedule)
            // SAFETY: buffers and sizes as the kernel's module says; the emulation checks them.
            .run($gpu, || unsafe { $module::$name($($argument),*) })
            .unwrap_or_else(|fault| panic!("{}: {fault}", stringify!($name)))
    };
}

/// The same kernel for the two input types.
macro_rules! run_typed {
    ($bf16:expr, $gpu:expr, $schedule:expr, $blocks:expr, $module:ident, [$for_bf16:ident, $for_f16:ident], ($($argument:expr),* $(,)?)) => {
        if $bf16 {
            run!($gpu, $schedule, $blocks, $module::$for_bf16($($argument),*))
        } else {
            run!($gpu, $schedule, $blocks, $module::$for_f16($($argument),*))
        }
    };
}

/// The value at byte `at` of a tile.
fn value(format: QkFormat, tile: &[u8], at: usize) -> f64 {
    match format {
        QkFormat::F16 => f16::from_le_bytes([tile[at], tile[at + 1]]).to_f64(),
        QkFormat::Int8 => f64::from(tile[at] as i8),
        _ => f64::from(e4m3::decode(tile[at])),
    }
}

/// Prepares Q, K and V on an order from k-means and compares every value of every tile. With `turn`, the kernels turn Q and K by
/// tables, and the CPU backend takes them turned, in f32.
fn check(
    recipe: &Recipe,
    bf16_bits: bool,
    sizes: Sizes,
    kv_lens: Option<&[usize]>,
    schedule: Schedule,
    turn: bool,
) {
    let context = format!("{} {bf16_bits} {kv_lens:?} {sizes:?} {turn}", recipe.name);
    let Sizes { batch, q_heads, kv_heads, q_tokens, kv_tokens, head_dim } = sizes;
    let mut rng = ChaCha8Rng::seed_from_u64(1 + kv_tokens as u64);
    let q = Input::random(&mut rng, bf16_bits, batch, q_heads, q_tokens, head_dim);
    let k = Input::random(&mut rng, bf16_bits, batch, kv_heads, kv_tokens, head_dim);
    let v = Input::random(&mut rng, bf16_bits, batch, kv_heads, kv_tokens, head_dim);
    let typed = [&q, &k, &v].map(|x| x.typed(bf16_bits));
    let mut problem = Problem::new(
        q.view("q", &typed[0], batch),
        k.view("k", &typed[1], batch),
        v.view("v", &typed[2], batch),
    );
    let tables = rope::tables(q_tokens, kv_tokens, head_dim);
    let f32s;
    if turn {
        let [q_cos, q_sin, k_cos, k_sin] = &tables;
        f32s = [(&problem.q, q_cos, q_sin), (&problem.k, k_cos, k_sin), (&problem.v, &vec![], &vec![])]
            .map(|(view, cos, sin)| rope::turned(view, cos, sin));
        let view = |name, x: usize, heads, tokens| {
            TensorView::new(name, f32s[x].as_slice(), [batch, heads, tokens, head_dim], Layout::Bhsd)
        };
        problem = Problem::new(
            view("q", 0, q_heads, q_tokens).expect("a whole tensor"),
            view("k", 1, kv_heads, kv_tokens).expect("a whole tensor"),
            view("v", 2, kv_heads, kv_tokens).expect("a whole tensor"),
        );
    }
    problem.kv_lens = kv_lens;
    let plan =
        Plan::new(&problem, recipe, Options { lse: true, ..Options::default() }).expect("a valid call");
    let orders = Cpu.group(&plan, &problem, None).expect("a valid call");
    let qs = Cpu.prepare_q(&plan, &problem, &orders).expect("a valid call");
    let ks = Cpu.prepare_k(&plan, &problem, &orders, &qs).expect("a valid call");
    let vs = Cpu.prepare_v(&plan, &problem, &orders).expect("a valid call");
    let expected = |b: usize, h: usize| Cpu.dequantized(&plan, [b, h], &qs, &ks, &vs);

    let mut gpu = Memory::new();
    let [q_in, k_in, v_in] =
        [("q", &q), ("k", &k), ("v", &v)].map(|(name, x)| gpu.input(name, &x.bits).cast::<u8>());
    let lens: Option<Vec<u32>> = kv_lens.map(|l| l.iter().map(|&l| l as u32).collect());
    let lens = lens.map_or(std::ptr::null(), |l| gpu.input("kv_lens", &l));
    let mut flat = vec![u32::MAX; batch * kv_heads * kv_tokens];
    for (to, order) in flat.chunks_exact_mut(kv_tokens).zip(&orders.0) {
        to[..order.order.len()].copy_from_slice(&order.order);
    }
    let order = gpu.input("order", &flat);
    let (heads, kv_total) = (batch * q_heads, batch * kv_heads);
    let (q_blocks, kv_blocks) = (q_tokens.div_ceil(128), kv_tokens.div_ceil(KEYS));
    let width = if recipe.qk == QkFormat::F16 { 2 } else { 1 };
    let sums = gpu.output::<f32>("sums", kv_total * kv_blocks * CHANNELS);
    let k_mean = gpu.output::<f32>("k_mean", kv_total * CHANNELS);
    let balance = gpu.output::<f32>("balance", kv_total);
    let q_tiles = gpu.output::<u8>("q tiles", heads * q_blocks * 128 * CHANNELS * width);
    let k_tiles = gpu.output::<u8>("k tiles", kv_total * kv_blocks * KEYS * CHANNELS * width);
    let factor = gpu.output::<f32>("factor", heads * q_blocks * 128);
    let scales = gpu.output::<f32>("scales", kv_total * kv_blocks * scale_groups::K_GROUPS);
    let lse_shift = gpu.output::<f32>("lse_shift", heads * q_tokens);
    let poisoned = gpu.in_out("poisoned", &vec![0u32; kv_total]);
    let saturated = gpu.in_out("saturated", &vec![0u32; kv_total]);
    let block_means = gpu.output::<f32>("means", kv_total * kv_blocks * CHANNELS);
    let amax = gpu.in_out("amax", &vec![0u32; kv_total * 2 * CHANNELS]);
    let shares = gpu.output::<f32>("shares", kv_total * kv_blocks);
    let v_scale = gpu.output::<f32>("v_scale", kv_total * CHANNELS);
    let v_tiles = gpu.output::<u8>("v tiles", kv_total * kv_blocks * V_BYTES);
    let mean_tiles = gpu.output::<u8>("mean tiles", kv_total * kv_blocks.div_ceil(MEAN_BLOCKS) * MEAN_BYTES);
    let block_means = if recipe.demean { block_means } else { std::ptr::null_mut() };

    let [qb, qh, qt] = q.strides().map(|s| s as i64);
    let [kb, kh, kt] = k.strides().map(|s| s as i64);
    let [nq, nk, hq, hk, d] = [q_tokens, kv_tokens, q_heads, kv_heads, head_dim].map(|n| n as u32);
    let none = std::ptr::null();
    let names = ["q_cos", "q_sin", "k_cos", "k_sin"];
    let [q_cos, q_sin, k_cos, k_sin] =
        std::array::from_fn(|i| if turn { gpu.input(names[i], &tables[i]) } else { none });
    let side = units::code_unit_factor(plan.scale);
    let rotation = if recipe.rotate_qk { d.next_power_of_two() } else { 0 };
    let balance = if recipe.qk == QkFormat::E4m3PerHead {
        run_typed!(
            bf16_bits,
            &gpu,
            schedule,
            kv_total,
            stats,
            [balance_bf16, balance_f16],
            (q_in, balance, qb, qh, qt, nq, hq, hk, d, side)
        );
        balance.cast_const()
    } else {
        none
    };
    run_typed!(
        bf16_bits,
        &gpu,
        schedule,
        kv_blocks.div_ceil(8) * kv_total,
        stats,
        [k_stats_bf16, k_stats_f16],
        (k_in, k_cos, k_sin, lens, sums, poisoned, kb, kh, kt, nk, hk, d)
    );
    run!(&gpu, schedule, kv_total, stats::k_mean(sums, lens, k_mean, nk, hk));
    macro_rules! quantize_q {
        ($for_bf16:ident, $for_f16:ident) => {
            run_typed!(
                bf16_bits,
                &gpu,
                schedule,
                2 * q_blocks * heads,
                quantize_q,
                [$for_bf16, $for_f16],
                (
                    q_in,
                    q_cos,
                    q_sin,
                    balance,
                    k_mean,
                    q_tiles,
                    factor,
                    lse_shift,
                    saturated,
                    qb,
                    qh,
                    qt,
                    nq,
                    hq,
                    hk,
                    d,
                    rotation,
                    side.copysign(plan.scale),
                    plan.scale
                )
            )
        };
    }
    macro_rules! quantize_k {
        ($blocks:expr, $for_bf16:ident, $for_f16:ident) => {
            run_typed!(
                bf16_bits,
                &gpu,
                schedule,
                $blocks,
                quantize_k,
                [$for_bf16, $for_f16],
                (
                    k_in, order, k_cos, k_sin, k_mean, balance, lens, k_tiles, scales, saturated, kb, kh, kt,
                    nk, hk, d, rotation, side
                )
            )
        };
    }
    match recipe.qk {
        QkFormat::F16 => {
            quantize_q!(quantize_q_f16_from_bf16, quantize_q_f16_from_f16);
            quantize_k!(2 * kv_blocks * kv_total, quantize_k_f16_from_bf16, quantize_k_f16_from_f16);
        }
        QkFormat::Int8 => {
            quantize_q!(quantize_q_i8_from_bf16, quantize_q_i8_from_f16);
            quantize_k!(kv_blocks * kv_total, quantize_k_i8_from_bf16, quantize_k_i8_from_f16);
        }
        _ => {
            quantize_q!(quantize_q_e4m3_from_bf16, quantize_q_e4m3_from_f16);
            quantize_k!(2 * kv_blocks * kv_total, quantize_k_e4m3_from_bf16, quantize_k_e4m3_from_f16);
        }
    }
    run_typed!(
        bf16_bits,
        &gpu,
        schedule,
        kv_blocks.div_ceil(8) * kv_total,
        smooth_v,
        [v_stats_bf16, v_stats_f16],
        (v_in, order, lens, block_means, amax, shares, poisoned, kb, kh, kt, nk, hk, d)
    );
    run!(&gpu, schedule, kv_total, smooth_v::v_scale(amax, v_scale));
    let blocks = 16 * kv_blocks.div_ceil(16) * kv_total;
    run_typed!(
        bf16_bits,
        &gpu,
        schedule,
        blocks,
        smooth_v,
        [smooth_v_bf16, smooth_v_f16],
        (v_in, order, lens, block_means, v_scale, v_tiles, mean_tiles, kb, kh, kt, nk, hk, d)
    );

    // Q.
    let (q_tile, k_tile) = (ROWS * CHANNELS * width, KEYS * CHANNELS * width);
    let wide = recipe.qk == QkFormat::F16;
    let q_at = if wide { tiles::q_tile_offset_f16 } else { tiles::q_tile_offset_e4m3 };
    let k_at = if wide { tiles::k_tile_offset_f16 } else { tiles::k_tile_offset_e4m3 };
    let (q_tiles, factor, shift) = (gpu.read(q_tiles), gpu.read(factor), gpu.read(lse_shift));
    let nats = f64::from(units::NATS);
    let int8 = recipe.qk == QkFormat::Int8;
    if int8 {
        let padding = factor.chunks_exact(q_blocks * 128).flat_map(|head| &head[q_tokens..]);
        assert!(padding.into_iter().all(|f| *f == 0.0), "{context}: factors of padding rows");
    }
    for head in 0..heads {
        let want: Dequantized = expected(head / q_heads, head % q_heads);
        for row in 0..q_blocks * 128 {
            let tile = &q_tiles[(head * q_blocks * 2 + row / ROWS) * q_tile..][..q_tile];
            for c in 0..CHANNELS {
                let code = value(recipe.qk, tile, q_at(row % ROWS, c));
                let own = if int8 { f64::from(factor[head * q_blocks * 128 + row]) } else { 1.0 };
                let inside = row < q_tokens && c < want.qk_dim;
                let expected = if inside { want.q[row * want.qk_dim + c] } else { 0.0 };
                assert_eq!(code * own * nats, expected, "{context}: q head {head}, row {row}, channel {c}");
            }
        }
        // What centring K took from the LSE.
        let (b, kv_head) = (head / q_heads, head % q_heads / (q_heads / kv_heads));
        let keys = problem.k.read_head(b, kv_head, problem.kv_len(b));
        let mut m = vec![0.0; head_dim];
        mean::token_mean(&keys, head_dim, keys.len() / head_dim, &mut m);
        for (row, q) in problem.q.read_head(b, head % q_heads, q_tokens).chunks_exact(head_dim).enumerate() {
            let dot: f64 = q.iter().zip(&m).map(|(q, m)| f64::from(*q) * f64::from(*m)).sum();
            let size: f64 = q.iter().zip(&m).map(|(q, m)| (f64::from(*q) * f64::from(*m)).abs()).sum();
            let found = f64::from(shift[head * q_tokens + row]);
            let scale = f64::from(plan.scale);
            assert!((found - scale * dot).abs() <= 1e-6 * scale * size, "{context}: lse_shift of row {row}");
        }
    }

    // K and V.
    let (k_tiles, scales) = (gpu.read(k_tiles), gpu.read(scales));
    let (v_tiles, v_scale, mean_tiles) = (gpu.read(v_tiles), gpu.read(v_scale), gpu.read(mean_tiles));
    for index in 0..kv_total {
        let want = expected(index / kv_heads, index % kv_heads * (q_heads / kv_heads));
        let keys = want.k.len() / want.qk_dim;
        for key in 0..kv_blocks * KEYS {
            let (block, row) = (index * kv_blocks + key / KEYS, key % KEYS);
            for c in 0..CHANNELS {
                let code = value(recipe.qk, &k_tiles[block * k_tile..], k_at(row, c));
                let scale = scales[block * scale_groups::K_GROUPS + scale_groups::k_group(row)];
                let own = if int8 { f64::from(scale) } else { 1.0 };
                let inside = key < keys && c < want.qk_dim;
                let expected = if inside { want.k[key * want.qk_dim + c] } else { 0.0 };
                assert_eq!(code * own, expected, "{context}: k head {index}, position {key}, channel {c}");

                let residual = e4m3::decode(v_tiles[block * V_BYTES + tiles::v_tile_offset(row, c)]);
                let tile = (index * kv_blocks.div_ceil(MEAN_BLOCKS) + key / KEYS / MEAN_BLOCKS) * MEAN_BYTES;
                let at = tile + tiles::mean_offset(key / KEYS % MEAN_BLOCKS, c);
                let mean = f16::from_le_bytes([mean_tiles[at], mean_tiles[at + 1]]).to_f32();
                let mean = if recipe.demean { mean } else { 0.0 };
                let restored = (residual + mean) * v_scale[index * CHANNELS + c];
                if key < keys && c < head_dim {
                    let expected = want.v[key * head_dim + c];
                    assert_eq!(
                        f64::from(restored),
                        expected,
                        "{context}: v head {index}, position {key}, channel {c}"
                    );
                } else {
                    assert_eq!(residual, 0.0, "{context}: padding of v, position {key}, channel {c}");
                }
            }
        }
    }
    assert!(gpu.read(poisoned).iter().chain(&gpu.read(saturated)).all(|flag| *flag == 0), "{context}");
}

#[test]
fn operands_are_those_of_the_cpu() {
    let recipes = [vc::vc16_expcast(), vc::vc8_fp8qk(), vc::vc8(), Recipe { demean: false, ..vc::vc16() }];
    let schedules = [Schedule::Oldest, Schedule::Newest, Schedule::Random(5)];
    for (i, recipe) in recipes.iter().enumerate() {
        let grouped =
            Sizes { batch: 2, q_heads: 4, kv_heads: 2, q_tokens: 75, kv_tokens: 300, head_dim: 128 };
        check(recipe, i % 2 == 0, grouped, Some(&[300, 129]), schedules[i % 3], false);
        let odd = Sizes { batch: 1, q_heads: 1, kv_heads: 1, q_tokens: 1, kv_tokens: 1, head_dim: 72 };
        check(recipe, i % 2 == 1, odd, None, schedules[(i + 1) % 3], false);
        let padded = Sizes { q_tokens: 129, kv_tokens: 191, ..odd };
        check(recipe, i % 2 == 0, padded, None, schedules[(i + 2) % 3], false);
    }
}

/// A token's angle goes with it to its place in the order, and the mean of K is that of turned keys.
#[test]
fn rope_is_applied_before_everything() {
    for (i, recipe) in [vc::vc16_expcast(), vc::vc8_fp8qk(), vc::vc8()].iter().enumerate() {
        let grouped =
            Sizes { batch: 2, q_heads: 4, kv_heads: 2, q_tokens: 75, kv_tokens: 300, head_dim: 128 };
        check(recipe, i % 2 == 0, grouped, Some(&[300, 129]), Schedule::Oldest, true);
        let padded = Sizes { batch: 1, q_heads: 1, kv_heads: 1, q_tokens: 129, kv_tokens: 191, head_dim: 72 };
        check(recipe, i % 2 == 1, padded, None, Schedule::Newest, true);
    }
}

/// Two iterations of k-means and their sort, for one head.
fn cluster(bf16_bits: bool, tokens: usize, valid: usize, clusters: usize, schedule: Schedule) {
    let context = format!("{bf16_bits} {tokens} {valid} {clusters} {schedule:?}");
    let dim = 128;
    let v = Input::random(&mut ChaCha8Rng::seed_from_u64(9), bf16_bits, 1, 1, tokens, dim);
    let mut gpu = Memory::new();
    let v_in = gpu.input("v", &v.bits).cast::<u8>();
    let lens = gpu.input("kv_lens", &[valid as u32]);
    let chunks = tokens.div_ceil(1024);
    let runs = tokens.div_ceil(128) + clusters;
    let centroids = gpu.output::<f32>("centroids", clusters * dim);
    let targets = gpu.output::<u16>("targets", clusters * dim);
    let norms = gpu.output::<f32>("norms", clusters);
    let labels = gpu.output::<u16>("labels", tokens);
    let counts = gpu.output::<u32>("counts", chunks * clusters);
    let starts = gpu.output::<u32>("starts", clusters + 1);
    let run_list = gpu.output::<u32>("runs", runs * 2);
    let run_starts = gpu.output::<u32>("run_starts", clusters + 1);
    let order_out = gpu.output::<u32>("order", tokens);
    let sums = gpu.output::<f32>("sums", runs * dim);
    let [b, h, t] = v.strides().map(|s| s as i64);
    let [n, d, k] = [tokens, dim, clusters].map(|n| n as u32);
    run_typed!(
        bf16_bits,
        &gpu,
        schedule,
        clusters.div_ceil(8),
        kmeans,
        [kmeans_seed_bf16, kmeans_seed_f16],
        (v_in, lens, centroids, targets.cast(), norms, b, h, t, n, 1, d, k, 0, 42)
    );
    let value = |token: usize, c: usize| {
        let bits = v.bits[token * (dim + 8) + c];
        if bf16_bits { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() }
    };
    let round = |x: f32| if bf16_bits { bf16::from_f32(x).to_f64() } else { f16::from_f32(x).to_f64() };
    for iteration in 0..2 {
        let before = gpu.read(centroids);
        run_typed!(
            bf16_bits,
            &gpu,
            schedule,
            chunks,
            kmeans,
            [kmeans_assign_bf16, kmeans_assign_f16],
            (v_in, lens, targets.cast_const().cast(), norms, labels, b, h, t, n, 1, d, k, 0)
        );
        run!(&gpu, schedule, chunks, order::order_count(labels, std::ptr::null(), lens, counts, n, 1, k));
        run!(&gpu, schedule, 1, order::order_scan(counts, starts, run_list, run_starts, n, k));
        run!(&gpu, schedule, chunks, order::order_scatter(labels, lens, counts, starts, order_out, n, 1, k));
        run_typed!(
            bf16_bits,
            &gpu,
            schedule,
            runs.div_ceil(8),
            kmeans,
            [kmeans_sums_bf16, kmeans_sums_f16],
            (v_in, lens, order_out, run_list, run_starts, sums, b, h, t, n, 1, d, k, 0)
        );
        run_typed!(
            bf16_bits,
            &gpu,
            schedule,
            clusters.div_ceil(8),
            kmeans,
            [kmeans_update_bf16, kmeans_update_f16],
            (lens, sums, run_starts, starts, centroids, targets.cast(), norms, n, 1, k, 0)
        );

        // Nobody is nearer than the target that was taken, but for the rounding of distances.
        let labels = &gpu.read(labels)[..valid];
        let distance = |token: usize, cluster: usize| {
            let pair = |c: usize| (f64::from(value(token, c)), round(before[cluster * dim + c]));
            (0..dim).map(pair).map(|(x, t)| (x - t) * (x - t)).sum::<f64>()
        };
        let live = clusters.min(valid);
        for (token, &label) in labels.iter().enumerate() {
            let own = distance(token, usize::from(label));
            let least = (0..live).map(|c| distance(token, c)).fold(f64::INFINITY, f64::min);
            assert!(own <= least + 1e-3 * (1.0 + least), "{context}: iteration {iteration}, token {token}");
        }
        // The one stable order, its runs, and means over it.
        let order = &gpu.read(order_out)[..valid];
        assert!(order == stable_argsort(labels), "{context}: not the stable order");
        let (starts, run_starts, found) = (gpu.read(starts), gpu.read(run_starts), gpu.read(run_list));
        let mut expected = Vec::new();
        for cluster in 0..clusters {
            assert_eq!(run_starts[cluster] as usize, expected.len() / 2, "{context}: first run of {cluster}");
            let (mut first, end) = (starts[cluster], starts[cluster + 1]);
            while first < end {
                expected.extend([first, (end - first).min(128)]);
                first += 128;
            }
        }
        assert_eq!(run_starts[clusters] as usize, expected.len() / 2, "{context}: number of runs");
        assert!(found[..expected.len()] == expected, "{context}: runs");
        let after = gpu.read(centroids);
        for cluster in 0..live {
            let members: Vec<usize> = (0..valid).filter(|t| usize::from(labels[*t]) == cluster).collect();
            for c in 0..dim {
                let found = f64::from(after[cluster * dim + c]);
                let mean =
                    members.iter().map(|t| f64::from(value(*t, c))).sum::<f64>() / members.len() as f64;
                let expected = if members.is_empty() { f64::from(before[cluster * dim + c]) } else { mean };
                assert!(
                    (found - expected).abs() <= 1e-5 * (1.0 + expected.abs()),
                    "{context}: centroid {cluster}"
                );
            }
        }
    }

    // Clusters numbered along a path through their centroids.
    let (old_labels, old_centroids) = (gpu.read(labels), gpu.read(centroids));
    let distances = gpu.output::<f32>("distances", clusters * clusters);
    let numbers = gpu.output::<u16>("numbers", clusters);
    let blocks = clusters.div_ceil(32) * clusters.div_ceil(32);
    run!(&gpu, schedule, blocks, tour::kmeans_distances(lens, centroids, distances, n, 1, d, k, 0));
    run!(&gpu, schedule, 1, tour::kmeans_tour(lens, starts, distances, centroids, numbers, n, 1, d, k, 0));
    run!(&gpu, schedule, chunks, order::order_count(labels, numbers, lens, counts, n, 1, k));
    let live = clusters.min(valid);
    let occupied = |c: usize| old_labels[..valid].contains(&(c as u16));
    let path = path(&old_centroids[..live * dim], dim, occupied);
    let (numbers, new_centroids, new_labels) = (gpu.read(numbers), gpu.read(centroids), gpu.read(labels));
    for (number, &old) in path.iter().enumerate() {
        assert_eq!(usize::from(numbers[old]), number, "{context}: cluster {old}");
        let (new, old) = (&new_centroids[number * dim..][..dim], &old_centroids[old * dim..][..dim]);
        assert!(new.iter().zip(old).all(|(a, b)| a.to_bits() == b.to_bits()), "{context}: centroid {number}");
    }
    for (new, old) in new_labels[..valid].iter().zip(&old_labels) {
        assert_eq!(*new, numbers[usize::from(*old)], "{context}");
    }
}

/// Cheapest insertion: clusters join by number, each where it lengthens the path least; empty ones at the end.
fn path(centroids: &[f32], dim: usize, occupied: impl Fn(usize) -> bool) -> Vec<usize> {
    let clusters = centroids.len() / dim;
    let between = |a: usize, b: usize| -> f32 {
        (0..dim).map(|c| centroids[a * dim + c] - centroids[b * dim + c]).map(|x| x * x).sum()
    };
    let mut path: Vec<usize> = Vec::new();
    for new in (0..clusters).filter(|c| occupied(*c)) {
        let longer = |place: usize| match place {
            0 => path.first().map_or(0.0, |&next| between(next, new)),
            place if place == path.len() => between(path[place - 1], new),
            place => {
                let (last, next) = (path[place - 1], path[place]);
                between(last, new) + between(new, next) - between(last, next)
            }
        };
        let best = (0..=path.len()).min_by(|a, b| longer(*a).total_cmp(&longer(*b))).expect("a place");
        path.insert(best, new);
    }
    path.extend((0..clusters).filter(|c| !occupied(*c)));
    path
}

#[test]
fn grouping_assigns_sorts_and_averages() {
    cluster(true, 1500, 1400, 9, Schedule::Oldest);
    cluster(false, 1025, 1025, 64, Schedule::Newest);
    cluster(true, 300, 257, 1, Schedule::Random(2));
    // More clusters than fit into shared memory at once, and more than tokens that count.
    cluster(true, 500, 400, 150, Schedule::Oldest);
    cluster(false, 129, 5, 16, Schedule::Random(3));
}
