//! Measurements on disk: one JSON object a line for every clip, appended as it is finished, so that a run which is
//! interrupted goes on where it stopped.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::clip::Distance;

/// One clip against exact attention from the same noise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The row, as it was written.
    pub row: String,
    /// Index of the prompt and its noise.
    pub prompt: usize,
    /// Denoising steps.
    pub steps: usize,
    /// Weight of the guidance.
    pub guidance: f32,
    /// Distance from the clip of the reference row.
    #[serde(flatten)]
    pub distance: Distance,
    /// Share of the value energy that the block means held, averaged over the calls that subtracted them.
    pub mean_share: Option<f64>,
    /// Calls that grouped.
    pub grouped: usize,
    /// Calls that grouped ahead of time.
    pub early: usize,
    /// Bytes of the kept orders at the end.
    pub kept_bytes: usize,
    /// Seconds inside the attention calls.
    pub attention_s: f64,
    /// Seconds of the clip.
    pub total_s: f64,
    /// Where the attention ran.
    pub device: String,
}

impl Entry {
    /// Whether both are the same measurement.
    pub fn same(&self, row: &str, prompt: usize, steps: usize, guidance: f32) -> bool {
        (self.row.as_str(), self.prompt, self.steps, self.guidance) == (row, prompt, steps, guidance)
    }
}

/// A file of entries that grows.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
}

impl Record {
    /// Opens or begins a record.
    ///
    /// # Errors
    /// When the file cannot be opened or a line is not an entry.
    pub fn open(path: &Path) -> Result<Self> {
        let entries = if path.exists() { read(path)? } else { Vec::new() };
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        Ok(Self { path: path.into(), file, entries })
    }

    /// What it holds.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Adds an entry, in one write.
    ///
    /// # Errors
    /// Of the file.
    pub fn add(&mut self, entry: Entry) -> Result<()> {
        let line = serde_json::to_string(&entry)? + "\n";
        self.file.write_all(line.as_bytes()).with_context(|| self.path.display().to_string())?;
        self.entries.push(entry);
        Ok(())
    }
}

/// The entries of a file.
///
/// # Errors
/// When it cannot be read or a line is not an entry.
pub fn read(path: &Path) -> Result<Vec<Entry>> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let parse = |(i, line): (usize, std::io::Result<String>)| -> Result<Entry> {
        serde_json::from_str(&line?).with_context(|| format!("{}, line {}", path.display(), i + 1))
    };
    BufReader::new(file).lines().enumerate().map(parse).collect()
}
