//! Barriers in shared memory that also count the bytes of asynchronous copies (PTX ISA 9.7.13.15).

use super::SharedAddr;

/// The address of an initialized 8-byte barrier in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barrier(SharedAddr);

impl Barrier {
    /// Bytes that a barrier takes in shared memory.
    pub const BYTES: u32 = 8;

    /// The barrier at `addr`, which must be a multiple of 8.
    #[inline(always)]
    pub const fn at(addr: SharedAddr) -> Self {
        Self(addr)
    }

    /// Where it lies.
    #[inline(always)]
    pub const fn addr(self) -> SharedAddr {
        self.0
    }
}

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use super::Barrier;

    impl Barrier {
        /// `mbarrier.init` for phases of `arrivals` arrivals.
        ///
        /// # Safety
        /// The 8 bytes are this block's and nobody uses them before [`fence_init`] and a block barrier.
        #[inline(always)]
        pub unsafe fn init(self, arrivals: u32) {
            // SAFETY: the bytes are the caller's.
            unsafe {
                asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) self.0.0, in(reg32) arrivals, options(nostack))
            }
        }

        /// `mbarrier.arrive`: one arrival, with release semantics at block scope.
        ///
        /// # Safety
        /// The barrier is initialized.
        #[inline(always)]
        pub unsafe fn arrive(self) {
            // SAFETY: initialized by contract.
            unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) self.0.0, options(nostack)) }
        }

        /// `mbarrier.arrive.expect_tx`: one arrival that makes the phase wait for `bytes` copied bytes too.
        ///
        /// # Safety
        /// The barrier is initialized; the bytes are copied by [`bulk_copy`](crate::ptx::bulk_copy).
        #[inline(always)]
        pub unsafe fn arrive_expect(self, bytes: u32) {
            // SAFETY: initialized by contract.
            unsafe {
                asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(reg32) self.0.0, in(reg32) bytes, options(nostack))
            }
        }

        /// Waits for the phase of this parity (0 first, then 1, 0, ...) to complete, with acquire semantics.
        ///
        /// # Safety
        /// The barrier is initialized, and the phase before that one is complete.
        #[inline(always)]
        #[expect(named_asm_labels, reason = "PTX scopes a label to its braces, so copies do not collide")]
        pub unsafe fn wait(self, parity: u32) {
            // SAFETY: initialized by contract.
            unsafe {
                asm!(
                    "{{",
                    ".reg .pred done;",
                    "again:",
                    "mbarrier.try_wait.parity.shared::cta.b64 done, [{}], {};",
                    "@!done bra again;",
                    "}}",
                    in(reg32) self.0.0, in(reg32) parity, options(nostack)
                )
            }
        }
    }

    /// `fence.mbarrier_init`: initialized barriers become visible to asynchronous copies.
    ///
    /// # Safety
    /// None beyond running on the device.
    #[inline(always)]
    pub unsafe fn fence_init() {
        // SAFETY: a fence.
        unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
    }

    /// `fence.proxy.async`: this thread's ordinary writes to shared memory become visible to asynchronous
    /// readers (wgmma, bulk copies) that are ordered after it.
    ///
    /// # Safety
    /// None beyond running on the device.
    #[inline(always)]
    pub unsafe fn fence_proxy_async() {
        // SAFETY: a fence.
        unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
    }
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(feature = "emulation")]
mod host {
    use super::Barrier;
    use crate::emulation::instructions;

    impl Barrier {
        /// `mbarrier.init` for phases of `arrivals` arrivals.
        ///
        /// # Safety
        /// As on the device; what is broken of it is a fault.
        #[track_caller]
        pub unsafe fn init(self, arrivals: u32) {
            instructions::mbarrier_init(self.0.0, arrivals);
        }

        /// `mbarrier.arrive`.
        ///
        /// # Safety
        /// As on the device; what is broken of it is a fault.
        #[track_caller]
        pub unsafe fn arrive(self) {
            instructions::mbarrier_arrive(self.0.0, 0);
        }

        /// `mbarrier.arrive.expect_tx`.
        ///
        /// # Safety
        /// As on the device; what is broken of it is a fault.
        #[track_caller]
        pub unsafe fn arrive_expect(self, bytes: u32) {
            instructions::mbarrier_arrive(self.0.0, bytes);
        }

        /// Waits for the phase of this parity to complete.
        ///
        /// # Safety
        /// As on the device; what is broken of it is a fault.
        #[track_caller]
        pub unsafe fn wait(self, parity: u32) {
            instructions::mbarrier_wait(self.0.0, parity);
        }
    }

    /// `fence.mbarrier_init`.
    ///
    /// # Safety
    /// None beyond running in a launch.
    #[track_caller]
    pub unsafe fn fence_init() {
        instructions::fence_mbarrier_init();
    }

    /// `fence.proxy.async`.
    ///
    /// # Safety
    /// None beyond running in a launch.
    #[track_caller]
    pub unsafe fn fence_proxy_async() {
        instructions::fence_proxy_async();
    }
}

#[cfg(feature = "emulation")]
pub use host::*;
