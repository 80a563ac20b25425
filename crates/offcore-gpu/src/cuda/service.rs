//! The setup of a service on a GPU.
//!
//! Everything is allocated and registered when a service starts.
//! [`Launcher::submitted`](crate::device::Launcher::submitted) launches its kernels. Polling kernels start with the
//! first burst, because after that no other service of the process can start: see [`crate::cuda::gpu`].

use std::sync::Arc;

use offcore_mem::DeviceMemory;

use crate::cuda::direct;
use crate::cuda::driver::{Kernel, Stream};
use crate::cuda::gpu::{Gpu, WARP, quiesce_lock};
use crate::cuda::graph::{GraphNodes, Graphs, Schedule, blocks_of_node};
use crate::cuda::halves::{Answers, LaunchGrid, Resources, ServiceKernels, halves};
use crate::cuda::memory::{Allocation, Registration, size};
use crate::cuda::slots;
use crate::cuda::thread::{LaunchThread, MAX_BATCH};
use crate::device::{Launch, Memory, Service, Started};
use crate::kernel::SHARE;
use crate::layout::{PipelineView, RingView, TrieView};

/// Sets up a service. Returns it with a note for the user.
///
/// # Safety
/// As for [`GpuDevice::start`](crate::device::GpuDevice::start).
pub(super) unsafe fn start(
    gpu: &Arc<Gpu>,
    service: &Service,
    direct: Option<DeviceMemory>,
) -> Result<(Started, String), String> {
    let quiesce = quiesce_lock();
    if !quiesce.is_quiescent() {
        return Err("kernels of this process already wait for bursts, and no memory can be registered meanwhile: start \
                    all pipelines before the first burst is submitted"
            .into());
    }
    let Service { mut view, ref trie, launch, blocks, threads, memory } = *service;
    let context = &gpu.context;
    let count = view.ring.count;
    let pool_len = (view.pool.chunks as usize) << view.pool.chunk_shift;
    let pool_base = view.pool.base;
    let blocks = match launch {
        Launch::Kernel => 1,
        // A block beyond the number of slots would wait for a turn that a quit cannot reach.
        Launch::Persistent => blocks.min(count),
        Launch::Graph => blocks_of_node(blocks, count),
    };
    let (kernel, max_threads) = match launch {
        Launch::Kernel => (gpu.kernels.burst, SHARE as u32),
        Launch::Persistent => (gpu.kernels.persistent, u32::MAX),
        Launch::Graph => (gpu.kernels.node, u32::MAX),
    };
    let threads = threads.max(WARP).min(max_threads).min(kernel.max_threads);
    context.enter().map_err(|error| error.to_string())?;
    let sm_reservation = match launch {
        Launch::Kernel => None,
        _ => Some(gpu.reserve_for_polling(kernel, blocks, threads)?),
    };

    // SAFETY: pool and ring stay until the service has ended, as the caller guarantees. If it cannot end, its resources
    // are leaked together with the ring's memory.
    let (pool, ring) = unsafe {
        let pool = match &direct {
            None => Some(Registration::new(context, "the packet pool", pool_base, pool_len)?),
            Some(_) => None,
        };
        (pool, ring_at(gpu, &mut view.ring)?)
    };
    let elsewhere = direct.as_ref().map(DeviceMemory::base);
    view.pool.base = pool.as_ref().map(Registration::at).or(elsewhere).unwrap_or(pool_base);
    let flushes = direct.is_some() && direct::flushes(gpu)?;
    let staging = match memory {
        Memory::Host | Memory::Direct => None,
        Memory::Gpu => Some(gpu.staging(pool_base.addr(), pool_len)?),
    };
    view.pool.staging = staging.as_ref().map_or(std::ptr::null_mut(), |memory| memory.at());
    let tables = trie.as_ref().map(|trie| gpu.tables(trie)).transpose()?;
    view.work.trie = tables.as_ref().map_or(TrieView::EMPTY, |tables| tables.view());

    let stream = Stream::new(context).map_err(|error| error.to_string())?;
    gpu.launch_all_once(&stream)?;
    // SAFETY: the ring is valid and no burst has been submitted, as the caller guarantees.
    let (slots_memory, slots, no_slots) =
        match unsafe { slots::slots(gpu, &view, service.view.ring.answers, &stream) } {
            Ok((memory, slots)) => (Some(memory), Some(slots), None),
            Err(reason) => (None, None, Some(reason)),
        };
    if let Some(memory) = &slots_memory {
        view.ring.slots = memory.at();
    }
    let queue = match launch {
        Launch::Kernel | Launch::Graph => {
            let queue = LaunchThread::shared_at(&gpu.launch_thread)?.queue(count)?;
            // SAFETY: the ring's memory stays until the service has ended, as the caller guarantees.
            Some((queue, unsafe { Answers::new(service.view.ring) }))
        }
        Launch::Persistent => None,
    };
    let grid = LaunchGrid { launch, blocks, threads };
    let (work, words) = work(gpu, grid, kernel, &view, &stream)?;
    context.settle().map_err(|error| error.to_string())?;
    let resources = Resources {
        work,
        _words: words,
        _tables: tables,
        _staging: staging,
        _ring: ring,
        _pool: pool,
        _direct: direct,
        flushes,
        sm_reservation,
        _memory: None,
        _slots: slots_memory,
        gpu: Arc::clone(gpu),
    };
    let note = note(service, pool_len, grid, no_slots.as_deref());
    Ok((halves(grid, view, stream, resources, queue, slots), note))
}

