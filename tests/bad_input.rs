//! What is wrong with an input is said: the file or tensor, what was expected, what was given. Nothing panics.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use vc_attention::io::{InputFile, Output, write};
use vc_attention::{DType, Error, Layout, NonFinite, Problem, Shape, Tensor, TensorView};

/// A file of a header and data, its length field right.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// A header of q, k, v with these entries, of 16 bytes each.
fn qkv(q: &str, k: &str, v: &str) -> String {
    format!(
        r#"{{"q":{{{q},"data_offsets":[0,16]}},"k":{{{k},"data_offsets":[16,32]}},"v":{{{v},"data_offsets":[32,48]}}}}"#
    )
}

const GOOD: &str = r#""dtype":"F32","shape":[1,2,2]"#;

/// Opening, and taking the tensors.
fn read(bytes: Vec<u8>) -> Result<(), Error> {
    let file = InputFile::from_bytes("input.safetensors", bytes)?;
    file.grid()?;
    file.kv_lens()?;
    file.problem_tensors(Layout::Bhsd).map(|_| ())
}

/// The message, without the file's name, which has to stand in front of it.
#[track_caller]
fn reason(bytes: Vec<u8>) -> String {
    let error = read(bytes).expect_err("a bad file was accepted");
    assert!(matches!(error, Error::File { .. }), "{error:?}");
    let message = error.to_string();
    message.strip_prefix("input.safetensors: ").expect("the message names the file").to_owned()
}

#[test]
fn the_file_that_the_others_are_made_from_is_good() {
    read(file(&qkv(GOOD, GOOD, GOOD), 48)).unwrap();
}

#[test]
fn files_that_cannot_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.safetensors");
    let error = InputFile::open(&missing).unwrap_err();
    assert!(matches!(error, Error::Io { .. }));
    assert!(error.to_string().starts_with(&format!("{}: ", missing.display())), "{error}");

    let error = InputFile::open(dir.path()).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: is a directory", dir.path().display()));

    let empty = dir.path().join("empty.safetensors");
    fs::write(&empty, []).unwrap();
    let error = InputFile::open(&empty).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{}: expected a safetensors file, at least 8 bytes, given 0 bytes", empty.display())
    );
}

#[cfg(unix)]
#[test]
fn a_pipe_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = InputFile::open(&pipe).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: not a regular file", pipe.display()));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let good = file(&qkv(GOOD, GOOD, GOOD), 48);
    for length in 0..good.len() {
        let reason = reason(good[..length].to_vec());
        assert!(reason.contains("expected") && reason.contains("given"), "{length}: {reason}");
    }
    assert_eq!(reason(good[..5].to_vec()), "expected a safetensors file, at least 8 bytes, given 5 bytes");
    assert_eq!(
        reason(good[..good.len() - 1].to_vec()),
        "tensor `v`: expected data inside the 47 bytes after the header, given bytes 32..48: truncated or a wrong \
         header"
    );
    let longer = [&good[..], &[0]].concat();
    assert_eq!(reason(longer), "expected 48 bytes after the header, which its tensors fill, given 49");
}

#[test]
fn header_lengths_that_lie() {
    let good = file(&qkv(GOOD, GOOD, GOOD), 48);
    for length in [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 40, good.len() as u64, good.len() as u64 - 7] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        let reason = reason(bytes);
        assert!(
            reason.starts_with(&format!(
                "header: expected {length} bytes, as the file's first 8 bytes say, given "
            )),
            "{reason}"
        );
    }
    for length in [0, 1, 17] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&u64::to_le_bytes(length));
        assert!(reason(bytes).starts_with("header: expected JSON of tensors, given "));
    }
    let huge = file(&format!("{}{}", qkv(GOOD, GOOD, GOOD), " ".repeat(100_000_000)), 48);
    assert!(reason(huge).starts_with("header: expected at most 100000000 bytes, given "));
}

