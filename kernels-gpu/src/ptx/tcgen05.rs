//! Matrix products of Blackwell's datacenter GPUs and the Tensor Memory that they accumulate in (PTX ISA 9.7.16;
//! sm_100a and sm_103a, `kind::i8` not on the latter).
//!
//! One thread issues a product; accumulators, and operand A if it is not in shared memory, lie in *Tensor Memory*: 128
//! lanes by 512 columns of 32 bits a block. With M = 128 row i of D or A is lane i (9.7.16.10.5, layout D). Column j of
//! D takes one column whatever its type: an f16 lies in the lower half. A is packed: 32 bytes along K, one k step, take 8
//! columns.
//!
//! # Protocol (9.7.16.6)
//! Nearly everything is asynchronous and unordered, and each kind of operation has its own way to be waited for:
//!
//! | operation | complete after | for other threads |
//! |---|---|---|
//! | `mma` | a wait for the mbarrier of `commit`, which covers all that its thread issued before | `fence_after_sync` |
//! | `load` | `wait_load` | `fence_before_sync`, a barrier, `fence_after_sync` |
//! | `store` | `wait_store` | the same |
//!
//! Only products of one shape and kind on the same accumulator follow each other without any of this. All lanes of a
//! warp execute loads, stores, their waits and the allocation together.

use super::SharedAddr;

/// An address in Tensor Memory (9.7.16.1.1): the lane in bits 16-31, the column in bits 0-15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct TensorAddr(pub u32);

impl TensorAddr {
    /// The address `columns` further on.
    #[inline(always)]
    pub const fn add(self, columns: u32) -> Self {
        Self(self.0 + columns)
    }

    /// The address `lanes` further down. A warp reaches the lanes 32w to 32w + 31 only, w its number in its
    /// warpgroup (9.7.16.8.1).
    #[inline(always)]
    pub const fn down(self, lanes: u32) -> Self {
        Self(self.0 + (lanes << 16))
    }
}

/// Where an operand lies in shared memory (9.7.16.4.1).
///
/// | bits | field |
/// |---|---|
/// | 0-13 | start address / 16 |
/// | 16-29 | leading dimension byte offset / 16 (no swizzle: between core matrices along K) |
/// | 32-45 | stride dimension byte offset / 16 (between groups of 8 rows) |
/// | 46-48 | 0b001 |
/// | 49-51 | base offset: 0, tiles start where their swizzle's pattern does |
/// | 52 | 0: the leading dimension's offset is relative |
/// | 53-60 | 0 |
/// | 61-63 | 0 no swizzle, 2 128 bytes |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(pub u64);

impl Descriptor {
    const VERSION: u64 = 1 << 46;

    /// K-major rows of 128 bytes with the 128-byte swizzle; groups of 8 rows lie 1024 bytes apart and the tile
    /// starts at a multiple of 1024.
    #[inline(always)]
    pub const fn swizzled(start: SharedAddr) -> Self {
        Self((start.0 >> 4) as u64 & 0x3fff | 1 << 16 | (1024 >> 4) << 32 | Self::VERSION | 2 << 61)
    }

    /// K-major core matrices of 8 rows x 16 bytes, each contiguous: `along_k` bytes to the next along K,
    /// `along_rows` bytes to the next 8 rows.
    #[inline(always)]
    pub const fn plain(start: SharedAddr, along_k: u32, along_rows: u32) -> Self {
        let (k, rows) = ((along_k >> 4) as u64, (along_rows >> 4) as u64);
        Self((start.0 >> 4) as u64 & 0x3fff | k << 16 | rows << 32 | Self::VERSION)
    }

    /// The same tile `bytes` further on: the next k step of a swizzled tile is 32 bytes away.
    #[inline(always)]
    pub const fn add(self, bytes: u32) -> Self {
        Self(self.0 + (bytes >> 4) as u64)
    }
}

/// Shape and types of a dense product (9.7.16.4.2).
///
/// | bits | field | `kind::f16` | `kind::f8f6f4` | `kind::i8` |
/// |---|---|---|---|---|
/// | 0-2 | sparsity | 0 | 0 | 0 |
/// | 3 | saturate | 0 | 0 | 0 or 1 |
/// | 4-5 | type of D | f16 0, f32 1 | f16 0, f32 1 | s32 2 |
/// | 7-9, 10-12 | types of A and B | f16 0, bf16 1 | E4M3 0, E5M2 1, .. | u8 0, s8 1 |
/// | 13, 14 | negate A, B | 0 | 0 | 0 |
/// | 15, 16 | transpose A, B: not K-major | 0 | 0 | 0 |
/// | 17-22 | N / 8 | | | |
/// | 24-28 | M / 16 | | | |
/// | 30-31 | reuse of B while shifting | 0 | 0 | 0 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Instruction(pub u32);

