//! Results into a safetensors file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Error as IoError, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use super::header;
use crate::error::{Error, Result};
use crate::tensor::{Buffer, Layout, Tensor};

/// A tensor to be written, borrowed.
#[derive(Clone, Debug)]
pub struct Output<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl<'a> Output<'a> {
    /// A tensor in its own type and memory order, as rank 4 or, without the batch axis, as rank 3 (see
    /// [`InputFile::rank`](super::InputFile::rank)).
    ///
    /// # Errors
    /// [`Error::Option`] when the rank is neither, or 3 and the batch is not 1.
    pub fn tensor(name: &'a str, tensor: &'a Tensor, rank: usize) -> Result<Self> {
        let [b, h, n, d] = tensor.shape();
        let shape = match tensor.layout() {
            Layout::Bhsd => [b, h, n, d],
            Layout::Bshd => [b, n, h, d],
        };
        let (dtype, bytes) = match tensor.buffer() {
            Buffer::F32(x) => (Dtype::F32, bytemuck::cast_slice(x)),
            Buffer::F16(x) => (Dtype::F16, bytemuck::cast_slice(x)),
            Buffer::Bf16(x) => (Dtype::BF16, bytemuck::cast_slice(x)),
        };
        Ok(Self { name, dtype, shape: without_batch(&shape, rank)?, bytes })
    }

    /// Log-sum-exp values, row-major [batch, heads, tokens], as rank 3 or, for a `rank` of 3 of the tensors
    /// beside it, [heads, tokens].
    ///
    /// # Errors
    /// [`Error::Tensor`] when the number of values is not the product of the shape, [`Error::Option`] as for
    /// [`Output::tensor`].
    pub fn lse(name: &'a str, values: &'a [f32], shape: [usize; 3], rank: usize) -> Result<Self> {
        if shape.iter().try_fold(1usize, |n, &x| n.checked_mul(x)) != Some(values.len()) {
            return Err(Error::Tensor {
                tensor: "lse",
                expected: format!("values for shape {shape:?}"),
                given: format!("{} values", values.len()),
            });
        }
        Ok(Self {
            name,
            dtype: Dtype::F32,
            shape: without_batch(&shape, rank)?,
            bytes: bytemuck::cast_slice(values),
        })
    }
}

fn without_batch(shape: &[usize], rank: usize) -> Result<Vec<usize>> {
    match rank {
        4 => Ok(shape.to_vec()),
        3 if shape[0] == 1 => Ok(shape[1..].to_vec()),
        _ => Err(Error::Option {
            option: "rank",
            expected: "4, or 3 for a batch of 1".into(),
            given: format!("{rank} for a batch of {}", shape[0]),
        }),
    }
}

/// Writes tensors and metadata into a new file, or over an old one.
///
/// Other programs see the old file or the whole new one: it is written beside its place and then renamed (what
/// is no regular file, such as `/dev/stdout`, is written directly). The same tensors and metadata give the same
/// bytes.
///
/// # Errors
/// [`Error::Io`] when the file cannot be written, [`Error::File`] when two tensors have the same name or one the
/// name that the format keeps for metadata.
pub fn write(
    path: impl AsRef<Path>,
    tensors: &[Output<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let path = path.as_ref();
    let fail = |reason: String| Err(Error::File { path: path.into(), reason });
    let io = |source| Error::Io { path: path.into(), source };

    // Wider elements first, so that all of them are aligned; the header's length is a multiple of 8.
    let mut tensors: Vec<&Output<'_>> = tensors.iter().collect();
    tensors.sort_by_key(|tensor| (std::cmp::Reverse(tensor.dtype.bitsize()), tensor.name));
    let mut entries = serde_json::Map::new();
    let mut at = 0;
    for tensor in &tensors {
        let end = at + tensor.bytes.len();
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (at, end) };
        let info = serde_json::to_value(info).map_err(|error| io(error.into()))?;
        if tensor.name == header::METADATA || entries.insert(tensor.name.into(), info).is_some() {
            return fail(format!("tensor `{}`: expected another name, given one that is taken", tensor.name));
        }
        at = end;
    }
    if !metadata.is_empty() {
        let metadata = metadata.iter().map(|(key, text)| (key.clone(), text.clone().into())).collect();
        entries.insert(header::METADATA.into(), serde_json::Value::Object(metadata));
    }
    let mut json = serde_json::to_vec(&entries).map_err(|error| io(error.into()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() > header::MAX_BYTES {
        return fail(format!("header: expected at most {} bytes, given {}", header::MAX_BYTES, json.len()));
    }

    replace(path, |file| {
        file.write_all(&(json.len() as u64).to_le_bytes())?;
        file.write_all(&json)?;
        tensors.iter().try_for_each(|tensor| file.write_all(tensor.bytes))
    })
    .map_err(io)
}

/// Runs `fill` on a new file and puts it in the place of `path`.
fn replace(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), IoError>,
) -> Result<(), IoError> {
    let finish = |file: File| {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        fill(&mut file)?;
        file.flush()
    };
    let target = match fs::metadata(path) {
        Ok(old) if old.is_dir() => return Err(ErrorKind::IsADirectory.into()),
        // A device or a pipe is written to; renaming over it would remove it.
        Ok(old) if !old.is_file() => return finish(File::options().write(true).open(path)?),
        Ok(_) => fs::canonicalize(path)?, // a link stays, and what it points to is replaced
        Err(_) => path.to_path_buf(),
    };
    let scratch = scratch(&target);
    let file = File::create_new(&scratch)?;
    let done = finish(file).and_then(|()| fs::rename(&scratch, &target));
    if done.is_err() {
        let _ = fs::remove_file(&scratch); // the first error is the one to report
    }
    done
}

/// A name beside `path` that no other write of this machine uses.
fn scratch(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".vca-{}-{count}.tmp", process::id()))
}
