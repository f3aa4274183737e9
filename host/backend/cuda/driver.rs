//! The seam to the CUDA driver, by `cudarc`, loaded at run time: one binary runs with and without a GPU.
//!
//! Launches take raw device pointers and a raw stream handle, so that the handles of anybody's stack (cudarc,
//! candle, cust) go in.

use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute, CUjit_option_enum as JitOption};
use cudarc::driver::{CudaContext, CudaStream};
use kernels_gpu::kernels::{Entry, PREPARE};

use super::dispatch::{Family, Kernels, Module, kernels_for, warp_level_kernels};
use super::embedded::{Image, images};
use crate::error::{Error, Result};
use crate::recipe::Recipe;

/// A device pointer; 0 where a kernel allows a missing tensor.
pub type DevicePtr = u64;

/// A stream of the driver API (`CUstream`), of whoever owns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Stream(pub *mut c_void);

// SAFETY: a handle; the driver allows its use from any thread in whose context it is.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl From<&CudaStream> for Stream {
    fn from(stream: &CudaStream) -> Self {
        Stream(stream.cu_stream().cast())
    }
}

impl Stream {
    fn raw(self) -> sys::CUstream {
        self.0.cast()
    }

    /// Waits until everything on the stream is done.
    ///
    /// # Errors
    /// Of the driver, those of earlier launches among them.
    pub fn synchronize(self) -> Result<()> {
        // SAFETY: the handle's owner keeps it alive while it is passed around.
        unsafe { result::stream::synchronize(self.raw()) }.map_err(|e| failed("waiting for the stream", e))
    }
}

/// Turns a driver's error into ours.
pub(super) fn failed(doing: &str, e: DriverError) -> Error {
    let name = e.error_name().map_or_else(|_| format!("{:?}", e.0), |s| s.to_string_lossy().into_owned());
    let text = e.error_string().map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned());
    Error::Device { reason: format!("{doing}: {name} ({text})") }
}

/// Names of the driver's library, each of which `cudarc` tries too.
const DRIVER_LIBRARIES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// Whether a driver library is there. `cudarc` panics without one, so this comes before anything else.
pub fn driver_present() -> bool {
    // cudarc's own test is missing where a crate beside this one (candle) has it linked instead of loaded.
    // SAFETY: opens the driver's library, whose initializers every CUDA program runs, and closes it again.
    DRIVER_LIBRARIES.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok())
}

/// One GPU with the kernels loaded.
#[derive(Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    name: String,
    capability: (i32, i32),
    kernels: Kernels,
    driver: i32,
    multiprocessors: u32,
    /// In the order of [`Kernels::modules`]; only the first is there from the start.
    modules: Vec<OnceLock<Loaded>>,
    /// Held while one is loaded.
    loading: Mutex<()>,
}

/// A module in the context.
#[derive(Debug)]
struct Loaded {
    module: sys::CUmodule,
    /// Whether another has loaded it.
    shared: bool,
    time: Duration,
    functions: Vec<Function>,
}

// SAFETY: module and function handles may be used from any thread that is in the context; every use binds it.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A loaded kernel, with what the driver's own assembler made of it.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Its launch contract.
    pub entry: Entry,
    /// Registers a thread.
    pub registers: i32,
    /// Local memory a thread in bytes: spills, which the build does not allow.
    pub local_bytes: i32,
    /// Static shared memory in bytes.
    pub static_shared: i32,
    handle: sys::CUfunction,
}

impl Device {
    /// Opens GPU `ordinal` and loads the kernels for its architecture.
    ///
    /// # Errors
    /// Without a driver, without such a GPU, on an architecture that no kernel covers, or when the driver is too
    /// old for the kernels; each says so.
    pub fn new(ordinal: usize) -> Result<Arc<Self>> {
        if !driver_present() {
            return Err(Error::Device {
                reason: "no CUDA driver was found (libcuda): install NVIDIA's driver, or use the CPU backend"
                    .into(),
            });
        }
        let context = CudaContext::new(ordinal).map_err(|e| failed(&format!("opening GPU {ordinal}"), e))?;
        Self::in_context(context)
    }

