//! Accesses to global memory for data that a kernel touches once (PTX ISA 9.7.9.9 and 9.7.9.12).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    /// `@wanted ld.global.nc.L1::no_allocate.v4.b32`, zeros where it is not wanted. The data shall not push others
    /// out of L1; a predicate in place of a branch lets loads follow each other.
    ///
    /// # Safety
    /// Where wanted: 16 readable bytes of global memory at a multiple of 16 that nobody writes while the kernel
    /// runs.
    #[inline(always)]
    pub unsafe fn load_v4_if(wanted: bool, from: *const u8) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the range is the caller's contract.
        unsafe {
            asm!(
                "{{",
                ".reg .pred wanted;",
                "setp.ne.b32 wanted, {5}, 0;",
                "mov.b32 {0}, 0;",
                "mov.b32 {1}, 0;",
                "mov.b32 {2}, 0;",
                "mov.b32 {3}, 0;",
                "@wanted ld.global.nc.L1::no_allocate.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
                "}}",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) from,
                in(reg32) wanted as u32, options(readonly, nostack)
            )
        }
        [a, b, c, d]
    }

    /// `@wanted ld.global.nc.b32`, 0 where it is not wanted.
    ///
    /// # Safety
    /// Where wanted: a readable word of global memory that nobody writes while the kernel runs.
    #[inline(always)]
    pub unsafe fn load_u32_if(wanted: bool, from: *const u32) -> u32 {
        let word: u32;
        // SAFETY: the word is the caller's contract.
        unsafe {
            asm!(
                "{{",
                ".reg .pred wanted;",
                "setp.ne.b32 wanted, {2}, 0;",
                "mov.b32 {0}, 0;",
                "@wanted ld.global.nc.b32 {0}, [{1}];",
                "}}",
                out(reg32) word, in(reg64) from, in(reg32) wanted as u32, options(readonly, nostack)
            )
        }
        word
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
