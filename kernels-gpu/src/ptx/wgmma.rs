//! Warpgroup matrix products (PTX ISA 9.7.15): D += A B on the Tensor Cores of Hopper, asynchronous.
//!
//! Four warps issue together. `D` is 64 rows by N columns, spread over 128 threads: warp w, lane t holds
//! rows 16w + t/4 and 8 below, columns 8j + 2(t%4) + {0, 1} (figure of 9.7.15.5.1.1). In f32 four registers
//! a j: two of the upper row, two of the lower; in f16 two registers a j, each a pair of columns.
//! `A` in registers, 4 of 32 bits: upper row and lower row of the first half of k, then of the second; of
//! each half, lane t holds the 4 bytes at 4(t%4).
//!
//! # Protocol
//! The registers of a product belong to the Tensor Core from its issue until `wait` returns, and rustc does
//! not know it. So values pass through `pin` around `fence` and `wait`: before the fence, every write to
//! a register that a product will use; after the wait, every read.

/// Where a B (or A) operand tile lies in shared memory (9.7.15.5.1.2, the matrix descriptor).
///
/// | bits | field |
/// |---|---|
/// | 0-13 | start address / 16 |
/// | 16-29 | leading dimension byte offset / 16 (no swizzle: between core matrices along K) |
/// | 32-45 | stride dimension byte offset / 16 (between groups of 8 rows) |
/// | 62-63 | 0 no swizzle, 1 128 bytes |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(pub u64);

impl Descriptor {
    /// K-major rows of 128 bytes with the 128-byte swizzle; groups of 8 rows lie 1024 bytes apart and the tile
    /// starts at a multiple of 1024.
    #[inline(always)]
    pub const fn swizzled(start: super::SharedAddr) -> Self {
        Self((start.0 >> 4) as u64 & 0x3fff | 1 << 16 | (1024 >> 4) << 32 | 1 << 62)
    }

    /// K-major core matrices of 8 rows x 16 bytes, each contiguous: `along_k` bytes to the next along K,
    /// `along_rows` bytes to the next 8 rows.
    #[inline(always)]
    pub const fn plain(start: super::SharedAddr, along_k: u32, along_rows: u32) -> Self {
        Self(
            (start.0 >> 4) as u64 & 0x3fff | ((along_k >> 4) as u64) << 16 | ((along_rows >> 4) as u64) << 32,
        )
    }

    /// The same tile `bytes` further on: the next k step of a swizzled tile is 32 bytes away.
    #[inline(always)]
    pub const fn add(self, bytes: u32) -> Self {
        Self(self.0 + (bytes >> 4) as u64)
    }
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    use super::Descriptor;

    /// A value of one 32-bit register.
    pub trait Register: Copy {
        #[doc(hidden)]
        fn pinned(self) -> Self;
    }

    macro_rules! register {
        ($type:ty) => {
            impl Register for $type {
                #[inline(always)]
                fn pinned(mut self) -> Self {
                    // SAFETY: an empty block that claims to change the register.
                    unsafe { asm!("/* {0} */", inout(reg32) self, options(nostack, preserves_flags)) }
                    self
                }
            }
        };
    }
    register!(u32);
    register!(i32);
    register!(f32);

    /// Holds values in place: what computes them stays in front of this line, what uses them behind it.
    #[inline(always)]
    pub fn pin<T: Register, const N: usize>(registers: &mut [T; N]) {
        for r in registers {
            *r = r.pinned();
        }
    }

    /// The value, of which the compiler no longer knows where it came from.
    #[inline(always)]
    pub fn pinned<T: Register>(value: T) -> T {
        value.pinned()
    }

    /// `wgmma.fence`: products issued after it see this warpgroup's earlier writes to registers.
    ///
    /// # Safety
    /// The warpgroup executes it together.
    #[inline(always)]
    pub unsafe fn fence() {
        // SAFETY: the warpgroup takes part.
        unsafe { asm!("wgmma.fence.sync.aligned;", options(nostack)) }
    }

    /// `wgmma.commit_group`: the products issued since the last one form a group.
    ///
    /// # Safety
    /// The warpgroup executes it together.
    #[inline(always)]
    pub unsafe fn commit() {
        // SAFETY: the warpgroup takes part.
        unsafe { asm!("wgmma.commit_group.sync.aligned;", options(nostack)) }
    }

    /// `wgmma.wait_group`: until at most the `PENDING` latest groups are in flight.
    ///
    /// # Safety
    /// The warpgroup executes it together.
    #[inline(always)]
    pub unsafe fn wait<const PENDING: u32>() {
        // SAFETY: the warpgroup takes part.
        unsafe { asm!("wgmma.wait_group.sync.aligned {};", const PENDING, options(nostack)) }
    }

