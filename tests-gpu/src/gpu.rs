//! The GPU: module loading with the assembler's log, what the driver made of each kernel, launches.

use std::ffi::{CString, c_void};
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute, CUjit_option_enum as Jit};
use cudarc::driver::{CudaContext, CudaStream, result};
use kernels_gpu::kernels::{Entry, SM90};

/// The Hopper module as it is committed.
const PTX: &[u8] = include_bytes!("../../kernels-gpu/ptx/vc_attention.sm_90a.ptx.zst");

/// An opened GPU with the kernels loaded.
pub struct Gpu {
    /// Stream of all work.
    pub stream: Arc<CudaStream>,
    /// Modules with what they are called in reports.
    modules: Vec<(String, sys::CUmodule)>,
}

/// A kernel ready to launch.
pub struct Kernel {
    /// Its facts.
    pub entry: &'static Entry,
    /// Its name with that of the module, if several are loaded.
    pub label: String,
    function: sys::CUfunction,
}

/// Parameters in the order of the entry.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Arguments {
    pub pointers: [u64; 13],
    pub q_tokens: u32,
    pub kv_tokens: u32,
    pub q_heads: u32,
    pub kv_heads: u32,
    pub batch: u32,
    pub head_dim: u32,
    pub out_strides: [i64; 3],
    pub promote: u32,
    pub out_type: u32,
}

impl Gpu {
    /// Opens device 0 and loads the PTX files, or the embedded one if there are none.
    pub fn open(files: &[PathBuf]) -> Result<Self> {
        // SAFETY: looks for the library only.
        if !unsafe { sys::is_culib_present() } {
            bail!("no libcuda on this machine");
        }
        let context = CudaContext::new(0)?;
        let (major, minor) = context.compute_capability()?;
        println!("{}, compute capability {major}.{minor}", context.name()?);
        let mut texts = Vec::new();
        for file in files {
            let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            texts.push((name, text));
        }
        if texts.is_empty() {
            let mut text = String::new();
            ruzstd::decoding::StreamingDecoder::new(PTX)?.read_to_string(&mut text)?;
            texts.push((String::new(), text));
        }
        let mut modules = Vec::new();
        for (name, text) in texts {
            println!("{name} {}", text.lines().next().unwrap_or_default());
            let start = Instant::now();
            modules.push((name, load(&text)?));
            println!("module loaded in {:.2} s", start.elapsed().as_secs_f64());
        }
        Ok(Self { stream: context.new_stream()?, modules })
    }

    /// The kernels whose name contains `only`, with what the driver's assembler made of them.
    pub fn kernels(&self, only: &str) -> Result<Vec<Kernel>> {
        let mut kernels = Vec::new();
        // INT8 has scales of rows and key groups, which the operands here have not: `tests/gpu` checks those entries.
        let all = SM90.iter().filter(|e| !e.name.contains("_i8_"));
        let all = all.flat_map(|e| self.modules.iter().map(move |m| (e, m)));
        for (entry, (name, module)) in all.filter(|(e, _)| e.name.contains(only)) {
            let label = [name.as_str(), entry.name].join(" ").trim().to_string();
            // SAFETY: the module is loaded, the function handle is the module's.
            unsafe {
                let found = result::module::get_function(*module, CString::new(entry.name)?);
                let function = match found {
                    // A module from a file may hold some of the entries only.
                    Err(_) if self.modules.len() > 1 => continue,
                    found => found.with_context(|| format!("no entry {}", entry.name))?,
                };
                let ask = |what| result::function::get_function_attribute(function, what);
                let registers = ask(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
                let local = ask(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
                result::function::set_function_attribute(
                    function,
                    Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    entry.dynamic_shared as i32,
                )?;
                println!("{label}: {registers} registers, {local} local bytes, as the driver built it");
                kernels.push(Kernel { entry, label, function });
            }
        }
        Ok(kernels)
    }

    /// Launches a kernel on the stream.
    pub fn launch(&self, kernel: &Kernel, a: &Arguments) -> Result<()> {
        let mut a = *a;
        let mut group = a.q_heads / a.kv_heads;
        let mut parameters: Vec<*mut c_void> =
            a.pointers.iter_mut().map(|p| p as *mut u64 as *mut c_void).collect();
        let sizes = [&mut a.q_tokens, &mut a.kv_tokens, &mut a.q_heads, &mut a.kv_heads, &mut group];
        for word in sizes.into_iter().chain([&mut a.head_dim]) {
            parameters.push(word as *mut u32 as *mut c_void);
        }
        parameters.extend(a.out_strides.iter_mut().map(|s| s as *mut i64 as *mut c_void));
        for word in [&mut a.promote, &mut a.out_type] {
            parameters.push(word as *mut u32 as *mut c_void);
        }
        let grid = (a.q_tokens.div_ceil(128), a.q_heads, a.batch);
        let block = (kernel.entry.threads, 1, 1);
        // SAFETY: the parameters are those of the entry, their buffers live in the caller.
        unsafe {
            let (function, shared) = (kernel.function, kernel.entry.dynamic_shared);
            result::launch_kernel(function, grid, block, shared, self.stream.cu_stream(), &mut parameters)?;
        }
        Ok(())
    }
}

/// `cuModuleLoadDataEx` with the log of the driver's assembler, without which a refused PTX says nothing.
fn load(text: &str) -> Result<sys::CUmodule> {
    let image = CString::new(text)?;
    let mut errors = vec![0u8; 16384];
    let mut options = [Jit::CU_JIT_ERROR_LOG_BUFFER, Jit::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [errors.as_mut_ptr() as *mut c_void, errors.len() as *mut c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: two options with their two values; the log outlives the call.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if code != sys::CUresult::CUDA_SUCCESS {
        let log = String::from_utf8_lossy(&errors);
        bail!("the driver refuses the PTX: {code:?}\n{}", log.trim_end_matches('\0'));
    }
    Ok(module)
}
