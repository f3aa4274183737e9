//! What happens to values between the formats: probabilities, rotations, means and units.
//!
//! Each function fixes the order of its floating-point operations, so that a GPU kernel with the same
//! order gives the same bits.

pub mod exp2;
pub mod expcast;
pub mod hadamard;
pub mod mean;
pub mod rope;
pub mod units;
