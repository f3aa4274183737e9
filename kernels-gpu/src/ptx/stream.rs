//! Accesses to global memory for data that a kernel touches once (PTX ISA 9.7.9.9 and 9.7.9.12).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    /// `ld.global.nc.L1::no_allocate.v4.b32`: the data shall not push others out of L1.
    ///
    /// # Safety
    /// 16 readable bytes of global memory at a multiple of 16 that nobody writes while the kernel runs.
    #[inline(always)]
    pub unsafe fn load_v4(from: *const u8) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("ld.global.nc.L1::no_allocate.v4.b32 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) from,
                options(readonly, nostack))
        }
        [a, b, c, d]
    }

    /// `st.global.v2.b32`.
    ///
    /// # Safety
    /// 8 writable bytes of global memory at a multiple of 8.
    #[inline(always)]
    pub unsafe fn store_v2(to: *mut u8, v: [u32; 2]) {
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!("st.global.v2.b32 [{}], {{{}, {}}};", in(reg64) to, in(reg32) v[0], in(reg32) v[1], options(nostack))
        }
    }
}
