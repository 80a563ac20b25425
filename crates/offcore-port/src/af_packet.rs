//! The af_packet port: an interface of the kernel, accessed through packet sockets with any driver.
//!
//! Each queue has a socket that receives into a ring shared with the kernel, and another socket that sends from such a
//! ring: receiving takes no system call, sending takes one per burst. With several queues, the kernel's fanout
//! distributes received packets among them. Packets have the kernel's virtio-net header in front, so that TCP between
//! the kernel behind the interface and a guest uses packets of up to 64 KiB without computing checksums. Such packets
//! do not fit into a slot and bypass the ring.
//!
//! Received packets are also passed to the host's network stack, so an interface used by a port should have no address.
//!
//! The interface's configuration is not changed; promiscuous mode ends with the sockets. While the interface is
//! missing, down, or without a carrier, packets to send are dropped and counted. An interface that is recreated under
//! the same name gets new sockets. They belong to the network namespace of the thread that calls [`Port::tend`], which
//! must be in the same namespace as the thread that opened the port.

mod header;
mod long;
mod ring;
mod rx;
mod socket;
mod tx;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use offcore_mem::Pool;
use offcore_wire::ethernet::{self};
use offcore_wire::virtio_net::Offloads;

use crate::base::PortBase;
use crate::base::cell::{Cell, End};
use crate::netdev::{self, Link, NetDev, advice};
use crate::spec::AfPacketSpec;
use crate::{Port, PortError, QueueSetup, RxQueue, TxQueue};

use ring::{Direction, Ring};
use rx::AfPacketRx;
use socket::Refusal;
use tx::{AfPacketTx, Sender};

/// Bytes of a frame other than its payload: header and two VLAN tags.
const FRAME_OVERHEAD: usize = ethernet::HEADER_LEN + 2 * header::TAG;

/// Time between two attempts to set up sockets after a failure.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(200);

/// State that the control thread shares with the sending queues.
#[derive(Debug, Default)]
struct State {
    /// Whether packets can be sent.
    is_up: AtomicBool,
    /// Longest payload of a frame in bytes.
    mtu: AtomicUsize,
}

/// An af_packet port.
#[derive(Debug)]
pub struct AfPacketPort {
    base: PortBase,
    spec: AfPacketSpec,
    netdev: NetDev,
    pool: &'static Pool,
    state: Arc<State>,
    rx: Vec<Arc<Cell<Ring>>>,
    tx: Vec<Arc<Cell<Sender>>>,
    /// The fanout group that further receiving queues join.
    group: Option<libc::c_int>,
    link: Link,
    /// Whether the queues have sockets of the present interface.
    connected: bool,
    /// A copy of a socket, used to detect that their interface was deleted.
    witness: Option<OwnedFd>,
    /// Why the queues have no sockets, and when the last attempt was made.
    refusal: Option<String>,
    tried: Instant,
    /// Number of times that the link was lost and that the interface was recreated.
    lost: u64,
    renewed: u64,
}

impl AfPacketPort {
    /// Opens the interface in the calling thread's network namespace. The interface may be down; packets are received
    /// once it is up.
    ///
    /// # Errors
    /// An interface that does not exist, is not an Ethernet interface, or may not be opened; other errors of the
    /// kernel. Each error says what to do about it.
    pub fn open(spec: &AfPacketSpec, pool: &'static Pool) -> Result<Self, PortError> {
        let name = spec.to_string();
        let fail = |what: String, source| PortError::System { port: name.clone(), what, source };
        let netdev = NetDev::open(&spec.name).map_err(|source| fail(advice(&spec.name, &source), source))?;
        let ask = |what: &str| format!("asking for the {what} of '{}'", spec.name);
        if !netdev.is_ethernet().map_err(|source| fail(ask("kind"), source))? {
            let reason =
                format!("interface '{}' carries no Ethernet frames, expected one that does", spec.name);
            return Err(PortError::Other { port: name, reason });
        }
        let mtu = netdev.mtu().map_err(|source| fail(ask("MTU"), source))?;
        let mac = netdev.mac().map_err(|source| fail(ask("address"), source))?;
        let cells = 0..spec.queues;
        let mut port = Self {
            base: PortBase::new(name.clone(), mac, spec.queues),
            spec: spec.clone(),
            pool,
            state: Arc::new(State { is_up: AtomicBool::new(false), mtu: AtomicUsize::new(mtu) }),
            rx: cells.clone().map(|_| Arc::new(Cell::new())).collect(),
            tx: cells.map(|_| Arc::new(Cell::new())).collect(),
            group: None,
            link: netdev.link(),
            netdev,
            connected: false,
            witness: None,
            refusal: None,
            tried: Instant::now(),
            lost: 0,
            renewed: 0,
        };
        match port.connect() {
            Ok(()) => port.publish_link(),
            Err(refusal) if refusal.wants_link && port.link == Link::Down => port.note(&refusal),
            Err(Refusal { what, source, .. }) => return Err(fail(what, source)),
        }
        Ok(port)
    }

