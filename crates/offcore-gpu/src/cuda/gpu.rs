//! A GPU that is open: its context, the kernels, and what its services share.
//!
//! A kernel that waits for bursts runs until it is told to end, and until then the driver may keep whoever allocates,
//! registers or frees memory waiting: for ever, if it is who would have told it. So a process has a [`Yard`]: while
//! such a kernel runs, no service is made ready, and what an ended service leaves behind is kept until the last one
//! is gone. All services of a process are made first; their kernels begin with the first burst of each.

use std::any::Any;
use std::ffi::CString;
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use crate::cuda::driver::{self, Context, CudaError, Kernel, Module, Stream};
use crate::cuda::facts::facts_of;
use crate::cuda::memory::{Allocation, size};
use crate::cuda::thread::LaunchThread;
use crate::doctor::{CudaDevice, Ptx};
use crate::layout::{Kind, PipelineView, PoolView, QUIT, RingView, TrieView, WorkView};
use crate::ptx::PTX;

/// Lanes of a warp: a block has no fewer.
pub(crate) const WARP: u32 = 32;
/// Kernels of a device that can wait for bursts at the same time, unless the environment says otherwise: one more than
/// there are hardware queues would stand behind another in the same queue.
const QUEUES: u32 = 8;

/// The kernels of `kernels/kernels.cu`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    pub(crate) burst: Kernel,
    pub(crate) persistent: Kernel,
    pub(crate) node: Kernel,
}

/// An open GPU. Every part of the process that opens it has the same.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) ordinal: u32,
    /// The driver's CUDA version, as cuDriverGetVersion says it.
    pub(crate) version: u32,
    pub(crate) facts: CudaDevice,
    pub(crate) kernels: Kernels,
    /// Where packets are worked on with `Memory::Gpu`, by address and length of the pool: services share it, as a
    /// chunk is one service's at a time.
    staging: Mutex<Vec<(usize, usize, Weak<Allocation>)>>,
    /// Who launches kernels for bursts that have come, while there are such services.
    pub(super) launch_thread: Mutex<Weak<LaunchThread>>,
    /// Services whose kernels wait for bursts, and multiprocessors that those take.
    seats: [AtomicU32; 2],
    multiprocessors: u32,
    _module: Module,
    pub(crate) context: Arc<Context>,
}

/// Whether a driver of this CUDA version, and a device of this compute capability if it is about one, can do with the
/// kernels.
///
/// # Errors
/// What is too old, and what to do, in words.
pub(crate) fn suits(driver: u32, device: Option<(u32, u32)>) -> Result<(), String> {
    let Some(ptx) = Ptx::parse(PTX) else {
        return Err("the kernels' PTX says no version: build this program anew".into());
    };
    let (major, minor) = ptx.version;
    let Some(needed) = ptx.needs_cuda() else {
        return Err(format!("the kernels are PTX {major}.{minor}, of which no driver is known"));
    };
    let cuda = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
    if driver < needed {
        return Err(format!(
            "its driver is for CUDA {}, the kernels (PTX {major}.{minor}) need {}: install a newer driver of NVIDIA's",
            cuda(driver),
            cuda(needed)
        ));
    }
    match device {
        Some(found) if found < ptx.target => Err(format!(
            "it has compute capability {}.{}, the kernels need {}.{} (Turing) or later: take another GPU",
            found.0, found.1, ptx.target.0, ptx.target.1
        )),
        _ => Ok(()),
    }
}

