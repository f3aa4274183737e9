//! The kernels inside this binary, by architecture.

use std::io::Read;
use std::sync::{LazyLock, OnceLock};

use ruzstd::decoding::StreamingDecoder;

/// PTX by architecture, as committed in `kernels-gpu/ptx`: zstd.
const PTX: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/embedded_ptx.rs"));

/// PTX versions, the first CUDA version whose driver knows each (PTX ISA, "PTX Release History") and the first Linux
/// driver of that (release notes of the toolkit; CUDA 12.7 came as a driver only).
const NEEDS: &[(&str, (&str, &str))] = &[
    ("8.0", ("12.0", "525.60.13")),
    ("8.1", ("12.1", "530.30.02")),
    ("8.2", ("12.2", "535.54.03")),
    ("8.3", ("12.3", "545.23.06")),
    ("8.4", ("12.4", "550.54.14")),
    ("8.5", ("12.5", "555.42.02")),
    ("8.6", ("12.7", "565.57.01")),
    ("8.7", ("12.8", "570.26")),
    ("8.8", ("12.9", "575.51.03")),
    ("9.0", ("13.0", "580.65.06")),
];

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

    /// Oldest CUDA version whose driver knows the module's PTX version, and the oldest Linux driver of that.
    pub fn needs(&self) -> (&'static str, &'static str) {
        let version = self.ptx().lines().find_map(|line| line.strip_prefix(".version ")).map(str::trim);
        let known = NEEDS.iter().find(|(ptx, _)| Some(*ptx) == version);
        known.expect("a test knows the version of what was built in").1
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

    #[test]
    fn modules_need_the_first_driver_that_knows_their_ptx() {
        for image in images() {
            let expected = match image.arch {
                "sm_90a" => "12.0",
                "sm_100a" => "12.7",
                "sm_89" | "sm_120a" => "12.8",
                "sm_103a" => "12.9",
                other => panic!("{other}: its PTX version and CUDA release belong here"),
            };
            assert_eq!(image.needs().0, expected, "{}", image.arch);
        }
        // As the ISA's table has them: CUDA 12.6 and the toolkits' updates brought none.
        let releases: Vec<_> = NEEDS.iter().map(|(ptx, (cuda, _))| (*ptx, *cuda)).collect();
        assert!(releases.is_sorted() && releases.contains(&("8.5", "12.5")));
    }
}
