//! A CUDA driver for machines without a GPU: as much of the driver API as this crate calls, with host memory for
//! device memory, kernels that do nothing (next to nothing where asked for: `launched`) and events a millisecond apart. `tests/fake_driver/mod.rs`
//! builds it as `libcuda.so`, so that everything around the kernels (choosing a GPU, planning, falling back, timing,
//! reporting) runs wherever the tests do. `FAKE_CUDA` says what is wrong with it.

#![allow(non_snake_case)]

use std::cell::Cell;
use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

const SUCCESS: c_int = 0;
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const UNSUPPORTED_PTX: c_int = 222;
const ILLEGAL_ADDRESS: c_int = 700;
/// Handles only have to differ from null.
const HANDLE: *mut c_void = 0x1000 as *mut c_void;

fn is(what: &str) -> bool {
    env::var("FAKE_CUDA").is_ok_and(|given| given == what)
}

/// Compute capability: that of an H200 unless another GPU is asked for.
fn capability() -> (c_int, c_int) {
    match env::var("FAKE_CUDA").as_deref() {
        Ok("ampere") => (8, 0),
        Ok("ada") => (8, 9),
        Ok("b200") => (10, 0),
        Ok("b300") => (10, 3),
        Ok("rtx-blackwell") => (12, 0),
        Ok("later") => (13, 0),
        _ => (9, 0),
    }
}

unsafe extern "C" {
    fn calloc(count: usize, size: usize) -> *mut c_void;
    fn free(at: *mut c_void);
}

/// Defines entries of the driver API whose body gives the status.
macro_rules! entries {
    ($($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        /// See the CUDA driver API.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            $(let _ = &$arg;)*
            // SAFETY: whoever calls the driver API passes what it asks for.
            #[allow(unused_unsafe)]
            unsafe { $body }
        }
    )*};
}

/// Writes a result and succeeds.
unsafe fn give<T>(to: *mut T, value: T) -> c_int {
    unsafe { to.write(value) };
    SUCCESS
}

static NOW: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static ATTENTIONS: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    /// The current context, as the real driver has it: of a thread.
    static CONTEXT: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}

fn in_context() -> bool {
    !CONTEXT.get().is_null()
}

