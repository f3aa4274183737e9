//! `vca doctor`: what this machine and this build have.

use std::fs;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;
use vc_attention::{Layout, Recipe};

use super::failure::{Result, print};
use super::input::title;
use super::output;
use super::table::{figure, table, thousands, time};
use crate::data;

const EXAMPLES: &str = "\
Examples:
  vca doctor
  vca doctor --json";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    target: &'static str,
    rustc: &'static str,
    /// What `--backend auto` takes.
    backend: &'static str,
    device: String,
    cpu_features: Vec<&'static str>,
    threads: usize,
    cuda: Cuda,
    bundled_input: String,
    recipes: Vec<String>,
    default_recipe: String,
    missing: Vec<String>,
}

/// What there is of CUDA.
#[derive(Default, Serialize)]
struct Cuda {
    /// Whether this build can use a GPU.
    built: bool,
    /// Version of the NVIDIA kernel driver, where one is loaded.
    driver: Option<String>,
    /// CUDA version that the driver's library serves.
    driver_cuda: Option<String>,
    /// Kernels in this binary.
    embedded: Vec<Embedded>,
    /// Which GPU runs what.
    dispatch: Vec<Row>,
    gpus: Vec<Gpu>,
    /// The GPU that `--backend auto` takes, with the kernels as its driver built them.
    loaded: Option<Loaded>,
}

/// One architecture's kernels in this binary.
#[derive(Serialize)]
struct Embedded {
    arch: &'static str,
    kernels: usize,
    min_cuda: &'static str,
    min_driver: &'static str,
}

/// GPUs that are served alike, by one of their modules.
#[derive(Clone, Serialize)]
struct Row {
    compute_capabilities: Vec<String>,
    gpus: &'static str,
    /// Architecture of their kernels; none where they are not supported.
    arch: Option<&'static str>,
    recipes: Vec<&'static str>,
    default_recipe: Option<&'static str>,
    /// Whether the kernels that this machine's GPU loaded are these.
    runs_here: bool,
    /// What is known of the kernels, or why there are none.
    state: String,
}

/// A GPU that the driver lists.
#[derive(Serialize)]
struct Gpu {
    ordinal: usize,
    name: String,
    compute_capability: String,
    memory_gib: f64,
}

/// The kernels on a GPU.
#[derive(Serialize)]
struct Loaded {
    ordinal: usize,
    multiprocessors: u32,
    /// Time in which the driver assembled and loaded the kernels; it keeps what it assembled for the next time.
    load_ms: f64,
    kernels: Vec<Kernel>,
}

/// A kernel as the driver built it.
#[derive(Serialize)]
struct Kernel {
    name: &'static str,
    threads: u32,
    registers: i32,
    /// Local memory a thread: spills.
    local_bytes: i32,
    static_shared: i32,
    dynamic_shared: u32,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let report = report()?;
    if arguments.json {
        return print(&output::json(&report)?);
    }
    print(&text(&report))
}

fn report() -> Result<Report> {
    let file = data::open()?;
    let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
    let shape = vc_attention::Problem::new(q, k, v).validate()?;
    let mut missing = Vec::new();
    let (cuda, device) = cuda(&mut missing);
    if !cpu_features().contains(&"fma") {
        missing.push("The processor has no fused multiply-add: expect several times the usual time.".into());
    }
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        target: env!("VCA_TARGET"),
        rustc: env!("VCA_RUSTC"),
        backend: if cuda.loaded.is_some() { "cuda" } else { Cpu.name() },
        device: device.unwrap_or_else(|| Cpu.device()),
        cpu_features: cpu_features(),
        threads: rayon::current_num_threads(),
        cuda,
        bundled_input: title(data::NAME, &shape),
        recipes: super::recipe_names(),
        // The same on every processor that the kernels or the emulation run on.
        default_recipe: Recipe::default_for_cpu().name,
        missing,
    })
}

/// Without the backend there is nothing to ask.
#[cfg(not(feature = "cuda"))]
fn cuda(missing: &mut Vec<String>) -> (Cuda, Option<String>) {
    let here = driver().map_or_else(String::new, |version| format!(" A GPU's driver ({version}) is here."));
    missing.push(format!(
        "This build has no CUDA backend: everything runs on the CPU.{here} Build with the cargo feature `cuda`."
    ));
    (Cuda { driver: driver(), ..Cuda::default() }, None)
}

