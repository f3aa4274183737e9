//! Writes small valid inputs into `fuzz/corpus`, for the fuzzer to start from:
//! `cargo +nightly run --manifest-path fuzz/Cargo.toml --example seeds`.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use vc_attention::io::{Output, write};
use vc_attention::recipe::MODIFIERS;
use vc_attention::{DType, Layout, Recipe, Tensor};

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let folder = |name: &str| -> Result<_, Box<dyn Error>> {
        let folder = corpus.join(name);
        fs::create_dir_all(&folder)?;
        Ok(folder)
    };

    let files = folder("file")?;
    for (dtype, name) in [(DType::F32, "f32"), (DType::F16, "f16"), (DType::Bf16, "bf16")] {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            for (rank, shape) in [(3, [1, 2, 4, 8]), (4, [2, 1, 3, 5])] {
                let count = shape.iter().product::<usize>() as i32;
                let values = (0..count).map(|i| (i % 17 - 8) as f32 / 4.0).collect();
                let tensor = Tensor::from_bhsd(values, shape, dtype, layout);
                let tensors = ["q", "k", "v"].map(|name| Output::tensor(name, &tensor, rank));
                let tensors = tensors.into_iter().collect::<Result<Vec<_>, _>>()?;
                let grid = if rank == 3 { "[1, 2, 2]" } else { "[1, 1, 3]" };
                let metadata = BTreeMap::from([("grid".into(), grid.into())]);
                let path = files.join(format!("{name}-{layout:?}-{rank}.safetensors"));
                write(&path, &tensors, &metadata)?;
            }
        }
    }
    // With lengths, and data that is not aligned for its type: an odd header length and a byte in front.
    let header = concat!(
        r#"{"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"#,
        r#""q":{"dtype":"F32","shape":[1,1,2],"data_offsets":[1,9]},"#,
        r#""k":{"dtype":"F16","shape":[1,1,2],"data_offsets":[9,13]},"#,
        r#""v":{"dtype":"BF16","shape":[1,1,2],"data_offsets":[13,17]},"#,
        r#""kv_lens":{"dtype":"I64","shape":[1],"data_offsets":[17,25]}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend([0; 17]);
    bytes.extend(1i64.to_le_bytes());
    fs::write(files.join("lengths-unaligned.safetensors"), bytes)?;

    let problems = folder("problem")?;
    for (i, byte) in [0u8, 1, 2, 3, 64, 255].into_iter().enumerate() {
        fs::write(
            problems.join(format!("bytes-{i}")),
            (0..512).map(|j| byte.wrapping_mul(j as u8)).collect::<Vec<_>>(),
        )?;
    }

    let recipes = folder("recipe")?;
    for recipe in Recipe::all() {
        fs::write(recipes.join(&recipe.name), &recipe.name)?;
    }
    for modifier in MODIFIERS {
        let values = modifier.values.split('|').filter(|value| !value.contains(' '));
        for value in values.chain(["2", "-0.35"]) {
            let text = format!("vc8-expcast+{}={value}", modifier.name);
            fs::write(recipes.join(&text), &text)?;
        }
    }
    Ok(())
}
