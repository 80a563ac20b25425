//! Assembly of mirrors: the queues of mirrored ports are wrapped when they are opened, and one worker sends the copies.

use std::collections::BTreeSet;

use offcore_port::{QueueSetup, RxQueue, TxQueue};

use super::{Assembly, Route, SwitchConfig, SwitchError};
use crate::engines::dma_map::QueueHalf;
use crate::mirror::{Mirror, MirrorOut, MirrorRx, MirrorTx};
use crate::ring::{RingRx, RingSetup, RingTx, ring};
use crate::worker::idle::Idle;

/// Size of a queue's ring to a mirror, in packets.
const RING: usize = 2048;

/// The receiving ends of the rings to one mirror port.
#[derive(Debug)]
pub(super) struct Target {
    port: usize,
    rings: Vec<RingRx>,
}

/// Returns the number of ports that take part in forwarding. Mirrors send to the ports after these.
pub(super) fn forwarding(config: &SwitchConfig, ports: usize) -> usize {
    targets(config).min().unwrap_or(ports).min(ports)
}

/// Returns the ports that packets are sent to in addition to forwarding, with repetitions.
fn targets(config: &SwitchConfig) -> impl Iterator<Item = usize> {
    config.mirrors.iter().map(|mirror| mirror.to).chain(config.run.elsewhere())
}

/// Returns a route for each mirror port. Its worker is the worker of the first queue that is mirrored there, so packets
/// stay on one lcore if all mirrored queues are on it.
pub(super) fn routes(config: &SwitchConfig, routes: &[Route]) -> Vec<Route> {
    let targets: BTreeSet<usize> = targets(config).collect();
    let worker = |to| {
        if config.run.elsewhere() == Some(to) {
            return routes.first().map_or(0, |route| route.sender);
        }
        let mirrored = |port| config.mirrors.iter().any(|mirror| mirror.to == to && mirror.port == port);
        let first = routes.iter().find(|route| mirrored(route.rx_port) || mirrored(route.tx_port));
        first.map_or(0, |route| route.worker)
    };
    let route = |to| Route { worker: worker(to), sender: worker(to), rx_port: to, tx_port: to, queue: 0 };
    targets.into_iter().map(route).collect()
}

impl Assembly<'_> {
    /// Opens the receiving half of a port's queue for a worker.
    pub(super) fn open_rx(
        &mut self,
        worker: usize,
        port: usize,
        queue: u16,
    ) -> Result<Box<dyn RxQueue>, SwitchError> {
        let binding = self.binding(worker, port, QueueHalf::Rx, queue)?;
        let name = self.config.names.of(port);
        let mover = &mut self.workers[worker].0.mover;
        let setup = QueueSetup { mover, stats: &self.page, binding, port: &name };
        let rx = self.ports[port].rx_queue(queue, setup)?;
        self.mirrored_rx(port, rx)
    }

    /// Wraps an RX queue of a port for each mirror of received packets.
    pub(super) fn mirrored_rx(
        &mut self,
        port: usize,
        mut rx: Box<dyn RxQueue>,
    ) -> Result<Box<dyn RxQueue>, SwitchError> {
        for mirror in self.mirrors_of(port).filter(|mirror| mirror.direction.has_rx()) {
            rx = Box::new(MirrorRx::new(rx, self.ring_to(mirror.to)?));
        }
        Ok(rx)
    }

    /// Opens the sending half of a port's queue, wrapped for each mirror of sent packets.
    pub(super) fn open_tx(
        &mut self,
        worker: usize,
        port: usize,
        queue: u16,
    ) -> Result<Box<dyn TxQueue>, SwitchError> {
        let binding = self.binding(worker, port, QueueHalf::Tx, queue)?;
        let name = self.config.names.of(port);
        let mover = &mut self.workers[worker].0.mover;
        let setup = QueueSetup { mover, stats: &self.page, binding, port: &name };
        let mut tx = self.ports[port].tx_queue(queue, setup)?;
        for mirror in self.mirrors_of(port).filter(|mirror| mirror.direction.has_tx()) {
            tx = Box::new(MirrorTx::new(tx, self.ring_to(mirror.to)?));
        }
        Ok(tx)
    }

    /// Gives workers the sending ends of the mirrors, after every mirrored queue has been opened.
    pub(super) fn add_mirrors(&mut self, routes: &[Route]) -> Result<(), SwitchError> {
        for Target { port, rings } in std::mem::take(&mut self.targets) {
            let worker = routes.iter().find(|route| route.tx_port == port).map_or(0, |route| route.worker);
            let tx = self.open_tx(worker, port, 0)?;
            self.workers[worker].0.tasks.push(Box::new(MirrorOut::new(rings, tx)));
        }
        Ok(())
    }

    fn mirrors_of(&self, port: usize) -> impl Iterator<Item = Mirror> + use<> {
        let of: Vec<Mirror> =
            self.config.mirrors.iter().filter(|mirror| mirror.port == port).copied().collect();
        of.into_iter()
    }

    pub(super) fn ring_to(&mut self, to: usize) -> Result<RingTx, SwitchError> {
        let index = self.targets.iter().position(|target| target.port == to).unwrap_or_else(|| {
            self.targets.push(Target { port: to, rings: Vec::new() });
            self.targets.len() - 1
        });
        let rings = &mut self.targets[index].rings;
        let name = format!("mirror{to}");
        let setup = RingSetup {
            packets: RING,
            pool: self.pool,
            waits: false,
            wakes: self.config.idle == Idle::Sleep,
            stats: &self.page,
            name: &name,
            index: rings.len() as u16,
        };
        let (tx, rx) = ring(setup)?;
        rings.push(rx);
        Ok(tx)
    }
}
