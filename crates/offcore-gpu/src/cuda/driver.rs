//! The CUDA driver API: errors, and RAII wrappers of its objects. Everything here requires a value that a loaded
//! library has returned: see [`super::library`].

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cudarc::driver::sys::{self, CUresult};

use crate::cuda::library;

/// Size of the buffer for the compiler's log.
const LOG: usize = 8192;

/// An error of a driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaError {
    call: &'static str,
    /// Driver codes are at most 999 (CUDA_ERROR_UNKNOWN). An unknown code is never used in a match. It is only compared
    /// and passed back to the driver for its name.
    code: CUresult,
}

impl CudaError {
    /// Creates the error of `call`.
    pub(crate) fn new(call: &'static str, code: CUresult) -> Self {
        Self { call, code }
    }

    /// Returns whether this is the error `code`.
    pub(crate) fn is(&self, code: CUresult) -> bool {
        self.code as u32 == code as u32
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code } = *self;
        match (error_text(sys::cuGetErrorName, code), error_text(sys::cuGetErrorString, code)) {
            (Some(name), Some(text)) => write!(f, "{call}: {name} ({text})"),
            (Some(name), None) => write!(f, "{call}: {name}"),
            _ => write!(f, "{call}: CUDA error {}", code as u32),
        }
    }
}

impl std::error::Error for CudaError {}

/// Returns the name or text of an error code, from the given driver function.
fn error_text(
    of: unsafe fn(CUresult, *mut *const c_char) -> CUresult,
    code: CUresult,
) -> Option<&'static str> {
    if !library::is_present() {
        return None;
    }
    let mut text = null();
    // SAFETY: the library is loaded; `text` is valid for writes.
    if unsafe { of(code, &mut text) } != CUresult::CUDA_SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: a static, zero-terminated string of the driver.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// Converts a result code.
#[inline]
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(CudaError::new(call, code)) }
}

/// Calls a driver function by name, inside an `unsafe` block. Errors name the function.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::driver::check(stringify!($function), sys::$function($($argument),*))
    };
}
pub(crate) use call;

/// Loads and initialises the driver. Returns its CUDA version as cuDriverGetVersion does: 1000 × major + 10 × minor.
pub(crate) fn ready() -> Result<u32, String> {
    library::load()?;
    let mut version = 0;
    // SAFETY: the library is loaded. Both calls have no preconditions; `version` is valid for writes.
    let done = unsafe { call!(cuDriverGetVersion(&mut version)).and_then(|()| call!(cuInit(0))) };
    done.map(|()| version as u32)
        .map_err(|error| format!("the CUDA driver does not start: {error}: {}", advice(error)))
}

fn advice(error: CudaError) -> &'static str {
    if error.is(CUresult::CUDA_ERROR_NO_DEVICE) {
        "the driver shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES, and the container's GPUs"
    } else if error.is(CUresult::CUDA_ERROR_STUB_LIBRARY) {
        "libcuda.so is the toolkit's stub: remove its directory from LD_LIBRARY_PATH"
    } else if error.is(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) {
        "libcuda.so and the kernel module have different versions: reboot, or reload the module"
    } else {
        "see nvidia-smi, dmesg, and whether /dev/nvidiactl and /dev/nvidia-uvm can be opened"
    }
}

/// The primary context of a device, which everything in this process shares.
pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// Unique, unlike an address.
    id: u64,
}

// SAFETY: the driver API is thread-safe, and contexts are not bound to a thread.
unsafe impl Send for Context {}
// SAFETY: the driver API is thread-safe.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.device)
    }
}

impl Context {
    /// Retains the primary context of a device from [`device`].
    pub(crate) fn retain(device: sys::CUdevice) -> Result<Arc<Self>, CudaError> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let mut raw = null_mut();
        // SAFETY: the driver is ready, since it returned the device; `raw` is valid for writes.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut raw, device)) }?;
        Ok(Arc::new(Self { raw, device, id: IDS.fetch_add(1, Ordering::Relaxed) }))
    }

    /// Makes the context current for this thread. If it already is, this costs only a comparison.
    #[inline]
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        thread_local! {
            static CURRENT: Cell<u64> = const { Cell::new(0) };
        }
        if CURRENT.get() == self.id {
            return Ok(());
        }
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { call!(cuCtxSetCurrent(self.raw)) }?;
        CURRENT.set(self.id);
        Ok(())
    }

    /// Returns the raw handle.
    pub(crate) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Returns the free and total bytes of the device's memory.
    pub(crate) fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both are valid for writes.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Waits for all work on the default stream. Copies and fills may still be in progress when their calls return, and
    /// this program's streams do not wait for the default stream.
    pub(crate) fn settle(&self) -> Result<(), CudaError> {
        self.enter()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; `event` is valid for writes, and destroyed once, after its last use. Null is
        // the default stream.
        unsafe {
            call!(cuEventCreate(&mut event, flags))?;
            let recorded = call!(cuEventRecord(event, null_mut()));
            let done = recorded.and_then(|()| {
                loop {
                    match call!(cuEventQuery(event)) {
                        Err(error) if error.is(CUresult::CUDA_ERROR_NOT_READY) => thread::yield_now(),
                        done => break done,
                    }
                }
            });
            call!(cuEventDestroy_v2(event))?;
            done
        }
    }

    /// Starts or stops profiling.
    pub(crate) fn profile(&self, begin: bool) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the context is current.
        unsafe { if begin { call!(cuProfilerStart()) } else { call!(cuProfilerStop()) } }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `retain`. Everything in the context holds a reference to `self`, so it has been
        // dropped.
        let _ = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.device)) };
    }
}

