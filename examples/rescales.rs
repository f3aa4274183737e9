//! How often the online softmax rescales: the share of key blocks in which a row's running max moves, on real queries and
//! keys in the order that the kernel meets them.
//!
//! `cargo run --release --example rescales -- [FILE.safetensors ...]`
//!
//! The kernel rescales a warp's 16 rows when the max of any of them moved. The first key block of a row always moves it and
//! is not counted. `docs/performance.md` says what came out.

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use half::f16;
use rayon::prelude::*;
use vc_attention::Recipe;
use vc_attention::grouping::group;
use vc_attention::io::InputFile;
use vc_attention::recipe::WARP_ROWS;
use vc_attention::tensor::Layout;

/// Keys of a block.
const KEYS: usize = 128;

/// How often the online softmax rescales.
#[derive(Parser)]
struct Args {
    /// Files with q, k and v [heads, tokens, dim]; the bundled ones when nothing is named.
    files: Vec<PathBuf>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = Args::parse();
    if args.files.is_empty() {
        let bundled = ["tiny-dit/qkv_07", "dinov2/photo_layer02_head3", "dinov2/video_layer08_head3"];
        args.files = bundled.map(|name| format!("data/{name}.safetensors").into()).to_vec();
    }
    println!("| input, order | key blocks | a row | 16 rows | 64 rows |\n|---|---|---|---|---|");
    for file in &args.files {
        let input = InputFile::open(file)?;
        let (q, k, v) = input.problem_tensors(Layout::Bhsd)?;
        let ([_, heads, queries, dim], [_, kv_heads, tokens, _]) = (q.shape(), k.shape());
        for order in ["sequence", "kmeans"] {
            let recipe = Recipe::parse(&format!("vc16+order={order}"))?;
            let mut moved = [[0; 2]; 3];
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let (k, v) = (k.read_head(0, kv_head, tokens), v.read_head(0, kv_head, tokens));
                let order = group(&v, dim, &recipe.grouping, None, None)?.order;
                let rows = q.read_head(0, head, queries);
                let moves: Vec<Vec<bool>> =
                    rows.par_chunks_exact(dim).map(|q| block_moves(q, &k, &order)).collect();
                for (count, rows) in moved.iter_mut().zip([1, WARP_ROWS, 4 * WARP_ROWS]) {
                    for rows in moves.chunks_exact(rows) {
                        let blocks = (1..rows[0].len()).filter(|&j| rows.iter().any(|row| row[j])).count();
                        *count = [count[0] + blocks, count[1] + rows[0].len() - 1];
                    }
                }
            }
            let shares = moved.map(|[moved, of]| format!("{:.1}%", 100.0 * moved as f64 / of.max(1) as f64));
            let name = file.file_stem().unwrap_or_default().to_string_lossy();
            println!("| {name}, {order} | {} | {} |", tokens.div_ceil(KEYS), shares.join(" | "));
        }
    }
    Ok(())
}

/// Whether each key block raises the row's max, of scores as f16 holds them.
fn block_moves(q: &[f32], k: &[f32], order: &[u32]) -> Vec<bool> {
    let dim = q.len();
    // In code units at the usual scale: where f16 rounds two scores to one, the max stays.
    let unit = 8.0 * std::f32::consts::LOG2_E / (dim as f32).sqrt();
    let score = |&token: &u32| {
        let k = &k[token as usize * dim..][..dim];
        f16::from_f32(unit * q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>())
    };
    let mut max = f16::NEG_INFINITY;
    let raises = |keys: &[u32]| {
        let top = keys.iter().map(score).fold(max, |a, b| if b > a { b } else { a });
        std::mem::replace(&mut max, top) < top
    };
    order.chunks(KEYS).map(raises).collect()
}
