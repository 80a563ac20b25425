//! The TAP port: a network interface of the kernel, one system call a packet.
//!
//! The kernel puts a virtio-net header of 12 bytes in front of each packet. It is read into the packet's headroom, so
//! that the packet itself lies where packets lie; offloads are switched off, so the header has nothing to say. An
//! interface that the port made goes away with the port; one that was there before (`ip tuntap add`) stays.

mod interface;

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offcore_mem::{Burst, HEADROOM, Packet, Pool};
use offcore_stats::Stage;
use offcore_wire::ethernet::{self, MacAddr};
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::slots::Slots;
use crate::spec::TapSpec;
use crate::{
    Context, Drop, Port, PortError, QueueSetup, RxCounters, RxQueue, TxCounters, TxQueue, room, virtio_header,
};

use interface::{Interface, Link};

/// Bytes of a VLAN tag, which the MTU does not count.
const VLAN_TAG: usize = 4;
/// Where a packet is read to: its header in front of where packets begin.
const HEADER_AT: usize = HEADROOM - HEADER_LEN;

/// A TAP port.
#[derive(Debug)]
pub struct TapPort {
    name: String,
    interface: Interface,
    mac: MacAddr,
    mtu: usize,
    files: Vec<Arc<OwnedFd>>,
    slots: Slots,
    gone: Arc<AtomicBool>,
}

impl TapPort {
    /// Makes the interface (or joins the one of that name) in the calling thread's network namespace and sets its link
    /// up. Packets will be chunks of `pool`.
    ///
    /// # Errors
    /// What the kernel refused and what to do about it; an MTU that packet buffers have no room for.
    pub fn open(spec: &TapSpec, pool: &Pool) -> Result<Self, PortError> {
        let name = spec.to_string();
        let fail = |what: String, source| PortError::System { port: name.clone(), what, source };
        let (interface, files) =
            Interface::open(&spec.name, spec.queues).map_err(|(what, e)| fail(what, e))?;
        let ask = |what: &str| format!("asking for the {what} of '{}'", interface.name);
        let mtu = interface.mtu().map_err(|e| fail(ask("MTU"), e))?;
        let mac = interface.mac().map_err(|e| fail(ask("address"), e))?;
        let longest = mtu + ethernet::HEADER_LEN + VLAN_TAG;
        if longest >= pool.data_room() {
            let reason = format!(
                "interface '{}' has MTU {mtu}, so packets of up to {longest} bytes, expected less than the {} bytes of \
                 a packet buffer: lower the MTU, or use larger packet buffers",
                interface.name,
                pool.data_room()
            );
            return Err(PortError::Other { port: name, reason });
        }
        Ok(Self {
            name,
            interface,
            mac,
            mtu,
            files: files.into_iter().map(Arc::new).collect(),
            slots: Slots::new(spec.queues),
            gone: Arc::default(),
        })
    }

    /// The interface's name: the one asked for, unless that was a pattern such as `tap%d`.
    pub fn interface(&self) -> &str {
        &self.interface.name
    }

    /// The interface's MTU in bytes when the port was opened.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    fn queue(&self, index: u16) -> Queue {
        Queue { file: Arc::clone(&self.files[usize::from(index)]), gone: Arc::clone(&self.gone) }
    }
}