/// Returns device `ordinal` of the visible devices.
pub(crate) fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
    // SAFETY: callers checked that the driver is ready; `device` is valid for writes.
    unsafe { call!(cuDeviceGet(&mut device, ordinal)) }?;
    Ok(device)
}

/// Returns the number of visible devices.
pub(crate) fn devices() -> Result<u32, CudaError> {
    let mut count = 0;
    // SAFETY: callers checked that the driver is ready; `count` is valid for writes.
    unsafe { call!(cuDeviceGetCount(&mut count)) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Returns an attribute of a device.
pub(crate) fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: the device is the driver's; `value` is valid for writes. An unknown attribute is an error.
    unsafe { call!(cuDeviceGetAttribute(&mut value, which, device)) }?;
    Ok(value)
}

/// A loaded module.
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: the driver API is thread-safe, and modules are not bound to a thread.
unsafe impl Send for Module {}
// SAFETY: the driver API is thread-safe.
unsafe impl Sync for Module {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:p})", self.raw)
    }
}

impl Module {
    /// Compiles PTX for the device.
    pub(crate) fn load(context: &Arc<Context>, ptx: &CStr) -> Result<Self, String> {
        context.enter().map_err(|error| error.to_string())?;
        let mut log = vec![0u8; LOG];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG)];
        let mut raw = null_mut();
        // SAFETY: the context is current, the PTX is zero-terminated, and there are as many options as values: a buffer
        // of `LOG` bytes that outlives the call, and its size passed as a pointer, as the driver expects.
        let done = unsafe {
            call!(cuModuleLoadDataEx(
                &mut raw,
                ptx.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            ))
        };
        match done {
            Ok(()) => Ok(Self { raw, context: Arc::clone(context) }),
            Err(error) => {
                let said = log.iter().position(|byte| *byte == 0).unwrap_or(LOG);
                let said = String::from_utf8_lossy(&log[..said]);
                let said = if said.trim().is_empty() { "nothing" } else { said.trim() };
                Err(format!("{error}; its compiler says: {said}"))
            }
        }
    }

    /// Loads the kernel of this name.
    pub(crate) fn kernel(&self, name: &CStr) -> Result<Kernel, CudaError> {
        self.context.enter()?;
        let mut raw = null_mut();
        // SAFETY: the context is current, the module is loaded, the name is zero-terminated; the output is valid for
        // writes.
        unsafe { call!(cuModuleGetFunction(&mut raw, self.raw, name.as_ptr())) }?;
        let mut kernel = Kernel { raw, max_threads: 1 };
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        kernel.max_threads = kernel.attribute(most)?.max(1);
        Ok(kernel)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current; no kernel of a dropped module is launched.
            let _ = unsafe { call!(cuModuleUnload(self.raw)) };
        }
    }
}

/// A kernel, valid as long as its module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    raw: sys::CUfunction,
    /// Maximum threads per block.
    pub(crate) max_threads: u32,
}

// SAFETY: the driver API is thread-safe, and kernels are not bound to a thread.
unsafe impl Send for Kernel {}
// SAFETY: the driver API is thread-safe.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Returns the raw handle.
    pub(crate) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Returns an attribute of the kernel as the driver has compiled it. The context must be current.
    pub(crate) fn attribute(&self, which: sys::CUfunction_attribute) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: the kernel's module is loaded; `value` is valid for writes.
        unsafe { call!(cuFuncGetAttribute(&mut value, which, self.raw)) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Returns the number of blocks of `threads` threads that one multiprocessor runs concurrently, at least 1. The
    /// context must be current.
    pub(crate) fn blocks_per_sm(&self, threads: u32) -> Result<u32, CudaError> {
        let mut blocks = 0;
        // SAFETY: the kernel's module is loaded; `blocks` is valid for writes.
        unsafe {
            call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.raw, threads as i32, 0))
        }?;
        Ok(blocks.max(1) as u32)
    }

    /// Launches `columns` × `rows` blocks of `threads` threads on the stream. It allocates nothing.
    ///
    /// # Safety
    /// The stream's context must be current and the kernel's own. Each parameter must point to a value of the type that
    /// the kernel has in this position. Memory to which the values refer must stay until the kernel has ended.
    #[inline]
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        [columns, rows]: [u32; 2],
        threads: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the stream's context is current and the kernel's own, the parameters have the kernel's types, and
        // their memory stays until the kernel has ended, as the caller guarantees. The call copies the values.
        unsafe {
            call!(cuLaunchKernel(
                self.raw,
                columns,
                rows,
                1,
                threads,
                1,
                1,
                0,
                stream.raw,
                parameters,
                null_mut(),
            ))
        }
    }
}

/// A stream. It does not synchronise with any other stream, nor with the default one.
pub(crate) struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver API is thread-safe, and streams are not bound to a thread.
unsafe impl Send for Stream {}
// SAFETY: the driver API is thread-safe.
unsafe impl Sync for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:p})", self.raw)
    }
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; `raw` is valid for writes.
        unsafe { call!(cuStreamCreateWithPriority(&mut raw, flags, 0)) }?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Returns its context.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the raw handle.
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Returns whether everything launched has completed, without blocking.
    ///
    /// # Errors
    /// The context is lost: nothing runs in it now or later.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the context is current, the stream is valid.
        match unsafe { call!(cuStreamQuery(self.raw)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until everything launched has completed.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the context is current, the stream is valid.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current, and the stream is not used afterwards. The call does not block.
            let _ = unsafe { call!(cuStreamDestroy_v2(self.raw)) };
        }
    }
}
