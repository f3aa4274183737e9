//! The kernels inside this binary, by architecture.

use std::io::Read;
use std::sync::{LazyLock, OnceLock};

use ruzstd::decoding::StreamingDecoder;

/// PTX by architecture, as committed in `kernels-gpu/ptx`: zstd.
const PTX: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/embedded_ptx.rs"));

/// One architecture's kernels and what they need; [`TABLE`](super::TABLE) says which GPUs it serves.
#[derive(Debug)]
pub struct Image {
    /// Target architecture.
    pub arch: &'static str,
    compressed: &'static [u8],
    text: OnceLock<String>,
}

/// Every architecture that has kernels.
pub fn images() -> &'static [Image] {
    static IMAGES: LazyLock<Vec<Image>> = LazyLock::new(|| {
        let image = |&(arch, compressed): &(&'static str, &'static [u8])| Image {
            arch,
            compressed,
            text: OnceLock::new(),
        };
        PTX.iter().map(image).collect()
    });
    &IMAGES
}

impl Image {
    /// PTX text; the first call takes some milliseconds to unpack it.
    pub fn ptx(&self) -> &str {
        self.text.get_or_init(|| {
            let mut text = String::new();
            StreamingDecoder::new(self.compressed)
                .map_err(|e| e.to_string())
                .and_then(|mut decoder| decoder.read_to_string(&mut text).map_err(|e| e.to_string()))
                .expect("what was built in was unpacked by a test");
            text
        })
    }

    /// Oldest CUDA version whose driver knows the module's PTX version, and the oldest Linux driver of that (release
    /// notes of the CUDA toolkit).
    pub fn needs(&self) -> (&'static str, &'static str) {
        let version = self.ptx().lines().find_map(|line| line.strip_prefix(".version "));
        match version.map(str::trim) {
            Some("8.0") => ("12.0", "525.60.13"),
            Some("8.8") => ("12.9", "575.51.03"),
            _ => ("12.8", "570.26"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_unpacks_and_names_its_architecture() {
        assert!(!images().is_empty());
        for image in images() {
            let target = format!(".target {}", image.arch);
            assert!(image.ptx().lines().any(|line| line.trim() == target), "{}", image.arch);
        }
    }
}
