//! Barriers: mbarriers in shared memory (PTX ISA 9.7.13.15) and the 16 named ones of a block (9.7.13.1).

use super::clock::{Causality, Epoch};
use super::fault::Violation;
use std::vec::Vec;

/// The transaction count of an mbarrier stays within this.
const MAX_TRANSACTIONS: i64 = (1 << 20) - 1;

/// An initialized mbarrier.
pub(super) struct MBarrier {
    address: u32,
    /// Actor of the bulk copies that report here; its clock counts phases.
    pub(super) actor: u16,
    expected: u32,
    pending: u32,
    transactions: i64,
    phase: u32,
    /// What the arrivals of this phase have seen.
    arrivals: Causality,
    /// The same of the last complete phase.
    completed: Causality,
    pub(super) waiters: Vec<u32>,
    /// Waiters of the last phase that have not looked since it completed.
    woken: Vec<u32>,
    pub(super) init: Epoch,
    /// Whether the asynchronous proxy may use it.
    pub(super) published: bool,
}

impl MBarrier {
    pub(super) fn new(address: u32, actor: u16, expected: u32, init: Epoch) -> Result<Self, Violation> {
        if !(1..1 << 20).contains(&expected) {
            return Err(Violation::BarrierInit(address));
        }
        Ok(Self {
            address,
            actor,
            expected,
            pending: expected,
            transactions: 0,
            phase: 0,
            arrivals: Causality::default(),
            completed: Causality::default(),
            waiters: Vec::new(),
            woken: Vec::new(),
            init,
            published: false,
        })
    }

    /// One arrival that expects `bytes` copied bytes; returns whom it wakes.
    pub(super) fn arrive(&mut self, known: &Causality, bytes: u32) -> Result<Vec<u32>, Violation> {
        if self.pending == 0 {
            return Err(Violation::TooManyArrivals(self.address));
        }
        self.arrivals.join(known);
        self.transactions += i64::from(bytes);
        self.pending -= 1;
        self.settle()
    }

    /// The moment at which a copy that completes now writes: what completes this phase has seen it.
    pub(super) fn copy_epoch(&self) -> Epoch {
        Epoch { actor: self.actor, clock: self.phase + 1 }
    }

    /// `bytes` bytes have landed.
    pub(super) fn copied(&mut self, bytes: u32) -> Result<Vec<u32>, Violation> {
        self.transactions -= i64::from(bytes);
        self.settle()
    }

    fn settle(&mut self) -> Result<Vec<u32>, Violation> {
        if self.transactions.abs() > MAX_TRANSACTIONS {
            return Err(Violation::TransactionCount(self.address));
        }
        if self.pending > 0 || self.transactions != 0 {
            return Ok(Vec::new());
        }
        if !self.woken.is_empty() {
            return Err(Violation::PhaseMissed(self.address));
        }
        self.phase += 1;
        self.pending = self.expected;
        self.arrivals.seen.set(self.actor, self.phase);
        self.completed = core::mem::take(&mut self.arrivals);
        self.woken = core::mem::take(&mut self.waiters);
        Ok(self.woken.clone())
    }

    /// Whether the phase of this parity is complete, for `thread`, which takes over what completed it.
    pub(super) fn test(&mut self, thread: u32, parity: u32, known: &mut Causality) -> bool {
        self.woken.retain(|t| *t != thread);
        let complete = self.phase & 1 != parity & 1;
        if complete {
            known.join(&self.completed);
        } else if !self.waiters.contains(&thread) {
            self.waiters.push(thread);
        }
        complete
    }
}

/// One of the 16 barriers of a block.
#[derive(Default)]
pub(super) struct Named {
    /// Threads that this round takes, known from the first arrival.
    threads: u32,
    arrived: u32,
    arrivals: Causality,
    /// What the last round had seen.
    completed: Causality,
    waiters: Vec<u32>,
    /// Rounds that are complete.
    pub(super) round: u64,
}

impl Named {
    /// One arrival; returns whom it wakes if it is the last of its round.
    pub(super) fn arrive(
        &mut self,
        id: u32,
        threads: u32,
        known: &Causality,
        waiter: Option<u32>,
    ) -> Result<Option<Vec<u32>>, Violation> {
        let others = if self.arrived == 0 { threads } else { self.threads };
        if threads != others {
            return Err(Violation::BarrierCount { id, threads, others });
        }
        self.threads = threads;
        self.arrived += 1;
        self.arrivals.join(known);
        if self.arrived < threads {
            self.waiters.extend(waiter);
            return Ok(None);
        }
        self.arrived = 0;
        self.round += 1;
        self.completed = core::mem::take(&mut self.arrivals);
        Ok(Some(core::mem::take(&mut self.waiters)))
    }

    /// Takes over what the last round had seen.
    pub(super) fn acquire(&self, known: &mut Causality) {
        known.join(&self.completed);
    }
}
