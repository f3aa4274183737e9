//! Which value tokens and channels stand out: what decides whether the values of a head survive few bits.
//!
//! Outliers of V sit in a few tokens and in channels that drift over heads, layers and steps (paper Sec. 3.1).
//! An outlying channel costs nothing under one scale per channel; an outlying token sets the scale of its whole
//! block wherever the format has little range (INT8, NVFP4).

use crate::tensor::TensorView;

/// A token or a channel and how heavy it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weight {
    /// Token or channel.
    pub index: usize,
    /// Euclidean norm of the token, or root mean square of the channel over the tokens.
    pub value: f64,
    /// `value` over the median of all tokens (or channels) of the head; `None` when that is 0.
    pub over_median: Option<f64>,
}

/// The outliers of one (batch, kv head) of the values.
#[derive(Clone, Debug, PartialEq)]
pub struct Outliers {
    /// Tokens by falling norm, as many as were asked for.
    pub tokens: Vec<Weight>,
    /// Channels by falling root mean square, as many as were asked for.
    pub channels: Vec<Weight>,
    /// Share of the energy that the heaviest 1% of the tokens (at least one) hold; 0 for an all-zero head.
    pub top_percent_energy: f64,
}

/// Outliers among the first `tokens` value tokens of a head, the heaviest `top` tokens and channels by name.
///
/// # Panics
/// When `batch`, `head` or `tokens` lie outside the tensor.
pub fn of_head(v: &TensorView, batch: usize, head: usize, tokens: usize, top: usize) -> Outliers {
    let dim = v.shape()[3];
    let values = v.read_head(batch, head, tokens);
    let mut norms = Vec::with_capacity(tokens);
    let mut channels = vec![0.0f64; dim];
    for row in values.chunks_exact(dim) {
        let mut energy = 0.0;
        for (channel, &x) in channels.iter_mut().zip(row) {
            let square = f64::from(x) * f64::from(x);
            energy += square;
            *channel += square;
        }
        norms.push(energy.sqrt());
    }
    channels.iter_mut().for_each(|x| *x = (*x / tokens.max(1) as f64).sqrt());

    let ranked = rank(&norms);
    let energy = |ranked: &[Weight]| ranked.iter().map(|w| w.value * w.value).sum::<f64>();
    let all = energy(&ranked);
    let heaviest = energy(&ranked[..tokens.div_ceil(100)]);
    let head_of = |mut ranked: Vec<Weight>| {
        ranked.truncate(top);
        ranked
    };
    Outliers {
        tokens: head_of(ranked),
        channels: head_of(rank(&channels)),
        top_percent_energy: if all > 0.0 { heaviest / all } else { 0.0 },
    }
}

/// All of `values` by falling weight, equal ones by index.
fn rank(values: &[f64]) -> Vec<Weight> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    let median = order.get(values.len() / 2).map_or(0.0, |&i| values[i]);
    let over_median = |value: f64| (median > 0.0).then_some(value / median);
    order
        .into_iter()
        .map(|index| Weight { index, value: values[index], over_median: over_median(values[index]) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Layout;

    #[test]
    fn a_heavy_token_and_a_heavy_channel_are_found() {
        let (n, d) = (200, 8);
        let mut v = vec![1.0f32; n * d];
        v.iter_mut().skip(5).step_by(d).for_each(|x| *x = 3.0);
        v[17 * d..][..d].fill(40.0);
        let view = TensorView::new("v", v.as_slice(), [1, 1, n, d], Layout::Bhsd).unwrap();
        let found = of_head(&view, 0, 0, n, 3);

        assert_eq!((found.tokens.len(), found.tokens[0].index), (3, 17));
        approx::assert_relative_eq!(found.tokens[0].value, (8.0f64 * 1600.0).sqrt(), max_relative = 1e-12);
        approx::assert_relative_eq!(
            found.tokens[0].over_median.unwrap(),
            (12800.0f64 / 16.0).sqrt(),
            max_relative = 1e-12
        );
        assert_eq!(found.tokens[1].index, 0, "equal tokens by index");
        assert_eq!(found.channels[0].index, 5);
        // The heaviest 1% are two tokens: the heavy one and one of the rest.
        let all = 12800.0 + 199.0 * 16.0;
        approx::assert_relative_eq!(found.top_percent_energy, (12800.0 + 16.0) / all, max_relative = 1e-12);
    }

    #[test]
    fn tokens_beyond_the_valid_ones_do_not_count() {
        let v = [1.0f32, 1.0, 2.0, 2.0, 90.0, 90.0];
        let view = TensorView::new("v", &v[..], [1, 1, 3, 2], Layout::Bhsd).unwrap();
        assert_eq!(of_head(&view, 0, 0, 2, 9).tokens.iter().map(|w| w.index).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn zeros_and_no_tokens_have_no_ratio() {
        let v = [0.0f32; 6];
        let view = TensorView::new("v", &v[..], [1, 1, 3, 2], Layout::Bhsd).unwrap();
        let found = of_head(&view, 0, 0, 3, 1);
        assert_eq!((found.tokens[0].over_median, found.top_percent_energy), (None, 0.0));
        assert!(of_head(&view, 0, 0, 0, 1).tokens.is_empty());
    }
}
