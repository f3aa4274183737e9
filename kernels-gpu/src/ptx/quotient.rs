//! One step from an estimate of a quotient towards it (PTX ISA 9.7.3.6 `fma`, 9.7.3.10 `neg`).

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    /// `q + (x - q d) r`, both steps fused, for an estimate `q` of `x / d` and `r` of `1 / d`.
    ///
    /// As `q - (q d - x) r`, which keeps the sign of a zero. In one block, because the assembler folds a `neg`
    /// into the operand of an `fma`, but not the flip of a sign bit that LLVM makes of it.
    #[inline(always)]
    pub fn correct_quotient(q: f32, x: f32, d: f32, r: f32) -> f32 {
        let corrected: f32;
        // SAFETY: registers in, register out.
        unsafe {
            asm!(
                "{{",
                ".reg .f32 minus, excess;",
                "neg.f32 minus, {x};",
                "fma.rn.f32 excess, {q}, {d}, minus;",
                "neg.f32 excess, excess;",
                "fma.rn.f32 {corrected}, excess, {r}, {q};",
                "}}",
                q = in(reg32) q, x = in(reg32) x, d = in(reg32) d, r = in(reg32) r,
                corrected = out(reg32) corrected, options(pure, nomem, nostack)
            )
        }
        corrected
    }
}
