//! Arbitrary bytes as an input file: header, tensors, lengths, grid, and the problem they make.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vc_attention::io::InputFile;
use vc_attention::{DType, Layout, Problem};

fuzz_target!(
    // The library's parallel loops run on this thread: waking another for a few elements takes longer than they do.
    init: rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread()
        .build_global()
        .expect("the first pool of the process"),
    |bytes: &[u8]| check(bytes)
);

fn check(bytes: &[u8]) {
    read(bytes.to_vec());
    // The same with the length of the header put right, for mutations that make the JSON longer or shorter.
    if let Some(last) = bytes.iter().rposition(|&byte| byte == b'}').filter(|&last| last >= 8) {
        let mut framed = bytes.to_vec();
        framed[..8].copy_from_slice(&(last as u64 + 1 - 8).to_le_bytes());
        read(framed);
    }
}

fn read(bytes: Vec<u8>) {
    let Ok(file) = InputFile::from_bytes("fuzz", bytes.clone()) else { return };
    // Whatever we take, the format's own reader takes too, and reads the same from it.
    let theirs =
        safetensors::SafeTensors::deserialize(&bytes).expect("accepted here, refused by safetensors");
    assert_eq!(file.tensors().count(), theirs.len());
    for (name, dtype, shape) in file.tensors() {
        let tensor = theirs.tensor(name).expect("a tensor that safetensors does not see");
        assert_eq!((dtype, shape), (tensor.dtype().to_string(), tensor.shape()));
    }

    let grid = file.grid().ok().flatten();
    let kv_lens = file.kv_lens().ok().flatten();
    for layout in [Layout::Bhsd, Layout::Bshd] {
        let Ok((q, k, v)) = file.problem_tensors(layout) else { continue };
        for (name, view) in [("q", q), ("k", k), ("v", v)] {
            let size = if view.dtype() == DType::F32 { 4 } else { 2 };
            assert_eq!(view.elements().len() * size, theirs.tensor(name).expect("read above").data().len());
        }
        let problem = Problem { kv_lens: kv_lens.as_deref(), grid, ..Problem::new(q, k, v) };
        let Ok(shape) = problem.validate() else { continue };
        // A valid problem can be read from end to end.
        for batch in 0..shape.batch {
            for head in 0..shape.kv_heads {
                let values = v.read_head(batch, head, problem.kv_len(batch));
                assert!(values.iter().all(|x| x.is_finite()));
            }
        }
    }
}
