//! Strided rank-4 tensors in host memory: what goes into a call and what comes out.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::error::{Error, Result};

/// Elements that a thread checks for NaN and infinity before it looks whether it may stop.
const CHUNK: usize = 1 << 14;

/// Number of elements of a shape, if it can be counted.
pub(crate) fn count(shape: [usize; 4]) -> Option<usize> {
    if shape.contains(&0) { Some(0) } else { shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x)) }
}

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

/// Order of the axes in memory of a contiguous tensor; the logical order is always (batch, heads, tokens, dim).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// (batch, heads, tokens, dim), PyTorch's `scaled_dot_product_attention`.
    #[default]
    Bhsd,
    /// (batch, tokens, heads, dim), `flash_attn` and SageAttention.
    Bshd,
}

impl Layout {
    /// Strides in elements of a contiguous tensor of logical `shape` [batch, heads, tokens, dim].
    ///
    /// They saturate where the shape is larger than memory.
    pub fn strides(self, [_, h, n, d]: [usize; 4]) -> [usize; 4] {
        let batch = h.saturating_mul(n).saturating_mul(d);
        match self {
            Layout::Bhsd => [batch, n.saturating_mul(d), d, 1],
            Layout::Bshd => [batch, d, h.saturating_mul(d), 1],
        }
    }
}

/// Borrowed elements of one of the accepted types.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// IEEE binary32.
    F32(&'a [f32]),
    /// IEEE binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a [f32]> for Elements<'a> {
    fn from(x: &'a [f32]) -> Self {
        Elements::F32(x)
    }
}
impl<'a> From<&'a [f16]> for Elements<'a> {
    fn from(x: &'a [f16]) -> Self {
        Elements::F16(x)
    }
}
impl<'a> From<&'a [bf16]> for Elements<'a> {
    fn from(x: &'a [bf16]) -> Self {
        Elements::Bf16(x)
    }
}

impl Elements<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Elements::F32(x) => x.len(),
            Elements::F16(x) => x.len(),
            Elements::Bf16(x) => x.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Elements::F32(_) => DType::F32,
            Elements::F16(_) => DType::F16,
            Elements::Bf16(_) => DType::Bf16,
        }
    }
}

/// What the views need from an element type.
trait Element: Copy + Sync {
    fn is_finite(self) -> bool;
    /// The same value in f32.
    fn widen(self) -> f32;
    /// [`widen`](Self::widen) for neighbours in memory.
    fn widen_run(from: &[Self], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(y, x)| *y = x.widen());
    }
}

