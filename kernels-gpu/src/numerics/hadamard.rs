//! The orthonormal Walsh-Hadamard rotation `x <- H x / sqrt(n)`, `H[i][j] = (-1)^popcount(i & j)`.
//!
//! Applied to the rows of Q and K alike it changes no score, and spreads a channel's outliers over all
//! channels. It is its own inverse.
//!
//! Order of operations (for kernels that must give the same bits): stages of butterflies
//! `(a, b) <- (a + b, a - b)` at strides 1, 2, 4, .., n/2, then one product with `1 / sqrt(n)`, rounded
//! to `f32`.

/// Smallest length that [`rotate`] takes.
pub const MIN_LEN: usize = 2;
/// Largest length that [`rotate`] takes.
pub const MAX_LEN: usize = 256;

/// Whether [`rotate`] takes rows of this length: a power of two from 2 to 256.
#[inline]
pub const fn is_supported(len: usize) -> bool {
    len.is_power_of_two() && MIN_LEN <= len && len <= MAX_LEN
}

/// `1 / sqrt(len)` for a power of two, correctly rounded.
#[inline]
pub const fn norm(len: usize) -> f32 {
    let log2 = len.trailing_zeros();
    let power = 1.0 / (1u64 << (log2 / 2)) as f32;
    if log2.is_multiple_of(2) { power } else { core::f32::consts::FRAC_1_SQRT_2 * power }
}

/// Rotates one row in place.
///
/// # Panics
///
/// If the length is not one that [`is_supported`] admits: check user input with it.
#[inline]
pub fn rotate(row: &mut [f32]) {
    assert!(is_supported(row.len()), "a Hadamard rotation takes a power of two from 2 to 256");
    let (octets, short) = row.as_chunks_mut::<8>();
    for octet in octets {
        stages_1_2_4(octet);
    }
    // Only rows of 2 and 4 leave something over.
    stages(short, 1);
    stages(row, 8);
    let norm = norm(row.len());
    for x in row {
        *x *= norm;
    }
}

/// The butterfly stages from stride `first` to half the length; the inner loops run over contiguous
/// elements.
#[inline(always)]
fn stages(row: &mut [f32], first: usize) {
    let mut stride = first;
    while stride < row.len() {
        for pair in row.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
}

/// The first three stages on 8 elements, as whole-register operations: a permutation, a sign, an
/// addition. `b - a` and `-a + b` are the same bits.
#[inline(always)]
fn stages_1_2_4(x: &mut [f32; 8]) {
    const fn stage<const STRIDE: usize>() -> ([usize; 8], [f32; 8]) {
        let (mut partner, mut sign) = ([0; 8], [1.0; 8]);
        let mut i = 0;
        while i < 8 {
            partner[i] = i ^ STRIDE;
            if i & STRIDE != 0 {
                sign[i] = -1.0;
            }
            i += 1;
        }
        (partner, sign)
    }
    #[inline(always)]
    fn butterfly(x: &mut [f32; 8], (partner, sign): &([usize; 8], [f32; 8])) {
        *x = core::array::from_fn(|i| sign[i] * x[i] + x[partner[i]]);
    }
    butterfly(x, &const { stage::<1>() });
    butterfly(x, &const { stage::<2>() });
    butterfly(x, &const { stage::<4>() });
}
