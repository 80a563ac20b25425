//! A guest that causes the back end as much work as possible.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::device::Direction;
use offcore_ring::driver::RingDriver;
use offcore_stats::named;
use offcore_vhost::features::{
    NET_HEADER, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_MRG_RXBUF,
};
use offcore_vhost::{FrontEnd, FrontEndConfig, MemoryFd};
use offcore_wire::UdpFlow;
use offcore_wire::template::UdpTemplate;
use offcore_wire::virtio_net::{NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4};
use rustix::fs::FallocateFlags;

use crate::guests::guest::{GUEST_MAC, PORT_MAC};

named! {
    /// Attacks of a bad guest.
    pub enum Attack {
        /// Packets of 64 KiB that have to be cut into 255 segments each, because the receiver, the guest itself, does
        /// not accept large packets.
        Segments = "segments",
        /// RX chains of 64 descriptors of 2 bytes.
        Chains = "chains",
        /// Packets of 60,000 bytes.
        Large = "large",
        /// The same from memory into which holes are punched every millisecond.
        Holes = "holes",
        /// Short packets, each in a page of 2 MiB. Holes are punched at the same rate, so that the kernel repeatedly
        /// clears such pages.
        Hugepages = "hugepages",
    }
}

/// Number of descriptors of a virtqueue: the size of 64 chains of 64.
const RING: u16 = 4096;
const CHAIN: usize = 64;
const LARGE: usize = 60_000;
/// Interval between two holes.
const PAUSE: Duration = Duration::from_millis(1);
/// End of the TCP header: Ethernet, IPv4 and TCP without options.
const TCP_END: usize = 54;

impl Attack {
    /// Returns the number of buffers per direction and their distance in bytes.
    fn buffers(self) -> (u32, usize) {
        if self == Self::Hugepages { (16, 2 << 20) } else { (64, 128 << 10) }
    }

    /// Returns the size of the memory in bytes.
    fn memory(self) -> usize {
        let (buffers, stride) = self.buffers();
        2 * buffers as usize * stride
    }

    fn pages(self) -> Hugepages {
        if self == Self::Hugepages { Hugepages::Size2M } else { Hugepages::None }
    }

    /// Returns whether the pages it needs are available.
    pub(super) fn is_possible(self) -> bool {
        Mapping::memfd("bench-bad-guest", self.memory(), self.pages()).is_ok()
    }
}

/// A connected guest that attacks whenever it is stepped.
#[derive(Debug)]
pub(super) struct BadGuest {
    attack: Attack,
    memory: Arc<GuestMemory>,
    rx: RingDriver<u32>,
    tx: RingDriver<u32>,
    /// Length of each sent packet in bytes, including the virtio-net header.
    len: u32,
    /// Number of packets that came back.
    received: u64,
    puncher: Option<Puncher>,
    _front_end: FrontEnd,
}

impl BadGuest {
    /// Connects to the back end at `socket` and starts the virtqueues. Sends nothing yet.
    pub(super) fn connect(socket: &Path, attack: Attack) -> Result<Self> {
        let len = attack.memory();
        let (mapping, fd) = Mapping::memfd("bench-bad-guest", len, attack.pages())?;
        let base = mapping.base().as_ptr() as u64;
        let region = GuestRegion::new(base, base, len as u64, mapping, 0)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        let features = match attack {
            Attack::Segments => VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_TSO4,
            Attack::Chains | Attack::Hugepages => 0,
            Attack::Large | Attack::Holes => VIRTIO_NET_F_MRG_RXBUF,
        };
        let config = FrontEndConfig { queue_size: RING, features, ..FrontEndConfig::new(socket) };
        let shared = MemoryFd::new(memory.regions()[0].mapping(), fd.as_fd());
        let mut front_end = FrontEnd::connect(&config, &[shared]).context("connecting the bad guest")?;
        let queue = |index: usize| -> Result<RingDriver<u32>> {
            let queue = front_end.queues().get(index).context("expected two virtqueues")?;
            let mut queue = RingDriver::new(queue.layout(), false);
            queue.set_notification(false);
            Ok(queue)
        };
        let (rx, tx) = (queue(0)?, queue(1)?);
        front_end.start().context("starting the bad guest's virtqueues")?;
        let punches = matches!(attack, Attack::Holes | Attack::Hugepages);
        let puncher = punches.then(|| Puncher::start(fd, len)).transpose()?;
        let mut guest = Self { attack, memory, rx, tx, len: 0, received: 0, puncher, _front_end: front_end };
        guest.prepare()?;
        Ok(guest)
    }

