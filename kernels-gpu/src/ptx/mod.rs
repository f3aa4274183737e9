//! Thin wrappers over the PTX that Rust has no intrinsic for, one file a family.
//!
//! Every wrapper is one instruction (or one idiom of a few) behind a Rust signature. Pure values
//! ([`SharedAddr`], [`wgmma::Descriptor`]) exist everywhere; instructions exist where they have a body.
//! Section numbers are of the PTX ISA, version 8.8.

pub mod bulk_copy;
pub mod convert;
pub mod f16x2;
pub mod mbarrier;
pub mod memory;
pub mod shuffle;
pub mod special;
pub mod wgmma;

pub mod collective;
pub mod extrema;
pub mod mma;
pub mod quotient;
pub mod shared;
pub mod stream;

/// An address in the `.shared` window of the running block.
///
/// A Rust reference to shared memory would be a generic pointer, and every access through it a generic one;
/// a 32-bit window address keeps accesses `ld.shared`/`st.shared` and is what descriptors and barriers take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct SharedAddr(pub u32);

impl SharedAddr {
    /// The address `bytes` further on.
    #[inline(always)]
    pub const fn add(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}