    /// Sets up sockets of the present interface for every queue in use, and always for the first queue, so that errors
    /// are detected at once.
    fn connect(&mut self) -> Result<(), Refusal> {
        self.group = None;
        let (mut receivers, mut senders) = (Vec::new(), Vec::new());
        for queue in 0..self.rx.len() {
            if queue == 0 || self.base.rx[queue] {
                receivers.push((queue, self.receiver(queue)?));
            }
            if queue == 0 || self.base.tx[queue] {
                senders.push((queue, self.sender()?));
            }
        }
        let witness = senders.first().map(|(_, first)| first.beside.try_clone()).transpose();
        self.witness = witness.map_err(|source| Refusal::new("copying a descriptor", source))?;
        // Sockets are handed to the queues only after all have been set up.
        receivers.into_iter().for_each(|(queue, ring)| self.rx[queue].publish(Some(ring)));
        senders.into_iter().for_each(|(queue, sender)| self.tx[queue].publish(Some(sender)));
        (self.connected, self.refusal) = (true, None);
        Ok(())
    }

    /// Length of the frames that slots must have room for.
    fn frame(&self) -> usize {
        self.state.mtu.load(Ordering::Relaxed) + FRAME_OVERHEAD
    }

    /// A queue that is not polled gets no socket: the kernel would give it a share of the packets.
    fn receiver(&mut self, queue: usize) -> Result<Ring, Refusal> {
        let (index, spec) = (self.netdev.index(), &self.spec);
        let socket = socket::open()?;
        socket::set_up_rx(&socket)?;
        let ring = Ring::new(socket, Direction::Rx, spec.slots, self.frame())?;
        if spec.promisc && queue == 0 {
            socket::promiscuous(&ring.socket, index)?;
        }
        if self.group.is_some() {
            // Before it has joined the group, the socket would receive copies of the other queues' packets.
            socket::block_packets(&ring.socket)?;
        }
        socket::bind(&ring.socket, index, true)?;
        match self.group {
            _ if spec.queues == 1 => {}
            None => self.group = Some(socket::found_group(&ring.socket, spec.fanout)?),
            Some(group) => {
                socket::join_group(&ring.socket, group)?;
                socket::unblock_packets(&ring.socket)?;
            }
        }
        Ok(ring)
    }

    fn sender(&self) -> Result<Sender, Refusal> {
        let (index, spec) = (self.netdev.index(), &self.spec);
        let [through, beside] = [socket::open()?, socket::open()?];
        socket::set_up_tx(&through, spec.qdisc_bypass)?;
        socket::set_up_tx(&beside, spec.qdisc_bypass)?;
        let ring = Ring::new(through, Direction::Tx, spec.slots, self.frame())?;
        for socket in [&ring.socket, &beside] {
            socket::bind(socket, index, false)?;
        }
        Ok(Sender { ring, beside })
    }

    /// Returns whether a queue needs sockets when it is taken: the first queue already has them, and all queues get
    /// theirs when the interface is connected.
    fn joins(&self, queue: usize) -> bool {
        queue != 0 && self.connected
    }