impl Element for f32 {
    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }
    fn widen(self) -> f32 {
        self
    }
    fn widen_run(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Element for f16 {
    fn is_finite(self) -> bool {
        f16::is_finite(self)
    }
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn widen_run(from: &[f16], to: &mut [f32]) {
        // The slice form asks once, not per element, whether the processor has F16C.
        from.convert_to_f32_slice(to);
    }
}

impl Element for bf16 {
    fn is_finite(self) -> bool {
        bf16::is_finite(self)
    }
    fn widen(self) -> f32 {
        // bfloat16 is the upper half of binary32; `bf16::to_f32` also quiets NaN, which keeps loops from
        // vectorizing.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Calls a function that is generic over the element type with the typed slice.
macro_rules! with_elements {
    ($elements:expr, $x:ident => $body:expr) => {
        match $elements {
            Elements::F32($x) => $body,
            Elements::F16($x) => $body,
            Elements::Bf16($x) => $body,
        }
    };
}

/// Whether all of `x` is finite; without a branch inside a chunk, so that it runs at the speed of memory.
fn all_finite<T: Element>(x: &[T]) -> bool {
    x.chunks(CHUNK).all(|chunk| chunk.iter().fold(true, |ok, x| ok & x.is_finite()))
}

/// A borrowed tensor of logical shape (batch, heads, tokens, dim) with strides in elements.
///
/// Strides may be 0 (broadcast) and may overlap: a view only reads. Every index inside the shape is known to
/// lie inside the data.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    elements: Elements<'a>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<'a> TensorView<'a> {
    /// A contiguous tensor of logical `shape` [batch, heads, tokens, dim], its axes in memory as `layout` says.
    /// `name` is for the message of an error.
    ///
    /// # Errors
    /// When the number of elements is not the product of the shape.
    pub fn new(
        name: &'static str,
        elements: impl Into<Elements<'a>>,
        shape: [usize; 4],
        layout: Layout,
    ) -> Result<Self> {
        let elements = elements.into();
        let count = count(shape);
        if count != Some(elements.len()) {
            let wanted = count.map_or_else(|| "more than memory holds".into(), |n| n.to_string());
            return Err(Error::Tensor {
                tensor: name,
                expected: format!("{wanted} elements for shape {shape:?}"),
                given: format!("{} elements", elements.len()),
            });
        }
        Ok(Self { elements, shape, strides: layout.strides(shape) })
    }

    /// A tensor of logical `shape` [batch, heads, tokens, dim] with any `strides` in elements (0 broadcasts).
    /// `name` is for the message of an error.
    ///
    /// # Errors
    /// When the last element that shape and strides reach lies outside `elements`.
    pub fn strided(
        name: &'static str,
        elements: impl Into<Elements<'a>>,
        shape: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self> {
        let elements = elements.into();
        let last = shape
            .iter()
            .zip(strides)
            .try_fold(0usize, |at, (&n, stride)| at.checked_add(n.saturating_sub(1).checked_mul(stride)?));
        if !shape.contains(&0) && last.is_none_or(|last| last >= elements.len()) {
            let reach =
                last.map_or_else(|| "further than memory".into(), |last| format!("to element {last}"));
            return Err(Error::Tensor {
                tensor: name,
                expected: format!(
                    "shape {shape:?} with strides {strides:?} to stay inside the data (it reaches {reach})"
                ),
                given: format!("{} elements", elements.len()),
            });
        }
        Ok(Self { elements, shape, strides })
    }

    /// Logical shape [batch, heads, tokens, dim].
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements along [batch, heads, tokens, dim].
    pub fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.elements.dtype()
    }

    /// The elements that shape and strides index.
    pub fn elements(&self) -> Elements<'a> {
        self.elements
    }

    /// Index of the first element of a token row.
    fn start(&self, batch: usize, head: usize, token: usize) -> usize {
        let [sb, sh, sn, _] = self.strides;
        batch * sb + head * sh + token * sn
    }

    /// Widens the token row [batch, head, token, ..] to f32 (exact) into `row`, which has `dim` entries.
    ///
    /// # Panics
    /// When an index is outside the shape or `row` is not `dim` long.
    pub fn read_row(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) {
        let [b, h, n, d] = self.shape;
        assert!(batch < b && head < h && token < n && row.len() == d, "row outside the tensor");
        if d == 0 {
            return; // the strides of an empty tensor may point anywhere
        }
        let (start, stride) = (self.start(batch, head, token), self.strides[3]);
        fn read<T: Element>(from: &[T], stride: usize, row: &mut [f32]) {
            if stride == 1 {
                T::widen_run(&from[..row.len()], row);
            } else {
                row.iter_mut().enumerate().for_each(|(i, y)| *y = from[i * stride].widen());
            }
        }
        with_elements!(self.elements, x => read(&x[start..], stride, row));
    }

    /// Widens the first `tokens` rows of one head to f32 (exact), row-major [tokens, dim].
    ///
    /// # Panics
    /// When an index is outside the shape or `tokens` is more than the tensor has.
    pub fn read_head(&self, batch: usize, head: usize, tokens: usize) -> Vec<f32> {
        let [b, h, n, d] = self.shape;
        assert!(batch < b && head < h && tokens <= n, "head outside the tensor");
        let mut out = vec![0.0; tokens * d];
        if out.is_empty() {
            return out;
        }
        let [_, _, sn, sd] = self.strides;
        if sd == 1 && sn == d {
            let start = self.start(batch, head, 0);
            with_elements!(self.elements, x => Element::widen_run(&x[start..][..tokens * d], &mut out));
        } else {
            for (token, row) in out.chunks_exact_mut(d).enumerate() {
                self.read_row(batch, head, token, row);
            }
        }
        out
    }

    /// The first NaN or infinity in the order (batch, head, token, channel), and where it is, among the first
    /// `valid[batch]` tokens of every batch (all of them when absent).
    ///
    /// # Panics
    /// When `valid` does not have a length for every batch, or one is more than the tensor's tokens.
    pub fn find_nonfinite(&self, valid: Option<&[usize]>) -> Option<([usize; 4], f32)> {
        let [b, h, n, d] = self.shape;
        if let Some(valid) = valid {
            assert!(
                valid.len() == b && valid.iter().all(|&valid| valid <= n),
                "valid tokens do not fit the shape"
            );
        }
        if self.shape.contains(&0) {
            return None;
        }
        let valid = |batch: usize| valid.map_or(n, |valid| valid[batch]);
        // Almost always everything is finite, and the quickest way to see that is to read the data as it lies in
        // memory, whatever the strides: also what the view leaves out, unless that is more than the view itself.
        let size = count(self.shape);
        if size.is_none_or(|size| self.elements.len() / 2 <= size)
            && with_elements!(self.elements, x => match x.len() {
                0..=CHUNK => all_finite(x), // not worth waking other threads
                _ => x.par_chunks(CHUNK).all(all_finite),
            })
        {
            return None;
        }
        // Row by row, in the order of memory, so that a view into a packed projection is as quick.
        let heads_inside = self.strides[1] < self.strides[2];
        let rows = h.saturating_mul(n);
        let [batch, head, token, channel] = (0..b.saturating_mul(rows))
            .into_par_iter()
            .with_min_len(256)
            .filter_map(|i| {
                let (batch, row) = (i / rows, i % rows);
                let (head, token) = if heads_inside { (row % h, row / h) } else { (row / n, row % n) };
                if token >= valid(batch) {
                    return None;
                }
                let channel = self.nonfinite_channel(self.start(batch, head, token))?;
                Some([batch, head, token, channel])
            })
            .min()?;
        let mut row = vec![0.0; d];
        self.read_row(batch, head, token, &mut row);
        Some(([batch, head, token, channel], row[channel]))
    }

    /// Channel of the first value that is not finite in the token row that starts at `start`.
    fn nonfinite_channel(&self, start: usize) -> Option<usize> {
        let (d, stride) = (self.shape[3], self.strides[3]);
        fn find<T: Element>(from: &[T], d: usize, stride: usize) -> Option<usize> {
            if stride == 1 && all_finite(&from[..d]) {
                return None;
            }
            (0..d).find(|channel| !from[channel * stride].is_finite())
        }
        with_elements!(self.elements, x => find(&x[start..], d, stride))
    }
}

/// Owned elements of one of the accepted types.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// IEEE binary32.
    F32(Vec<f32>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Buffer {
    /// The same elements, borrowed.
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Buffer::F32(x) => Elements::F32(x),
            Buffer::F16(x) => Elements::F16(x),
            Buffer::Bf16(x) => Elements::Bf16(x),
        }
    }
}

