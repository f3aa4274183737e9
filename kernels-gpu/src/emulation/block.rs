//! The state of a running block, and what each instruction does to it.

use core::panic::Location;
use std::collections::{BTreeMap, VecDeque};
use std::vec;
use std::vec::Vec;

use super::barrier::{MBarrier, Named};
use super::clock::{Causality, Epoch};
use super::fault::{Violation, Waiting};
use super::global::Memory;
use super::schedule::Queue;
use super::shared::Shared;
use super::tensor::{Tensor, TensorKind, TensorOperand};
use super::warp::{Brought, Warp};
use super::warpgroup::{self, Warpgroup};

/// Registers of a multiprocessor.
const REGISTERS: u32 = 65536;

/// Bytes of a `cp.async`.
const ASYNC_COPY: u32 = 16;

/// What a thread waits in.
#[derive(Clone)]
pub(super) struct Wait {
    pub(super) operation: std::string::String,
    pub(super) at: &'static Location<'static>,
}

/// A bulk copy on its way.
struct Copy {
    to: u32,
    from: *const u8,
    bytes: u32,
    barrier: u32,
}

/// The `cp.async` of a thread that it has not waited for: the addresses of their 16 bytes.
#[derive(Clone, Default)]
struct AsyncCopies {
    /// Not in a group yet.
    open: Vec<(u32, *const u8)>,
    /// Committed groups, the oldest first.
    groups: VecDeque<Vec<(u32, *const u8)>>,
}

/// The meeting of a warpgroup in `setmaxnreg`.
#[derive(Clone, Default)]
struct Reallocation {
    arrived: u32,
    to: u32,
    round: u64,
    waiters: Vec<u32>,
}

/// A running block.
pub(super) struct Block<'a> {
    pub(super) index: [u32; 3],
    pub(super) threads: u32,
    pub(super) memory: &'a Memory,
    pub(super) queue: Queue,
    pub(super) waiting: Vec<Option<Wait>>,
    causality: Vec<Causality>,
    shared: Shared,
    /// Addresses of `.shared` symbols.
    symbols: BTreeMap<&'static str, u32>,
    mbarriers: BTreeMap<u32, MBarrier>,
    copies: Vec<Copy>,
    async_copies: Vec<AsyncCopies>,
    named: Vec<Named>,
    warps: Vec<Warp>,
    warpgroups: Vec<Warpgroup>,
    tensor: Tensor,
    /// Registers a thread, of every warpgroup, and those that nobody has.
    registers: Vec<u32>,
    free_registers: u32,
    reallocations: Vec<Reallocation>,
}

impl<'a> Block<'a> {
    pub(super) fn new(
        index: [u32; 3],
        threads: u32,
        blocks_a_multiprocessor: u32,
        shared: u32,
        memory: &'a Memory,
        queue: Queue,
    ) -> Self {
        let mut causality = vec![Causality::default(); threads as usize];
        for (thread, known) in causality.iter_mut().enumerate() {
            known.seen.set(thread as u16, 1);
        }
        let warpgroups = threads.div_ceil(128) as usize;
        let share = REGISTERS / blocks_a_multiprocessor;
        let registers = (share / threads / 8 * 8).min(255);
        Self {
            index,
            threads,
            memory,
            queue,
            waiting: vec![None; threads as usize],
            causality,
            shared: Shared::new(shared, threads),
            symbols: BTreeMap::new(),
            mbarriers: BTreeMap::new(),
            copies: Vec::new(),
            async_copies: vec![AsyncCopies::default(); threads as usize],
            named: (0..16).map(|_| Named::default()).collect(),
            warps: (0..threads.div_ceil(32)).map(|_| Warp::default()).collect(),
            warpgroups: (0..warpgroups).map(|_| Warpgroup::new()).collect(),
            tensor: Tensor::new(threads, (threads + threads.div_ceil(32)) as u16),
            registers: vec![registers; warpgroups],
            free_registers: share - registers * threads,
            reallocations: vec![Reallocation::default(); warpgroups],
        }
    }

    /// This moment of a thread.
    fn now(&self, thread: u32) -> Epoch {
        let actor = thread as u16;
        Epoch { actor, clock: self.causality[thread as usize].seen.get(actor) }
    }

    /// What a thread does from here on is not part of what it released before.
    fn tick(&mut self, thread: u32) {
        let clock = self.now(thread).clock + 1;
        self.causality[thread as usize].seen.set(thread as u16, clock);
    }

    // Shared memory.

    pub(super) fn symbol(&mut self, name: &'static str, bytes: u32, alignment: u32) -> u32 {
        *self.symbols.entry(name).or_insert_with(|| self.shared.allocate(bytes, alignment))
    }

