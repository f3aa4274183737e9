//! The Hopper attention kernel under emulation against the CPU backend and against f64.

mod emulated;

use emulated::{Case, attend, rel_l2};

#[test]
fn first() {
    for case in Case::new(200, 300).entries() {
        let start = std::time::Instant::now();
        let r = attend(&case).unwrap_or_else(|f| panic!("{}: {f}", case.name()));
        let kernel = rel_l2(&r.o, r.exact_o.iter().copied());
        let cpu = rel_l2(&r.cpu_o, r.exact_o.iter().copied());
        let between = rel_l2(&r.o, r.cpu_o.iter().map(|&x| f64::from(x)));
        let lse = r.lse.iter().zip(&r.cpu_lse).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let mean_err = |x: &[f32]| x.iter().zip(&r.exact_lse).map(|(a, b)| f64::from(*a) - b).sum::<f64>() / x.len() as f64;
        println!("lse bias kernel {:.4} cpu {:.4}", mean_err(&r.lse), mean_err(&r.cpu_lse));
        println!("{} kernel {kernel:.2e} cpu {cpu:.2e} between {between:.2e} lse {lse:.2e} row max {:?} {} {:?}", case.name(), r.row_max, r.cpu_row_max, start.elapsed());
    }
}
