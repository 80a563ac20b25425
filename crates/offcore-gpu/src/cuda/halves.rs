//! The two halves of a service by a GPU, once it is ready: see [`crate::cuda::service`].

use std::any::Any;
use std::fmt;
use std::mem::{ManuallyDrop, forget};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::direct;
use crate::cuda::driver::{CudaError, Kernel, Stream};
use crate::cuda::gpu::{Yard, place, yard, yard_at_once};
use crate::cuda::service::{Resources, Work};
use crate::cuda::thread::{Desk, Launches, Queue, Together};
use crate::device::{DeviceSlots, Launch, Launcher, Started, Watch};
use crate::kernel::SHARE;
use crate::layout::PipelineView;

/// How long kernels may take to end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at whether they have.
const NAP: Duration = Duration::from_micros(50);

/// The halves of a service that is ready: of `blocks` blocks of `lanes` lanes, which see `view`.
pub(super) fn halves(
    (launch, blocks, lanes): (Launch, u32, u32),
    view: PipelineView,
    stream: Stream,
    resources: Resources,
    mut queue: Option<Queue>,
    slots: Option<DeviceSlots>,
) -> Started {
    let state = Arc::new(State {
        launch,
        stream: ManuallyDrop::new(stream),
        launching: false.into(),
        stopped: false.into(),
        launched: false.into(),
        in_yard: false.into(),
        ended: false.into(),
        refused: OnceLock::new(),
        thread: queue.as_ref().map(Queue::desk),
    });
    if let (Some(queue), Work::Burst { tally }) = (&mut queue, &resources.work) {
        let (state, kernel, tally) = (Arc::clone(&state), resources.gpu.kernels.burst, *tally);
        queue.open(Box::new(BurstLaunches { state, kernel, view, tally, lanes }));
    }
    let watch = Box::new(CudaWatch { state: Arc::clone(&state) });
    let launcher = CudaLauncher { state, resources: Some(resources), queue, view, blocks, lanes, turns: 0 };
    Started { launcher: Box::new(launcher), watch, slots }
}

/// What is shared by the two halves of a service.
#[derive(Debug)]
struct State {
    launch: Launch,
    /// Goes with the half that goes last.
    stream: ManuallyDrop<Stream>,
    /// A launch is under way, unless `stopped` was seen.
    launching: AtomicBool,
    /// Nothing is to be launched any more.
    stopped: AtomicBool,
    /// Kernels that wait for bursts have been launched.
    launched: AtomicBool,
    /// The service is in the yard: changed by who has it.
    in_yard: AtomicBool,
    /// The service has been ended.
    ended: AtomicBool,
    /// The launch that was refused.
    refused: OnceLock<CudaError>,
    /// Of the thread that launches, if it is not the lcore that submits.
    thread: Option<Arc<Desk>>,
}

impl State {
    /// The service is in the yard from now on.
    fn enter(&self, yard: &mut Yard) {
        if !self.in_yard.swap(true, Ordering::Relaxed) {
            yard.enter();
        }
    }

    /// Launches by `launch`, unless nothing is to be launched any more. One thread does so, always the same.
    #[inline]
    fn launch(&self, launch: impl FnOnce() -> Result<(), CudaError>) {
        // Either this sees that nothing is to be launched any more, or who has said so sees that something is.
        self.launching.store(true, Ordering::SeqCst);
        if !self.stopped.load(Ordering::SeqCst)
            && let Err(error) = launch()
        {
            let _ = self.refused.set(error);
            self.stopped.store(true, Ordering::SeqCst);
        }
        self.launching.store(false, Ordering::SeqCst);
    }

    /// Whether a launch is under way, once nothing is to be launched any more.
    fn is_launching(&self) -> bool {
        self.launching.load(Ordering::SeqCst) && !self.is_thread_gone()
    }

    /// Whether the thread that launches has ended, although it is not to before the service has.
    fn is_thread_gone(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| thread.is_gone())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used afterwards.
        let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
        yard().drop_when_quiet(Box::new(stream));
    }
}

/// The half that launches.
struct CudaLauncher {
    state: Arc<State>,
    /// Taken when the service ends.
    resources: Option<Resources>,
    /// Where bursts go for which the launching thread launches.
    queue: Option<Queue>,
    /// As the device sees it.
    view: PipelineView,
    blocks: u32,
    lanes: u32,
    /// Bursts that have been submitted.
    turns: u64,
}

// SAFETY: the view has addresses at the device; the rest is `Send`.
unsafe impl Send for CudaLauncher {}

impl fmt::Debug for CudaLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, blocks, lanes, turns, .. } = self;
        write!(f, "CudaLauncher({:?}, {blocks} blocks of {lanes} lanes, turn {turns})", state.launch)
    }
}

