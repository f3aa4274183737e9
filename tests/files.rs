//! Safetensors in and out: what is written is read again, here and by the format's own reader.

use std::collections::BTreeMap;
use std::fs;

use half::{bf16, f16};
use proptest::prelude::*;
use vc_attention::io::{InputFile, Output, write};
use vc_attention::{DType, Elements, Layout, Problem, Tensor};

fn tensor(shape: [usize; 4], dtype: DType, layout: Layout) -> Tensor {
    let values = (0..shape.iter().product()).map(|i: usize| (i % 200) as f32 / 8.0).collect();
    Tensor::from_bhsd(values, shape, dtype, layout)
}

fn values(view: vc_attention::TensorView<'_>) -> Vec<f32> {
    let [b, h, n, _] = view.shape();
    (0..b * h).flat_map(|i| view.read_head(i / h, i % h, n)).collect()
}

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("grid".into(), "[1, 2, 3]".into()),
        ("source".into(), "ünïcode, \"quotes\"\nand lines".into()),
    ])
}

#[test]
fn files_can_be_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<InputFile>();
}

#[test]
fn what_is_written_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qkv.safetensors");
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            for (rank, batch) in [(3, 1), (4, 1), (4, 2)] {
                let tensors = [4, 2, 2].map(|heads| tensor([batch, heads, 6, 5], dtype, layout));
                let outputs: Vec<_> = ["q", "k", "v"]
                    .iter()
                    .zip(&tensors)
                    .map(|(name, tensor)| Output::tensor(name, tensor, rank).unwrap())
                    .collect();
                write(&path, &outputs, &metadata()).unwrap();

                let file = InputFile::open(&path).unwrap();
                assert_eq!(file.path(), path);
                assert_eq!(file.rank().unwrap(), rank);
                assert_eq!(file.grid().unwrap(), Some([1, 2, 3]));
                assert_eq!(file.metadata(), &metadata());
                assert_eq!(file.kv_lens().unwrap(), None);
                let (q, k, v) = file.problem_tensors(layout).unwrap();
                for (view, tensor) in [q, k, v].into_iter().zip(&tensors) {
                    assert_eq!(view.dtype(), dtype);
                    assert_eq!(view.shape(), tensor.shape());
                    assert_eq!(values(view), values(tensor.view()));
                }
                let problem = Problem { grid: file.grid().unwrap(), ..Problem::new(q, k, v) };
                assert_eq!(problem.validate().unwrap().q_heads, 4);
            }
        }
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "a temporary file was left");
}

#[test]
fn the_layout_decides_which_axis_is_which() {
    let header = concat!(
        r#"{"q":{"dtype":"F32","shape":[3,2,1],"data_offsets":[0,24]},"#,
        r#""k":{"dtype":"F32","shape":[3,2,1],"data_offsets":[24,48]},"#,
        r#""v":{"dtype":"F32","shape":[3,2,1],"data_offsets":[48,72]}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend((0..18).flat_map(|i| (i as f32).to_le_bytes()));
    let file = InputFile::from_bytes("axes", bytes).unwrap();
    let (q, _, v) = file.problem_tensors(Layout::Bhsd).unwrap();
    assert_eq!(q.shape(), [1, 3, 2, 1]);
    assert_eq!(v.read_head(0, 1, 2), [14.0, 15.0]);
    let (q, _, v) = file.problem_tensors(Layout::Bshd).unwrap();
    assert_eq!(q.shape(), [1, 2, 3, 1]);
    assert_eq!(v.read_head(0, 1, 3), [13.0, 15.0, 17.0]);
}

#[test]
fn the_format_s_own_reader_agrees() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.safetensors");
    let o = tensor([1, 2, 3, 5], DType::Bf16, Layout::Bhsd);
    let lse: Vec<f32> = (0..6).map(|i| i as f32 - 2.5).collect();
    // The 2-byte tensor first, of odd length: the 4-byte one must be aligned all the same.
    let outputs = [Output::tensor("o", &o, 3).unwrap(), Output::lse("lse", &lse, [1, 2, 3], 3).unwrap()];
    write(&path, &outputs, &metadata()).unwrap();

    let bytes = fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().clone().unwrap().into_iter().collect::<BTreeMap<_, _>>(), metadata());
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let read_o = read.tensor("o").unwrap();
    assert_eq!((read_o.dtype(), read_o.shape()), (safetensors::Dtype::BF16, &[2, 3, 5][..]));
    let Elements::Bf16(elements) = o.view().elements() else { panic!("written as bfloat16") };
    assert_eq!(read_o.data(), bytemuck::cast_slice::<bf16, u8>(elements));
    let read_lse = read.tensor("lse").unwrap();
    assert_eq!((read_lse.dtype(), read_lse.shape()), (safetensors::Dtype::F32, &[2, 3][..]));
    assert_eq!(read_lse.data(), bytemuck::cast_slice::<f32, u8>(&lse));
    let start = read_lse.data().as_ptr() as usize - bytes.as_ptr() as usize;
    assert_eq!(start % 4, 0);

    // Rank 4 keeps the batch axis.
    let outputs = [Output::tensor("o", &o, 4).unwrap(), Output::lse("lse", &lse, [1, 2, 3], 4).unwrap()];
    write(&path, &outputs, &BTreeMap::new()).unwrap();
    let bytes = fs::read(&path).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.tensor("o").unwrap().shape(), [1, 2, 3, 5]);
    assert_eq!(read.tensor("lse").unwrap().shape(), [1, 2, 3]);
}