    /// Both operands in shared memory.
    macro_rules! shared_shared {
        ($(#[$doc:meta])* $name:ident, $shape:literal, $tail:literal, $type:ty, $n:literal, [$first:literal $($i:literal)*]) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// The warpgroup executes it together, between [`fence`] and [`commit`]; the descriptors cover
            /// valid tiles; `d` is not touched before [`wait`].
            #[inline(always)]
            pub unsafe fn $name(d: &mut [$type; $n], a: Descriptor, b: Descriptor, accumulate: bool) {
                // SAFETY: tiles and timing are the caller's contract.
                unsafe {
                    asm!(
                        concat!(
                            "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.", $shape,
                            " {{{", $first, "}" $(, ",{", $i, "}")*, "}}, {a}, {b}, p", $tail, "; }}"
                        ),
                        inout(reg32) d[$first], $(inout(reg32) d[$i],)*
                        a = in(reg64) a.0, b = in(reg64) b.0, accumulate = in(reg32) accumulate as u32,
                        options(nostack)
                    )
                }
            }
        };
    }

    /// A in registers, B in shared memory.
    macro_rules! registers_shared {
        ($(#[$doc:meta])* $name:ident, $shape:literal, $tail:literal, $n:literal, [$first:literal $($i:literal)*]) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// The warpgroup executes it together, between [`fence`] and [`commit`]; the descriptor covers a
            /// valid tile; `d` and `a` are not touched before [`wait`].
            #[inline(always)]
            pub unsafe fn $name(d: &mut [f32; $n], a: [u32; 4], b: Descriptor, accumulate: bool) {
                // SAFETY: tiles and timing are the caller's contract.
                unsafe {
                    asm!(
                        concat!(
                            "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.", $shape,
                            " {{{", $first, "}" $(, ",{", $i, "}")*, "}}, {{{a0},{a1},{a2},{a3}}}, {b}, p", $tail, "; }}"
                        ),
                        inout(reg32) d[$first], $(inout(reg32) d[$i],)*
                        a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b = in(reg64) b.0, accumulate = in(reg32) accumulate as u32,
                        options(nostack)
                    )
                }
            }
        };
    }

    /// The same with the last 8 columns in an array of their own.
    macro_rules! registers_shared_ones {
        ($(#[$doc:meta])* $name:ident, $shape:literal, $n:literal, [$first:literal $($i:literal)*], [$($j:literal $s:literal)*]) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// The warpgroup executes it together, between [`fence`] and [`commit`]; the descriptor covers a
            /// valid tile; `d`, `ones` and `a` are not touched before [`wait`].
            #[inline(always)]
            pub unsafe fn $name(d: &mut [f32; $n], ones: &mut [f32; 4], a: [u32; 4], b: Descriptor, accumulate: bool) {
                // SAFETY: tiles and timing are the caller's contract.
                unsafe {
                    asm!(
                        concat!(
                            "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; wgmma.mma_async.sync.aligned.", $shape,
                            " {{{", $first, "}" $(, ",{", $i, "}")* $(, ",{", $j, "}")*,
                            "}}, {{{a0},{a1},{a2},{a3}}}, {b}, p, 1, 1; }}"
                        ),
                        inout(reg32) d[$first], $(inout(reg32) d[$i],)* $(inout(reg32) ones[$s],)*
                        a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                        b = in(reg64) b.0, accumulate = in(reg32) accumulate as u32,
                        options(nostack)
                    )
                }
            }
        };
    }

    shared_shared!(
        /// 64 x 128 f16 scores of a k step of 16 f16, accumulated in f16: register 2j holds columns 8j +
        /// 2(t%4) + {0, 1} of the upper row, 2j + 1 those of the lower.
        m64n128k16_f16_f16, "m64n128k16.f16.f16.f16", ", 1, 1, 0, 0", u32, 32, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        ]
    );
    shared_shared!(
        /// 64 x 128 f16 scores of a k step of 32 E4M3, accumulated in f16; registers as [`m64n128k16_f16_f16`].
        m64n128k32_f16_e4m3, "m64n128k32.f16.e4m3.e4m3", ", 1, 1", u32, 32, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        ]
    );
    shared_shared!(
        /// 64 x 128 s32 scores of a k step of 32 INT8, exact.
        m64n128k32_s32_s8, "m64n128k32.s32.s8.s8", "", i32, 64, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
            62 63
        ]
    );
    registers_shared!(
        /// 64 x 128 f32 values of a k step of 32 E4M3. About 14 bits survive each addition inside.
        m64n128k32_f32_e4m3, "m64n128k32.f32.e4m3.e4m3", ", 1, 1", 64, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
            62 63
        ]
    );
    registers_shared!(
        /// 64 x 128 f32 values of a k step of 16 f16, B K-major.
        m64n128k16_f32_f16, "m64n128k16.f32.f16.f16", ", 1, 1, 0", 64, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
            62 63
        ]
    );
    registers_shared_ones!(
        /// 64 x 136 f32 values of a k step of 32 E4M3; the 8 columns behind the 128, rows of ones in B, give the
        /// row sums of A: `ones[0]` of the upper row, `ones[2]` of the lower.
        m64n136k32_f32_e4m3, "m64n136k32.f32.e4m3.e4m3", 64, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
            62 63
        ], [64 0 65 1 66 2 67 3]
    );
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use super::Descriptor;
    use crate::emulation::{Accumulator, Element, Kind, OperandA, instructions};

    /// A value of one 32-bit register.
    pub trait Register: Copy {
        #[doc(hidden)]
        fn bits(registers: &mut [Self]) -> &mut [u32];
    }

    macro_rules! register {
        ($($type:ty)*) => {$(
            impl Register for $type {
                fn bits(registers: &mut [Self]) -> &mut [u32] {
                    bytemuck::cast_slice_mut(registers)
                }
            }
        )*};
    }
    register!(u32 i32 f32);

    /// Marks values that a product will use, or that one has left: the emulation hands results over here, and
    /// compares what enters a product with what was here before the fence.
    #[track_caller]
    pub fn pin<T: Register, const N: usize>(registers: &mut [T; N]) {
        instructions::pin(T::bits(registers));
    }

    /// The value.
    pub fn pinned<T: Register>(value: T) -> T {
        value
    }

    /// `wgmma.fence`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn fence() {
        instructions::wgmma_fence();
    }

    /// `wgmma.commit_group`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn commit() {
        instructions::wgmma_commit();
    }

    /// `wgmma.wait_group`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn wait<const PENDING: u32>() {
        instructions::wgmma_wait(PENDING);
    }

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $text:literal, $columns:literal, $element:ident, $accumulator:ident,
            ($($d:ident: $type:ty),*), $a:ident: $a_type:ty, $operand:expr) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// As on the device; what is broken of it is a fault.
            #[track_caller]
            pub unsafe fn $name($($d: &mut $type,)* $a: $a_type, b: Descriptor, accumulate: bool) {
                const KIND: Kind = Kind {
                    name: $text,
                    columns: $columns,
                    element: Element::$element,
                    accumulator: Accumulator::$accumulator,
                };
                instructions::wgmma(KIND, &mut [$(Register::bits($d)),*], $operand, b.0, accumulate);
            }
        };
    }

    product!(
        /// 64 x 128 f16 scores of a k step of 16 f16, accumulated in f16.
        m64n128k16_f16_f16, "m64n128k16.f16.f16.f16", 128, F16, F16,
        (d: [u32; 32]), a: Descriptor, OperandA::Shared(a.0)
    );
    product!(
        /// 64 x 128 f16 scores of a k step of 32 E4M3, accumulated in f16.
        m64n128k32_f16_e4m3, "m64n128k32.f16.e4m3.e4m3", 128, E4m3, F16,
        (d: [u32; 32]), a: Descriptor, OperandA::Shared(a.0)
    );
    product!(
        /// 64 x 128 s32 scores of a k step of 32 INT8, exact.
        m64n128k32_s32_s8, "m64n128k32.s32.s8.s8", 128, S8, S32,
        (d: [i32; 64]), a: Descriptor, OperandA::Shared(a.0)
    );
    product!(
        /// 64 x 128 f32 values of a k step of 32 E4M3, without the hardware's loss of bits.
        m64n128k32_f32_e4m3, "m64n128k32.f32.e4m3.e4m3", 128, E4m3, F32,
        (d: [f32; 64]), a: [u32; 4], OperandA::Registers(a)
    );
    product!(
        /// 64 x 128 f32 values of a k step of 16 f16, B K-major.
        m64n128k16_f32_f16, "m64n128k16.f32.f16.f16", 128, F16, F32,
        (d: [f32; 64]), a: [u32; 4], OperandA::Registers(a)
    );
    product!(
        /// 64 x 136 f32 values of a k step of 32 E4M3; columns 128 to 135 in `ones`.
        m64n136k32_f32_e4m3, "m64n136k32.f32.e4m3.e4m3", 136, E4m3, F32,
        (d: [f32; 64], ones: [f32; 4]), a: [u32; 4], OperandA::Registers(a)
    );
}
