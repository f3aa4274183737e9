//! The warp-level attention kernels on whatever GPU there is: those of sm_89, which every later GPU runs, in place of its
//! own. The same properties as Hopper's, and INT8 queries and keys beside.

use crate::attention::{
    gives_the_same_bits, in_every_output_type, of_a_broken_key_or_value, of_a_broken_query, of_all_lengths,
    of_any_scale, of_padded_batches,
};
use crate::device::warp_level;

/// One recipe for each of the kernels.
const KERNELS: [&str; 18] = [
    "vc8-expcast",
    "vc16-expcast",
    "vc8",
    "vc16",
    "vc8-fp8qk",
    "vc8-fp8qk+p=e4m3+rowsum=exact",
    "vc8-expcast+demean=off",
    "vc8+demean=off",
    "vc16-expcast+demean=off",
    "vc16+demean=off",
    "vc8-fp8qk+demean=off",
    "vc8-fp8qk+p=e4m3+rowsum=exact+demean=off",
    "vc8-expcast+encoder=quadratic",
    "vc8-expcast+encoder=quadratic+demean=off",
    "vc16-expcast+encoder=quadratic",
    "vc16-expcast+encoder=quadratic+demean=off",
    "vc8-fp8qk+encoder=quadratic",
    "vc8-fp8qk+encoder=quadratic+demean=off",
];

#[test]
fn warp_level_of_all_lengths() {
    let Some(gpu) = warp_level() else { return };
    of_all_lengths(&gpu, &KERNELS);
}

#[test]
fn warp_level_in_every_output_type() {
    let Some(gpu) = warp_level() else { return };
    in_every_output_type(&gpu, &KERNELS);
}

#[test]
fn warp_level_of_padded_batches() {
    let Some(gpu) = warp_level() else { return };
    of_padded_batches(&gpu, &KERNELS);
}

#[test]
fn warp_level_of_any_scale() {
    let Some(gpu) = warp_level() else { return };
    of_any_scale(&gpu, &KERNELS);
}

#[test]
fn warp_level_of_a_broken_query() {
    let Some(gpu) = warp_level() else { return };
    of_a_broken_query(&gpu, &KERNELS);
}

#[test]
fn warp_level_of_a_broken_key_or_value() {
    let Some(gpu) = warp_level() else { return };
    of_a_broken_key_or_value(&gpu, &KERNELS);
}

#[test]
fn warp_level_gives_the_same_bits() {
    let Some(gpu) = warp_level() else { return };
    gives_the_same_bits(&gpu, &KERNELS);
}
