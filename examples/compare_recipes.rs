//! What a few recipes cost in accuracy on one input, and where their errors come from.
//!
//! `cargo run --release --example compare_recipes [INPUT.safetensors] [RECIPE]...`; without an input, on the
//! queries, keys and values of a photograph in a vision transformer.

use vc_attention::backend::cpu::Cpu;
use vc_attention::fidelity::{compare, error_sources, reference};
use vc_attention::io::InputFile;
use vc_attention::{Error, Layout, Options, OutputType, Plan, Problem, Recipe, run};

fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/data/dinov2/photo_layer02_head3.safetensors");
    let path = args.next().unwrap_or_else(|| bundled.into());
    let mut recipes: Vec<String> = args.collect();
    if recipes.is_empty() {
        // A name takes modifiers: the fourth is V-Smooth without the grouping.
        recipes = ["fp8", "sage2", "vc8", "vc8+order=sequence", "vc16", "vc16-expcast", "vc4"]
            .map(String::from)
            .into();
    }

    let file = InputFile::open(&path)?;
    let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
    let lens = file.kv_lens()?;
    let problem = Problem { grid: file.grid()?, kv_lens: lens.as_deref(), ..Problem::new(q, k, v) };
    let shape = problem.validate()?;
    println!("{path}: {shape:?}\n");

    let exact = reference::attention(&problem, &shape);
    println!(
        "{:20} {:>8} {:>8} {:>8} | parts of rel_l2: {:>8} {:>8}",
        "recipe", "rel_l2", "PSNR dB", "ms", "P", "V"
    );
    for text in &recipes {
        let recipe = Recipe::parse(text)?;
        let plan = Plan::new(&problem, &recipe, Options { output: OutputType::F32, lse: false })?;
        let finished = run(&Cpu, &plan, &problem, None)?;
        let m = compare(&finished.output.o.view(), &exact.o);
        let parts = error_sources(&problem, &recipe, &exact)?;
        let ms = finished.report.total().as_secs_f64() * 1e3;
        println!(
            "{text:20} {:8.5} {:8.2} {ms:8.1} |                  {:8.5} {:8.5}",
            m.rel_l2, m.psnr_db, parts.probability, parts.value
        );
    }
    Ok(())
}
