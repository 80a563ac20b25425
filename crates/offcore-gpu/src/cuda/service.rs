//! A service by a GPU: what is made ready for it, and its two halves.
//!
//! Everything is allocated and registered when a service starts, and its kernels are launched by
//! [`Launcher::submitted`]: those that wait for bursts with the first burst. Were they launched at the start, the next
//! service of the process could not be made ready any more: see [`crate::cuda::gpu`].

use std::any::Any;
use std::fmt;
use std::mem::forget;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::cuda::driver::{CudaError, Stream};
use crate::cuda::gpu::{Gpu, Seat, WARP, place, yard};
use crate::cuda::graph::{Graphs, Schedule};
use crate::cuda::memory::{Allocation, Registration};
use crate::device::{Launch, Launcher, Memory, Service, Started, Watch};
use crate::kernel::SHARE;
use crate::layout::{PipelineView, RingView, TrieView};
use crate::ring;

/// How long kernels may take to end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at whether they have.
const NAP: Duration = Duration::from_micros(50);

/// What a service has at the device. Its fields are dropped in this order.
struct Resources {
    work: Work,
    /// Words for each slot: of [`Work::Burst`] and [`Work::Graphs`].
    _words: Option<Allocation>,
    _tables: [Option<Allocation>; 3],
    _staging: Option<Arc<Allocation>>,
    _ring: [Option<Registration>; 2],
    _pool: Registration,
    seat: Option<Seat>,
    /// Keeps the ring's memory where it is until it is registered no more.
    _memory: Option<Box<dyn Any + Send>>,
    gpu: Arc<Gpu>,
}

/// What is launched.
enum Work {
    /// A kernel for each burst, with two words for each slot.
    Burst { tally: *mut u32 },
    /// One kernel.
    Persistent,
    /// Graphs.
    Graphs(Graphs, Schedule),
}

// SAFETY: addresses at the device, which mean nothing to a thread.
unsafe impl Send for Work {}

/// What is shared by the two halves of a service.
#[derive(Debug)]
struct State {
    launch: Launch,
    /// Goes last, with whichever half does.
    stream: Stream,
    /// A launch is under way, unless `stopped` was seen.
    launching: AtomicBool,
    /// Nothing is to be launched any more.
    stopped: AtomicBool,
    /// Kernels that wait for bursts have been launched.
    launched: AtomicBool,
    /// The service has been ended.
    ended: AtomicBool,
    /// The launch that was refused.
    refused: OnceLock<CudaError>,
}

/// Makes a service ready. With it comes what there is to say about it.
///
/// # Errors
/// What the device refuses, in words.
///
/// # Safety
/// As for [`Device::start`](crate::device::Device::start).
pub(super) unsafe fn start(gpu: &Arc<Gpu>, service: &Service) -> Result<(Started, String), String> {
    let yard = yard();
    if !yard.is_quiet() {
        return Err("kernels of this process already wait for bursts, and nothing can be registered meanwhile: start \
                    all pipelines before the first burst is submitted"
            .into());
    }
    let Service { mut view, launch, blocks, lanes, memory } = *service;
    let context = &gpu.context;
    let slots = view.ring.count;
    let pool_len = (view.pool.chunks as usize) << view.pool.chunk_shift;
    let pool_base = view.pool.base;
    // More blocks than slots would wait for turns that are too far away for a quit.
    let blocks = if launch == Launch::Persistent { blocks.min(slots) } else { 1 };
    let (kernel, most) = match launch {
        Launch::Kernel => (gpu.kernels.burst, SHARE as u32),
        Launch::Persistent => (gpu.kernels.persistent, u32::MAX),
        Launch::Graph => (gpu.kernels.node, u32::MAX),
    };
    let lanes = lanes.max(WARP).min(most).min(kernel.lanes);
    context.enter().map_err(|error| error.to_string())?;
    let seat = match launch {
        Launch::Kernel => None,
        _ => Some(gpu.seat(kernel, blocks, lanes)?),
    };

    // SAFETY: the pool and the ring stay where they are until the service has ended: the caller's promise. What is left
    // behind then keeps the ring's memory.
    let (pool, ring) = unsafe {
        (Registration::new(context, "the packet pool", pool_base, pool_len)?, ring_at(gpu, &mut view.ring)?)
    };
    view.pool.base = pool.at();
    let staging = match memory {
        Memory::Host => None,
        Memory::Gpu => Some(gpu.staging(pool_base.addr(), pool_len)?),
    };
    view.pool.staging = staging.as_ref().map_or(std::ptr::null_mut(), |memory| memory.at());
    // SAFETY: the tables are there until the service has ended: the caller's promise.
    let tables = unsafe { trie_at(gpu, &mut view.work.trie)? };

    let stream = Stream::new(context).map_err(|error| error.to_string())?;
    let words = |each: u32| {
        Allocation::zeroed(context, "words of a ring", (slots * each) as usize * size_of::<u32>())
    };
    let (work, words) = match launch {
        Launch::Kernel => {
            let words = words(2)?;
            (Work::Burst { tally: words.at() }, Some(words))
        }
        Launch::Persistent => (Work::Persistent, None),
        Launch::Graph => {
            let (words, schedule) = (words(1)?, Schedule::new(slots));
            let graphs = Graphs::new(context, &stream, &schedule, (kernel, lanes), (&view, words.at()));
            (Work::Graphs(graphs.map_err(|error| format!("its graphs: {error}"))?, schedule), Some(words))
        }
    };
    let resources = Resources {
        work,
        _words: words,
        _tables: tables,
        _staging: staging,
        _ring: ring,
        _pool: pool,
        seat,
        _memory: None,
        gpu: Arc::clone(gpu),
    };
    let state = Arc::new(State {
        launch,
        stream,
        launching: false.into(),
        stopped: false.into(),
        launched: false.into(),
        ended: false.into(),
        refused: OnceLock::new(),
    });
    let note = note(service, pool_len, blocks, lanes);
    let launcher =
        CudaLauncher { state: Arc::clone(&state), resources: Some(resources), view, blocks, lanes, turns: 0 };
    Ok((Started { launcher: Box::new(launcher), watch: Box::new(CudaWatch { state }), slots: None }, note))
}