/// An owned, contiguous tensor of logical shape (batch, heads, tokens, dim).
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    buffer: Buffer,
    shape: [usize; 4],
    layout: Layout,
}

impl Tensor {
    /// Rounds f32 values, row-major in (batch, heads, tokens, dim), to `dtype` and lays them out as `layout` says.
    ///
    /// # Panics
    /// When the number of values is not the product of the shape.
    pub fn from_bhsd(values: Vec<f32>, shape: [usize; 4], dtype: DType, layout: Layout) -> Self {
        let [b, h, n, d] = shape;
        assert_eq!(values.len(), b * h * n * d, "values do not fill the shape");
        let values = match layout {
            Layout::Bhsd => values,
            Layout::Bshd => {
                let mut out = vec![0.0; values.len()];
                for (i, row) in values.chunks_exact(d.max(1)).enumerate() {
                    let (batch, head, token) = (i / (h * n), i / n % h, i % n);
                    out[((batch * n + token) * h + head) * d..][..d].copy_from_slice(row);
                }
                out
            }
        };
        let buffer = match dtype {
            DType::F32 => Buffer::F32(values),
            DType::F16 => Buffer::F16(values.into_iter().map(f16::from_f32).collect()),
            DType::Bf16 => Buffer::Bf16(values.into_iter().map(bf16::from_f32).collect()),
        };
        Self { buffer, shape, layout }
    }

    /// The elements in memory order.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Logical shape [batch, heads, tokens, dim].
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Order of the axes in memory.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// A view of the whole tensor.
    pub fn view(&self) -> TensorView<'_> {
        let elements = self.buffer.elements();
        TensorView { elements, shape: self.shape, strides: self.layout.strides(self.shape) }
    }
}
