//! The Hopper attention kernel, run thread by thread on the host (`docs/emulation.md`), against the CPU backend's
//! numerics and against f64 on the same dequantized operands.

mod emulated;

use emulated::{Family, checks};

#[test]
fn every_entry_at_odd_lengths() {
    checks::every_entry_at_odd_lengths(Family::Sm90);
}

#[test]
fn batches_of_grouped_heads_with_lengths() {
    checks::batches_of_grouped_heads_with_lengths(Family::Sm90);
}

#[test]
fn heads_of_fewer_channels_are_padded() {
    checks::heads_of_fewer_channels_are_padded(Family::Sm90);
}

#[test]
fn no_valid_key_gives_zeros() {
    checks::no_valid_key_gives_zeros(Family::Sm90);
}

#[test]
fn rings_of_tiles_and_means_go_around() {
    checks::rings_of_tiles_and_means_go_around(Family::Sm90);
}

#[test]
fn output_types_round_the_same_values() {
    checks::output_types_round_the_same_values(Family::Sm90);
}

#[test]
fn the_order_of_threads_changes_nothing() {
    checks::the_order_of_threads_changes_nothing(Family::Sm90);
}

#[test]
fn poisoned_heads_are_nan_and_others_unchanged() {
    checks::poisoned_heads_are_nan_and_others_unchanged(Family::Sm90);
}

#[test]
fn a_nan_in_a_query_stays_in_its_row() {
    checks::a_nan_in_a_query_stays_in_its_row(Family::Sm90);
}

#[test]
fn the_lse_bias_of_expcast_is_small() {
    checks::the_lse_bias_of_expcast_is_small(Family::Sm90);
}

#[test]
fn int8_scores_have_no_range() {
    checks::int8_scores_have_no_range(Family::Sm90);
}
