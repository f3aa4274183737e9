//! The kernels inside this binary, by architecture.

use kernels_gpu::kernels::{self, Entry};

/// PTX by architecture, as committed in `kernels-gpu/ptx`.
const PTX: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded_ptx.rs"));

/// One architecture's kernels and what they need.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Target architecture.
    pub arch: &'static str,
    /// Compute capabilities (major, minor) that it runs on.
    pub capabilities: &'static [(i32, i32)],
    /// PTX text.
    pub ptx: &'static str,
    /// Launch contracts of its entries, by table.
    pub entries: &'static [&'static [Entry]],
    /// Oldest CUDA version whose driver knows its PTX version.
    pub min_cuda: &'static str,
    /// Oldest Linux driver of that version.
    pub min_driver: &'static str,
}

/// Every architecture that has kernels.
pub fn images() -> Vec<Image> {
    let text = |arch: &str| PTX.iter().find(|(a, _)| *a == arch).map(|(_, text)| *text);
    text("sm_90a")
        .map(|ptx| Image {
            arch: "sm_90a",
            capabilities: &[(9, 0)],
            ptx,
            entries: &[kernels::SM90, kernels::PREPARE],
            min_cuda: "12.0",
            min_driver: "525.60.13",
        })
        .into_iter()
        .collect()
}

/// The kernels for a GPU.
pub fn for_capability(capability: (i32, i32)) -> Option<Image> {
    images().into_iter().find(|image| image.capabilities.contains(&capability))
}

/// What to say about a GPU that no kernel covers.
pub fn not_covered(name: &str, (major, minor): (i32, i32)) -> String {
    let have: Vec<_> = images().iter().map(|i| i.arch).collect();
    format!(
        "{name} has compute capability {major}.{minor}; the kernels in this binary are for {} only: use the CPU \
         backend there",
        if have.is_empty() { "no GPU".into() } else { have.join(", ") }
    )
}
