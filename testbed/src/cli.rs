//! The command line.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Device, Tensor};
use clap::{Args, Parser, Subcommand, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use vc_attention::Recipe;
use vc_attention::backend::cuda::{Cuda, DevicePlan, driver_present};
#[cfg(feature = "cuda")]
use vc_attention_candle::supports;
use vc_testbed::attention::{Compute, EXACT, RowAttention};
use vc_testbed::bundle::Bundle;
use vc_testbed::clip::{self, Distance};
use vc_testbed::model::Model;
use vc_testbed::picture::{self, Dot};
use vc_testbed::probe;
use vc_testbed::record::{self, Entry, Record, Setting};
use vc_testbed::row::{self, Row};
use vc_testbed::sampler::Sampler;
use vc_testbed::statistics::{FEWEST, Mean, Summary};

/// What every other row is compared with.
const REFERENCE: &str = EXACT;

#[derive(Parser)]
#[command(name = "vc-testbed", version, about, max_term_width = 100)]
struct Cli {
    /// Folder of the model's weights and reference [default: the repository's testbed/data].
    #[arg(long, global = true, value_name = "DIR")]
    data: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Denoise clips with low-bit attention and with exact attention from the same noise.
    ///
    /// Writes into the folder, for every prompt, the clip and an animation of every row, a sheet of frames, and a line
    /// of measurements in clips.jsonl; prints the table. What is there already, computed by the same backend, is not made
    /// again.
    #[command(after_long_help = format!("A row is a recipe of `vca` with @KEY=VALUE behind it:\n{}", row::KEYS))]
    Generate(Generate),
    /// Print the table of measurements made earlier, rows over all prompts.
    Table(Summarize),
    /// Show where recipes lose: errors by step and by layer along the reference's trajectory, call by call.
    Probe(Probe),
    /// Check this port of the model against what PyTorch made: states and clips at the noise floor of BF16.
    Check(Check),
}

#[derive(Args)]
struct Generate {
    /// Rows, separated by commas or given several times.
    #[arg(short, long = "recipe", value_delimiter = ',', default_value = "vc16-expcast", value_name = "ROW")]
    rows: Vec<Row>,
    /// Prompts: numbers and ranges (0,3,8-15); from 8 on they are random ones, seeded by their number.
    #[arg(short, long = "prompt", default_value = "0", value_name = "LIST", value_parser = list)]
    prompts: std::vec::Vec<usize>,
    /// Denoising steps.
    #[arg(short, long, default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=1000))]
    steps: u16,
    /// Weight of classifier-free guidance; 1 is without.
    #[arg(short, long, default_value_t = 1.5, value_name = "WEIGHT")]
    guidance: f32,
    /// Measure only: no clips, animations and sheets.
    #[arg(long)]
    no_pictures: bool,
    /// Where the attention runs; the rest of the model runs on the CPU, or with the feature `cuda` on the GPU too. `auto`:
    /// on a GPU where there is one, rows that its kernels do not cover on the CPU. `cuda`: on the GPU or not at all.
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    backend: BackendName,
    /// Folder for what comes out.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BackendName {
    Auto,
    Cpu,
    Cuda,
}

impl BackendName {
    /// The GPU, if one is wanted and there.
    fn gpu(self) -> Result<Option<Cuda>> {
        match self {
            BackendName::Cpu => Ok(None),
            BackendName::Cuda => {
                ensure!(driver_present(), "no CUDA driver on this machine: use --backend cpu");
                Ok(Some(Cuda::new(0)?))
            }
            BackendName::Auto if driver_present() => Ok(Cuda::new(0).ok()),
            BackendName::Auto => Ok(None),
        }
    }

    /// Where the model runs: with the feature `cuda` on a GPU, if one is wanted and there.
    fn model_device(self) -> Result<Device> {
        match self {
            #[cfg(feature = "cuda")]
            BackendName::Cuda => Ok(Device::new_cuda(0)?),
            #[cfg(feature = "cuda")]
            BackendName::Auto if driver_present() => Ok(Device::new_cuda(0).unwrap_or(Device::Cpu)),
            _ => Ok(Device::Cpu),
        }
    }

    /// Where the attention of a row runs.
    fn compute(self, model: &Model, gpu: Option<&Cuda>, row: &Row) -> Compute {
        let head_dim = model.config().dim / model.config().heads;
        #[cfg(feature = "cuda")]
        if model.device().is_cuda() {
            let device = model.device();
            let runs = |recipe: &Recipe| {
                let supported = || supports(device, DType::BF16, head_dim, recipe).is_ok();
                recipe.name == EXACT || row.narrow && supported()
            };
            return if row.recipes().all(runs) { Compute::Model(device.clone()) } else { Compute::Cpu };
        }
        let covers = |gpu: &Cuda, recipe| {
            DevicePlan::covers(gpu.gpu(), recipe, head_dim, vc_attention::DType::Bf16).is_ok()
        };
        match gpu {
            Some(gpu)
                if self == BackendName::Cuda
                    || row.narrow && row.recipes().all(|recipe| covers(gpu, recipe)) =>
            {
                Compute::Gpu(gpu.clone())
            }
            _ => Compute::Cpu,
        }
    }
}

#[derive(Args)]
struct Summarize {
    /// Files of measurements (clips.jsonl), or folders that hold one.
    #[arg(required = true)]
    records: Vec<PathBuf>,
    /// Show every row's PSNR minus this row's (by the same backend where it has been measured there), prompt by prompt.
    #[arg(long, value_name = "ROW")]
    against: Option<String>,
    /// Print Markdown.
    #[arg(long)]
    markdown: bool,
    /// Also draw it.
    #[arg(long, value_name = "FILE.png")]
    plot: Option<PathBuf>,
}

#[derive(Args)]
struct Probe {
    /// Recipes, separated by commas or given several times.
    #[arg(short, long = "recipe", value_delimiter = ',', required = true, value_name = "RECIPE")]
    recipes: Vec<String>,
    /// Steps, out of those whose state the reference has.
    #[arg(long, value_delimiter = ',', default_values_t = probe::STEPS, value_name = "N")]
    steps: Vec<usize>,
}

#[derive(Args)]
struct Check {
    /// Stop behind this step (the reference has states behind steps 0, 10 and 20, and clips of 40 steps).
    #[arg(long, default_value_t = 40, value_name = "N")]
    steps: usize,
    /// Where the model runs; on a GPU it takes the feature `cuda`.
    #[arg(long, value_enum, default_value_t = BackendName::Auto)]
    backend: BackendName,
}

/// `0,3,8-15`.
fn list(text: &str) -> Result<Vec<usize>> {
    let number = |t: &str| t.trim().parse::<usize>().map_err(|_| anyhow!("a number, given `{t}`"));
    let mut all = BTreeSet::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (number(from)?, number(to)?);
        ensure!(from <= to && to - from < 10_000, "a range from low to high, given `{part}`");
        all.extend(from..=to);
    }
    Ok(all.into_iter().collect())
}

