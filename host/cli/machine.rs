//! Where a command computes: the choice between the CPU and a GPU, and calls on what was chosen.

use clap::{Args, ValueEnum};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
#[cfg(feature = "cuda")]
use vc_attention::backend::cuda::{self, Cuda};
use vc_attention::{Error, Output, Plan, Problem, Recipe, Report};

use super::failure::{Failure, Result};

/// Runs on a GPU whose median counts, after the one that computes.
#[cfg(feature = "cuda")]
const TIMED_RUNS: usize = 5;

/// Options of the commands that compute.
#[derive(Args)]
#[command(next_help_heading = "Machine")]
pub struct Machine {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = BackendName::Auto, env = "VCA_BACKEND", hide_env_values = true)]
    backend: BackendName,
    /// Which GPU; the first that the kernels run on when absent.
    #[arg(long, value_name = "N")]
    device: Option<usize>,
    /// Threads of the CPU; all cores when absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Seed of everything random: the start of the k-means, made-up values.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// a GPU that the kernels run on, else the CPU
    Auto,
    Cpu,
    /// a GPU or failure
    Cuda,
}

/// What a command computes on.
pub enum Processor {
    Cpu,
    #[cfg(feature = "cuda")]
    Gpu(Cuda),
}

/// A finished call.
pub struct Finished {
    pub output: Output,
    /// On a GPU the times are its own, without the way of the tensors there and back.
    pub report: Report,
    /// Whether the CPU computed it, on whatever processor it was asked for.
    pub on_cpu: bool,
}

impl Machine {
    /// Sets up the threads of the CPU, which has work to do in any case.
    pub fn threads(&self) -> Result<()> {
        let Some(threads) = self.threads else { return Ok(()) };
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global()
            .map_err(|error| Failure::failed(format!("{threads} threads: {error}")))
    }

    /// Whether only a GPU will do.
    pub fn insists_on_gpu(&self) -> bool {
        self.backend == BackendName::Cuda
    }

    /// Sets the threads up and chooses the processor.
    pub fn processor(&self) -> Result<Processor> {
        self.threads()?;
        match self.backend {
            BackendName::Cpu => Ok(Processor::Cpu),
            BackendName::Auto => Ok(self.first_gpu()),
            BackendName::Cuda => self.gpu().map_err(|error| {
                Failure::from(error).with_hint(
                    "--backend cpu runs the same recipes; `vca doctor` shows what this machine has",
                )
            }),
        }
    }

    /// Reads a recipe; [`Machine::seed`] goes into its k-means unless the recipe names a seed itself.
    pub fn recipe(&self, text: &str) -> Result<Recipe> {
        let mut recipe = Recipe::parse(text)?;
        if !text.contains("+seed=") {
            recipe.grouping.seed = self.seed;
        }
        Ok(recipe)
    }

    pub fn recipes(&self, texts: &[String]) -> Result<Vec<Recipe>> {
        texts.iter().map(|text| self.recipe(text)).collect()
    }
}

#[cfg(feature = "cuda")]
impl Machine {
    /// The GPU that was asked for, or the first that the kernels run on; why not, otherwise.
    fn gpu(&self) -> Result<Processor, Error> {
        if let Some(ordinal) = self.device {
            return Cuda::new(ordinal).map(Processor::Gpu);
        }
        let gpus = cuda::gpus()?;
        let mut refusal = Error::Device { reason: "the CUDA driver is here and finds no GPU".into() };
        for (tried, gpu) in gpus.iter().enumerate() {
            match Cuda::new(gpu.ordinal) {
                Ok(gpu) => return Ok(Processor::Gpu(gpu)),
                Err(error) if tried == 0 => refusal = error,
                Err(_) => {}
            }
        }
        Err(refusal)
    }

    /// A GPU if there is one, else the CPU; a word about it when there might have been one.
    fn first_gpu(&self) -> Processor {
        if !cuda::driver_present() {
            return Processor::Cpu;
        }
        self.gpu().unwrap_or_else(|error| {
            super::failure::note(&format!("{error}; computing on the CPU"));
            Processor::Cpu
        })
    }
}

#[cfg(not(feature = "cuda"))]
impl Machine {
    fn gpu(&self) -> Result<Processor, Error> {
        Err(Error::Device { reason: "this build has no CUDA backend (the cargo feature `cuda`)".into() })
    }

    fn first_gpu(&self) -> Processor {
        Processor::Cpu
    }
}

impl Processor {
    /// `cpu` or `cuda`.
    pub fn name(&self) -> &'static str {
        match self {
            Processor::Cpu => Cpu.name(),
            #[cfg(feature = "cuda")]
            Processor::Gpu(gpu) => gpu.name(),
        }
    }

    /// The device in words.
    pub fn device(&self) -> String {
        match self {
            Processor::Cpu => Cpu.device(),
            #[cfg(feature = "cuda")]
            Processor::Gpu(gpu) => gpu.device(),
        }
    }

    pub fn is_gpu(&self) -> bool {
        !matches!(self, Processor::Cpu)
    }

    /// A whole call.
    pub fn run(&self, plan: &Plan, problem: &Problem) -> vc_attention::Result<Finished> {
        match self {
            Processor::Cpu => {
                let run = vc_attention::run(&Cpu, plan, problem, None)?;
                Ok(Finished { output: run.output, report: run.report, on_cpu: true })
            }
            #[cfg(feature = "cuda")]
            Processor::Gpu(gpu) => {
                let run = vc_attention::run(gpu, plan, problem, None)?;
                // Scores beyond f16 have no kernel: the backend turns to the CPU, whose time it then takes.
                let on_cpu = run.output.observed.f32_fallbacks > 0;
                let report = if on_cpu { run.report } else { gpu.time(&run.order, TIMED_RUNS)? };
                Ok(Finished { output: run.output, report, on_cpu })
            }
        }
    }
}

/// Whether an error on a GPU says that its kernels do not take this recipe or these tensors.
///
/// A [`Plan`] has checked both for the method itself, so what a backend still refuses is a limit of its own.
pub fn is_limit_of_gpu(error: &Error) -> bool {
    matches!(error, Error::Recipe { .. } | Error::Tensor { .. })
}
