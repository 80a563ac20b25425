//! The AF_XDP port: a network interface of the kernel, accessed through XDP sockets, one per queue.
//!
//! ```text
//! interface ── XDP program ── RX ring ──────────> worker ──────────> TX ring ── interface
//!              (queue → socket)  ^ fill ring <── packet pool <── completion ring v
//! ```
//! The packet pool is the sockets' UMEM. If the driver supports it, packets are received into packet buffers and sent
//! from them (zero-copy). Otherwise the kernel copies each packet once between its own buffers and packet buffers (copy
//! mode). Packets of queues that the port does not use go to the kernel's network stack as before.
//!
//! The program is attached by a link that ends with the process, however it ends. Another process's program is never
//! replaced. An interface that the kernel's network stack uses is taken over only with `force`. If the interface is
//! deleted, its sockets are gone, too: packets to send are dropped and counted ([`DropReason::Down`]) until an
//! interface of that name exists again, which the port then takes over.
//!
//! If an interface offers checksum offload, as veth does, the kernel does not compute the checksums of packets that it
//! sends through it, and an XDP socket is not told which checksums are missing. Therefore a sender that uses the
//! kernel's network stack and reaches the port through such an interface must compute the checksums itself: `ethtool -K
//! PEER tx off`.

mod bpf;
mod lent;
mod program;
mod rings;
mod rx;
mod session;
mod socket;
mod tx;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use offcore_mem::Pool;

use crate::base::PortBase;
use crate::base::cell::{Cell, End};
use crate::inventory;
use crate::netdev::{Link, NetDev, advice};
use crate::spec::AfXdpSpec;
use crate::{DropReason, Port, PortError, QueueSetup, RxCounters, RxQueue, TxQueue};

use rx::{RxHalf, XdpRx};
use session::{Halves, Refusal, Session, buffers, longest_frame};
use tx::{TxHalf, XdpTx};

/// Length of a VLAN tag in bytes, which the MTU does not include.
const VLAN_TAG: usize = 4;
/// Maximum number of buffers of a packet: the kernel's limit for sending (MAX_SKB_FRAGS).
const MAX_BUFFERS: usize = 17;
/// Maximum time that opening a port waits for the kernel to release a queue whose socket was just closed.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time that opening a port waits for the carrier of a link that was up: drivers may drop it for a moment to
/// attach a program.
const LINK_TIMEOUT: Duration = Duration::from_secs(3);
/// The same for a link without a carrier before: the kernel reports a new carrier within a second.
const CARRIER_TIMEOUT: Duration = Duration::from_millis(1200);
/// Interval between two checks of the link.
const LINK_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Interval between two attempts to take over an interface that exists again.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(200);
/// The share of the pool that may be lent to the kernel for one port: one buffer in this many.
const POOL_SHARE: usize = 2;

/// An AF_XDP port.
#[derive(Debug)]
pub struct AfXdpPort {
    base: PortBase,
    spec: AfXdpSpec,
    device: NetDev,
    pool: &'static Pool,
    queues: Vec<Queue>,
    line: Arc<Line>,
    state: State,
}

/// State of a queue in the control thread.
#[derive(Debug)]
struct Queue {
    rx: Arc<Cell<RxHalf>>,
    tx: Arc<Cell<TxHalf>>,
    counters: Option<RxCounters>,
    /// The drops of the present socket that have been counted.
    counted: Dropped,
}

/// Packets of a socket that the kernel dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Dropped {
    /// The RX ring was full.
    full: u64,
    /// There was no packet buffer for them.
    no_buffer: u64,
    /// They were longer than a packet buffer, or than the port's longest packet.
    too_big: u64,
}

#[derive(Debug)]
enum State {
    Taken(Session),
    /// The interface is missing. `tried` is the time of the last attempt to take it over, and `why` its error.
    Gone {
        tried: Instant,
        why: Option<Refusal>,
    },
}

/// State of the interface that the TX queues' workers read.
#[derive(Debug, Default)]
struct Line {
    /// Length of the longest frame that can be sent, in bytes; 0 while the link is not up.
    longest: AtomicUsize,
    segments: AtomicBool,
}

impl Line {
    #[inline(always)]
    fn longest(&self) -> usize {
        self.longest.load(Ordering::Relaxed)
    }

    /// Whether packets may have several buffers.
    fn takes_segments(&self) -> bool {
        self.segments.load(Ordering::Relaxed)
    }

    fn update(&self, device: &NetDev) -> Link {
        let link = device.link();
        let longest = match link {
            Link::Up => device.mtu().map_or(0, longest_frame),
            Link::NoCarrier | Link::Down | Link::Gone => 0,
        };
        self.longest.store(longest, Ordering::Relaxed);
        link
    }
}

