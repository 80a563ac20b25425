//! The TAP port: a network interface of the kernel, with one system call per packet.
//!
//! The kernel puts a virtio-net header of 12 bytes in front of each packet, and expects one in front of packets that
//! are sent to it. The header is read into the packet's headroom, so that the packet's data begins at its usual place.
//! Unless offloads are switched off, the kernel may leave checksums incomplete and request segmentation: TCP and UDP
//! between the kernel and a guest then use packets of up to 64 KiB, without computing checksums. Packets longer than a
//! packet buffer take several buffers.
//!
//! An interface created by the port is deleted with the port; an existing one (`ip tuntap add`) stays. If the interface
//! is deleted meanwhile, the port creates it again.

mod interface;
mod rx;

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arrayvec::ArrayVec;
use offcore_mem::{Burst, Packet, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet::{self};
use offcore_wire::virtio_net::{HEADER_LEN, Offloads};
use rustix::io::Errno;

use crate::base::PortBase;
use crate::base::cell::{Cell, End};
use crate::netdev::NetDev;
use crate::offload_fallback;
use crate::spec::TapSpec;
use crate::{Accepts, Context, DropReason, Port, PortError, QueueSetup, RxQueue, TxCounters, TxQueue};

use interface::Interface;
use rx::TapRx;

/// Length of a VLAN tag in bytes, which the MTU does not include.
const VLAN_TAG: usize = 4;
/// Length of the longest packet that the kernel leaves unsegmented, in bytes: the longest IP packet in a tagged frame.
const LONGEST_GSO: usize = u16::MAX as usize + ethernet::HEADER_LEN + VLAN_TAG;
/// The share of the pool that may be reserved for long packets: one buffer in this many.
const SPARES_SHARE: usize = 4;
/// Maximum number of buffers of a packet to send: more than the longest packet has.
const MAX_SEGMENTS: usize = 64;

/// A TAP port.
#[derive(Debug)]
pub struct TapPort {
    base: PortBase,
    interface: NetDev,
    mtu: usize,
    offloads: Offloads,
    /// Whether the pool is too small for the requested offloads.
    too_small: bool,
    /// Length of the longest packet that is received, in bytes.
    longest: usize,
    pool: &'static Pool,
    /// The halves of each queue. Both use the same file.
    queues: Vec<[Arc<Cell<Arc<OwnedFd>>>; 2]>,
    lost: Arc<AtomicU32>,
    spec: TapSpec,
    /// Number of times that the interface was created again.
    renewed: u64,
}

impl TapPort {
    /// Creates the interface, or joins an existing interface of that name, in the calling thread's network namespace,
    /// and sets it up. Packets are chunks of `pool`.
    ///
    /// # Errors
    /// The step that the kernel refused, and what to do about it.
    pub fn open(spec: &TapSpec, pool: &'static Pool) -> Result<Self, PortError> {
        let name = spec.to_string();
        let fail = |what: String, source| PortError::System { port: name.clone(), what, source };
        let spares = |longest| rx::spares(pool, longest) * usize::from(spec.queues);
        let most = pool.chunks() / SPARES_SHARE;
        // Without room for long packets, offloads are not offered to the kernel.
        let offloads = spec.offloads && spares(LONGEST_GSO) <= most;
        let longest_with = |mtu: usize| {
            let ordinary = mtu + ethernet::HEADER_LEN + VLAN_TAG;
            if offloads { ordinary.max(LONGEST_GSO) } else { ordinary }
        };
        let check_room = |mtu: usize| {
            let longest = longest_with(mtu);
            let needed = spares(longest);
            if needed <= most {
                return Ok(longest);
            }
            let reason = format!(
                "packets of up to {longest} bytes on {} queues need {needed} spare packet buffers, expected at most \
                 {most}, a quarter of the pool: use more packet buffers (--mbufs), or larger ones (--mbuf-size), or \
                 lower the MTU of {mtu}",
                spec.queues,
            );
            Err(PortError::Other { port: name.clone(), reason })
        };
        // An MTU that the pool has no room for is refused before the interface has it.
        if let Some(mtu) = spec.mtu {
            check_room(mtu.into())?;
        }
        let Interface { netdev: interface, files, offloads: agreed } =
            interface::open(&spec.name, spec, offloads).map_err(|(what, e)| fail(what, e))?;
        let ask = |what: &str| format!("asking for the {what} of '{}'", interface.name());
        // The present MTU sets the limit. Privileged users may change the MTU later.
        let mtu = interface.mtu().map_err(|e| fail(ask("MTU"), e))?;
        let mac = interface.mac().map_err(|e| fail(ask("address"), e))?;
        let longest = check_room(mtu)?;
        let port = Self {
            base: PortBase::new(name, mac, spec.queues),
            interface,
            mtu,
            offloads: agreed,
            too_small: spec.offloads && !offloads,
            longest,
            pool,
            queues: (0..spec.queues).map(|_| [(); 2].map(|()| Arc::new(Cell::new()))).collect(),
            lost: Arc::default(),
            spec: spec.clone(),
            renewed: 0,
        };
        port.publish(files);
        Ok(port)
    }

    /// Hands the files to the queues.
    fn publish(&self, files: Vec<OwnedFd>) {
        for (halves, file) in self.queues.iter().zip(files.into_iter().map(Arc::new)) {
            halves.iter().for_each(|half| half.publish(Some(Arc::clone(&file))));
        }
    }

    /// Returns whether a queue has found that the present interface was deleted.
    fn is_deleted(&self) -> bool {
        let lost = self.lost.load(Ordering::Relaxed);
        self.queues.first().is_some_and(|[rx, _]| rx.generation() == lost)
    }

    /// The interface's name: the requested name, unless that was a pattern such as `tap%d`.
    pub fn interface(&self) -> &str {
        self.interface.name()
    }

    /// Returns one half of a queue: 0 to receive, 1 to send.
    fn queue(&self, index: u16, half: usize) -> Result<Queue, PortError> {
        let end = End::new(Arc::clone(&self.queues[usize::from(index)][half]));
        let missing = || PortError::Queue { port: self.base.name.clone(), index };
        let file = end.ring.as_ref().map(Arc::clone).ok_or_else(missing)?;
        Ok(Queue { file, end, lost: Arc::clone(&self.lost) })
    }
}

impl Port for TapPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        Ok(Box::new(TapRx::new(self.queue(index, 0)?, counters, self.pool, self.longest)))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        let (queue, offloads) = (self.queue(index, 1)?, self.offloads);
        Ok(Box::new(TapTx { queue, pool: self.pool, offloads, counters }))
    }

    /// The interface's MTU, limited by the buffers of the queues.
    fn mtu(&self) -> Option<usize> {
        let most = self.longest - ethernet::HEADER_LEN - VLAN_TAG;
        self.interface.mtu().ok().map(|mtu| mtu.min(most))
    }

    /// Creates a deleted interface again, without its former IP addresses.
    fn tend(&mut self) {
        self.queues.iter().flatten().for_each(|half| half.close_retired());
        if !self.is_deleted() {
            return;
        }
        let has_offloads = self.offloads.checksum;
        let Ok(Interface { netdev: interface, files, .. }) =
            interface::open(self.interface.name(), &self.spec, has_offloads)
        else {
            return;
        };
        self.base.mac = interface.mac().unwrap_or(self.base.mac);
        self.mtu = interface.mtu().unwrap_or(self.mtu);
        self.interface = interface;
        self.renewed += 1;
        self.publish(files);
    }

    fn status(&self) -> String {
        let link = match self.is_deleted() {
            true => "was deleted".into(),
            false => self.interface.link().to_string(),
        };
        let renewed =
            if self.renewed == 0 { String::new() } else { format!(", re-created {} times", self.renewed) };
        let offloads = match (self.offloads.checksum, self.too_small) {
            (true, _) => "on",
            (false, false) => "off",
            (false, true) => "off (they need more packet buffers: --mbufs)",
        };
        let Self { base, interface, .. } = self;
        let mac = base.mac;
        let mtu = interface.mtu().unwrap_or(self.mtu);
        format!(
            "interface {} {link}, MTU {mtu}, address {mac}, offloads {offloads}{renewed}",
            interface.name()
        )
    }
}

