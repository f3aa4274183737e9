//! Where results go, checked before the work so that a slip of the finger costs neither the work nor the input.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::failure::{Failure, Result};

/// Refuses outputs that are the input, that are each other, or that cannot be written.
pub fn check(input: Option<&Path>, outputs: &[Option<&PathBuf>]) -> Result<()> {
    let mut taken: Vec<(PathBuf, &str)> =
        input.and_then(place).map(|place| (place, "the input")).into_iter().collect();
    for output in outputs.iter().flatten() {
        let Some(place) = place(output) else {
            let what = if output.is_dir() { "is a directory" } else { "there is no such directory" };
            return Err(Failure::failed(format!("{}: cannot be written: {what}", output.display())));
        };
        if let Some((_, what)) = taken.iter().find(|(other, _)| *other == place) {
            return Err(Failure::usage(format!("{}: is {what} and would be overwritten", output.display()))
                .with_hint("give another name for the output"));
        }
        taken.push((place, "another output"));
    }
    Ok(())
}

/// The file that a path means, through links, whether or not it exists yet; `None` where no file can be.
fn place(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return None;
    }
    if let Ok(existing) = fs::canonicalize(path) {
        return Some(existing);
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(fs::canonicalize(parent).ok().filter(|parent| parent.is_dir())?.join(path.file_name()?))
}

/// Writes a value as JSON, with figures that are not finite as null.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    write(path, json(value)?.as_bytes())
}

/// A value as JSON.
pub fn json(value: &impl Serialize) -> Result<String> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Failure::failed(format!("JSON: {error}")))?;
    Ok(text + "\n")
}

/// Writes a file.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|error| failed(path, error))
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("{}: {error}", path.display()))
}