/// Runs the program.
pub fn run() -> ExitCode {
    let Cli { data, command } = Cli::parse();
    let bundle = |device: &Device| Bundle::open(&data.unwrap_or_else(Bundle::folder), device);
    let done = match command {
        Command::Generate(options) => {
            let device = options.backend.model_device();
            device.and_then(|device| generate(&bundle(&device)?, &options))
        }
        Command::Table(options) => summarize(&options),
        Command::Probe(options) => bundle(&Device::Cpu).and_then(|bundle| show_probe(&bundle, &options)),
        Command::Check(options) => {
            let device = options.backend.model_device();
            device.and_then(|device| check(&bundle(&device)?, &options))
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// One clip and what it took.
struct Made {
    clip: Tensor,
    attention: RowAttention,
    seconds: f64,
}

fn make(bundle: &Bundle, sampler: &Sampler, row: &Row, prompt: usize, compute: &Compute) -> Result<Made> {
    let bar = ProgressBar::new(sampler.steps as u64);
    bar.set_style(ProgressStyle::with_template("{msg} {bar:32} {pos}/{len} steps ({elapsed}, {eta} left)")?);
    bar.set_message(format!("prompt {prompt}, {}", row.name));
    let start = Instant::now();
    let grid = bundle.model.config().grid();
    let mut attention = RowAttention::new(row, sampler.steps, grid, compute)?;
    let noise = bundle.noise(prompt)?;
    let clip = sampler.sample(&bundle.model, &bundle.prompt(prompt), &noise, &mut attention, |_, _| {
        bar.inc(1);
        Ok(())
    });
    bar.finish_and_clear();
    let clip = clip.with_context(|| format!("prompt {prompt}, row {}", row.name))?;
    Ok(Made { clip, attention, seconds: start.elapsed().as_secs_f64() })
}

fn generate(bundle: &Bundle, options: &Generate) -> Result<()> {
    ensure!(options.guidance.is_finite(), "a finite guidance, given {}", options.guidance);
    let (steps, guidance) = (usize::from(options.steps), options.guidance);
    let config = bundle.model.config();
    options.rows.iter().try_for_each(|row| row.fits(steps, config.depth))?;
    let sampler = Sampler { steps, guidance, ..bundle.sampler };
    let model = &bundle.model;
    let gpu = if model.device().is_cpu() { options.backend.gpu()? } else { None };
    let reference: Row = REFERENCE.parse()?;
    // What the reference is called on disk: the model's own arithmetic is in it.
    let exact_name = format!("{REFERENCE}{}", on_gpu(model));
    let plan = |row: &Row| {
        let compute = options.backend.compute(model, gpu.as_ref(), row);
        let backend = format!("{}{}", compute.backend(), on_gpu(model));
        (row.clone(), compute, Setting { row: row.name.clone(), steps, guidance, backend })
    };
    let rows: Vec<(Row, Compute, Setting)> =
        options.rows.iter().filter(|row| row.name != REFERENCE).map(plan).collect();
    fs::create_dir_all(&options.output).with_context(|| options.output.display().to_string())?;
    let path = options.output.join("clips.jsonl");
    let mut record = Record::open(&path)?;
    note_broken(&path, record.broken());
    for &prompt in &options.prompts {
        let folder = options.output.join(format!("prompt_{prompt:03}_steps_{steps}_guidance_{guidance}"));
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let files = Files { folder: &folder, shape: config.clip(), pictures: !options.no_pictures };
        let exact = match files.clip(&exact_name) {
            Some(clip) => clip,
            None => {
                let compute = options.backend.compute(model, None, &reference);
                let exact = make(bundle, &sampler, &reference, prompt, &compute)?.clip;
                files.keep(&exact_name, &exact)?;
                exact
            }
        };
        files.animate(&exact_name, &exact)?;
        let mut lines = vec![(format!("{}: exact attention", bundle.prompt(prompt)), exact.clone())];
        for (row, compute, setting) in &rows {
            let name = format!("{}.{}", file_name(&row.name), setting.backend);
            let measured = record.find(setting, prompt).map(|entry| entry.distance);
            let kept = if files.pictures { files.clip(&name) } else { None };
            let (clip, distance) = match (measured, kept) {
                (Some(distance), Some(clip)) => (clip, distance),
                (Some(_), None) if options.no_pictures => continue,
                _ => {
                    let Made { clip, attention, seconds } = make(bundle, &sampler, row, prompt, compute)?;
                    let distance = clip::distance(&clip, &exact)?;
                    if files.pictures {
                        files.keep(&name, &clip)?;
                    }
                    if measured.is_none() {
                        let counts = attention.counts();
                        record.add(Entry {
                            setting: setting.clone(),
                            prompt,
                            distance,
                            mean_share: attention.mean_share(),
                            grouped: counts.cold + counts.warm + counts.early,
                            early: counts.early,
                            kept_bytes: attention.kept_bytes(),
                            attention_s: attention.spent().as_secs_f64(),
                            total_s: seconds,
                            device: compute.device(),
                        })?;
                    }
                    (clip, distance)
                }
            };
            files.animate(&name, &clip)?;
            let Distance { psnr_db, ssim } = distance;
            lines.push((format!("{}: PSNR {psnr_db:.1} dB, SSIM {ssim:.4}", row.name), clip));
        }
        if files.pictures {
            picture::sheet(&folder.join("sheet.png"), &lines)?;
        }
    }
    let asked = |e: &&Entry| {
        rows.iter().any(|(_, _, setting)| *setting == e.setting) && options.prompts.contains(&e.prompt)
    };
    let entries: Vec<Entry> = record.entries().iter().filter(asked).cloned().collect();
    println!("{}", table(&Summary::all(&entries), None, false)?);
    println!("in {}", options.output.display());
    Ok(())
}

/// Behind a backend's name where the whole model runs on the GPU, not just a row's attention.
fn on_gpu(model: &Model) -> &'static str {
    if model.device().is_cpu() { "" } else { "+model" }
}

/// What is on disk of a prompt.
struct Files<'a> {
    folder: &'a Path,
    /// Shape of its clips.
    shape: [usize; 4],
    /// Whether pictures are made.
    pictures: bool,
}

impl Files<'_> {
    /// A clip that was kept whole.
    fn clip(&self, name: &str) -> Option<Tensor> {
        let path = self.folder.join(format!("{name}.safetensors"));
        let read = || -> Result<Tensor> {
            let clip =
                candle_core::safetensors::load(&path, &Device::Cpu)?.remove("clip").context("no clip")?;
            ensure!(clip.dims() == self.shape, "a clip {:?}, given {:?}", self.shape, clip.dims());
            Ok(clip)
        };
        if !path.exists() {
            return None;
        }
        read().map_err(|e| eprintln!("note: {} is made again: {e:#}", path.display())).ok()
    }

    /// Keeps a clip; an animation of an earlier one goes.
    fn keep(&self, name: &str, clip: &Tensor) -> Result<()> {
        let animation = self.folder.join(format!("{name}.gif"));
        if animation.exists() {
            fs::remove_file(&animation).with_context(|| animation.display().to_string())?;
        }
        let path = self.folder.join(format!("{name}.safetensors"));
        record::replace(&path, |path| Ok(clip.save_safetensors("clip", path)?))
    }

    /// The animation of a clip, where it is wanted and not there.
    fn animate(&self, name: &str, clip: &Tensor) -> Result<()> {
        let path = self.folder.join(format!("{name}.gif"));
        if !self.pictures || path.exists() { Ok(()) } else { picture::animation(&path, clip) }
    }
}