/// What a person should know of a service.
fn note(service: &Service, pool_len: usize, blocks: u32, lanes: u32) -> String {
    let pool = crate::cuda::memory::size(pool_len);
    let packets = match service.memory {
        Memory::Host => "packets are worked on in host memory",
        Memory::Gpu => "packets are copied to GPU memory and worked on there",
    };
    let launch = match service.launch {
        Launch::Kernel => format!("a kernel for each burst, a block of {lanes} lanes for {SHARE} packets"),
        Launch::Persistent => format!("a persistent kernel of {blocks} blocks of {lanes} lanes"),
        Launch::Graph => format!("graphs of kernels of {lanes} lanes"),
    };
    format!(
        "pool of {pool} registered, {packets}; polled memory: bursts in pinned host memory, answers in pinned host \
         memory; {launch}"
    )
}

/// Registers the ring's memory, and says in `ring` where the device sees it.
///
/// # Safety
/// As for [`Registration::new`].
unsafe fn ring_at(gpu: &Gpu, ring: &mut RingView) -> Result<[Option<Registration>; 2], String> {
    let slots = (ring.slots.cast_mut(), ring.count as usize * ring.slot_stride as usize);
    let answers = (ring.answers, ring.count as usize * ring.answer_stride as usize);
    let register = |(base, len)| {
        // SAFETY: the caller's promise.
        unsafe { Registration::new(&gpu.context, "a burst ring", base, len) }
    };
    // They may have a page in common where they meet, and a page is registered once.
    if slots.0.addr() + slots.1 == answers.0.addr() {
        let both = register((slots.0, slots.1 + answers.1))?;
        (ring.slots, ring.answers) = (both.at(), both.at().wrapping_add(slots.1));
        return Ok([Some(both), None]);
    }
    let (slots, answers) = (register(slots)?, register(answers)?);
    (ring.slots, ring.answers) = (slots.at(), answers.at());
    Ok([Some(slots), Some(answers)])
}

/// Copies the tables to the device, and says in `trie` where they are.
///
/// # Safety
/// The tables are as `trie` says.
unsafe fn trie_at(gpu: &Gpu, trie: &mut TrieView) -> Result<[Option<Allocation>; 3], String> {
    if trie.states == 0 {
        return Ok([None, None, None]);
    }
    let (context, what) = (&gpu.context, "the patterns");
    // SAFETY: `mask` + 1 edges, `states` numbers and 256 states, as a `TrieView` has them.
    let (edges, lowest, first) = unsafe {
        (
            Allocation::copy(context, what, trie.edges, trie.mask as usize + 1)?,
            Allocation::copy(context, what, trie.lowest, trie.states as usize)?,
            Allocation::copy(context, what, trie.first, 256)?,
        )
    };
    (trie.edges, trie.lowest, trie.first) = (edges.at(), lowest.at(), first.at());
    Ok([Some(edges), Some(lowest), Some(first)])
}