    pub(super) fn load(
        &mut self,
        thread: u32,
        address: u32,
        alignment: u32,
        into: &mut [u8],
    ) -> Result<(), Violation> {
        let now = self.now(thread);
        self.shared.load(now, &self.causality[thread as usize], address, alignment, into)
    }

    pub(super) fn store(
        &mut self,
        thread: u32,
        address: u32,
        alignment: u32,
        from: &[u8],
    ) -> Result<(), Violation> {
        let now = self.now(thread);
        self.shared.store(now, &self.causality[thread as usize], address, alignment, from)
    }

    pub(super) fn reduce(
        &mut self,
        thread: u32,
        address: u32,
        f: impl FnOnce(u32) -> u32,
    ) -> Result<(), Violation> {
        let now = self.now(thread);
        self.shared.reduce(now, &self.causality[thread as usize], address, f)
    }

    // mbarriers and bulk copies.

    pub(super) fn barrier_init(&mut self, thread: u32, address: u32, arrivals: u32) -> Result<(), Violation> {
        let now = self.now(thread);
        self.shared.make_barrier(now, &self.causality[thread as usize], address)?;
        let actor = self.threads + 2 * self.threads.div_ceil(32) + self.mbarriers.len() as u32;
        self.mbarriers.insert(address, MBarrier::new(address, actor as u16, arrivals, now)?);
        Ok(())
    }

    /// A barrier whose initialization the thread has seen.
    fn barrier(&mut self, thread: u32, address: u32) -> Result<&mut MBarrier, Violation> {
        let known = &self.causality[thread as usize];
        let barrier = self.mbarriers.get_mut(&address).filter(|b| known.seen.knows(b.init));
        barrier.ok_or(Violation::NoBarrier(address))
    }

    pub(super) fn barrier_arrive(&mut self, thread: u32, address: u32, bytes: u32) -> Result<(), Violation> {
        let known = self.causality[thread as usize].clone();
        let woken = self.barrier(thread, address)?.arrive(&known, bytes)?;
        self.tick(thread);
        self.queue.wake(&woken);
        Ok(())
    }

    pub(super) fn barrier_test(&mut self, thread: u32, address: u32, parity: u32) -> Result<bool, Violation> {
        let mut known = core::mem::take(&mut self.causality[thread as usize]);
        let barrier = self.mbarriers.get_mut(&address).filter(|b| known.seen.knows(b.init));
        let complete = barrier.map(|b| b.test(thread, parity, &mut known));
        self.causality[thread as usize] = known;
        complete.ok_or(Violation::NoBarrier(address))
    }

    pub(super) fn fence_init(&mut self, thread: u32) {
        let known = &self.causality[thread as usize];
        self.mbarriers.values_mut().filter(|b| known.seen.knows(b.init)).for_each(|b| b.published = true);
    }

    pub(super) fn fence_proxy(&mut self, thread: u32) {
        self.causality[thread as usize].fence();
    }

    pub(super) fn bulk_copy(
        &mut self,
        thread: u32,
        to: u32,
        from: *const u8,
        bytes: u32,
        barrier: u32,
    ) -> Result<(), Violation> {
        for (address, alignment) in [(u64::from(to), 16), (from as u64, 16), (bytes.into(), 16)] {
            if !address.is_multiple_of(alignment) {
                return Err(Violation::Misaligned { address, alignment: alignment as u32 });
            }
        }
        self.memory.check(from as usize, bytes as usize, 16, false)?;
        let known = &self.causality[thread as usize];
        let b = self.mbarriers.get(&barrier).filter(|b| known.seen.knows(b.init));
        let b = b.ok_or(Violation::NoBarrier(barrier))?;
        if !b.published && !known.fenced.knows(b.init) {
            return Err(Violation::BarrierFence(barrier));
        }
        self.shared.copy_issued(known, to, bytes)?;
        self.copies.push(Copy { to, from, bytes, barrier });
        Ok(())
    }

    /// Completes one copy or commit that a thread waits for; called when no thread can run, which is as late as it gets.
    pub(super) fn complete_one(&mut self) -> Result<bool, Violation> {
        let copies = self.copies.len();
        let barriers = self.copies.iter().map(|c| c.barrier).chain(self.tensor.commits());
        let wanted = barriers.enumerate().filter(|(_, b)| !self.mbarriers[b].waiters.is_empty());
        let wanted: Vec<usize> = wanted.map(|(i, _)| i).collect();
        if wanted.is_empty() {
            return Ok(false);
        }
        match wanted[self.queue.pick(wanted.len())] {
            copy if copy < copies => self.complete_copy(copy)?,
            commit => self.complete_commit(commit - copies)?,
        }
        Ok(true)
    }

