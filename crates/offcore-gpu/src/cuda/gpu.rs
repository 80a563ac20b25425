//! An open GPU: its context, its kernels, and the state that its services share.
//!
//! A kernel that polls for bursts runs until it is told to quit. Until then the driver may block a thread that
//! allocates, registers or frees memory. This is a deadlock if the blocked thread is the only thread that could end the
//! kernel. The [`Quiesce`] lock prevents it: while such a kernel runs, no service starts, and the resources of an ended
//! service are kept until the last such kernel has ended. Therefore a process starts all its services first, and their
//! kernels start with the first burst of each.

use std::any::Any;
use std::ffi::CString;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::cuda::driver::{self, Context, CudaError, Kernel, Module, Stream};
use crate::cuda::facts::facts_of;
use crate::cuda::library;
use crate::cuda::memory::{Allocation, size};
use crate::cuda::quits::Quits;
use crate::cuda::tables::DeviceTrie;
use crate::cuda::thread::LaunchThread;
use crate::doctor::{CudaDeviceFacts, Ptx, words};
use crate::ptx::PTX;
use crate::trie::Trie;

/// Threads per warp, the minimum block size.
pub(crate) const WARP: u32 = 32;
/// The variable with the number of hardware queues of a process on a device. Each queue runs one kernel at a time, so a
/// second kernel in the same queue would be serialised.
const MAX_CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// The default number of hardware queues, and the maximum.
const QUEUES: u32 = 8;
const MAX_QUEUES: u32 = 32;
/// Queues that must stay free of polling kernels: for the null stream, copies, and kernels that have just ended.
const RESERVED_QUEUES: u32 = 3;

/// The kernels of `kernels/kernels.cu`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    pub(crate) burst: Kernel,
    pub(crate) persistent: Kernel,
    pub(crate) node: Kernel,
    pub(crate) reads: Kernel,
}

/// An open GPU, shared by everything in the process that opens it.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) ordinal: u32,
    /// The driver's CUDA version, in the format of cuDriverGetVersion.
    pub(crate) version: u32,
    pub(crate) facts: CudaDeviceFacts,
    pub(crate) kernels: Kernels,
    /// Device copies of packet pools for `Memory::Gpu`, by address and length of the pool. Services share a copy,
    /// because only one service uses a chunk at a time.
    staging: Mutex<Vec<(usize, usize, Weak<Allocation>)>>,
    /// Patterns in device memory, once for all services.
    tables: Mutex<Vec<Weak<DeviceTrie>>>,
    /// The thread that launches, while a service needs it.
    pub(super) launch_thread: Mutex<Weak<LaunchThread>>,
    /// Services whose kernels poll for bursts, and the multiprocessors (SMs) that they occupy.
    reserved: [AtomicU32; 2],
    multiprocessors: u32,
    _module: Module,
    pub(crate) context: Arc<Context>,
}

/// Checks that a driver of this CUDA version, and a device of this compute capability if given, can run the kernels.
pub(crate) fn check_versions(driver: u32, device: Option<(u32, u32)>) -> Result<(), String> {
    let Some(ptx) = Ptx::parse(PTX) else {
        return Err("the kernels' PTX has no version: rebuild this program".into());
    };
    let (major, minor) = ptx.version;
    let Some(needed) = ptx.needs_cuda() else {
        return Err(format!("the kernels are PTX {major}.{minor}, and no known driver supports that"));
    };
    if driver < needed {
        return Err(format!(
            "its driver is for CUDA {}, the kernels (PTX {major}.{minor}) need {}: install a newer NVIDIA driver",
            words(driver),
            words(needed)
        ));
    }
    match device {
        Some(found) if found < ptx.target => Err(format!(
            "it has compute capability {}.{}, the kernels need {}.{} (Turing) or later: use another GPU",
            found.0, found.1, ptx.target.0, ptx.target.1
        )),
        _ => Ok(()),
    }
}