impl Launcher for CudaLauncher {
    fn arrived(&mut self) -> bool {
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
        if let Some(queue) = &mut self.queue {
            queue.push(turn, packets);
            return;
        }
        let state = &*self.state;
        if state.launch == Launch::Persistent && state.launched.load(Ordering::Relaxed) {
            return;
        }
        if let Some(resources) = &mut self.resources {
            let launching = Launching { state, view: &self.view, blocks: self.blocks, lanes: self.lanes };
            state.launch(|| launching.launch(resources, turn));
        }
    }

    fn end(self: Box<Self>) -> bool {
        self.finish(None)
    }

    fn end_with(self: Box<Self>, memory: Box<dyn Any + Send>) -> bool {
        self.finish(Some(memory))
    }

    fn waiters(&self) -> usize {
        if !self.state.launched.load(Ordering::Relaxed) {
            return 0;
        }
        match self.resources.as_ref().map(|resources| &resources.work) {
            Some(Work::Persistent) => self.blocks as usize,
            Some(Work::Graphs(_, schedule)) => schedule.waiters(self.turns),
            Some(Work::Burst { .. }) | None => 0,
        }
    }
}

impl CudaLauncher {
    /// Ends the service. Whether nobody is at work any more and the memory may go; without `memory`, which is kept as
    /// long as it is registered, that is not so where it has to stay registered until other services have ended.
    fn finish(mut self, memory: Option<Box<dyn Any + Send>>) -> bool {
        let state = &*self.state;
        let since = Instant::now();
        // What has been submitted is launched yet, unless nothing is any more.
        while self.queue.as_mut().is_some_and(|queue| !queue.is_empty())
            && !state.stopped.load(Ordering::SeqCst)
            && !state.is_thread_gone()
            && since.elapsed() < PATIENCE
        {
            thread::sleep(NAP);
        }
        state.ended.store(true, Ordering::Release);
        state.stopped.store(true, Ordering::SeqCst);
        let Some(mut resources) = self.resources.take() else { return true };
        // A context that is lost has nobody at work.
        while state.is_launching() || matches!(state.stream.is_idle(), Ok(false)) {
            if since.elapsed() > PATIENCE {
                // Kernels use all of it, and giving any of it back would wait for them.
                forget((resources, memory));
                if let Some(mut yard) = yard_at_once() {
                    state.enter(&mut yard);
                }
                return false;
            }
            thread::sleep(NAP);
        }
        // The thread has nothing of the service's then. It may need the yard, so before that is taken.
        self.queue = None;
        let is_kept = memory.is_some();
        resources.seat = None;
        resources.keep(memory);
        let mut yard = yard();
        if state.in_yard.load(Ordering::Relaxed) {
            yard.leave();
        }
        yard.drop_when_quiet(Box::new(resources)) || is_kept
    }
}

impl Drop for CudaLauncher {
    fn drop(&mut self) {
        // Not ended: whether somebody is at work is not known, and the ring's memory may be gone.
        if let Some(resources) = self.resources.take() {
            self.state.stopped.store(true, Ordering::SeqCst);
            forget(resources);
        }
    }
}

/// What a launch needs to know.
struct Launching<'a> {
    state: &'a State,
    view: &'a PipelineView,
    blocks: u32,
    lanes: u32,
}

impl Launching<'_> {
    /// Launches what is to be launched now that the burst of `turn` has been submitted.
    #[inline]
    fn launch(&self, resources: &mut Resources, turn: u64) -> Result<(), CudaError> {
        let Self { state, view, blocks, lanes } = *self;
        let stream = &state.stream;
        match &mut resources.work {
            // By its thread.
            Work::Burst { .. } => Ok(()),
            Work::Persistent => self.begin(|| {
                resources.gpu.context.enter()?;
                let parameters = &mut [place(view), place(&0u32), place(&blocks), place(&0u64)];
                // SAFETY: the context is current; these are the parameters of `og_persistent`. All that they point to at
                // the device is in `resources`, which stays until the stream is idle.
                unsafe { resources.gpu.kernels.persistent.launch(stream, ([blocks, 1], lanes), parameters) }
            }),
            Work::Graphs(graphs, schedule) => {
                let mut due = || {
                    while let Some(graph) = schedule.due(turn) {
                        // SAFETY: what the view points to at the device is in `resources`, as above.
                        unsafe { graphs.launch(graph, stream) }?;
                    }
                    Ok(())
                };
                if state.launched.load(Ordering::Relaxed) { due() } else { self.begin(due) }
            }
        }
    }

    /// The first launch of kernels that wait for bursts: from now on nothing of the process is allocated or
    /// registered. A service that is being made ready is waited for.
    #[cold]
    fn begin(&self, launch: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let mut yard = yard();
        self.state.enter(&mut yard);
        let done = launch();
        // Where a launch was refused, one before it may have been taken.
        self.state.launched.store(true, Ordering::Release);
        done
    }
}

