//! How two outputs differ, and where.

use kernels_gpu::kernels::tiles::HEAD_DIM;

/// |a - b| / |b|; NaN where either is not finite, 0 for two zeros.
pub fn rel_l2(a: &[f64], b: &[f64]) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Prints where `got` differs from `want`: counts, first elements, and the error by the pieces that the kernel
/// works in (warps of 16 rows, upper and lower row of a thread, 8-column groups, column pairs).
pub fn diagnose(got: &[f64], want: &[f64], tokens: usize) {
    let scale = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let nan = got.iter().filter(|x| x.is_nan()).count();
    let zero = got.iter().filter(|x| **x == 0.0).count();
    println!("    {} elements, {nan} NaN, {zero} zero, rms of the reference {scale:.4}", got.len());
    let wrong = |i: &usize| got[*i].is_nan() || (got[*i] - want[*i]).abs() > 0.1 * scale;
    for i in (0..got.len()).filter(wrong).take(6) {
        let (row, column) = (i / HEAD_DIM, i % HEAD_DIM);
        let (head, token) = (row / tokens, row % tokens);
        println!("    head {head} row {token} column {column}: {:.5} instead of {:.5}", got[i], want[i]);
    }
    let by = |name: &str, groups: usize, group: &dyn Fn(usize, usize) -> usize| {
        let (mut difference, mut norm) = (vec![0.0; groups], vec![0.0; groups]);
        for i in 0..got.len() {
            let g = group(i / HEAD_DIM % tokens, i % HEAD_DIM);
            difference[g] += (got[i] - want[i]).powi(2);
            norm[g] += want[i].powi(2);
        }
        let errors = difference
            .iter()
            .zip(&norm)
            .map(|(d, n)| if *n == 0.0 { "-".to_string() } else { format!("{:.4}", (d / n).sqrt()) });
        println!("    rel_l2 by {name}: {}", errors.collect::<Vec<_>>().join(" "));
    };
    by("warp (16 rows, two warpgroups of 4)", 8, &|token, _| token / 16 % 8);
    by("row in a warp", 16, &|token, _| token % 16);
    by("8 columns", 16, &|_, c| c / 8);
    by("column in 8", 8, &|_, c| c % 8);
}
