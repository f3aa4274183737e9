//! Views: every layout, stride and element type, and that nothing outside the data is ever read.

use half::{bf16, f16};
use proptest::prelude::*;
use vc_attention::{DType, Elements, Error, Layout, Tensor, TensorView};

/// Position of an element as a value, exact in every type for small tensors.
fn numbered(shape: [usize; 4]) -> Vec<f32> {
    (0..shape.iter().product()).map(|i| i as f32).collect()
}

fn all_rows(view: TensorView<'_>) -> Vec<f32> {
    let [b, h, n, d] = view.shape();
    let mut out = Vec::new();
    let mut row = vec![0.0; d];
    for batch in 0..b {
        for head in 0..h {
            for token in 0..n {
                view.read_row(batch, head, token, &mut row);
                out.extend_from_slice(&row);
            }
        }
    }
    out
}

#[test]
fn layouts_name_the_same_elements() {
    for shape in [[1, 1, 1, 1], [2, 3, 5, 7], [1, 2, 129, 3], [3, 1, 2, 16]] {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            // bfloat16 counts to 256 exactly.
            let values: Vec<f32> = numbered(shape).into_iter().map(|x| x % 251.0).collect();
            for layout in [Layout::Bhsd, Layout::Bshd] {
                let tensor = Tensor::from_bhsd(values.clone(), shape, dtype, layout);
                assert_eq!(tensor.view().shape(), shape);
                assert_eq!(tensor.view().dtype(), dtype);
                assert_eq!(all_rows(tensor.view()), values, "{shape:?} {dtype:?} {layout:?}");
            }
        }
    }
}

#[test]
fn strides_of_a_packed_qkv_projection() {
    // [batch, tokens, 3, heads, dim] as one linear layer writes it: three views into one buffer.
    let (b, n, h, d) = (2, 5, 3, 4);
    let data = numbered([b, n, 3 * h, d]);
    for which in 0..3 {
        let view =
            TensorView::strided("q", &data[which * h * d..], [b, h, n, d], [n * 3 * h * d, d, 3 * h * d, 1])
                .unwrap();
        for batch in 0..b {
            for head in 0..h {
                for (token, row) in view.read_head(batch, head, n).chunks(d).enumerate() {
                    let first = (((batch * n + token) * 3 + which) * h + head) * d;
                    assert_eq!(row, &data[first..][..d]);
                }
            }
        }
    }
}

#[test]
fn channels_may_be_strided_and_axes_broadcast() {
    // [batch, heads, dim, tokens]: channels are `tokens` apart.
    let (h, n, d) = (2, 7, 3);
    let data = numbered([1, h, d, n]);
    let view = TensorView::strided("k", &data[..], [4, h, n, d], [0, n * d, 1, n]).unwrap();
    for batch in 0..4 {
        let head = view.read_head(batch, 1, n);
        for token in 0..n {
            for channel in 0..d {
                assert_eq!(head[token * d + channel], data[n * d + channel * n + token]);
            }
        }
    }
    let one = [2.5f32];
    let constant = TensorView::strided("v", &one[..], [2, 3, 4, 5], [0; 4]).unwrap();
    assert_eq!(all_rows(constant), vec![2.5; 120]);
}

#[test]
fn read_head_takes_the_first_tokens() {
    let tensor = Tensor::from_bhsd(numbered([1, 2, 5, 3]), [1, 2, 5, 3], DType::F32, Layout::Bshd);
    let all = tensor.view().read_head(0, 1, 5);
    assert_eq!(tensor.view().read_head(0, 1, 2), all[..6]);
    assert!(tensor.view().read_head(0, 1, 0).is_empty());
}

#[test]
fn the_number_of_elements_has_to_fit() {
    let data = [0.0f32; 23];
    let error = TensorView::new("k", &data[..], [1, 2, 3, 4], Layout::Bhsd).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tensor `k`: expected 24 elements for shape [1, 2, 3, 4], given 23 elements"
    );
    let error = TensorView::new("k", &data[..], [usize::MAX, 2, 3, 4], Layout::Bshd).unwrap_err();
    assert!(error.to_string().contains("more than memory holds elements"), "{error}");
    let error = TensorView::strided("v", &data[..], [1, 2, 3, 4], [0, 12, 4, 1]).unwrap_err();
    assert!(error.to_string().contains("it reaches to element 23), given 23 elements"), "{error}");
    let error = TensorView::strided("v", &data[..], [2, 2, 3, 4], [usize::MAX, 12, 4, 1]).unwrap_err();
    assert!(error.to_string().contains("further than memory"), "{error}");
}