/// One half of a queue, and the file that both halves use.
#[derive(Debug)]
struct Queue {
    file: Arc<OwnedFd>,
    end: End<Arc<OwnedFd>>,
    /// The publication whose interface was found deleted; 0 if none.
    lost: Arc<AtomicU32>,
}

impl Queue {
    /// Records an error that means that the interface was deleted.
    #[cold]
    fn note(&self, error: Errno) {
        if error == Errno::BADFD {
            self.lost.store(self.end.generation(), Ordering::Relaxed);
        }
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) == self.end.generation()
    }

    /// Switches to the file of a recreated interface, if one has been published.
    #[inline(always)]
    fn follow(&mut self) {
        if self.end.is_stale() {
            self.end.follow();
            self.file = self.end.ring.as_ref().map_or_else(|| Arc::clone(&self.file), Arc::clone);
        }
    }
}

#[derive(Debug)]
struct TapTx {
    queue: Queue,
    pool: &'static Pool,
    offloads: Offloads,
    counters: TxCounters,
}

impl TapTx {
    /// Sends one packet with all its buffers; returns its length in bytes.
    #[inline]
    fn send(&self, packet: &Packet) -> Result<usize, Errno> {
        /// The virtio-net header of a packet without offload requests.
        static HEADER: [u8; HEADER_LEN] = [0; HEADER_LEN];
        if !packet.is_plain() {
            return self.send_special(packet);
        }
        let frame = packet.bytes();
        rustix::io::writev(&self.queue.file, &[IoSlice::new(&HEADER), IoSlice::new(frame)])?;
        Ok(frame.len())
    }

