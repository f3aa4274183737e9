//! `vca inspect`: what stands out among the values, and what block means remove of them in each token order.

use std::path::PathBuf;

use clap::Args;
use rayon::prelude::*;
use serde::Serialize;
use vc_attention::grouping::stats::{MeanBits, shares};
use vc_attention::grouping::{GroupingConfig, TokenOrder, group};
use vc_attention::outliers::{self, Weight};
use vc_attention::{Problem, Shape};

use super::failure::{Result, note, print};
use super::input::{Input, InputOptions, title};
use super::progress::Progress;
use super::table::{figure, percent, table};
use super::{Machine, output, plot};

/// Tokens and channels listed by name.
const TOP: usize = 10;

const EXAMPLES: &str = "\
Examples:
  vca inspect
  vca inspect qkv.safetensors --plot outliers.png --json outliers.json
  vca inspect qkv.safetensors --grid 21,45,80";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// The input; a bundled layer of a tiny video DiT when absent.
    input: Option<PathBuf>,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw them as a PNG.
    #[arg(long, value_name = "FILE.png")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    options: InputOptions,
    #[command(flatten)]
    machine: Machine,
}

/// The JSON file.
#[derive(Serialize)]
struct Report {
    input: String,
    grid: Option<[usize; 3]>,
    /// Averaged over the heads.
    mean_share: Share,
    heads: Vec<Head>,
}

/// Share of the energy of a block of 128 values that its mean removes, averaged over the blocks.
#[derive(Clone, Copy, Serialize)]
pub struct Share {
    pub sequence: f64,
    /// Absent without a grid.
    pub cube: Option<f64>,
    pub kmeans: f64,
}

#[derive(Serialize)]
pub struct Head {
    pub batch: usize,
    pub head: usize,
    pub mean_share: Share,
    /// Norm of the heaviest token over the median.
    max_over_median: Option<f64>,
    /// Share of the energy in the heaviest 1% of the tokens.
    top_percent_energy: f64,
    pub tokens: Vec<Token>,
    pub channels: Vec<Channel>,
}

#[derive(Serialize)]
pub struct Token {
    pub token: usize,
    /// Place on the latent grid.
    pub place: Option<[usize; 3]>,
    norm: f64,
    pub over_median: Option<f64>,
}

#[derive(Serialize)]
pub struct Channel {
    pub channel: usize,
    rms: f64,
    pub over_median: Option<f64>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    output::check(arguments.input.as_deref(), &[arguments.json.as_ref(), arguments.plot.as_ref()])?;
    if arguments.machine.insists_on_gpu() {
        arguments.machine.processor()?;
        note("outliers and token orders are looked at on the CPU");
    } else {
        arguments.machine.threads()?;
    }
    let input = Input::open(arguments.input.as_deref(), &arguments.options)?;
    let problem = input.problem()?;
    let shape = problem.validate()?;
    let heads = inspect(&problem, &shape, arguments.machine.seed)?;

    let title = title(&input.name(), &shape);
    let report = Report { input: input.name(), grid: problem.grid, mean_share: average(&heads), heads };
    let json = arguments.json.as_ref().map_or(Ok(()), |path| output::write_json(path, &report));
    let plot = arguments.plot.as_ref().map_or(Ok(()), |path| plot::inspect(path, &title, &report.heads));
    print(&format!("{title}\n\n{}", text(&report)))?;
    json.and(plot)
}

fn inspect(problem: &Problem, shape: &Shape, seed: u64) -> Result<Vec<Head>> {
    let heads = shape.batch * shape.kv_heads;
    let progress = Progress::new(heads);
    progress.at("heads");
    let one = |index: usize| {
        let (batch, head) = (index / shape.kv_heads, index % shape.kv_heads);
        let tokens = problem.kv_len(batch);
        let share = |order| -> Result<f64> {
            let mut v = problem.v.read_head(batch, head, tokens);
            v.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.0);
            let config = GroupingConfig { order, seed, ..GroupingConfig::sequence() };
            let order = group(&v, shape.head_dim, &config, problem.grid, None)?.order;
            Ok(shares(&v, shape.head_dim, &order, MeanBits::Sixteen).per_block)
        };
        let found = outliers::of_head(&problem.v, batch, head, tokens, TOP);
        let place = |token: usize| problem.grid.map(|[_, h, w]| [token / (h * w), token / w % h, token % w]);
        let head = Head {
            batch,
            head,
            mean_share: Share {
                sequence: share(TokenOrder::Sequence)?,
                cube: problem.grid.map(|_| share(TokenOrder::Cube)).transpose()?,
                kmeans: share(TokenOrder::KMeans)?,
            },
            max_over_median: found.tokens.first().and_then(|token| token.over_median),
            top_percent_energy: found.top_percent_energy,
            tokens: found
                .tokens
                .iter()
                .map(|&Weight { index: token, value: norm, over_median }| Token {
                    token,
                    place: place(token),
                    norm,
                    over_median,
                })
                .collect(),
            channels: found
                .channels
                .iter()
                .map(|&Weight { index: channel, value: rms, over_median }| Channel {
                    channel,
                    rms,
                    over_median,
                })
                .collect(),
        };
        progress.step();
        Ok(head)
    };
    (0..heads).into_par_iter().map(one).collect()
}