/// What launches kernels for bursts of one ring that have been submitted, at the launching thread.
struct BurstLaunches {
    state: Arc<State>,
    kernel: Kernel,
    /// As the device sees it.
    view: PipelineView,
    /// Two words for each slot, at the device.
    tally: *mut u32,
    lanes: u32,
}

// SAFETY: the view and the tally are addresses at the device; the rest is `Send`.
unsafe impl Send for BurstLaunches {}

impl fmt::Debug for BurstLaunches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BurstLaunches({} lanes, {:?})", self.lanes, self.state)
    }
}

impl Launches for BurstLaunches {
    #[inline]
    fn launch(&mut self, Together { turn, bursts, packets }: Together) {
        let Self { state, kernel, view, tally, lanes } = &*self;
        let stream = &state.stream;
        state.launch(|| {
            stream.context().enter()?;
            let blocks = packets.div_ceil(SHARE).max(1) as u32;
            let parameters = &mut [place(view), place(&turn), place(tally)];
            // SAFETY: the context is current; these are the parameters of `og_burst`, and there are no more bursts than
            // slots. The kernel's module and all that they point to at the device are in the launcher's resources: it
            // gives them back when nothing is launched any more, which `State::launch` looks at, and the stream is idle.
            unsafe { kernel.launch(stream, ([blocks, bursts], *lanes), parameters) }
        });
    }
}

/// The half that watches.
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
        // Before the look at the stream: nothing has been launched since a launch was refused, or since the thread ended.
        let (refused, gone) = (state.refused.get(), state.is_thread_gone());
        let launched = state.launched.load(Ordering::Acquire);
        why_dead((state.launch, launched), (refused, gone), &state.stream.is_idle())
    }

    fn give_up(&mut self) -> bool {
        let state = &*self.state;
        state.stopped.store(true, Ordering::SeqCst);
        // Kernels that wait for bursts are told by the ring alone.
        if !state.is_launching() && !matches!(state.stream.is_idle(), Ok(false)) {
            return true;
        }
        // They may stand still for good, and whoever frees memory would wait for them. This waits for nobody.
        if let Some(mut yard) = yard_at_once()
            && !state.ended.load(Ordering::Acquire)
        {
            state.enter(&mut yard);
        }
        false
    }
}

/// Why nobody is at work in a service that was not ended, by what its stream says: a service by `launch`, whose waiting
/// kernels have been `launched` or not, of which a launch was `refused`, or whose thread is `gone`.
fn why_dead(
    (launch, launched): (Launch, bool),
    (refused, gone): (Option<&CudaError>, bool),
    idle: &Result<bool, CudaError>,
) -> Option<String> {
    match (idle, refused) {
        (Err(error), _) => Some(format!("its context is lost: {error}")),
        (Ok(false), _) => None,
        (Ok(true), Some(error)) => Some(format!("it takes no more launches: {error}")),
        (Ok(true), None) if gone => Some("the thread that launches its kernels has ended".into()),
        // A burst's kernel may be about to be launched; one that waits for bursts is there as soon as it was launched.
        (Ok(true), None) => (launched && launch != Launch::Kernel)
            .then(|| "its kernels have ended although more bursts may come".into()),
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::sys::CUresult;

    use super::*;

    #[test]
    fn a_device_is_dead_when_nothing_runs_that_should() {
        let lost = CudaError::new("cuStreamQuery", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        let refused = CudaError::new("cuLaunchKernel", CUresult::CUDA_ERROR_INVALID_VALUE);
        for launch in Launch::ALL {
            let text = why_dead((launch, true), (None, false), &Err(lost)).unwrap();
            assert!(text.contains("context is lost: cuStreamQuery"), "{text}");
            let at_work = why_dead((launch, true), (Some(&refused), true), &Ok(false));
            assert_eq!(at_work, None, "somebody is still at work");
            let text = why_dead((launch, true), (Some(&refused), false), &Ok(true)).unwrap();
            assert!(text.contains("cuLaunchKernel"), "{text}");
            let text = why_dead((launch, false), (None, true), &Ok(true)).unwrap();
            assert!(text.contains("thread"), "{text}");
            let not_yet = why_dead((launch, false), (None, false), &Ok(true));
            assert_eq!(not_yet, None, "nothing has been launched yet");
            let ended = why_dead((launch, true), (None, false), &Ok(true));
            assert_eq!(ended.is_some(), launch != Launch::Kernel, "{launch}");
        }
    }
}
