//! The device memory of a plan: one allocation, cut into named sections.

use std::sync::Arc;

use super::driver::{Buffer, Device, DevicePtr, Stream, copy_on_device};
use crate::error::Result;

/// Sections start at multiples of this, which serves every access width and the bulk copies.
const ALIGN: usize = 256;

/// Where a section lies, until the memory is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Section {
    offset: usize,
    bytes: usize,
}

impl Section {
    /// Its size.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// Adds up sections.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    bytes: usize,
}

impl Layout {
    /// A section of `count` elements of `T`.
    pub fn section<T>(&mut self, count: usize) -> Section {
        let section = Section { offset: self.bytes, bytes: count * size_of::<T>() };
        self.bytes = (self.bytes + section.bytes).next_multiple_of(ALIGN);
        section
    }

    /// Allocates.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn allocate(self, device: &Arc<Device>) -> Result<Workspace> {
        Ok(Workspace { buffer: Buffer::new(device, self.bytes)? })
    }
}

/// The memory behind a [`Layout`].
#[derive(Debug)]
pub struct Workspace {
    buffer: Buffer,
}

impl Workspace {
    /// Start of a section.
    pub fn ptr(&self, section: Section) -> DevicePtr {
        self.buffer.ptr() + section.offset as u64
    }

    /// Size of all sections in bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Sets all bytes of a section, on a stream.
    ///
    /// # Errors
    /// Of the driver.
    pub fn fill(&self, section: Section, byte: u8, stream: Stream) -> Result<()> {
        self.buffer.fill_range(section.offset, section.bytes, byte, stream)
    }

    /// Copies a section to device memory, on a stream.
    ///
    /// # Safety
    /// As many bytes at `to` may be written until the stream is through.
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn copy_out(&self, section: Section, to: DevicePtr, stream: Stream) -> Result<()> {
        // SAFETY: by the caller; the section lies inside the buffer.
        unsafe { copy_on_device(to, self.ptr(section), section.bytes, stream) }
    }

    /// Fills a section from device memory, on a stream.
    ///
    /// # Safety
    /// As many bytes at `from` stay valid until the stream is through.
    ///
    /// # Errors
    /// Of the driver.
    pub unsafe fn copy_in(&self, section: Section, from: DevicePtr, stream: Stream) -> Result<()> {
        // SAFETY: by the caller; the section lies inside the buffer.
        unsafe { copy_on_device(self.ptr(section), from, section.bytes, stream) }
    }

    /// Copies a section out.
    ///
    /// # Errors
    /// Of the driver.
    pub fn read<T: bytemuck::Pod>(&self, section: Section) -> Result<Vec<T>> {
        self.buffer.read_range(section.offset, section.bytes / size_of::<T>())
    }
}