/// Says that a record's last line was dropped.
fn note_broken(path: &Path, line: Option<usize>) {
    if let Some(line) = line {
        eprintln!("note: {}, line {line} was only half written: dropped", path.display());
    }
}

/// A row's name as a file's.
fn file_name(row: &str) -> String {
    row.chars().map(|c| if c.is_ascii_alphanumeric() || "-.=+".contains(c) { c } else { '_' }).collect()
}

fn summarize(options: &Summarize) -> Result<()> {
    let mut entries = Vec::new();
    for path in &options.records {
        let path = if path.is_dir() { path.join("clips.jsonl") } else { path.clone() };
        let contents = record::read(&path)?;
        note_broken(&path, contents.broken);
        entries.extend(contents.entries);
    }
    let summaries = Summary::all(&entries);
    ensure!(!summaries.is_empty(), "no measurements in {:?}", options.records);
    println!("{}", table(&summaries, options.against.as_deref(), options.markdown)?);
    if let Some(path) = &options.plot {
        draw(path, &summaries)?;
    }
    Ok(())
}

fn draw(path: &Path, summaries: &[Summary]) -> Result<()> {
    let dot = |s: &Summary| {
        let Setting { row, steps, guidance, backend } = &s.setting;
        let prompts = s.by_prompt.len();
        let text = format!("{row} ({steps} steps, guidance {guidance}, {backend}, {prompts} prompts)");
        Dot { text, mean: s.psnr(), lowest: s.lowest_psnr() }
    };
    picture::plot(path, "Clips of the tiny video DiT", &summaries.iter().map(dot).collect::<Vec<_>>())
}