    /// Loads the kernels into a context of the caller's, such as candle's.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn in_context(context: Arc<CudaContext>) -> Result<Arc<Self>> {
        Self::with(context, kernels_for)
    }

    /// Loads the warp-level kernels for sm_89 in place of the GPU's own, which any GPU from there on can run: to test and
    /// compare them.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn warp_level(context: Arc<CudaContext>) -> Result<Arc<Self>> {
        Self::with(context, warp_level_kernels)
    }

    fn with(
        context: Arc<CudaContext>,
        choose: fn(&str, (i32, i32)) -> std::result::Result<Kernels, String>,
    ) -> Result<Arc<Self>> {
        let driver_call = |doing: &'static str| move |e| failed(doing, e);
        context.bind_to_thread().map_err(driver_call("entering the context"))?;
        let name = context.name().map_err(driver_call("reading the GPU's name"))?;
        let capability =
            context.compute_capability().map_err(driver_call("reading the compute capability"))?;
        let multiprocessors = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(driver_call("reading the number of multiprocessors"))?;
        let mut driver = 0;
        // SAFETY: writes one integer.
        unsafe { sys::cuDriverGetVersion(&mut driver) }
            .result()
            .map_err(driver_call("reading the driver's version"))?;
        let kernels = choose(&name, capability).map_err(|reason| Error::Device { reason })?;
        let device = Self {
            context,
            name,
            capability,
            modules: kernels.modules.iter().map(|_| OnceLock::new()).collect(),
            loading: Mutex::new(()),
            kernels,
            driver,
            multiprocessors: multiprocessors as u32,
        };
        device.load(0)?;
        Ok(Arc::new(device))
    }

    /// Module `index` of [`Kernels::modules`], loaded if it was not. The preparing kernels are those of the first.
    fn load(&self, index: usize) -> Result<&Loaded> {
        let slot = &self.modules[index];
        if let Some(loaded) = slot.get() {
            return Ok(loaded);
        }
        let _one_at_a_time = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = slot.get() {
            return Ok(loaded);
        }
        self.bind()?;
        let Module { arch, family, .. } = self.kernels.modules[index];
        let entries = self.kernels.entries(index).chain(family.prepare());
        let mut same = self.modules.iter().zip(self.kernels.modules).filter(|(_, other)| other.arch == arch);
        if let Some(other) = same.find_map(|(slot, _)| slot.get()) {
            // Another family of the same text is loaded: the driver has assembled these already.
            let functions = entries.map(|&entry| function(other.module, entry)).collect::<Result<_>>()?;
            let (module, time) = (other.module, Duration::ZERO);
            return Ok(slot.get_or_init(|| Loaded { module, shared: true, time, functions }));
        }
        let image = images().iter().find(|image| image.arch == arch).ok_or_else(|| Error::Device {
            reason: format!("this binary holds no kernels for {arch}: build it with kernels-gpu/ptx there"),
        })?;
        let start = Instant::now();
        let module = load(image, self.driver)?;
        let time = start.elapsed();
        let prepare = if index == 0 { PREPARE } else { &[] };
        let functions =
            entries.chain(prepare).map(|&entry| function(module, entry)).collect::<Result<_>>()?;
        Ok(slot.get_or_init(|| Loaded { module, shared: false, time, functions }))
    }

    /// Loads whatever is not loaded yet of the kernels for this device, as `vca doctor` does to show them.
    ///
    /// # Errors
    /// As [`Device::new`].
    pub fn load_all(&self) -> Result<()> {
        (0..self.modules.len()).try_for_each(|index| self.load(index).map(drop))
    }

    /// What is loaded.
    fn loaded(&self) -> impl Iterator<Item = &Loaded> {
        self.modules.iter().filter_map(OnceLock::get)
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability (major, minor).
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The kernels for this device, as the dispatch table has them.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The family of attention kernels that runs a recipe, loaded; none where none has its format of Q and K.
    ///
    /// # Errors
    /// As [`Device::new`], where it is loaded now.
    pub(super) fn family(&self, recipe: &Recipe) -> Result<Option<Family>> {
        let Some(index) = self.kernels.module_for(recipe) else { return Ok(None) };
        self.load(index)?;
        Ok(Some(self.kernels.modules[index].family))
    }

    /// CUDA version of the driver, 1000 * major + 10 * minor.
    pub fn driver_version(&self) -> i32 {
        self.driver
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// How long the driver took to assemble and load the kernels that are loaded.
    pub fn load_time(&self) -> Duration {
        self.loaded().map(|loaded| loaded.time).sum()
    }

    /// The loaded kernels.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.loaded().flat_map(|loaded| &loaded.functions)
    }

    /// The context that the kernels are loaded in.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// A kernel by the name of its entry.
    pub(super) fn function(&self, name: &str) -> Result<&Function> {
        self.functions().find(|f| f.entry.name == name).ok_or_else(|| Error::Device {
            reason: format!(
                "{} (compute capability {}.{}) has no kernel `{name}`",
                self.name, self.capability.0, self.capability.1
            ),
        })
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| failed("entering the context", e))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            for loaded in self.loaded().filter(|loaded| !loaded.shared) {
                // SAFETY: loaded by `load` and unloaded once; nothing can launch from it any more. An error on the way
                // out of a broken context has nobody to go to.
                let _ = unsafe { sys::cuModuleUnload(loaded.module) };
            }
        }
    }
}

