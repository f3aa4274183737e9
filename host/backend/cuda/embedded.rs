//! The kernels inside this binary, by architecture.

/// PTX by architecture, as committed in `kernels-gpu/ptx`.
const PTX: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded_ptx.rs"));

/// One architecture's kernels and what they need; [`TABLE`](super::TABLE) says which GPUs it serves.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Target architecture.
    pub arch: &'static str,
    /// PTX text.
    pub ptx: &'static str,
    /// Oldest CUDA version whose driver knows its PTX version.
    pub min_cuda: &'static str,
    /// Oldest Linux driver of that version.
    pub min_driver: &'static str,
}

/// Every architecture that has kernels.
pub fn images() -> Vec<Image> {
    let image = |&(arch, ptx): &(&'static str, &'static str)| {
        let (min_cuda, min_driver) = needs(ptx);
        Image { arch, ptx, min_cuda, min_driver }
    };
    PTX.iter().map(image).collect()
}

/// The CUDA version and the Linux driver that know the PTX version of a module (release notes of the CUDA toolkit).
fn needs(ptx: &str) -> (&'static str, &'static str) {
    let version = ptx.lines().find_map(|line| line.strip_prefix(".version "));
    match version.map(str::trim) {
        Some("8.0") => ("12.0", "525.60.13"),
        Some("8.8") => ("12.9", "575.51.03"),
        _ => ("12.8", "570.26"),
    }
}
