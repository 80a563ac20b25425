//! The launcher and the watch of a service on a GPU: see [`crate::cuda::service`].

use std::any::Any;
use std::fmt;
use std::mem::{ManuallyDrop, forget};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use offcore_mem::DeviceMemory;

use crate::cuda::direct;
use crate::cuda::driver::{CudaError, Kernel, Stream};
use crate::cuda::gpu::{Gpu, Quiesce, SmReservation, place, quiesce_lock, try_quiesce_lock};
use crate::cuda::graph::{Graphs, Schedule};
use crate::cuda::memory::{Allocation, Registration};
use crate::cuda::tables::DeviceTrie;
use crate::cuda::thread::{BatchLauncher, BurstQueue, LaunchBatch, LaunchMailbox};
use crate::device::{DeviceSlots, Launch, Launcher, Started, Watch};
use crate::kernel::SHARE;
use crate::layout::{PipelineView, RingView};
use crate::ring::slot_and_lap;

/// Time for kernels to end.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Polling interval of this wait.
const NAP: Duration = Duration::from_micros(50);

/// A service's resources, dropped in this order.
pub(super) struct Resources {
    pub(super) work: ServiceKernels,
    /// Per-slot words of [`ServiceKernels::Burst`] and [`ServiceKernels::Graphs`].
    pub(super) _words: Option<Allocation>,
    pub(super) _tables: Option<Arc<DeviceTrie>>,
    pub(super) _staging: Option<Arc<Allocation>>,
    pub(super) _ring: [Option<Registration>; 2],
    pub(super) _pool: Option<Registration>,
    pub(super) _direct: Option<DeviceMemory>,
    /// Whether writes by network cards need a flush before a kernel reads them.
    pub(super) flushes: bool,
    pub(super) sm_reservation: Option<SmReservation>,
    /// Keeps the ring's memory alive until it is unregistered.
    pub(super) _memory: Option<Box<dyn Any + Send>>,
    /// After `_memory`, which holds its mapping.
    pub(super) _slots: Option<Allocation>,
    pub(super) gpu: Arc<Gpu>,
}

/// The kernels that a service launches.
pub(super) enum ServiceKernels {
    /// A kernel per burst or several, by the launch thread; `tally` is a word per slot.
    Burst { tally: *mut u64 },
    /// One kernel for all bursts.
    Persistent,
    /// Graphs of kernels, by the launch thread.
    Graphs(Arc<Graphs>, Schedule),
}

// SAFETY: device addresses are not bound to a thread.
unsafe impl Send for ServiceKernels {}

impl Resources {
    /// Keeps `memory` for as long as the ring is registered.
    pub(super) fn keep(&mut self, memory: Option<Box<dyn Any + Send>>) {
        self._memory = memory;
    }
}

/// How a service launches its kernels: the number of blocks, and of threads per block.
#[derive(Clone, Copy)]
pub(super) struct LaunchGrid {
    pub(super) launch: Launch,
    pub(super) blocks: u32,
    pub(super) threads: u32,
}

/// Creates the launcher and the watch of a service, whose kernels are passed `view`.
pub(super) fn halves(
    grid: LaunchGrid,
    view: PipelineView,
    stream: Stream,
    resources: Resources,
    queue: Option<(BurstQueue, Answers)>,
    slots: Option<DeviceSlots>,
) -> Started {
    let LaunchGrid { launch, blocks, threads } = grid;
    let (mut queue, answers) = queue.unzip();
    let state = Arc::new(State {
        launch,
        stream: ManuallyDrop::new(stream),
        launching: false.into(),
        stopped: false.into(),
        launched: false.into(),
        counted: false.into(),
        ended: false.into(),
        refused: OnceLock::new(),
        mailbox: queue.as_ref().map(BurstQueue::mailbox),
        submitted: CachePadded::default(),
        handled: CachePadded::default(),
    });
    if let (Some(queue), Some(answers)) = (&mut queue, answers) {
        let state = Arc::clone(&state);
        match &resources.work {
            ServiceKernels::Persistent => {}
            ServiceKernels::Burst { tally } => {
                let (kernel, tally) = (resources.gpu.kernels.burst, *tally);
                queue.open(Box::new(BurstLauncher { state, kernel, view, tally, threads, answers }));
            }
            ServiceKernels::Graphs(graphs, schedule) => {
                let (graphs, schedule) = (Some(Arc::clone(graphs)), *schedule);
                queue.open(Box::new(GraphLauncher { state, graphs, schedule }));
            }
        }
    }
    let watch = Box::new(CudaWatch { state: Arc::clone(&state) });
    let launcher = CudaLauncher { state, resources: Some(resources), queue, view, blocks, threads, turns: 0 };
    Started { launcher: Box::new(launcher), watch, slots }
}

