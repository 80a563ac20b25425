//! The dpdk-dma application as a forwarding mode: a copy stage around every RX queue, and with two lcores a ring between
//! the one that receives and copies and the one that sends.
//!
//! ```text
//! one lcore:   RX queue -> copy -> addresses -> TX queue
//! two lcores:  RX queue -> copy -> ring | addresses -> TX queue
//! ```

use offcore_dma::Binding;
use offcore_mem::BURST;
use offcore_port::{Port, QueueSetup, RxQueue};

use super::{Assembly, Route, SwitchConfig, SwitchError};
use crate::copy::{CopyRx, CopySetup};
use crate::dma_map::Half;
use crate::forward::Forward;
use crate::ring::{RingSetup, ring};

/// What [`Forward::Copy`] does beside copying. The defaults are dpdk-dma's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copying {
    /// Whether addresses are rewritten as `mac` does.
    pub mac_updating: bool,
    /// Ports that take part, one bit each; those beyond the 64th do.
    pub ports: u64,
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
            mac_updating: true,
            ports: u64::MAX,
            ring_size: 2048,
            batch: 32,
            max_frame: 0,
            min_copy: 0,
            at_least: 0,
            two_lcores: false,
        }
    }
}

/// Bytes of the frame check sequence, which frame lengths on the command line include.
const FCS: usize = 4;

impl Copying {
    /// Whether a port takes part.
    pub(super) fn has(&self, port: usize) -> bool {
        port >= 64 || self.ports >> port & 1 != 0
    }
}

/// The workers of route number `index`: who receives, and who sends.
pub(super) fn workers(config: &SwitchConfig, index: usize) -> (usize, usize) {
    let by_copying = config.forward == Forward::Copy && config.copying.two_lcores;
    if by_copying || config.working.is_some() && config.lcores.len() > 1 {
        let first = index % (config.lcores.len() / 2) * 2;
        return (first, first + 1);
    }
    let worker = index % config.lcores.len();
    (worker, worker)
}

/// What a worker does with its packets: the copying itself is done by the time that it has them.
pub(super) fn worker_mode(config: &SwitchConfig, worker: usize) -> Forward {
    let receives_only = config.copying.two_lcores && worker.is_multiple_of(2);
    match config.forward {
        Forward::Copy if receives_only || !config.copying.mac_updating => Forward::Io,
        mode => mode,
    }
}

/// Refuses what cannot be.
pub(super) fn check(config: &SwitchConfig, ports: usize) -> Result<(), String> {
    if config.forward != Forward::Copy {
        return Ok(());
    }
    let Copying { ring_size, batch, two_lcores, .. } = config.copying;
    if !(1..=32768).contains(&ring_size) {
        return Err(format!("--ring-size {ring_size}: expected 1 to 32768"));
    }
    if !(1..=BURST).contains(&batch) {
        return Err(format!("--dma-batch {batch}: expected 1 to {BURST}"));
    }
    let lcores = config.lcores.len();
    if two_lcores && !lcores.is_multiple_of(2) {
        return Err(format!(
            "--lcores: {lcores} lcores cannot be paired, expected an even number: one that receives and copies and one \
             that sends"
        ));
    }
    let routed =
        |port: &usize| config.copying.has(*port) && config.copying.has(config.topology.peer(*port, ports));
    match (0..ports).any(|port| routed(&port)) {
        true => Ok(()),
        false => Err(format!(
            "--portmask {:#x}: of {ports} ports, counted from bit 0, it names none with the port that it sends to",
            config.copying.ports
        )),
    }
}

impl Assembly<'_> {
    pub(super) fn add_copying(
        &mut self,
        &Route { worker, sender, rx_port, tx_port, queue }: &Route,
        ports: &mut [Box<dyn Port>],
    ) -> Result<(), SwitchError> {
        let addresses = self.addresses(tx_port, &*ports[tx_port]);
        let rx = self.copy_rx(worker, rx_port, queue, ports)?;
        let tx = self.open_tx(sender, tx_port, queue, ports)?;
        if worker == sender {
            self.forward(worker, Box::new(rx), tx, addresses);
            return Ok(());
        }
        let name = format!("ring{rx_port}");
        let (to, from) = ring(RingSetup {
            packets: self.config.copying.ring_size,
            pool: self.pool,
            waits: rx.waits(),
            stats: &self.page,
            name: &name,
            index: queue,
        })?;
        self.forward(worker, Box::new(rx), Box::new(to), addresses);
        self.forward(sender, Box::new(from), tx, addresses);
        Ok(())
    }

    /// A copy stage around a port's RX queue. The mapping's channels are the stage's; what the port itself copies is the
    /// core's.
    fn copy_rx(
        &mut self,
        worker: usize,
        port: usize,
        queue: u16,
        ports: &mut [Box<dyn Port>],
    ) -> Result<CopyRx, SwitchError> {
        let Copying { ring_size, batch, max_frame, min_copy, at_least, .. } = self.config.copying;
        let binding = self.binding(worker, port, Half::Rx, queue)?;
        let mover = &mut self.workers[worker].0.mover;
        let name = format!("port{port}");
        let setup = QueueSetup { mover, stats: &self.page, binding: Binding::core(), port: &name };
        let inner = ports[port].rx_queue(queue, setup)?;
        let inner = self.mirrored_rx(port, inner)?;
        let mover = &mut self.workers[worker].0.mover;
        let setup = CopySetup {
            mover,
            binding,
            in_flight: ring_size,
            max_frame: max_frame.saturating_sub(FCS),
            min_copy: min_copy.saturating_sub(FCS),
            pool: self.pool,
            stats: &self.page,
            name: &format!("{name}/rx{queue}"),
        };
        Ok(CopyRx::new(inner, setup)?.with_batch(batch).with_at_least(at_least))
    }
}
