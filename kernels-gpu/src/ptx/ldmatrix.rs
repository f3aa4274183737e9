//! Operand fragments out of shared memory (PTX ISA 9.7.14.5.15, `ldmatrix`), on every GPU from sm_75.
//!
//! A matrix is 8 rows of 16 bytes. Lane t gets bytes 4q..4q + 4 of row g of each, g = t / 4 and q = t % 4: of a tile whose
//! rows run along k, what one register of a B fragment of [`mma`](super::mma) holds, in 16-bit and 8-bit types alike.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use crate::ptx::SharedAddr;

    /// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: four matrices; lane 8m + r says where row r of matrix m lies.
    ///
    /// # Safety
    /// All 32 lanes execute it together, each with 16 readable bytes at a multiple of 16.
    #[inline(always)]
    pub unsafe fn load_x4(row: SharedAddr) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the whole warp takes part; the rows are the caller's contract.
        unsafe {
            asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{}, {}, {}, {}}}, [{}];",
                out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) row.0, options(nostack))
        }
        [a, b, c, d]
    }
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use crate::emulation::instructions::{load_shared, thread_index, warp_wide};
    use crate::ptx::SharedAddr;

    /// `ldmatrix.sync.aligned.m8n8.x4.shared.b16`: four matrices; lane 8m + r says where row r of matrix m lies.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn load_x4(row: SharedAddr) -> [u32; 4] {
        let own = u128::from_le_bytes(load_shared(row.0));
        let all = warp_wide("ldmatrix.x4", 0, [own as u64, (own >> 64) as u64, 0], false);
        let (g, q) = (thread_index() as usize % 32 / 4, thread_index() as usize % 4);
        core::array::from_fn(|m| (all[8 * m + g][q / 2] >> (q % 2 * 32)) as u32)
    }
}
