//! The values that are timed: neither zeros nor copies of each other, since power, rescaling of the softmax and
//! the k-means depend on them. Two billion take seconds.

use std::path::{Path, PathBuf};

use half::bf16;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use rayon::prelude::*;
use vc_attention::io::InputFile;
use vc_attention::{Layout, Problem};

use super::super::failure::{Failure, Result};
use super::super::input::title;
use super::call::Call;

/// Elements that one stream of random numbers fills.
const CHUNK: usize = 1 << 16;

/// Spread of the factors that tell the copies of a file's token apart.
const JITTER: f32 = 0.05;

/// A tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Q,
    K,
    V,
}

/// Where values come from.
#[derive(Clone, Debug)]
pub enum Data {
    /// Normal with mean 0 and variance 1.
    Normal,
    /// The tokens of a file.
    File(PathBuf),
}

impl From<String> for Data {
    fn from(text: String) -> Self {
        if text == "normal" { Data::Normal } else { Data::File(text.into()) }
    }
}

impl Data {
    /// The file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Data::Normal => None,
            Data::File(path) => Some(path),
        }
    }
}

/// Values for calls of any size; the same for the same seed, whatever the number of threads.
pub struct Source {
    seed: u64,
    /// In words.
    pub name: String,
    file: Option<Heads>,
}

/// The heads of a file, each tensor row-major [tokens, head_dim].
struct Heads {
    head_dim: usize,
    /// Q, K and V of every (batch, query head).
    heads: Vec<[Vec<f32>; 3]>,
}

impl Source {
    /// Reads the file, if there is one.
    pub fn open(data: &Data, seed: u64) -> Result<Self> {
        let Some(path) = data.file() else {
            return Ok(Self { seed, name: format!("N(0,1) values with seed {seed}"), file: None });
        };
        let file = InputFile::open(path)?;
        let (q, k, v) = file.problem_tensors(Layout::Bhsd)?;
        let kv_lens = file.kv_lens()?;
        let problem = Problem { kv_lens: kv_lens.as_deref(), ..Problem::new(q, k, v) };
        let shape = problem.validate()?;
        let mut heads = Vec::new();
        for batch in (0..shape.batch).filter(|&batch| problem.kv_len(batch) > 0) {
            for head in 0..shape.q_heads {
                let kv = |view: &vc_attention::TensorView| {
                    view.read_head(batch, shape.kv_head(head), problem.kv_len(batch))
                };
                heads.push([
                    problem.q.read_head(batch, head, shape.q_tokens),
                    kv(&problem.k),
                    kv(&problem.v),
                ]);
            }
        }
        if heads.is_empty() {
            return Err(Failure::usage(format!(
                "{}: expected at least one valid key, given none",
                path.display()
            )));
        }
        let name = format!("values of {}, seed {seed}", title(&path.display().to_string(), &shape));
        Ok(Self { seed, name, file: Some(Heads { head_dim: shape.head_dim, heads }) })
    }

    /// Refuses a call that the file has no values for.
    pub fn check(&self, call: &Call) -> Result<()> {
        match &self.file {
            Some(file) if file.head_dim != call.head_dim => Err(Failure::usage(format!(
                "--data: expected a file of head_dim {} as the shape has, given {}",
                call.head_dim, file.head_dim
            ))),
            _ => Ok(()),
        }
    }