impl Gpu {
    /// Opens GPU `ordinal` of the visible devices.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, String> {
        static OPEN: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());
        let version = driver::ready()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|gpu| gpu.strong_count() > 0);
        let known = open.iter().filter_map(Weak::upgrade).find(|gpu| gpu.ordinal == ordinal);
        if let Some(gpu) = known {
            return Ok(gpu);
        }
        check_versions(version, None)?;
        library::is_complete()?;
        let gpu = Arc::new(Self::new(ordinal, version)?);
        open.push(Arc::downgrade(&gpu));
        Ok(gpu)
    }

    fn new(ordinal: u32, version: u32) -> Result<Self, String> {
        let to_text = |error: CudaError| error.to_string();
        let count = driver::devices().map_err(to_text)?;
        if ordinal >= count {
            let last = count.saturating_sub(1);
            return Err(match count {
                0 => "the driver shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES".into(),
                1 => "the driver shows one GPU: expected cuda:0".into(),
                _ => format!("the driver shows {count} GPUs: expected cuda:0 to cuda:{last}"),
            });
        }
        let device = driver::device(ordinal).map_err(to_text)?;
        let facts = facts_of(device).map_err(to_text)?;
        check_versions(version, Some(facts.compute_capability))?;
        let multiprocessors = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let multiprocessors = multiprocessors.map_err(to_text)?.max(1) as u32;
        let context = Context::retain(device).map_err(|error| {
            format!(
                "no context on {}: {error}: see nvidia-smi for its compute mode and its processes",
                facts.name
            )
        })?;
        let text = CString::new(PTX).map_err(|error| format!("the kernels' PTX: {error}"))?;
        let module = Module::load(&context, &text);
        let module = module.map_err(|error| format!("the driver refuses the kernels' PTX: {error}"))?;
        let kernel = |name| module.kernel(name).map_err(to_text);
        let kernels = Kernels {
            burst: kernel(c"og_burst")?,
            persistent: kernel(c"og_persistent")?,
            node: kernel(c"og_graph_node")?,
            reads: kernel(c"og_reads")?,
        };
        let reserved = [AtomicU32::new(0), AtomicU32::new(0)];
        let gpu = Self {
            ordinal,
            version,
            facts,
            kernels,
            staging: Mutex::default(),
            tables: Mutex::default(),
            launch_thread: Mutex::default(),
            reserved,
            multiprocessors,
            _module: module,
            context,
        };
        let stream = Stream::new(&gpu.context).map_err(to_text)?;
        gpu.launch_all_once(&stream).map_err(|error| format!("its kernels do not run: {error}"))?;
        Ok(gpu)
    }

    /// Launches every kernel of services once on this stream, on a separate ring that contains a quit. This loads each
    /// kernel, allocates its local memory and assigns a hardware queue to the stream, which would block while a kernel
    /// polls for bursts, and checks that the kernel ends.
    pub(super) fn launch_all_once(&self, stream: &Stream) -> Result<(), String> {
        let quits = Quits::new(&self.context, 1)?;
        let (view, words) = (quits.view(), quits.words::<u64>());
        let Kernels { burst, persistent, node, .. } = self.kernels;
        let run = || {
            self.context.settle()?;
            // SAFETY: the context is current, and the parameters have the types of the kernels in kernels.cu. The ring
            // has one slot and one answer, and two words, as the kernels require. They exist until the stream is idle.
            unsafe {
                burst.launch(stream, [1, 1], WARP, &mut [place(&view), place(&0u64), place(&words)])?;
                persistent.launch(
                    stream,
                    [1, 1],
                    WARP,
                    &mut [place(&view), place(&0u32), place(&1u32), place(&0u64)],
                )?;
                node.launch(stream, [1, 1], WARP, &mut [place(&view), place(&0u32), place(&words)])?;
            }
            stream.wait()
        };
        run().map_err(|error: CudaError| error.to_string())
    }

    /// Returns a description of the GPU.
    pub(crate) fn title(&self) -> String {
        let CudaDeviceFacts { name, memory_bytes, compute_capability: (major, minor), .. } = &self.facts;
        let (ordinal, memory) = (self.ordinal, size(*memory_bytes as usize));
        format!("cuda:{ordinal} {name} (sm_{major}{minor}, {memory})")
    }

    /// Returns device memory for a copy of the pool of `len` bytes at `base`.
    pub(crate) fn staging(&self, base: usize, len: usize) -> Result<Arc<Allocation>, String> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.retain(|(.., memory)| memory.strong_count() > 0);
        let known = staging.iter().find(|(at, bytes, _)| (*at, *bytes) == (base, len));
        if let Some(memory) = known.and_then(|(.., memory)| memory.upgrade()) {
            return Ok(memory);
        }
        let memory = Arc::new(Allocation::new(&self.context, "a copy of the packet pool", len)?);
        staging.push((base, len, Arc::downgrade(&memory)));
        Ok(memory)
    }

    /// Returns a copy of `trie` in device memory.
    pub(crate) fn tables(&self, trie: &Arc<Trie>) -> Result<Arc<DeviceTrie>, String> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.retain(|copy| copy.strong_count() > 0);
        if let Some(copy) = tables.iter().filter_map(Weak::upgrade).find(|copy| Arc::ptr_eq(&copy.of, trie)) {
            return Ok(copy);
        }
        let copy = Arc::new(DeviceTrie::new(&self.context, trie)?);
        tables.push(Arc::downgrade(&copy));
        Ok(copy)
    }

    /// Reserves multiprocessors for a service whose `blocks` blocks of `threads` threads poll for bursts. All blocks
    /// must be resident: a block that does not run serves nothing, and its turns would stall.
    pub(crate) fn reserve_for_polling(
        self: &Arc<Self>,
        kernel: Kernel,
        blocks: u32,
        threads: u32,
    ) -> Result<SmReservation, String> {
        if self.facts.kernel_timeout {
            return Err("it has a display, and its driver kills kernels that run for seconds, such as those that wait for \
                        bursts: use workload type kernel, or a GPU without a display"
                .into());
        }
        let per_sm = kernel.blocks_per_sm(threads).map_err(|error| error.to_string())?;
        let environment = std::env::var(MAX_CONNECTIONS).ok();
        let queues = queues(environment.as_deref());
        let reserved = self.reserved.each_ref().map(|count| count.load(Ordering::Relaxed));
        let multiprocessors = blocks.div_ceil(per_sm);
        check_capacity(reserved, multiprocessors, queues, self.multiprocessors)?;
        let reservation = SmReservation { gpu: Arc::clone(self), multiprocessors };
        self.reserved[0].fetch_add(1, Ordering::Relaxed);
        self.reserved[1].fetch_add(multiprocessors, Ordering::Relaxed);
        Ok(reservation)
    }
}

