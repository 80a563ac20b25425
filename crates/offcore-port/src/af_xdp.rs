//! The AF_XDP port: a network interface of the kernel by XDP sockets, one for each queue.
//!
//! ```text
//! interface ── XDP program ── RX ring ──────────> worker ──────────> TX ring ── interface
//!              (queue → socket)  ^ fill ring <── packet pool <── completion ring v
//! ```
//! The packet pool is the sockets' UMEM. Where the driver can do it, packets are received into packet buffers and sent
//! from there (zero-copy); otherwise the kernel copies them once between its buffers and ours (copy mode). Packets of
//! queues that the port does not have go to the kernel's stack as before.
//!
//! The program is attached by a link that ends with the process, in whichever way it ends; a program of somebody else is
//! never replaced. An interface that the kernel's stack uses is taken over only by force. One that is deleted takes its
//! sockets along: what is sent meanwhile is dropped and counted
//! ([`DropReason::Down`]), and when an interface of that name is there again, it is taken over anew.
//!
//! The kernel leaves checksums of its own packets to an interface that says it does them, as veth does, and an XDP
//! socket is not told. So whoever sends through the kernel's stack to an interface that is a port has to compute them:
//! `ethtool -K PEER tx off`.

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

/// Bytes of a VLAN tag, which the MTU does not count.
const VLAN_TAG: usize = 4;
/// Buffers of a packet, at most: what the kernel can send of several (MAX_SKB_FRAGS).
const MAX_BUFFERS: usize = 17;
/// How long opening a port waits for the kernel to let go of a queue whose socket was closed just before.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long opening a port waits for the carrier of a link that was up: drivers may take it away for a moment to attach
/// a program.
const LINK_TIMEOUT: Duration = Duration::from_secs(3);
/// The same when there was none before: the kernel tells of a new one within a second.
const NEWS_TIMEOUT: Duration = Duration::from_millis(1200);
/// Between two looks at it.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);
/// Between two attempts to take an interface over that is there again.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(200);
/// What part of the pool may wait for packets at one port: one in this many.
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

/// What the control thread knows of a queue.
#[derive(Debug)]
struct Queue {
    rx: Arc<Cell<RxHalf>>,
    tx: Arc<Cell<TxHalf>>,
    counters: Option<RxCounters>,
    /// What of the present socket's drops was counted.
    counted: Dropped,
}

/// What the kernel dropped of a socket's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Dropped {
    /// The worker did not come to take them.
    full: u64,
    /// There was no packet buffer for them.
    no_buffer: u64,
    /// They are longer than a packet buffer, or the port's packets.
    too_big: u64,
}

#[derive(Debug)]
enum State {
    Taken(Session),
    /// The interface is gone; since when it has been tried to take it over anew, and what came of it.
    Gone {
        tried: Instant,
        why: Option<Refusal>,
    },
}

/// What the workers of a port's TX queues have to know of the interface.
#[derive(Debug, Default)]
struct Line {
    /// Bytes of the longest frame that can be sent, 0 while the link is not up.
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
    /// Takes over the queues of an interface in the calling thread's network namespace. Packets will be chunks of `pool`.
    ///
    /// # Errors
    /// What the kernel refused, or will not do, and what to do about it.
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
        let timeout = if device.link() == Link::Up { LINK_TIMEOUT } else { NEWS_TIMEOUT };
        let (session, halves) = Session::open(&device, spec, pool, TIMEOUT).map_err(|e| e.of(&name))?;
        let start = Instant::now();
        while device.link() == Link::NoCarrier && start.elapsed() < timeout {
            std::thread::sleep(BETWEEN_LOOKS);
        }
        let line = Arc::new(Line::default());
        line.segments.store(session.frags, Ordering::Relaxed);
        line.update(&device);
        let queues = (0..spec.queues).map(|_| Queue {
            rx: Arc::new(Cell::new()),
            tx: Arc::new(Cell::new()),
            counters: None,
            counted: Dropped::default(),
        });
        let queues: Vec<Queue> = queues.collect();
        for (queue, (rx, tx)) in queues.iter().zip(halves) {
            queue.rx.publish(Some(rx));
            queue.tx.publish(Some(tx));
        }
        Ok(Self {
            queues,
            base: PortBase::new(name, mac, spec.queues),
            spec: spec.clone(),
            state: State::Taken(session),
            device,
            pool,
            line,
        })
    }

    /// Whether the interface uses the packet buffers themselves, on every queue.
    pub fn is_zero_copy(&self) -> bool {
        match &self.state {
            State::Taken(session) => session.sockets.iter().all(|socket| socket.is_zero_copy()),
            State::Gone { .. } => false,
        }
    }

    /// Takes the drops that the kernel has counted since the last time over to the RX queues' counters.
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

    /// The interface is gone: the workers give their halves of the sockets back.
    fn let_go(&mut self) {
        self.count_drops();
        self.line.longest.store(0, Ordering::Relaxed);
        for queue in &mut self.queues {
            queue.rx.publish(None);
            queue.tx.publish(None);
            queue.counted = Dropped::default();
        }
        // The first attempt is made at once.
        let tried = Instant::now().checked_sub(BETWEEN_ATTEMPTS).unwrap_or_else(Instant::now);
        self.state = State::Gone { tried, why: None };
    }

    /// Takes an interface of the same name over, if there is one.
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

/// Why an interface must not be taken away from whoever uses it. Who is not told what it is used for cannot take it over either.
fn in_use(spec: &AfXdpSpec, device: &NetDev) -> Option<String> {
    let uses = if spec.force { vec![] } else { inventory::uses(device.index()).unwrap_or_default() };
    (!uses.is_empty()).then(|| {
        format!(
            "interface '{0}' is in use ({1}) and would be taken away: expected one that nobody uses, af_packet:{0}, which \
             shares it, or the option 'force'",
            spec.name,
            uses.join(", ")
        )
    })
}

impl Dropped {
    /// A packet without a buffer is counted by the kernel twice in copy mode, and not at all as one in zero-copy mode,
    /// where the driver waits or drops as it likes.
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
                self.let_go();
            }
            State::Taken(_) => self.count_drops(),
            State::Gone { tried, .. } if tried.elapsed() >= BETWEEN_ATTEMPTS => self.try_again(),
            State::Gone { .. } => {}
        }
        for queue in &self.queues {
            queue.rx.close_retired();
            queue.tx.close_retired();
        }
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
        self.let_go();
        for queue in &self.queues {
            queue.rx.close_retired();
            queue.tx.close_retired();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_told_apart() {
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
