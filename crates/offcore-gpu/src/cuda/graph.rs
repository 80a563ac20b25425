//! Graphs of kernels whose blocks wait for the next bursts of their slots.
//!
//! A ring is served by graphs of up to 8 chained nodes, which are relaunched every lap. A node of b blocks serves b
//! slots, which follow the slots of the previous node: bursts are served by one block each, b at a time. A block finds
//! its lap in a word of device memory. A launch takes microseconds of the launch thread ([`crate::cuda::thread`]). It
//! is shared by 8 b bursts, and a burst finds its kernel already waiting: see [`Schedule`].

use std::ffi::c_void;
use std::fmt;
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

use cudarc::driver::sys;

use crate::cuda::driver::{Context, CudaError, Kernel, Stream, call};
use crate::layout::PipelineView;

/// Nodes per graph, if there are slots for as many.
const NODES: u32 = 8;

/// Returns the number of blocks per node for a ring of `slots` slots: a power of two, so that the nodes of a graph
/// cover it.
pub(crate) fn blocks_of_node(blocks: u32, slots: u32) -> u32 {
    1 << blocks.clamp(1, slots).ilog2()
}

/// Decides which graph is launched at which time.
///
/// All graphs go to one stream, so that nodes serve turns in order. Once the burst of turn t has been submitted, its
/// graph and the next one have been launched: graphs 0 and 1 at turn 0, then one at the first turn of every graph.
/// Therefore a node always waits for the next turn, and an idle stream means that the device has died.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    slots: u32,
    /// Slots per node.
    blocks: u32,
    /// Slots per graph.
    span: u32,
    /// Turns whose nodes have been launched.
    launched: u64,
}

impl Schedule {
    /// Creates a schedule for a ring of `slots` slots and nodes of `blocks` blocks, both powers of two.
    pub(crate) fn new(slots: u32, blocks: u32) -> Self {
        Self { slots, blocks, span: (NODES * blocks).min(slots), launched: 0 }
    }

    /// Returns the number of graphs, several for the same slots if necessary. A driver may block the relaunch of a
    /// graph that still waits for bursts, and with it the launch thread. The number is large enough that the bursts of
    /// a graph's last launch are retired when its next launch is due: at that time, all bursts that are at least a
    /// ring's length older are retired.
    pub(crate) fn graphs(&self) -> u32 {
        match self.slots / self.span {
            1 => 3,
            in_a_lap => 2 * in_a_lap,
        }
    }

    /// Returns the first slot of a graph.
    pub(crate) fn first_slot(&self, graph: u32) -> u32 {
        graph * self.span % self.slots
    }

    /// Returns the next graph to launch once the burst of `turn` has been submitted. Must be called until it returns
    /// `None`.
    pub(crate) fn due(&mut self, turn: u64) -> Option<u32> {
        if !self.is_due(turn) {
            return None;
        }
        let span = u64::from(self.span);
        let graph = self.launched / span % u64::from(self.graphs());
        self.launched += span;
        Some(graph as u32)
    }

    /// Returns whether a launch is due after the burst of `turn`.
    pub(crate) fn is_due(&self, turn: u64) -> bool {
        self.launched < self.after(turn)
    }

    /// Turns whose nodes have been launched when nothing is due after the burst of `turn`.
    fn after(&self, turn: u64) -> u64 {
        let span = u64::from(self.span);
        (turn / span + 2) * span
    }

    /// Returns the number of quits that are needed from `turn` on, the first turn without a burst, to end every node
    /// that has been or will be launched.
    ///
    /// The nodes of turns `turn` to the last one launched get no burst. Their number is at least one graph's nodes and
    /// less than two graphs' nodes. If it exceeds the number of slots, each slot gets one quit: the first node of a
    /// slot that reads it does not advance the slot's lap, so the second one waits for the same lap and reads the same
    /// quit.
    pub(crate) fn waiters(&self, turn: u64) -> usize {
        let launched = turn.checked_sub(1).map_or(0, |last| self.after(last));
        (launched - turn).min(self.slots.into()) as usize
    }
}

/// The instantiated graphs of a ring.
pub(crate) struct Graphs {
    graphs: Vec<Exec>,
    context: Arc<Context>,
}

/// The nodes of graphs: their kernel and its arguments.
pub(crate) struct GraphNodes<'a> {
    pub(crate) kernel: Kernel,
    /// Number of threads per block.
    pub(crate) threads: u32,
    pub(crate) view: &'a PipelineView,
    /// A word of device memory per slot.
    pub(crate) laps: *mut u32,
}