impl Instruction {
    const F16: u32 = 0;
    const F32: u32 = 1;
    const S32: u32 = 2;

    /// 128 rows by `n` columns, a multiple of 16 up to 256.
    const fn new(d: u32, operands: u32, n: u32) -> Self {
        assert!(n >= 16 && n <= 256 && n.is_multiple_of(16));
        Self(d << 4 | operands << 7 | operands << 10 | (n / 8) << 17 | (128 / 16) << 24)
    }

    /// f16 operands or E4M3 operands (both are type 0 of their kind), f16 accumulators.
    pub const fn into_f16(n: u32) -> Self {
        Self::new(Self::F16, 0, n)
    }

    /// f16 operands or E4M3 operands, f32 accumulators.
    pub const fn into_f32(n: u32) -> Self {
        Self::new(Self::F32, 0, n)
    }

    /// Signed 8-bit operands, s32 accumulators that wrap.
    pub const fn s8_into_s32(n: u32) -> Self {
        Self::new(Self::S32, 1, n)
    }
}

#[cfg(all(target_arch = "nvptx64", any(attention = "sm100", attention = "sm103")))]
pub use device::*;

#[cfg(all(target_arch = "nvptx64", any(attention = "sm100", attention = "sm103")))]
mod device {
    use core::arch::asm;

    use super::{Descriptor, Instruction, TensorAddr};
    use crate::ptx::SharedAddr;
    use crate::ptx::mbarrier::Barrier;
    use crate::ptx::wgmma::pin;

    /// `tcgen05.alloc` (9.7.16.7.1): `COLUMNS` columns, a power of two from 32 to 512; their address goes to the word at
    /// `to`. Waits until they are free.
    ///
    /// # Safety
    /// All lanes of one warp execute it together; `to` is a writable word of shared memory.
    #[inline(always)]
    pub unsafe fn allocate<const COLUMNS: u32>(to: SharedAddr) {
        // SAFETY: the whole warp takes part, the word is the caller's.
        unsafe {
            asm!("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{}], {};", in(reg32) to.0, const COLUMNS,
                options(nostack))
        }
    }

    /// `tcgen05.relinquish_alloc_permit` (9.7.16.7.1): this block allocates no more.
    ///
    /// # Safety
    /// All lanes of the warp execute it together.
    #[inline(always)]
    pub unsafe fn relinquish() {
        // SAFETY: the whole warp takes part.
        unsafe { asm!("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", options(nostack)) }
    }

    /// `tcgen05.dealloc` (9.7.16.7.1): gives back what [`allocate`] gave, which must happen before the block ends.
    ///
    /// # Safety
    /// All lanes of one warp execute it together; nobody uses the columns any more.
    #[inline(always)]
    pub unsafe fn deallocate<const COLUMNS: u32>(at: TensorAddr) {
        // SAFETY: the whole warp takes part.
        unsafe {
            asm!("tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, {};", in(reg32) at.0, const COLUMNS,
                options(nostack))
        }
    }

    /// `tcgen05.fence::before_thread_sync` (9.7.16.11.1): what this thread's complete operations did is ordered before
    /// the barriers that it arrives at from here on.
    ///
    /// # Safety
    /// None beyond running on the device.
    #[inline(always)]
    pub unsafe fn fence_before_sync() {
        // SAFETY: a fence.
        unsafe { asm!("tcgen05.fence::before_thread_sync;", options(nostack)) }
    }

    /// `tcgen05.fence::after_thread_sync` (9.7.16.11.1): this thread's operations from here on are ordered after the
    /// barriers that it has waited for.
    ///
    /// # Safety
    /// None beyond running on the device.
    #[inline(always)]
    pub unsafe fn fence_after_sync() {
        // SAFETY: a fence.
        unsafe { asm!("tcgen05.fence::after_thread_sync;", options(nostack)) }
    }

    /// `tcgen05.commit` (9.7.16.12.1): one arrival at `barrier` when all products are complete that this thread has
    /// issued.
    ///
    /// # Safety
    /// The barrier is initialized and its phase expects the arrival.
    #[inline(always)]
    pub unsafe fn commit(barrier: Barrier) {
        // SAFETY: initialized by contract.
        unsafe {
            asm!("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];",
                in(reg32) barrier.addr().0, options(nostack))
        }
    }

    /// `tcgen05.wait::ld` (9.7.16.8.4): this thread's loads are complete, and `registers` hold what one of them read.
    ///
    /// # Safety
    /// All lanes of the warp execute it together.
    #[inline(always)]
    pub unsafe fn wait_load<const N: usize>(registers: &mut [u32; N]) {
        // SAFETY: the whole warp takes part.
        unsafe { asm!("tcgen05.wait::ld.sync.aligned;", options(nostack)) }
        pin(registers);
    }