/// Shared by launcher and watch.
#[derive(Debug)]
struct State {
    launch: Launch,
    /// Dropped with the last of the two.
    stream: ManuallyDrop<Stream>,
    /// A launch is in progress, unless it saw `stopped`.
    launching: AtomicBool,
    /// No more launches.
    stopped: AtomicBool,
    /// Kernels that poll for bursts have been launched.
    launched: AtomicBool,
    /// The service is counted in [`Quiesce`]; changed under the quiesce lock.
    counted: AtomicBool,
    ended: AtomicBool,
    /// The error of the first launch that failed.
    refused: OnceLock<CudaError>,
    /// The mailbox of the launch thread, unless the lcore that submits launches.
    mailbox: Option<Arc<LaunchMailbox>>,
    /// Bursts that have been submitted, and of those the ones whose graphs the launch thread has launched.
    submitted: CachePadded<AtomicU64>,
    handled: CachePadded<AtomicU64>,
}

impl State {
    /// Counts the service's kernels as running.
    fn enter(&self, quiesce: &mut Quiesce) {
        if !self.counted.swap(true, Ordering::Relaxed) {
            quiesce.enter();
        }
    }

    /// Calls `launch`, unless the service is stopped. Always called by the same thread.
    #[inline]
    fn launch(&self, launch: impl FnOnce() -> Result<(), CudaError>) {
        // Either this load sees `stopped`, or the thread that set `stopped` sees `launching`.
        self.launching.store(true, Ordering::SeqCst);
        if !self.stopped.load(Ordering::SeqCst)
            && let Err(error) = launch()
        {
            let _ = self.refused.set(error);
            self.stopped.store(true, Ordering::SeqCst);
        }
        self.launching.store(false, Ordering::SeqCst);
    }

    /// Performs the first launch of kernels that poll for bursts. After it nothing in the process may be allocated or
    /// registered. Waits for a service that is being set up.
    #[cold]
    fn begin(&self, launch: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let mut quiesce = quiesce_lock();
        self.enter(&mut quiesce);
        let done = launch();
        // An earlier launch may have succeeded even if this one failed.
        self.launched.store(true, Ordering::Release);
        done
    }

    /// Returns whether a launch is still in progress after `stopped` was set.
    fn is_launching(&self) -> bool {
        self.launching.load(Ordering::SeqCst) && !self.has_thread_ended()
    }

    /// Returns whether the launch thread has ended before the service.
    fn has_thread_ended(&self) -> bool {
        self.mailbox.as_ref().is_some_and(|mailbox| mailbox.has_ended())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: the stream is only taken here, and not used afterwards.
        let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
        quiesce_lock().drop_when_quiescent(Box::new(stream));
    }
}

/// The launcher.
struct CudaLauncher {
    state: Arc<State>,
    /// Taken when the service ends.
    resources: Option<Resources>,
    queue: Option<BurstQueue>,
    /// With device addresses.
    view: PipelineView,
    blocks: u32,
    threads: u32,
    /// Number of bursts submitted.
    turns: u64,
}

// SAFETY: the view has device addresses, which are not bound to a thread. All other fields are `Send`.
unsafe impl Send for CudaLauncher {}