#[test]
fn empty_tensors_read_nothing() {
    let none: [f16; 0] = [];
    for shape in [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [2, 3, 4, 0]] {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let view = TensorView::new("q", &none[..], shape, layout).unwrap();
            assert!(view.elements().is_empty());
            assert!(all_rows(view).is_empty());
            assert_eq!(view.find_nonfinite(None), None);
        }
    }
    // An axis of none makes strides and the other axes irrelevant, however large.
    let view = TensorView::strided("q", &none[..], [9, 2, 3, 0], [usize::MAX; 4]).unwrap();
    assert!(view.read_head(8, 1, 3).is_empty());
    assert!(TensorView::new("q", &none[..], [usize::MAX, usize::MAX, 0, 2], Layout::Bshd).is_ok());
}

/// What a 16-bit float means, from the definition of the format.
fn decode(bits: u16, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    match exponent {
        0 => sign * mantissa * 2f64.powi(1 - bias),
        e if e == (1 << exponent_bits) - 1 => {
            if mantissa == 0.0 {
                sign * f64::INFINITY
            } else {
                f64::NAN
            }
        }
        e => sign * (1.0 + mantissa) * 2f64.powi(e - bias),
    }
}

#[test]
fn widening_is_exact_for_every_16_bit_value() {
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let shape = [1, 1, 256, 256];
    let views: [(Elements<'_>, u32, u32); 2] = [(halves[..].into(), 5, 10), (brains[..].into(), 8, 7)];
    for (elements, exponent, mantissa) in views {
        for strides in [[1 << 16, 1 << 16, 256, 1], [1 << 16, 1 << 16, 1, 256]] {
            let view = TensorView::strided("q", elements, shape, strides).unwrap();
            for (i, &x) in all_rows(view).iter().enumerate() {
                let bits = if strides[3] == 1 { i } else { (i % 256) * 256 + i / 256 } as u16;
                let expected = decode(bits, exponent, mantissa);
                assert!(
                    f64::from(x).to_bits() == expected.to_bits() || (x.is_nan() && expected.is_nan()),
                    "{bits:#x}"
                );
                assert_eq!(x.is_sign_negative(), bits >> 15 == 1);
            }
        }
    }
}

#[test]
fn the_first_value_that_is_not_finite_is_found() {
    let shape = [2, 3, 70, 5];
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for layout in [Layout::Bhsd, Layout::Bshd] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![1.0; shape.iter().product()];
                // Last in the order (batch, head, token, channel), though not in memory under bshd.
                values[((3 + 2) * 70 + 3) * 5 + 4] = bad;
                values[((3 + 1) * 70 + 69) * 5 + 2] = bad;
                let tensor = Tensor::from_bhsd(values, shape, dtype, layout);
                let (position, value) = tensor.view().find_nonfinite(None).unwrap();
                assert_eq!(position, [1, 1, 69, 2]);
                assert!(value == bad || (value.is_nan() && bad.is_nan()));
                // Past the valid tokens it does not count.
                assert_eq!(tensor.view().find_nonfinite(Some(&[70, 69])).unwrap().0, [1, 2, 3, 4]);
                assert_eq!(tensor.view().find_nonfinite(Some(&[70, 3])), None);
            }
        }
    }
}

#[test]
fn the_first_is_found_in_tensors_that_threads_share() {
    let (h, n, d) = (3, 8191, 8);
    let mut values = vec![f16::ONE; h * n * d];
    // By memory order in bshd the second comes first, by (head, token) the first does.
    let (first, second) = ([0, 1, 8000, 7], [0, 2, 17, 0]);
    for layout in [Layout::Bhsd, Layout::Bshd] {
        let strides = layout.strides([1, h, n, d]);
        let index = |at: [usize; 4]| at.iter().zip(strides).map(|(&i, stride)| i * stride).sum::<usize>();
        for (at, bad) in [(second, f16::NAN), (first, f16::INFINITY)] {
            values[index(at)] = bad;
            let view = TensorView::new("k", &values[..], [1, h, n, d], layout).unwrap();
            assert_eq!(view.find_nonfinite(None).unwrap().0, at);
        }
        let view = TensorView::new("k", &values[..], [1, h, n, d], layout).unwrap();
        assert_eq!(view.find_nonfinite(Some(&[8000])).unwrap().0, second);
        assert_eq!(view.find_nonfinite(Some(&[17])), None);
        for at in [first, second] {
            values[index(at)] = f16::ONE;
        }
        let view = TensorView::new("k", &values[..], [1, h, n, d], layout).unwrap();
        assert_eq!(view.find_nonfinite(None), None);
    }
}