/// Returns the kernels to launch, and the words per slot that they need.
fn work(
    gpu: &Gpu,
    grid: LaunchGrid,
    kernel: Kernel,
    view: &PipelineView,
    stream: &Stream,
) -> Result<(ServiceKernels, Option<Allocation>), String> {
    let (context, count) = (&gpu.context, view.ring.count);
    let words = |bytes: usize| Allocation::zeroed(context, "words of a ring", count as usize * bytes);
    Ok(match grid.launch {
        Launch::Kernel => {
            let words = words(size_of::<u64>())?;
            (ServiceKernels::Burst { tally: words.at() }, Some(words))
        }
        Launch::Persistent => (ServiceKernels::Persistent, None),
        Launch::Graph => {
            let (words, schedule) = (words(size_of::<u32>())?, Schedule::new(count, grid.blocks));
            let nodes = GraphNodes { kernel, threads: grid.threads, view, laps: words.at() };
            let graphs = Graphs::new(context, stream, &schedule, &nodes);
            let graphs = graphs.map_err(|error| format!("its graphs: {error}"))?;
            (ServiceKernels::Graphs(Arc::new(graphs), schedule), Some(words))
        }
    })
}

/// Returns the note for the user. `no_slots` is the reason if the slots are not in device memory.
fn note(service: &Service, pool_len: usize, grid: LaunchGrid, no_slots: Option<&str>) -> String {
    let LaunchGrid { launch, blocks, threads } = grid;
    let pool = size(pool_len);
    let packets = match service.memory {
        Memory::Host => "registered, packets are processed in host memory",
        Memory::Gpu => "registered, packets are copied to GPU memory and processed there",
        Memory::Direct => "in GPU memory, packets are processed there",
    };
    let launch = match launch {
        Launch::Kernel => format!(
            "an unbound thread launches kernels for bursts as they arrive, up to {MAX_BATCH} at once, one block of \
             {threads} threads per {SHARE} packets"
        ),
        Launch::Persistent => format!("a persistent kernel of {blocks} blocks of {threads} threads"),
        Launch::Graph => {
            format!(
                "an unbound thread launches graphs of kernels of {blocks} blocks of {threads} threads ahead of bursts"
            )
        }
    };
    let bursts = match no_slots {
        None => "bursts in GPU memory, which the CPU has mapped".into(),
        Some(reason) => format!("bursts in pinned host memory ({reason})"),
    };
    format!("pool of {pool} {packets}; polled memory: {bursts}, answers in pinned host memory; {launch}")
}

/// Registers the ring's memory and stores its device addresses in `ring`.
///
/// # Safety
/// As for [`Registration::new`].
unsafe fn ring_at(gpu: &Gpu, ring: &mut RingView) -> Result<[Option<Registration>; 2], String> {
    let slots = (ring.slots.cast_mut(), ring.count as usize * ring.slot_stride as usize);
    let answers = (ring.answers, ring.count as usize * ring.answer_stride as usize);
    let register = |(base, len)| {
        // SAFETY: the ring's memory stays mapped as long as the registration exists, as the caller guarantees.
        unsafe { Registration::new(&gpu.context, "a burst ring", base, len) }
    };
    // A page can be registered only once, and adjacent slots and answers may share a page.
    if slots.0.addr() + slots.1 == answers.0.addr() {
        let both = register((slots.0, slots.1 + answers.1))?;
        (ring.slots, ring.answers) = (both.at(), both.at().wrapping_add(slots.1));
        return Ok([Some(both), None]);
    }
    let (slots, answers) = (register(slots)?, register(answers)?);
    (ring.slots, ring.answers) = (slots.at(), answers.at());
    Ok([Some(slots), Some(answers)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Kind, PipelineView, PoolView, WorkView};

    #[test]
    fn note_names_all_memory() {
        let view = PipelineView {
            pool: PoolView {
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
            work: WorkView { kind: Kind::Nothing, swap: 0, skip: 0, forced_ns: 0, trie: TrieView::EMPTY },
        };
        let service = Service {
            view,
            trie: None,
            launch: Launch::Persistent,
            blocks: 4,
            threads: 256,
            memory: Memory::Gpu,
        };
        let grid = LaunchGrid { launch: Launch::Persistent, blocks: 2, threads: 256 };
        let text = note(&service, 32 << 20, grid, Some("why"));
        let parts =
            ["pool of 32 MiB", "GPU memory", "bursts in pinned host memory (why)", "2 blocks of 256 threads"];
        for part in parts {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = note(&service, 32 << 20, grid, None);
        assert!(
            text.contains("bursts in GPU memory") && text.contains("answers in pinned host memory"),
            "{text}"
        );
    }
}