fn average(heads: &[Head]) -> Share {
    let mean = |figure: fn(&Share) -> f64| {
        heads.iter().map(|head| figure(&head.mean_share)).sum::<f64>() / heads.len() as f64
    };
    let cube = heads.iter().all(|head| head.mean_share.cube.is_some());
    Share {
        sequence: mean(|s| s.sequence),
        cube: cube.then(|| mean(|s| s.cube.unwrap_or_default())),
        kmeans: mean(|s| s.kmeans),
    }
}

/// The heaviest tokens or channels over all heads, by their ratio to the median of their head.
pub fn heaviest<T>(
    heads: &[Head],
    items: fn(&Head) -> &[T],
    ratio: fn(&T) -> Option<f64>,
) -> Vec<(&Head, &T, f64)> {
    let mut all: Vec<_> = heads
        .iter()
        .flat_map(|head| items(head).iter().map(move |item| (head, item)))
        .filter_map(|(head, item)| Some((head, item, ratio(item)?)))
        .collect();
    all.sort_by(|a, b| b.2.total_cmp(&a.2));
    all.truncate(TOP);
    all
}

/// A head's name; the batch only where there is more than one.
pub fn head_name(head: &Head, heads: &[Head]) -> String {
    if heads.iter().any(|head| head.batch > 0) {
        format!("{}.{}", head.batch, head.head)
    } else {
        head.head.to_string()
    }
}

/// A token's number and, on a grid, its place.
pub fn token_name(token: &Token) -> String {
    match token.place {
        Some([t, h, w]) => format!("{} ({t}, {h}, {w})", token.token),
        None => token.token.to_string(),
    }
}

fn text(report: &Report) -> String {
    let times = |x: Option<f64>| x.map_or_else(|| "-".into(), |x| format!("{x:.2}x"));
    let mut shares = table(&["head", "sequence", "cube", "k-means", "max/median norm", "energy of top 1%"]);
    for head in &report.heads {
        let share = head.mean_share;
        shares.add_row(vec![
            head_name(head, &report.heads).into(),
            figure(percent(Some(share.sequence))),
            figure(percent(share.cube)),
            figure(percent(Some(share.kmeans))),
            figure(times(head.max_over_median)),
            figure(percent(Some(head.top_percent_energy))),
        ]);
    }
    let share = report.mean_share;
    let mut row = vec!["all".into()];
    row.extend([Some(share.sequence), share.cube, Some(share.kmeans)].map(|share| figure(percent(share))));
    shares.add_row(row);

    let mut tokens = table(&["heaviest tokens (t, h, w)", "head", "over median norm"]);
    for (head, token, ratio) in heaviest(&report.heads, |head| &head.tokens, |token| token.over_median) {
        let cells = [head_name(head, &report.heads), times(Some(ratio))].map(figure);
        tokens.add_row([vec![token_name(token).into()], cells.to_vec()].concat());
    }
    let mut channels = table(&["heaviest channels", "head", "over median RMS"]);
    for (head, channel, ratio) in
        heaviest(&report.heads, |head| &head.channels, |channel| channel.over_median)
    {
        let cells = [head_name(head, &report.heads), times(Some(ratio))].map(figure);
        channels.add_row([vec![channel.channel.to_string().into()], cells.to_vec()].concat());
    }
    let grid = if report.grid.is_some() {
        ""
    } else {
        "No grid is known, so there are no cubes: give --grid T,H,W.\n"
    };
    format!(
        "Share of the value energy that the means of blocks of 128 tokens remove, by token order\n{shares}\n{grid}\n\
         {tokens}\n\n{channels}\n"
    )
}
