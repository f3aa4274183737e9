//! The warp-level attention kernels on whatever GPU there is: those of sm_89, which every later GPU runs, in place of its
//! own. The same properties as Hopper's.

use crate::attention::{
    KERNELS, gives_the_same_bits, in_every_output_type, of_a_broken_key_or_value, of_a_broken_query,
    of_all_lengths, of_any_scale, of_padded_batches,
};
use crate::device::warp_level;

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
