//! The header of a safetensors file: what it says, checked against the file that it heads.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

/// The format's limit on the header, in bytes.
pub(super) const MAX_BYTES: usize = 100_000_000;

/// The key of the metadata among the tensors.
pub(super) const METADATA: &str = "__metadata__";

/// A checked header: every tensor lies inside the file and is as long as its shape and type say.
#[derive(Debug)]
pub(super) struct Header {
    pub tensors: BTreeMap<String, TensorInfo>,
    pub metadata: BTreeMap<String, String>,
    /// Where the data begins, to which the offsets are relative.
    pub data_start: usize,
}

impl Header {
    /// Reads the header of a whole file, or says what was expected and what was given.
    pub fn read(file: &[u8]) -> Result<Self, String> {
        let Some((length, rest)) = file.split_first_chunk() else {
            return Err(format!("expected a safetensors file, at least 8 bytes, given {} bytes", file.len()));
        };
        let length = u64::from_le_bytes(*length);
        let given = rest.len();
        let Some(header) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            return Err(format!(
                "header: expected {length} bytes, as the file's first 8 bytes say, given {given}: \
                 truncated or not a safetensors file"
            ));
        };
        if header.len() > MAX_BYTES {
            return Err(format!("header: expected at most {MAX_BYTES} bytes, given {length}"));
        }
        let Json { tensors, metadata } = serde_json::from_slice(header).map_err(|error| {
            format!("header: expected JSON of tensors, given {}", clip(&error.to_string(), 400))
        })?;
        let header = Self { tensors, metadata, data_start: 8 + header.len() };
        header.check(given - (header.data_start - 8))?;
        Ok(header)
    }

    /// Holds every tensor against the `data` bytes behind the header.
    fn check(&self, data: usize) -> Result<(), String> {
        let mut ordered = Vec::with_capacity(self.tensors.len());
        for (name, info) in &self.tensors {
            let name = short(name);
            let (start, end) = info.data_offsets;
            if start > end || end > data {
                return Err(format!(
                    "tensor `{name}`: expected data inside the {data} bytes after the header, given bytes \
                     {start}..{end}: truncated or a wrong header"
                ));
            }
            let (dtype, shape) = (info.dtype, shape(&info.shape));
            let bits = info.shape.iter().try_fold(dtype.bitsize(), |bits, &n| bits.checked_mul(n));
            let Some(bits) = bits.filter(|bits| bits % 8 == 0) else {
                return Err(format!(
                    "tensor `{name}`: expected a whole number of bytes below 2^61, given {dtype} of shape {shape}"
                ));
            };
            if end - start != bits / 8 {
                return Err(format!(
                    "tensor `{name}`: expected {} bytes for {dtype} of shape {shape}, given {}",
                    bits / 8,
                    end - start
                ));
            }
            ordered.push((start, end, name));
        }
        // The format allows neither overlaps nor holes.
        ordered.sort();
        let mut reached = 0;
        for (start, end, name) in ordered {
            if start != reached {
                return Err(format!(
                    "tensor `{name}`: expected data from byte {reached}, where the one before ends, given bytes \
                     {start}..{end}"
                ));
            }
            reached = end;
        }
        if reached != data {
            return Err(format!(
                "expected {reached} bytes after the header, which its tensors fill, given {data}"
            ));
        }
        Ok(())
    }
}

/// The JSON as it stands.
struct Json {
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            // By hand, for the name of the tensor in errors, and because a derived `flatten` would buffer a
            // hostile header at many times its size.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let (mut tensors, mut metadata) = (BTreeMap::new(), None);
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        let value: Option<BTreeMap<String, String>> =
                            map.next_value().map_err(|e| A::Error::custom(format!("metadata: {e}")))?;
                        if metadata.replace(value.unwrap_or_default()).is_some() {
                            return Err(A::Error::custom("metadata twice"));
                        }
                        continue;
                    }
                    match tensors.entry(name) {
                        Entry::Occupied(entry) => {
                            return Err(A::Error::custom(format!("tensor `{}` twice", short(entry.key()))));
                        }
                        Entry::Vacant(entry) => {
                            let info = map.next_value().map_err(|e| {
                                A::Error::custom(format!("tensor `{}`: {e}", short(entry.key())))
                            })?;
                            entry.insert(info);
                        }
                    }
                }
                Ok(Json { tensors, metadata: metadata.unwrap_or_default() })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A name from a file, fit for a message.
pub(super) fn short(name: &str) -> String {
    clip(name, 48)
}

/// Text from a file, fit for a message: not longer than `most`, and no control characters for the terminal.
fn clip(text: &str, most: usize) -> String {
    let mut chars = text.chars();
    let mut clipped = String::new();
    for c in chars.by_ref().take(most) {
        if c.is_control() { clipped.extend(c.escape_default()) } else { clipped.push(c) }
    }
    if chars.next().is_some() {
        clipped.push_str("...");
    }
    clipped
}

/// A shape from a file, fit for a message.
pub(super) fn shape(shape: &[usize]) -> String {
    match shape.get(..8) {
        Some(first) if shape.len() > 8 => format!("{first:?} and {} more axes", shape.len() - 8),
        _ => format!("{shape:?}"),
    }
}