/// A graph and its executable form.
struct Exec {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: a graph may be used by any thread, one at a time. `launch` requires a single launching thread, and `drop` has
// the last reference.
unsafe impl Send for Graphs {}
// SAFETY: only one thread uses a graph at a time, as `launch` requires.
unsafe impl Sync for Graphs {}

impl fmt::Debug for Graphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graphs({})", self.graphs.len())
    }
}

impl Graphs {
    /// Creates and uploads the graphs of `schedule`. The words of `nodes` are zero.
    pub(crate) fn new(
        context: &Arc<Context>,
        stream: &Stream,
        schedule: &Schedule,
        nodes: &GraphNodes<'_>,
    ) -> Result<Self, CudaError> {
        context.enter()?;
        let count = schedule.graphs();
        let mut made = Self { graphs: Vec::with_capacity(count as usize), context: Arc::clone(context) };
        for index in 0..count {
            let mut graph = null_mut();
            // SAFETY: the context is current; `graph` is valid for writes.
            unsafe { call!(cuGraphCreate(&mut graph, 0)) }?;
            made.graphs.push(Exec { graph, exec: null_mut() });
            let first = schedule.first_slot(index);
            chain(context, graph, nodes, first..first + schedule.span, schedule.blocks)?;
            let mut exec = null_mut();
            // SAFETY: the context is current, the graph is complete, `exec` is valid for writes.
            unsafe { call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)) }?;
            made.graphs[index as usize].exec = exec;
            // SAFETY: both are valid. Without the upload the first launch would do it, with a burst waiting.
            unsafe { call!(cuGraphUpload(exec, stream.raw())) }?;
        }
        stream.wait()?;
        Ok(made)
    }

    /// Launches graph `index` on the stream. It allocates nothing.
    ///
    /// # Safety
    /// The memory to which the graph's view refers must stay until the stream is idle. Only one thread may launch.
    #[inline]
    pub(crate) unsafe fn launch(&self, index: u32, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the context is current, and both handles are valid. The view's memory stays until the stream is idle
        // and only one thread launches, as the caller guarantees.
        unsafe { call!(cuGraphLaunch(self.graphs[index as usize].exec, stream.raw())) }
    }
}

/// Adds a chain of nodes of `blocks` blocks, a block per slot.
fn chain(
    context: &Context,
    graph: sys::CUgraph,
    nodes: &GraphNodes<'_>,
    slots: std::ops::Range<u32>,
    blocks: u32,
) -> Result<(), CudaError> {
    let &GraphNodes { kernel, threads, view, mut laps } = nodes;
    let mut previous: sys::CUgraphNode = null_mut();
    for mut slot in slots.clone().step_by(blocks as usize) {
        let mut parameters: [*mut c_void; 3] =
            [from_ref(view).cast_mut().cast(), (&raw mut slot).cast(), (&raw mut laps).cast()];
        let node = sys::CUDA_KERNEL_NODE_PARAMS {
            func: kernel.raw(),
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: parameters.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: context.raw(),
        };
        let behind = usize::from(slot != slots.start);
        let before = previous;
        // SAFETY: the graph is valid. `og_graph_node` takes a pipeline, its first slot and an address, which the call
        // copies. `before` is a node of this graph if the call reads it.
        unsafe { call!(cuGraphAddKernelNode_v2(&mut previous, graph, &before, behind, &node)) }?;
    }
    Ok(())
}

