//! What a kernel did wrong, and where.

use core::fmt;
use core::panic::Location;
use std::string::String;
use std::vec::Vec;

/// The rule that a kernel broke, with the block, the thread and the line of the kernel that broke it.
#[derive(Clone, Debug)]
pub struct Fault {
    /// `ctaid` of the block; absent when the fault was found after the last block.
    pub block: Option<[u32; 3]>,
    /// `tid.x` of the thread; absent when no single thread is to blame.
    pub thread: Option<u32>,
    /// The call of the wrapper, in the kernel's source.
    pub at: Option<&'static Location<'static>>,
    /// The rule.
    pub violation: Violation,
}

impl core::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some([x, y, z]) = self.block {
            write!(f, "block ({x}, {y}, {z})")?;
        }
        if let Some(thread) = self.thread {
            write!(f, ", thread {thread}")?;
        }
        if let Some(at) = self.at {
            write!(f, ", {}:{}", at.file(), at.line())?;
        }
        if self.block.is_some() {
            write!(f, ": ")?;
        }
        write!(f, "{}", self.violation)
    }
}

/// A set of threads that wait for the same thing.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The instruction.
    pub operation: String,
    /// Where it stands in the kernel.
    pub at: Option<&'static Location<'static>>,
    /// `tid.x` of the threads.
    pub threads: Vec<u32>,
}

/// Numbers as ranges: `0-31, 64`.
fn ranges(numbers: &[u32]) -> String {
    let mut text = String::new();
    let mut i = 0;
    while i < numbers.len() {
        let first = numbers[i];
        while i + 1 < numbers.len() && numbers[i + 1] == numbers[i] + 1 {
            i += 1;
        }
        let comma = if text.is_empty() { "" } else { ", " };
        let piece = match numbers[i] {
            last if last == first => std::format!("{comma}{first}"),
            last => std::format!("{comma}{first}-{last}"),
        };
        text.push_str(&piece);
        i += 1;
    }
    text
}

fn deadlock(waiting: &[Waiting]) -> String {
    let mut text = String::from("deadlock: no thread can go on");
    for w in waiting {
        let at = w.at.map_or(String::new(), |at| std::format!(" at {}:{}", at.file(), at.line()));
        text.push_str(&std::format!("; threads {} wait in {}{at}", ranges(&w.threads), w.operation));
    }
    text
}