impl AfXdpPort {
    /// Takes over queues of an interface in the calling thread's network namespace. Packets are chunks of `pool`.
    ///
    /// # Errors
    /// The step that the kernel refused or does not support, and what to do about it.
    pub fn open(spec: &AfXdpSpec, pool: &'static Pool) -> Result<Self, PortError> {
        let name = spec.to_string();
        let fail = |what: String, source| Refusal::System(what, source).of(&name);
        let device = NetDev::open(&spec.name).map_err(|e| fail(advice(&spec.name, &e), e))?;
        let mac = device.mac().map_err(|e| fail(format!("asking for the address of '{}'", spec.name), e))?;
        if !device.is_ethernet().unwrap_or(true) {
            let reason = format!("interface '{}' has no Ethernet frames, expected one that has", spec.name);
            return Err(Refusal::Reason(reason).of(&name));
        }
        if let Some(reason) = in_use(spec, &device) {
            return Err(Refusal::Reason(reason).of(&name));
        }
        let (needed, chunks) = (buffers(spec), pool.chunks());
        if needed > chunks / POOL_SHARE {
            let reason = format!(
                "{} queues of ring_size={} keep {needed} packet buffers, expected at most half of the pool's {chunks}: \
                 --mbufs {}, or a smaller ring_size",
                spec.queues,
                spec.ring_size,
                (needed * POOL_SHARE).next_power_of_two()
            );
            return Err(Refusal::Reason(reason).of(&name));
        }
        let timeout = if device.link() == Link::Up { LINK_TIMEOUT } else { CARRIER_TIMEOUT };
        let (session, halves) = Session::open(&device, spec, pool, TIMEOUT).map_err(|e| e.of(&name))?;
        let start = Instant::now();
        while device.link() == Link::NoCarrier && start.elapsed() < timeout {
            std::thread::sleep(LINK_POLL_INTERVAL);
        }
        let queues = (0..spec.queues).map(|_| Queue {
            rx: Arc::new(Cell::new()),
            tx: Arc::new(Cell::new()),
            counters: None,
            counted: Dropped::default(),
        });
        let mut port = Self {
            queues: queues.collect(),
            base: PortBase::new(name, mac, spec.queues),
            spec: spec.clone(),
            state: State::Gone { tried: start, why: None },
            device,
            pool,
            line: Arc::default(),
        };
        port.take(session, halves);
        Ok(port)
    }

    /// Adds the drops that the kernel has counted since the last call to the RX queues' counters.
    fn count_drops(&mut self) {
        let State::Taken(session) = &self.state else { return };
        for (queue, socket) in self.queues.iter_mut().zip(&session.sockets) {
            let (Some(counters), Ok(statistics)) = (&queue.counters, socket.statistics()) else { continue };
            let now = Dropped::of(&statistics);
            for (reason, now, before) in [
                (DropReason::Full, now.full, queue.counted.full),
                (DropReason::NoBuffer, now.no_buffer, queue.counted.no_buffer),
                (DropReason::TooBig, now.too_big, queue.counted.too_big),
            ] {
                if now > before {
                    counters.drop(reason, now - before);
                }
            }
            queue.counted = now;
        }
    }

    /// The interface is gone: makes the workers return their halves of the sockets.
    fn release_sockets(&mut self) {
        self.count_drops();
        self.line.longest.store(0, Ordering::Relaxed);
        for queue in &mut self.queues {
            queue.rx.publish(None);
            queue.tx.publish(None);
            queue.counted = Dropped::default();
        }
        // The first attempt to take over the interface is made at once.
        let tried = Instant::now().checked_sub(BETWEEN_ATTEMPTS).unwrap_or_else(Instant::now);
        self.state = State::Gone { tried, why: None };
    }

    /// Closes the halves of sockets that the workers have returned.
    fn close_retired(&self) {
        for queue in &self.queues {
            queue.rx.close_retired();
            queue.tx.close_retired();
        }
    }

    /// Takes over an interface of the same name, if it exists.
    fn try_again(&mut self) {
        let refused = match self.device.reopen() {
            Err(_) => None,
            Ok(()) => match in_use(&self.spec, &self.device) {
                Some(reason) => Some(Refusal::Reason(reason)),
                None => match Session::open(&self.device, &self.spec, self.pool, Duration::ZERO) {
                    Ok((session, halves)) => return self.take(session, halves),
                    Err(refused) => Some(refused),
                },
            },
        };
        self.state = State::Gone { tried: Instant::now(), why: refused };
    }

    fn take(&mut self, session: Session, halves: Vec<Halves>) {
        self.line.segments.store(session.frags, Ordering::Relaxed);
        for (queue, (rx, tx)) in self.queues.iter().zip(halves) {
            queue.rx.publish(Some(rx));
            queue.tx.publish(Some(tx));
        }
        if let Ok(mac) = self.device.mac() {
            self.base.mac = mac;
        }
        self.state = State::Taken(session);
        self.line.update(&self.device);
    }
}

