//! Tensors in and out of safetensors files.
//!
//! An input holds `q`, `k` and `v`, of rank 3 ([heads, tokens, dim], or [tokens, heads, dim] under
//! [`Layout::Bshd`]; batch 1) or rank 4 ([batch, heads, tokens, dim] or [batch, tokens, heads, dim]), each F32, F16
//! or BF16; it may hold `kv_lens`, the valid keys of every batch, and the metadata `grid`, `"[t, h, w]"`.
//!
//! The format: eight bytes of header length, a JSON header of that length, the data. The header is read here
//! rather than with the `safetensors` crate's own reader, whose errors name neither the tensor nor what was
//! expected and which adds sizes from the file without a check (docs/fuzzing.md); names, types and limits are the
//! crate's.

mod header;
mod write;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bytemuck::Pod;
use memmap2::Mmap;
use safetensors::Dtype;

use crate::error::{Error, Result};
use crate::tensor::{Buffer, Elements, Layout, TensorView};
use header::{Header, short};
pub use write::{Output, write};

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and tensors are read in place");

/// Names of the tensors of an attention call.
const NAMES: [&str; 3] = ["q", "k", "v"];

/// An open safetensors file, its header checked.
///
/// The tensors are read where they lie in the memory-mapped file; only those that are not aligned for their
/// element type are copied. The file must not change while it is open: the system then ends the program when a
/// byte that is gone is touched.
///
/// ```no_run
/// # fn main() -> vc_attention::Result<()> {
/// use vc_attention::{Layout, Problem, io::InputFile};
///
/// let file = InputFile::open("layer07.safetensors")?;
/// let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
/// let kv_lens = file.kv_lens()?;
/// let problem = Problem { grid: file.grid()?, kv_lens: kv_lens.as_deref(), ..Problem::new(q, k, v) };
/// let shape = problem.validate()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct InputFile {
    path: PathBuf,
    bytes: Bytes,
    header: Header,
    /// `q`, `k`, `v` where they had to be copied.
    copies: [OnceLock<Buffer>; 3],
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    InMemory(Cow<'static, [u8]>),
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::InMemory(bytes) => bytes,
        }
    }
}

