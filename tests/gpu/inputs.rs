//! Tensors for the GPU tests: any layout with gaps, and real inputs found at run time.

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use vc_attention::io::InputFile;
use vc_attention::tensor::Buffer;
use vc_attention::{DType, Layout, TensorView};

use crate::common::{Case, Data};

/// Elements between the heads or tokens of a [`Strided`] tensor that belong to no element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gaps {
    /// Contiguous.
    None,
    /// 8 elements behind every row, 24 behind every head (or token, under bshd): odd multiples of 16 bytes.
    Some,
}

/// An owned tensor of logical shape (batch, heads, tokens, dim) with any strides; what lies between its elements
/// is NaN.
pub struct Strided {
    name: &'static str,
    pub buffer: Buffer,
    shape: [usize; 4],
    strides: [usize; 4],
}

impl Strided {
    pub fn new(
        name: &'static str,
        x: &[f32],
        shape: [usize; 4],
        dtype: DType,
        layout: Layout,
        gaps: Gaps,
    ) -> Self {
        let [b, h, n, d] = shape;
        let (row, group) = if gaps == Gaps::None { (d, 0) } else { (d + 8, 24) };
        let strides = match layout {
            Layout::Bhsd => [h * (n * row + group), n * row + group, row, 1],
            Layout::Bshd => [n * (h * row + group), row, h * row + group, 1],
        };
        let mut values = vec![f32::NAN; b * strides[0]];
        for (i, from) in x.chunks_exact(d).enumerate() {
            let at = i / (h * n) * strides[0] + i / n % h * strides[1] + i % n * strides[2];
            values[at..at + d].copy_from_slice(from);
        }
        let buffer = match dtype {
            DType::F32 => Buffer::F32(values),
            DType::F16 => Buffer::F16(values.into_iter().map(f16::from_f32).collect()),
            DType::Bf16 => Buffer::Bf16(values.into_iter().map(bf16::from_f32).collect()),
        };
        Self { name, buffer, shape, strides }
    }

    pub fn view(&self) -> TensorView<'_> {
        TensorView::strided(self.name, self.buffer.elements(), self.shape, self.strides)
            .expect("inside the buffer")
    }
}

/// q, k and v of a case.
pub struct Inputs {
    pub q: Strided,
    pub k: Strided,
    pub v: Strided,
}

impl Inputs {
    pub fn new(data: &Data, dtype: DType, layout: Layout, gaps: Gaps) -> Self {
        let (q, kv) = (data.case.q_shape(), data.case.kv_shape());
        let tensor = |name, x: &[f32], shape| Strided::new(name, x, shape, dtype, layout, gaps);
        Self { q: tensor("q", &data.q, q), k: tensor("k", &data.k, kv), v: tensor("v", &data.v, kv) }
    }

    pub fn problem(&self) -> vc_attention::Problem<'_> {
        vc_attention::Problem::new(self.q.view(), self.k.view(), self.v.view())
    }
}

/// Contiguous inputs of a case.
pub fn plain(case: Case, seed: u64, dtype: DType) -> Inputs {
    Inputs::new(&case.outliers(seed), dtype, Layout::Bhsd, Gaps::None)
}

/// A file of the bundled real inputs: below `VCA_DATA`, beside the program, or in the source tree.
pub fn real(name: &str) -> InputFile {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("data")));
    let folders = std::env::var_os("VCA_DATA").map(PathBuf::from).into_iter().chain(beside);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let tried: Vec<PathBuf> = folders.chain([source]).map(|folder| folder.join(name)).collect();
    let path = tried.iter().find(|path| path.is_file());
    let path =
        path.unwrap_or_else(|| panic!("no input {name}: set VCA_DATA to the folder `data`; tried {tried:?}"));
    InputFile::open(path).expect("a bundled input is sound")
}