/// Returns why the interface must not be taken over: its present uses. If the uses cannot be determined, the kernel
/// will not allow a takeover either.
fn in_use(spec: &AfXdpSpec, device: &NetDev) -> Option<String> {
    let uses = if spec.force { vec![] } else { inventory::uses(device.index()).unwrap_or_default() };
    (!uses.is_empty()).then(|| {
        format!(
            "interface '{0}' is in use ({1}) and would be taken away: expected an unused one, af_packet:{0}, which \
             shares it, or the option 'force'",
            spec.name,
            uses.join(", ")
        )
    })
}

impl Dropped {
    /// In copy mode, the kernel counts a packet without a buffer twice: as dropped and as an empty fill ring. In
    /// zero-copy mode it is not counted as dropped, because the driver decides whether to wait or to drop.
    fn of(statistics: &libc::xdp_statistics) -> Self {
        let no_buffer = statistics.rx_dropped.min(statistics.rx_fill_ring_empty_descs);
        Self { full: statistics.rx_ring_full, no_buffer, too_big: statistics.rx_dropped - no_buffer }
    }
}

impl Port for AfXdpPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        let queue = &mut self.queues[usize::from(index)];
        queue.counters = Some(counters.clone());
        Ok(Box::new(XdpRx::new(End::new(Arc::clone(&queue.rx)), counters)))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        let end = End::new(Arc::clone(&self.queues[usize::from(index)].tx));
        Ok(Box::new(XdpTx::new(end, Arc::clone(&self.line), counters)))
    }

    fn tend(&mut self) {
        match &self.state {
            State::Taken(session) if self.line.update(&self.device) == Link::Gone || session.has_ended() => {
                self.release_sockets();
            }
            State::Taken(_) => self.count_drops(),
            State::Gone { tried, .. } if tried.elapsed() >= BETWEEN_ATTEMPTS => self.try_again(),
            State::Gone { .. } => {}
        }
        self.close_retired();
    }

    fn mtu(&self) -> Option<usize> {
        self.device.mtu().ok()
    }

    fn status(&self) -> String {
        let Self { base, spec, device, .. } = self;
        let mac = base.mac;
        match &self.state {
            State::Gone { why: None, .. } => format!("interface {} {}", device.name(), Link::Gone),
            State::Gone { why: Some(why), .. } => {
                format!("interface {} is there again, but: {why}", device.name())
            }
            State::Taken(session) => {
                let mtu = device.mtu().unwrap_or_default();
                let last = u32::from(spec.first) + u32::from(spec.queues) - 1;
                let queues = match spec.queues {
                    1 => format!("queue {last}"),
                    _ => format!("queues {} to {last}", spec.first),
                };
                let link = device.link();
                format!("interface {} {link}, MTU {mtu}, address {mac}, {queues}: {session}", device.name())
            }
        }
    }
}

impl Drop for AfXdpPort {
    fn drop(&mut self) {
        self.release_sockets();
        self.close_retired();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xdp_drops_are_split_by_reason() {
        let statistics = |rx_dropped, rx_ring_full, rx_fill_ring_empty_descs| libc::xdp_statistics {
            rx_dropped,
            rx_ring_full,
            rx_fill_ring_empty_descs,
            rx_invalid_descs: 0,
            tx_invalid_descs: 0,
            tx_ring_empty_descs: 0,
        };
        let of = |statistics| Dropped::of(&statistics);
        assert_eq!(of(statistics(7, 2, 3)), Dropped { full: 2, no_buffer: 3, too_big: 4 });
        assert_eq!(of(statistics(0, 0, 9)), Dropped::default());
    }

    #[test]
    fn an_interface_that_is_not_there_is_named() {
        let pool = Pool::new(8192, 2048, offcore_mem::Hugepages::None).unwrap();
        let crate::spec::PortSpec::AfXdp(spec) = "af_xdp:nosuchdev0".parse().unwrap() else { panic!() };
        let error = AfXdpPort::open(&spec, pool).unwrap_err().to_string();
        assert!(
            error.contains("no interface 'nosuchdev0'") && error.contains("offcore port list"),
            "{error}"
        );
    }

    #[test]
    fn small_pool_error_says_how_many() {
        let pool = Pool::new(1024, 2048, offcore_mem::Hugepages::None).unwrap();
        let crate::spec::PortSpec::AfXdp(spec) = "af_xdp:lo,ring_size=512,force".parse().unwrap() else {
            panic!()
        };
        let error = AfXdpPort::open(&spec, pool).unwrap_err().to_string();
        assert!(error.contains("keep 1024 packet buffers") && error.contains("--mbufs 2048"), "{error}");
    }
}
