//! Loads and stores in a named state space (PTX ISA 9.7.9.8, 9.7.9.12) and reductions in global memory
//! (9.7.13.7), where Rust's own accesses would be generic or narrower.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use crate::ptx::SharedAddr;

    /// `ld.shared.v4.b32`.
    ///
    /// # Safety
    /// 16 readable bytes of shared memory at a multiple of 16.
    #[inline(always)]
    pub unsafe fn load_shared_v4(from: SharedAddr) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) from.0, options(nostack))
        }
        [a, b, c, d]
    }

    /// `st.shared.v4.b32`.
    ///
    /// # Safety
    /// 16 writable bytes of shared memory at a multiple of 16.
    #[inline(always)]
    pub unsafe fn store_shared_v4(to: SharedAddr, v: [u32; 4]) {
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("st.shared.v4.b32 [{}], {{{}, {}, {}, {}}};",
                in(reg32) to.0, in(reg32) v[0], in(reg32) v[1], in(reg32) v[2], in(reg32) v[3], options(nostack))
        }
    }

    /// `ld.global.nc.v4.b32`: through the read-only path.
    ///
    /// # Safety
    /// 16 readable bytes of global memory at a multiple of 16 that nobody writes while the kernel runs.
    #[inline(always)]
    pub unsafe fn load_global_v4(from: *const u8) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("ld.global.nc.v4.b32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) from, options(nostack))
        }
        [a, b, c, d]
    }

    /// `st.global.v4.b32`.
    ///
    /// # Safety
    /// 16 writable bytes of global memory at a multiple of 16.
    #[inline(always)]
    pub unsafe fn store_global_v4(to: *mut u8, v: [u32; 4]) {
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("st.global.v4.b32 [{}], {{{}, {}, {}, {}}};",
                in(reg64) to, in(reg32) v[0], in(reg32) v[1], in(reg32) v[2], in(reg32) v[3], options(nostack))
        }
    }

    /// `red.global.max.u32`: the order of the blocks does not change the result.
    ///
    /// # Safety
    /// A writable `u32` of global memory.
    #[inline(always)]
    pub unsafe fn max_global_u32(at: *mut u32, value: u32) {
        // SAFETY: the word is the caller's contract.
        unsafe {
            asm!("red.relaxed.gpu.global.max.u32 [{}], {};", in(reg64) at, in(reg32) value, options(nostack))
        }
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use core::sync::atomic::{AtomicU32, Ordering};

    use crate::emulation::instructions;
    use crate::ptx::SharedAddr;

    /// `ld.shared.v4.b32`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn load_shared_v4(from: SharedAddr) -> [u32; 4] {
        words(instructions::load_shared::<16>(from.0))
    }

    /// `st.shared.v4.b32`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn store_shared_v4(to: SharedAddr, v: [u32; 4]) {
        instructions::store_shared(to.0, bytes(v));
    }

    /// `ld.global.nc.v4.b32`.
    ///
    /// # Safety
    /// As on the device; an access outside the launch's buffers is a fault.
    #[track_caller]
    pub unsafe fn load_global_v4(from: *const u8) -> [u32; 4] {
        instructions::check_global(from as usize, 16, false);
        // SAFETY: inside a buffer and aligned, as just checked.
        unsafe { from.cast::<[u32; 4]>().read() }
    }

    /// `st.global.v4.b32`.
    ///
    /// # Safety
    /// As on the device; an access outside the launch's buffers is a fault.
    #[track_caller]
    pub unsafe fn store_global_v4(to: *mut u8, v: [u32; 4]) {
        instructions::check_global(to as usize, 16, true);
        // SAFETY: inside a buffer and aligned, as just checked.
        unsafe { to.cast::<[u32; 4]>().write(v) }
    }

    /// `red.global.max.u32`.
    ///
    /// # Safety
    /// As on the device; an access outside the launch's buffers is a fault.
    #[track_caller]
    pub unsafe fn max_global_u32(at: *mut u32, value: u32) {
        instructions::check_global(at as usize, 4, true);
        // SAFETY: inside a buffer and aligned, as just checked.
        unsafe { AtomicU32::from_ptr(at) }.fetch_max(value, Ordering::Relaxed);
    }

    fn words(bytes: [u8; 16]) -> [u32; 4] {
        core::array::from_fn(|i| u32::from_le_bytes(core::array::from_fn(|j| bytes[4 * i + j])))
    }

    fn bytes(words: [u32; 4]) -> [u8; 16] {
        core::array::from_fn(|i| words[i / 4].to_le_bytes()[i % 4])
    }
}
