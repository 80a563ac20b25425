//! The dpdk-dma application as a forwarding mode: a copy stage around every RX queue. With two lcores, a ring connects
//! the lcore that receives and copies to the lcore that sends.
//!
//! ```text
//! one lcore:   RX queue -> copy -> addresses -> TX queue
//! two lcores:  RX queue -> copy -> ring | addresses -> TX queue
//! ```

use offcore_dma::Binding;
use offcore_mem::BURST;
use offcore_port::{QueueSetup, RxQueue};
use offcore_wire::ethernet::FCS_LEN;

use super::config::{Copying, EthPeers, SwitchConfig};
use super::{Assembly, Route, addresses};
use crate::copy::{CopyRx, CopySetup};
use crate::engines::dma_map::QueueHalf;
use crate::error::{Field, SwitchError, counted};
use crate::ring::{RingSetup, ring};
use crate::worker::idle::Idle;

/// Refuses invalid configurations.
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
            self.forward(worker, rx_port, Box::new(rx), tx, addresses);
            return Ok(());
        }
        let name = self.config.names.ring_of(rx_port);
        let (to, from) = ring(RingSetup {
            packets: copying.ring_size,
            pool: self.pool,
            waits: rx.waits(),
            wakes: self.config.idle == Idle::Sleep,
            stats: &self.page,
            name: &name,
            index: queue,
        })?;
        self.forward(worker, rx_port, Box::new(rx), Box::new(to), None);
        self.forward(sender, rx_port, Box::new(from), tx, addresses);
        Ok(())
    }

    /// Returns a copy stage around a port's RX queue. The mapped channels belong to the stage. The core makes the
    /// copies of the port itself.
    fn copy_rx(
        &mut self,
        &Copying { ring_size, batch, max_frame, min_copy, at_least, .. }: &Copying,
        worker: usize,
        port: usize,
        queue: u16,
    ) -> Result<CopyRx, SwitchError> {
        let binding = self.binding(worker, port, QueueHalf::Rx, queue)?;
        let mover = &mut self.workers[worker].0.mover;
        let name = self.config.names.of(port);
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
            port: &name,
            index: queue,
        };
        Ok(CopyRx::new(inner, setup)?.with_batch(batch).with_at_least(at_least))
    }
}