/// What there is of CUDA and, where the kernels run, the device in words.
#[cfg(feature = "cuda")]
fn cuda(missing: &mut Vec<String>) -> (Cuda, Option<String>) {
    use vc_attention::backend::cuda;

    let images = cuda::images();
    let mut found = Cuda {
        built: true,
        driver: driver(),
        embedded: images
            .iter()
            .map(|image| {
                let (min_cuda, min_driver) = image.needs();
                let kernels = image.ptx().matches(".visible .entry ").count();
                Embedded { arch: image.arch, kernels, min_cuda, min_driver }
            })
            .collect(),
        dispatch: cuda::TABLE.iter().flat_map(rows).collect(),
        ..Cuda::default()
    };
    if images.is_empty() {
        missing.push(
            "This binary holds no kernels: everything runs on the CPU. Build with kernels-gpu/ptx there."
                .into(),
        );
    }
    if !cuda::driver_present() {
        missing.push(no_driver(&found));
        return (found, None);
    }
    match cuda::driver_version() {
        Ok(version) => found.driver_cuda = Some(format!("{}.{}", version / 1000, version % 1000 / 10)),
        Err(error) => missing.push(format!("{error}.")),
    }
    let gpus = match cuda::gpus() {
        Ok(gpus) => gpus,
        Err(error) => {
            missing.push(format!(
                "{error}: everything runs on the CPU. In a container, GPUs have to be handed in (`--gpus all`)."
            ));
            return (found, None);
        }
    };
    if gpus.is_empty() {
        missing.push(
            "The driver's library is here and finds no GPU (CUDA_VISIBLE_DEVICES hides them if it is empty): \
             everything runs on the CPU."
                .into(),
        );
    }
    let mut device = None;
    for gpu in gpus {
        if found.loaded.is_none() {
            match cuda::Cuda::new(gpu.ordinal) {
                Ok(opened) => {
                    if let Err(error) = opened.gpu().load_all() {
                        missing.push(format!("GPU {}: {error}.", gpu.ordinal));
                    }
                    device = Some(opened.device());
                    let (major, minor) = gpu.capability;
                    let mine = format!("{major}.{minor}");
                    for row in &mut found.dispatch {
                        row.runs_here = row.compute_capabilities.contains(&mine);
                    }
                    found.loaded = Some(loaded(gpu.ordinal, opened.gpu(), missing));
                }
                Err(error) => missing.push(format!("GPU {}: {error}.", gpu.ordinal)),
            }
        }
        found.gpus.push(Gpu {
            ordinal: gpu.ordinal,
            name: gpu.name,
            compute_capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
            memory_gib: (gpu.memory as f64 / f64::from(1 << 30) * 10.0).round() / 10.0,
        });
    }
    (found, device)
}

/// A row of the dispatch table, module by module.
#[cfg(feature = "cuda")]
fn rows(row: &vc_attention::backend::cuda::Row) -> Vec<Row> {
    let unsupported = Row {
        compute_capabilities: row.capabilities.iter().map(|(x, y)| format!("{x}.{y}")).collect(),
        gpus: row.gpus,
        arch: None,
        recipes: Vec::new(),
        default_recipe: None,
        runs_here: false,
        state: String::new(),
    };
    let kernels = match row.kernels {
        Ok(kernels) => kernels,
        Err(why) => return vec![Row { state: format!("not supported: {why}"), ..unsupported }],
    };
    let module = |(index, module): (usize, &vc_attention::backend::cuda::Module)| Row {
        arch: Some(module.arch),
        recipes: kernels.recipes(index),
        default_recipe: Some(kernels.default_recipe),
        state: module.state.describe(),
        ..unsupported.clone()
    };
    kernels.modules.iter().enumerate().map(module).collect()
}

/// What to do where there is no driver library.
#[cfg(feature = "cuda")]
fn no_driver(found: &Cuda) -> String {
    let oldest = found.embedded.iter().map(|image| format!("{} for {}", image.min_driver, image.arch));
    let oldest = oldest.collect::<Vec<_>>().join(", ");
    match &found.driver {
        Some(version) => format!(
            "NVIDIA's kernel driver {version} is loaded, but its library libcuda is not found: everything runs on \
             the CPU. In a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere, put \
             libcuda.so.1 on the loader's path."
        ),
        None => format!(
            "This machine has no NVIDIA driver (libcuda): everything runs on the CPU. A GPU needs NVIDIA's driver, at \
             least {oldest}; nothing else of CUDA."
        ),
    }
}