#[test]
fn what_a_view_leaves_out_may_be_anything() {
    // Tokens 0, 2, 4 of 6, two channels of three.
    let data: Vec<f32> = (0..18).map(|i| if i % 6 < 2 { 1.0 } else { f32::NAN }).collect();
    let view = TensorView::strided("v", &data[..], [1, 1, 3, 2], [0, 0, 6, 1]).unwrap();
    assert_eq!(view.find_nonfinite(None), None);
    let view = TensorView::strided("v", &data[..], [1, 1, 3, 3], [0, 0, 6, 1]).unwrap();
    assert_eq!(view.find_nonfinite(None).unwrap().0, [0, 0, 0, 2]);
}

/// Sizes and strides that sometimes fit the data and sometimes are far out.
fn extent() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0usize..6, 2 => 0usize..300, 1 => any::<usize>(), 1 => Just(usize::MAX)]
}

fn extents() -> impl Strategy<Value = [usize; 4]> {
    [extent(), extent(), extent(), extent()]
}

/// The last element that a view reaches, in arithmetic that cannot overflow: `None` when there is none at all.
fn reach(shape: [usize; 4], strides: [usize; 4]) -> Option<f64> {
    let term = |(&n, stride): (&usize, usize)| (n as f64 - 1.0) * stride as f64;
    (!shape.contains(&0)).then(|| shape.iter().zip(strides).map(term).sum())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn strided_accepts_exactly_what_stays_inside(shape in extents(), strides in extents(), len in 0usize..400) {
        // The slice ends at the end of its allocation, so that a sanitizer sees a read past it.
        let data = vec![f16::ONE; len].into_boxed_slice();
        let view = TensorView::strided("q", &data[..], shape, strides);
        let inside = reach(shape, strides).is_none_or(|last| last < len as f64);
        prop_assert_eq!(view.is_ok(), inside);
        match view {
            // Broadcast and empty views may have axes of any size; walking them takes as long as they are large.
            Ok(view) if shape.iter().fold(1usize, |n, &x| n.saturating_mul(x.max(1))) < 4096 => {
                prop_assert!(all_rows(view).iter().all(|&x| x == 1.0));
                prop_assert_eq!(view.find_nonfinite(None), None);
            }
            Ok(_) => {}
            Err(error) => {
                let named = matches!(&error, Error::Tensor { tensor: "q", .. });
                prop_assert!(named, "{}", error);
            }
        }
    }

    #[test]
    fn contiguous_accepts_exactly_the_product(shape in extents(), len in 0usize..400) {
        let data = vec![bf16::ONE; len];
        let product = if shape.contains(&0) { 0.0 } else { shape.iter().map(|&n| n as f64).product() };
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let view = TensorView::new("q", &data[..], shape, layout);
            prop_assert_eq!(view.is_ok(), product == len as f64);
        }
    }

    #[test]
    fn reading_follows_the_strides(
        shape in [1usize..4, 1usize..4, 1usize..6, 1usize..6],
        strides in [0usize..9, 0usize..9, 0usize..9, 0usize..9],
    ) {
        let last: usize = shape.iter().zip(strides).map(|(&n, s)| (n - 1) * s).sum();
        let data: Vec<f32> = (0..=last).map(|i| i as f32).collect();
        let view = TensorView::strided("k", &data[..], shape, strides).unwrap();
        let mut expected = Vec::new();
        for b in 0..shape[0] {
            for h in 0..shape[1] {
                for n in 0..shape[2] {
                    for d in 0..shape[3] {
                        expected.push((b * strides[0] + h * strides[1] + n * strides[2] + d * strides[3]) as f32);
                    }
                }
            }
        }
        prop_assert_eq!(&all_rows(view), &expected);
        let heads: Vec<f32> = (0..shape[0] * shape[1])
            .flat_map(|i| view.read_head(i / shape[1], i % shape[1], shape[2]))
            .collect();
        prop_assert_eq!(&heads, &expected);
    }
}
