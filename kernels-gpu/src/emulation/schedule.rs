//! Which thread runs next: any order is legal, so tests run several.

use std::collections::VecDeque;

/// In what order the threads of a block run; a thread runs until it has to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// The one that has been ready for longest; at the start thread 0.
    #[default]
    Oldest,
    /// The one that became ready last; at the start the highest. Some threads get far ahead of others.
    Newest,
    /// Any, by this seed.
    Random(u64),
}

/// The threads that can run.
pub(super) struct Queue {
    ready: VecDeque<u32>,
    schedule: Schedule,
    state: u64,
}

impl Queue {
    pub(super) fn new(threads: u32, schedule: Schedule) -> Self {
        let state = if let Schedule::Random(seed) = schedule { seed } else { 0 };
        Self { ready: (0..threads).collect(), schedule, state }
    }

    pub(super) fn wake(&mut self, threads: &[u32]) {
        self.ready.extend(threads);
    }

    pub(super) fn next(&mut self) -> Option<u32> {
        if self.ready.is_empty() {
            return None;
        }
        let i = self.pick(self.ready.len());
        self.ready.remove(i)
    }

    /// One of `count` that are ready, oldest first.
    pub(super) fn pick(&mut self, count: usize) -> usize {
        match self.schedule {
            Schedule::Oldest => 0,
            Schedule::Newest => count - 1,
            Schedule::Random(_) => {
                // SplitMix64.
                self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = self.state;
                z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
                ((z ^ z >> 31) % count as u64) as usize
            }
        }
    }
}