    fn refused(&self, Refusal { what, source, .. }: Refusal) -> PortError {
        PortError::System { port: self.base.name.clone(), what, source }
    }

    /// The interface was deleted or renamed. Closes its sockets, which also ends promiscuous mode.
    fn release_sockets(&mut self) {
        if self.connected {
            (self.connected, self.witness) = (false, None);
            self.rx.iter().for_each(|cell| cell.publish(None));
            self.tx.iter().for_each(|cell| cell.publish(None));
        }
        self.publish_link();
    }

    fn note(&mut self, Refusal { what, source, .. }: &Refusal) {
        self.refusal = Some(format!("{what}: {source}"));
    }

    /// Tells the queues whether packets can be sent.
    fn publish_link(&self) {
        self.state.is_up.store(self.link == Link::Up && self.connected, Ordering::Relaxed);
    }

    /// The kernel's offloads for sent packets. With `qdisc_bypass` it does not segment. UDP
    /// segmentation needs Linux 6.2.
    fn offloads(&self) -> Offloads {
        if self.spec.qdisc_bypass {
            Offloads { checksum: true, ..Offloads::default() }
        } else {
            Offloads { uso: netdev::kernel_is_at_least(6, 2), ..Offloads::ALL }
        }
    }
}

impl Port for AfPacketPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        let queue = usize::from(index);
        if self.joins(queue) {
            let ring = self.receiver(queue).map_err(|refusal| self.refused(refusal))?;
            self.rx[queue].publish(Some(ring));
        }
        let end = End::new(Arc::clone(&self.rx[queue]));
        Ok(Box::new(AfPacketRx::new(end, counters)))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        let queue = usize::from(index);
        if self.joins(queue) {
            let sender = self.sender().map_err(|refusal| self.refused(refusal))?;
            self.tx[queue].publish(Some(sender));
        }
        let end = End::new(Arc::clone(&self.tx[queue]));
        let state = Arc::clone(&self.state);
        Ok(Box::new(AfPacketTx::new(end, state, self.pool, self.offloads(), counters)))
    }

    fn tend(&mut self) {
        self.rx.iter().for_each(|cell| cell.close_retired());
        self.tx.iter().for_each(|cell| cell.close_retired());
        let before = self.link;
        self.link = self.netdev.link();
        // A recreated interface may have the same index as its predecessor.
        if self.connected && self.witness.as_ref().is_some_and(socket::is_device_deleted) {
            self.link = Link::Gone;
        }
        if self.link != Link::Up && before == Link::Up {
            self.lost += 1;
        }
        if self.link == Link::Gone {
            self.release_sockets();
            if self.netdev.reopen().is_err() {
                return;
            }
            self.renewed += 1;
            self.link = self.netdev.link();
            self.base.mac = self.netdev.mac().unwrap_or(self.base.mac);
        }
        if let Ok(mtu) = self.netdev.mtu() {
            self.state.mtu.store(mtu, Ordering::Relaxed);
        }
        // Each attempt creates all rings again, so attempts are rate-limited.
        if !self.connected && (self.link != before || self.tried.elapsed() >= BETWEEN_ATTEMPTS) {
            self.tried = Instant::now();
            if let Err(refusal) = self.connect() {
                self.note(&refusal);
            }
        }
        self.publish_link();
    }

    fn mtu(&self) -> Option<usize> {
        Some(self.state.mtu.load(Ordering::Relaxed))
    }

    fn status(&self) -> String {
        let Self { base, link, lost, renewed, spec, .. } = self;
        let mtu = self.state.mtu.load(Ordering::Relaxed);
        let mut text = format!("interface {} {link}, MTU {mtu}, address {}", spec.name, base.mac);
        if *lost > 0 {
            text += &format!(", link lost {lost} times");
        }
        if *renewed > 0 {
            text += &format!(", interface re-created {renewed} times");
        }
        if let Some(refusal) = &self.refusal {
            text += &format!(", not in use ({refusal})");
        }
        text
    }
}
