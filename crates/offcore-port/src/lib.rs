//! Ports: where packets come from and go to.
//!
//! A [`Port`] gives out queues; a queue belongs to one worker and moves bursts. One dynamic call handles a burst.

pub mod af_packet;
pub mod af_xdp;
pub mod base;
pub mod copy;
#[cfg(feature = "dpdk")]
pub mod dpdk;
pub mod duplicate;
pub mod generator;
pub mod impair;
pub mod inventory;
pub mod netdev;
pub mod offload_fallback;
pub mod pcap;
pub mod spec;
pub mod tap;
pub mod vhost;
mod virtio_header;
pub mod virtio_user;

use std::any::Any;
use std::fmt;
use std::os::fd::BorrowedFd;

pub use offcore_dma::Context;
use offcore_dma::{Binding, Mover};
use offcore_mem::{Burst, DeviceMemory};
use offcore_stats::page::{PageError, StatsPage};
use offcore_wire::ethernet::MacAddr;

pub use base::stats::{self, DropReason, RxCounters, TxCounters};
pub use base::{PortBase, address};
pub use offload_fallback::Accepts;

/// Packets that one call may append to `burst`.
#[inline(always)]
pub(crate) fn room(ctx: &Context<'_>, burst: &Burst) -> usize {
    ctx.burst.min(burst.remaining_capacity())
}

/// Moves packets, in order, as many as there is room for.
#[inline]
pub fn hand_over(from: &mut Burst, to: &mut Burst) {
    let packets = from.len().min(to.remaining_capacity());
    to.extend(from.drain(..packets));
}

/// What a queue is made with, on the control thread, before its worker starts.
#[derive(Debug)]
pub struct QueueSetup<'a> {
    /// The mover of the worker that will own the queue.
    pub mover: &'a mut Mover,
    /// Where the queue's counters go.
    pub stats: &'a StatsPage,
    /// Who makes the queue's copies, where it makes any.
    pub binding: Binding,
    /// Name of the queue's port in statistics, such as `port0`.
    pub port: &'a str,
}

/// How a worker that has nothing to do learns that a queue has packets: see [`RxQueue::arm`].
#[derive(Clone, Copy, Debug)]
pub enum Wake<'a> {
    /// It has some, or something else to do: look at it at once.
    Now,
    /// The descriptor becomes readable when it has.
    Event(BorrowedFd<'a>),
    /// There is no event: look again soon.
    Poll,
    /// Nothing can come until the control thread changes something.
    Never,
}

/// The receiving half of a port's queue. `Any`, so that two queues can be found to be of guests when they are put
/// together: [`vhost::OneCopy`].
pub trait RxQueue: Any + fmt::Debug + Send {
    /// Appends received packets to `burst`, as many as it has room for.
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst);

    /// Counters of the queue.
    fn counters(&self) -> &RxCounters;

    /// Appends to `burst` what was already on its way, and takes nothing new; returns how many packets are still in
    /// flight. A worker that stops calls it until none is.
    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let _ = (ctx, burst);
        0
    }

    /// The worker is going to sleep: asks whoever sends to this queue to wake it up, and then looks once more whether
    /// something has come meanwhile. Whatever the answer, [`RxQueue::disarm`] follows, and then [`RxQueue::rx`] as usual.
    /// Nothing of the worker's is in flight. Even a queue that answers [`Wake::Never`] is looked at again within 10 ms.
    fn arm(&mut self) -> Wake<'_> {
        Wake::Poll
    }

    /// The worker is awake and polls: no more events, and what made the descriptor readable is read. Also called for
    /// queues that were not armed.
    fn disarm(&mut self) {}

    /// Takes back packets of the last call that the other side has no room for; those it leaves in `burst` are dropped.
    /// For what loses nothing by waiting, a generator or a file: the next calls begin with them.
    fn take_back(&mut self, burst: &mut Burst) {
        let _ = burst;
    }

    /// Whether the queue loses nothing by waiting, and therefore [takes back](Self::take_back) what is given to it.
    fn waits(&self) -> bool {
        false
    }
}

/// The sending half of a port's queue. `Any` as [`RxQueue`] is.
pub trait TxQueue: Any + fmt::Debug + Send {
    /// Takes packets from the front of `burst`, in order; those it cannot take stay there. Packets that cannot be sent
    /// at all (too big) are taken, freed and counted.
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst);

    /// Which packets it takes that are not [plain](offcore_mem::Packet::is_plain). The others are made plain before
    /// they come to [`tx`](Self::tx): see [`offload_fallback`].
    fn accepts(&self) -> Accepts {
        Accepts::default()
    }

    /// Publishes and frees what has been sent since. Called in every round of the worker, whether there was something
    /// to send or not.
    fn poll(&mut self, ctx: &mut Context<'_>) {
        let _ = ctx;
    }

    /// Counters of the queue.
    fn counters(&self) -> &TxCounters;

    /// Finishes what is in flight; returns whether nothing is left. Called until it does.
    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        let _ = ctx;
        true
    }
}

/// A port. Used by the control thread only.
pub trait Port: fmt::Debug + Send {
    /// What it has in common with every other port.
    fn base(&self) -> &PortBase;

    /// The port as it was written on the command line.
    fn name(&self) -> &str {
        &self.base().name
    }

    /// The port's Ethernet address: the source address of `mac` forwarding.
    fn mac(&self) -> MacAddr {
        self.base().mac
    }

    /// Number of queue pairs.
    fn queues(&self) -> u16 {
        self.base().queues()
    }

    /// The receiving half of queue `index`, once.
    ///
    /// # Errors
    /// [`PortError`].
    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError>;

    /// The sending half of queue `index`, once.
    ///
    /// # Errors
    /// [`PortError`].
    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError>;

    /// The present MTU of its interface, in bytes; `None` for a port without an interface, and while the interface is missing.
    fn mtu(&self) -> Option<usize> {
        None
    }

    /// Whether the port's queues make copies that an engine can take (`--dma` applies).
    fn offloads(&self) -> bool {
        false
    }

    /// The memory of a device that its packets are in, if they are not in the pool: nobody else reaches their bytes.
    fn memory(&self) -> Option<&DeviceMemory> {
        None
    }

    /// Looks after what the port hangs on, such as an interface that went away and is there again. The control thread
    /// calls it about every 20 ms; what there is for the queues to know reaches them between two bursts.
    fn tend(&mut self) {}

    /// One line on the port's state for a person: link, peer, negotiated features.
    fn status(&self) -> String;

    /// Whether something is on its way though nothing moves: a pipe's writer or reader may be slow, or still to come.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Why it does not do any more what it was opened for, such as a full disk: the run has failed.
    fn failure(&self) -> Option<String> {
        None
    }

    /// What the front end of a vhost port has done so far.
    fn peer(&self) -> Option<PeerReport> {
        None
    }
}

/// What the front end of a vhost port, and those before it, have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PeerReport {
    pub connected: bool,
    pub connections: u64,
    /// Those that were refused included.
    pub messages: u64,
    pub refused: u64,
    /// Virtqueues that take nothing more until they are started anew.
    pub broken: usize,
    /// Whether written pages are logged.
    pub migrates: bool,
}

/// Why a port cannot be opened or used.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PortError {
    /// port '{found}': {expected}
    Syntax { found: String, expected: String },
    /// port '{port}': {what}: {source}
    System { port: String, what: String, source: std::io::Error },
    /// port '{port}' has no free queue {index}
    Queue { port: String, index: u16 },
    /// port '{port}': {reason}
    Other { port: String, reason: String },
    /// {0}
    Stats(#[from] PageError),
}