impl Gpu {
    /// GPU `ordinal` of those that the driver shows.
    ///
    /// # Errors
    /// Why it cannot be used, and what to do, in words.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, String> {
        static OPEN: Mutex<Vec<Weak<Gpu>>> = Mutex::new(Vec::new());
        let version = driver::ready()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|gpu| gpu.strong_count() > 0);
        let known = open.iter().filter_map(Weak::upgrade).find(|gpu| gpu.ordinal == ordinal);
        if let Some(gpu) = known {
            return Ok(gpu);
        }
        suits(version, None)?;
        let gpu = Arc::new(Self::new(ordinal, version)?);
        open.push(Arc::downgrade(&gpu));
        Ok(gpu)
    }

    fn new(ordinal: u32, version: u32) -> Result<Self, String> {
        let in_words = |error: CudaError| error.to_string();
        let count = driver::devices().map_err(in_words)?;
        if ordinal >= count {
            let last = count.saturating_sub(1);
            return Err(match count {
                0 => "the driver shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES".into(),
                1 => "the driver shows one GPU: expected cuda:0".into(),
                _ => format!("the driver shows {count} GPUs: expected cuda:0 to cuda:{last}"),
            });
        }
        let device = driver::device(ordinal).map_err(in_words)?;
        let facts = facts_of(device).map_err(in_words)?;
        suits(version, Some(facts.compute_capability))?;
        let multiprocessors = driver::attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        let multiprocessors = multiprocessors.map_err(in_words)?.max(1) as u32;
        let context = Context::retain(device).map_err(|error| {
            format!(
                "no context on {}: {error}: see nvidia-smi for its compute mode and for who uses it",
                facts.name
            )
        })?;
        let text = CString::new(PTX).map_err(|error| format!("the kernels' PTX: {error}"))?;
        let module = Module::load(&context, &text);
        let module = module.map_err(|error| format!("the driver refuses the kernels' PTX: {error}"))?;
        let kernel = |name| module.kernel(name).map_err(in_words);
        let kernels = Kernels {
            burst: kernel(c"og_burst")?,
            persistent: kernel(c"og_persistent")?,
            node: kernel(c"og_graph_node")?,
        };
        let seats = [AtomicU32::new(0), AtomicU32::new(0)];
        let gpu = Self {
            ordinal,
            version,
            facts,
            kernels,
            staging: Mutex::default(),
            launch_thread: Mutex::default(),
            seats,
            multiprocessors,
            _module: module,
            context,
        };
        gpu.try_out().map_err(|error| format!("its kernels do not run: {error}"))?;
        Ok(gpu)
    }

    /// Launches every kernel once, on a ring of its own where no burst will come: each is loaded then, has the local
    /// memory that it needs, and has been seen to end. While a kernel waits for bursts another could not be loaded.
    fn try_out(&self) -> Result<(), String> {
        // A slot whose burst is the last, the answer's line, and words that are 0.
        let mut memory = [0u32; 40];
        (memory[0], memory[1]) = (1, QUIT);
        // SAFETY: numbers of an array.
        let at_device = unsafe { Allocation::copy(&self.context, "a try", memory.as_ptr(), memory.len()) }?;
        let at: *mut u8 = at_device.at();
        let view = PipelineView {
            pool: PoolView { base: null_mut(), staging: null_mut(), chunk_shift: 0, chunks: 0 },
            ring: RingView {
                slots: at,
                answers: at.wrapping_add(64),
                slot_stride: 64,
                answer_stride: 64,
                count: 1,
                reserved: 0,
            },
            work: WorkView { kind: Kind::Nothing, swap: 0, skip: 0, forced_ns: 0, trie: TrieView::EMPTY },
        };
        let words: *mut u32 = at.wrapping_add(128).cast();
        let Kernels { burst, persistent, node } = self.kernels;
        let run = || {
            self.context.settle()?;
            let stream = Stream::new(&self.context)?;
            // SAFETY: the context is current; the parameters are those of the kernels in kernels.cu. The ring has one
            // slot and answer, and the words two, as the kernels want them. They are there until the stream is idle.
            unsafe {
                burst.launch(&stream, ([1, 1], WARP), &mut [place(&view), place(&0u64), place(&words)])?;
                persistent.launch(
                    &stream,
                    ([1, 1], WARP),
                    &mut [place(&view), place(&0u32), place(&1u32), place(&0u64)],
                )?;
                node.launch(&stream, ([1, 1], WARP), &mut [place(&view), place(&0u32), place(&words)])?;
            }
            stream.wait()
        };
        run().map_err(|error: CudaError| error.to_string())
    }

    /// How it is called.
    pub(crate) fn title(&self) -> String {
        let CudaDevice { name, memory_bytes, compute_capability: (major, minor), .. } = &self.facts;
        let (ordinal, memory) = (self.ordinal, size(*memory_bytes as usize));
        format!("cuda:{ordinal} {name} (sm_{major}{minor}, {memory})")
    }

    /// Memory of its own for packets of the pool that is `len` bytes from `base` on.
    pub(crate) fn staging(&self, base: usize, len: usize) -> Result<Arc<Allocation>, String> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.retain(|(.., memory)| memory.strong_count() > 0);
        let known = staging.iter().find(|(at, bytes, _)| (*at, *bytes) == (base, len));
        if let Some(memory) = known.and_then(|(.., memory)| memory.upgrade()) {
            return Ok(memory);
        }
        let memory =
            Arc::new(Allocation::new(&self.context, "a copy of the packet pool (--memory gpu)", len)?);
        staging.push((base, len, Arc::downgrade(&memory)));
        Ok(memory)
    }

    /// Room for a service whose `blocks` blocks of `lanes` lanes wait for bursts all at the same time: a block that
    /// is not running serves nothing, and its turns would stand still.
    ///
    /// # Errors
    /// In words, when there is none.
    pub(crate) fn seat(self: &Arc<Self>, kernel: Kernel, blocks: u32, lanes: u32) -> Result<Seat, String> {
        let at_once = kernel.blocks_at_once(lanes).map_err(|error| error.to_string())?;
        let environment = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
        let queues = queues(environment.as_deref());
        let taken = self.seats.each_ref().map(|seat| seat.load(Ordering::Relaxed));
        let multiprocessors = blocks.div_ceil(at_once);
        room(taken, multiprocessors, queues, self.multiprocessors)?;
        let seat = Seat { gpu: Arc::clone(self), multiprocessors };
        self.seats[0].fetch_add(1, Ordering::Relaxed);
        self.seats[1].fetch_add(multiprocessors, Ordering::Relaxed);
        Ok(seat)
    }
}

