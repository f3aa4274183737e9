//! One call on the GPU and its twin on the CPU.

use half::{bf16, f16};
use rayon::prelude::*;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::{Cpu, Keys, Orders, Queries, Values};
use vc_attention::backend::cuda::{
    Buffer, DeviceObserved, DeviceOperands, DevicePlan, Grouping, PROMOTE, Rope, Spec, Strides, Tensors,
};
use vc_attention::fidelity::reference::{Operands, Reference, attention_head};
use vc_attention::grouping;
use vc_attention::{DType, Elements, Layout, NonFinite, Output, Plan, Problem, Recipe, Shape, TensorView};

use crate::common::{F32_LSE, lse, o, relative};
use crate::device::Gpu;

/// Byte that fills an output before a call: no kernel writes it all over a value.
const UNWRITTEN: u8 = 0xEE;
/// Zeros in front of every tensor on the device, so that none begins on more than the 16 bytes that are asked for.
const LEAD: usize = 16;

/// How a call returns its output.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub output: DType,
    pub layout: Layout,
    pub promote: u32,
}

impl Default for Wanted {
    fn default() -> Self {
        Self { output: DType::F32, layout: Layout::Bhsd, promote: PROMOTE }
    }
}

/// A plan on the device with its tensors.
pub struct OnGpu<'g> {
    pub gpu: &'g Gpu,
    pub plan: DevicePlan,
    pub tensors: Tensors,
    shape: Shape,
    wanted: Wanted,
    lens: Vec<usize>,
    o: Buffer,
    lse: Buffer,
    inputs: Vec<Buffer>,
}

/// What a call left.
#[derive(Debug)]
pub struct Result {
    /// Output row-major in (batch, heads, tokens, dim).
    pub o: Vec<f32>,
    pub lse: Vec<f32>,
    /// Output as it lies on the device.
    pub bytes: Vec<u8>,
    pub observed: DeviceObserved,
}

/// The bytes of a tensor's elements, gaps included.
fn bytes<'a>(view: &TensorView<'a>) -> &'a [u8] {
    match view.elements() {
        Elements::F32(x) => bytemuck::cast_slice(x),
        Elements::F16(x) => bytemuck::cast_slice(x),
        Elements::Bf16(x) => bytemuck::cast_slice(x),
    }
}

fn strides(view: &TensorView) -> Strides {
    let [batch, head, token, _] = view.strides();
    [batch as i64, head as i64, token as i64]
}

/// The plan that a problem needs on the device.
pub fn spec(problem: &Problem, recipe: &Recipe, wanted: Wanted) -> Spec {
    let ([batch, q_heads, q_tokens, head_dim], [_, kv_heads, kv_tokens, _]) =
        (problem.q.shape(), problem.k.shape());
    let [ob, oh, on, _] = wanted.layout.strides([batch, q_heads, q_tokens, head_dim]);
    Spec {
        shape: Shape { batch, q_heads, kv_heads, q_tokens, kv_tokens, head_dim },
        recipe: recipe.clone(),
        scale: problem.scale(),
        input: problem.q.dtype(),
        output: wanted.output,
        q: strides(&problem.q),
        k: strides(&problem.k),
        v: strides(&problem.v),
        o: [ob as i64, oh as i64, on as i64],
        promote: wanted.promote,
    }
}

impl<'g> OnGpu<'g> {
    pub fn new(gpu: &'g Gpu, problem: &Problem, recipe: &Recipe, wanted: Wanted) -> Self {
        let spec = spec(problem, recipe, wanted);
        let shape = spec.shape;
        let plan =
            DevicePlan::new(&gpu.device, spec).unwrap_or_else(|e| panic!("{recipe:?} on {shape:?}: {e}"));
        let mut inputs = Vec::new();
        let mut upload = |view: &TensorView| {
            inputs.push(gpu.upload(&[&[0; LEAD], bytes(view)].concat()));
            inputs.last().map_or(0, Buffer::ptr) + LEAD as u64
        };
        let (q, k, v) = (upload(&problem.q), upload(&problem.k), upload(&problem.v));
        let lens: Vec<usize> = (0..shape.batch).map(|b| problem.kv_len(b)).collect();
        let kv_lens = problem.kv_lens.map_or(0, |lens| {
            inputs.push(gpu.upload(&lens.iter().map(|&n| n as u32).collect::<Vec<_>>()));
            inputs.last().map_or(0, Buffer::ptr)
        });
        let rows = shape.batch * shape.q_heads * shape.q_tokens;
        let o = gpu.upload(&vec![UNWRITTEN; LEAD + rows * shape.head_dim * width(wanted.output)]);
        let lse = gpu.upload(&vec![UNWRITTEN; 4 * rows]);
        let o_ptr = o.ptr() + LEAD as u64;
        let tensors = Tensors { q, k, v, o: o_ptr, lse: lse.ptr(), kv_lens, rope: Rope::default() };
        Self { gpu, plan, tensors, shape, wanted, lens, o, lse, inputs }
    }

