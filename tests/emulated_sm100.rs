//! The kernel for B200 and B300, run thread by thread on the host (`docs/emulation.md`), against the CPU backend's
//! numerics and against f64 on the same dequantized operands. Nobody here has such a GPU.

mod emulated;

use emulated::checks::{self, bits, check, run};
use emulated::{Case, Family, Qk};

#[test]
fn every_entry_at_odd_lengths() {
    checks::every_entry_at_odd_lengths(Family::Sm100);
}

#[test]
fn batches_of_grouped_heads_with_lengths() {
    checks::batches_of_grouped_heads_with_lengths(Family::Sm100);
}

#[test]
fn heads_of_fewer_channels_are_padded() {
    checks::heads_of_fewer_channels_are_padded(Family::Sm100);
}

#[test]
fn no_valid_key_gives_zeros() {
    checks::no_valid_key_gives_zeros(Family::Sm100);
}

#[test]
fn rings_of_tiles_and_means_go_around() {
    checks::rings_of_tiles_and_means_go_around(Family::Sm100);
}

#[test]
fn output_types_round_the_same_values() {
    checks::output_types_round_the_same_values(Family::Sm100);
}

#[test]
fn the_order_of_threads_changes_nothing() {
    checks::the_order_of_threads_changes_nothing(Family::Sm100);
}

#[test]
fn poisoned_heads_are_nan_and_others_unchanged() {
    checks::poisoned_heads_are_nan_and_others_unchanged(Family::Sm100);
}

#[test]
fn a_nan_in_a_query_stays_in_its_row() {
    checks::a_nan_in_a_query_stays_in_its_row(Family::Sm100);
}

#[test]
fn the_lse_bias_of_expcast_is_small() {
    checks::the_lse_bias_of_expcast_is_small(Family::Sm100);
}

/// A block has two tiles of 128 rows, of which the second may be short or missing.
#[test]
fn both_tiles_of_a_block_are_filled() {
    for (q, kv) in [(256, 128), (300, 300), (129, 1)] {
        for case in Case::new(Family::Sm100, q, kv).main_entries() {
            check(&case);
        }
    }
}

#[test]
fn one_tile_writes_the_bytes_of_the_hopper_kernel() {
    // The same contract: where no sum depends on an order, the two kernels agree to the last bit.
    for (q, kv) in [(1, 1), (3, 2)] {
        // But for INT8, whose sums Hopper's takes with a bias.
        let entries = Case::new(Family::Sm90, q, kv).main_entries();
        for case in entries.into_iter().filter(|case| case.qk != Qk::Int8) {
            let hopper = run(&case);
            let blackwell = run(&Case { family: Family::Sm100, ..case.clone() });
            assert_eq!(bits(&hopper.lse), bits(&blackwell.lse), "{}", case.name());
            assert_eq!(bits(&hopper.o), bits(&blackwell.o), "{}", case.name());
        }
    }
}
