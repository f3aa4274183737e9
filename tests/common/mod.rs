//! Problems for the tests: shapes, data and views, the same bits on every run.
#![allow(dead_code, reason = "every test binary uses its own part")]

use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::fidelity::reference::{Operands, Reference, attention, attention_head};
use vc_attention::{
    DType, Elements, Layout, Options, Output, OutputType, Plan, Problem, Recipe, Tensor, TensorView, run,
};

/// SplitMix64, and normal numbers from it.
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// Fisher and Yates.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| order.swap(i, self.below(i + 1)));
        order
    }
}

/// Sizes of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_tokens: usize,
    pub kv_tokens: usize,
    pub dim: usize,
}

impl Case {
    /// `[batch, q heads, kv heads]`, `[q tokens, kv tokens]`, head_dim.
    pub const fn new(
        [batch, q_heads, kv_heads]: [usize; 3],
        [q_tokens, kv_tokens]: [usize; 2],
        dim: usize,
    ) -> Self {
        Self { batch, q_heads, kv_heads, q_tokens, kv_tokens, dim }
    }

    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_tokens, self.dim]
    }

    pub fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.kv_tokens, self.dim]
    }

    /// Independent N(0, 1).
    pub fn normal(&self, seed: u64) -> Data {
        let mut rng = Rng(seed);
        let [q, kv] = [self.q_shape(), self.kv_shape()].map(|s| s.iter().product());
        Data { case: *self, q: rng.normals(q), k: rng.normals(kv), v: rng.normals(kv) }
    }

    /// What trained heads look like: K with a large mean and loud channels, V in clusters with a few heavy
    /// tokens whose channels differ.
    pub fn outliers(&self, seed: u64) -> Data {
        let mut data = self.normal(seed);
        let mut rng = Rng(seed ^ 0xABCD);
        let d = self.dim;
        let mean: Vec<f32> = rng.normals(d).iter().map(|x| 4.0 * x).collect();
        let loud = [rng.below(d), rng.below(d)];
        for x in data.k.chunks_exact_mut(d) {
            loud.iter().for_each(|&c| x[c] *= 4.0);
            x.iter_mut().zip(&mean).for_each(|(x, m)| *x += m);
        }
        let centres: Vec<Vec<f32>> = (0..8).map(|_| rng.normals(d)).collect();
        for x in data.v.chunks_exact_mut(d) {
            let centre = &centres[rng.below(8)];
            x.iter_mut().zip(centre).for_each(|(x, c)| *x = 0.7 * *x + c);
            if rng.below(100) == 0 {
                (0..d.div_ceil(16)).for_each(|_| x[rng.below(d)] *= 12.0);
            }
        }
        data
    }
}

/// Values of a problem, row-major in (batch, heads, tokens, dim).
#[derive(Clone, Debug)]
pub struct Data {
    pub case: Case,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

/// Owned tensors of a problem.
#[derive(Clone, Debug)]
pub struct Tensors {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

impl Data {
    pub fn tensors(&self, dtype: DType, layout: Layout) -> Tensors {
        let tensor = |x: &Vec<f32>, shape| Tensor::from_bhsd(x.clone(), shape, dtype, layout);
        let (q, kv) = (self.case.q_shape(), self.case.kv_shape());
        Tensors { q: tensor(&self.q, q), k: tensor(&self.k, kv), v: tensor(&self.v, kv) }
    }

    pub fn f32(&self) -> Tensors {
        self.tensors(DType::F32, Layout::Bhsd)
    }

    /// Keys and values of the tokens `order`, in every batch and head.
    pub fn gathered(&self, order: &[usize]) -> Data {
        let (n, d) = (self.case.kv_tokens, self.case.dim);
        let gather = |x: &[f32]| {
            x.chunks_exact(n * d)
                .flat_map(|x| order.iter().flat_map(|&t| &x[t * d..][..d]))
                .copied()
                .collect()
        };
        let case = Case { kv_tokens: order.len(), ..self.case };
        Data { case, q: self.q.clone(), k: gather(&self.k), v: gather(&self.v) }
    }
}

impl Tensors {
    pub fn problem(&self) -> Problem<'_> {
        Problem::new(self.q.view(), self.k.view(), self.v.view())
    }
}

/// Output in f32 and LSE.
pub const F32_LSE: Options = Options { output: OutputType::F32, lse: true };

pub fn recipe(text: &str) -> Recipe {
    Recipe::parse(text).expect("a recipe of the tests parses")
}

pub fn attend(problem: &Problem, recipe: &Recipe) -> Output {
    vc_attention::attend(problem, recipe, F32_LSE).expect("a problem of the tests is valid")
}

pub fn reference(problem: &Problem) -> Reference {
    attention(problem, &problem.validate().expect("a problem of the tests is valid"))
}

/// Elements in f64, in memory order.
pub fn values(view: &TensorView) -> Vec<f64> {
    match view.elements() {
        Elements::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
        Elements::F16(x) => x.iter().map(|x| x.to_f64()).collect(),
        Elements::Bf16(x) => x.iter().map(|x| x.to_f64()).collect(),
    }
}

pub fn o(output: &Output) -> Vec<f64> {
    values(&output.o.view())
}

pub fn lse(output: &Output) -> &[f32] {
    output.lse.as_deref().expect("the tests ask for the LSE")
}

/// |a - b| / |b|; |a| where b is zero.
pub fn relative(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let distance = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let norm = b.iter().map(|b| b * b).sum::<f64>().sqrt();
    if norm == 0.0 { distance } else { distance / norm }
}

/// Output of the recipe, its error against f64 attention on the same dequantized operands, and its error against
/// unquantized attention.
pub fn errors(problem: &Problem, recipe: &Recipe) -> (Output, f64, f64) {
    let plan = Plan::new(problem, recipe, F32_LSE).expect("valid");
    let finished = run(&Cpu, &plan, problem, None).expect("runs");
    let q = Cpu.prepare_q(&plan, problem, &finished.order).expect("prepares");
    let k = Cpu.prepare_k(&plan, problem, &finished.order, &q).expect("prepares");
    let v = Cpu.prepare_v(&plan, problem, &finished.order).expect("prepares");
    let (n, d) = (plan.shape.q_tokens, plan.shape.head_dim);
    let mut on_operands = vec![0.0; plan.shape.batch * plan.shape.q_heads * n * d];
    for (i, o) in on_operands.chunks_exact_mut(n * d).enumerate() {
        let x = Cpu.dequantized(&plan, [i / plan.shape.q_heads, i % plan.shape.q_heads], &q, &k, &v);
        let operands = Operands { q: &x.q, k: &x.k, v: &x.v, qk_dim: x.qk_dim, v_dim: d };
        attention_head(operands, 1.0, o, &mut vec![0.0; n]);
    }
    let got = o(&finished.output);
    let kernel = relative(&got, &on_operands);
    let method = relative(&got, &reference(problem).o);
    (finished.output, kernel, method)
}

/// The same bits, NaN included.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

pub fn o_f32(output: &Output) -> &[f32] {
    match output.o.view().elements() {
        Elements::F32(x) => x,
        _ => panic!("the output is not f32"),
    }
}
