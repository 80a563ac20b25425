//! Graphs of kernels, each of which waits for the next burst of a slot of its own.
//!
//! A ring of n slots is served by graphs of 8 nodes in a row, over slots 0 to 7, 8 to 15 and so on, which are
//! launched again each time round. Nodes find their lap in a word at the device. So a launch, which costs the lcore
//! microseconds, is shared by 8 bursts, and a burst finds its kernel waiting: see [`Schedule`].

use std::ffi::c_void;
use std::fmt;
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

use cudarc::driver::sys;

use crate::cuda::driver::{Context, CudaError, Kernel, Stream, call};
use crate::layout::PipelineView;

/// Nodes of a graph, where there are as many slots.
const NODES: u32 = 8;

/// Which graph is launched when.
///
/// All graphs go to one stream, so that nodes serve turn after turn. When the burst of turn t has been submitted, its
/// graph and the one behind it have been launched: graph 0 and graph 1 with turn 0, then one with the first turn of
/// every graph. So there always is a node that waits for the next turn, and a stream with nothing to do has died.
#[derive(Debug)]
pub(crate) struct Schedule {
    slots: u32,
    nodes: u32,
    /// Turns whose nodes have been launched.
    launched: u64,
}

impl Schedule {
    /// For a ring of so many slots, a power of two.
    pub(crate) fn new(slots: u32) -> Self {
        Self { slots, nodes: NODES.min(slots), launched: 0 }
    }

    /// Nodes of a graph.
    pub(crate) fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Graphs. There are two at least, over the same slots if need be: were a graph launched while its last launch
    /// waits for bursts, a driver that has the caller wait for that launch would have the bursts wait, too.
    pub(crate) fn graphs(&self) -> u32 {
        (self.slots / self.nodes).max(2)
    }

    /// The first slot of a graph.
    pub(crate) fn first_slot(&self, graph: u32) -> u32 {
        graph * self.nodes % self.slots
    }

    /// The graph that is to be launched now that the burst of `turn` has been submitted: to be asked until there is
    /// none.
    pub(crate) fn due(&mut self, turn: u64) -> Option<u32> {
        let nodes = u64::from(self.nodes);
        if self.launched >= (turn / nodes + 2) * nodes {
            return None;
        }
        let graph = self.launched / nodes % u64::from(self.graphs());
        self.launched += nodes;
        Some(graph as u32)
    }

    /// How many turns from `turn` on, the first that will have no burst, are to be quits for every launched node to
    /// end.
    ///
    /// Nodes that have been launched and get no burst are those of turns `turn` to `launched` - 1: between one
    /// graph's and two graphs' nodes less one. Where that is more than there are slots, each slot has one quit: the
    /// first node of a slot that meets it leaves the slot's lap alone, so the second one waits for the same lap and
    /// meets the same quit.
    pub(crate) fn waiters(&self, turn: u64) -> usize {
        self.launched.saturating_sub(turn).min(self.slots.into()) as usize
    }
}

/// The graphs of a ring, ready to be launched.
pub(crate) struct Graphs {
    graphs: Vec<Exec>,
    context: Arc<Context>,
}

/// A graph, and what it was made into.
struct Exec {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

// SAFETY: a graph is one thread's at a time, whichever it is: it is behind `&mut` or moved.
unsafe impl Send for Graphs {}

impl fmt::Debug for Graphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graphs({})", self.graphs.len())
    }
}

impl Graphs {
    /// The graphs of `schedule`, on the device. `laps` is a word for each slot at the device, 0.
    pub(crate) fn new(
        context: &Arc<Context>,
        stream: &Stream,
        schedule: &Schedule,
        (kernel, lanes): (Kernel, u32),
        (view, laps): (&PipelineView, *mut u32),
    ) -> Result<Self, CudaError> {
        context.enter()?;
        let count = schedule.graphs();
        let mut made = Self { graphs: Vec::with_capacity(count as usize), context: Arc::clone(context) };
        for index in 0..count {
            let mut graph = null_mut();
            // SAFETY: the context is current; `graph` is a place for a graph.
            unsafe { call!(cuGraphCreate(&mut graph, 0)) }?;
            made.graphs.push(Exec { graph, exec: null_mut() });
            let first = schedule.first_slot(index);
            chain(context, graph, (kernel, lanes), first..first + schedule.nodes(), view, laps)?;
            let mut exec = null_mut();
            // SAFETY: the context is current, the graph is complete, `exec` is a place for what it is made into.
            unsafe { call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)) }?;
            made.graphs[index as usize].exec = exec;
            // SAFETY: both are there. Without it the first launch would do it, with a burst waiting.
            unsafe { call!(cuGraphUpload(exec, stream.raw())) }?;
        }
        stream.wait()?;
        Ok(made)
    }

    /// Launches graph `index` behind what the stream has to do. It allocates nothing.
    ///
    /// # Safety
    /// What the view that it was made with points to stays until the stream is idle.
    #[inline]
    pub(crate) unsafe fn launch(&mut self, index: u32, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the context is current, both are there; the rest is the caller's promise.
        unsafe { call!(cuGraphLaunch(self.graphs[index as usize].exec, stream.raw())) }
    }
}

