//! From the 64 bits of a matrix descriptor, of wgmma (PTX ISA 9.7.15.5.1.2) or tcgen05 (9.7.16.4.1), to the bytes of
//! an operand.

use super::fault::Violation;
use std::vec::Vec;

/// Bytes along K that one product takes, whatever the element.
pub(super) const STEP: u32 = 32;

/// Rows of a core matrix.
const GROUP: u32 = 8;

/// The addresses of the 16-byte chunks of a K-major operand of `rows` rows and [`STEP`] bytes: row by row.
pub(super) fn chunks(bits: u64, rows: u32) -> Result<Vec<u32>, Violation> {
    // Bits 14-15, 30-31, 46-48 and 52-61 are nobody's.
    const RESERVED: u64 = 0x3 << 14 | 0x3 << 30 | 0x7 << 46 | 0x3ff << 52;
    let width = match bits >> 62 {
        0 => 16,
        1 => 128,
        2 => 64,
        _ => 32,
    };
    if bits & RESERVED != 0 {
        return Err(Violation::Descriptor { bits, rule: "reserved bits are set" });
    }
    layout(bits, width, rows)
}

/// The same of a descriptor of tcgen05.
pub(super) fn tensor_chunks(bits: u64, rows: u32) -> Result<Vec<u32>, Violation> {
    let fail = |rule| Err(Violation::Descriptor { bits, rule });
    // Bits 14-15, 30-31 and 53-60 are nobody's.
    const RESERVED: u64 = 0x3 << 14 | 0x3 << 30 | 0xff << 53;
    if bits & RESERVED != 0 {
        return fail("reserved bits are set");
    }
    if bits >> 46 & 7 != 1 {
        return fail("bits 46-48 are not 0b001");
    }
    if bits >> 52 & 1 != 0 {
        return fail("an absolute leading dimension is not emulated");
    }
    let width = match bits >> 61 {
        0 => 16,
        2 => 128,
        4 => 64,
        6 => 32,
        1 => return fail("a swizzle of 32-byte atoms is not emulated"),
        _ => return fail("no such swizzle"),
    };
    layout(bits, width, rows)
}

/// What both kinds share: start, offsets and base offset, under a swizzle of `width` bytes a row.
fn layout(bits: u64, width: u32, rows: u32) -> Result<Vec<u32>, Violation> {
    let fail = |rule| Err(Violation::Descriptor { bits, rule });
    let field = |at: u32| (bits >> at & 0x3fff) as u32 * 16;
    let (start, leading, stride) = (field(0), field(16), field(32));
    if bits >> 49 & 7 != 0 {
        return fail("a base offset is set: tiles start at multiples of their swizzle's period");
    }
    if width > 16 && start % width + STEP > width {
        return fail("the k step leaves the row of the swizzle");
    }
    let address = |row: u32, half: u32| {
        let (group, row) = (row / GROUP * stride, row % GROUP * width);
        if width == 16 {
            return start + group + row + half * leading;
        }
        // The swizzle works on address bits: 16-byte chunk ^ row, as far as the width goes.
        let linear = start + group + row + half * 16;
        linear ^ (linear >> 3 & (width - 1) & 0x70)
    };
    Ok((0..rows).flat_map(|row| [address(row, 0), address(row, 1)]).collect())
}
