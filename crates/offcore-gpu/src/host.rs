//! The device `host`: threads of this machine do what a GPU would, by the same kernels over the same rings.
//!
//! It stands in for a GPU where there is none: what it says of packets is what a GPU says, how fast it is says nothing of
//! one. Its threads are not bound to a core; between bursts they spin for a moment, yield, and then sleep. In place of a
//! GPU's memory it has memory of this machine, as large as the pool; ports that copy can stand in for network cards, and put
//! packets there.

use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use offcore_mem::mapping::MemoryError;
use offcore_mem::{DeviceMemory, Hugepages, Mapping};
use offcore_ring::spsc::{self, Consumer, Producer};

use crate::device::{Device, DeviceError, Launch, Launcher, Memory, Service, Started, Watch};
use crate::idle::{Idle, NAP};
use crate::kernel;
use crate::layout::{PipelineView, PoolView};

const NAME: &str = "host";
/// How long threads may take to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// What goes wrong, for tests of who has to notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The thread that launches ends instead of launching this turn.
    Dies(u64),
    /// It stands still instead, until the service is ended.
    Stuck(u64),
}

/// The device `host`.
#[derive(Debug, Default)]
pub struct HostDevice {
    fault: Option<Fault>,
    /// Bytes of memory in place of a GPU's, of all services that were started.
    staging: usize,
    /// Memory in place of a GPU's that packets are received into.
    direct: Option<DeviceMemory>,
}

impl HostDevice {
    /// The device.
    ///
    /// # Errors
    /// When this program was built without a C++ compiler.
    pub fn new() -> Result<Self, DeviceError> {
        if kernel::BUILT {
            return Ok(Self::default());
        }
        let reason = "this program was built without a C++ compiler: install one (Debian: apt-get install g++) and build \
                      it again"
            .into();
        Err(DeviceError::Absent { device: NAME.into(), reason })
    }

    /// Test switch: something goes wrong. It takes [`Launch::Kernel`].
    #[cfg(any(test, feature = "test-switches"))]
    #[must_use]
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.fault = Some(fault);
        self
    }
}

/// What is shared by the threads of a service and its two halves.
#[derive(Debug)]
struct State {
    ending: AtomicBool,
    /// Threads at work.
    alive: AtomicUsize,
    threads: usize,
    /// What is in place of a GPU's memory: there for as long as a thread is, for good if that never ends.
    staging: Option<Mapping>,
    /// The same where packets are received there.
    _direct: Option<DeviceMemory>,
}

/// One thread's share in [`State::alive`].
struct Alive(Arc<State>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.fetch_sub(1, Ordering::Release);
    }
}

/// A view that goes to a thread.
#[derive(Clone, Copy)]
struct Sent(PipelineView);

// SAFETY: what it points to is for any thread: whoever started the service has promised that the memory stays, and packets
// are the device's while it works on them.
unsafe impl Send for Sent {}

impl Device for HostDevice {
    fn name(&self) -> &str {
        NAME
    }

    fn pool(&mut self, len: usize) -> Result<DeviceMemory, DeviceError> {
        let refuse =
            |error: MemoryError| DeviceError::Start { device: NAME.into(), reason: error.to_string() };
        let memory = memory_of(len).map_err(refuse)?;
        let (place, page) = ((memory.base().as_ptr().expose_provenance(), memory.len()), memory.page_size());
        let memory = DeviceMemory::new(NAME, place, page, true, Arc::new(memory));
        self.direct = Some(memory.clone());
        Ok(memory)
    }

    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError> {
        // SAFETY: the caller's promises are those that are asked for.
        let (launcher, watch) = unsafe { self.serve(service) }?;
        Ok(Started { launcher: Box::new(launcher), watch: Box::new(watch), slots: None })
    }

    fn notes(&self) -> Vec<String> {
        let mut notes =
            vec!["threads of this machine stand in for a GPU: no figure says anything about one".to_owned()];
        if self.staging > 0 {
            notes.push(format!(
                "{} MiB of this machine's memory stand in for a GPU's: packets are copied there and worked on there",
                self.staging.div_ceil(1 << 20)
            ));
        }
        if let Some(memory) = &self.direct {
            notes.push(format!(
                "{} MiB of this machine's memory stand in for a GPU's: packets are received there and worked on there",
                memory.len().div_ceil(1 << 20)
            ));
        }
        notes
    }
}

