//! A TCP/IP host on all ports: each worker has a stack with an interface for each port, and an application.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offcore_dma::Binding;
use offcore_mem::BURST;
use offcore_port::netdev::NetDev;
use offcore_port::{QueueSetup, TxQueue};
use offcore_stats::Label;
use offcore_stats::time::Time;
use offcore_tcp::path::Path;
use offcore_tcp::proto::{Config, IfaceConfig, Out, Share, Stack};

use super::config::{HostIface, Hosting};
use super::mtu::HostMtu;
use super::{Assembly, Route};
use crate::engines::dma_map::QueueHalf;
use crate::error::{Field, SwitchError};
use crate::host::apps::Hosted;
use crate::host::apps::epping::Epping;
use crate::host::serve::{Serve, TCP_SERVE};
use crate::host::spread::{RelayTx, Rings, Spread, Takes, Unfinished};
use crate::host::watched::Watched;
use crate::host::{App, Host, HostPort};
use crate::ring::{RingRx, RingSetup, RingTx, ring};
use crate::worker::idle::Idle;

/// Minimum bytes of headers before a segment's payload.
const HEADERS: usize = 40;
/// The same, with timestamps.
const TIMED_HEADERS: u16 = 52;
/// Bytes of FIFO memory in a stack without connections.
const OWN_MEMORY: usize = 1 << 20;
/// Maximum packets in a ring between two workers. All rings together hold at most 1/`RING_SHARE` of the pool.
const RING: usize = 1024;
const RING_SHARE: usize = 4;

impl Hosting {
    /// Refuses invalid configurations.
    pub(super) fn check(&self, ports: usize, lcores: usize) -> Result<(), SwitchError> {
        if matches!(self.app, Hosted::Others(_)) && lcores > 1 {
            return Field::Lcores.refuse(format!(
                "{lcores} of them, expected one: applications in other processes are served by one lcore"
            ));
        }
        if self.ifaces.len() != ports {
            return Field::Addresses.refuse(format!("{} interfaces for {ports} ports", self.ifaces.len()));
        }
        if lcores > 1 && self.ifaces.iter().any(HostIface::is_configured) {
            return Field::Lcores
                .refuse(format!("{lcores} of them, expected one with addr=dhcp or addr=slaac"));
        }
        match self.ifaces.iter().position(|iface| iface.addresses.is_empty() && !iface.is_configured()) {
            Some(port) => Field::Addresses.refuse(format!("port {port} has none, expected one at least")),
            None => Ok(()),
        }
    }

    /// Returns the configuration of one worker's stack.
    fn config(&self, secret: [u8; 16], share: Share) -> Config {
        let mut config = Config { secret, share, algorithm: self.congestion, ..Config::default() };
        if let Hosted::Others(_) = &self.app {
            // Each application has separate memory. The stack's memory is not used.
            config.memory = OWN_MEMORY;
        }
        if let Hosted::Epping(epping) = &self.app {
            config.largest_segment = epping.segment.unwrap_or(u16::MAX);
            // A chunk and the next one, within the limits of a FIFO.
            let chunks = u32::try_from(2 * epping.chunk).unwrap_or(u32::MAX);
            config.send_buffer = config.send_buffer.max(chunks).min(config.largest_buffer);
        }
        config
    }
}

/// Refuses segments longer than the MTU of an interface.
fn check_segment(segment: Option<u16>, mtus: &[HostMtu]) -> Result<(), SwitchError> {
    let Some(segment) = segment else { return Ok(()) };
    let wanted = segment.saturating_add(TIMED_HEADERS);
    let mtus = mtus.iter().map(|mtu| mtu.shared().load(Ordering::Relaxed)).enumerate();
    match mtus.into_iter().find(|(_, mtu)| *mtu < wanted) {
        Some((port, mtu)) => Field::Segment
            .refuse(format!("{segment}: the MTU of port {port} is {mtu}, expected {wanted} or more")),
        None => Ok(()),
    }
}

/// Returns routes for the copies of each worker's stack. These are bound like a queue of port 0 with the worker's
/// number.
pub(super) fn routes(workers: usize) -> Vec<Route> {
    let route = |worker| Route { worker, sender: worker, rx_port: 0, tx_port: 0, queue: worker as u16 };
    (0..workers).map(route).collect()
}

/// Returns 16 unpredictable bytes from the operating system, through the keys of std's hash tables.
fn secret() -> [u8; 16] {
    let half = || RandomState::new().hash_one(0u8);
    (u128::from(half()) << 64 | u128::from(half())).to_ne_bytes()
}