    fn address(&self, buffer: u32) -> usize {
        buffer as usize * self.attack.buffers().1
    }

    fn mapping(&self) -> &Mapping {
        self.memory.regions()[0].mapping()
    }

    /// Fills the TX buffers and makes the RX buffers available.
    fn prepare(&mut self) -> Result<()> {
        let packet = packet(self.attack)?;
        self.len = packet.len() as u32;
        let (buffers, _) = self.attack.buffers();
        for buffer in 0..buffers {
            self.mapping().write_at(self.address(buffer), &packet);
        }
        (buffers..2 * buffers).for_each(|buffer| self.post(buffer));
        self.rx.publish();
        Ok(())
    }

    /// Makes an RX buffer available.
    fn post(&mut self, buffer: u32) {
        let at = self.mapping().base().as_ptr() as u64 + self.address(buffer) as u64;
        // The ring has room for all of them.
        let _ = match self.attack {
            Attack::Chains => {
                let chain: [(u64, u32); CHAIN] = std::array::from_fn(|i| (at + i as u64 * 64, 2));
                self.rx.add_chain(&chain, Direction::Writable, buffer)
            }
            Attack::Segments | Attack::Hugepages => self.rx.add(at, 2048, Direction::Writable, buffer),
            Attack::Large | Attack::Holes => {
                self.rx.add(at, self.attack.buffers().1 as u32, Direction::Writable, buffer)
            }
        };
    }

    /// Supplies the back end with packets and buffers.
    pub(super) fn step(&mut self) -> Result<()> {
        if let Some(puncher) = &self.puncher {
            puncher.active.store(true, Ordering::Relaxed);
        }
        while self.rx.used()? > 0 {
            let Some(used) = self.rx.pop()? else { break };
            self.received += 1;
            self.post(used.token);
        }
        self.rx.publish();
        self.tx.used()?;
        while self.tx.pop()?.is_some() {}
        let base = self.mapping().base().as_ptr() as u64;
        for buffer in self.tx.in_flight().into()..self.attack.buffers().0 {
            let _ = self.tx.add(base + self.address(buffer) as u64, self.len, Direction::Readable, buffer);
        }
        self.tx.publish();
        Ok(())
    }

    /// Returns the number of packets that came back. It shows that the back end did the work.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Pauses the attack until the next step.
    pub(super) fn rest(&self) {
        if let Some(puncher) = &self.puncher {
            puncher.active.store(false, Ordering::Relaxed);
        }
    }
}

/// Returns the packet to send: virtio-net header and frame.
fn packet(attack: Attack) -> Result<Vec<u8>> {
    let frame_len = match attack {
        Attack::Chains | Attack::Hugepages => 60,
        Attack::Segments => TCP_END + 255 * 254,
        Attack::Large | Attack::Holes => LARGE,
    };
    let mut packet = vec![0; NET_HEADER + frame_len];
    if attack == Attack::Segments {
        let header = NetHeader {
            flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
            gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
            hdr_len: TCP_END as u16,
            gso_size: 254,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        };
        packet[..NET_HEADER].copy_from_slice(&header.to_bytes());
    }
    // Start from the headers of a short UDP packet. For TCP, the protocol and length fields are overwritten.
    let frame = &mut packet[NET_HEADER..];
    UdpTemplate::new(&UdpFlow::txonly(GUEST_MAC, PORT_MAC), 60)?.write(&mut frame[..60])?;
    if attack == Attack::Segments {
        let total = ((frame_len - 14) as u16).to_be_bytes();
        (frame[16], frame[17], frame[23]) = (total[0], total[1], 6);
        frame[34..TCP_END].fill(0);
        (frame[46], frame[47]) = (5 << 4, 0x10);
    }
    Ok(packet)
}

/// A thread that punches holes into a file.
#[derive(Debug)]
struct Puncher {
    active: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Puncher {
    fn start(fd: OwnedFd, len: usize) -> Result<Self> {
        let (active, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let flags = [Arc::clone(&active), Arc::clone(&stop)];
        let punch = move || {
            let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            while !flags[1].load(Ordering::Relaxed) {
                if flags[0].load(Ordering::Relaxed) {
                    let _ = rustix::fs::fallocate(&fd, holes, 0, len as u64);
                }
                // The thread runs on the honest guest's core and has to leave time for it.
                std::thread::sleep(PAUSE);
            }
        };
        let thread = std::thread::Builder::new().name("bench-puncher".into()).spawn(punch)?;
        Ok(Self { active, stop, thread: Some(thread) })
    }
}

impl Drop for Puncher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
