//! Thin wrappers over the PTX that Rust has no intrinsic for, one file a family.
//!
//! Every wrapper is one instruction (or one idiom of a few) behind a Rust signature. Pure values
//! ([`SharedAddr`], [`wgmma::Descriptor`]) exist everywhere; instructions exist where they have a body: inline PTX on
//! the device, and under the feature `emulation` one for the host that acts on the thread that
//! `emulation` runs.
//! Section numbers are of the PTX ISA, version 8.8.

pub mod bulk_copy;
pub mod convert;
pub mod f16x2;
pub mod mbarrier;
pub mod memory;
pub mod shuffle;
pub mod special;
pub mod wgmma;

pub mod async_copy;
pub mod collective;
pub mod extrema;
pub mod ldmatrix;
pub mod mma;
pub mod quotient;
pub mod shared;
pub mod stream;

pub mod tcgen05;

/// Declares a `.shared` symbol of a kernel, and the function that gives its address.
///
/// `fn name, "symbol", ALIGNMENT, BYTES`: literals, since they become PTX text. Without `BYTES` it is the dynamic shared
/// memory of the launch.
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
#[allow(unused_macros, reason = "the kernels of one architecture may have none")]
macro_rules! shared_symbol {
    ($(#[$doc:meta])* fn $name:ident, $symbol:literal, $alignment:literal) => {
        #[cfg(target_arch = "nvptx64")]
        core::arch::global_asm!(concat!(".extern .shared .align ", $alignment, " .b8 ", $symbol, "[];"));
        crate::ptx::shared_symbol!(@address $(#[$doc])* $name, $symbol,
            crate::emulation::instructions::dynamic_shared());
    };
    ($(#[$doc:meta])* fn $name:ident, $symbol:literal, $alignment:literal, $bytes:literal) => {
        #[cfg(target_arch = "nvptx64")]
        core::arch::global_asm!(concat!(".shared .align ", $alignment, " .b8 ", $symbol, "[", $bytes, "];"));
        crate::ptx::shared_symbol!(@address $(#[$doc])* $name, $symbol,
            crate::emulation::instructions::static_shared($symbol, $bytes, $alignment));
    };
    (@address $(#[$doc:meta])* $name:ident, $symbol:literal, $emulated:expr) => {
        $(#[$doc])*
        #[cfg(target_arch = "nvptx64")]
        #[inline(always)]
        fn $name() -> crate::ptx::SharedAddr {
            let at: u32;
            // SAFETY: reads the address of the symbol declared above.
            unsafe {
                core::arch::asm!(concat!("mov.u32 {}, ", $symbol, ";"), out(reg32) at, options(pure, nomem, nostack))
            }
            crate::ptx::SharedAddr(at)
        }

        $(#[$doc])*
        #[cfg(not(target_arch = "nvptx64"))]
        #[track_caller]
        fn $name() -> crate::ptx::SharedAddr {
            crate::ptx::SharedAddr($emulated)
        }
    };
}
#[cfg(any(target_arch = "nvptx64", feature = "emulation"))]
#[allow(unused_imports, reason = "as above")]
pub(crate) use shared_symbol;

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
