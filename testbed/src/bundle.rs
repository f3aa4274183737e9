//! The trained model inside this program, and what PyTorch made of it (`data/README.md` says where both come from).

use std::collections::HashMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use safetensors::SafeTensors;

use crate::model::{Config, Model};
use crate::prompt::{Prompt, noise};
use crate::sampler::Sampler;

const WEIGHTS: &[u8] = include_bytes!("../data/model.safetensors");
const REFERENCE: &[u8] = include_bytes!("../data/reference.safetensors");

/// Seed of the noise of prompt 0, beyond those that the reference brings along.
const NOISE_SEED: u64 = 1000;

/// The model with its sampler and prompts.
#[derive(Debug)]
pub struct Bundle {
    /// The network.
    pub model: Model,
    /// How the reference was sampled.
    pub sampler: Sampler,
    prompts: Vec<Prompt>,
    reference: HashMap<String, Tensor>,
}

impl Bundle {
    /// Unpacks weights and reference.
    ///
    /// # Errors
    /// When the files that were built in are not what they should be.
    pub fn open() -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(WEIGHTS)?;
        let metadata = header.metadata().as_ref().context("weights without metadata")?;
        let entry = |key: &str| metadata.get(key).with_context(|| format!("weights without `{key}`"));
        let config: Config = serde_json::from_str(entry("config")?)?;
        let weights = VarBuilder::from_slice_safetensors(WEIGHTS, DType::F32, &Device::Cpu)?;
        Ok(Self {
            model: Model::new(config, &weights)?,
            sampler: serde_json::from_str(entry("sampler")?)?,
            prompts: serde_json::from_str(entry("prompts")?)?,
            reference: candle_core::safetensors::load_buffer(REFERENCE, &Device::Cpu)?,
        })
    }

    /// Prompt `index`; see [`Prompt::new`].
    pub fn prompt(&self, index: usize) -> Prompt {
        Prompt::new(index, &self.prompts)
    }

    /// Start noise of prompt `index`: the reference's own where it has some.
    ///
    /// # Errors
    /// Of the device.
    pub fn noise(&self, index: usize) -> Result<Tensor> {
        match self.reference(&format!("noise.{index}")) {
            Some(noise) => Ok(noise.clone()),
            None => Ok(noise(self.model.config().clip(), NOISE_SEED + index as u64, &Device::Cpu)?),
        }
    }

    /// A tensor of the reference: `noise.P`, `bf16.P` and `fp32.P` (final clips of prompt P), `bf16_x.S` (state of
    /// prompt 0 behind step S).
    pub fn reference(&self, name: &str) -> Option<&Tensor> {
        self.reference.get(name)
    }
}