/// Adds a node for each of the slots, one behind the other.
fn chain(
    context: &Context,
    graph: sys::CUgraph,
    (kernel, lanes): (Kernel, u32),
    slots: std::ops::Range<u32>,
    view: &PipelineView,
    mut laps: *mut u32,
) -> Result<(), CudaError> {
    let mut previous: sys::CUgraphNode = null_mut();
    for mut slot in slots.clone() {
        let mut parameters: [*mut c_void; 3] =
            [from_ref(view).cast_mut().cast(), (&raw mut slot).cast(), (&raw mut laps).cast()];
        let node = sys::CUDA_KERNEL_NODE_PARAMS {
            func: kernel.raw(),
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: lanes,
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
        // SAFETY: the graph is there. `og_graph_node` takes a pipeline, a slot and an address: their values are copied
        // before the call is over. `before` is a node of this graph, where one is read.
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
            // SAFETY: the context is current; both were made once, and are launched no more.
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

    /// The graphs launched by each of the first turns.
    fn launches(slots: u32, turns: u64) -> (Schedule, Vec<Vec<u32>>) {
        let mut schedule = Schedule::new(slots);
        let launches = (0..turns).map(|turn| std::iter::from_fn(|| schedule.due(turn)).collect()).collect();
        (schedule, launches)
    }

    #[test]
    fn the_next_graph_is_launched_with_the_first_burst_of_one() {
        let (schedule, launches) = launches(32, 33);
        assert_eq!((schedule.nodes(), schedule.graphs()), (8, 4));
        let expected = [(0, vec![0, 1]), (8, vec![2]), (16, vec![3]), (24, vec![0]), (32, vec![1])];
        for (turn, launched) in launches.into_iter().enumerate() {
            let wanted =
                expected.iter().find(|(at, _)| *at == turn).map_or(vec![], |(_, graphs)| graphs.clone());
            assert_eq!(launched, wanted, "turn {turn}");
        }
    }

    #[test]
    fn small_rings_have_two_graphs_of_as_many_nodes_as_slots() {
        for slots in [2, 4, 8] {
            let (schedule, launches) = launches(slots, 3 * u64::from(slots));
            assert_eq!((schedule.nodes(), schedule.graphs()), (slots, 2));
            assert_eq!((schedule.first_slot(0), schedule.first_slot(1)), (0, 0));
            assert_eq!(launches[0], [0, 1]);
            assert_eq!(launches.concat(), [0, 1, 0, 1]);
        }
    }

    #[test]
    fn a_node_waits_for_the_next_turn_whenever_a_burst_has_been_submitted() {
        for slots in [2, 4, 8, 16, 64, 4096] {
            let mut schedule = Schedule::new(slots);
            for turn in 0..3 * u64::from(slots) {
                while let Some(graph) = schedule.due(turn) {
                    // Its nodes are those of the last turns that have been launched.
                    let first_turn = schedule.launched - u64::from(schedule.nodes());
                    assert_eq!(u64::from(schedule.first_slot(graph)), first_turn % u64::from(slots));
                }
                assert!(schedule.launched > turn + 1, "{slots} slots, turn {turn}");
                assert!(schedule.launched <= turn + 2 * u64::from(schedule.nodes()));
            }
        }
    }

    #[test]
    fn every_launched_node_meets_a_quit() {
        for slots in [2u32, 4, 8, 16, 64] {
            for turns in 0..3 * u64::from(slots) {
                let mut schedule = Schedule::new(slots);
                (0..turns).for_each(|turn| while schedule.due(turn).is_some() {});
                let waiters = schedule.waiters(turns);
                assert!(waiters <= slots as usize, "a ring has room for {slots}, not for {waiters}");
                // A ring with its laps, as the CPU writes and nodes see them.
                let count = u64::from(slots);
                let quits: Vec<u64> = (turns..turns + waiters as u64).collect();
                let laps: Vec<u64> = (0..count).map(|slot| (turns + count - 1 - slot) / count).collect();
                for turn in turns..schedule.launched {
                    let slot = turn % count;
                    // The node waits for the lap behind the last one that was served.
                    let waits_for = laps[slot as usize] * count + slot;
                    assert!(
                        quits.contains(&waits_for),
                        "{slots} slots, {turns} turns: the node of turn {turn} waits"
                    );
                }
            }
        }
        assert_eq!(Schedule::new(8).waiters(0), 0, "nothing was launched");
    }
}