/// The address of a value, as a parameter of a kernel.
pub(crate) fn place<T>(value: &T) -> *mut std::ffi::c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// Hardware queues, by the environment's CUDA_DEVICE_MAX_CONNECTIONS.
fn queues(environment: Option<&str>) -> u32 {
    environment.and_then(|text| text.trim().parse().ok()).map_or(QUEUES, |queues: u32| queues.clamp(1, 32))
}

/// Whether there is room for one more service whose kernels wait for bursts, and take so many multiprocessors.
fn room(taken: [u32; 2], wanted: u32, queues: u32, multiprocessors: u32) -> Result<(), String> {
    if taken[0] >= queues {
        return Err(format!(
            "it has {} pipelines whose kernels wait for bursts, and runs {queues} such kernels at a time: set \
             CUDA_DEVICE_MAX_CONNECTIONS (32 at most) in the environment, or take fewer pipelines or --workload kernel",
            taken[0]
        ));
    }
    if taken[1] + wanted > multiprocessors {
        return Err(format!(
            "blocks that wait for bursts would take {} multiprocessors, and it has {multiprocessors}: take fewer \
             --blocks, --lanes or pipelines",
            taken[1] + wanted
        ));
    }
    Ok(())
}

/// A service's share of what there is only so much of; it is given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    gpu: Arc<Gpu>,
    multiprocessors: u32,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.gpu.seats[0].fetch_sub(1, Ordering::Relaxed);
        self.gpu.seats[1].fetch_sub(self.multiprocessors, Ordering::Relaxed);
    }
}