/// The rules that the emulation holds a kernel to.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Every thread that has not returned waits, and nothing that is in flight would wake one.
    #[error("{}", deadlock(.0))]
    Deadlock(Vec<Waiting>),
    /// A Rust panic in the kernel: an index out of bounds, an overflow.
    #[error("panic: {0}")]
    Panic(String),
    /// Threads that must execute the same instruction together execute different ones.
    #[error("threads that must go together part: {found} here, {expected} elsewhere")]
    Diverged {
        /// What the first of them executed.
        expected: String,
        /// What this one executes.
        found: String,
    },
    /// An address outside the block's shared memory.
    #[error("shared memory {address:#x}, {bytes} bytes: outside the block's {size} from {base:#x}", base = super::shared::BASE)]
    SharedBounds {
        /// First byte.
        address: u32,
        /// Length of the access.
        bytes: u32,
        /// Bytes that the block has.
        size: u32,
    },
    /// An address that the instruction does not take.
    #[error("address {address:#x} is not a multiple of {alignment}")]
    Misaligned {
        /// The address.
        address: u64,
        /// What it must be a multiple of.
        alignment: u32,
    },
    /// Shared memory that nobody has written.
    #[error("shared memory {0:#x} is read before anybody wrote it")]
    Uninitialized(u32),
    /// Shared memory that a bulk copy is still to fill, or whose arrival this thread has not waited for.
    #[error("shared memory {0:#x} is touched while a bulk copy into it is in flight")]
    CopyInFlight(u32),
    /// Shared memory that a `cp.async` is still to fill.
    #[error("shared memory {0:#x} is touched before the cp.async into it was waited for")]
    AsyncCopyInFlight(u32),
    /// Two accesses, one of them a write, that no barrier puts in order.
    #[error("race on shared memory {address:#x}: this {access} is not ordered after {other}")]
    Race {
        /// The byte.
        address: u32,
        /// `read` or `write`.
        access: &'static str,
        /// The earlier access.
        other: String,
    },
    /// An ordinary write that wgmma or a bulk copy meets without a proxy fence between.
    #[error("shared memory {address:#x}: no fence.proxy.async between {writer} and an asynchronous access")]
    ProxyFence {
        /// The byte.
        address: u32,
        /// Who wrote it.
        writer: String,
    },
    /// A write into an operand of a product that is not waited for.
    #[error("shared memory {0:#x} is written while a wgmma or tcgen05.mma that reads it is in flight")]
    OperandInFlight(u32),
    /// Ordinary access to the bytes of an mbarrier.
    #[error("shared memory {0:#x} holds an mbarrier")]
    BarrierBytes(u32),
    /// An mbarrier operation at an address where none was initialized.
    #[error("no mbarrier was initialized at {0:#x}")]
    NoBarrier(u32),
    /// `mbarrier.init` over a live mbarrier or with a count outside 1..2^20.
    #[error("mbarrier {0:#x}: initialized twice, or for a count outside 1..2^20")]
    BarrierInit(u32),
    /// An initialized mbarrier that the asynchronous proxy may not see yet.
    #[error(
        "mbarrier {0:#x} goes to a bulk copy without fence.mbarrier_init or fence.proxy.async since its init"
    )]
    BarrierFence(u32),
    /// More arrivals than the phase expects.
    #[error("mbarrier {0:#x}: more arrivals than its phase expects")]
    TooManyArrivals(u32),
    /// The transaction count left its range of 2^20 - 1.
    #[error("mbarrier {0:#x}: transaction count outside its range")]
    TransactionCount(u32),
    /// A phase completed although a thread that waited for the one before had no chance to see it.
    #[error(
        "mbarrier {0:#x}: a phase completes before every waiter of the last one must have seen that; a waiter can miss it"
    )]
    PhaseMissed(u32),
    /// A global address outside every registered buffer.
    #[error("global memory: {bytes} bytes {near}")]
    GlobalBounds {
        /// First byte.
        address: u64,
        /// Length of the access.
        bytes: u64,
        /// Where that is, in words.
        near: String,
    },
    /// A write through a pointer to an input.
    #[error("buffer `{0}` is an input and may not be written")]
    ReadOnly(String),
    /// Bytes around a buffer changed: something was written out of its bounds.
    #[error("something was written outside buffer `{name}`, at byte {offset} of it")]
    RedZone {
        /// The buffer.
        name: String,
        /// Where, relative to its start.
        offset: i64,
    },
    /// The bytes of an input changed.
    #[error("input `{name}` was written, at byte {offset}")]
    InputChanged {
        /// The buffer.
        name: String,
        /// The first byte that changed.
        offset: usize,
    },
    /// `bar` with a count that is no multiple of 32, or that others at the same barrier do not share.
    #[error("bar {id}: {threads} threads, which is no multiple of 32 or not what others say ({others})")]
    BarrierCount {
        /// The barrier.
        id: u32,
        /// The count of this thread.
        threads: u32,
        /// The count of those that are there.
        others: u32,
    },
    /// `setmaxnreg` with an operand that it does not take.
    #[error("setmaxnreg from {from} to {to} registers: {rule}")]
    Registers {
        /// Registers before.
        from: u32,
        /// Registers asked for.
        to: u32,
        /// What it breaks.
        rule: &'static str,
    },
    /// A matrix descriptor that the hardware would not take, or that no tile of ours has.
    #[error("matrix descriptor {bits:#018x}: {rule}")]
    Descriptor {
        /// The 64 bits.
        bits: u64,
        /// What is wrong.
        rule: &'static str,
    },
    /// Registers of a product that changed since the last `wgmma.fence`.
    #[error("registers of a wgmma ({0}) were not pinned before the last wgmma.fence, or changed since")]
    RegisterFence(&'static str),
    /// Registers of a product that were written or pinned before its wait.
    #[error("registers of a wgmma were touched while it was in flight")]
    RegistersInFlight,
    /// An instruction descriptor of tcgen05 that the hardware would not take, or that is not emulated.
    #[error("instruction descriptor {bits:#010x}: {rule}")]
    InstructionDescriptor {
        /// The 32 bits.
        bits: u32,
        /// What is wrong.
        rule: &'static str,
    },
    /// Allocating or freeing columns of Tensor Memory against its rules.
    #[error("Tensor Memory: {0}")]
    TensorAllocation(&'static str),
    /// A cell of Tensor Memory that is not allocated.
    #[error("Tensor Memory: lane {lane}, column {column} is not allocated")]
    TensorBounds {
        /// The lane.
        lane: u32,
        /// The column.
        column: u32,
    },
    /// An address in lanes that the warp does not reach, or that a product cannot start at.
    #[error(
        "Tensor Memory: lane {lane} in an address of warp {warp} of a warpgroup, or of a product of 128 lanes"
    )]
    TensorLanes {
        /// Number of the warp in its warpgroup.
        warp: u32,
        /// The lane of the address.
        lane: u32,
    },
    /// A cell of Tensor Memory that nobody has written.
    #[error("Tensor Memory: lane {lane}, column {column} is read before anybody wrote it")]
    TensorEmpty {
        /// The lane.
        lane: u32,
        /// The column.
        column: u32,
    },
    /// A cell that a product reads or writes, and no wait for a commit behind it says that it is complete.
    #[error(
        "Tensor Memory: lane {lane}, column {column} is touched before a commit of its tcgen05.mma was seen"
    )]
    TensorInFlight {
        /// The lane.
        lane: u32,
        /// The column.
        column: u32,
    },
    /// Two accesses to a cell, one of them a write, between which something is missing.
    #[error("Tensor Memory: lane {lane}, column {column} is touched without {missing}")]
    TensorOrder {
        /// The lane.
        lane: u32,
        /// The column.
        column: u32,
        /// What would order them.
        missing: &'static str,
    },
    /// Registers of a `tcgen05.ld` that were not what it left, or that no load went into.
    #[error("registers of a tcgen05.wait::ld: {0}")]
    TensorRegisters(&'static str),
    /// A thread returned, or the block ended, with work in flight.
    #[error("the block ends with {0}")]
    LeftInFlight(String),
    /// A wrapper was called by a thread of no launch.
    #[error("called outside of an emulated launch")]
    Outside,
}