    /// The call with rotary tables, cosines and sines of q and those of k; an empty one is absent.
    pub fn with_rope(mut self, tables: &[Vec<f32>; 4]) -> Self {
        let [q_cos, q_sin, k_cos, k_sin] = tables.each_ref().map(|table| {
            if table.is_empty() {
                return 0;
            }
            self.inputs.push(self.gpu.upload(&[&[0.0; LEAD / size_of::<f32>()], table.as_slice()].concat()));
            self.inputs.last().map_or(0, Buffer::ptr) + LEAD as u64
        });
        self.tensors.rope = Rope { q_cos, q_sin, k_cos, k_sin };
        self
    }

    /// Runs the whole call and brings the result back.
    pub fn run(&self, grouping: Grouping) -> Result {
        self.launch(grouping);
        self.result()
    }

    pub fn launch(&self, grouping: Grouping) {
        // SAFETY: `new` made the tensors for the plan, and they live as long as `self`.
        unsafe { self.plan.run(self.gpu.stream(), &self.tensors, grouping) }.expect("the call launches");
    }

    /// Decides the order only.
    pub fn group(&self, grouping: Grouping) -> DeviceOperands {
        // SAFETY: as in `launch`.
        unsafe { self.plan.group(self.gpu.stream(), &self.tensors, grouping) }
            .expect("the grouping launches");
        self.operands()
    }

    pub fn operands(&self) -> DeviceOperands {
        self.plan.operands(self.gpu.stream()).expect("the stages ran")
    }

    /// Waits for the stream and reads what the last call wrote.
    pub fn result(&self) -> Result {
        let observed = self.plan.observed(self.gpu.stream()).expect("the call ran");
        let all: Vec<u8> = self.o.to_vec(self.o.bytes()).expect("reads back");
        assert!(all[..LEAD].iter().all(|&b| b == UNWRITTEN), "the bytes in front of the output were written");
        let bytes = all[LEAD..].to_vec();
        let flat: Vec<f32> = match self.wanted.output {
            DType::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            DType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            DType::Bf16 => {
                bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
        };
        let s = self.shape;
        let shape = [s.batch, s.q_heads, s.q_tokens, s.head_dim];
        let view =
            TensorView::new("o", flat.as_slice(), shape, self.wanted.layout).expect("the output's size");
        let o =
            (0..s.batch * s.q_heads).flat_map(|i| view.read_head(i / s.q_heads, i % s.q_heads, s.q_tokens));
        let lse = self.lse.to_vec(s.batch * s.q_heads * s.q_tokens).expect("reads back");
        Result { o: o.collect(), lse, bytes, observed }
    }

    /// Whether nothing has been written to the outputs yet; does not wait for the stream.
    pub fn untouched(&self) -> bool {
        let all = |buffer: &Buffer| buffer.to_vec::<u8>(buffer.bytes()).expect("reads back");
        [&self.o, &self.lse].into_iter().all(|buffer| all(buffer).iter().all(|&b| b == UNWRITTEN))
    }

    /// The order on the device as the CPU takes it: the sequence where the plan does not group.
    pub fn orders(&self, operands: &DeviceOperands) -> Orders {
        let s = self.shape;
        let of = |index: usize| {
            let len = self.lens[index / s.kv_heads];
            let order = match operands.order.is_empty() {
                true => (0..len as u32).collect(),
                false => operands.order[index * s.kv_tokens..][..len].to_vec(),
            };
            grouping::Grouping { order, ..Default::default() }
        };
        Orders((0..s.batch * s.kv_heads).map(of).collect())
    }

    /// Overwrites q, k and v in place with those of another problem of the same shapes.
    pub fn replace(&self, problem: &Problem) {
        for (view, buffer) in [&problem.q, &problem.k, &problem.v].into_iter().zip(&self.inputs) {
            let from = bytes(view);
            assert_eq!(from.len() + LEAD, buffer.bytes(), "another shape");
            // SAFETY: the buffer holds these bytes behind the lead, checked above.
            unsafe { cudarc::driver::result::memcpy_htod_sync(buffer.ptr() + LEAD as u64, from) }
                .expect("copies");
        }
        self.gpu.device.context().synchronize().expect("the copies arrive");
    }
}

fn width(dtype: DType) -> usize {
    if dtype == DType::F32 { 4 } else { 2 }
}

/// The CPU backend's stages of the same call on a given order.
pub struct Twin<'p> {
    pub plan: Plan,
    problem: &'p Problem<'p>,
    pub q: Queries,
    pub k: Keys,
    pub v: Values,
}