impl fmt::Debug for CudaLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, blocks, threads, turns, .. } = self;
        write!(f, "CudaLauncher({:?}, {blocks} blocks of {threads} threads, turn {turns})", state.launch)
    }
}

impl Launcher for CudaLauncher {
    fn flush_writes(&mut self) -> bool {
        let Some(resources) = &self.resources else { return true };
        if !resources.flushes {
            return true;
        }
        match resources.gpu.context.enter().and_then(|()| direct::flush()) {
            Ok(()) => true,
            Err(error) => {
                let _ = self.state.refused.set(error);
                self.state.stopped.store(true, Ordering::SeqCst);
                false
            }
        }
    }

    #[inline]
    fn submitted(&mut self, turn: u64, packets: usize) {
        self.turns = turn + 1;
        let state = &*self.state;
        if let Some(queue) = &mut self.queue {
            state.submitted.store(self.turns, Ordering::Release);
            queue.push(turn, packets);
        } else if !state.launched.load(Ordering::Relaxed) {
            self.launch_persistent();
        }
    }

    fn end(self: Box<Self>) -> bool {
        self.finish(None)
    }

    fn end_with(self: Box<Self>, memory: Box<dyn Any + Send>) -> bool {
        self.finish(Some(memory))
    }

    fn waiters(&self) -> usize {
        match self.resources.as_ref().map(|resources| &resources.work) {
            Some(ServiceKernels::Persistent) if self.state.launched.load(Ordering::Relaxed) => {
                self.blocks as usize
            }
            Some(ServiceKernels::Graphs(_, schedule)) => schedule.waiters(self.turns),
            Some(ServiceKernels::Persistent | ServiceKernels::Burst { .. }) | None => 0,
        }
    }
}

impl CudaLauncher {
    #[cold]
    fn launch_persistent(&self) {
        let Self { state, resources: Some(Resources { gpu, .. }), view, blocks, threads, .. } = self else {
            return;
        };
        let launch = || {
            gpu.context.enter()?;
            let parameters = &mut [place(view), place(&0u32), place(blocks), place(&0u64)];
            // SAFETY: the context is current; these are the parameters of `og_persistent`. The device memory that they
            // refer to is in the resources, which stay until the stream is idle.
            unsafe { gpu.kernels.persistent.launch(&state.stream, [*blocks, 1], *threads, parameters) }
        };
        state.launch(|| state.begin(launch));
    }

    /// Ends the service. Returns whether no kernel runs any more and the memory may be freed. `memory`, if given, is
    /// kept for as long as it is registered. Without it, the result is also false if other services keep it registered.
    fn finish(mut self, memory: Option<Box<dyn Any + Send>>) -> bool {
        let state = &*self.state;
        let since = Instant::now();
        // Lets the launch thread launch all submitted bursts.
        while self.queue.as_mut().is_some_and(|queue| !queue.is_empty())
            && !state.stopped.load(Ordering::SeqCst)
            && !state.has_thread_ended()
            && since.elapsed() < TIMEOUT
        {
            thread::sleep(NAP);
        }
        state.ended.store(true, Ordering::Release);
        state.stopped.store(true, Ordering::SeqCst);
        let Some(mut resources) = self.resources.take() else { return true };
        // A lost context runs no kernels.
        while state.is_launching() || matches!(state.stream.is_idle(), Ok(false)) {
            if since.elapsed() > TIMEOUT {
                // The kernels use all of it, and freeing any of it would block on them.
                forget((resources, memory));
                if let Some(mut quiesce) = try_quiesce_lock() {
                    state.enter(&mut quiesce);
                }
                return false;
            }
            thread::sleep(NAP);
        }
        // The launch thread drops its part of the service. It may need the quiesce lock, so this is done before taking
        // the lock.
        self.queue = None;
        let has_memory = memory.is_some();
        resources.sm_reservation = None;
        resources.keep(memory);
        let mut quiesce = quiesce_lock();
        if state.counted.load(Ordering::Relaxed) {
            quiesce.leave();
        }
        quiesce.drop_when_quiescent(Box::new(resources)) || has_memory
    }
}

