//! Checks of a configuration against its ports, packet buffers and devices.

use std::collections::BTreeSet;

use offcore_mem::{BURST, Pool};
use offcore_port::Port;
use offcore_wire::ethernet;

use super::config::{PortShape, Run, SwitchConfig};
use super::{Devices, bridging, copying, mirroring};
use crate::engines::Engines;
use crate::engines::dma_map::QueueHalf;
use crate::error::{Field, SwitchError, check_lcores, too_long};
use crate::forwarding::forward::Forward;

impl SwitchConfig {
    /// Refuses a configuration that is invalid for these ports. The ports need not be open:
    /// [`PortSpec`](offcore_port::spec::PortSpec)s or ports.
    ///
    /// # Errors
    /// [`SwitchError::Config`]. Whether lcores are available is checked by [`check_lcores`].
    pub fn check<'a, T>(&self, ports: &'a [T]) -> Result<(), SwitchError>
    where
        PortShape: From<&'a T>,
    {
        let shapes: Vec<_> = ports.iter().map(PortShape::from).collect();
        let ports = shapes.len();
        if ports == 0 {
            return Field::Ports.refuse("none, expected one at least");
        }
        if !(1..=BURST).contains(&self.burst) {
            return Field::Burst.refuse(format!("{}, expected 1 to {BURST}", self.burst));
        }
        if self.lcores.is_empty() {
            return Field::Lcores.refuse("none, expected one at least");
        }
        let count = mirroring::forwarding(self, ports);
        Field::Mirrors.check_ports(count, self.mirrors.iter().map(|mirror| mirror.port))?;
        Field::Mirrors.check_ports(ports, self.mirrors.iter().map(|mirror| mirror.to))?;
        Field::Dma.check_ports(ports, self.dma.entries.iter().filter_map(|entry| entry.port))?;
        for name in self.dma.entries.iter().flat_map(|entry| &entry.channels) {
            Engines::check_name(name).or_else(|error| Field::Dma.refuse(error))?;
        }
        self.check_simulators()?;
        match &self.run {
            Run::Forward { eth_peers, .. } => {
                Field::EthPeers.check_ports(count, eth_peers.keys().copied())?;
            }
            Run::Bridge(bridge) => {
                bridging::check(bridge, count)?;
                bridging::check_queues(&shapes[..count], self.lcores.len())?;
            }
            Run::Copy(copying) => copying::check(self, copying, count)?,
            Run::Host(hosting) => hosting.check(count, self.lcores.len())?,
            Run::Pipelines(working) => working.check(self.lcores.len(), ports)?,
        }
        check_dma(self, &shapes)
    }

    /// Checks that each simulated device is configured once, and that channels name exactly these devices.
    fn check_simulators(&self) -> Result<(), SwitchError> {
        let mut names = BTreeSet::new();
        if let Some(twice) = self.simulators.iter().find(|simulator| !names.insert(simulator.name())) {
            return Field::Simulators
                .refuse(format!("{} twice, expected it once, with all its keys", twice.name()));
        }
        let devices = self.dma.entries.iter().flat_map(|entry| &entry.channels).filter_map(|channel| {
            channel.split_once(':').map(|(device, _)| device).filter(|device| device.starts_with("dsa-sim"))
        });
        let devices: BTreeSet<&str> = devices.collect();
        if let Some(device) = devices.iter().find(|device| !names.contains(**device)) {
            return Field::Simulators.refuse(format!("none is {device}, which a channel names"));
        }
        match names.iter().find(|name| !devices.contains(name.as_str())) {
            Some(name) => Field::Simulators
                .refuse(format!("no channel names {name}: expected one in --dma, such as txq0@{name}:wq0.0")),
            None => Ok(()),
        }
    }

    /// Refuses a configuration that is invalid for these ports, packet buffers and devices.
    pub(super) fn check_opened(
        &self,
        ports: &[Box<dyn Port>],
        pool: &Pool,
        devices: &Devices,
    ) -> Result<(), SwitchError> {
        self.check(ports)?;
        check_lcores(&self.lcores)?;
        let longest = pool.longest() + ethernet::FCS_LEN;
        match &self.run {
            Run::Forward { mode: Forward::Txonly { frame } | Forward::Flowgen { frame }, .. }
                if *frame > longest =>
            {
                too_long(*frame, longest)
            }
            Run::Pipelines(working) => working.check_opened(ports, devices),
            Run::Forward { .. } | Run::Bridge(_) | Run::Copy(_) | Run::Host(_) => Ok(()),
        }
    }
}

/// Checks that each mapped queue has copies to offload.
fn check_dma(config: &SwitchConfig, ports: &[PortShape]) -> Result<(), SwitchError> {
    for entry in &config.dma.entries {
        // A copy stage can be around any port's RX queue. A host copies received and sent packets.
        let stage = match config.run {
            Run::Copy(_) => entry.half == QueueHalf::Rx,
            Run::Host(_) => true,
            _ => false,
        };
        let queues = |port: &PortShape| match config.run {
            // The copies of each worker are bound like the copies of a queue.
            Run::Host(_) => config.lcores.len(),
            _ => port.queues.into(),
        };
        let copying = ports
            .iter()
            .enumerate()
            .filter(|(index, port)| (port.offloads || stage) && entry.port.is_none_or(|port| port == *index));
        let most = copying.map(|(_, port)| queues(port)).max();
        if most.is_some_and(|most| usize::from(entry.queue) < most) {
            continue;
        }
        let which = format!(
            "{}q{} of {}",
            if entry.half == QueueHalf::Rx { "rx" } else { "tx" },
            entry.queue,
            entry.port.map_or("any port".into(), |port| format!("port {port}"))
        );
        if let Some(most) = most {
            let last = most.saturating_sub(1);
            return Field::Dma.refuse(format!("{which} is not there: expected a queue from 0 to {last}"));
        }
        let expected = match config.run {
            Run::Copy(_) => "a queue rxqN: the copy stage is behind it",
            Run::Host(_) => "rxqN or txqN of a worker, counted from 0",
            _ => "a queue of a vhost port, or rxqN with a copy stage behind it (forward mode copy)",
        };
        return Field::Dma.refuse(format!("no copies are made on {which}: expected {expected}"));
    }
    Ok(())
}