impl InputFile {
    /// Opens a file and checks its header; reads no tensor yet.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or is no regular file, [`Error::File`] when it is not a
    /// well-formed safetensors file: too short, truncated, a header that lies about lengths, offsets, shapes or
    /// types.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |source| Error::Io { path: path.into(), source };
        // Asked before opening, which would wait for ever on a pipe that nobody writes to.
        let kind = fs::metadata(path).map_err(io)?;
        if kind.is_dir() {
            return Err(io(ErrorKind::IsADirectory.into()));
        }
        if !kind.is_file() {
            return Err(io(IoError::new(ErrorKind::InvalidInput, "not a regular file")));
        }
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Self::from_bytes(path, &[][..]); // an empty file cannot be mapped everywhere
        }
        // SAFETY: the map is only read. That nobody else changes the file meanwhile cannot be known; the type's
        // documentation asks for it, as every program that maps its input does.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Self::read(path, Bytes::Mapped(map))
    }

    /// The same for a file that is in memory already (embedded in the program, received from elsewhere); `path`
    /// stands for it in messages.
    ///
    /// # Errors
    /// [`Error::File`] as for [`InputFile::open`].
    pub fn from_bytes(path: impl Into<PathBuf>, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self> {
        Self::read(&path.into(), Bytes::InMemory(bytes.into()))
    }

    fn read(path: &Path, bytes: Bytes) -> Result<Self> {
        match Header::read(bytes.as_slice()) {
            Ok(header) => Ok(Self { path: path.into(), bytes, header, copies: Default::default() }),
            Err(reason) => Err(Error::File { path: path.into(), reason }),
        }
    }

    /// The file's name, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's metadata, all of it text.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Names, types as the file spells them, and shapes in the file of all tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.header
            .tensors
            .iter()
            .map(|(name, info)| (name.as_str(), info.dtype.to_string(), &info.shape[..]))
    }

    /// Rank of the file's `q`: 3 or 4; results are written with the same.
    ///
    /// # Errors
    /// [`Error::File`] when there is no `q` or its rank is another.
    pub fn rank(&self) -> Result<usize> {
        let rank = self.info("q")?.shape.len();
        self.logical_shape("q", Layout::Bhsd).map(|_| rank)
    }

    /// The latent grid [t, h, w] of the tokens, from the metadata `grid`; `None` without one.
    ///
    /// # Errors
    /// [`Error::File`] when it is not three whole numbers in brackets.
    pub fn grid(&self) -> Result<Option<[usize; 3]>> {
        let Some(text) = self.header.metadata.get("grid") else { return Ok(None) };
        match serde_json::from_str(text) {
            Ok(grid) => Ok(Some(grid)),
            Err(_) => self.fail(format!("metadata `grid`: expected `[t, h, w]`, given `{}`", short(text))),
        }
    }

    /// Valid keys of every batch, from the tensor `kv_lens` (I32, I64, U32 or U64, rank 1); `None` without one.
    ///
    /// # Errors
    /// [`Error::File`] when it has another type or rank or holds a negative number.
    pub fn kv_lens(&self) -> Result<Option<Vec<usize>>> {
        let Some(info) = self.header.tensors.get("kv_lens") else { return Ok(None) };
        if info.shape.len() != 1 {
            let given = header::shape(&info.shape);
            return self.fail(format!("tensor `kv_lens`: expected rank 1, given shape {given}"));
        }
        let data = self.data("kv_lens")?;
        fn lengths<const N: usize>(data: &[u8], read: fn([u8; N]) -> i128) -> Vec<i128> {
            data.as_chunks().0.iter().map(|&bytes| read(bytes)).collect()
        }
        let lengths = match info.dtype {
            Dtype::I32 => lengths(data, |x| i32::from_le_bytes(x).into()),
            Dtype::I64 => lengths(data, |x| i64::from_le_bytes(x).into()),
            Dtype::U32 => lengths(data, |x| u32::from_le_bytes(x).into()),
            Dtype::U64 => lengths(data, |x| u64::from_le_bytes(x).into()),
            other => {
                return self.fail(format!("tensor `kv_lens`: expected I32, I64, U32 or U64, given {other}"));
            }
        };
        let valid = |&length: &i128| {
            usize::try_from(length).or_else(|_| {
                self.fail(format!("tensor `kv_lens`: expected lengths of at least 0, given {length}"))
            })
        };
        lengths.iter().map(valid).collect::<Result<_>>().map(Some)
    }

    /// The tensors `q`, `k` and `v`, the axes of each in the file as `layout` says.
    ///
    /// # Errors
    /// [`Error::File`] when one is missing, has a type other than F32, F16 and BF16 or a rank other than 3 and 4,
    /// or `k` or `v` a rank other than `q`'s.
    pub fn problem_tensors(
        &self,
        layout: Layout,
    ) -> Result<(TensorView<'_>, TensorView<'_>, TensorView<'_>)> {
        let rank = self.rank()?;
        for name in NAMES {
            let shape = &self.info(name)?.shape;
            if shape.len() != rank {
                let given = header::shape(shape);
                return self
                    .fail(format!("tensor `{name}`: expected rank {rank} as in `q`, given shape {given}"));
            }
        }
        let view = |index: usize| {
            let name = NAMES[index];
            TensorView::new(name, self.elements(index)?, self.logical_shape(name, layout)?, layout)
        };
        Ok((view(0)?, view(1)?, view(2)?))
    }

    fn fail<T>(&self, reason: String) -> Result<T> {
        Err(Error::File { path: self.path.clone(), reason })
    }

    fn info(&self, name: &str) -> Result<&safetensors::tensor::TensorInfo> {
        self.header.tensors.get(name).map_or_else(
            || {
                let names: Vec<_> = self.header.tensors.keys().take(8).map(|name| short(name)).collect();
                let more = if self.header.tensors.len() > names.len() { ", ..." } else { "" };
                let given = if names.is_empty() { "no tensor".into() } else { names.join(", ") + more };
                self.fail(format!("tensor `{name}`: expected in the file, given {given}"))
            },
            Ok,
        )
    }

    /// Shape in the order (batch, heads, tokens, dim).
    fn logical_shape(&self, name: &str, layout: Layout) -> Result<[usize; 4]> {
        let shape = &self.info(name)?.shape;
        let (b, x, y, d) = match shape[..] {
            [x, y, d] => (1, x, y, d),
            [b, x, y, d] => (b, x, y, d),
            _ => {
                let given = header::shape(shape);
                return self.fail(format!("tensor `{name}`: expected rank 3 or 4, given shape {given}"));
            }
        };
        Ok(match layout {
            Layout::Bhsd => [b, x, y, d],
            Layout::Bshd => [b, y, x, d],
        })
    }

    fn data(&self, name: &str) -> Result<&[u8]> {
        let (start, end) = self.info(name)?.data_offsets;
        Ok(&self.bytes.as_slice()[self.header.data_start..][start..end])
    }

    fn elements(&self, index: usize) -> Result<Elements<'_>> {
        let name = NAMES[index];
        let data = self.data(name)?;
        match self.info(name)?.dtype {
            Dtype::F32 => self.typed(index, data, Buffer::F32),
            Dtype::F16 => self.typed(index, data, Buffer::F16),
            Dtype::BF16 => self.typed(index, data, Buffer::Bf16),
            other => self.fail(format!("tensor `{name}`: expected F32, F16 or BF16, given {other}")),
        }
    }

    /// The elements in place, or in a copy when the file does not align them.
    fn typed<'a, T: Pod>(
        &'a self,
        index: usize,
        data: &'a [u8],
        buffer: impl FnOnce(Vec<T>) -> Buffer,
    ) -> Result<Elements<'a>>
    where
        Elements<'a>: From<&'a [T]>,
    {
        if let Ok(elements) = bytemuck::try_cast_slice::<u8, T>(data) {
            return Ok(elements.into());
        }
        if let Some(copy) = self.copies[index].get() {
            return Ok(copy.elements());
        }
        let mut copy = Vec::new();
        if copy.try_reserve_exact(data.len() / size_of::<T>()).is_err() {
            let (name, size) = (NAMES[index], data.len());
            return self.fail(format!(
                "tensor `{name}`: expected memory for an aligned copy of its {size} bytes, given less"
            ));
        }
        copy.extend(data.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>));
        Ok(self.copies[index].get_or_init(|| buffer(copy)).elements())
    }
}
