//! Strided rank-4 tensors in host memory: what goes into a call and what comes out.

use half::{bf16, f16};

use crate::error::{Error, Result};

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
    pub fn strides(self, [_, h, n, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Layout::Bhsd => [h * n * d, n * d, d, 1],
            Layout::Bshd => [n * h * d, d, h * d, 1],
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

/// A borrowed tensor of logical shape (batch, heads, tokens, dim) with strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    elements: Elements<'a>,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl<'a> TensorView<'a> {
    /// A contiguous tensor of logical `shape` [batch, heads, tokens, dim], its axes in memory as `layout` says.
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
        let count = shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x));
        if count != Some(elements.len()) {
            return Err(Error::Tensor {
                tensor: name,
                expected: format!(
                    "{} elements for shape {shape:?}",
                    count.map_or("more than memory holds".into(), |n| n.to_string())
                ),
                given: format!("{} elements", elements.len()),
            });
        }
        Ok(Self { elements, shape, strides: layout.strides(shape) })
    }

    /// A tensor of logical `shape` [batch, heads, tokens, dim] with any `strides` in elements (0 broadcasts).
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
            return Err(Error::Tensor {
                tensor: name,
                expected: format!("shape {shape:?} with strides {strides:?} to stay inside the data"),
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

    /// Widens the token row [batch, head, token, ..] to f32 (exact) into `row`, which has `dim` entries.
    ///
    /// # Panics
    /// When an index is outside the shape or `row` is not `dim` long.
    pub fn read_row(&self, batch: usize, head: usize, token: usize, row: &mut [f32]) {
        let [b, h, n, d] = self.shape;
        assert!(batch < b && head < h && token < n && row.len() == d, "row outside the tensor");
        let [sb, sh, sn, sd] = self.strides;
        let start = batch * sb + head * sh + token * sn;
        fn widen<T: Copy>(from: &[T], stride: usize, row: &mut [f32], f: impl Fn(T) -> f32) {
            if stride == 1 {
                row.iter_mut().zip(from).for_each(|(y, &x)| *y = f(x));
            } else {
                row.iter_mut().enumerate().for_each(|(i, y)| *y = f(from[i * stride]));
            }
        }
        match self.elements {
            Elements::F32(x) => widen(&x[start..], sd, row, |x| x),
            Elements::F16(x) => widen(&x[start..], sd, row, f16::to_f32),
            Elements::Bf16(x) => widen(&x[start..], sd, row, bf16::to_f32),
        }
    }

    /// Widens the first `tokens` rows of one head to f32 (exact), row-major [tokens, dim].
    pub fn read_head(&self, batch: usize, head: usize, tokens: usize) -> Vec<f32> {
        let d = self.shape[3];
        let mut out = vec![0.0; tokens * d];
        for (token, row) in out.chunks_exact_mut(d).enumerate() {
            self.read_row(batch, head, token, row);
        }
        out
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
        let elements = match &self.buffer {
            Buffer::F32(x) => Elements::F32(x),
            Buffer::F16(x) => Elements::F16(x),
            Buffer::Bf16(x) => Elements::Bf16(x),
        };
        TensorView { elements, shape: self.shape, strides: self.layout.strides(self.shape) }
    }
}
