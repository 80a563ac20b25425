//! The device `host`: threads of this machine run the kernels of a GPU on the same rings.
//!
//! It replaces a GPU on machines without one. Its results are the same as a GPU's, but its speed is not representative.
//! Its threads are not bound to a core. Between bursts they spin, then yield, then sleep. Instead of GPU memory it has
//! host memory, as large as the pool. Ports that copy can emulate network cards and put packets there.

use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use offcore_mem::mapping::MemoryError;
use offcore_mem::{DeviceMemory, Hugepages, Mapping};
use offcore_ring::spsc::{self, Consumer, Producer};

use crate::device::{DeviceError, GpuDevice, Launch, Launcher, Memory, Service, Started, Watch};
use crate::idle::{Idle, NAP};
use crate::kernel;
use crate::layout::{PipelineView, PoolView, TrieView};
use crate::ring::slot_and_lap;
use crate::trie::Trie;

/// The name of the device.
pub const HOST: &str = "host";
/// Time for threads to end.
const TIMEOUT: Duration = Duration::from_secs(5);

/// An injected fault, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The launch thread ends instead of launching this turn.
    Dies(u64),
    /// The launch thread hangs at this turn until the service is ended.
    Hangs(u64),
}

/// The device `host`.
#[derive(Debug, Default)]
pub struct HostDevice {
    fault: Option<Fault>,
    /// Bytes of staging memory of all services started.
    staging: usize,
    /// Memory into which packets are received, in place of a GPU's.
    direct: Option<DeviceMemory>,
}

impl HostDevice {
    /// Creates the device.
    ///
    /// # Errors
    /// This program was built without a C++ compiler.
    pub fn new() -> Result<Self, DeviceError> {
        if kernel::BUILT {
            return Ok(Self::default());
        }
        let reason =
            "this program was built without a C++ compiler: install one (Debian: apt-get install g++) and \
                      rebuild"
                .into();
        Err(DeviceError::Absent { device: HOST.into(), reason })
    }

    /// Test switch: injects a fault. It requires [`Launch::Kernel`].
    #[cfg(any(test, feature = "test-switches"))]
    #[must_use]
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.fault = Some(fault);
        self
    }
}

/// Shared by the threads of a service and its two halves.
#[derive(Debug)]
struct State {
    ending: AtomicBool,
    alive: AtomicUsize,
    workers: usize,
    /// Staging memory, kept until the last thread ends.
    staging: Option<Mapping>,
    /// Memory for received packets, kept until the last thread ends.
    _direct: Option<DeviceMemory>,
    /// Patterns, kept until the last thread ends.
    _trie: Option<Arc<Trie>>,
}

/// A thread's count in [`State::alive`].
struct Alive(Arc<State>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.fetch_sub(1, Ordering::Release);
    }
}

/// A view that is sent to a thread.
#[derive(Clone, Copy)]
struct SendView(PipelineView);

// SAFETY: the memory stays valid, as the caller of `start` guarantees, and the device owns packets while it processes
// them.
unsafe impl Send for SendView {}

impl GpuDevice for HostDevice {
    fn name(&self) -> &str {
        HOST
    }

    fn pool(&mut self, len: usize) -> Result<DeviceMemory, DeviceError> {
        let refuse =
            |error: MemoryError| DeviceError::Start { device: HOST.into(), reason: error.to_string() };
        let memory = memory_of(len).map_err(refuse)?;
        let (base, len) = (memory.base().as_ptr().expose_provenance(), memory.len());
        let page = memory.page_size();
        // SAFETY: the range is the new memory.
        let memory = unsafe { DeviceMemory::new(HOST, base, len, page, true, Arc::new(memory)) };
        self.direct = Some(memory.clone());
        Ok(memory)
    }

    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError> {
        // SAFETY: the memory in `service` stays valid until the service has ended, as the caller guarantees.
        let (launcher, watch) = unsafe { self.serve(service) }?;
        Ok(Started { launcher: Box::new(launcher), watch: Box::new(watch), slots: None })
    }

