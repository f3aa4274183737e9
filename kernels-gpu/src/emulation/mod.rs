//! Runs kernels on the host: the second body of every wrapper in [`ptx`](crate::ptx).
//!
//! A block's threads are coroutines of one OS thread. Each runs until an instruction has to wait for others, then the
//! next one does, in the order of a [`Schedule`]: a run is reproducible, a deadlock is known at once and by the
//! names of its threads, and a meeting of 128 threads costs microseconds. What would go unnoticed that way, accesses
//! that only happened to come in the right order, is found from what each thread can *know*: every byte of
//! shared memory remembers who wrote and read it, and barriers carry that knowledge.
//!
//! `docs/emulation.md` says what is emulated, how faithfully, and what it cannot see.
//!
//! ```
//! use kernels_gpu::emulation::{Launch, Memory, Schedule};
//! use kernels_gpu::ptx::{memory, shuffle, special};
//!
//! let mut gpu = Memory::new();
//! let sum = gpu.in_out("sum", &[7u32]);
//! let launch = Launch::new(64, 0);
//! launch.run(&gpu, || unsafe {
//!     let largest = shuffle::warp_max_u32(special::thread_idx_x());
//!     if special::thread_idx_x() % 32 == 0 {
//!         memory::max_global_u32(sum, largest);
//!     }
//! })?;
//! assert_eq!(gpu.read(sum), [63]);
//! # Ok::<(), kernels_gpu::emulation::Fault>(())
//! ```

mod barrier;
mod block;
mod clock;
mod descriptor;
mod fault;
mod global;
pub(crate) mod instructions;
mod product;
mod schedule;
mod shared;
mod tensor;
mod threads;
mod warp;
mod warpgroup;

pub use fault::{Fault, Violation, Waiting};
pub use global::Memory;
pub(crate) use product::{Accumulator, Element, Kind};
pub use schedule::Schedule;
pub(crate) use tensor::{TensorKind, TensorOperand};
pub(crate) use warpgroup::OperandA;

use crate::kernels::Entry;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    grid: [u32; 3],
    threads: u32,
    blocks_a_multiprocessor: u32,
    shared: u32,
    schedule: Schedule,
}

impl Launch {
    /// One block of `threads` threads with `shared` bytes of dynamic shared memory.
    pub const fn new(threads: u32, shared: u32) -> Self {
        Self { grid: [1; 3], threads, blocks_a_multiprocessor: 1, shared, schedule: Schedule::Oldest }
    }

    /// One block as an entry says.
    pub const fn of(entry: &Entry) -> Self {
        let launch = Self::new(entry.threads, entry.dynamic_shared);
        Self { blocks_a_multiprocessor: entry.min_ctas_per_sm, ..launch }
    }

    /// With this many blocks.
    #[must_use]
    pub const fn grid(self, grid: [u32; 3]) -> Self {
        Self { grid, ..self }
    }

    /// In this order.
    #[must_use]
    pub const fn schedule(self, schedule: Schedule) -> Self {
        Self { schedule, ..self }
    }

    /// Runs `kernel` as every thread of every block, one block after the other.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn run(&self, memory: &Memory, kernel: impl Fn()) -> Result<(), Fault> {
        let mut stacks = threads::Stacks::default();
        let [x, y, z] = self.grid;
        for index in (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k]))) {
            let queue = schedule::Queue::new(self.threads, self.schedule);
            let block = block::Block::new(
                index,
                self.threads,
                self.blocks_a_multiprocessor,
                self.shared,
                memory,
                queue,
            );
            threads::run(block, &mut stacks, &kernel)?;
        }
        let fault = |violation| Fault { block: None, thread: None, at: None, violation };
        memory.check_after().map_err(fault)
    }
}
