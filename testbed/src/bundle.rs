//! The trained model, and what PyTorch made of it (`data/README.md` says where both come from).

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use safetensors::SafeTensors;

use crate::model::{Config, Model};
use crate::prompt::{Prompt, noise};
use crate::sampler::Sampler;

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
    /// The folder that the repository keeps them in, as this program was built.
    pub fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("data")
    }

    /// Reads `model.safetensors` in `folder` onto a device, and `reference.safetensors` into host memory.
    ///
    /// # Errors
    /// When a file is missing or not what it should be.
    pub fn open(folder: &Path, device: &Device) -> Result<Self> {
        let path = folder.join("model.safetensors");
        let weights = fs::read(&path).with_context(|| path.display().to_string())?;
        Self::read(&weights, &folder.join("reference.safetensors"), device)
            .with_context(|| path.display().to_string())
    }

    fn read(weights: &[u8], reference: &Path, device: &Device) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(weights)?;
        let metadata = header.metadata().as_ref().context("weights without metadata")?;
        let entry = |key: &str| metadata.get(key).with_context(|| format!("weights without `{key}`"));
        let config: Config = serde_json::from_str(entry("config")?)?;
        let weights = VarBuilder::from_slice_safetensors(weights, DType::F32, device)?;
        Ok(Self {
            model: Model::new(config, &weights)?,
            sampler: serde_json::from_str(entry("sampler")?)?,
            prompts: serde_json::from_str(entry("prompts")?)?,
            reference: candle_core::safetensors::load(reference, &Device::Cpu)?,
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

    /// A tensor that the reference must have.
    ///
    /// # Errors
    /// When it does not.
    pub fn required(&self, name: &str) -> Result<&Tensor> {
        self.reference(name).with_context(|| format!("reference.safetensors has no `{name}`"))
    }
}