/// The rows of a table, as text or as Markdown.
fn table(summaries: &[Summary], against: Option<&str>, markdown: bool) -> Result<String> {
    if let Some(name) = against
        && !summaries.iter().any(|s| s.setting.row == name)
    {
        bail!("no row `{name}` to compare with");
    }
    let interval = format!("95% (n >= {FEWEST})");
    let mut head = vec!["row", "steps", "guidance", "backend", "prompts", "PSNR dB", &interval];
    head.extend(["lowest", "SSIM", "mean share"]);
    let difference = against.map(|name| format!("PSNR over {name}"));
    head.extend(difference.as_deref());
    let mut lines = Vec::new();
    for s in summaries {
        let (psnr, ssim) = (s.psnr(), s.ssim());
        let Setting { row, steps, guidance, backend } = &s.setting;
        let mut line = vec![
            row.clone(),
            steps.to_string(),
            guidance.to_string(),
            backend.clone(),
            s.by_prompt.len().to_string(),
            format!("{:.2}", psnr.mean),
            psnr.interval.map_or_else(|| "-".into(), |[low, high]| format!("{low:.2} to {high:.2}")),
            format!("{:.2}", s.lowest_psnr()),
            format!("{:.5}", ssim.mean),
            s.mean_share().map_or_else(|| "-".into(), |share| format!("{:.1}%", 100.0 * share)),
        ];
        if let Some(name) = against {
            let mut others = summaries.iter().filter(|o| {
                let o = &o.setting;
                o.row == name && (o.steps, o.guidance) == (*steps, *guidance)
            });
            let same = others.clone().find(|o| o.setting.backend == *backend);
            line.push(match same.or_else(|| others.next()).and_then(|other| s.psnr_over(other)) {
                Some((Mean { mean, interval: Some([low, high]) }, n)) => {
                    format!("{mean:+.2} ({low:+.2} to {high:+.2}, n = {n})")
                }
                Some((Mean { mean, interval: None }, n)) => format!("{mean:+.2} (n = {n})"),
                None => "-".into(),
            });
        }
        lines.push(line);
    }
    if markdown {
        let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
        for line in lines {
            let cells: Vec<String> = line
                .into_iter()
                .enumerate()
                .map(|(i, c)| if i == 0 { format!("`{c}`") } else { c })
                .collect();
            text += &format!("| {} |\n", cells.join(" | "));
        }
        return Ok(text);
    }
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(head).add_rows(lines);
    table.column_iter_mut().skip(1).for_each(|c| c.set_cell_alignment(CellAlignment::Right));
    Ok(table.to_string())
}

