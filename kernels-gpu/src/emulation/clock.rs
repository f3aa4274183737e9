//! Happens-before: who has seen which write, kept with vector clocks.
//!
//! An *actor* is a thread, the reads that a warp's products do on its behalf, what the tcgen05 products of a warp do, or
//! the writes of the bulk copies of one mbarrier. Every access is an [`Epoch`] of its actor; barriers carry what their arrivals had seen to those
//! that wait.

use std::vec::Vec;

/// A moment of an actor; clock 0 is before everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Epoch {
    pub(super) actor: u16,
    pub(super) clock: u32,
}

/// The latest moment of every actor that is known.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Vec<u32>);

impl Clock {
    pub(super) fn get(&self, actor: u16) -> u32 {
        self.0.get(usize::from(actor)).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, actor: u16, clock: u32) {
        let actor = usize::from(actor);
        if self.0.len() <= actor {
            self.0.resize(actor + 1, 0);
        }
        self.0[actor] = clock;
    }

    pub(super) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(a, &b)| *a = (*a).max(b));
    }

    pub(super) fn knows(&self, epoch: Epoch) -> bool {
        self.get(epoch.actor) >= epoch.clock
    }
}

/// What is ordered before a thread's next operation, or before a barrier's completion.
#[derive(Clone, Debug, Default)]
pub(super) struct Causality {
    /// In any proxy.
    pub(super) seen: Clock,
    /// With a `fence.proxy.async` on the way: what the asynchronous proxy may rely on. The PTX memory model asks
    /// for the fence anywhere along the path that orders the two accesses ("proxy-preserved base causality").
    pub(super) fenced: Clock,
    /// Operations of tcgen05 that are complete and fenced: what `tcgen05.fence::after_thread_sync` may rely on.
    pub(super) tensor: Clock,
}

impl Causality {
    pub(super) fn join(&mut self, other: &Self) {
        self.seen.join(&other.seen);
        self.fenced.join(&other.fenced);
        self.tensor.join(&other.tensor);
    }

    /// `fence.proxy.async`.
    pub(super) fn fence(&mut self) {
        let Self { seen, fenced, .. } = self;
        fenced.join(seen);
    }
}