    /// A tensor, contiguous in (batch, heads, tokens, dim).
    pub fn tensor(&self, call: &Call, which: Which) -> Vec<bf16> {
        let (n, d) = (call.tokens(), call.head_dim);
        let mut out = vec![bf16::ZERO; call.batch * call.heads * n * d];
        match &self.file {
            None => out.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| {
                let mut rng = self.rng(which as u64, chunk as u64);
                out.iter_mut().for_each(|x| *x = bf16::from_f32(rng.sample(StandardNormal)));
            }),
            Some(file) => out.par_chunks_mut(n * d).enumerate().for_each(|(head, out)| {
                self.tile(&file.heads[head % file.heads.len()][which as usize], head as u64, which, d, out);
            }),
        }
        out
    }

    /// Fills a head with as many copies of a file's tokens as it takes.
    ///
    /// Every head gets a signed permutation of the channels of its own, one for Q and K, which leaves the scores
    /// alone, and one for V; every copy starts at another token, the same in K and V; every token is scaled by a
    /// factor near 1. So heads differ in every bit, no block of 128 tokens comes twice, and the statistics that
    /// matter (scores, outliers, neighbours that are alike) stay those of the file.
    fn tile(&self, tokens: &[f32], head: u64, which: Which, d: usize, out: &mut [bf16]) {
        const CHANNELS: u64 = 16;
        const START: u64 = 17;
        const FACTOR: u64 = 18;
        let mut rng = self.rng(CHANNELS + 16 * u64::from(which == Which::V), head);
        let mut channels: Vec<(usize, f32)> =
            (0..d).map(|c| (c, if rng.random() { 1.0 } else { -1.0 })).collect();
        channels.shuffle(&mut rng);
        let mut start = self.rng(START, head);
        let mut factor = self.rng(FACTOR + 16 * which as u64, head);
        let count = tokens.len() / d;
        for copy in out.chunks_mut(count * d) {
            let first = start.random_range(0..count);
            for (i, row) in copy.chunks_exact_mut(d).enumerate() {
                let from = &tokens[(first + i) % count * d..][..d];
                let factor = 1.0 + JITTER * factor.sample::<f32, _>(StandardNormal);
                row.iter_mut()
                    .zip(&channels)
                    .for_each(|(x, &(c, s))| *x = bf16::from_f32(from[c] * s * factor));
            }
        }
    }

    /// Random numbers of their own for every purpose and index.
    fn rng(&self, purpose: u64, index: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(purpose << 48 | index);
        rng
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::call::parse;
    use super::*;

    fn wide(x: &[bf16]) -> Vec<f64> {
        x.iter().map(|x| x.to_f64()).collect()
    }

    #[test]
    fn normal_values_are_normal_and_differ() {
        let call = parse("1,3,1000,64").unwrap();
        let source = Source::open(&Data::Normal, 7).unwrap();
        let [q, k, v] = [Which::Q, Which::K, Which::V].map(|which| source.tensor(&call, which));
        for x in [&q, &k, &v] {
            let x = wide(x);
            let n = x.len() as f64;
            let moment = |power| x.iter().map(|x| x.powi(power)).sum::<f64>() / n;
            assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.02, "{} {}", moment(1), moment(2));
            assert!((moment(4) - 3.0).abs() < 0.15, "{}", moment(4));
        }
        let equal = |a: &[bf16], b: &[bf16]| a.iter().zip(b).filter(|(a, b)| a == b).count() as f64;
        // Two independent values share their bf16 once in a few hundred.
        assert!(equal(&q, &k) / (q.len() as f64) < 0.01);
        assert!(equal(&q[..CHUNK], &q[CHUNK..2 * CHUNK]) / (CHUNK as f64) < 0.01, "streams repeat");
        assert_eq!(q, source.tensor(&call, Which::Q));
        assert_ne!(q, Source::open(&Data::Normal, 8).unwrap().tensor(&call, Which::Q));
    }

    /// A source on `count` made-up tokens of one head.
    fn filed(count: usize, d: usize) -> Source {
        let make = |which: usize| -> Vec<f32> {
            (0..count * d).map(|i| ((i * (3 + which) + which) as f32 * 0.7).sin()).collect()
        };
        let heads = vec![[make(0), make(1), make(2)]];
        Source { seed: 3, name: String::new(), file: Some(Heads { head_dim: d, heads }) }
    }

    #[test]
    fn tiled_heads_keep_the_scores_of_the_file() {
        let (count, d) = (200, 64);
        let source = filed(count, d);
        let call = parse("1,4,500,64").unwrap();
        let (q, k) = (wide(&source.tensor(&call, Which::Q)), wide(&source.tensor(&call, Which::K)));
        let file = &source.file.as_ref().unwrap().heads[0];
        let score = |q: &[f64], k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
        let row = |x: &[f32], i: usize| x[i * d..][..d].iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        // Scores of the first query, up to its jitter and the keys', whatever the head.
        for head in 0..4 {
            let start = source.rng(17, head as u64).random_range(0..count);
            let at = |x: &[f64], i: usize| x[(head * 500 + i) * d..][..d].to_vec();
            for i in 0..50 {
                let token = (start + i) % count;
                let expected = score(&row(&file[0], start), &row(&file[1], token));
                let given = score(&at(&q, 0), &at(&k, i));
                assert!(
                    (given - expected).abs() < 0.35 * expected.abs() + 0.5,
                    "{head} {i}: {given} {expected}"
                );
            }
        }
    }

    #[test]
    fn hardly_a_token_and_no_block_comes_twice() {
        let source = filed(256, 32); // two whole blocks, the worst case
        let call = parse("2,3,1280,32").unwrap();
        for which in [Which::Q, Which::K, Which::V] {
            let x: Vec<u16> = source.tensor(&call, which).iter().map(|x| x.to_bits()).collect();
            let distinct = |len: usize| x.chunks(len).collect::<HashSet<_>>().len();
            assert_eq!(distinct(128 * 32), 2 * 3 * 10, "{which:?}");
            // A factor has few values in bf16, so that some copies are alike.
            assert!(distinct(32) > 2 * 3 * 1280 * 95 / 100, "{which:?}: {}", distinct(32));
        }
    }

    #[test]
    fn a_file_of_another_width_is_refused() {
        let source = filed(10, 32);
        assert!(source.check(&parse("1,1,100,32").unwrap()).is_ok());
        assert!(source.check(&parse("1,1,100,64").unwrap()).is_err());
    }
}
