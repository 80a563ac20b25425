//! A TCP/IP host on all ports: one worker, one stack, one interface for each port.

use std::hash::{BuildHasher, RandomState};

use offcore_dma::Binding;
use offcore_port::{Port, QueueSetup};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{Config, IfaceConfig, Out, Stack};

use super::config::{Hosting, SwitchConfig};
use super::{Assembly, Route};
use crate::engines::dma_map::Half;
use crate::error::{Field, SwitchError};
use crate::host::apps::Hosted;
use crate::host::apps::epping::Epping;
use crate::host::watched::Watched;
use crate::host::{App, Host, HostPort};

/// Bytes of the headers before a segment's payload, at least.
const HEADERS: usize = 40;

impl Hosting {
    /// Refuses what cannot be.
    pub(super) fn check(&self, config: &SwitchConfig, ports: usize) -> Result<(), SwitchError> {
        if config.lcores.len() != 1 {
            return Field::Lcores.refuse(format!("{}, expected one for a host", config.lcores.len()));
        }
        if self.ifaces.len() != ports {
            return Field::Addresses.refuse(format!("{} interfaces for {ports} ports", self.ifaces.len()));
        }
        match self.ifaces.iter().position(|iface| iface.addresses.is_empty()) {
            Some(port) => Field::Addresses.refuse(format!("port {port} has none, expected one at least")),
            None => Ok(()),
        }
    }
}

/// Queue 0 of each port.
pub(super) fn routes(ports: &[Box<dyn Port>]) -> Vec<Route> {
    let route = |port| Route { worker: 0, sender: 0, rx_port: port, tx_port: port, queue: 0 };
    (0..ports.len()).map(route).collect()
}

/// 16 bytes that nobody can guess: the system's, by way of the keys of std's hash tables.
fn secret() -> [u8; 16] {
    let half = || RandomState::new().hash_one(0u8);
    (u128::from(half()) << 64 | u128::from(half())).to_ne_bytes()
}

impl Assembly<'_> {
    pub(super) fn add_host(&mut self, hosting: &Hosting, routes: &[Route]) -> Result<(), SwitchError> {
        let mut config = Config { secret: secret(), ..Config::default() };
        if let Hosted::Epping(epping) = &hosting.app {
            config.largest_segment = epping.segment.unwrap_or(u16::MAX);
            // A chunk and the next one, as far as a FIFO holds them.
            let chunks = u32::try_from(2 * epping.chunk).unwrap_or(u32::MAX);
            config.send_buffer = config.send_buffer.max(chunks).min(config.largest_buffer);
        }
        let mut stack = Stack::new(config).or_else(|error| Field::Pool.refuse(error.to_string()))?;
        let mut out = Out::default();
        let mut ports = Vec::new();
        let room = self.pool.data_room();
        for (iface, route) in hosting.ifaces.iter().zip(routes) {
            let port = self.host_port(route)?;
            // Elsewhere a segment's payload is in one buffer.
            let longest = if port.tx.accepts().segments { None } else { u16::try_from(room + HEADERS).ok() };
            let config = IfaceConfig {
                mac: iface.mac.unwrap_or(self.ports[route.rx_port].mac()),
                mtu: iface.mtu.min(longest.unwrap_or(u16::MAX)),
                addresses: iface.addresses.clone(),
                routes: iface.routes.clone(),
            };
            stack.add_iface(1, &config, &mut out);
            ports.push(port);
        }
        let rx = self.binding(0, 0, Half::Rx, 0)?;
        let tx = self.binding(0, 0, Half::Tx, 0)?;
        let mover = &mut self.workers[0].0.mover;
        let mut path = Path::new(stack, out, mover, self.pool);
        let (app, tx): (Box<dyn App>, _) = match &hosting.app {
            Hosted::Service(service, port) => {
                (service.open(*port).or_else(|error| Field::Service.refuse(error.to_string()))?, tx)
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
        let watched = Watched::new(&self.page, self.config.lcores[0], self.connections.clone())?;
        let host = Host::new(path, ports, app).or_else(|error| Field::Service.refuse(error.to_string()))?;
        self.workers[0].0.tasks.push(Box::new(host.watched(watched)));
        Ok(())
    }

    /// Both halves of a port's queue; what the port itself copies is the core's.
    fn host_port(&mut self, route: &Route) -> Result<HostPort, SwitchError> {
        let name = format!("port{}", route.rx_port);
        let port = &mut self.ports[route.rx_port];
        let (stats, mover) = (&self.page, &mut self.workers[0].0.mover);
        let setup = QueueSetup { mover, stats, binding: Binding::core(), port: &name };
        let rx = port.rx_queue(route.queue, setup)?;
        let setup = QueueSetup { mover, stats, binding: Binding::core(), port: &name };
        let tx = port.tx_queue(route.queue, setup)?;
        Ok(HostPort { rx, tx })
    }
}
