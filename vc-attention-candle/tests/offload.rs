//! Calls that a GPU computes for tensors in host memory, on a driver that is faked.

#![cfg(all(target_os = "linux", feature = "offload"))]

#[path = "../../tests/fake_driver/mod.rs"]
mod fake_driver;

use candle_core::{DType, Device, Result, Tensor};
use fake_driver::here;
use vc_attention::backend::cuda::Cuda;
use vc_attention_candle::{Grouping, Options, Order, VcAttention};

/// A refresh whose attention fails leaves the order that was kept, labels and all.
#[test]
fn a_failed_call_leaves_the_kept_order() -> Result<()> {
    if !here("a_failed_call_leaves_the_kept_order", "second-attention-fails") {
        return Ok(());
    }
    let gpu = Cuda::new(0).expect("the faked driver");
    let attention = VcAttention::offloaded(Options::default(), gpu);
    let x = |tokens: usize| Tensor::ones((1, tokens, 1, 64), DType::BF16, &Device::Cpu);
    let (order, short) = (Order::new(), x(200)?);
    let run = |x: &Tensor, grouping| attention.forward_on(x, x, x, 0.125, &order, grouping);
    run(&short, Grouping::Cold)?;
    let failed = run(&x(300)?, Grouping::Warm).unwrap_err().to_string();
    assert!(failed.contains("ILLEGAL_ADDRESS"), "{failed}");
    run(&short, Grouping::Reuse)?;
    Ok(())
}