fn show_probe(bundle: &Bundle, options: &Probe) -> Result<()> {
    let recipes: Vec<Recipe> =
        options.recipes.iter().map(|name| Ok(Recipe::parse(name)?)).collect::<Result<_>>()?;
    let bar = ProgressBar::new(options.steps.len() as u64);
    let losses = probe::probe(bundle, &recipes, &options.steps, |_| bar.inc(1))?;
    bar.finish_and_clear();
    let layers = bundle.model.config().depth;
    let mut head = vec!["rel_l2 x 1e4".to_owned(), "all".into(), "worst tenth".into()];
    head.extend(options.steps.iter().map(|step| format!("step {step}")));
    head.extend((0..layers).map(|layer| format!("layer {layer}")));
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(head);
    for (i, recipe) in recipes.iter().enumerate() {
        let loss = |matches: &dyn Fn(usize, usize) -> bool| {
            probe::total(&losses, |&(row, step, layer)| row == i && matches(step, layer))
        };
        let figure = |loss: probe::Loss| format!("{:.1}", 1e4 * loss.rel_l2());
        let all = loss(&|_, _| true);
        let mut line =
            vec![recipe.name.clone(), figure(all.clone()), format!("{:.0}%", 100.0 * all.worst_tenth())];
        line.extend(options.steps.iter().map(|&at| figure(loss(&|step, _| step == at))));
        line.extend((0..layers).map(|at| figure(loss(&|_, layer| layer == at))));
        table.add_row(line);
    }
    table.column_iter_mut().skip(1).for_each(|c| c.set_cell_alignment(CellAlignment::Right));
    println!("{table}");
    Ok(())
}