/// Loads PTX; the driver assembles it.
fn load(image: &Image, driver: i32) -> Result<sys::CUmodule> {
    let text = CString::new(image.ptx())
        .map_err(|_| Error::Device { reason: "the embedded PTX holds a zero byte".into() })?;
    let mut log = vec![0u8; 8192];
    let mut options = [JitOption::CU_JIT_ERROR_LOG_BUFFER, JitOption::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: the text ends in a zero, the log buffer has the length that is passed, and both outlive the call.
    let status = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    let Err(e) = status.result() else { return Ok(module) };
    let version = format!("{}.{}", driver / 1000, driver % 1000 / 10);
    if e.0 == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION {
        let (cuda, oldest) = image.needs();
        return Err(Error::Device {
            reason: format!(
                "the driver (CUDA {version}) is too old for the kernels for {}: they need CUDA {cuda} or newer, that is \
                 driver {oldest}",
                image.arch
            ),
        });
    }
    let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..end]);
    let error = failed(&format!("loading the kernels for {} (driver CUDA {version})", image.arch), e);
    Err(Error::Device { reason: format!("{error} {}", log.trim()) })
}

fn function(module: sys::CUmodule, entry: Entry) -> Result<Function> {
    let doing = |e| failed(&format!("preparing kernel `{}`", entry.name), e);
    let name = CString::new(entry.name).expect("entry names are identifiers");
    // SAFETY: the module was just loaded; attributes of a function are read and its limit of dynamic shared
    // memory raised to what its contract says.
    unsafe {
        let handle = result::module::get_function(module, name).map_err(doing)?;
        let get = |attribute| result::function::get_function_attribute(handle, attribute).map_err(doing);
        if entry.dynamic_shared > 0 {
            let limit = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(handle, limit, entry.dynamic_shared as i32)
                .map_err(doing)?;
        }
        Ok(Function {
            entry,
            registers: get(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: get(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared: get(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            handle,
        })
    }
}

/// Parameters of a launch: values in the order of the kernel's table, each in 8 bytes of its own.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    values: Vec<u64>,
}

/// What a kernel takes as a parameter.
pub trait Argument {
    /// The value in the low bytes.
    fn bits(self) -> u64;
}
impl Argument for u64 {
    fn bits(self) -> u64 {
        self
    }
}
impl Argument for i64 {
    fn bits(self) -> u64 {
        self as u64
    }
}
impl Argument for u32 {
    fn bits(self) -> u64 {
        self.into()
    }
}
impl Argument for f32 {
    fn bits(self) -> u64 {
        self.to_bits().into()
    }
}

impl Arguments {
    /// No parameters yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// One more parameter.
    #[must_use]
    pub fn with(mut self, value: impl Argument) -> Self {
        self.values.push(value.bits());
        self
    }
}

impl Function {
    /// Launches `blocks` on a stream, in the context that is current.
    ///
    /// # Safety
    /// The arguments are those of the kernel's table, in order and of the right types, and the pointers among
    /// them reach what the table says for as long as the stream works on it.
    pub(super) unsafe fn launch(
        &self,
        stream: Stream,
        blocks: [u32; 3],
        mut arguments: Arguments,
    ) -> Result<()> {
        let mut pointers: Vec<*mut c_void> =
            arguments.values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        // SAFETY: by the caller; the driver copies the parameters before it returns. The values are little-endian,
        // so a 4-byte parameter reads the low half of its 8 bytes.
        unsafe {
            result::launch_kernel(
                self.handle,
                (blocks[0], blocks[1], blocks[2]),
                (self.entry.threads, 1, 1),
                self.entry.dynamic_shared,
                stream.raw(),
                &mut pointers,
            )
        }
        .map_err(|e| failed(&format!("launching `{}`", self.entry.name), e))
    }
}

/// Copies inside device memory, on a stream, in the context that is current.
///
/// # Safety
/// Both ranges are device memory and valid until the stream is through.
///
/// # Errors
/// Of the driver.
pub(super) unsafe fn copy_on_device(
    to: DevicePtr,
    from: DevicePtr,
    bytes: usize,
    stream: Stream,
) -> Result<()> {
    // SAFETY: by the caller.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.raw()) }
        .map_err(|e| failed("copying on the GPU", e))
}

/// Device memory that belongs to a plan.
#[derive(Debug)]
pub struct Buffer {
    device: Arc<Device>,
    ptr: DevicePtr,
    bytes: usize,
}

impl Buffer {
    /// Allocates; contents are undefined. Never part of a call: plans allocate when they are made.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        device.bind()?;
        // SAFETY: a plain allocation; freed in `drop`.
        let ptr = unsafe { result::malloc_sync(bytes.max(1)) }
            .map_err(|e| failed(&format!("allocating {bytes} bytes on {}", device.name), e))?;
        Ok(Self { device: device.clone(), ptr, bytes })
    }

    /// Allocates and copies `values` in.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn from_slice<T: bytemuck::Pod>(device: &Arc<Device>, values: &[T]) -> Result<Self> {
        let buffer = Self::new(device, size_of_val(values))?;
        // SAFETY: the buffer has the size of the slice.
        unsafe { result::memcpy_htod_sync(buffer.ptr, values) }
            .map_err(|e| failed("copying to the GPU", e))?;
        // A copy from pageable memory may return when its last piece is staged; streams that do not wait for the
        // default one must not run ahead of it.
        // SAFETY: every context has a default stream.
        unsafe { result::stream::synchronize(std::ptr::null_mut()) }
            .map_err(|e| failed("copying to the GPU", e))?;
        Ok(buffer)
    }

    /// Copies the first `len` values out; waits for the default stream only, so synchronize the working stream
    /// first.
    ///
    /// # Errors
    /// When the buffer is shorter, or of the driver.
    pub fn to_vec<T: bytemuck::Pod>(&self, len: usize) -> Result<Vec<T>> {
        self.read_range(0, len)
    }

    /// Copies `len` values out that start `offset` bytes in; see [`Buffer::to_vec`].
    ///
    /// # Errors
    /// When the buffer is shorter, or of the driver.
    pub(super) fn read_range<T: bytemuck::Pod>(&self, offset: usize, len: usize) -> Result<Vec<T>> {
        let end = offset + len * size_of::<T>();
        if end > self.bytes {
            return Err(Error::Device {
                reason: format!("reading up to byte {end} of a buffer of {}", self.bytes),
            });
        }
        self.device.bind()?;
        let mut out = vec![T::zeroed(); len];
        // SAFETY: the bytes are inside the buffer.
        unsafe { result::memcpy_dtoh_sync(&mut out, self.ptr + offset as u64) }
            .map_err(|e| failed("copying from the GPU", e))?;
        Ok(out)
    }

    /// Sets `bytes` bytes from `offset` on, on a stream.
    ///
    /// # Errors
    /// When the buffer is shorter, or of the driver.
    pub(super) fn fill_range(&self, offset: usize, bytes: usize, byte: u8, stream: Stream) -> Result<()> {
        if offset + bytes > self.bytes {
            return Err(Error::Device {
                reason: format!("clearing up to byte {} of a buffer of {}", offset + bytes, self.bytes),
            });
        }
        self.device.bind()?;
        // SAFETY: inside the buffer's own memory.
        unsafe { result::memset_d8_async(self.ptr + offset as u64, byte, bytes, stream.raw()) }
            .map_err(|e| failed("clearing device memory", e))
    }

    /// Start of the memory.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by `new`, freed once. An error on the way out has nobody to go to.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}
