//! The GPU that all tests share, or a loud line that there is none.

use std::io::Write;
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cudarc::driver::{CudaContext, CudaStream, result};
use vc_attention::backend::cuda::{Buffer, Device, Stream, driver_present, kernels_for};

/// Tests run side by side; one that watches the whole device (its memory, what every thread may call) runs alone.
static ALONE: RwLock<()> = RwLock::new(());

/// The device of a test, and a stream of its own.
pub struct Gpu {
    pub device: Arc<Device>,
    stream: Arc<CudaStream>,
    _shared: Option<RwLockReadGuard<'static, ()>>,
    _alone: Option<RwLockWriteGuard<'static, ()>>,
}

impl Gpu {
    pub fn stream(&self) -> Stream {
        Stream::from(&*self.stream)
    }

    /// The same device with another stream, under the hold of this one.
    pub fn beside(&self) -> Gpu {
        Gpu { stream: stream(&self.device), device: self.device.clone(), _shared: None, _alone: None }
    }

    /// Uploads; what was uploaded is there for any stream when this returns (`cuMemcpyHtoD` alone only promises
    /// that the host memory may be reused).
    pub fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Buffer {
        let buffer = Buffer::from_slice(&self.device, values).expect("the device has the memory");
        self.device.context().synchronize().expect("the copy arrives");
        buffer
    }
}

/// The GPU, shared with other tests; `None` (said on stderr) where there is none.
pub fn gpu() -> Option<Gpu> {
    let device = device()?;
    let shared = ALONE.read().unwrap_or_else(|e| e.into_inner());
    Some(Gpu { stream: stream(&device), device, _shared: Some(shared), _alone: None })
}

/// The GPU with the warp-level kernels in place of its own, shared with other tests; `None` where there is none.
pub fn warp_level() -> Option<Gpu> {
    static DEVICE: OnceLock<Arc<Device>> = OnceLock::new();
    let own = device()?;
    let load = || Device::warp_level(own.context().clone());
    let device =
        DEVICE.get_or_init(|| load().unwrap_or_else(|e| panic!("the warp-level kernels do not load: {e}")));
    let shared = ALONE.read().unwrap_or_else(|e| e.into_inner());
    Some(Gpu { stream: stream(device), device: device.clone(), _shared: Some(shared), _alone: None })
}

/// A test on the GPU with its own kernels and with the warp-level ones. One after the other: a thread that holds the GPU
/// and asks for it again would wait for one that wants it alone, and that one for this.
pub fn both(test: impl Fn(&Gpu)) {
    for open in [gpu, warp_level] {
        let Some(gpu) = open() else { return };
        test(&gpu);
    }
}

/// The GPU, for this test alone.
pub fn gpu_alone() -> Option<Gpu> {
    let device = device()?;
    let alone = ALONE.write().unwrap_or_else(|e| e.into_inner());
    Some(Gpu { stream: stream(&device), device, _shared: None, _alone: Some(alone) })
}

fn stream(device: &Device) -> Arc<CudaStream> {
    device.context().new_stream().expect("the driver makes a stream")
}

/// Opens the device once. A driver that refuses the kernels is a failure; no driver, no GPU and a GPU that no
/// kernel is for are reasons to skip.
fn device() -> Option<Arc<Device>> {
    static DEVICE: OnceLock<Result<Arc<Device>, String>> = OnceLock::new();
    let opened = DEVICE.get_or_init(|| {
        let absent = |why: &str| Err(why.to_owned());
        if !driver_present() {
            return absent("no CUDA driver on this machine");
        }
        result::init().expect("the driver starts");
        if CudaContext::device_count().unwrap_or(0) == 0 {
            return absent("a CUDA driver, but no GPU");
        }
        let context = CudaContext::new(0).expect("GPU 0 opens");
        let capability = context.compute_capability().expect("the driver knows the GPU");
        if kernels_for("this GPU", capability).is_err() {
            return absent("a GPU that no kernel is for");
        }
        Ok(Device::in_context(context).unwrap_or_else(|e| panic!("the kernels do not load: {e}")))
    });
    match opened {
        Ok(device) => Some(device.clone()),
        Err(why) => {
            assert!(
                std::env::var_os("VCA_REQUIRE_GPU").is_none_or(|v| v != "1"),
                "VCA_REQUIRE_GPU=1, but {why}"
            );
            // Past the capture of the test harness, so that a skipped test never looks like one that ran.
            let name = std::thread::current().name().unwrap_or("a test").to_owned();
            let _ = writeln!(std::io::stderr(), "SKIPPED {name}: {why}");
            None
        }
    }
}
