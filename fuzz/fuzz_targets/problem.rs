//! Arbitrary shapes, strides, lengths, scale and grid over small buffers: what is accepted can be read without
//! leaving the data.
#![no_main]

use arbitrary::Arbitrary;
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use vc_attention::{Elements, Layout, NonFinite, Problem, TensorView};

#[derive(Arbitrary, Debug)]
struct Axis {
    /// Small most of the time, so that views fit; anything now and then.
    size: Size,
    stride: Size,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Size {
    Small(u8),
    Medium(u16),
    Any(usize),
}

impl Size {
    fn get(self) -> usize {
        match self {
            Size::Small(n) => usize::from(n % 8),
            Size::Medium(n) => usize::from(n),
            Size::Any(n) => n,
        }
    }
}

#[derive(Arbitrary, Debug)]
struct View {
    axes: [Axis; 4],
    dtype: u8,
    layout: Option<bool>,
}

#[derive(Arbitrary, Debug)]
struct Call {
    q: View,
    k: View,
    v: View,
    same_shape: bool,
    kv_lens: Option<Vec<Size>>,
    scale: Option<f32>,
    grid: Option<[Size; 3]>,
    propagate: bool,
    bits: Vec<u32>,
}

/// The same bits in the three element types, each in an allocation of its own, so that the address sanitizer
/// sees a read past the end.
struct Data {
    f32: Box<[f32]>,
    f16: Box<[f16]>,
    bf16: Box<[bf16]>,
}

impl Data {
    fn new(bits: &[u32]) -> Self {
        Self {
            f32: bits.iter().map(|&x| f32::from_bits(x)).collect(),
            f16: bits.iter().map(|&x| f16::from_bits(x as u16)).collect(),
            bf16: bits.iter().map(|&x| bf16::from_bits(x as u16)).collect(),
        }
    }

    fn view(&self, name: &'static str, view: &View, shape: [usize; 4]) -> Option<TensorView<'_>> {
        let elements: Elements<'_> = match view.dtype % 3 {
            0 => self.f32[..].into(),
            1 => self.f16[..].into(),
            _ => self.bf16[..].into(),
        };
        let strides = [0, 1, 2, 3].map(|i| view.axes[i].stride.get());
        match view.layout {
            None => TensorView::strided(name, elements, shape, strides).ok(),
            Some(false) => TensorView::new(name, elements, shape, Layout::Bhsd).ok(),
            Some(true) => TensorView::new(name, elements, shape, Layout::Bshd).ok(),
        }
    }
}

fuzz_target!(
    // The library's parallel loops run on this thread: waking another for a few elements takes longer than they do.
    init: rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread()
        .build_global()
        .expect("the first pool of the process"),
    |call: Call| check(call)
);

fn check(call: Call) {
    let data = Data::new(&call.bits);
    let shape = |view: &View| [0, 1, 2, 3].map(|i| view.axes[i].size.get());
    let (qs, ks) = (shape(&call.q), shape(&call.k));
    let vs = if call.same_shape { ks } else { shape(&call.v) };
    let ks = if call.same_shape { [qs[0], ks[1], ks[2], qs[3]] } else { ks };
    let vs = if call.same_shape { ks } else { vs };
    let Some(q) = data.view("q", &call.q, qs) else { return };
    let Some(k) = data.view("k", &call.k, ks) else { return };
    let Some(v) = data.view("v", &call.v, vs) else { return };

    // Broadcast and empty views may have axes of any size; walking them takes as long as they are large.
    let walk = |shape: [usize; 4]| shape.iter().fold(1usize, |n, &x| n.saturating_mul(x.max(1)));
    if [qs, ks, vs].into_iter().any(|shape| walk(shape) > 1 << 10) {
        return;
    }
    for (view, shape) in [(q, qs), (k, ks), (v, vs)] {
        let [b, h, n, d] = shape;
        let mut row = vec![0.0; d];
        for batch in 0..b {
            for head in 0..h {
                let all = view.read_head(batch, head, n);
                for token in 0..n {
                    view.read_row(batch, head, token, &mut row);
                    let same = row
                        .iter()
                        .zip(&all[token * d..])
                        .all(|(x, y)| x.to_bits() == y.to_bits() || x.is_nan());
                    assert!(same, "read_row and read_head differ");
                }
            }
        }
        // The first value that is not finite is the first.
        let mut first = None;
        'search: for batch in 0..b {
            for head in 0..h {
                let all = view.read_head(batch, head, n);
                if let Some(at) = all.iter().position(|x| !x.is_finite()) {
                    first = Some([batch, head, at / d, at % d]);
                    break 'search;
                }
            }
        }
        assert_eq!(view.find_nonfinite(None).map(|(position, _)| position), first);
    }

    let kv_lens: Option<Vec<usize>> = call.kv_lens.map(|lens| lens.into_iter().map(Size::get).collect());
    let problem = Problem {
        kv_lens: kv_lens.as_deref(),
        scale: call.scale,
        grid: call.grid.map(|grid| grid.map(Size::get)),
        nonfinite: if call.propagate { NonFinite::Propagate } else { NonFinite::Reject },
        ..Problem::new(q, k, v)
    };
    let Ok(shape) = problem.validate() else { return };
    assert!(problem.scale().is_finite());
    assert!((0..shape.batch).all(|batch| problem.kv_len(batch) <= shape.kv_tokens));
    assert!((0..shape.q_heads).all(|head| shape.kv_head(head) < shape.kv_heads));
    assert!(shape.flops() > 0.0);
}
