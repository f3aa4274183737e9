//! Keeps the inputs of an attention call of your own model in a file that the library and the program read:
//! `cargo run --release --example capture -- layer07.safetensors`, then `vca compare layer07.safetensors`.
//!
//! From PyTorch the same is
//! `safetensors.torch.save_file({"q": q, "k": k, "v": v}, path, metadata={"grid": "[21, 45, 80]"})`
//! with contiguous tensors of [heads, tokens, dim] or [batch, heads, tokens, dim].

use std::collections::BTreeMap;

use vc_attention::io::{InputFile, Output, write};
use vc_attention::{DType, Layout, Problem, Tensor};

fn main() -> vc_attention::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "captured.safetensors".into());

    // What the model hands to attention, after norms and rotary embedding: here two heads over a grid of 4 frames
    // of 8 x 8 patches, in bfloat16.
    let grid = [4, 8, 8];
    let shape = [1, 2, grid.iter().product(), 64];
    let activations = |phase: f32| {
        let values = (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.37 + phase).sin()).collect();
        Tensor::from_bhsd(values, shape, DType::Bf16, Layout::Bhsd)
    };
    let (q, k, v) = (activations(0.0), activations(1.0), activations(2.0));

    // Rank 3 leaves out the batch axis. The grid lets `cube` order the tokens; anything else in the metadata is kept.
    let tensors = [Output::tensor("q", &q, 3)?, Output::tensor("k", &k, 3)?, Output::tensor("v", &v, 3)?];
    let metadata = BTreeMap::from([
        ("grid".to_owned(), format!("{grid:?}")),
        ("source".to_owned(), "examples/capture.rs".to_owned()),
    ]);
    write(&path, &tensors, &metadata)?;

    // The tensors of an opened file are read in place; a problem borrows them.
    let file = InputFile::open(&path)?;
    let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
    let problem = Problem { grid: file.grid()?, ..Problem::new(q, k, v) };
    println!("{path}: {:?}", problem.validate()?);
    Ok(())
}
