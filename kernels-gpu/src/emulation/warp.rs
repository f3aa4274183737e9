//! What the 32 threads of a warp exchange.

use super::clock::Causality;
use super::fault::Violation;
use std::format;
use std::string::String;
use std::vec::Vec;

/// What a lane brings to an instruction: the operand registers of the largest product.
pub(super) type Brought = [u64; 3];

/// The meeting of a warp in one instruction: everybody brings a value and gets all of them.
#[derive(Default)]
pub(super) struct Warp {
    operation: (String, u32),
    arrived: u32,
    brought: [Brought; 32],
    arrivals: Causality,
    result: [Brought; 32],
    completed: Causality,
    waiters: Vec<u32>,
    /// Meetings that are over.
    pub(super) round: u64,
}

impl Warp {
    /// Brings `value`; returns whom it wakes if it is the last.
    pub(super) fn bring(
        &mut self,
        thread: u32,
        operation: (&str, u32),
        value: Brought,
        known: Option<&Causality>,
    ) -> Result<Option<Vec<u32>>, Violation> {
        if self.arrived == 0 {
            self.operation = (operation.0.into(), operation.1);
        } else if (self.operation.0.as_str(), self.operation.1) != operation {
            return Err(Violation::Diverged {
                expected: format!("`{} {}`", self.operation.0, self.operation.1),
                found: format!("`{} {}`", operation.0, operation.1),
            });
        }
        self.brought[thread as usize % 32] = value;
        self.arrived |= 1 << (thread % 32);
        if let Some(known) = known {
            self.arrivals.join(known);
        }
        if self.arrived != u32::MAX {
            self.waiters.push(thread);
            return Ok(None);
        }
        self.arrived = 0;
        self.round += 1;
        self.result = self.brought;
        self.completed = core::mem::take(&mut self.arrivals);
        Ok(Some(core::mem::take(&mut self.waiters)))
    }

    /// What all brought to the last meeting, and what they had seen.
    pub(super) fn result(&self) -> (&[Brought; 32], &Causality) {
        (&self.result, &self.completed)
    }
}