    fn notes(&self) -> Vec<String> {
        let mut notes =
            vec!["CPU threads stand in for a GPU: these figures say nothing about one".to_owned()];
        if self.staging > 0 {
            notes.push(format!(
                "{} MiB of this machine's memory stand in for a GPU's: packets are copied there and processed there",
                self.staging.div_ceil(1 << 20)
            ));
        }
        if let Some(memory) = &self.direct {
            notes.push(format!(
                "{} MiB of this machine's memory stand in for a GPU's: packets are received there and processed there",
                memory.len().div_ceil(1 << 20)
            ));
        }
        notes
    }
}

impl HostDevice {
    /// Starts a service, as [`GpuDevice::start`].
    ///
    /// # Safety
    /// As for [`GpuDevice::start`].
    unsafe fn serve(&mut self, mut service: Service) -> Result<(HostLauncher, HostWatch), DeviceError> {
        service.check(HOST)?;
        let refuse = |reason: String| DeviceError::Start { device: HOST.into(), reason };
        let one = NonZeroU32::MIN;
        let threads = NonZeroU32::new(service.threads).unwrap_or(one);
        let blocks = NonZeroU32::new(service.blocks).unwrap_or(one);
        let waiters = if service.launch == Launch::Persistent { blocks } else { one };
        let workers = waiters.get() as usize;
        let direct = service.direct(HOST, self.direct.as_ref())?;
        let staging = match service.memory {
            Memory::Host | Memory::Direct => None,
            Memory::Gpu => Some(memory_for(&service.view.pool).map_err(|error| refuse(error.to_string()))?),
        };
        if let Some(memory) = &direct {
            service.view.pool.base = memory.base();
        }
        let alive = AtomicUsize::new(workers);
        let trie = service.trie;
        service.view.work.trie = trie.as_ref().map_or(TrieView::EMPTY, |trie| trie.view());
        let state =
            Arc::new(State { ending: false.into(), alive, workers, staging, _direct: direct, _trie: trie });
        let staging = state.staging.as_ref();
        service.view.pool.staging = staging.map_or(ptr::null_mut(), |memory| memory.base().as_ptr());
        self.staging += staging.map_or(0, Mapping::len);
        let (launches, to_launch) =
            spsc::ring(service.view.ring.count as usize).map_err(|error| refuse(error.to_string()))?;
        // Set once all threads have been created. If one fails, the others must not start, because the memory need not
        // stay valid then.
        let begun = Arc::new(OnceLock::new());
        let spawn = |work: Box<dyn FnOnce(&PipelineView) + Send>| {
            let begun = Arc::clone(&begun);
            let (alive, view) = (Alive(Arc::clone(&state)), SendView(service.view));
            thread::Builder::new()
                .name("offcore-device".into())
                .spawn(move || {
                    let _alive = alive;
                    let SendView(view) = { view };
                    if *begun.wait() {
                        work(&view);
                    }
                })
                .map_err(|error| refuse(format!("starting a thread: {error}")))
        };
        let mut handles = Vec::with_capacity(workers);
        let all = || -> Result<(), DeviceError> {
            match service.launch {
                Launch::Persistent => {
                    for block in 0..blocks.get() {
                        // SAFETY: the memory stays valid until the thread has ended, as the caller guarantees.
                        handles.push(spawn(Box::new(move |view| unsafe {
                            kernel::persistent(view, threads, block, blocks, 0);
                        }))?);
                    }
                }
                // SAFETY: the memory stays valid until the thread has ended, as the caller guarantees.
                Launch::Graph => handles.push(spawn(Box::new(move |view| unsafe { graphs(view, threads) }))?),
                Launch::Kernel => {
                    let queue = LaunchQueue { to_launch, state: Arc::clone(&state), fault: self.fault };
                    // SAFETY: the memory stays valid until the thread has ended, as the caller guarantees.
                    handles.push(spawn(Box::new(move |view| unsafe { queue.serve(view, threads) }))?);
                }
            }
            Ok(())
        };
        let made = all();
        let _ = begun.set(made.is_ok());
        made?;
        let launches = (service.launch == Launch::Kernel).then_some(launches);
        let watch = HostWatch { state: Arc::clone(&state) };
        Ok((HostLauncher { launches, handles, state }, watch))
    }
}

/// Allocates memory of the size of a pool.
fn memory_for(pool: &PoolView) -> Result<Mapping, MemoryError> {
    memory_of((pool.chunks as usize) << pool.chunk_shift)
}

