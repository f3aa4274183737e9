//! Global memory: the buffers of a launch, each between red zones.
//!
//! The wrappers' own accesses are checked against the buffers. A plain Rust access through a pointer cannot be
//! seen, so what surrounds a buffer is filled with ones, as an output is before its first write: read, they are NaN in
//! every format and enormous as a length; written, they show after the launch. Inputs are compared after it.

use std::borrow::ToOwned;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

use bytemuck::Pod;

use super::fault::Violation;

/// Bytes in front of and behind a buffer; buffers start at a multiple of 16 and of nothing more.
const RED_ZONE: usize = 4096 + 16;
/// What fills red zones and outputs.
const FILL: u8 = 0xff;

/// 64 bytes at a multiple of 64.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

struct Buffer {
    name: String,
    lines: Vec<Line>,
    bytes: usize,
    /// What it held, if it may not be written.
    original: Option<Vec<u8>>,
}

impl Buffer {
    fn start(&self) -> usize {
        self.lines.as_ptr() as usize + RED_ZONE
    }

    fn all(&self) -> &[u8] {
        // SAFETY: lines are plain bytes without padding.
        unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 64) }
    }

    fn contents(&self) -> &[u8] {
        &self.all()[RED_ZONE..][..self.bytes]
    }
}

/// The buffers that a kernel may touch.
#[derive(Default)]
pub struct Memory {
    buffers: Vec<Buffer>,
}

impl Memory {
    /// No buffers.
    pub fn new() -> Self {
        Self::default()
    }

    fn add(&mut self, name: &str, contents: &[u8], writable: bool) -> usize {
        let lines = vec![Line([FILL; 64]); (2 * RED_ZONE + contents.len()).div_ceil(64)];
        let original = (!writable).then(|| contents.to_owned());
        let mut buffer = Buffer { name: name.into(), lines, bytes: contents.len(), original };
        // SAFETY: lines are plain bytes, borrowed mutably here.
        let all = unsafe {
            core::slice::from_raw_parts_mut(buffer.lines.as_mut_ptr().cast::<u8>(), buffer.lines.len() * 64)
        };
        all[RED_ZONE..][..contents.len()].copy_from_slice(contents);
        let start = buffer.lines.as_mut_ptr() as usize + RED_ZONE;
        self.buffers.push(buffer);
        start
    }

    /// A buffer that the kernel only reads.
    pub fn input<T: Pod>(&mut self, name: &str, contents: &[T]) -> *const T {
        self.add(name, bytemuck::cast_slice(contents), false) as *const T
    }

    /// A buffer of `len` elements for the kernel to write, full of ones before (NaN as any float).
    pub fn output<T: Pod>(&mut self, name: &str, len: usize) -> *mut T {
        self.add(name, &vec![FILL; len * size_of::<T>()], true) as *mut T
    }

    /// A buffer that the kernel reads and writes.
    pub fn in_out<T: Pod>(&mut self, name: &str, contents: &[T]) -> *mut T {
        self.add(name, bytemuck::cast_slice(contents), true) as *mut T
    }

    /// What the buffer that starts at `at` holds.
    ///
    /// # Panics
    /// If no buffer starts there.
    pub fn read<T: Pod>(&self, at: *const T) -> Vec<T> {
        let buffer = self.buffers.iter().find(|b| b.start() == at as usize);
        let contents = buffer.expect("a pointer that this memory gave").contents();
        contents.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// Checks an access of a wrapper.
    pub(super) fn check(
        &self,
        address: usize,
        bytes: usize,
        alignment: u32,
        write: bool,
    ) -> Result<(), Violation> {
        if !address.is_multiple_of(alignment as usize) {
            return Err(Violation::Misaligned { address: address as u64, alignment });
        }
        let inside = |b: &&Buffer| address >= b.start() && address + bytes <= b.start() + b.bytes;
        match self.buffers.iter().find(inside) {
            Some(b) if write && b.original.is_some() => Err(Violation::ReadOnly(b.name.clone())),
            Some(_) => Ok(()),
            None => {
                const FAR: u64 = 1 << 20;
                let offset = |b: &Buffer| address as i64 - b.start() as i64;
                let next = self.buffers.iter().min_by_key(|b| offset(b).unsigned_abs());
                let near = match next.filter(|b| offset(b).unsigned_abs() < FAR) {
                    Some(b) => format!("at byte {} of `{}`, which has {}", offset(b), b.name, b.bytes),
                    None => "far from every buffer".into(),
                };
                Err(Violation::GlobalBounds { address: address as u64, bytes: bytes as u64, near })
            }
        }
    }

    /// What a launch must leave as it was.
    pub(super) fn check_after(&self) -> Result<(), Violation> {
        for buffer in &self.buffers {
            let outside = |i: &usize| !(RED_ZONE..RED_ZONE + buffer.bytes).contains(i);
            let changed = |i: &usize| buffer.all()[*i] != FILL;
            if let Some(at) = (0..buffer.all().len()).filter(outside).find(changed) {
                let offset = at as i64 - RED_ZONE as i64;
                return Err(Violation::RedZone { name: buffer.name.clone(), offset });
            }
            if let Some(original) = &buffer.original
                && let Some(offset) = buffer.contents().iter().zip(original).position(|(a, b)| a != b)
            {
                return Err(Violation::InputChanged { name: buffer.name.clone(), offset });
            }
        }
        Ok(())
    }
}