/// The half that launches.
struct CudaLauncher {
    state: Arc<State>,
    /// Taken when the service ends.
    resources: Option<Resources>,
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
    #[inline]
    fn submitted(&mut self, turn: u64, packets: usize) {
        self.turns = turn + 1;
        let state = &*self.state;
        if state.launch == Launch::Persistent && state.launched.load(Ordering::Relaxed) {
            return;
        }
        // Either this sees that nothing is to be launched any more, or who has said so sees that something is.
        state.launching.store(true, Ordering::SeqCst);
        if !state.stopped.load(Ordering::SeqCst)
            && let Some(resources) = &mut self.resources
        {
            let launch = Launching { state, view: &self.view, blocks: self.blocks, lanes: self.lanes };
            if let Err(error) = launch.launch(resources, turn, packets) {
                let _ = state.refused.set(error);
                state.stopped.store(true, Ordering::SeqCst);
            }
        }
        state.launching.store(false, Ordering::SeqCst);
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
        state.ended.store(true, Ordering::Release);
        state.stopped.store(true, Ordering::SeqCst);
        let Some(mut resources) = self.resources.take() else { return true };
        let since = Instant::now();
        // A context that is lost has nobody at work.
        while matches!(state.stream.is_idle(), Ok(false)) {
            if since.elapsed() > PATIENCE {
                // Kernels use all of it, and giving any of it back would wait for them. The service stays among those
                // that wait, so that no other waits for it.
                forget((resources, memory));
                return false;
            }
            thread::sleep(NAP);
        }
        let is_kept = memory.is_some();
        resources.seat = None;
        resources._memory = memory;
        let mut yard = yard();
        if state.launched.load(Ordering::Relaxed) {
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
    /// Launches what is to be launched now that a burst has been submitted.
    #[inline]
    fn launch(&self, resources: &mut Resources, turn: u64, packets: usize) -> Result<(), CudaError> {
        let Self { state, view, blocks, lanes } = *self;
        let stream = &state.stream;
        match &mut resources.work {
            Work::Burst { tally } => {
                resources.gpu.context.enter()?;
                let (slot, lap) = ring::slot_and_lap(view.ring.count, turn);
                let grid = packets.div_ceil(SHARE).max(1) as u32;
                let parameters = &mut [place(view), place(&slot), place(&lap), place(tally)];
                // SAFETY: the context is current; these are the parameters of `og_burst`. All that they point to at the
                // device is in `resources`, which stays until the stream is idle.
                unsafe { resources.gpu.kernels.burst.launch(stream, (grid, lanes), parameters) }
            }
            Work::Persistent => self.begin(|| {
                resources.gpu.context.enter()?;
                let parameters = &mut [place(view), place(&0u32), place(&blocks), place(&0u64)];
                // SAFETY: as above, for `og_persistent`.
                unsafe { resources.gpu.kernels.persistent.launch(stream, (blocks, lanes), parameters) }
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
        yard.enter();
        let done = launch();
        // Where a launch was refused, one before it may have been taken.
        self.state.launched.store(true, Ordering::Release);
        done
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
        // Before the look at the stream: nothing has been launched since a launch was refused.
        let refused = state.refused.get();
        let launched = state.launched.load(Ordering::Acquire);
        why_dead(state.launch, launched, refused, &state.stream.is_idle())
    }

    fn give_up(&mut self) -> bool {
        let state = &*self.state;
        state.stopped.store(true, Ordering::SeqCst);
        // Kernels that wait for bursts are told by the ring alone.
        !state.launching.load(Ordering::SeqCst) && !matches!(state.stream.is_idle(), Ok(false))
    }
}

/// Why nobody is at work in a service that was not ended, by what its stream says.
fn why_dead(
    launch: Launch,
    launched: bool,
    refused: Option<&CudaError>,
    idle: &Result<bool, CudaError>,
) -> Option<String> {
    match (idle, refused) {
        (Err(error), _) => Some(format!("its context is lost: {error}")),
        (Ok(false), _) => None,
        (Ok(true), Some(error)) => Some(format!("it takes no more launches: {error}")),
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
            let text = why_dead(launch, true, None, &Err(lost)).unwrap();
            assert!(text.contains("context is lost: cuStreamQuery"), "{text}");
            assert_eq!(why_dead(launch, true, Some(&refused), &Ok(false)), None, "somebody is still at work");
            let text = why_dead(launch, true, Some(&refused), &Ok(true)).unwrap();
            assert!(text.contains("cuLaunchKernel"), "{text}");
            assert_eq!(why_dead(launch, false, None, &Ok(true)), None, "nothing has been launched yet");
            let ended = why_dead(launch, true, None, &Ok(true));
            assert_eq!(ended.is_some(), launch != Launch::Kernel, "{launch}");
        }
    }

    #[test]
    fn a_note_says_where_everything_is() {
        let view = PipelineView {
            pool: crate::layout::PoolView {
                base: std::ptr::null_mut(),
                staging: std::ptr::null_mut(),
                chunk_shift: 11,
                chunks: 1 << 14,
            },
            ring: RingView {
                slots: std::ptr::null(),
                answers: std::ptr::null_mut(),
                slot_stride: 64,
                answer_stride: 64,
                count: 2,
                reserved: 0,
            },
            work: crate::layout::WorkView {
                kind: crate::layout::Kind::Nothing,
                swap: 0,
                skip: 0,
                forced_ns: 0,
                trie: TrieView::EMPTY,
            },
        };
        let service =
            Service { view, launch: Launch::Persistent, blocks: 4, lanes: 256, memory: Memory::Gpu };
        let note = note(&service, 32 << 20, 2, 256);
        for part in ["pool of 32 MiB", "GPU memory", "bursts in pinned host memory", "2 blocks of 256 lanes"]
        {
            assert!(note.contains(part), "{part}: {note}");
        }
    }
}
