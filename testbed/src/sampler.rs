//! The denoising loop: Euler steps on dx/dt = v(x, t) from noise (t = 1) to the clip (t = 0), with classifier-free
//! guidance as two calls a step.

use anyhow::Result;
use candle_core::Tensor;
use serde::Deserialize;

use crate::model::{Attend, Model};
use crate::prompt::Prompt;

/// How a clip is sampled; the defaults come with the weights.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Sampler {
    /// Denoising steps.
    pub steps: usize,
    /// Shift of the times toward noise, as in SD3 and Wan.
    pub shift: f32,
    /// Weight of the conditional velocity against the unconditional; at 1 there is no unconditional call.
    pub guidance: f32,
}

/// The two velocities of classifier-free guidance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Branch {
    /// With the prompt.
    Conditional = 0,
    /// Without.
    Unconditional = 1,
}

/// An attention that wants to know where in the loop it is called.
pub trait Stepped: Attend {
    /// The calls that follow are of this step and branch.
    fn enter(&mut self, step: usize, branch: Branch);
}

impl Sampler {
    /// Times of the states, from 1 down to 0, one more than steps.
    pub fn times(&self) -> Vec<f32> {
        let at = |i| 1.0 - i as f32 / self.steps as f32;
        (0..=self.steps).map(|i| self.shift * at(i) / (1.0 + (self.shift - 1.0) * at(i))).collect()
    }

    /// Denoises `noise`, [3, frames, height, width], on the model's device; `after` sees the state behind every step.
    ///
    /// # Errors
    /// Of the model or of `after`.
    pub fn sample(
        &self,
        model: &Model,
        prompt: &Prompt,
        noise: &Tensor,
        attention: &mut dyn Stepped,
        mut after: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let times = self.times();
        let mut x = noise.to_device(model.device())?;
        for step in 0..self.steps {
            let t = times[step];
            attention.enter(step, Branch::Conditional);
            let mut v = model.velocity(&x, t, Some(prompt), attention)?;
            if self.guidance != 1.0 {
                attention.enter(step, Branch::Unconditional);
                let free = model.velocity(&x, t, None, attention)?;
                v = (&free + ((v - &free)? * f64::from(self.guidance))?)?;
            }
            x = (x + (v * f64::from(times[step + 1] - t))?)?;
            after(step, &x)?;
        }
        Ok(x)
    }
}
