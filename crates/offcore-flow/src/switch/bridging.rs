//! Assembly of the learning switch: each worker gets a bridge with its own queues of every port.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use offcore_port::Port;
use offcore_port::stats::PortNames;
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::{Label, tsc};

use super::config::PortShape;
use super::{Assembly, Field, Route, SwitchError};
use crate::bridge::Shared;
use crate::bridge::fdb::{Clock, MAX_PORTS};
use crate::bridge::{
    AgedCounts, BRIDGE, BRIDGE_AGED, BRIDGE_PORT, Bridge, BridgeConfig, DatabaseCounts, Input,
};

/// Returns routes for the queues of `ports`. Worker `w` of `n` gets queues `w`, `w + n`, … of each port, both halves.
pub(super) fn routes(ports: &[Box<dyn Port>], workers: usize) -> Vec<Route> {
    let queues =
        ports.iter().enumerate().flat_map(|(port, of)| (0..of.queues()).map(move |queue| (port, queue)));
    let route = |(port, queue)| {
        let worker = usize::from(queue) % workers;
        Route { worker, sender: worker, rx_port: port, tx_port: port, queue }
    };
    queues.map(route).collect()
}

/// Checks the number of ports of a learning switch, and the rules for ports in its configuration.
pub(super) fn check(config: &BridgeConfig, ports: usize) -> Result<(), SwitchError> {
    if !(2..=MAX_PORTS).contains(&ports) {
        return Field::Ports.refuse(format!("{ports}, expected 2 to {MAX_PORTS} for a learning switch"));
    }
    let mut named = BTreeSet::new();
    if let Some(twice) = config.vlans.iter().find(|rule| !named.insert(rule.port)) {
        return Field::Vlans
            .refuse(format!("port {} twice, expected it once, with all its VLANs", twice.port));
    }
    Field::Vlans.check_ports(ports, named.into_iter())?;
    let (mut named, mut addresses) = (BTreeSet::new(), BTreeSet::new());
    for rule in &config.stations {
        if !named.insert(rule.port) {
            return Field::Stations
                .refuse(format!("port {} twice, expected it once, with all its addresses", rule.port));
        }
        if let Some(twice) = rule.addresses.iter().find(|address| !addresses.insert(**address)) {
            return Field::Stations.refuse(format!("{twice} of two ports, expected it of one"));
        }
    }
    Field::Stations.check_ports(ports, named.into_iter())
}

/// Checks that each worker gets a queue of every port.
pub(super) fn check_queues(ports: &[PortShape], workers: usize) -> Result<(), SwitchError> {
    let small = ports.iter().enumerate().find(|(_, port)| usize::from(port.queues) < workers);
    let Some((index, port)) = small else { return Ok(()) };
    Field::Lcores.refuse(format!(
        "{workers} lcores: each takes a queue of every port, and port{index} ({}) has {}; give it queues={workers} or \
         more, or use fewer lcores",
        port.name, port.queues,
    ))
}

/// The control thread's work for the bridges.
#[derive(Debug)]
pub(super) struct Bridging {
    shared: Arc<Shared>,
    clock: Option<Clock>,
    started: Instant,
    counters: Block,
    /// Forgotten stations of each port.
    aged: Vec<Block>,
}

impl Bridging {
    fn new(
        config: &BridgeConfig,
        ports: usize,
        names: &PortNames,
        page: &StatsPage,
    ) -> Result<Self, PageError> {
        let aged = |port| page.block(&BRIDGE_AGED, &[(Label::Port, &names.of(port))]);
        let ageing = config.ageing;
        Ok(Self {
            shared: Arc::new(Shared::new(config, ports, tsc::hz())),
            clock: (!ageing.is_zero()).then(|| Clock::new(ageing)),
            started: Instant::now(),
            counters: page.block(&BRIDGE, &[])?,
            aged: (0..ports).map(aged).collect::<Result<_, _>>()?,
        })
    }

    /// Advances the database's clock.
    pub(super) fn tend(&mut self) {
        let fdb = &self.shared.fdb;
        if let Some(clock) = &mut self.clock {
            clock.turn(fdb, self.started.elapsed());
        }
        self.publish();
    }

    pub(super) fn publish(&self) {
        let fdb = &self.shared.fdb;
        self.counters.set(DatabaseCounts { addresses: fdb.addresses() as u64 }.values());
        for (port, block) in self.aged.iter().enumerate() {
            block.set(AgedCounts { aged: fdb.aged(port) }.values());
        }
    }
}

impl Assembly<'_> {
    /// Gives each worker a bridge between the first `count` ports, with the worker's queues in `routes`.
    pub(super) fn add_bridges(
        &mut self,
        config: &BridgeConfig,
        routes: &[Route],
        count: usize,
    ) -> Result<Bridging, SwitchError> {
        let bridging = Bridging::new(config, count, &self.config.names, &self.page)?;
        for worker in 0..self.config.lcores.len() {
            let lcore = self.config.lcores[worker];
            let mut inputs = Vec::new();
            let mut outputs: Vec<_> = (0..count).map(|_| Vec::new()).collect();
            for &Route { rx_port: port, queue, .. } in routes.iter().filter(|route| route.worker == worker) {
                let turn = outputs[port].len();
                inputs.push(Input { rx: self.open_rx(worker, port, queue)?, port, turn });
                outputs[port].push(self.open_tx(worker, port, queue)?);
            }
            let block = |port| {
                let name = self.config.names.of(port);
                let labels: [(_, &dyn Display); 2] = [(Label::Port, &name), (Label::Lcore, &lcore)];
                self.page.block(&BRIDGE_PORT, &labels)
            };
            let counters = (0..count).map(block).collect::<Result<_, _>>()?;
            let bridge = Bridge::new(Arc::clone(&bridging.shared), inputs, outputs, counters, self.work());
            self.workers[worker].0.tasks.push(Box::new(bridge));
        }
        Ok(bridging)
    }
}