    #[cold]
    fn send_special(&self, packet: &Packet) -> Result<usize, Errno> {
        let header = offload_fallback::header(packet).to_bytes();
        let mut parts: ArrayVec<IoSlice<'_>, MAX_SEGMENTS> = ArrayVec::new();
        parts.push(IoSlice::new(&header));
        for segment in self.pool.segments(packet) {
            parts.try_push(IoSlice::new(segment)).map_err(|_| Errno::MSGSIZE)?;
        }
        rustix::io::writev(&self.queue.file, &parts)?;
        Ok(self.pool.total_len(packet))
    }
}

impl TxQueue for TapTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        self.queue.follow();
        let (mut taken, mut packets, mut bytes) = (0, 0, 0);
        for packet in burst.iter() {
            match self.send(packet) {
                Ok(len) => (packets, bytes) = (packets + 1, bytes + len as u64),
                // The kernel has no memory now: this packet and those behind it stay in the burst.
                Err(Errno::AGAIN | Errno::NOBUFS) => break,
                // The link is down or the interface was deleted, so the remaining packets cannot be sent either.
                Err(error @ (Errno::IO | Errno::BADFD)) => {
                    self.queue.note(error);
                    let rest = burst.len() - taken;
                    self.counters.drop(DropReason::Down, rest as u64);
                    taken = burst.len();
                    break;
                }
                Err(Errno::MSGSIZE) => self.counters.drop(DropReason::TooBig, 1),
                Err(_) => self.counters.drop(DropReason::Failed, 1),
            }
            taken += 1;
        }
        self.counters.add(packets, bytes);
        ctx.cache.free_all(burst.drain(..taken));
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { offloads: self.offloads, segments: true }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}
