//! Ports: the sources and destinations of packets.
//!
//! A [`Port`] hands out queues. Each queue belongs to one worker and moves packets in bursts, with one dynamic call per
//! burst.

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

/// Returns the number of packets that one call may append to `burst`.
#[inline(always)]
pub(crate) fn room(ctx: &Context<'_>, burst: &Burst) -> usize {
    ctx.burst.min(burst.remaining_capacity())
}

/// Moves packets from `from` to `to`, in order, until `to` is full.
#[inline]
pub fn hand_over(from: &mut Burst, to: &mut Burst) {
    let packets = from.len().min(to.remaining_capacity());
    to.extend(from.drain(..packets));
}

/// The parameters of a new queue. The control thread creates it before the queue's worker starts.
#[derive(Debug)]
pub struct QueueSetup<'a> {
    /// The mover of the worker that will own the queue.
    pub mover: &'a mut Mover,
    /// The statistics page that holds the queue's counters.
    pub stats: &'a StatsPage,
    /// The engine or core that performs the queue's copies, if the queue makes any.
    pub binding: Binding,
    /// Name of the queue's port in statistics, such as `port0`.
    pub port: &'a str,
}

/// How an idle worker learns that a queue has packets: see [`RxQueue::arm`].
#[derive(Clone, Copy, Debug)]
pub enum Wake<'a> {
    /// The queue has packets or other work: poll it at once.
    Now,
    /// The descriptor becomes readable when the queue has packets.
    Event(BorrowedFd<'a>),
    /// The queue has no event source: poll it again soon.
    Poll,
    /// No packets can arrive until the control thread changes something.
    Never,
}

/// The receiving half of a port's queue. The `Any` supertrait lets [`vhost::OneCopy`] recognize two queues of guests
/// when they are paired.
pub trait RxQueue: Any + fmt::Debug + Send {
    /// Appends received packets to `burst`, up to its capacity.
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst);

    /// Counters of the queue.
    fn counters(&self) -> &RxCounters;

    /// Appends packets that are already in flight to `burst` and accepts no new ones. Returns the number of packets
    /// that are still in flight. A worker that stops calls this until the result is 0.
    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let _ = (ctx, burst);
        0
    }

    /// Prepares for the worker to sleep: asks the sender to wake up the worker, and then checks once more for packets
    /// that arrived meanwhile. Whatever the result, [`RxQueue::disarm`] follows, and then [`RxQueue::rx`] as usual. The
    /// worker has no packets in flight at this point. Even a queue that returns [`Wake::Never`] is polled again within
    /// 10 ms.
    fn arm(&mut self) -> Wake<'_> {
        Wake::Poll
    }

    /// Ends sleeping: the worker polls again. No more events are requested, and the data that made the descriptor
    /// readable is read. This is also called for queues that were not armed.
    fn disarm(&mut self) {}

    /// Takes back packets of the last call that the other side has no room for. Packets left in `burst` are dropped.
    /// Sources that lose nothing by waiting, such as a generator or a file, implement this: the next calls return these
    /// packets first.
    fn take_back(&mut self, burst: &mut Burst) {
        let _ = burst;
    }

    /// Returns whether the queue loses nothing by waiting, and therefore [takes back](Self::take_back) packets.
    fn waits(&self) -> bool {
        false
    }
}

/// The sending half of a port's queue. It is `Any` for the same reason as [`RxQueue`].
pub trait TxQueue: Any + fmt::Debug + Send {
    /// Takes packets from the front of `burst`, in order. Packets that it has no room for stay in `burst`. Packets that
    /// can never be sent (too long) are taken, freed and counted.
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst);

    /// Returns which packets it takes that are not [plain](offcore_mem::Packet::is_plain). All other packets are made
    /// plain before [`tx`](Self::tx): see [`offload_fallback`].
    fn accepts(&self) -> Accepts {
        Accepts::default()
    }

    /// Publishes and frees packets whose transmission has completed. It is called in every round of the worker, even if
    /// there was nothing to send.
    fn poll(&mut self, ctx: &mut Context<'_>) {
        let _ = ctx;
    }

    /// Counters of the queue.
    fn counters(&self) -> &TxCounters;

    /// Returns whether a full queue always gets room soon, because a device works on its packets. While the switch
    /// stops, packets then wait for room instead of being dropped.
    fn is_drained_by_device(&self) -> bool {
        false
    }

    /// Finishes packets in flight; returns whether all are done. It is called until it returns `true`.
    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        let _ = ctx;
        true
    }
}

/// A port. Used by the control thread only.
pub trait Port: fmt::Debug + Send {
    /// The part that all ports have in common.
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

    /// Takes the receiving half of queue `index`. It can be taken once.
    ///
    /// # Errors
    /// [`PortError`].
    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError>;

    /// Takes the sending half of queue `index`. It can be taken once.
    ///
    /// # Errors
    /// [`PortError`].
    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError>;

    /// The current MTU of the port's interface, in bytes. `None` if the port has no interface or the interface is
    /// missing.
    fn mtu(&self) -> Option<usize> {
        None
    }

    /// Whether the port's queues make copies that a DMA engine can perform (`--dma` applies).
    fn offloads(&self) -> bool {
        false
    }

    /// The device memory that holds the port's packets, if they are not in the pool. Then only the device accesses
    /// their bytes.
    fn memory(&self) -> Option<&DeviceMemory> {
        None
    }

    /// Checks the resources that the port depends on, such as an interface that was deleted and recreated. The control
    /// thread calls it about every 20 ms. Queues pick up changes between two bursts.
    fn tend(&mut self) {}

    /// One line on the port's state for the user: link, peer, negotiated features.
    fn status(&self) -> String;

    /// Whether data is pending although nothing moves: the other end of a pipe may be slow or not connected yet.
    fn is_waiting(&self) -> bool {
        false
    }

    /// The reason why the port stopped working, such as a full disk. The run has then failed.
    fn failure(&self) -> Option<String> {
        None
    }

    /// The activity of a vhost port's front end so far.
    fn peer(&self) -> Option<PeerReport> {
        None
    }
}

/// The activity of a vhost port's present and earlier front ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PeerReport {
    pub connected: bool,
    pub connections: u64,
    /// Includes refused messages.
    pub messages: u64,
    pub refused: u64,
    /// Virtqueues that are stopped until the front end restarts them.
    pub broken: usize,
    /// Whether dirty page logging is on.
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
