//! The cost of a GPU's reads of host memory and of launches, which dominate the time of a burst.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cudarc::driver::sys::CUfunction_attribute as Attribute;
use offcore_mem::{Hugepages, Mapping};
use serde::Serialize;

use crate::cuda::driver::{CudaError, Kernel, Stream};
use crate::cuda::gpu::{Gpu, WARP, place, quiesce_lock};
use crate::cuda::graph::{GraphNodes, Graphs, Schedule};
use crate::cuda::memory::Registration;
use crate::cuda::quits::Quits;

/// Number of reads and launches that are timed together, and number of rounds.
const READS: u32 = 1000;
const LAUNCHES: u32 = 15;
/// Number of alternating graphs, because a graph is not launched again while it may still run.
const GRAPHS: u32 = 3;
const ROUNDS: usize = 51;
/// Number of kernels in a graph.
const NODES: u32 = 8;
/// Offset of the kernel's result in nanoseconds from the word that it reads.
const RESULT: usize = 64;

/// The cost of a GPU's reads of host memory and of launches: medians, and lower bounds. All reads are from the same
/// word, which is not written. Launches have few parameters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// A read of pinned host memory by a kernel, in nanoseconds.
    pub read_ns: f64,
    /// A launch call, with fewer than 15 launches before it, in nanoseconds.
    pub launch_ns: f64,
    /// A launch and the wait for its end, in nanoseconds.
    pub launch_and_wait_ns: f64,
    /// A launch call of a graph of 8 kernels that end immediately, in nanoseconds.
    pub graph_launch_ns: f64,
    /// The resources of kernels, as compiled by the driver.
    pub kernels: Vec<KernelCosts>,
}

/// The resources of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelCosts {
    pub name: &'static str,
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread in bytes: arrays, and spilled registers.
    pub local_bytes: u32,
    /// Shared memory per block in bytes.
    pub shared_bytes: u32,
}

/// Measures a GPU that nothing else in this process uses.
pub(super) fn measure(gpu: &Gpu) -> Result<Costs, String> {
    // Under the lock no service can start, and memory can be registered.
    let quiesce = quiesce_lock();
    if !quiesce.is_quiescent() {
        return Err("kernels of this process wait for bursts: nothing can be measured meanwhile".into());
    }
    let to_text = |error: CudaError| error.to_string();
    let mapping = Mapping::memfd("offcore-costs", 4096, Hugepages::None);
    let (memory, _) = mapping.map_err(|error| error.to_string())?;
    let word = memory.base();
    // SAFETY: the mapping is dropped after the registration.
    let registered = unsafe { Registration::new(&gpu.context, "a word", word.as_ptr(), memory.len()) }?;
    let stream = Stream::new(&gpu.context).map_err(to_text)?;
    let quits = Quits::new(&gpu.context, NODES)?;
    let view = quits.view();
    let nodes = GraphNodes { kernel: gpu.kernels.node, threads: WARP, view: &view, laps: quits.words() };
    let graphs = Graphs::new(&gpu.context, &stream, &Schedule::new(NODES, 1), &nodes);
    let graphs = graphs.map_err(to_text)?;
    let bench = Bench { gpu, graphs, _quits: quits, stream, registered, word };
    let kernels = [
        ("og_burst", gpu.kernels.burst),
        ("og_persistent", gpu.kernels.persistent),
        ("og_graph_node", gpu.kernels.node),
    ];
    let costs = || {
        bench.launch(1)?;
        bench.stream.wait()?;
        let kernels = kernels.into_iter().map(|(name, kernel)| kernel_costs(name, kernel));
        Ok(Costs {
            read_ns: median(|| bench.read())?,
            launch_ns: median(|| bench.launches())?,
            launch_and_wait_ns: median(|| bench.launch_and_wait())?,
            graph_launch_ns: median(|| bench.graph_launches())?,
            kernels: kernels.collect::<Result<_, _>>()?,
        })
    };
    let measured = costs().map_err(to_text);
    drop(bench);
    drop(memory);
    measured
}

struct Bench<'a> {
    gpu: &'a Gpu,
    graphs: Graphs,
    _quits: Quits,
    stream: Stream,
    registered: Registration,
    /// A page of zeros in which the kernel also stores its result.
    word: NonNull<u8>,
}

impl Bench<'_> {
    fn launch(&self, reads: u32) -> Result<(), CudaError> {
        self.gpu.context.enter()?;
        let at = self.registered.at();
        let result = at.wrapping_add(RESULT);
        let parameters = &mut [place(&at), place(&reads), place(&result)];
        // SAFETY: the context is current. The parameters have the types of `og_reads`, and their memory is registered
        // until the stream is idle, because the caller waits for it.
        unsafe { self.gpu.kernels.reads.launch(&self.stream, [1, 1], WARP, parameters) }
    }

    fn read(&self) -> Result<f64, CudaError> {
        self.launch(READS)?;
        self.stream.wait()?;
        // SAFETY: an aligned word in the page, which the kernel has written.
        let ns = unsafe { AtomicU64::from_ptr(self.word.as_ptr().add(RESULT).cast()) };
        Ok(ns.load(Ordering::Relaxed) as f64 / f64::from(READS))
    }

    fn launches(&self) -> Result<f64, CudaError> {
        let since = Instant::now();
        (0..LAUNCHES).try_for_each(|_| self.launch(0))?;
        let took = since.elapsed();
        self.stream.wait()?;
        Ok(took.as_nanos() as f64 / f64::from(LAUNCHES))
    }

    fn graph_launches(&self) -> Result<f64, CudaError> {
        let since = Instant::now();
        for _ in 0..LAUNCHES / GRAPHS {
            // SAFETY: the ring stays until the stream is idle, and only this thread launches.
            (0..GRAPHS).try_for_each(|graph| unsafe { self.graphs.launch(graph, &self.stream) })?;
        }
        let took = since.elapsed();
        self.stream.wait()?;
        Ok(took.as_nanos() as f64 / f64::from(LAUNCHES / GRAPHS * GRAPHS))
    }

    fn launch_and_wait(&self) -> Result<f64, CudaError> {
        let since = Instant::now();
        self.launch(0)?;
        self.stream.wait()?;
        Ok(since.elapsed().as_nanos() as f64)
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        // A failed measurement may have left launches.
        let _ = self.stream.wait();
    }
}

fn kernel_costs(name: &'static str, kernel: Kernel) -> Result<KernelCosts, CudaError> {
    Ok(KernelCosts {
        name,
        registers: kernel.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        local_bytes: kernel.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        shared_bytes: kernel.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
    })
}

fn median(mut measure: impl FnMut() -> Result<f64, CudaError>) -> Result<f64, CudaError> {
    let mut all = (0..ROUNDS).map(|_| measure()).collect::<Result<Vec<_>, _>>()?;
    all.sort_by(f64::total_cmp);
    Ok(all.get(ROUNDS / 2).copied().unwrap_or(0.0))
}