impl Assembly<'_> {
    /// Adds a host to all workers. Returns the state for the control thread: the MTU of each interface.
    pub(super) fn add_host(&mut self, hosting: &Hosting) -> Result<Vec<HostMtu>, SwitchError> {
        let workers = self.config.lcores.len();
        let secret = secret();
        let unfinished = Arc::new(AtomicUsize::new(workers));
        let mut ports: Vec<Vec<HostPort>> = (0..workers).map(|_| Vec::new()).collect();
        for port in 0..hosting.ifaces.len() {
            for (ports, port) in ports.iter_mut().zip(self.host_port(port)?) {
                ports.push(port);
            }
        }
        let ifaces = hosting.ifaces.iter().zip(&self.ports).enumerate();
        let mtus: Vec<_> = ifaces.map(|(port, (iface, of))| HostMtu::new(port, iface, &**of)).collect();
        if let Hosted::Epping(epping) = &hosting.app {
            check_segment(epping.segment, &mtus)?;
        }
        for (worker, ports) in ports.into_iter().enumerate() {
            let share = Share { worker: worker as u32, of: workers as u32 };
            let config = hosting.config(secret, share);
            self.add_host_worker(hosting, worker, config, ports, &mtus, Arc::clone(&unfinished))?;
        }
        Ok(mtus)
    }

    /// Adds one worker's stack, with its part of the ports.
    fn add_host_worker(
        &mut self,
        hosting: &Hosting,
        worker: usize,
        config: Config,
        ports: Vec<HostPort>,
        mtus: &[HostMtu],
        unfinished: Unfinished,
    ) -> Result<(), SwitchError> {
        let mut stack = Stack::new(config).or_else(|error| Field::Pool.refuse(error.to_string()))?;
        let mut out = Out::default();
        let room = self.pool.data_room();
        let mut following = Vec::new();
        for (((iface, port), of), mtu) in hosting.ifaces.iter().zip(&ports).zip(&self.ports).zip(mtus) {
            // If the port accepts no segmented packets, a segment's payload must be in one buffer.
            let longest = if port.tx.accepts().segments { None } else { u16::try_from(room + HEADERS).ok() };
            let longest = longest.unwrap_or(u16::MAX);
            following.push((mtu.shared(), longest));
            let config = IfaceConfig {
                mac: iface.mac.unwrap_or(of.mac()),
                mtu: mtu.shared().load(Ordering::Relaxed).min(longest),
                addresses: iface.addresses.clone(),
                routes: iface.routes.clone(),
            };
            let number = stack.add_iface(Time::from_micros(1), &config, &mut out);
            if let Some(index) = index_of(of.name()) {
                stack.set_index(number, index);
            }
            stack.detect_conflicts(Time::from_micros(1), number);
            if iface.dhcp {
                stack.start_dhcp(Time::from_micros(1), number);
            }
            if iface.slaac {
                stack.start_slaac(Time::from_micros(1), number, &mut out);
            }
        }
        let rx = self.binding(worker, 0, QueueHalf::Rx, worker as u16)?;
        let tx = self.binding(worker, 0, QueueHalf::Tx, worker as u16)?;
        let mover = &mut self.workers[worker].0.mover;
        let mut path = Path::new(stack, out, mover, self.pool);
        let (app, tx): (Box<dyn App>, _) = match &hosting.app {
            Hosted::Service(service, port) => {
                (service.open(*port).or_else(|error| Field::Service.refuse(error.to_string()))?, tx)
            }
            Hosted::Others(config) => {
                path.add_loopback();
                let lcore = self.config.lcores[worker];
                let stats = self.page.block(&TCP_SERVE, &[(Label::Lcore, &lcore)])?;
                let serve = Serve::open(config.clone(), stats);
                (Box::new(serve.or_else(|error| Field::Serve.refuse(error.to_string()))?), tx)
            }
            Hosted::Epping(config) => {
                let core = Binding::core();
                let writes = if config.offload_writes { &tx } else { &core };
                let app = Epping::new(config.clone(), mover, writes);
                let app = app.or_else(|error| Field::Service.refuse(error.to_string()))?;
                (Box::new(app), if config.offload_segments { tx } else { core })
            }
        };
        path.bind(mover, &rx, &tx).or_else(|error| Field::Dma.refuse(error.to_string()))?;
        let state = Arc::clone(&self.host_state);
        let watched = Watched::new(&self.page, self.config.lcores[worker], state, worker)?;
        let vlans = hosting.ifaces.iter().map(|iface| iface.vlan).collect();
        let host = Host::new(path, ports, app).or_else(|error| match &hosting.app {
            Hosted::Service(..) | Hosted::Others(_) => Field::Service.refuse(error.to_string()),
            Hosted::Epping(config) => Field::Receiver.refuse(format!(
                "{}: {error}: expected an address in a network of a port's addr=, or behind its gw=",
                config.to
            )),
        })?;
        self.workers[worker]
            .0
            .tasks
            .push(Box::new(host.watched(watched).following(following).tagged(vlans).beside(unfinished)));
        Ok(())
    }

    /// Returns each worker's part of a port: queues, assigned round-robin, and rings.
    fn host_port(&mut self, port: usize) -> Result<Vec<HostPort>, SwitchError> {
        let workers = self.config.lcores.len();
        let queues = usize::from(self.ports[port].queues());
        let name = self.config.names.of(port);
        let mut senders = self.senders(port, queues.min(workers))?;
        self.mesh(port, &mut senders)?;
        let mut parts = Vec::new();
        for (worker, Sender { tx, takes, rings }) in senders.into_iter().enumerate() {
            let mut rx = Vec::new();
            for queue in (worker..queues).step_by(workers) {
                let (stats, mover) = (&self.page, &mut self.workers[worker].0.mover);
                // The core makes the copies of the port itself.
                let setup = QueueSetup { mover, stats, binding: Binding::core(), port: &name };
                rx.push(self.ports[port].rx_queue(queue as u16, setup)?);
            }
            let spread = (workers > 1).then(|| Spread::new(rings, takes));
            parts.push(HostPort { rx, tx, spread });
        }
        Ok(parts)
    }

    /// Returns each worker's sender for a port: a queue, while queues are left, otherwise a ring to a worker with a
    /// queue.
    fn senders(&mut self, port: usize, queues: usize) -> Result<Vec<Sender>, SwitchError> {
        let name = self.config.names.of(port);
        let mut senders: Vec<Sender> = Vec::new();
        for worker in 0..self.config.lcores.len() {
            if worker < queues {
                let (stats, mover) = (&self.page, &mut self.workers[worker].0.mover);
                let setup = QueueSetup { mover, stats, binding: Binding::core(), port: &name };
                let tx = self.ports[port].tx_queue(worker as u16, setup)?;
                let takes = Arc::new(Takes::default());
                takes.set(tx.accepts());
                senders.push(Sender { tx, takes, rings: Rings::default() });
            } else {
                let name = format!("lcore{}>{}", self.config.lcores[worker], self.config.names.of(port));
                let (ring, rx) = self.host_ring(&name, 0)?;
                let by = &mut senders[worker % queues];
                by.rings.relayed.push(rx);
                let takes = Arc::clone(&by.takes);
                let tx = Box::new(RelayTx { ring, takes: Arc::clone(&takes) });
                senders.push(Sender { tx, takes, rings: Rings::default() });
            }
        }
        Ok(senders)
    }

    /// Creates rings between all pairs of workers, for packets received on a port.
    fn mesh(&self, port: usize, senders: &mut [Sender]) -> Result<(), SwitchError> {
        for from in 0..senders.len() {
            for to in 0..senders.len() {
                let mut theirs = None;
                if from != to {
                    let (tx, rx) = self.host_ring(&self.ring_name(port, to), from as u16)?;
                    senders[to].rings.from.push(rx);
                    theirs = Some(tx);
                }
                senders[from].rings.to.push(theirs);
            }
        }
        Ok(())
    }

    /// Returns the statistics name for packets that a port received for a worker.
    fn ring_name(&self, port: usize, worker: usize) -> String {
        format!("{}>lcore{}", self.config.names.of(port), self.config.lcores[worker])
    }

    fn host_ring(&self, name: &str, index: u16) -> Result<(RingTx, RingRx), SwitchError> {
        let (workers, ports) = (self.config.lcores.len(), self.ports.len());
        let part = self.pool.chunks() / (RING_SHARE * workers * workers * ports);
        // Rounded down, because ring sizes are powers of two.
        let packets = 1 << part.clamp(BURST, RING).ilog2();
        let (pool, stats, wakes) = (self.pool, &self.page, self.config.idle == Idle::Sleep);
        Ok(ring(RingSetup { packets, pool, waits: false, wakes, stats, name, index })?)
    }
}

/// One worker's sender for a port.
struct Sender {
    tx: Box<dyn TxQueue>,
    /// Packets that `tx` accepts.
    takes: Arc<Takes>,
    rings: Rings,
}

/// Returns the kernel's index of a port's interface.
fn index_of(port: &str) -> Option<u32> {
    let (kind, rest) = port.split_once(':')?;
    let name = rest.split(',').next().filter(|_| matches!(kind, "tap" | "af_packet" | "af_xdp"))?;
    NetDev::open(name).ok().map(|interface| interface.index())
}
