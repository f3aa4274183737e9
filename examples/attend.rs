//! Attention on tensors that lie in memory: f16, in `flash_attn`'s layout, grouped queries, lengths per batch.
//!
//! `cargo run --release --example attend`

use half::f16;
use vc_attention::{Error, Layout, Options, OutputType, Problem, Recipe, TensorView, attend};

/// Smooth but not trivial numbers, [batch, tokens, heads, dim] in memory.
fn waves(len: usize, pitch: f32) -> Vec<f16> {
    (0..len)
        .map(|i| f16::from_f32((i as f32 * pitch).sin() + 0.5 * (i as f32 * pitch * 0.013).cos()))
        .collect()
}

fn main() -> Result<(), Error> {
    let (batch, tokens, dim) = (2, 777, 72);
    let (q_heads, kv_heads) = (6, 2);
    let q = waves(batch * tokens * q_heads * dim, 0.71);
    let k = waves(batch * tokens * kv_heads * dim, 1.37);
    let v = waves(batch * tokens * kv_heads * dim, 0.0872); // one wave over the channels, nearly

    // The shape is always (batch, heads, tokens, dim); the layout says how it lies in memory. Views with any
    // other strides, broadcast ones included, come from `TensorView::strided`.
    let view = |name, x, heads| TensorView::new(name, x, [batch, heads, tokens, dim], Layout::Bshd);
    let problem = Problem {
        kv_lens: Some(&[777, 500]), // the keys beyond take part in nothing
        ..Problem::new(
            view("q", q.as_slice(), q_heads)?,
            view("k", k.as_slice(), kv_heads)?,
            view("v", v.as_slice(), kv_heads)?,
        )
    };
    let options = Options { output: OutputType::F32, lse: true };

    let exact = attend(&problem, &Recipe::parse("exact")?, options)?;
    let low_bit = attend(&problem, &Recipe::default_for_cpu(), options)?;

    let (lse, exact_lse) = (low_bit.lse.unwrap_or_default(), exact.lse.unwrap_or_default());
    println!("o {:?}, first channels of batch 1, head 5, last token:", low_bit.o.shape());
    for (name, output) in [("exact", &exact.o), ("low-bit", &low_bit.o)] {
        let mut row = vec![0.0; dim];
        output.view().read_row(1, 5, tokens - 1, &mut row);
        println!("  {name:8} {:+.4?}", &row[..6]);
    }
    println!(
        "its log-sum-exp: exact {:.4}, low-bit {:.4}",
        exact_lse[exact_lse.len() - 1],
        lse[lse.len() - 1]
    );

    // Bad input is an error that says what to mend, not a panic.
    let short = TensorView::new("k", &k[..100], [batch, kv_heads, tokens, dim], Layout::Bshd);
    println!("too few keys: {}", short.map(|_| ()).unwrap_err());
    Ok(())
}
