//! The port against what PyTorch made of the same weights and noise. The whole run is `vc-testbed check`.

use anyhow::bail;
use candle_core::Device;
use vc_testbed::attention::{Compute, RowAttention};
use vc_testbed::bundle::Bundle;
use vc_testbed::clip;
use vc_testbed::row::Row;

/// States of prompt 0 behind steps 0 and 10, at f32 against PyTorch under bf16 autocast. That is the noise floor of
/// bf16: PyTorch's own f32 clip is 62.5 dB from its bf16 clip.
#[test]
fn states_follow_pytorch() {
    let bundle = Bundle::open(&Bundle::folder(), &Device::Cpu).unwrap();
    let row: Row = "exact@io=f32".parse().unwrap();
    let grid = bundle.model.config().grid();
    let mut attention = RowAttention::new(&row, bundle.sampler.steps, grid, &Compute::Cpu).unwrap();
    let noise = bundle.noise(0).unwrap();
    let mut compared = Vec::new();
    let stopped =
        bundle.sampler.sample(&bundle.model, &bundle.prompt(0), &noise, &mut attention, |step, x| {
            let Some(expected) = bundle.reference(&format!("bf16_x.{step}")) else { return Ok(()) };
            // What the steps added to the noise, not the noise itself, which is most of an early state.
            let norm = |x: &candle_core::Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
            let moved = (norm(&(x - expected)?)? / norm(&(expected - &noise)?)?).sqrt();
            let psnr = clip::distance(x, expected)?.psnr_db;
            println!("step {step}: PSNR {psnr:.2} dB, {moved:.5} of what the steps added");
            compared.push((step, psnr, moved));
            if step == 10 { bail!("far enough") } else { Ok(()) }
        });
    assert_eq!(stopped.unwrap_err().to_string(), "far enough");
    assert_eq!(compared.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 10]);
    for (step, psnr, moved) in compared {
        assert!(psnr > 58.0, "step {step}: {psnr} dB");
        assert!(moved < 0.01, "step {step}: {moved} of what the steps added");
    }
}