impl Drop for Graphs {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        for Exec { graph, exec } in self.graphs.drain(..) {
            // SAFETY: the context is current; both were created once and are not launched any more.
            unsafe {
                if !exec.is_null() {
                    let _ = call!(cuGraphExecDestroy(exec));
                }
                let _ = call!(cuGraphDestroy(graph));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the graphs launched at each of the first `turns` turns.
    fn launches(slots: u32, blocks: u32, turns: u64) -> (Schedule, Vec<Vec<u32>>) {
        let mut schedule = Schedule::new(slots, blocks);
        let launches = (0..turns).map(|turn| std::iter::from_fn(|| schedule.due(turn)).collect()).collect();
        (schedule, launches)
    }

    #[test]
    fn graph_start_launches_the_next_graph() {
        for (slots, blocks) in [(32, 1), (64, 2)] {
            let span = 8 * u64::from(blocks);
            let (schedule, launches) = launches(slots, blocks, 4 * span + 1);
            assert_eq!((u64::from(schedule.span), schedule.graphs()), (span, 8));
            let expected = [vec![0, 1], vec![2], vec![3], vec![4], vec![5]];
            for (turn, launched) in (0..).zip(launches) {
                let wanted = if turn % span == 0 { expected[(turn / span) as usize].clone() } else { vec![] };
                assert_eq!(launched, wanted, "turn {turn}, {blocks} blocks");
            }
        }
    }

    #[test]
    fn retired_graphs_are_relaunched() {
        for (slots, blocks) in rings() {
            let (mut schedule, mut last) = (Schedule::new(slots, blocks), Vec::new());
            for turn in 0..9 * u64::from(slots) {
                while let Some(graph) = schedule.due(turn) {
                    last.resize(schedule.graphs() as usize, None);
                    // A turn is submitted when the burst that had its slot before has been retired.
                    let retired = (turn + 1).saturating_sub(slots.into());
                    let before: Option<u64> = last[graph as usize].replace(schedule.launched);
                    assert!(
                        before.is_none_or(|end| end <= retired),
                        "{slots} slots, {blocks} blocks, turn {turn}"
                    );
                }
            }
        }
    }

    #[test]
    fn small_rings_have_three_graphs() {
        for (slots, blocks) in [(2, 1), (2, 2), (4, 2), (8, 1), (8, 4), (32, 4)] {
            let (schedule, launches) = launches(slots, blocks, 3 * u64::from(slots));
            assert_eq!((schedule.span, schedule.graphs()), (slots, 3));
            assert_eq!((schedule.first_slot(0), schedule.first_slot(2)), (0, 0));
            assert_eq!(launches[0], [0, 1]);
            assert_eq!(launches.concat(), [0, 1, 2, 0]);
        }
    }

    #[test]
    fn graph_nodes_cover_the_ring() {
        let found = [(1, 64), (3, 64), (4, 64), (63, 64), (64, 64), (64, 2), (5, 4)]
            .map(|(blocks, slots)| blocks_of_node(blocks, slots));
        assert_eq!(found, [1, 2, 4, 32, 64, 2, 4]);
    }

    /// Rings of many sizes, and nodes of as many blocks as they can have.
    fn rings() -> impl Iterator<Item = (u32, u32)> {
        let slots = [2u32, 4, 8, 16, 64, 256];
        slots.into_iter().flat_map(|slots| [1, 2, 4, 32].map(|blocks| (slots, blocks_of_node(blocks, slots))))
    }

    #[test]
    fn a_node_always_waits_for_the_next_turn() {
        for (slots, blocks) in rings() {
            let mut schedule = Schedule::new(slots, blocks);
            for turn in 0..3 * u64::from(slots) {
                while let Some(graph) = schedule.due(turn) {
                    // Its nodes are the last ones launched.
                    let first_turn = schedule.launched - u64::from(schedule.span);
                    assert_eq!(u64::from(schedule.first_slot(graph)), first_turn % u64::from(slots));
                }
                assert!(schedule.launched > turn + 1, "{slots} slots, turn {turn}");
                assert!(schedule.launched <= turn + 2 * u64::from(schedule.span));
            }
        }
    }

    #[test]
    fn every_launched_block_gets_a_quit() {
        for (slots, blocks) in rings() {
            for turns in 0..3 * u64::from(slots) {
                let mut schedule = Schedule::new(slots, blocks);
                (0..turns).for_each(|turn| while schedule.due(turn).is_some() {});
                let waiters = schedule.waiters(turns);
                assert!(waiters <= slots as usize, "a ring has room for {slots}, not for {waiters}");
                // The laps of the slots, as the CPU writes them and nodes see them.
                let count = u64::from(slots);
                let quits: Vec<u64> = (turns..turns + waiters as u64).collect();
                let laps: Vec<u64> = (0..count).map(|slot| (turns + count - 1 - slot) / count).collect();
                for turn in turns..schedule.launched {
                    let slot = turn % count;
                    // The block waits for the lap after the last one served.
                    let waits_for = laps[slot as usize] * count + slot;
                    assert!(
                        quits.contains(&waits_for),
                        "{slots} slots, {blocks} blocks, {turns} turns: the block of turn {turn} waits"
                    );
                }
            }
        }
        assert_eq!(Schedule::new(8, 1).waiters(0), 0, "nothing was launched");
    }
}
