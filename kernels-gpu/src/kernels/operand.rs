//! Tiles in shared memory as the B operand of warp-level products.

use super::tiles::{KEYS, swizzle_128};
use crate::ptx::SharedAddr;
use crate::ptx::ldmatrix::load_x4;
use crate::ptx::special::thread_idx_x;

/// A tile of swizzled rows of 128 bytes along k in shared memory, as a lane addresses it for `ldmatrix`.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    /// The lane's row of the first 8, in the first and in the second 64 bytes.
    halves: [SharedAddr; 2],
}

impl Operand {
    /// `tile` starts at a multiple of 1024 bytes.
    #[inline(always)]
    pub(super) fn new(tile: SharedAddr) -> Self {
        let lane = thread_idx_x() as usize % 32;
        let half = |half: usize| tile.add(swizzle_128(lane % 8, half * 64 + lane / 8 * 16) as u32);
        Self { halves: [half(0), half(1)] }
    }

    /// The B fragments of rows 8j on for two k steps of 32 bytes, the `pair`th of the row. From the third pair on they lie
    /// in the next [`KEYS`] rows: the other half of the channels of 16-bit keys.
    ///
    /// # Safety
    /// The whole warp executes it together; the tile has landed.
    #[inline(always)]
    pub(super) unsafe fn fragments(&self, j: usize, pair: usize) -> [[u32; 2]; 2] {
        let at = self.halves[pair % 2].add((pair / 2 * KEYS * 128 + j * 1024) as u32);
        // SAFETY: the whole warp is here; the tile has landed.
        let [a, b, c, d] = unsafe { load_x4(at) };
        [[a, b], [c, d]]
    }
}
