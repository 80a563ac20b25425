//! The CUDA driver: its library, its errors, and what it gives out, each thing given back when it is dropped.
//!
//! The library is loaded when it is asked for first ([`ready`]), and everything else here is only reached with
//! something that a loaded library gave out. Functions that every driver since CUDA 12.0 has are called, and no
//! others once a device is open: one that is missing would end the program.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use cudarc::driver::sys::{self, CUresult};

/// Bytes for what the driver's compiler has to say.
const LOG: usize = 8192;

/// What a call of the driver came back with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaError {
    call: &'static str,
    /// The driver's numbers all are at most 999, CUDA_ERROR_UNKNOWN's, and one that this program does not know is never
    /// matched on: it is compared, and handed back to the driver for its name.
    code: CUresult,
}

impl CudaError {
    /// The error of `call`.
    pub(crate) fn new(call: &'static str, code: CUresult) -> Self {
        Self { call, code }
    }

    /// Whether it is this one.
    pub(crate) fn is(&self, code: CUresult) -> bool {
        self.code as u32 == code as u32
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, code } = *self;
        match (words(sys::cuGetErrorName, code), words(sys::cuGetErrorString, code)) {
            (Some(name), Some(text)) => write!(f, "{call}: {name} ({text})"),
            (Some(name), None) => write!(f, "{call}: {name}"),
            _ => write!(f, "{call}: CUDA error {}", code as u32),
        }
    }
}

impl std::error::Error for CudaError {}

/// A name or text of an error, by the function of the driver that knows them.
fn words(of: unsafe fn(CUresult, *mut *const c_char) -> CUresult, code: CUresult) -> Option<&'static str> {
    if !is_present() {
        return None;
    }
    let mut text = null();
    // SAFETY: the library is loaded; `text` is a place for an address.
    if unsafe { of(code, &mut text) } != CUresult::CUDA_SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: a string of the driver's, which ends with a zero and stays.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// What a call has come back with, as a result.
#[inline]
pub(crate) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(CudaError::new(call, code)) }
}

/// Calls a function of the driver by its name; to be used in an `unsafe` block. Errors name the function.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::driver::check(stringify!($function), sys::$function($($argument),*))
    };
}
pub(crate) use call;

/// Whether there is a driver's library. Where the environment's CUDA_PATH_L names a directory, the one there is loaded.
pub(crate) fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    *PRESENT.get_or_init(|| {
        if let Some(directory) = std::env::var_os("CUDA_PATH_L") {
            load_from(Path::new(&directory));
        }
        // SAFETY: loads a library, and runs what a library runs then. It is the driver's, which is trusted like the
        // kernel's half of it.
        unsafe { sys::is_culib_present() }
    })
}

/// Loads the library in this directory, if it is there. Who asks for `libcuda.so.1` afterwards gets this one, and
/// that is among the names which are tried where the system has none.
fn load_from(directory: &Path) {
    let found =
        ["libcuda.so.1", "libcuda.so"].map(|name| directory.join(name)).into_iter().find(|at| at.exists());
    let path = found.and_then(|path| CString::new(path.as_os_str().as_bytes()).ok());
    if let Some(path) = path {
        // SAFETY: as in `is_present`. The handle is not needed: the library is to stay.
        unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    }
}

/// The driver is loaded and initialised. Its CUDA version, as cuDriverGetVersion says it: 1000 × major + 10 × minor.
///
/// # Errors
/// Why it is not, and what to do, in words.
pub(crate) fn ready() -> Result<u32, String> {
    if !is_present() {
        return Err(
            "no CUDA driver was found (libcuda.so): install NVIDIA's driver for this kernel, or give its \
                    library's directory in CUDA_PATH_L"
                .into(),
        );
    }
    let mut version = 0;
    // SAFETY: the library is loaded. Both calls have no preconditions; `version` is a place for a number.
    let done = unsafe { call!(cuDriverGetVersion(&mut version)).and_then(|()| call!(cuInit(0))) };
    done.map(|()| version as u32).map_err(|error| {
        let advice = if error.is(CUresult::CUDA_ERROR_NO_DEVICE) {
            "the driver shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES, and whether the container was given \
             one"
        } else if error.is(CUresult::CUDA_ERROR_STUB_LIBRARY) {
            "the libcuda.so that was found is the toolkit's stub: remove its directory from LD_LIBRARY_PATH"
        } else if error.is(CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH) {
            "libcuda.so and the kernel's driver are of different versions: reboot, or load the module anew"
        } else {
            "see nvidia-smi, dmesg, and whether /dev/nvidiactl and /dev/nvidia-uvm can be opened"
        };
        format!("the CUDA driver does not start: {error}: {advice}")
    })
}

/// The primary context of a device: all that uses the device in this process shares it.
pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// Never the same for two contexts, unlike an address.
    id: u64,
}

// SAFETY: the driver's functions may be called by any thread, and take care of each other.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.device)
    }
}