fn memory_of(len: usize) -> Result<Mapping, MemoryError> {
    // It is not shared, so its file is not needed.
    Mapping::memfd("offcore-device", len, Hugepages::Auto).map(|(memory, _)| memory)
}

/// The queue of bursts to launch.
struct LaunchQueue {
    to_launch: Consumer<(u64, usize)>,
    state: Arc<State>,
    fault: Option<Fault>,
}

impl LaunchQueue {
    /// Launches until the end of the service, like the launch thread of a GPU.
    ///
    /// # Safety
    /// As for [`GpuDevice::start`].
    unsafe fn serve(mut self, view: &PipelineView, threads: NonZeroU32) {
        let tally = AtomicU64::new(0);
        let mut idle = Idle::default();
        loop {
            let Some((turn, packets)) = self.to_launch.pop() else {
                if self.state.ending.load(Ordering::Acquire) {
                    return;
                }
                idle.wait();
                continue;
            };
            idle.reset();
            if self.injects_fault(turn) {
                return;
            }
            let (slot, lap) = slot_and_lap(view.ring.count, turn);
            let blocks = packets.div_ceil(kernel::SHARE).max(1) as u32;
            for block in 0..blocks {
                // SAFETY: the burst has been submitted, because its turn is in the queue. The memory stays valid until
                // the thread has ended, as the caller guarantees.
                unsafe { kernel::share(view, threads, slot, lap, block, blocks, &tally) };
            }
        }
    }

    /// Applies an injected fault. Returns whether the thread must end now.
    fn injects_fault(&self, turn: u64) -> bool {
        match self.fault {
            Some(Fault::Dies(at)) => at == turn,
            Some(Fault::Hangs(at)) if at == turn => {
                while !self.state.ending.load(Ordering::Acquire) {
                    thread::sleep(NAP);
                }
                true
            }
            _ => false,
        }
    }
}

/// Runs the nodes in order, each waiting for its burst, until a quit.
///
/// # Safety
/// As for [`GpuDevice::start`].
unsafe fn graphs(view: &PipelineView, threads: NonZeroU32) {
    let mut turn = 0;
    loop {
        let (slot, lap) = slot_and_lap(view.ring.count, turn);
        // SAFETY: the memory stays valid until the thread has ended, as the caller guarantees.
        if !unsafe { kernel::graph_node(view, threads, slot, lap) } {
            return;
        }
        turn += 1;
    }
}

#[derive(Debug)]
struct HostLauncher {
    /// The queue to the launch thread, with [`Launch::Kernel`].
    launches: Option<Producer<(u64, usize)>>,
    handles: Vec<JoinHandle<()>>,
    state: Arc<State>,
}

impl Launcher for HostLauncher {
    #[inline]
    fn submitted(&mut self, turn: u64, packets: usize) {
        if let Some(launches) = &mut self.launches {
            // The ring has no more slots than the queue.
            let _ = launches.push((turn, packets));
            launches.publish();
        }
    }

    fn end(self: Box<Self>) -> bool {
        self.state.ending.store(true, Ordering::Release);
        let since = Instant::now();
        while self.handles.iter().any(|handle| !handle.is_finished()) {
            if since.elapsed() > TIMEOUT {
                return false;
            }
            thread::sleep(Duration::from_micros(100));
        }
        true
    }

    fn waiters(&self) -> usize {
        // The launch thread is notified through its queue. The others wait in the ring.
        if self.launches.is_some() { 0 } else { self.state.workers }
    }
}

#[derive(Debug)]
struct HostWatch {
    state: Arc<State>,
}

impl Watch for HostWatch {
    fn failure(&mut self) -> Option<String> {
        let State { ending, alive, .. } = &*self.state;
        let gone = alive.load(Ordering::Acquire) == 0 && !ending.load(Ordering::Acquire);
        gone.then(|| "its threads have ended".into())
    }

    fn request_abort(&mut self) -> bool {
        self.state.ending.store(true, Ordering::Release);
        self.state.alive.load(Ordering::Acquire) == 0
    }
}

#[cfg(test)]
#[cfg(host_kernels)]
mod tests;
