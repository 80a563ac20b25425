//! The dpdk-dma application as a forwarding mode: a copy stage around every RX queue, and with two lcores a ring between
//! the one that receives and copies and the one that sends.
//!
//! ```text
//! one lcore:   RX queue -> copy -> addresses -> TX queue
//! two lcores:  RX queue -> copy -> ring | addresses -> TX queue
//! ```

use offcore_dma::Binding;
use offcore_mem::BURST;
use offcore_port::{QueueSetup, RxQueue};
use offcore_wire::ethernet::FCS_LEN;

use super::config::counted;
use super::{Assembly, EthPeers, Field, Route, SwitchConfig, SwitchError, addresses};
use crate::copy::{CopyRx, CopySetup};
use crate::dma_map::Half;
use crate::forward::Topology;
use crate::ring::{RingSetup, ring};

/// The configuration of a switch that copies. The defaults are dpdk-dma's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copying {
    /// Which port's packets go where.
    pub topology: Topology,
    /// Destinations; addresses are rewritten as `mac` does, or not at all where there are none.
    pub eth_peers: Option<EthPeers>,
    /// Ports that take part, one bit each, where not all do; those beyond the 64th do.
    pub ports: Option<u64>,
    /// Packets in flight in the copy stage of one queue, and packets that a ring has room for: 1 to 32768.
    pub ring_size: usize,
    /// Packets whose copies are submitted together, 1 to 64.
    pub batch: usize,
    /// Bytes of a packet, FCS included; longer ones are dropped. 0: any.
    pub max_frame: usize,
    /// Packets with fewer bytes, FCS included, are copied by the core.
    pub min_copy: usize,
    /// Bytes that are copied of every packet at least.
    pub at_least: usize,
    /// Whether lcores come in twos, of which the first receives and copies and the second sends.
    pub two_lcores: bool,
}

impl Default for Copying {
    fn default() -> Self {
        Self {
            topology: Topology::Loop,
            eth_peers: Some(EthPeers::new()),
            ports: None,
            ring_size: 2048,
            batch: 32,
            max_frame: 0,
            min_copy: 0,
            at_least: 0,
            two_lcores: false,
        }
    }
}

impl Copying {
    /// Whether a port takes part.
    pub(super) fn has(&self, port: usize) -> bool {
        port >= 64 || self.ports.is_none_or(|ports| ports >> port & 1 != 0)
    }
}

/// Refuses what cannot be.
pub(super) fn check(config: &SwitchConfig, copying: &Copying, ports: usize) -> Result<(), SwitchError> {
    let Copying { ring_size, batch, two_lcores, .. } = *copying;
    if !(1..=32768).contains(&ring_size) {
        return Field::RingSize.refuse(format!("{ring_size}, expected 1 to 32768"));
    }
    if !(1..=BURST).contains(&batch) {
        return Field::Batch.refuse(format!("{batch}, expected 1 to {BURST}"));
    }
    let lcores = config.lcores.len();
    if two_lcores && !lcores.is_multiple_of(2) {
        return Field::Lcores.refuse(format!(
            "{lcores} lcores cannot be paired, expected an even number: one that receives and copies and one that sends"
        ));
    }
    let all = if ports < 64 { (1 << ports) - 1 } else { u64::MAX };
    if let Some(mask) = copying.ports.filter(|mask| mask & !all != 0) {
        return Field::PortMask.refuse(format!("{mask:#x}: {}; {all:#x} is all of them", counted(ports)));
    }
    if (0..ports).all(|port| config.run.peer(port, ports).is_none()) {
        let mask = copying.ports.unwrap_or(all);
        return Field::PortMask
            .refuse(format!("{mask:#x} names no port together with the one that it sends to"));
    }
    Field::EthPeers.check_ports(ports, copying.eth_peers.iter().flat_map(EthPeers::keys).copied())
}

impl Assembly<'_> {
    pub(super) fn add_copying(
        &mut self,
        copying: &Copying,
        &Route { worker, sender, rx_port, tx_port, queue }: &Route,
    ) -> Result<(), SwitchError> {
        let peers = copying.eth_peers.as_ref();
        let addresses = peers.map(|peers| addresses(peers, tx_port, &*self.ports[tx_port]));
        let rx = self.copy_rx(copying, worker, rx_port, queue)?;
        let tx = self.open_tx(sender, tx_port, queue)?;
        if worker == sender {
            self.forward(worker, Box::new(rx), tx, addresses);
            return Ok(());
        }
        let name = format!("ring{rx_port}");
        let (to, from) = ring(RingSetup {
            packets: copying.ring_size,
            pool: self.pool,
            waits: rx.waits(),
            stats: &self.page,
            name: &name,
            index: queue,
        })?;
        self.forward(worker, Box::new(rx), Box::new(to), None);
        self.forward(sender, Box::new(from), tx, addresses);
        Ok(())
    }

    /// A copy stage around a port's RX queue. The mapping's channels are the stage's; what the port itself copies is the
    /// core's.
    fn copy_rx(
        &mut self,
        &Copying { ring_size, batch, max_frame, min_copy, at_least, .. }: &Copying,
        worker: usize,
        port: usize,
        queue: u16,
    ) -> Result<CopyRx, SwitchError> {
        let binding = self.binding(worker, port, Half::Rx, queue)?;
        let mover = &mut self.workers[worker].0.mover;
        let name = format!("port{port}");
        let setup = QueueSetup { mover, stats: &self.page, binding: Binding::core(), port: &name };
        let inner = self.ports[port].rx_queue(queue, setup)?;
        let inner = self.mirrored_rx(port, inner)?;
        let mover = &mut self.workers[worker].0.mover;
        let setup = CopySetup {
            mover,
            binding,
            in_flight: ring_size,
            max_frame: max_frame.saturating_sub(FCS_LEN),
            min_copy: min_copy.saturating_sub(FCS_LEN),
            pool: self.pool,
            stats: &self.page,
            name: &format!("{name}/rx{queue}"),
        };
        Ok(CopyRx::new(inner, setup)?.with_batch(batch).with_at_least(at_least))
    }
}
