//! smoke
use std::time::Instant;
use vc_attention::backend::{Backend, cpu::Cpu, cuda::*};
use vc_attention::*;
fn main() {
    let cuda = Cuda::new(0).unwrap();
    println!(
        "{} driver {} load {:?}",
        Backend::device(&cuda),
        cuda.gpu().driver_version(),
        cuda.gpu().load_time()
    );
    for f in cuda.gpu().functions() {
        if f.local_bytes != 0 {
            println!("LOCAL {} {}", f.entry.name, f.local_bytes);
        }
    }
    for path in std::env::args().skip(1) {
        let file = io::InputFile::open(&path).unwrap();
        let (q, k, v) = file.problem_tensors(Layout::Bhsd).unwrap();
        let mut p = Problem::new(q, k, v);
        p.grid = file.grid().unwrap();
        let shape = p.validate().unwrap();
        let r = fidelity::reference::attention(&p, &shape);
        for name in [
            "vc16-expcast",
            "vc16",
            "vc8-fp8qk",
            "vc16-expcast+order=sequence",
            "vc16-expcast+demean=off+order=sequence",
            "vc8-fp8qk+order=sequence",
            "vc8-fp8qk+rotate=off+order=sequence",
        ] {
            let recipe = Recipe::parse(name).unwrap();
            let plan = Plan::new(&p, &recipe, Options { lse: true, output: OutputType::F32 }).unwrap();
            let t = Instant::now();
            let c = run(&Cpu, &plan, &p, None).unwrap();
            let tc = t.elapsed();
            let g = match run(&cuda, &plan, &p, None) {
                Ok(g) => g,
                Err(e) => {
                    println!("{name}: {e}");
                    continue;
                }
            };
            let mc = fidelity::compare(&c.output.o.view(), &r.o);
            let mg = fidelity::compare(&g.output.o.view(), &r.o);
            let lse = |o: &Output| {
                o.lse
                    .as_ref()
                    .unwrap()
                    .iter()
                    .zip(&r.lse)
                    .map(|(a, b)| (*a as f64 - b).abs())
                    .fold(0.0, f64::max)
            };
            println!(
                "{path} {name:40} cpu {:.5} gpu {:.5} lse {:.4} {:.4} share {:?} {:?} obs {} {} cpu {tc:?} gpu {:?}",
                mc.rel_l2,
                mg.rel_l2,
                lse(&c.output),
                lse(&g.output),
                c.report.mean_share,
                g.report.mean_share,
                c.output.observed.max_score,
                g.output.observed.max_score,
                g.report
            );
        }
    }
}