/// Returns the address of a value, as a parameter of a kernel.
pub(crate) fn place<T>(value: &T) -> *mut std::ffi::c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Requests as many hardware queues as the driver supports, unless the environment already has a number. It must be
/// called at the start of a program: if the process has several threads, it does nothing, and the driver's default
/// applies.
pub fn use_all_queues() {
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, |threads| threads.count());
    if threads == 1 && std::env::var_os(MAX_CONNECTIONS).is_none() {
        // SAFETY: no other thread exists that could read the environment at the same time.
        unsafe { std::env::set_var(MAX_CONNECTIONS, MAX_QUEUES.to_string()) };
    }
}

/// Kernels that may wait for bursts at a time, from the value of [`MAX_CONNECTIONS`].
fn queues(environment: Option<&str>) -> u32 {
    let queues = environment.and_then(|text| text.trim().parse().ok()).unwrap_or(QUEUES);
    queues.clamp(1, MAX_QUEUES).saturating_sub(RESERVED_QUEUES).max(1)
}

/// Checks that one more service, whose kernels poll for bursts and occupy `wanted` multiprocessors, fits.
fn check_capacity(reserved: [u32; 2], wanted: u32, queues: u32, multiprocessors: u32) -> Result<(), String> {
    if reserved[0] >= queues {
        return Err(format!(
            "at most {queues} kernels may wait for bursts at a time, and {} pipelines already have one: set \
             {MAX_CONNECTIONS} (32 at most) in the environment, or use fewer pipelines or workload type kernel",
            reserved[0]
        ));
    }
    if reserved[1] + wanted > multiprocessors {
        return Err(format!(
            "blocks that wait for bursts would need {} multiprocessors, and it has {multiprocessors}: use fewer \
             blocks, threads or pipelines",
            reserved[1] + wanted
        ));
    }
    Ok(())
}

/// A service's share of the hardware queues and multiprocessors, released on drop.
#[derive(Debug)]
pub(crate) struct SmReservation {
    gpu: Arc<Gpu>,
    multiprocessors: u32,
}