/// What may be done only while no kernel of this process waits for bursts: who has the yard and sees that
/// [`Yard::is_quiet`] may allocate, register and free.
pub(crate) struct Yard {
    /// Services whose kernels have been launched and wait for bursts, or stand still.
    waiting: u32,
    /// What is to be dropped when there are none.
    kept: Vec<Box<dyn Any + Send>>,
}

impl fmt::Debug for Yard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Yard({} waiting, {} kept)", self.waiting, self.kept.len())
    }
}

/// The yard of this process: for all devices, since registered memory is every device's.
pub(crate) fn yard() -> MutexGuard<'static, Yard> {
    YARD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same for who must not wait, unless somebody else has it.
pub(crate) fn yard_at_once() -> Option<MutexGuard<'static, Yard>> {
    match YARD.try_lock() {
        Ok(yard) => Some(yard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

static YARD: Mutex<Yard> = Mutex::new(Yard { waiting: 0, kept: Vec::new() });

impl Yard {
    /// Whether no kernel waits for bursts.
    pub(crate) fn is_quiet(&self) -> bool {
        self.waiting == 0
    }

    /// A service's kernels are about to be launched, and to wait for bursts; or they stand still.
    pub(crate) fn enter(&mut self) {
        self.waiting += 1;
    }

    /// A service's kernels have ended.
    pub(crate) fn leave(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    /// Drops `things` now, or when the last kernel that waits for bursts has ended. Whether it was now.
    pub(crate) fn drop_when_quiet(&mut self, things: Box<dyn Any + Send>) -> bool {
        self.kept.push(things);
        if !self.is_quiet() {
            return false;
        }
        // With the yard in hand, so that no kernel begins to wait meanwhile.
        self.kept.clear();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_drivers_and_devices_are_refused_by_what_they_have() {
        let text = suits(11_080, None).unwrap_err();
        assert!(
            text.contains("CUDA 11.8") && text.contains("PTX 8.0") && text.contains("need 12.0"),
            "{text}"
        );
        suits(12_000, None).unwrap();
        suits(13_030, Some((9, 0))).unwrap();
        suits(12_000, Some((7, 5))).unwrap();
        let text = suits(12_020, Some((7, 0))).unwrap_err();
        assert!(text.contains("capability 7.0") && text.contains("need 7.5"), "{text}");
    }

    #[test]
    fn the_embedded_kernels_have_the_names_that_are_asked_for() {
        for name in ["og_burst", "og_persistent", "og_graph_node"] {
            assert!(PTX.contains(&format!(".visible .entry {name}(")), "{name}");
        }
        assert!(!PTX.contains('\0'));
    }

    #[test]
    fn services_that_could_not_run_at_once_are_refused() {
        assert_eq!(queues(None), 8);
        assert_eq!(
            (queues(Some("32")), queues(Some("100")), queues(Some("0")), queues(Some("x"))),
            (32, 32, 1, 8)
        );
        room([7, 0], 4, 8, 132).unwrap();
        let text = room([8, 0], 4, 8, 132).unwrap_err();
        assert!(text.contains("CUDA_DEVICE_MAX_CONNECTIONS") && text.contains("8 such kernels"), "{text}");
        room([1, 128], 4, 8, 132).unwrap();
        let text = room([1, 129], 4, 8, 132).unwrap_err();
        assert!(text.contains("133 multiprocessors, and it has 132"), "{text}");
    }

    #[test]
    fn what_ended_services_leave_is_kept_until_nobody_waits() {
        let mut yard = Yard { waiting: 0, kept: Vec::new() };
        let thing = Arc::new(());
        let seen = Arc::downgrade(&thing);
        yard.enter();
        yard.enter();
        yard.leave();
        assert!(!yard.drop_when_quiet(Box::new(thing)));
        assert!(seen.upgrade().is_some());
        yard.leave();
        assert!(yard.drop_when_quiet(Box::new(())));
        assert!(seen.upgrade().is_none());
    }
}