impl Port for TapPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn mac(&self) -> MacAddr {
        self.mac
    }

    fn queues(&self) -> u16 {
        self.slots.queues()
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        self.slots.take_rx(index, &self.name)?;
        let counters = RxCounters::new(setup.stats, setup.port, index)?;
        Ok(Box::new(TapRx { queue: self.queue(index), counters }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        self.slots.take_tx(index, &self.name)?;
        let counters = TxCounters::new(setup.stats, setup.port, index)?;
        Ok(Box::new(TapTx { queue: self.queue(index), counters }))
    }

    fn status(&self) -> String {
        let link = match self.interface.link() {
            _ if self.gone.load(Ordering::Relaxed) => "was deleted",
            Link::Up => "is up",
            Link::Down => "is down",
            Link::Gone => "is gone (deleted, renamed, or in another network namespace)",
        };
        format!("interface {} {link}, MTU {}, address {}", self.interface.name, self.mtu, self.mac)
    }
}

/// A queue's file, which both halves use.
#[derive(Debug)]
struct Queue {
    file: Arc<OwnedFd>,
    gone: Arc<AtomicBool>,
}

impl Queue {
    /// Notes an error that says that the interface was deleted.
    #[cold]
    fn note(&self, error: Errno) {
        if error == Errno::BADFD {
            self.gone.store(true, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct TapRx {
    queue: Queue,
    counters: RxCounters,
}

impl TapRx {
    /// Reads one packet into `packet`; `None` when none is waiting.
    #[inline]
    fn receive(&self, packet: &mut Packet, pool: &Pool) -> Option<Result<(), Drop>> {
        packet.set_range(pool, HEADER_AT, HEADER_LEN + pool.data_room());
        let room = packet.len();
        let read = match rustix::io::read(&self.queue.file, packet.bytes_mut()) {
            Ok(read) => read,
            Err(Errno::AGAIN) => return None,
            Err(error) => {
                self.queue.note(error);
                return None;
            }
        };
        // The kernel cuts what does not fit and does not say so. The port's MTU leaves room to spare, so a packet that
        // fills the buffer was cut: the MTU has been raised since.
        if read >= room {
            return Some(Err(Drop::TooBig));
        }
        let Some(header) = packet.bytes().first_chunk::<HEADER_LEN>().map(NetHeader::from_bytes) else {
            return Some(Err(Drop::Malformed));
        };
        packet.set_range(pool, HEADROOM, read.saturating_sub(HEADER_LEN));
        Some(if virtio_header::apply(header, packet) { Ok(()) } else { Err(Drop::Malformed) })
    }

    /// Whether a packet is waiting, for when there is no buffer to read it to.
    #[cold]
    fn is_waiting(&self) -> bool {
        let mut file = [PollFd::new(&self.queue.file, PollFlags::IN)];
        rustix::event::poll(&mut file, Some(&Timespec::default())).is_ok()
            && file[0].revents().contains(PollFlags::IN)
    }
}

impl RxQueue for TapRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let (pool, wanted) = (ctx.cache.pool(), room(ctx, burst));
        let (mut packets, mut bytes) = (0, 0);
        while packets < wanted {
            let Some(mut packet) = ctx.cache.take() else {
                self.counters.starved(self.is_waiting().into());
                break;
            };
            match self.receive(&mut packet, pool) {
                Some(Ok(())) => {
                    (packets, bytes) = (packets + 1, bytes + packet.len() as u64);
                    burst.push(packet);
                    continue;
                }
                Some(Err(reason)) => self.counters.drop(reason, 1),
                None => {
                    ctx.cache.free(packet);
                    break;
                }
            }
            ctx.cache.free(packet);
        }
        if packets > 0 {
            self.counters.add(packets as u64, bytes);
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }
}

#[derive(Debug)]
struct TapTx {
    queue: Queue,
    counters: TxCounters,
}

impl TxQueue for TapTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        /// An ordinary packet.
        static HEADER: [u8; HEADER_LEN] = [0; HEADER_LEN];
        if burst.is_empty() {
            return;
        }
        let (mut taken, mut packets, mut bytes) = (0, 0, 0);
        for packet in burst.iter() {
            let frame = packet.bytes();
            match rustix::io::writev(&self.queue.file, &[IoSlice::new(&HEADER), IoSlice::new(frame)]) {
                Ok(_) => (packets, bytes) = (packets + 1, bytes + frame.len() as u64),
                // No memory for it now: it stays in the burst, with those behind it.
                Err(Errno::AGAIN | Errno::NOBUFS) => break,
                // The link is down, or the interface was deleted: so it is for the others.
                Err(error @ (Errno::IO | Errno::BADFD)) => {
                    self.queue.note(error);
                    let rest = burst.len() - taken;
                    self.counters.drop(Drop::Down, rest as u64);
                    taken = burst.len();
                    break;
                }
                Err(_) => self.counters.drop(Drop::Failed, 1),
            }
            taken += 1;
        }
        self.counters.add(packets, bytes);
        ctx.cache.free_all(burst.drain(..taken));
        ctx.clock.lap(Stage::Tx);
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}