    /// `tcgen05.wait::st` (9.7.16.8.4): this thread's stores are complete.
    ///
    /// # Safety
    /// All lanes of the warp execute it together.
    #[inline(always)]
    pub unsafe fn wait_store() {
        // SAFETY: the whole warp takes part.
        unsafe { asm!("tcgen05.wait::st.sync.aligned;", options(nostack)) }
    }

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $kind:literal, shared) => {
            product!(@ $(#[$doc])* $name, $kind, Descriptor, reg64, "{a}");
        };
        ($(#[$doc:meta])* $name:ident, $kind:literal, tensor) => {
            product!(@ $(#[$doc])* $name, $kind, TensorAddr, reg32, "[{a}]");
        };
        (@ $(#[$doc:meta])* $name:ident, $kind:literal, $operand:ty, $register:ident, $a:literal) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// One thread executes it. Operands are valid tiles that it is ordered after; accumulators and operands are
            /// not touched before a wait for a [`commit`] behind it.
            #[inline(always)]
            pub unsafe fn $name(d: TensorAddr, a: $operand, b: Descriptor, shape: Instruction, accumulate: bool) {
                // SAFETY: tiles and timing are the caller's contract.
                unsafe {
                    asm!(
                        concat!(
                            "{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; tcgen05.mma.cta_group::1.kind::", $kind,
                            " [{d}], ", $a, ", {b}, {shape}, p; }}"
                        ),
                        d = in(reg32) d.0, a = in($register) a.0, b = in(reg64) b.0, shape = in(reg32) shape.0,
                        accumulate = in(reg32) accumulate as u32, options(nostack)
                    )
                }
            }
        };
    }

    product!(
        /// D (+)= A B for a k step of 16 f16 (9.7.16.10.9.1).
        mma_f16, "f16", shared
    );
    product!(
        /// [`mma_f16`] with A in Tensor Memory.
        mma_f16_tensor, "f16", tensor
    );
    product!(
        /// D (+)= A B for a k step of 32 E4M3 (9.7.16.10.9.1).
        mma_f8, "f8f6f4", shared
    );
    product!(
        /// [`mma_f8`] with A in Tensor Memory.
        mma_f8_tensor, "f8f6f4", tensor
    );
    // ptxas knows no kind::i8 on sm_103a.
    #[cfg(attention = "sm100")]
    product!(
        /// D (+)= A B for a k step of 32 signed bytes, exact (9.7.16.10.9.1).
        mma_i8, "i8", shared
    );

    macro_rules! load {
        ($(#[$doc:meta])* $name:ident, $shape:literal, $n:literal, [$first:literal $($i:literal)*]) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// All lanes of the warp execute it together; `from` is of its own lanes and holds what it is ordered
            /// after. `registers` are not used before [`wait_load`].
            #[inline(always)]
            pub unsafe fn $name(registers: &mut [u32; $n], from: TensorAddr) {
                // SAFETY: lanes, columns and timing are the caller's contract.
                unsafe {
                    asm!(
                        concat!("tcgen05.ld.sync.aligned.32x32b.", $shape, ".b32 {{{", $first, "}" $(, ",{", $i, "}")*, "}}, [{from}];"),
                        out(reg32) registers[$first], $(out(reg32) registers[$i],)* from = in(reg32) from.0,
                        options(nostack)
                    )
                }
            }
        };
    }

    load!(
        /// `tcgen05.ld.32x32b.x1` (9.7.16.8.2): one column; lane i reads lane i of its warp's 32.
        load_x1, "x1", 1, [0]
    );
    load!(
        /// `tcgen05.ld.32x32b.x32`: 32 columns.
        load_x32, "x32", 32, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        ]
    );
    load!(
        /// `tcgen05.ld.32x32b.x64.pack::16b`: the lower halves of 128 columns, two neighbors to a register.
        load_x64_packed, "x64.pack::16b", 64, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
            62 63
        ]
    );

    macro_rules! store {
        ($(#[$doc:meta])* $name:ident, $shape:literal, $n:literal, [$first:literal $($i:literal)*]) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// All lanes of the warp execute it together; `to` is of its own lanes, and it is ordered after all that
            /// used these columns.
            #[inline(always)]
            pub unsafe fn $name(to: TensorAddr, registers: &[u32; $n]) {
                // SAFETY: lanes, columns and timing are the caller's contract.
                unsafe {
                    asm!(
                        concat!("tcgen05.st.sync.aligned.32x32b.", $shape, ".b32 [{to}], {{{", $first, "}" $(, ",{", $i, "}")*, "}};"),
                        in(reg32) registers[$first], $(in(reg32) registers[$i],)* to = in(reg32) to.0,
                        options(nostack)
                    )
                }
            }
        };
    }

    store!(
        /// `tcgen05.st.32x32b.x8` (9.7.16.8.3): 8 columns; lane i writes lane i of its warp's 32.
        store_x8, "x8", 8, [0 1 2 3 4 5 6 7]
    );
    store!(
        /// `tcgen05.st.32x32b.x32`: 32 columns.
        store_x32, "x32", 32, [
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        ]
    );
}

#[cfg(feature = "emulation")]
pub use host::*;

#[cfg(feature = "emulation")]
mod host {
    use super::{Descriptor, Instruction, TensorAddr};
    use crate::emulation::{TensorKind, TensorOperand, instructions};
    use crate::ptx::SharedAddr;
    use crate::ptx::mbarrier::Barrier;

    /// `tcgen05.alloc`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn allocate<const COLUMNS: u32>(to: SharedAddr) {
        instructions::tensor_allocate(to.0, COLUMNS);
    }

    /// `tcgen05.relinquish_alloc_permit`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn relinquish() {
        instructions::tensor_relinquish();
    }

    /// `tcgen05.dealloc`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn deallocate<const COLUMNS: u32>(at: TensorAddr) {
        instructions::tensor_deallocate(at.0, COLUMNS);
    }

    /// `tcgen05.fence::before_thread_sync`.
    ///
    /// # Safety
    /// None beyond running in a launch.
    #[track_caller]
    pub unsafe fn fence_before_sync() {
        instructions::tensor_fence_before();
    }

    /// `tcgen05.fence::after_thread_sync`.
    ///
    /// # Safety
    /// None beyond running in a launch.
    #[track_caller]
    pub unsafe fn fence_after_sync() {
        instructions::tensor_fence_after();
    }

    /// `tcgen05.commit`: the arrival comes when nothing else can happen.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn commit(barrier: Barrier) {
        instructions::tensor_commit(barrier.addr().0);
    }

    /// `tcgen05.wait::ld`: hands over what the load into `registers` read, which it reads now.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn wait_load<const N: usize>(registers: &mut [u32; N]) {
        instructions::tensor_wait_load(registers);
    }

    /// `tcgen05.wait::st`.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn wait_store() {
        instructions::tensor_wait_store();
    }

    macro_rules! product {
        ($(#[$doc:meta])* $name:ident, $kind:ident, $operand:ty, $place:ident) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// As on the device; what is broken of it is a fault.
            #[track_caller]
            pub unsafe fn $name(d: TensorAddr, a: $operand, b: Descriptor, shape: Instruction, accumulate: bool) {
                let a = TensorOperand::$place(a.0);
                instructions::tensor_product(TensorKind::$kind, d.0, a, b.0, shape.0, accumulate);
            }
        };
    }

    product!(
        /// D (+)= A B for a k step of 16 f16.
        mma_f16, F16, Descriptor, Shared
    );
    product!(
        /// [`mma_f16`] with A in Tensor Memory.
        mma_f16_tensor, F16, TensorAddr, Tensor
    );
    product!(
        /// D (+)= A B for a k step of 32 E4M3.
        mma_f8, F8, Descriptor, Shared
    );
    product!(
        /// [`mma_f8`] with A in Tensor Memory.
        mma_f8_tensor, F8, TensorAddr, Tensor
    );
    product!(
        /// D (+)= A B for a k step of 32 signed bytes, exact.
        mma_i8, I8, Descriptor, Shared
    );

    macro_rules! load {
        ($(#[$doc:meta])* $name:ident, $n:literal, $packed:literal) => {
            $(#[$doc])*
            ///
            /// # Safety
            /// As on the device; what is broken of it is a fault.
            #[track_caller]
            pub unsafe fn $name(registers: &mut [u32; $n], from: TensorAddr) {
                instructions::tensor_load(registers, from.0, $packed);
            }
        };
    }

    load!(
        /// `tcgen05.ld.32x32b.x1`: one column.
        load_x1, 1, false
    );
    load!(
        /// `tcgen05.ld.32x32b.x32`: 32 columns.
        load_x32, 32, false
    );
    load!(
        /// `tcgen05.ld.32x32b.x64.pack::16b`: the lower halves of 128 columns, two neighbors to a register.
        load_x64_packed, 64, true
    );

    /// `tcgen05.st.32x32b.x8`: 8 columns.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn store_x8(to: TensorAddr, registers: &[u32; 8]) {
        instructions::tensor_store(to.0, registers);
    }

    /// `tcgen05.st.32x32b.x32`: 32 columns.
    ///
    /// # Safety
    /// As on the device; what is broken of it is a fault.
    #[track_caller]
    pub unsafe fn store_x32(to: TensorAddr, registers: &[u32; 32]) {
        instructions::tensor_store(to.0, registers);
    }
}