/// Reads the kernels back as the driver built them.
#[cfg(feature = "cuda")]
fn loaded(ordinal: usize, device: &vc_attention::backend::cuda::Device, missing: &mut Vec<String>) -> Loaded {
    let kernels: Vec<Kernel> = device
        .functions()
        .map(|function| Kernel {
            name: function.entry.name,
            threads: function.entry.threads,
            registers: function.registers,
            local_bytes: function.local_bytes,
            static_shared: function.static_shared,
            dynamic_shared: function.entry.dynamic_shared,
        })
        .collect();
    let spills: Vec<_> = kernels.iter().filter(|kernel| kernel.local_bytes > 0).map(|k| k.name).collect();
    if !spills.is_empty() {
        missing.push(format!(
            "As this driver builds them, these kernels keep registers in memory and are slower than they should be: \
             {}. Another driver may do better; please report it.",
            spills.join(", ")
        ));
    }
    Loaded {
        ordinal,
        multiprocessors: device.multiprocessors(),
        load_ms: super::table::milliseconds(device.load_time()),
        kernels,
    }
}

/// What Linux says about a loaded NVIDIA kernel driver.
fn driver() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(version).map(Into::into)
}

/// The vector features that the CPU backend's dependencies choose their code by.
#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    [
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512fp16", is_x86_feature_detected!("avx512fp16")),
    ]
    .into_iter()
    .filter_map(|(name, here)| here.then_some(name))
    .collect()
}

/// The vector features that the CPU backend's dependencies choose their code by.
#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<&'static str> {
    // NEON, with its fused multiply-add, is part of the architecture.
    vec!["neon", "fma"]
}

/// The vector features that the CPU backend's dependencies choose their code by.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}

fn text(report: &Report) -> String {
    let cuda = &report.cuda;
    let driver = match (&cuda.driver, &cuda.driver_cuda) {
        (None, None) => "none found".into(),
        (kernel, library) => {
            let kernel = kernel.as_deref().unwrap_or("version unknown");
            library.as_ref().map_or(kernel.into(), |version| format!("{kernel}, serves CUDA {version}"))
        }
    };
    let mut lines = vec![
        ("version", format!("vca {} for {}, {}", report.version, report.target, report.rustc)),
        ("backend", format!("{}: {}", report.backend, report.device)),
        ("processor", format!("{} threads, {}", report.threads, report.cpu_features.join(", "))),
        ("cuda", if cuda.built { "built in" } else { "not in this build" }.into()),
    ];
    lines.extend(cuda.embedded.iter().map(|image| {
        let text = format!(
            "{} kernels for {}, CUDA {}, driver {} or newer",
            image.kernels, image.arch, image.min_cuda, image.min_driver
        );
        ("embedded", text)
    }));
    lines.push(("driver", driver));
    lines.extend(cuda.gpus.iter().map(|gpu| {
        let Gpu { ordinal, name, compute_capability, memory_gib } = gpu;
        ("gpu", format!("{ordinal}: {name}, compute capability {compute_capability}, {memory_gib} GiB"))
    }));
    lines.extend(cuda.loaded.iter().map(|loaded| {
        let Loaded { ordinal, multiprocessors, load_ms, .. } = loaded;
        let text = format!(
            "on GPU {ordinal} ({multiprocessors} multiprocessors) in {}",
            time(Duration::from_secs_f64(load_ms / 1e3))
        );
        ("loaded", text)
    }));
    lines.extend([
        ("bundled input", report.bundled_input.clone()),
        ("recipes", report.recipes.join(", ")),
        ("default recipe", report.default_recipe.clone()),
    ]);
    let bold = anstyle::Style::new().bold();
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{bold}{name:15}{bold:#} {value}\n")).collect();
    if let Some(loaded) = &cuda.loaded {
        let head = ["kernel as the driver built it", "threads", "registers", "local bytes", "shared bytes"];
        let mut kernels = table(&head);
        for kernel in &loaded.kernels {
            let shared = kernel.static_shared.unsigned_abs() + kernel.dynamic_shared;
            let figures =
                [kernel.threads.to_string(), kernel.registers.to_string(), kernel.local_bytes.to_string()];
            let mut row = vec![kernel.name.into()];
            row.extend(figures.map(figure));
            row.push(figure(thousands(shared as usize)));
            kernels.add_row(row);
        }
        text += &format!("\n{kernels}\n");
    }
    if !cuda.dispatch.is_empty() {
        text += "\nWhich GPU runs what (other recipes run on the CPU)\n";
    }
    for row in &cuda.dispatch {
        let capabilities = row.compute_capabilities.join(", ");
        let state = if row.runs_here { format!("runs here; {}", row.state) } else { row.state.clone() };
        text += &format!("  {} (compute capability {capabilities}): {state}\n", row.gpus);
        if let (Some(arch), Some(default)) = (row.arch, row.default_recipe) {
            let recipes = row.recipes.join(", ");
            text += &format!("    kernels for {arch}; {recipes}; default {default}\n");
        }
    }
    text += "\nWhat is missing\n";
    if report.missing.is_empty() {
        text += "  nothing\n";
    }
    text.extend(report.missing.iter().map(|line| format!("  {line}\n")));
    text
}