impl HostDevice {
    /// As [`Device::start`].
    ///
    /// # Safety
    /// As for [`Device::start`].
    unsafe fn serve(&mut self, mut service: Service) -> Result<(HostLauncher, HostWatch), DeviceError> {
        service.check(NAME)?;
        let refuse = |reason: String| DeviceError::Start { device: NAME.into(), reason };
        let one = NonZeroU32::MIN;
        let lanes = NonZeroU32::new(service.lanes).unwrap_or(one);
        let blocks = NonZeroU32::new(service.blocks).unwrap_or(one);
        let waiters = if service.launch == Launch::Persistent { blocks } else { one };
        let threads = waiters.get() as usize;
        let direct = service.direct(NAME, self.direct.as_ref())?;
        let staging = match service.memory {
            Memory::Host | Memory::Direct => None,
            Memory::Gpu => Some(memory_for(&service.view.pool).map_err(|error| refuse(error.to_string()))?),
        };
        if let Some(memory) = &direct {
            service.view.pool.base = memory.base();
        }
        let alive = AtomicUsize::new(threads);
        let state = Arc::new(State { ending: false.into(), alive, threads, staging, _direct: direct });
        let staging = state.staging.as_ref();
        service.view.pool.staging = staging.map_or(ptr::null_mut(), |memory| memory.base().as_ptr());
        self.staging += staging.map_or(0, Mapping::len);
        let (launches, to_launch) =
            spsc::ring(service.view.ring.count as usize).map_err(|error| refuse(error.to_string()))?;
        // Set when all threads are there: where one could not be started the others must not begin, since nobody has
        // promised them the memory then.
        let begun = Arc::new(OnceLock::new());
        let spawn = |work: Box<dyn FnOnce(&PipelineView) + Send>| {
            let begun = Arc::clone(&begun);
            let (alive, view) = (Alive(Arc::clone(&state)), Sent(service.view));
            thread::Builder::new()
                .name("offcore-device".into())
                .spawn(move || {
                    let _alive = alive;
                    let Sent(view) = { view };
                    if *begun.wait() {
                        work(&view);
                    }
                })
                .map_err(|error| refuse(format!("starting a thread: {error}")))
        };
        let mut handles = Vec::with_capacity(threads);
        let all = || -> Result<(), DeviceError> {
            match service.launch {
                Launch::Persistent => {
                    for block in 0..blocks.get() {
                        // SAFETY: the caller's promises cover the time until the thread has ended.
                        handles.push(spawn(Box::new(move |view| unsafe {
                            kernel::persistent(view, lanes, block, blocks, 0);
                        }))?);
                    }
                }
                // SAFETY: as above.
                Launch::Graph => handles.push(spawn(Box::new(move |view| unsafe { graphs(view, lanes) }))?),
                Launch::Kernel => {
                    let queue = LaunchQueue { to_launch, state: Arc::clone(&state), fault: self.fault };
                    // SAFETY: as above.
                    handles.push(spawn(Box::new(move |view| unsafe { queue.serve(view, lanes) }))?);
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

/// As much memory as there is in a pool.
fn memory_for(pool: &PoolView) -> Result<Mapping, MemoryError> {
    memory_of((pool.chunks as usize) << pool.chunk_shift)
}

fn memory_of(len: usize) -> Result<Mapping, MemoryError> {
    // Nobody else maps it: its file is not needed.
    Mapping::memfd("offcore-device", len, Hugepages::Auto).map(|(memory, _)| memory)
}

/// Bursts to be launched.
struct LaunchQueue {
    to_launch: Consumer<(u64, usize)>,
    state: Arc<State>,
    fault: Option<Fault>,
}

impl LaunchQueue {
    /// Launches as long as there may be something to launch: what a launching thread does with a GPU.
    ///
    /// # Safety
    /// As for [`Device::start`].
    unsafe fn serve(mut self, view: &PipelineView, lanes: NonZeroU32) {
        let tally = [const { AtomicU32::new(0) }; 2];
        let mut idle = Idle::default();
        loop {
            let Some((turn, packets)) = self.to_launch.pop() else {
                if self.state.ending.load(Ordering::Acquire) {
                    return;
                }
                idle.wait();
                continue;
            };
            idle.over();
            if self.goes_wrong(turn) {
                return;
            }
            let place = slot_and_lap(view, turn);
            let blocks = packets.div_ceil(kernel::SHARE).max(1) as u32;
            for block in 0..blocks {
                // SAFETY: the burst has been submitted, which its number in the queue says; the rest is the caller's
                // promise.
                unsafe { kernel::share(view, lanes, place, (block, blocks), &tally) };
            }
        }
    }

    /// Whether the thread is to end now, for a test's sake.
    fn goes_wrong(&self, turn: u64) -> bool {
        match self.fault {
            Some(Fault::Dies(at)) => at == turn,
            Some(Fault::Stuck(at)) if at == turn => {
                while !self.state.ending.load(Ordering::Acquire) {
                    thread::sleep(NAP);
                }
                true
            }
            _ => false,
        }
    }
}

/// One node after the other, each of which waits for its burst; ends when there are no more.
///
/// # Safety
/// As for [`Device::start`].
unsafe fn graphs(view: &PipelineView, lanes: NonZeroU32) {
    let mut turn = 0;
    loop {
        let (slot, lap) = slot_and_lap(view, turn);
        // SAFETY: the caller's promise.
        if !unsafe { kernel::graph_node(view, lanes, slot, lap) } {
            return;
        }
        turn += 1;
    }
}

/// Where the burst of a turn is: see [`crate::ring`].
fn slot_and_lap(view: &PipelineView, turn: u64) -> (u32, u32) {
    let slots = u64::from(view.ring.count);
    ((turn % slots) as u32, (turn / slots % u64::from(u32::MAX)) as u32 + 1)
}

#[derive(Debug)]
struct HostLauncher {
    /// Where bursts have to be launched.
    launches: Option<Producer<(u64, usize)>>,
    handles: Vec<JoinHandle<()>>,
    state: Arc<State>,
}

impl Launcher for HostLauncher {
    #[inline]
    fn submitted(&mut self, turn: u64, packets: usize) {
        if let Some(launches) = &mut self.launches {
            // There are no more on their way than the ring has slots.
            let _ = launches.push((turn, packets));
            launches.publish();
        }
    }

    fn end(self: Box<Self>) -> bool {
        self.state.ending.store(true, Ordering::Release);
        let since = Instant::now();
        while self.handles.iter().any(|handle| !handle.is_finished()) {
            if since.elapsed() > PATIENCE {
                return false;
            }
            thread::sleep(Duration::from_micros(100));
        }
        true
    }

    fn waiters(&self) -> usize {
        // Who launches is told by the queue; the others wait in the ring.
        if self.launches.is_some() { 0 } else { self.state.threads }
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

    fn give_up(&mut self) -> bool {
        self.state.ending.store(true, Ordering::Release);
        self.state.alive.load(Ordering::Acquire) == 0
    }
}

#[cfg(test)]
#[cfg(host_kernels)]
mod tests;
