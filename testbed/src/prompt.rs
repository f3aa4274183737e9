//! What a clip shows: five factors, and the noise that it starts from.

use std::fmt;

use candle_core::{Device, Tensor};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use serde::Deserialize;

const COLORS: [&str; 6] = ["red", "green", "blue", "yellow", "magenta", "white"];
const BACKGROUNDS: [&str; 5] =
    ["a gradient", "drifting stripes", "a drifting checkerboard", "moving blobs", "a panning photograph"];
const SHAPES: [&str; 3] = ["disc", "square", "ring"];
const DIRECTIONS: [&str; 8] =
    ["right", "up-right", "up", "up-left", "left", "down-left", "down", "down-right"];

/// The factors of a clip, as indices into the model's embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Prompt {
    digit: usize,
    color: usize,
    background: usize,
    shape: usize,
    direction: usize,
}

impl Prompt {
    /// Names of the factors in the order of the embeddings, and their numbers of values.
    pub const FACTORS: [(&str, usize); 5] =
        [("digit", 10), ("color", 6), ("background", 5), ("shape", 3), ("direction", 8)];

    /// Prompt `index`: one of `stored` (those that the reference was made with), or beyond them a random one whose
    /// seed is the index.
    pub fn new(index: usize, stored: &[Prompt]) -> Self {
        stored.get(index).copied().unwrap_or_else(|| {
            let mut random = ChaCha8Rng::seed_from_u64(index as u64);
            let [digit, color, background, shape, direction] =
                Self::FACTORS.map(|(_, count)| random.random_range(0..count));
            Self { digit, color, background, shape, direction }
        })
    }

    /// Index of every factor.
    pub fn factors(&self) -> [usize; 5] {
        [self.digit, self.color, self.background, self.shape, self.direction]
    }
}

impl fmt::Display for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a {} digit {} moving {} over {}, with a {}",
            COLORS[self.color],
            self.digit,
            DIRECTIONS[self.direction],
            BACKGROUNDS[self.background],
            SHAPES[self.shape]
        )
    }
}

/// Standard normal noise of a clip's shape, from a seed.
///
/// # Errors
/// Of the device.
pub fn noise(shape: [usize; 4], seed: u64, device: &Device) -> candle_core::Result<Tensor> {
    let random = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = StandardNormal.sample_iter(random).take(shape.iter().product()).collect();
    Tensor::from_vec(values, shape.to_vec(), device)
}