impl<'p> Twin<'p> {
    pub fn new(problem: &'p Problem<'p>, recipe: &Recipe, orders: &Orders) -> Self {
        let plan = Plan::new(problem, recipe, F32_LSE).expect("a problem of the tests is valid");
        let q = Cpu.prepare_q(&plan, problem, orders).expect("prepares");
        let k = Cpu
            .prepare_k(&plan, problem, orders, &q)
            .expect("the order is a permutation of the valid tokens");
        let v = Cpu.prepare_v(&plan, problem, orders).expect("prepares");
        Self { plan, problem, q, k, v }
    }

    pub fn attend(&self) -> Output {
        Cpu.attend(&self.plan, self.problem, &self.q, &self.k, &self.v).expect("attends")
    }

    /// Attention in f64 on what the operands stand for. Its LSE lacks the K mean's term.
    pub fn exact(&self) -> Reference {
        let Shape { batch, q_heads, q_tokens: n, head_dim: d, .. } = self.plan.shape;
        let mut exact =
            Reference { o: vec![0.0; batch * q_heads * n * d], lse: vec![0.0; batch * q_heads * n] };
        let heads = exact.o.par_chunks_mut(n * d).zip(exact.lse.par_chunks_mut(n)).enumerate();
        heads.for_each(|(i, (o, lse))| {
            let x = Cpu.dequantized(&self.plan, [i / q_heads, i % q_heads], &self.q, &self.k, &self.v);
            let operands = Operands { q: &x.q, k: &x.k, v: &x.v, qk_dim: x.qk_dim, v_dim: d };
            attention_head(operands, 1.0, o, lse);
        });
        exact
    }
}

/// How far the GPU and the CPU are from f64 attention on the same operands, and from each other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distances {
    /// Of the GPU from f64.
    pub gpu: f64,
    /// Of the CPU from f64.
    pub cpu: f64,
    /// Of the GPU from the CPU.
    pub between: f64,
    /// Largest |LSE of the GPU - LSE of the CPU|.
    pub lse: f64,
    /// |row max of the GPU - row max of the CPU| in code units.
    pub max_score: f64,
}

impl Distances {
    pub fn worst(self, other: Self) -> Self {
        let max = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
        Self {
            gpu: max(self.gpu, other.gpu),
            cpu: max(self.cpu, other.cpu),
            between: max(self.between, other.between),
            lse: max(self.lse, other.lse),
            max_score: max(self.max_score, other.max_score),
        }
    }
}

/// Runs a call on the GPU, its twin on the CPU on the GPU's own order, and measures.
pub fn distances(gpu: &Gpu, problem: &Problem, recipe: &Recipe, wanted: Wanted) -> Distances {
    let call = OnGpu::new(gpu, problem, recipe, wanted);
    let result = call.run(Grouping::Cold);
    let problem = Problem { nonfinite: NonFinite::Propagate, ..*problem };
    let twin = Twin::new(&problem, recipe, &call.orders(&call.operands()));
    between(&result, &twin)
}

/// Measures a result against its twin.
pub fn between(result: &Result, twin: &Twin) -> Distances {
    let (cpu, exact) = (twin.attend(), twin.exact());
    let got: Vec<f64> = result.o.iter().map(|&x| f64::from(x)).collect();
    let lse_off =
        result.lse.iter().zip(lse(&cpu)).map(|(a, b)| if a == b { 0.0 } else { f64::from((a - b).abs()) });
    let of_cpu = o(&cpu);
    Distances {
        gpu: relative(&got, &exact.o),
        cpu: relative(&of_cpu, &exact.o),
        between: relative(&got, &of_cpu),
        lse: lse_off.fold(0.0, |worst, x| if x > worst || x.is_nan() { x } else { worst }),
        max_score: f64::from((result.observed.max_score - cpu.observed.max_score).abs()),
    }
}
