//! What ExpCast costs in accuracy, and what gives it back: every variant on real queries, keys and values.
//!
//! `cargo run --release --example expcast_cost -- [FILE.safetensors ...] [--recipe RECIPE]...`
//!
//! Every figure is over the first heads of an input and some of their queries, in runs of 128 that lie evenly in
//! the sequence: `rel_l2` of the whole recipe; of P alone, Q, K and V in f32 and in sequence order; the share of
//! 16 x 128 blocks that ran with exact exponentials; and the mean excess of the row sums, P alone, which the LSE
//! inherits. All from f64. `docs/expcast.md` says what came out.

use std::error::Error;
use std::path::{Path, PathBuf};

use clap::Parser;
use vc_attention::backend::cpu::Cpu;
use vc_attention::fidelity::compare;
use vc_attention::fidelity::reference::{self, Reference};
use vc_attention::io::InputFile;
use vc_attention::tensor::Layout;
use vc_attention::{Options, OutputType, Plan, Problem, Recipe, TensorView, run};

/// Queries that lie together: the warps of a block have neighbours as rows.
const RUN: usize = 128;

/// Base and modifiers, first what there was.
const VARIANTS: &[&str] = &[
    "vc16",
    "vc16+rowsum=decoded",
    "vc16-expcast",
    "vc16-expcast+rowsum=exact",
    "vc16-expcast+encoder=f32+beta=-0.35",
    "vc16-expcast+beta=-0.42",
    "vc16-expcast+encoder=f32+beta=-0.5",
    "vc16-expcast+encoder=pinned+beta=-0.4375",
    "vc16-expcast+encoder=pinned+beta=-0.5",
    "vc16-expcast+encoder=pinned+beta=-0.5625",
    "vc16-expcast+encoder=pinned+beta=-0.625",
    "vc16-expcast+encoder=pinned+beta=-0.75",
    "vc16-expcast+encoder=quadratic",
    "vc16-expcast+encoder=quadratic+rowsum=exact",
    "vc16-expcast+exact=1",
    "vc16-expcast+exact=2",
    "vc16-expcast+exact=3",
    "vc16-expcast+exact=3+rowsum=exact",
    "vc16-expcast+exact=4",
    "vc16-expcast+exact=6",
    "vc16-expcast+exact=quarter",
    "vc16-expcast+exact=half",
    "vc16-expcast+exact=half+rowsum=exact",
    "vc16-expcast+encoder=quadratic+exact=3",
    "vc16-expcast+encoder=quadratic+exact=half",
];

/// What turns a recipe into one whose only error is that of P, unless the recipe itself says otherwise.
const P_ALONE: [&str; 5] = ["+qk=f32", "+scores=f32", "+v=f32", "+demean=off", "+order=sequence"];

/// What ExpCast costs, and what gives it back.
#[derive(Parser)]
struct Args {
    /// Files with q, k and v [heads, tokens, dim]; the bundled ones when nothing is named.
    files: Vec<PathBuf>,
    /// Recipes instead of the built-in list.
    #[arg(long)]
    recipe: Vec<String>,
    /// At most this many heads of an input.
    #[arg(long, default_value_t = 2)]
    heads: usize,
    /// At most this many queries of a head, a multiple of 128.
    #[arg(long, default_value_t = 1024)]
    queries: usize,
}

/// Some queries of the first heads of an input, and their keys and values: [heads, tokens, dim].
struct Input {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    heads: usize,
    dim: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = Args::parse();
    if args.files.is_empty() {
        let bundled = ["tiny-dit/qkv_07", "dinov2/photo_layer02_head3", "dinov2/video_layer08_head3"];
        args.files = bundled.map(|name| format!("data/{name}.safetensors").into()).to_vec();
    }
    let recipes: Vec<&str> = if args.recipe.is_empty() {
        VARIANTS.to_vec()
    } else {
        args.recipe.iter().map(String::as_str).collect()
    };
    for file in &args.files {
        let input = Input::read(file, &args)?;
        let problem = input.problem()?;
        let exact = reference::attention(&problem, &problem.validate()?);
        println!(
            "\n### {}: {} heads, {} queries\n",
            file.display(),
            input.heads,
            exact.lse.len() / input.heads
        );
        println!("| recipe | rel_l2 | P alone | blocks exact | row sums |");
        println!("|---|---|---|---|---|");
        for recipe in &recipes {
            let (whole, share, _) = figures(&problem, recipe, &exact)?;
            let says =
                |modifier: &&&str| recipe.contains(&modifier[..=modifier.find('=').unwrap_or_default()]);
            let alone: String = P_ALONE.iter().filter(|modifier| !says(modifier)).copied().collect();
            let (alone, _, sums) = figures(&problem, &format!("{recipe}{alone}"), &exact)?;
            println!(
                "| `{recipe}` | {whole:.6} | {alone:.6} | {:.1}% | {:+.2}% |",
                100.0 * share,
                100.0 * sums
            );
        }
    }
    Ok(())
}

/// rel_l2, share of exact blocks, mean excess of the row sums.
fn figures(problem: &Problem, recipe: &str, exact: &Reference) -> Result<(f64, f64, f64), Box<dyn Error>> {
    let options = Options { output: OutputType::F32, lse: true };
    let plan = Plan::new(problem, &Recipe::parse(recipe)?, options)?;
    let output = run(&Cpu, &plan, problem, None)?.output;
    let lse = output.lse.unwrap_or_default();
    let excess: f64 = lse.iter().zip(&exact.lse).map(|(&a, &b)| (f64::from(a) - b).exp_m1()).sum();
    let rel_l2 = compare(&output.o.view(), &exact.o).rel_l2;
    Ok((rel_l2, output.observed.exact_share, excess / exact.lse.len() as f64))
}

impl Input {
    fn read(path: &Path, args: &Args) -> Result<Self, Box<dyn Error>> {
        let file = InputFile::open(path)?;
        let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
        let [_, of, tokens, dim] = q.shape();
        let heads = of.min(args.heads);
        let all = |x: &TensorView| (0..heads).flat_map(|h| x.read_head(0, h, x.shape()[2])).collect();
        let wanted = (args.queries / RUN).max(1);
        let mut queries = Vec::new();
        for head in 0..heads {
            let rows = q.read_head(0, head, tokens);
            let runs = tokens / RUN;
            for run in (0..wanted.min(runs)).map(|i| i * runs / wanted.min(runs)) {
                queries.extend_from_slice(&rows[run * RUN * dim..][..RUN * dim]);
            }
        }
        Ok(Self { q: queries, k: all(&k), v: all(&v), heads, dim })
    }

    fn problem(&self) -> Result<Problem<'_>, vc_attention::Error> {
        let shape = |x: &[f32]| [1, self.heads, x.len() / self.heads / self.dim, self.dim];
        Ok(Problem::new(
            TensorView::new("q", self.q.as_slice(), shape(&self.q), Layout::Bhsd)?,
            TensorView::new("k", self.k.as_slice(), shape(&self.k), Layout::Bhsd)?,
            TensorView::new("v", self.v.as_slice(), shape(&self.v), Layout::Bhsd)?,
        ))
    }
}