/// PSNR that a clip must have against PyTorch's bf16 clip. PyTorch's own f32 clips are 60.7 dB or more from its bf16
/// clips; a run with its own bf16 roundings is as far from f32 again, 3 dB less from the other, and a little more.
const FLOOR_DB: [(&str, f64); 2] = [("exact@io=f32", 60.0), ("exact", 56.0)];
/// PSNR against PyTorch's f32 clip.
const F32_DB: f64 = 90.0;

fn check(bundle: &Bundle, options: &Check) -> Result<()> {
    let (stop, all) = (options.steps, bundle.sampler.steps);
    ensure!((1..=all).contains(&stop), "1 to {all} steps, given {stop}");
    // What the reference must have for this, said before the work.
    let states: Vec<usize> =
        probe::STEPS.iter().filter_map(|s| s.checked_sub(1)).filter(|&s| s < stop).collect();
    let clips: &[usize] = if stop == all { &[0, 1] } else { &[] };
    let runs: Vec<(usize, &str, f64)> = [(0, FLOOR_DB[0]), (1, FLOOR_DB[0]), (0, FLOOR_DB[1])]
        .into_iter()
        .filter(|(prompt, _)| *prompt == 0 || clips.contains(prompt))
        .map(|(prompt, (name, floor))| (prompt, name, floor))
        .collect();
    let names = states.iter().map(|step| format!("bf16_x.{step}"));
    let f32_clip = if stop == all { Some("fp32.0") } else { None };
    let names = names.chain(clips.iter().map(|p| format!("bf16.{p}"))).chain(f32_clip.map(String::from));
    for name in names.chain(runs.iter().map(|(prompt, ..)| format!("noise.{prompt}"))) {
        bundle.required(&name)?;
    }
    let mut worst = f64::INFINITY;
    let mut compare = |what: &str, x: &Tensor, name: &str, floor: f64| -> Result<()> {
        let d = clip::distance(x, bundle.required(name)?)?;
        println!("{what:<24} against {name:<10} PSNR {:6.2} dB, SSIM {:.6}", d.psnr_db, d.ssim);
        worst = worst.min(d.psnr_db - floor);
        Ok(())
    };
    for (prompt, name, floor) in runs {
        let row: Row = name.parse()?;
        let compute = options.backend.compute(&bundle.model, None, &row);
        let mut attention = RowAttention::new(&row, all, bundle.model.config().grid(), &compute)?;
        let mut made = Vec::new();
        let sampled = bundle.sampler.sample(
            &bundle.model,
            &bundle.prompt(prompt),
            &bundle.noise(prompt)?,
            &mut attention,
            |step, x| {
                made.push(x.clone());
                ensure!(step + 1 < stop || stop == all, "stopped");
                Ok(())
            },
        );
        if made.len() < stop {
            sampled?;
            bail!("the sampler stopped early");
        }
        if prompt == 0 {
            for &step in &states {
                compare(&format!("{name}, step {step}"), &made[step], &format!("bf16_x.{step}"), floor)?;
            }
        }
        if clips.contains(&prompt) {
            let (what, x) = (format!("{name}, clip {prompt}"), &made[stop - 1]);
            compare(&what, x, &format!("bf16.{prompt}"), floor)?;
            if let (Some(of), 0, true) = (f32_clip, prompt, name.ends_with("f32")) {
                compare(&what, x, of, F32_DB)?;
            }
        }
    }
    ensure!(worst >= 0.0, "{:.2} dB below the floor: this port does not reproduce the reference", -worst);
    let checked = format!("the states of prompt 0 behind steps {states:?}");
    if stop == all {
        println!("reproduces the reference: {checked}, and the clips of prompts {clips:?}");
    } else {
        println!(
            "reproduces the reference as far as it was run: {checked}; no clip, which takes all {all} steps"
        );
    }
    Ok(())
}