impl Drop for CudaLauncher {
    fn drop(&mut self) {
        // Not ended: kernels may still run, and the ring's memory may be gone.
        if let Some(resources) = self.resources.take() {
            self.state.stopped.store(true, Ordering::SeqCst);
            forget(resources);
        }
    }
}

/// The answers of a ring, at the CPU's addresses.
pub(super) struct Answers(RingView);

// SAFETY: the ring's memory outlives the service, as `GpuDevice::start` requires, and laps are read atomically.
unsafe impl Send for Answers {}

impl Answers {
    /// # Safety
    /// The ring's memory must stay until the service has ended.
    pub(super) unsafe fn new(ring: RingView) -> Self {
        Self(ring)
    }

    /// Returns whether the burst of `turn`, or a later one in the same slot, is answered.
    #[inline]
    fn have(&self, turn: u64) -> bool {
        let RingView { answers, answer_stride, count, .. } = self.0;
        let (slot, lap) = slot_and_lap(count, turn);
        let head = answers.wrapping_add(slot as usize * answer_stride as usize);
        // SAFETY: the head is inside the answers, line-aligned, and begins with its lap. The memory is valid, as the
        // caller of `new` guarantees.
        let found = unsafe { AtomicU32::from_ptr(head.cast()) }.load(Ordering::Relaxed);
        (found.wrapping_sub(lap) as i32) >= 0
    }
}

/// Launches the kernels for bursts of one ring, on the launch thread.
struct BurstLauncher {
    state: Arc<State>,
    kernel: Kernel,
    /// With device addresses.
    view: PipelineView,
    /// A word per slot, in device memory.
    tally: *mut u64,
    threads: u32,
    answers: Answers,
}

// SAFETY: the view and the tally are device addresses, which are not bound to a thread. All other fields are `Send`.
unsafe impl Send for BurstLauncher {}

impl fmt::Debug for BurstLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BurstLauncher({} threads, {:?})", self.threads, self.state)
    }
}

impl BatchLauncher for BurstLauncher {
    #[inline]
    fn launch(&mut self, LaunchBatch { turn, bursts, packets }: LaunchBatch) {
        let Self { state, kernel, view, tally, threads, .. } = &*self;
        let stream = &state.stream;
        state.launch(|| {
            stream.context().enter()?;
            let blocks = packets.div_ceil(SHARE).max(1) as u32;
            let parameters = &mut [place(view), place(&turn), place(tally)];
            // SAFETY: the context is current; these are the parameters of `og_burst`, and there are at most as many
            // bursts as slots. The module and the device memory are in the launcher's resources, which it drops once
            // the service is stopped, which `State::launch` checks, and the stream is idle.
            unsafe { kernel.launch(stream, [blocks, bursts], *threads, parameters) }
        });
    }

    #[inline]
    fn is_answered(&self, turn: u64) -> bool {
        self.answers.have(turn) || self.state.stopped.load(Ordering::Relaxed)
    }
}

/// Launches the graphs of one ring, on the launch thread.
#[derive(Debug)]
struct GraphLauncher {
    state: Arc<State>,
    /// Taken when it is dropped.
    graphs: Option<Arc<Graphs>>,
    schedule: Schedule,
}

impl Drop for GraphLauncher {
    fn drop(&mut self) {
        // It may hold the last reference, if the service could not wait for this thread.
        quiesce_lock().drop_when_quiescent(Box::new(self.graphs.take()));
    }
}

impl BatchLauncher for GraphLauncher {
    #[inline]
    fn launch(&mut self, LaunchBatch { turn, bursts, .. }: LaunchBatch) {
        let Self { state, graphs: Some(graphs), schedule } = self else { return };
        let turns = turn + u64::from(bursts);
        if !schedule.is_due(turns - 1) {
            state.handled.store(turns, Ordering::Release);
            return;
        }
        let mut due = || {
            while let Some(graph) = schedule.due(turns - 1) {
                // SAFETY: the device memory of the graphs is in the launcher's resources, which it drops only when the
                // service is stopped and the stream is idle. Only this thread launches.
                unsafe { graphs.launch(graph, &state.stream) }?;
            }
            Ok(())
        };
        state.launch(|| if state.launched.load(Ordering::Relaxed) { due() } else { state.begin(due) });
        state.handled.store(turns, Ordering::Release);
    }

