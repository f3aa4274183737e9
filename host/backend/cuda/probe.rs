//! What GPUs there are, without opening any: for choosing one and for `vca doctor`.

use cudarc::driver::{result, sys};

use super::driver::{driver_present, failed};
use crate::error::{Error, Result};

/// A GPU as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its number, as [`Device::new`](super::Device::new) takes it.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability (major, minor).
    pub capability: (i32, i32),
    /// Memory in bytes.
    pub memory: usize,
}

/// CUDA version that the driver serves, 1000 * major + 10 * minor.
///
/// # Errors
/// Without a driver, or of the driver.
pub fn driver_version() -> Result<i32> {
    check_driver()?;
    let mut version = 0;
    // SAFETY: writes one integer; needs no initialization.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|e| failed("reading the driver's version", e))?;
    Ok(version)
}

/// The GPUs that the driver lets this process use, in its order.
///
/// # Errors
/// Without a driver, or of the driver: it may be there and find no GPU, or one that it does not fit.
pub fn gpus() -> Result<Vec<Listed>> {
    check_driver()?;
    result::init().map_err(|e| failed("starting the CUDA driver", e))?;
    let count = result::device::get_count().map_err(|e| failed("counting the GPUs", e))?;
    (0..count)
        .map(|ordinal| {
            let doing = |e| failed(&format!("asking about GPU {ordinal}"), e);
            let device = result::device::get(ordinal).map_err(doing)?;
            use sys::CUdevice_attribute as Attribute;
            // SAFETY: the device was returned by the driver.
            let get = |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(doing);
            let major = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            // SAFETY: as above.
            let memory = unsafe { result::device::total_mem(device) }.map_err(doing)?;
            let name = result::device::get_name(device).map_err(doing)?;
            Ok(Listed { ordinal: ordinal as usize, name, capability: (major, minor), memory })
        })
        .collect()
}

/// `cudarc` panics without a driver.
fn check_driver() -> Result<()> {
    if driver_present() {
        return Ok(());
    }
    Err(Error::Device {
        reason: "no CUDA driver was found (libcuda): install NVIDIA's driver, or use the CPU backend".into(),
    })
}