impl Drop for SmReservation {
    fn drop(&mut self) {
        self.gpu.reserved[0].fetch_sub(1, Ordering::Relaxed);
        self.gpu.reserved[1].fetch_sub(self.multiprocessors, Ordering::Relaxed);
    }
}

/// The state under the quiesce lock. Allocating, registering and freeing memory requires the lock and
/// [`Quiesce::is_quiescent`].
pub(crate) struct Quiesce {
    /// Services whose kernels have been launched and poll for bursts, or are hung.
    running: u32,
    /// Resources to drop when `running` is 0.
    deferred: Vec<Box<dyn Any + Send>>,
}

impl fmt::Debug for Quiesce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quiesce({} running, {} deferred)", self.running, self.deferred.len())
    }
}

/// Takes the quiesce lock of this process. It is for all devices, because registered memory belongs to all of them.
pub(crate) fn quiesce_lock() -> MutexGuard<'static, Quiesce> {
    QUIESCE_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the quiesce lock without blocking. Returns `None` if another thread holds it.
pub(crate) fn try_quiesce_lock() -> Option<MutexGuard<'static, Quiesce>> {
    match QUIESCE_LOCK.try_lock() {
        Ok(quiesce) => Some(quiesce),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

static QUIESCE_LOCK: Mutex<Quiesce> = Mutex::new(Quiesce { running: 0, deferred: Vec::new() });

impl Quiesce {
    /// Returns whether no kernel polls for bursts.
    pub(crate) fn is_quiescent(&self) -> bool {
        self.running == 0
    }

    /// Counts a service whose kernels are about to poll for bursts, or are hung.
    pub(crate) fn enter(&mut self) {
        self.running += 1;
    }

    /// Removes a service whose kernels have ended.
    pub(crate) fn leave(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    /// Drops `things` now, or when the last kernel that polls for bursts has ended. Returns whether it dropped them
    /// now.
    pub(crate) fn drop_when_quiescent(&mut self, things: Box<dyn Any + Send>) -> bool {
        self.deferred.push(things);
        if !self.is_quiescent() {
            return false;
        }
        // Under the lock, so that no kernel starts in the meantime.
        self.deferred.clear();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_drivers_and_devices_are_refused() {
        let text = check_versions(11_080, None).unwrap_err();
        assert!(
            text.contains("CUDA 11.8") && text.contains("PTX 8.0") && text.contains("need 12.0"),
            "{text}"
        );
        check_versions(12_000, None).unwrap();
        check_versions(13_030, Some((9, 0))).unwrap();
        check_versions(12_000, Some((7, 5))).unwrap();
        let text = check_versions(12_020, Some((7, 0))).unwrap_err();
        assert!(text.contains("capability 7.0") && text.contains("need 7.5"), "{text}");
    }

    #[test]
    fn ptx_has_all_kernels() {
        for name in ["og_burst", "og_persistent", "og_graph_node", "og_reads"] {
            assert!(PTX.contains(&format!(".visible .entry {name}(")), "{name}");
        }
        assert!(!PTX.contains('\0'));
    }

    #[test]
    fn services_beyond_capacity_are_refused() {
        let found = [None, Some("32"), Some("100"), Some("4"), Some("0"), Some("x")].map(queues);
        assert_eq!(found, [5, 29, 29, 1, 1, 5]);
        check_capacity([7, 0], 4, 8, 132).unwrap();
        let text = check_capacity([8, 0], 4, 8, 132).unwrap_err();
        assert!(text.contains("CUDA_DEVICE_MAX_CONNECTIONS") && text.contains("at most 8 kernels"), "{text}");
        check_capacity([1, 128], 4, 8, 132).unwrap();
        let text = check_capacity([1, 129], 4, 8, 132).unwrap_err();
        assert!(text.contains("133 multiprocessors, and it has 132"), "{text}");
    }

    #[test]
    fn drops_are_deferred_until_quiescent() {
        let mut quiesce = Quiesce { running: 0, deferred: Vec::new() };
        let thing = Arc::new(());
        let seen = Arc::downgrade(&thing);
        quiesce.enter();
        quiesce.enter();
        quiesce.leave();
        assert!(!quiesce.drop_when_quiescent(Box::new(thing)));
        assert!(seen.upgrade().is_some());
        quiesce.leave();
        assert!(quiesce.drop_when_quiescent(Box::new(())));
        assert!(seen.upgrade().is_none());
    }
}
