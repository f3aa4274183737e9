//! The small tests for `compute-sanitizer`: every kernel, both input types, ragged tails, a few blocks each.

use vc_attention::{DType, Layout, Problem};

use crate::attention::{KERNELS, check};
use crate::call::{Wanted, distances};
use crate::common::{Case, recipe};
use crate::device::{Gpu, gpu};
use crate::inputs::{Gaps, Inputs};

/// Every attention kernel and with it every kernel that prepares, at one shape.
fn everything(gpu: &Gpu, case: Case, layout: Layout, lens: Option<&[usize]>) {
    for (i, text) in KERNELS.iter().enumerate() {
        let inputs = Inputs::new(&case.outliers(90), [DType::Bf16, DType::F16][i % 2], layout, Gaps::Some);
        let problem = Problem { kv_lens: lens, ..inputs.problem() };
        let recipe = recipe(&format!("{text}+k=5"));
        let output = [DType::F32, DType::Bf16, DType::F16][i % 3];
        let d = distances(gpu, &problem, &recipe, Wanted { output, layout, ..Wanted::default() });
        check(&d, 4e-3, 100.0, &format!("{text}, {case:?}"));
        crate::stages::check(gpu, "sanitize", &problem, &recipe);
    }
}

#[test]
fn sanitize_tails() {
    let Some(gpu) = gpu() else { return };
    everything(&gpu, Case::new([1, 2, 1], [130, 257], 72), Layout::Bshd, None);
}

#[test]
fn sanitize_one_token() {
    let Some(gpu) = gpu() else { return };
    everything(&gpu, Case::new([1, 1, 1], [1, 1], 128), Layout::Bhsd, None);
}

#[test]
fn sanitize_kv_lens() {
    let Some(gpu) = gpu() else { return };
    everything(&gpu, Case::new([3, 1, 1], [65, 200], 40), Layout::Bhsd, Some(&[0, 129, 200]));
}

/// More than one round of the ring in shared memory, and more than one tile of block means.
#[test]
fn sanitize_many_key_blocks() {
    let Some(gpu) = gpu() else { return };
    everything(&gpu, Case::new([1, 1, 1], [128, 2177], 128), Layout::Bhsd, None);
}

/// Tables are read to their ends and no further.
#[test]
fn sanitize_rope() {
    let Some(gpu) = gpu() else { return };
    crate::rope::small(&gpu);
}

/// Clusters beyond one pass of the assignment, and chunks of the sort.
#[test]
fn sanitize_many_clusters() {
    let Some(gpu) = gpu() else { return };
    let inputs =
        Inputs::new(&Case::new([1, 1, 1], [8, 1500], 64).outliers(91), DType::F16, Layout::Bhsd, Gaps::None);
    for k in [1, 130, 1024] {
        crate::grouping::check_iterations(&gpu, &inputs.problem(), k, "sanitize");
    }
}