#[test]
fn the_same_content_is_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let x = tensor([1, 1, 4, 4], DType::F16, Layout::Bhsd);
    let many: BTreeMap<String, String> = (0..50).map(|i| (format!("key {i}"), i.to_string())).collect();
    let bytes = |order: [&'static str; 3]| {
        let path = dir.path().join("out.safetensors");
        write(&path, &order.map(|name| Output::tensor(name, &x, 3).unwrap()), &many).unwrap();
        fs::read(&path).unwrap()
    };
    assert_eq!(bytes(["q", "k", "v"]), bytes(["v", "q", "k"]));
}

#[test]
fn data_that_the_file_does_not_align_is_copied() {
    // An odd header length and a byte in front: no tensor of this file is aligned for its type.
    for padding in 0..8 {
        let header = format!(
            concat!(
                r#"{{"pad":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},"#,
                r#""q":{{"dtype":"F32","shape":[1,1,2],"data_offsets":[1,9]}},"#,
                r#""k":{{"dtype":"F16","shape":[1,1,2],"data_offsets":[9,13]}},"#,
                r#""v":{{"dtype":"BF16","shape":[1,1,2],"data_offsets":[13,17]}}}}{}"#
            ),
            " ".repeat(padding)
        );
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.push(0xFF);
        bytes.extend([1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()));
        bytes.extend([0.25, 3.0].iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()));
        bytes.extend([-1.0, 7.0].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("unaligned.safetensors");
        fs::write(&path, &bytes).unwrap();
        for file in [InputFile::open(&path).unwrap(), InputFile::from_bytes("memory", bytes).unwrap()] {
            for layout in [Layout::Bhsd, Layout::Bshd] {
                let (q, k, v) = file.problem_tensors(layout).unwrap();
                assert_eq!(values(q), [1.5, -2.0]);
                assert_eq!(values(k), [0.25, 3.0]);
                assert_eq!(values(v), [-1.0, 7.0]);
            }
        }
    }
}

#[test]
fn the_bundled_inputs_are_valid() {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/data");
    for (path, heads, tokens, dim, dtype) in [
        ("tiny-dit/qkv_07.safetensors", 2, 4096, 128, DType::Bf16),
        ("dinov2/photo_layer02_head3.safetensors", 1, 4096, 64, DType::F16),
        ("dinov2/video_layer08_head3.safetensors", 1, 8192, 64, DType::F16),
    ] {
        let file = InputFile::open(format!("{data}/{path}")).unwrap();
        let (q, k, v) = file.problem_tensors(Layout::Bhsd).unwrap();
        assert_eq!(q.dtype(), dtype);
        let problem = Problem { grid: file.grid().unwrap(), ..Problem::new(q, k, v) };
        assert!(problem.grid.is_some());
        let shape = problem.validate().unwrap();
        assert_eq!((shape.q_heads, shape.kv_tokens, shape.head_dim), (heads, tokens, dim));
    }
}

#[cfg(unix)]
#[test]
fn a_link_stays_and_a_pipe_is_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let x = tensor([1, 1, 2, 2], DType::F32, Layout::Bhsd);
    let o = [Output::tensor("o", &x, 3).unwrap()];
    let (real, link) = (dir.path().join("real.safetensors"), dir.path().join("link.safetensors"));
    fs::write(&real, "old").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    write(&link, &o, &BTreeMap::new()).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let written = fs::read(&real).unwrap();
    assert!(safetensors::SafeTensors::deserialize(&written).is_ok());

    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read(pipe).unwrap()
    });
    write(&pipe, &o, &BTreeMap::new()).unwrap();
    assert_eq!(reader.join().unwrap(), written);
    assert!(!fs::metadata(&pipe).unwrap().is_file());
}

#[test]
fn the_input_may_be_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let x = tensor([1, 2, 64, 16], DType::F32, Layout::Bhsd);
    let outputs = ["q", "k", "v"].map(|name| Output::tensor(name, &x, 3).unwrap());
    write(&path, &outputs, &metadata()).unwrap();
    let file = InputFile::open(&path).unwrap();
    let (q, ..) = file.problem_tensors(Layout::Bhsd).unwrap();
    write(&path, &[Output::tensor("o", &x, 3).unwrap()], file.metadata()).unwrap();
    assert_eq!(values(q), values(x.view()), "the open file changed");
    assert!(InputFile::open(&path).unwrap().problem_tensors(Layout::Bhsd).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn any_metadata_survives(
        metadata in prop::collection::btree_map(any::<String>(), any::<String>(), 0..6),
        name in "[a-z_.]{1,12}",
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        let x = tensor([1, 1, 3, 1], DType::F16, Layout::Bhsd);
        write(&path, &[Output::tensor(&name, &x, 4).unwrap()], &metadata).unwrap();
        let file = InputFile::open(&path).unwrap();
        prop_assert_eq!(file.metadata(), &metadata);
        let tensors: Vec<_> = file.tensors().collect();
        prop_assert_eq!(tensors, [(name.as_str(), "F16".to_string(), &[1usize, 1, 3, 1][..])]);
    }
}