/// Allocations of device memory so far: for tests.
#[unsafe(no_mangle)]
pub extern "C" fn fake_allocations() -> usize {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Under `rope`, what a kernel that takes rotary tables leaves in place of what it computes: the first cosine and the first sine
/// that it is given, where its operand, sums or largest magnitudes begin. What the host cannot read is passed on to what it can.
unsafe fn first_angles(name: &[u8], parameter: impl Fn(usize) -> u64) {
    // Where two neighboring words come from: two tables, or one tensor.
    let (from, to) = match name {
        _ if name.starts_with(b"k_stats") => ([(1, 0), (2, 0)], 4),
        b"k_mean" => ([(0, 0), (0, 1)], 2),
        _ if name.starts_with(b"quantize_q") => ([(1, 0), (2, 0)], 5),
        _ if name.starts_with(b"quantize_k") => ([(2, 0), (3, 0)], 7),
        _ if name.starts_with(b"fp4_amax_q") => ([(1, 0), (2, 0)], 3),
        _ if name.starts_with(b"fp4_amax_k") => ([(1, 0), (2, 0)], 5),
        _ => return,
    };
    let copy = |from: [(usize, usize); 2], to: usize| unsafe {
        let words = from.map(|(i, at)| (parameter(i) as *const u32).add(at).read());
        (parameter(to) as *mut [u32; 2]).write(words);
    };
    copy(from, to);
    if name.starts_with(b"quantize_k_fp4") {
        copy([(6, 0), (6, 1)], 8);
    }
}

/// What a kernel leaves where that is asked for (see `cuLaunchKernel`): an assignment moves the first token to cluster 1; the attention (of
/// Hopper) writes a 1 of its output type, and under `loud` a score beyond f16.
unsafe fn launched(name: &CStr, parameters: *mut *mut c_void) {
    let name = name.to_bytes();
    unsafe {
        let parameter = |i: usize| parameters.add(i).read().cast::<u64>().read();
        if is("rope") {
            return first_angles(name, parameter);
        }
        if name.starts_with(b"kmeans_assign") {
            (parameter(4) as *mut u16).write(1);
        } else if name.starts_with(b"attention_sm90") {
            let (o, row_max) = (parameter(9), parameter(12));
            match parameter(23) as u32 {
                0 => (o as *mut f32).write(1.0),
                1 => (o as *mut u16).write(0x3C00),
                _ => (o as *mut u16).write(0x3F80),
            }
            if is("loud") {
                (row_max as *mut f32).write(1e6);
            }
        }
    }
}

entries! {
    cuInit(flags: c_uint) { if is("no-device") { NO_DEVICE } else { SUCCESS } }
    cuDriverGetVersion(version: *mut c_int) { give(version, if is("old-driver") { 11_080 } else { 13_000 }) }
    cuDeviceGetCount(count: *mut c_int) { give(count, 1) }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        if ordinal == 0 { give(device, 0) } else { 101 }
    }
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        let text = b"Fake GPU\0";
        ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len());
        SUCCESS
    }
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) { give(bytes, 64 << 30) }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        give(value, match attribute {
            16 => 132,
            75 => capability().0,
            76 => capability().1,
            _ => 0,
        })
    }
    cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) { give(context, HANDLE) }
    cuDevicePrimaryCtxRelease_v2(device: c_int) { SUCCESS }
    cuCtxGetCurrent(context: *mut *mut c_void) { give(context, CONTEXT.get()) }
    cuCtxSetCurrent(context: *mut c_void) {
        CONTEXT.set(context);
        SUCCESS
    }
    cuCtxSynchronize() { SUCCESS }
    cuModuleLoadDataEx(
        module: *mut *mut c_void, image: *const c_void, options: c_uint, names: *mut c_int, values: *mut *mut c_void
    ) {
        if is("old-driver") { UNSUPPORTED_PTX } else { give(module, HANDLE) }
    }
    cuModuleUnload(module: *mut c_void) { SUCCESS }
    cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char) {
        // Its name, for `launched`.
        give(function, CString::from(CStr::from_ptr(name)).into_raw().cast())
    }
    cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: *mut c_void) {
        // Shared bytes, local bytes, registers.
        give(value, match attribute { 1 => 1024, 3 if is("spills") => 16, 4 => 168, _ => 0 })
    }
    cuFuncSetAttribute(function: *mut c_void, attribute: c_int, value: c_int) { SUCCESS }
    cuMemAlloc_v2(at: *mut u64, bytes: usize) {
        if !in_context() {
            return INVALID_CONTEXT;
        }
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // Handed out in steps of 256, as the real driver does.
        let memory = calloc(bytes + 256, 1) as u64;
        let aligned = (memory + 256) & !255;
        ((aligned - 8) as *mut u64).write(memory);
        give(at, aligned)
    }
    cuMemFree_v2(at: u64) {
        free(((at - 8) as *mut u64).read() as *mut c_void);
        SUCCESS
    }
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, bytes);
        SUCCESS
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void) {
        if !in_context() {
            return INVALID_CONTEXT;
        }
        ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes);
        SUCCESS
    }
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        if is("unreadable") {
            return ILLEGAL_ADDRESS;
        }
        ptr::copy_nonoverlapping(from as *const u8, to.cast(), bytes);
        SUCCESS
    }
    cuMemsetD8Async(to: u64, byte: u8, bytes: usize, stream: *mut c_void) {
        if !in_context() {
            return INVALID_CONTEXT;
        }
        ptr::write_bytes(to as *mut u8, byte, bytes);
        SUCCESS
    }
    cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) { give(stream, HANDLE) }
    cuStreamDestroy_v2(stream: *mut c_void) { SUCCESS }
    cuStreamSynchronize(stream: *mut c_void) { SUCCESS }
    cuLaunchKernel(
        function: *mut c_void, x: c_uint, y: c_uint, z: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: *mut c_void, parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) {
        if !in_context() {
            return INVALID_CONTEXT;
        }
        let attends = CStr::from_ptr(function.cast()).to_bytes().starts_with(b"attention_");
        // The second attention of a process.
        if attends && is("second-attention-fails") && ATTENTIONS.fetch_add(1, Ordering::Relaxed) == 1 {
            return ILLEGAL_ADDRESS;
        }
        if is("traces") || is("rope") || is("loud") || is("second-attention-fails") {
            launched(CStr::from_ptr(function.cast()), parameters);
        }
        SUCCESS
    }
    cuEventCreate(event: *mut *mut c_void, flags: c_uint) { give(event, calloc(1, size_of::<usize>())) }
    cuEventDestroy_v2(event: *mut c_void) {
        free(event);
        SUCCESS
    }
    cuEventRecord(event: *mut c_void, stream: *mut c_void) {
        give(event.cast(), NOW.fetch_add(1, Ordering::Relaxed))
    }
    cuEventSynchronize(event: *mut c_void) { SUCCESS }
    cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) {
        give(milliseconds, (end.cast::<usize>().read() - start.cast::<usize>().read()) as f32)
    }
    cuGetErrorName(error: c_int, text: *mut *const c_char) {
        give(text, match error {
            NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
            101 => c"CUDA_ERROR_INVALID_DEVICE",
            INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            UNSUPPORTED_PTX => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            _ => c"CUDA_ERROR_UNKNOWN",
        }.as_ptr())
    }
    cuGetErrorString(error: c_int, text: *mut *const c_char) { give(text, c"a fake error".as_ptr()) }
}