    fn complete_copy(&mut self, i: usize) -> Result<(), Violation> {
        let copy = self.copies.remove(i);
        let barrier = self.mbarriers.get_mut(&copy.barrier).expect("a copy names an initialized barrier");
        // SAFETY: the range was checked against the buffers when the copy was issued, and they outlive the launch.
        let from = unsafe { core::slice::from_raw_parts(copy.from, copy.bytes as usize) };
        self.shared.copy_completed(barrier.copy_epoch(), copy.to, from);
        let woken = barrier.copied(copy.bytes)?;
        self.queue.wake(&woken);
        Ok(())
    }

    // Tensor Memory and its products.

    /// The Tensor Memory, what a thread knows, and its present moment.
    pub(super) fn tensor(&mut self, thread: u32) -> (&mut Tensor, &mut Causality, Epoch) {
        let now = self.now(thread);
        (&mut self.tensor, &mut self.causality[thread as usize], now)
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of the instruction")]
    pub(super) fn tensor_product(
        &mut self,
        thread: u32,
        kind: TensorKind,
        d: u32,
        a: TensorOperand,
        b: u64,
        shape: u32,
        accumulate: bool,
    ) -> Result<(), Violation> {
        let known = &self.causality[thread as usize];
        self.tensor.product(thread, known, &mut self.shared, kind, d, a, b, shape, accumulate)
    }

    pub(super) fn tensor_commit(&mut self, thread: u32, barrier: u32) -> Result<(), Violation> {
        let known = &self.causality[thread as usize];
        let b = self.mbarriers.get(&barrier).filter(|b| known.seen.knows(b.init));
        let b = b.ok_or(Violation::NoBarrier(barrier))?;
        if !b.published && !known.fenced.knows(b.init) {
            return Err(Violation::BarrierFence(barrier));
        }
        self.tensor.commit(thread, barrier);
        Ok(())
    }

    fn complete_commit(&mut self, i: usize) -> Result<(), Violation> {
        let (barrier, known) = self.tensor.arrive(i, &mut self.shared);
        let barrier = self.mbarriers.get_mut(&barrier).expect("a commit names an initialized barrier");
        let woken = barrier.arrive(&known, 0)?;
        self.queue.wake(&woken);
        Ok(())
    }

    // cp.async

    pub(super) fn async_copy(&mut self, thread: u32, to: u32, from: *const u8) -> Result<(), Violation> {
        self.memory.check(from as usize, ASYNC_COPY as usize, ASYNC_COPY, false)?;
        self.shared.async_copy_issued(&self.causality[thread as usize], to, ASYNC_COPY)?;
        self.async_copies[thread as usize].open.push((to, from));
        Ok(())
    }

    pub(super) fn async_commit(&mut self, thread: u32) {
        let copies = &mut self.async_copies[thread as usize];
        let group = core::mem::take(&mut copies.open);
        copies.groups.push_back(group);
    }

    /// All groups of a thread but the last `pending` land, which is as late as they may.
    pub(super) fn async_wait(&mut self, thread: u32, pending: u32) {
        let now = self.now(thread);
        let copies = &mut self.async_copies[thread as usize];
        let over = copies.groups.len().saturating_sub(pending as usize);
        for (to, from) in copies.groups.drain(..over).flatten() {
            // SAFETY: the range was checked against the buffers when the copy was issued, and they outlive the launch.
            let bytes = unsafe { core::slice::from_raw_parts(from, ASYNC_COPY as usize) };
            self.shared.async_copy_landed(now, to, bytes);
        }
    }

    // Named barriers. Waiting ones return the round that has to pass.

    pub(super) fn named_arrive(
        &mut self,
        thread: u32,
        id: u32,
        threads: u32,
        waits: bool,
    ) -> Result<Option<u64>, Violation> {
        if threads != self.threads && (threads == 0 || !threads.is_multiple_of(32)) {
            return Err(Violation::BarrierCount { id, threads, others: threads });
        }
        let known = &self.causality[thread as usize];
        let named = &mut self.named[id as usize];
        let woken = named.arrive(id, threads, known, waits.then_some(thread))?;
        self.tick(thread);
        let named = &self.named[id as usize];
        match woken {
            Some(woken) => {
                self.queue.wake(&woken);
                named.acquire(&mut self.causality[thread as usize]);
                Ok(None)
            }
            None => Ok(waits.then_some(named.round)),
        }
    }

    pub(super) fn named_passed(&mut self, thread: u32, id: u32, round: u64) -> bool {
        let named = &self.named[id as usize];
        let passed = named.round > round;
        if passed {
            named.acquire(&mut self.causality[thread as usize]);
        }
        passed
    }

    // Warp collectives.

    pub(super) fn warp_bring(
        &mut self,
        thread: u32,
        operation: (&str, u32),
        value: Brought,
        ordered: bool,
    ) -> Result<u64, Violation> {
        let warp = &mut self.warps[thread as usize / 32];
        let round = warp.round;
        let known = ordered.then_some(&self.causality[thread as usize]);
        if let Some(woken) = warp.bring(thread, operation, value, known)? {
            self.queue.wake(&woken);
        }
        if ordered {
            self.tick(thread);
        }
        Ok(round)
    }

    pub(super) fn warp_result(&mut self, thread: u32, round: u64) -> Option<[Brought; 32]> {
        let warp = &self.warps[thread as usize / 32];
        if warp.round == round {
            return None;
        }
        let (values, completed) = warp.result();
        self.causality[thread as usize].join(completed);
        Some(*values)
    }

    // Warpgroups.

    /// The warpgroup of a thread, its place in it, and the rest that its instructions touch.
    pub(super) fn warpgroup(&mut self, thread: u32) -> (&mut Warpgroup, usize, &mut Causality, &mut Shared) {
        let Self { warpgroups, causality, shared, .. } = self;
        let (group, me) = (thread as usize / warpgroup::THREADS, thread as usize % warpgroup::THREADS);
        (&mut warpgroups[group], me, &mut causality[thread as usize], shared)
    }

    pub(super) fn wake_warpgroup(&mut self, thread: u32, woken: &[u32]) {
        let first = thread / 128 * 128;
        self.queue.wake(&woken.iter().map(|t| first + t).collect::<Vec<_>>());
    }

    /// The actor that stands for what a thread's warp reads in products.
    pub(super) fn warp_actor(&self, thread: u32) -> u16 {
        (self.threads + thread / 32) as u16
    }

    /// `setmaxnreg`: the warpgroup meets; returns the round that has to pass.
    pub(super) fn registers_arrive(&mut self, thread: u32, to: u32, claim: bool) -> Result<u64, Violation> {
        let group = thread as usize / 128;
        let from = self.registers[group];
        let fail = |rule| Err(Violation::Registers { from, to, rule });
        if !(24..=256).contains(&to) || !to.is_multiple_of(8) {
            return fail("a multiple of 8 in 24..=256");
        }
        if claim && to < from || !claim && to > from {
            return fail("inc must not shrink and dec must not grow");
        }
        let meeting = &mut self.reallocations[group];
        if meeting.arrived > 0 && meeting.to != to {
            return fail("the threads of a warpgroup must agree");
        }
        meeting.to = to;
        meeting.arrived += 1;
        let round = meeting.round;
        self.reallocate();
        if !self.registers_passed(thread, round) {
            self.reallocations[group].waiters.push(thread);
        }
        Ok(round)
    }

    /// Serves every warpgroup that is complete and whose registers are there.
    fn reallocate(&mut self) {
        // Those that give back first.
        let mut order: Vec<usize> = (0..self.registers.len()).collect();
        order.sort_by_key(|g| self.reallocations[*g].to);
        for group in order {
            let size = 128.min(self.threads - group as u32 * 128);
            let (meeting, had) = (&mut self.reallocations[group], &mut self.registers[group]);
            let (before, after) = (*had * size, meeting.to * size);
            if meeting.arrived == size && self.free_registers + before >= after {
                self.free_registers = self.free_registers + before - after;
                *had = meeting.to;
                meeting.arrived = 0;
                meeting.round += 1;
                self.queue.wake(&core::mem::take(&mut meeting.waiters));
            }
        }
    }

    pub(super) fn registers_passed(&self, thread: u32, round: u64) -> bool {
        self.reallocations[thread as usize / 128].round > round
    }

    // The end.

    pub(super) fn deadlock(&self) -> Violation {
        let mut sets: Vec<Waiting> = Vec::new();
        for (thread, wait) in self.waiting.iter().enumerate() {
            let Some(Wait { operation, at }) = wait else { continue };
            match sets.iter_mut().find(|s| s.operation == *operation && s.at == Some(at)) {
                Some(set) => set.threads.push(thread as u32),
                None => sets.push(Waiting {
                    operation: operation.clone(),
                    at: Some(at),
                    threads: vec![thread as u32],
                }),
            }
        }
        Violation::Deadlock(sets)
    }

    /// What the block may not end with.
    pub(super) fn check_end(&self) -> Result<(), Violation> {
        if let Some(copy) = self.copies.first() {
            let text = std::format!("a bulk copy to {:#x} in flight, which no thread waited for", copy.to);
            return Err(Violation::LeftInFlight(text));
        }
        let open = |c: &AsyncCopies| c.groups.iter().flatten().chain(&c.open).next().map(|(to, _)| *to);
        if let Some(to) = self.async_copies.iter().find_map(open) {
            let text = std::format!("a cp.async to {to:#x} in flight, which its thread did not wait for");
            return Err(Violation::LeftInFlight(text));
        }
        let left = self.warpgroups.iter().find_map(Warpgroup::left).or_else(|| self.tensor.left());
        left.map_or(Ok(()), |l| Err(Violation::LeftInFlight(l)))
    }
}