#[test]
fn headers_that_are_not_json_of_tensors() {
    for (header, given) in [
        ("", "EOF"),
        ("[]", "invalid type: sequence, expected an object of tensors"),
        ("null", "invalid type: null"),
        ("{\"q\":1}", "tensor `q`: invalid type"),
        ("{\"q\":{}}", "tensor `q`: missing field"),
        (
            r#"{"q":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}"#,
            "tensor `q`: invalid value: integer `-1`",
        ),
        (
            r#"{"q":{"dtype":"F32","shape":[1.5],"data_offsets":[0,0]}}"#,
            "tensor `q`: invalid type: floating point",
        ),
        (
            r#"{"q":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,0]}}"#,
            "tensor `q`: invalid type",
        ),
        (r#"{"q":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#, "tensor `q`: unknown variant `F31`"),
        (r#"{"q":{"dtype":"F32","shape":[1],"data_offsets":[0]}}"#, "tensor `q`: invalid length 1"),
        (r#"{"__metadata__":{"grid":[1,2,3]}}"#, "metadata: invalid type: sequence, expected a string"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, "metadata twice"),
        (
            r#"{"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#,
            "tensor `q` twice",
        ),
        (&"[".repeat(100_000), "invalid type: sequence"),
        (&format!("{{\"q\":{}", "[".repeat(100_000)), "tensor `q`: "),
        (&format!("{{\"q\":{{\"x\":{}", "[".repeat(100_000)), "tensor `q`: EOF while parsing"),
    ] {
        let reason = reason(file(header, 0));
        let start = "header: expected JSON of tensors, given ";
        assert!(reason.starts_with(start) && reason.contains(given), "{header:.80}: {reason}");
    }
    let mut latin = file(r#"{"grid":"","k":""}"#, 0);
    latin[17] = 0xFF;
    assert!(reason(latin).starts_with("header: expected JSON of tensors, given "));
}

#[test]
fn data_offsets_that_do_not_fit() {
    let entry =
        |offsets: &str| format!(r#"{{"q":{{"dtype":"F32","shape":[1,2,2],"data_offsets":{offsets}}}}}"#);
    for (offsets, expected) in [
        ("[0,20]", "tensor `q`: expected data inside the 16 bytes after the header, given bytes 0..20: "),
        ("[16,0]", "tensor `q`: expected data inside the 16 bytes after the header, given bytes 16..0: "),
        (
            "[0,18446744073709551615]",
            "tensor `q`: expected data inside the 16 bytes after the header, given bytes",
        ),
        ("[18446744073709551600,18446744073709551615]", "tensor `q`: expected data inside the 16 bytes"),
        ("[0,12]", "tensor `q`: expected 16 bytes for F32 of shape [1, 2, 2], given 12"),
        ("[4,16]", "tensor `q`: expected 16 bytes for F32 of shape [1, 2, 2], given 12"),
    ] {
        let reason = reason(file(&entry(offsets), 16));
        assert!(reason.starts_with(expected), "{reason}");
    }
    let pair = |first: &str, second: &str| {
        format!(
            r#"{{"q":{{"dtype":"F32","shape":[2],"data_offsets":{first}}},"k":{{"dtype":"F32","shape":[2],"data_offsets":{second}}}}}"#
        )
    };
    assert_eq!(
        reason(file(&pair("[0,8]", "[4,12]"), 12)),
        "tensor `k`: expected data from byte 8, where the one before ends, given bytes 4..12"
    );
    assert_eq!(
        reason(file(&pair("[0,8]", "[9,17]"), 17)),
        "tensor `k`: expected data from byte 8, where the one before ends, given bytes 9..17"
    );
    assert_eq!(
        reason(file(&pair("[8,16]", "[0,8]"), 24)),
        "expected 16 bytes after the header, which its tensors fill, given 24"
    );
}

#[test]
fn shapes_that_overflow() {
    for shape in [
        "[18446744073709551615]",
        "[4294967296,4294967296]",
        "[2305843009213693952]",
        "[3,4294967296,4294967296,2]",
        "[18446744073709551615,0]",
    ] {
        let header = format!(r#"{{"q":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
        let reason = reason(file(&header, 0));
        assert!(
            reason
                .starts_with("tensor `q`: expected a whole number of bytes below 2^61, given F32 of shape [")
        );
    }
    // Half a byte of FP4.
    let header = r#"{"x":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#;
    assert_eq!(
        reason(file(header, 1)),
        "tensor `x`: expected a whole number of bytes below 2^61, given F4 of shape [3]"
    );
    // Sizes that only overflow when they are added up, or when the header's is added to them.
    for tensors in [8, 9] {
        let size = (1u64 << 61) - 1;
        let entry = |i: u64| {
            let (start, end) = (size.wrapping_mul(i), size.wrapping_mul(i + 1));
            format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#)
        };
        let header = format!("{{{}}}", (0..tensors).map(entry).collect::<Vec<_>>().join(","));
        assert!(reason(file(&header, 64)).starts_with("tensor `t0`: expected data inside the 64 bytes"));
    }
}

#[test]
fn tensors_that_are_missing_or_of_the_wrong_kind() {
    assert_eq!(reason(file("{}", 0)), "tensor `q`: expected in the file, given no tensor");
    let other = r#"{"queries":{"dtype":"F32","shape":[1,2,2],"data_offsets":[0,16]}}"#;
    assert_eq!(reason(file(other, 16)), "tensor `q`: expected in the file, given queries");
    let header = r#"{"q":{"dtype":"F32","shape":[1,2,2],"data_offsets":[0,16]}}"#;
    assert_eq!(reason(file(header, 16)), "tensor `k`: expected in the file, given q");

    for (dtype, shape) in
        [("F64", "[1,1,2]"), ("I32", "[1,2,2]"), ("F8_E4M3", "[1,4,4]"), ("BOOL", "[1,4,4]")]
    {
        let bad = format!(r#""dtype":"{dtype}","shape":{shape}"#);
        assert_eq!(
            reason(file(&qkv(GOOD, GOOD, &bad), 48)),
            format!("tensor `v`: expected F32, F16 or BF16, given {dtype}")
        );
    }
    for (shape, given) in [("[4]", "[4]"), ("[2,2]", "[2, 2]"), ("[1,1,1,2,2]", "[1, 1, 1, 2, 2]")] {
        let bad = format!(r#""dtype":"F32","shape":{shape}"#);
        assert_eq!(
            reason(file(&qkv(&bad, GOOD, GOOD), 48)),
            format!("tensor `q`: expected rank 3 or 4, given shape {given}")
        );
        assert_eq!(
            reason(file(&qkv(GOOD, &bad, GOOD), 48)),
            format!("tensor `k`: expected rank 3 as in `q`, given shape {given}")
        );
    }
    let scalar = r#""dtype":"F32","shape":[],"data_offsets":[0,4]"#;
    assert_eq!(
        reason(file(&format!("{{\"q\":{{{scalar}}}}}"), 4)),
        "tensor `q`: expected rank 3 or 4, given shape []"
    );
}

#[test]
fn lengths_and_grids_that_are_none() {
    let with = |dtype: &str, shape: &str, size: usize, value: &[u8]| {
        let header = qkv(GOOD, GOOD, GOOD);
        let lens = format!(
            r#","kv_lens":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[48,{}]}}}}"#,
            48 + size
        );
        let mut bytes = file(&(header[..header.len() - 1].to_owned() + &lens), 48);
        bytes.extend(value);
        bytes
    };
    for (dtype, value) in [
        ("I64", &2i64.to_le_bytes()[..]),
        ("U64", &2u64.to_le_bytes()),
        ("I32", &2i32.to_le_bytes()),
        ("U32", &2u32.to_le_bytes()),
    ] {
        let file = InputFile::from_bytes("lens", with(dtype, "[1]", value.len(), value)).unwrap();
        assert_eq!(file.kv_lens().unwrap(), Some(vec![2]), "{dtype}");
    }
    assert_eq!(
        reason(with("I64", "[1]", 8, &(-3i64).to_le_bytes())),
        "tensor `kv_lens`: expected lengths of at least 0, given -3"
    );
    assert_eq!(
        reason(with("F32", "[1]", 4, &[0; 4])),
        "tensor `kv_lens`: expected I32, I64, U32 or U64, given F32"
    );
    assert_eq!(
        reason(with("I32", "[1,1]", 4, &[0; 4])),
        "tensor `kv_lens`: expected rank 1, given shape [1, 1]"
    );

    for grid in ["", "16", "[1, 2]", "[1, 2, 3, 4]", "[1, -2, 3]", "[1, 2.5, 3]", "[1, 2, 3", "1, 2, 3"] {
        let header = format!(r#"{{"__metadata__":{{"grid":"{grid}"}}}}"#);
        let file = InputFile::from_bytes("g", file(&header, 0)).unwrap();
        assert_eq!(
            file.grid().unwrap_err().to_string(),
            format!("g: metadata `grid`: expected `[t, h, w]`, given `{grid}`")
        );
    }
}

#[test]
fn messages_stay_short_and_harmless() {
    let long = "x".repeat(10_000);
    let header = format!(r#"{{"\u001b[2J{long}":{{"dtype":"F32","shape":[1],"data_offsets":[0,3]}}}}"#);
    let reason_of_name = reason(file(&header, 3));
    assert!(reason_of_name.starts_with("tensor `\\u{1b}[2Jxxx"), "{reason_of_name}");
    assert!(reason_of_name.len() < 200 && !reason_of_name.contains('\u{1b}'));

    let header = format!(r#"{{"q":{{"dtype":"\u001b{long}","shape":[],"data_offsets":[0,0]}}}}"#);
    let reason_of_dtype = reason(file(&header, 0));
    assert!(reason_of_dtype.len() < 500 && !reason_of_dtype.contains('\u{1b}'), "{reason_of_dtype}");

    let shape = vec!["1"; 5000].join(",");
    let header = format!(r#"{{"q":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}}}"#);
    assert_eq!(
        reason(file(&header, 4)),
        "tensor `q`: expected rank 3 or 4, given shape [1, 1, 1, 1, 1, 1, 1, 1] and 4992 more axes"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, ..ProptestConfig::default() })]

    /// A few bytes of a good file changed: what is accepted is what the format's own reader accepts.
    #[test]
    fn damaged_files_are_read_as_safetensors_reads_them(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = file(&qkv(GOOD, GOOD, GOOD), 48);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let ours = InputFile::from_bytes("damaged", bytes.clone()).is_ok();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).is_ok();
        prop_assert_eq!(ours, theirs);
        let _ = read(bytes);
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(bytes.clone());
        let mut framed = (bytes.len() as u64).to_le_bytes().to_vec();
        framed.extend(bytes);
        prop_assert!(read(framed).is_err());
    }
}

// Problems.

fn ones(shape: [usize; 4]) -> Tensor {
    Tensor::from_bhsd(vec![1.0; shape.iter().product()], shape, DType::F32, Layout::Bhsd)
}

fn validate(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Shape, Error> {
    let (q, k, v) = (ones(q), ones(k), ones(v));
    Problem::new(q.view(), k.view(), v.view()).validate()
}

#[test]
fn shapes_that_go_together() {
    let good = [1, 2, 3, 4];
    let shape = Shape { batch: 1, q_heads: 4, kv_heads: 2, q_tokens: 7, kv_tokens: 3, head_dim: 4 };
    assert_eq!(validate([1, 4, 7, 4], good, good).unwrap(), shape);
    assert!((0..4).map(|head| shape.kv_head(head)).eq([0, 0, 1, 1]));
    assert_eq!(shape.flops(), 4.0 * 4.0 * 7.0 * 3.0 * 4.0);
    // One token, one channel, one head.
    assert!(validate([1; 4], [1; 4], [1; 4]).is_ok());
    assert!(validate([1, 1, 1, 256], [1, 1, 1, 256], [1, 1, 1, 256]).is_ok());
}

#[test]
fn shapes_that_do_not_go_together() {
    let good = [1, 2, 3, 4];
    for (q, k, v, message) in [
        (
            [2, 2, 3, 4],
            good,
            good,
            "tensor `k`: expected batch 2 and head_dim 4 as in q, given shape [1, 2, 3, 4]",
        ),
        (
            [1, 2, 3, 5],
            good,
            good,
            "tensor `k`: expected batch 1 and head_dim 5 as in q, given shape [1, 2, 3, 4]",
        ),
        (
            [1, 3, 3, 4],
            good,
            good,
            "tensor `k`: expected a number of heads that divides q's 3, given 2 heads",
        ),
        (
            [1, 1, 3, 4],
            good,
            good,
            "tensor `k`: expected a number of heads that divides q's 1, given 2 heads",
        ),
        (
            good,
            good,
            [1, 2, 4, 4],
            "tensor `v`: expected the shape of k [1, 2, 3, 4], given shape [1, 2, 4, 4]",
        ),
        (
            good,
            good,
            [1, 1, 3, 4],
            "tensor `v`: expected the shape of k [1, 2, 3, 4], given shape [1, 1, 3, 4]",
        ),
        (
            [1, 1, 1, 257],
            [1, 1, 1, 257],
            [1, 1, 1, 257],
            "tensor `q`: expected head_dim of at most 256, given head_dim 257",
        ),
    ] {
        assert_eq!(validate(q, k, v).unwrap_err().to_string(), message);
    }
}

#[test]
fn empty_axes() {
    let good = [1, 2, 3, 4];
    for axis in 0..4 {
        let mut empty = good;
        empty[axis] = 0;
        for (name, [q, k, v]) in
            [("q", [empty, good, good]), ("k", [good, empty, good]), ("v", [good, good, empty])]
        {
            assert_eq!(
                validate(q, k, v).unwrap_err().to_string(),
                format!("tensor `{name}`: expected no empty axis, given shape {empty:?}")
            );
        }
    }
}

#[test]
fn broadcast_axes_larger_than_memory() {
    let one = [1.0f32];
    let view = |shape| TensorView::strided("q", &one[..], shape, [0; 4]).unwrap();
    let small = view([1, 1, 1, 1]);
    for shape in [[1 << 62, 1, 1, 1], [1, 1 << 40, 1 << 40, 1], [usize::MAX; 4]] {
        let error = Problem::new(view(shape), small, small).validate().unwrap_err();
        assert!(error.to_string().starts_with("tensor `q`: expected at most "), "{error}");
    }
    let keys = view([1, 1, 1 << 32, 1]);
    let error = Problem::new(small, keys, keys).validate().unwrap_err();
    assert_eq!(error.to_string(), "tensor `k`: expected fewer than 2^32 tokens, given 4294967296 tokens");
}

#[test]
fn options_out_of_range() {
    let x = ones([2, 1, 6, 4]);
    let problem = Problem::new(x.view(), x.view(), x.view());
    for (lens, message) in [
        (&[6][..], "tensor `kv_lens`: expected one length for each of 2 batches, given 1 lengths"),
        (&[6, 6, 6], "tensor `kv_lens`: expected one length for each of 2 batches, given 3 lengths"),
        (&[6, 7], "tensor `kv_lens`: expected lengths of at most 6, given length 7"),
        (
            &[usize::MAX, 0],
            "tensor `kv_lens`: expected lengths of at most 6, given length 18446744073709551615",
        ),
    ] {
        let error = Problem { kv_lens: Some(lens), ..problem }.validate().unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    assert!(Problem { kv_lens: Some(&[0, 6]), ..problem }.validate().is_ok());

    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = Problem { scale: Some(scale), ..problem }.validate().unwrap_err();
        assert_eq!(error.to_string(), format!("option `scale`: expected a finite number, given {scale}"));
    }
    for scale in [0.0, -0.0, -1.0, f32::MAX] {
        let problem = Problem { scale: Some(scale), ..problem };
        assert!(problem.validate().is_ok());
        assert_eq!(problem.scale(), scale);
    }
    assert_eq!(problem.scale(), 0.5);

    for grid in [[0, 1, 6], [1, 2, 4], [usize::MAX, usize::MAX, 6], [6, 6, 6]] {
        let error = Problem { grid: Some(grid), ..problem }.validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "option `grid`: expected a grid [t, h, w] whose product is the 6 key tokens, given {grid:?}"
            )
        );
    }
    assert!(Problem { grid: Some([1, 2, 3]), ..problem }.validate().is_ok());
}

#[test]
fn values_that_are_not_finite_are_named_with_their_position() {
    let shape = [2, 2, 5, 3];
    for (index, name) in ["q", "k", "v"].into_iter().enumerate() {
        for (bad, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let mut values = vec![1.0; 60];
                values[((2 + 1) * 5 + 3) * 3 + 2] = bad;
                let bad = Tensor::from_bhsd(values, shape, dtype, Layout::Bshd);
                let good = ones(shape);
                let mut views = [good.view(); 3];
                views[index] = bad.view();
                let problem = Problem::new(views[0], views[1], views[2]);
                assert_eq!(
                    problem.validate().unwrap_err().to_string(),
                    format!(
                        "tensor `{name}`: expected finite values, given {text} at [batch 1, head 1, token 3, \
                         channel 2]"
                    )
                );
                // Tokens past the valid ones take part in nothing; queries have no such limit.
                let shorter = Problem { kv_lens: Some(&[5, 3]), ..problem };
                assert_eq!(shorter.validate().is_ok(), name != "q");
                assert!(Problem { nonfinite: NonFinite::Propagate, ..problem }.validate().is_ok());
            }
        }
    }
}

#[test]
fn an_f32_beyond_f16_becomes_an_infinity_that_is_found() {
    let q = Tensor::from_bhsd(vec![65520.0], [1; 4], DType::F16, Layout::Bhsd);
    let good = ones([1; 4]);
    let error = Problem::new(q.view(), good.view(), good.view()).validate().unwrap_err();
    assert!(error.to_string().contains("given inf at"), "{error}");
}

// Output.

#[test]
fn files_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = ones([1, 1, 2, 2]);
    let o = Output::tensor("o", &tensor, 3).unwrap();
    let metadata = Default::default();
    let entries = |path: &Path| fs::read_dir(path).unwrap().count();

    for path in [dir.path().join("none/out.safetensors"), dir.path().join(""), dir.path().to_path_buf()] {
        let error = write(&path, std::slice::from_ref(&o), &metadata).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
        assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
    }
    let path = dir.path().join("out.safetensors");
    for names in [["o", "o"], ["o", "__metadata__"]] {
        let tensors = names.map(|name| Output::tensor(name, &tensor, 3).unwrap());
        let error = write(&path, &tensors, &metadata).unwrap_err();
        let expected = format!("tensor `{}`: expected another name, given one that is taken", names[1]);
        assert_eq!(error.to_string(), format!("{}: {expected}", path.display()));
    }
    assert_eq!(entries(dir.path()), 0, "something was left behind");

    assert_eq!(
        Output::tensor("o", &ones([2, 1, 2, 2]), 3).unwrap_err().to_string(),
        "option `rank`: expected 4, or 3 for a batch of 1, given 3 for a batch of 2"
    );
    assert_eq!(
        Output::lse("lse", &[0.0; 3], [1, 1, 2], 3).unwrap_err().to_string(),
        "tensor `lse`: expected values for shape [1, 1, 2], given 3 values"
    );
}
