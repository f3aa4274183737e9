//! probe
use half::{bf16, f16};
use vc_attention::*;
fn main() {
    let path = std::env::args().nth(1).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let st = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (_, meta) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let grid: Option<[usize; 3]> =
        meta.metadata().as_ref().and_then(|m| m.get("grid")).and_then(|g| serde_json::from_str(g).ok());
    let get = |n: &str| {
        let t = st.tensor(n).unwrap();
        let s = t.shape();
        let sh = [1, s[0], s[1], s[2]];
        let v: Vec<f32> = match t.dtype() {
            safetensors::Dtype::BF16 => {
                t.data().chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
            }
            _ => t.data().chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        };
        (v, sh)
    };
    let (q, s) = get("q");
    let (k, _) = get("k");
    let (v, _) = get("v");
    let view = |x: &'static [f32]| TensorView::new("x", x, s, Layout::Bhsd).unwrap();
    let (q, k, v): (&'static [f32], &'static [f32], &'static [f32]) = (q.leak(), k.leak(), v.leak());
    let mut p = Problem::new(view(q), view(k), view(v));
    p.grid = grid;
    let shape = p.validate().unwrap();
    let t = std::time::Instant::now();
    let r = fidelity::reference::attention(&p, &shape);
    println!("{s:?} reference {:?}", t.elapsed());
    for recipe in Recipe::all() {
        let plan = Plan::new(&p, &recipe, Options { lse: true, ..Default::default() }).unwrap();
        let run = run(&backend::cpu::Cpu, &plan, &p, None).unwrap();
        let m = fidelity::compare(&run.output.o.view(), &r.o);
        let lse = run.output.lse.unwrap();
        let dl = lse.iter().zip(&r.lse).map(|(a, b)| *a as f64 - b).sum::<f64>() / lse.len() as f64;
        if std::env::args().nth(2).is_some() {
            println!("{} {:?}", recipe.name, fidelity::error_sources(&p, &recipe, &r).unwrap());
        }
        println!(
            "{:14} rel_l2 {:.5} cos {:.6} psnr {:.2} share {:?} lse {:+.5} obs {:?} | group {:?} prep {:?} attend {:?}",
            recipe.name,
            m.rel_l2,
            m.cosine,
            m.psnr_db,
            run.report.mean_share,
            dl,
            run.output.observed,
            run.report.group,
            run.report.prepare,
            run.report.attend
        );
    }
}
