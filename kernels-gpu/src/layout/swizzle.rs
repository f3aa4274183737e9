//! The 128-byte swizzle of operand tiles in shared memory.
//!
//! Rows of 128 bytes, tiles based at multiples of 1024 bytes; within a row the 16-byte chunk `c` lies
//! at chunk `c ^ (row % 8)`, so that 8 rows of one column touch all banks (PTX ISA, "Shared memory
//! matrix layout", 128-byte swizzling). Tiles are stored swizzled in global memory too: a bulk copy
//! then moves them as they are.

/// Bytes in a row of a swizzled tile.
pub const ROW_BYTES: usize = 128;
/// Bytes in the chunk that the swizzle moves as a whole.
pub const CHUNK_BYTES: usize = 16;
/// Rows after which the pattern repeats.
pub const PERIOD_ROWS: usize = 8;

/// The offset of byte `column` (below 128) of row `row` from the base of its tile.
#[inline(always)]
pub const fn offset(row: usize, column: usize) -> usize {
    row * ROW_BYTES + (column ^ (row % PERIOD_ROWS * CHUNK_BYTES))
}