impl Context {
    /// The context of a device of [`device`].
    pub(crate) fn retain(device: sys::CUdevice) -> Result<Arc<Self>, CudaError> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let mut raw = null_mut();
        // SAFETY: the driver is ready, as it has given out the device; `raw` is a place for a context.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut raw, device)) }?;
        Ok(Arc::new(Self { raw, device, id: IDS.fetch_add(1, Ordering::Relaxed) }))
    }

    /// Calls of this thread are about this context from now on. It costs a look at a number if they were before.
    #[inline]
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        thread_local! {
            static CURRENT: Cell<u64> = const { Cell::new(0) };
        }
        if CURRENT.get() == self.id {
            return Ok(());
        }
        // SAFETY: the context is retained as long as `self` is there.
        unsafe { call!(cuCtxSetCurrent(self.raw)) }?;
        CURRENT.set(self.id);
        Ok(())
    }

    /// The context, for structures that name it.
    pub(crate) fn raw(&self) -> sys::CUcontext {
        self.raw
    }

    /// Bytes of the device's memory that nobody uses, and all of them.
    pub(crate) fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both are places for numbers.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// Waits until everything is done that was begun without a stream. Copies and fills may be under way when their
    /// calls are over, and none of this program's streams waits for them.
    pub(crate) fn settle(&self) -> Result<(), CudaError> {
        self.enter()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; `event` is a place for an event, which is destroyed once, when nobody asks
        // for it any more. Null is the stream of calls that name none.
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

    /// Begins or ends the part of the run that a profiler looks at.
    pub(crate) fn profile(&self, begin: bool) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the context is current.
        unsafe { if begin { call!(cuProfilerStart()) } else { call!(cuProfilerStop()) } }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `retain`. Everything in the context has a share in `self`, and so has gone before.
        let _ = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.device)) };
    }
}

/// Device `ordinal` of those that the driver shows.
pub(crate) fn device(ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
    // SAFETY: callers have seen that the driver is ready; `device` is a place for a number.
    unsafe { call!(cuDeviceGet(&mut device, ordinal)) }?;
    Ok(device)
}

/// How many devices the driver shows.
pub(crate) fn devices() -> Result<u32, CudaError> {
    let mut count = 0;
    // SAFETY: callers have seen that the driver is ready; `count` is a place for a number.
    unsafe { call!(cuDeviceGetCount(&mut count)) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// A number that the driver has for a device.
pub(crate) fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: the driver has given out the device; `value` is a place for a number. An attribute that the driver does
    // not know is an error.
    unsafe { call!(cuDeviceGetAttribute(&mut value, which, device)) }?;
    Ok(value)
}

/// Code at a device.
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Module {}
// SAFETY: as for `Context`.
unsafe impl Sync for Module {}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({:p})", self.raw)
    }
}

impl Module {
    /// Compiles PTX for the device.
    ///
    /// # Errors
    /// What the driver says, and what its compiler says.
    pub(crate) fn load(context: &Arc<Context>, ptx: &CStr) -> Result<Self, String> {
        context.enter().map_err(|error| error.to_string())?;
        let mut log = vec![0u8; LOG];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG)];
        let mut raw = null_mut();
        // SAFETY: the context is current, the PTX ends with a zero, and the options are as many as their values: a
        // place of `LOG` bytes that is there until the call is over, and that number in place of an address, as the
        // driver wants it.
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

    /// The kernel of this name, loaded.
    pub(crate) fn kernel(&self, name: &CStr) -> Result<Kernel, CudaError> {
        self.context.enter()?;
        let mut raw = null_mut();
        let mut lanes = 0;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        // SAFETY: the context is current, the module is loaded, the name ends with a zero; places for what comes back.
        unsafe {
            call!(cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()))?;
            call!(cuFuncGetAttribute(&mut lanes, attribute, raw))?;
        }
        Ok(Kernel { raw, lanes: lanes.max(1) as u32 })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current; nobody launches kernels of a module that is dropped.
            let _ = unsafe { call!(cuModuleUnload(self.raw)) };
        }
    }
}

/// A kernel; it is there as long as its module is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    raw: sys::CUfunction,
    /// Lanes of a block, at most.
    pub(crate) lanes: u32,
}

// SAFETY: as for `Context`.
unsafe impl Send for Kernel {}
// SAFETY: as for `Context`.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// The kernel, for structures that name it.
    pub(crate) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Blocks of so many lanes that one multiprocessor runs at a time, at least 1. The context is current.
    pub(crate) fn blocks_at_once(&self, lanes: u32) -> Result<u32, CudaError> {
        let mut blocks = 0;
        // SAFETY: the kernel's module is loaded; `blocks` is a place for a number.
        unsafe {
            call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.raw, lanes as i32, 0))
        }?;
        Ok(blocks.max(1) as u32)
    }

    /// Launches it, behind what the stream has to do: `columns` times `rows` blocks of `lanes` lanes. It allocates
    /// nothing.
    ///
    /// # Safety
    /// The stream's context is current and the kernel's own. Each parameter is the address of a value of the type
    /// that the kernel takes at its place. What they point to stays as long as the kernel runs.
    #[inline]
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        ([columns, rows], lanes): ([u32; 2], u32),
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let parameters = parameters.as_mut_ptr();
        // SAFETY: the caller's promise; the values are copied before the call is over.
        unsafe {
            call!(cuLaunchKernel(
                self.raw,
                columns,
                rows,
                1,
                lanes,
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

/// A stream: what is launched on it runs one after the other. It waits for no other stream, the default one included.
pub(crate) struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Stream {}
// SAFETY: as for `Context`.
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
        // SAFETY: the context is current; `raw` is a place for a stream.
        unsafe { call!(cuStreamCreateWithPriority(&mut raw, flags, 0)) }?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Where it is.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// The stream, for calls that take it.
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Whether everything that was launched is done; does not wait for it.
    ///
    /// # Errors
    /// The context is lost: nothing runs in it any more, and nothing ever will.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the context is current, the stream is there.
        match unsafe { call!(cuStreamQuery(self.raw)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until everything that was launched is done.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the context is current, the stream is there.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current, the stream is there and used no more. The call does not wait.
            let _ = unsafe { call!(cuStreamDestroy_v2(self.raw)) };
        }
    }
}