    /// Graphs wait for their bursts.
    fn is_answered(&self, _turn: u64) -> bool {
        true
    }
}

/// The watch.
#[derive(Debug)]
struct CudaWatch {
    state: Arc<State>,
}

impl Watch for CudaWatch {
    fn failure(&mut self) -> Option<String> {
        let state = &*self.state;
        if state.ended.load(Ordering::Acquire) {
            return None;
        }
        // A graph always waits for the next burst, except while the launch thread is late.
        let submitted = state.submitted.load(Ordering::Acquire);
        let handled = state.handled.load(Ordering::Acquire);
        // Read before the stream is queried: nothing is launched after a failed launch or after the thread has ended.
        let (refused, gone) = (state.refused.get(), state.has_thread_ended());
        let launched = state.launched.load(Ordering::Acquire);
        let idle = state.stream.is_idle();
        let is_waited_for = state.launch != Launch::Graph
            || submitted == handled && submitted == state.submitted.load(Ordering::Acquire);
        failure_of(state.launch, launched && is_waited_for, refused, gone, &idle)
    }

    fn request_abort(&mut self) -> bool {
        let state = &*self.state;
        state.stopped.store(true, Ordering::SeqCst);
        // Kernels that poll for bursts only see the quit in the ring.
        if !state.is_launching() && !matches!(state.stream.is_idle(), Ok(false)) {
            return true;
        }
        // They may be hung permanently, and freeing memory would block on them. This function must not block.
        if let Some(mut quiesce) = try_quiesce_lock()
            && !state.ended.load(Ordering::Acquire)
        {
            state.enter(&mut quiesce);
        }
        false
    }
}

/// Returns why no kernel runs in a service that was not ended, by the state of its stream: the service's `launch` type,
/// whether polling kernels have been `launched` and should run, the `refused` launch, and whether its thread is `gone`.
fn failure_of(
    launch: Launch,
    launched: bool,
    refused: Option<&CudaError>,
    gone: bool,
    idle: &Result<bool, CudaError>,
) -> Option<String> {
    match (idle, refused) {
        (Err(error), _) => Some(format!("its context is lost: {error}")),
        (Ok(false), _) => None,
        (Ok(true), Some(error)) => Some(format!("it takes no more launches: {error}")),
        (Ok(true), None) if gone => Some("the thread that launches its kernels has ended".into()),
        // A kernel per burst may be about to be launched, but a polling kernel runs continuously after its launch.
        (Ok(true), None) => (launched && launch != Launch::Kernel)
            .then(|| "its kernels have ended although more bursts may come".into()),
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn stopped_kernels_are_a_failure() {
        let lost = CudaError::new("cuStreamQuery", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        let refused = CudaError::new("cuLaunchKernel", CUresult::CUDA_ERROR_INVALID_VALUE);
        for launch in Launch::ALL {
            let text = failure_of(launch, true, None, false, &Err(lost)).unwrap();
            assert!(text.contains("context is lost: cuStreamQuery"), "{text}");
            let running = failure_of(launch, true, Some(&refused), true, &Ok(false));
            assert_eq!(running, None, "a kernel is still running");
            let text = failure_of(launch, true, Some(&refused), false, &Ok(true)).unwrap();
            assert!(text.contains("cuLaunchKernel"), "{text}");
            let text = failure_of(launch, false, None, true, &Ok(true)).unwrap();
            assert!(text.contains("thread"), "{text}");
            let not_yet = failure_of(launch, false, None, false, &Ok(true));
            assert_eq!(not_yet, None, "nothing has been launched yet");
            let ended = failure_of(launch, true, None, false, &Ok(true));
            assert_eq!(ended.is_some(), launch != Launch::Kernel, "{launch}");
        }
    }
}
