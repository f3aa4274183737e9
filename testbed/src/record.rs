//! Measurements on disk: one JSON object a line for every clip, appended as it is finished, so that a run which is
//! interrupted goes on where it stopped.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use vc_attention::backend::Backend;
use vc_attention::backend::cpu::Cpu;

use crate::clip::Distance;

/// What was measured; with the prompt it is what a measurement is known by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// The row, as it was written.
    pub row: String,
    /// Denoising steps.
    pub steps: usize,
    /// Weight of the guidance.
    pub guidance: f32,
    /// Backend that computed the row's attention, with `+model` behind it where the rest of the model ran on the GPU too;
    /// `cpu` in records from before there was another.
    #[serde(default = "cpu")]
    pub backend: String,
}

fn cpu() -> String {
    Cpu.name().into()
}

/// One clip against exact attention from the same noise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// What was measured.
    #[serde(flatten)]
    pub setting: Setting,
    /// Index of the prompt and its noise.
    pub prompt: usize,
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
    /// Where the attention ran, in words.
    pub device: String,
}

/// A file of entries that grows.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    file: File,
    contents: Contents,
}

impl Record {
    /// Opens or begins a record; a last line that is only half there is cut off.
    ///
    /// # Errors
    /// When the file cannot be opened or another line is not an entry.
    pub fn open(path: &Path) -> Result<Self> {
        let contents = if path.exists() { read(path)? } else { Contents::default() };
        let open = || -> std::io::Result<File> {
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            file.set_len(contents.whole)?;
            if contents.unterminated {
                file.write_all(b"\n")?;
            }
            Ok(file)
        };
        let file = open().with_context(|| path.display().to_string())?;
        Ok(Self { path: path.into(), file, contents })
    }

    /// What it holds.
    pub fn entries(&self) -> &[Entry] {
        &self.contents.entries
    }

    /// Number of the line that was cut off.
    pub fn broken(&self) -> Option<usize> {
        self.contents.broken
    }

    /// The measurement of a setting and prompt.
    pub fn find(&self, setting: &Setting, prompt: usize) -> Option<&Entry> {
        self.entries().iter().rfind(|e| e.prompt == prompt && e.setting == *setting)
    }

    /// Adds an entry, in one write.
    ///
    /// # Errors
    /// Of the file.
    pub fn add(&mut self, entry: Entry) -> Result<()> {
        let line = serde_json::to_string(&entry)? + "\n";
        self.file.write_all(line.as_bytes()).with_context(|| self.path.display().to_string())?;
        self.contents.entries.push(entry);
        Ok(())
    }
}

/// What a file of entries holds.
#[derive(Debug, Default)]
pub struct Contents {
    /// Its entries.
    pub entries: Vec<Entry>,
    /// Number of the last line where a run that was killed left it half written; it counts as not there.
    pub broken: Option<usize>,
    /// Bytes of the lines that are entries.
    whole: u64,
    /// Whether the last of them lacks its end of line.
    unterminated: bool,
}

/// The entries of a file.
///
/// # Errors
/// When it cannot be read or a line is not an entry, other than a last one that was not finished.
pub fn read(path: &Path) -> Result<Contents> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let mut contents = Contents::default();
    for (i, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
        let unterminated = !line.ends_with(b"\n");
        match serde_json::from_slice(line) {
            Ok(entry) => contents.entries.push(entry),
            Err(_) if unterminated => {
                contents.broken = Some(i + 1);
                break;
            }
            Err(e) => return Err(e).with_context(|| format!("{}, line {}", path.display(), i + 1)),
        }
        contents.whole += line.len() as u64;
        contents.unterminated = unterminated;
    }
    Ok(contents)
}

/// Writes a file under a temporary name, which then takes the place of `path`: what is there is whole, whenever a run
/// is killed.
///
/// # Errors
/// Of `write` or the file system.
pub fn replace(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    write(&part).and_then(|()| Ok(fs::rename(&part, path)?)).with_context(|| path.display().to_string())
}
