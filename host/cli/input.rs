//! From a file and the options about it to a problem.

use std::path::Path;

use clap::{Args, ValueEnum};
use vc_attention::io::InputFile;
use vc_attention::{Layout, NonFinite, Problem};

use super::failure::Result;
use super::table::thousands;
use crate::data;

/// Options about the input file.
#[derive(Args)]
#[command(next_help_heading = "Input")]
pub struct InputOptions {
    /// Axes of the tensors in the file.
    #[arg(long, value_enum, default_value_t = LayoutName::Bhsd)]
    pub layout: LayoutName,
    /// Latent grid of the key tokens, instead of the file's metadata `grid`.
    #[arg(long, value_name = "T,H,W", value_parser = grid)]
    pub grid: Option<Grid>,
    /// Factor on the scores, of any sign; 1/sqrt(head_dim) when absent.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub scale: Option<f32>,
    /// Go on when there are NaN or infinities: one in q makes its output row NaN, one in k or v its head.
    #[arg(long)]
    pub allow_nonfinite: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LayoutName {
    /// [batch, heads, tokens, dim], or without the batch
    Bhsd,
    /// [batch, tokens, heads, dim], or without the batch
    Bshd,
}

impl From<LayoutName> for Layout {
    fn from(name: LayoutName) -> Self {
        match name {
            LayoutName::Bhsd => Layout::Bhsd,
            LayoutName::Bshd => Layout::Bshd,
        }
    }
}

/// A latent grid [t, h, w]. (A bare array would mean three occurrences to clap.)
#[derive(Clone, Copy)]
pub struct Grid(pub [usize; 3]);

fn grid(text: &str) -> Result<Grid, String> {
    numbers(text).map(Grid).ok_or_else(|| "expected three whole numbers, such as 16,16,16".into())
}

/// Exactly `N` whole numbers with commas between them.
pub fn numbers<const N: usize>(text: &str) -> Option<[usize; N]> {
    let numbers: Vec<usize> = text.split(',').map(|x| x.trim().parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}

/// An open input and what the options say about it.
pub struct Input<'a> {
    pub file: InputFile,
    options: &'a InputOptions,
    grid: Option<[usize; 3]>,
    kv_lens: Option<Vec<usize>>,
}

impl<'a> Input<'a> {
    /// Opens a file, or the bundled input without one.
    pub fn open(path: Option<&Path>, options: &'a InputOptions) -> Result<Self> {
        let file = path.map_or_else(data::open, InputFile::open)?;
        let grid = match options.grid {
            Some(Grid(grid)) => Some(grid),
            None => file.grid()?,
        };
        let kv_lens = file.kv_lens()?;
        Ok(Self { file, options, grid, kv_lens })
    }

    /// The call that the file describes, not yet validated.
    pub fn problem(&self) -> Result<Problem<'_>> {
        let (q, k, v) = self.file.problem_tensors(self.options.layout.into())?;
        Ok(Problem {
            kv_lens: self.kv_lens.as_deref(),
            scale: self.options.scale,
            grid: self.grid,
            nonfinite: if self.options.allow_nonfinite { NonFinite::Propagate } else { NonFinite::Reject },
            ..Problem::new(q, k, v)
        })
    }

    /// The input's name.
    pub fn name(&self) -> String {
        self.file.path().display().to_string()
    }
}

/// Name and shape of an input in one line.
pub fn title(name: &str, shape: &vc_attention::Shape) -> String {
    let s = shape;
    let count = |n: usize, what: &str| format!("{} {what}{}", thousands(n), if n == 1 { "" } else { "s" });
    let heads = if s.q_heads == s.kv_heads {
        count(s.q_heads, "head")
    } else {
        format!("{} on {}", count(s.q_heads, "query head"), s.kv_heads)
    };
    let tokens = if s.q_tokens == s.kv_tokens {
        count(s.q_tokens, "token")
    } else {
        format!("{} queries on {} keys", thousands(s.q_tokens), thousands(s.kv_tokens))
    };
    let batch = if s.batch == 1 { String::new() } else { format!("batch {}, ", s.batch) };
    format!("{name}: {batch}{heads}, {tokens}, head_dim {}", s.head_dim)
}
