//! The learning switch put together: each worker gets a bridge with queues of its own of every port.

use std::sync::Arc;
use std::time::Instant;

use offcore_port::Port;
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::tsc;

use super::{Assembly, Route, SwitchConfig, SwitchError};
use crate::bridge::fdb::{Clock, MAX_PORTS};
use crate::bridge::{Bridge, COUNTERS, Input, Shared};

/// The queues of `ports`, dealt to the workers: worker `w` of `n` has queues `w`, `w + n`, … of each, both halves.
pub(super) fn routes(ports: &[Box<dyn Port>], workers: usize) -> Vec<Route> {
    let queues =
        ports.iter().enumerate().flat_map(|(port, of)| (0..of.queues()).map(move |queue| (port, queue)));
    let route = |(port, queue)| {
        let worker = usize::from(queue) % workers;
        Route { worker, sender: worker, rx_port: port, tx_port: port, queue }
    };
    queues.map(route).collect()
}

/// What a learning switch needs of its ports, and what its configuration may say of them.
pub(super) fn check(config: &SwitchConfig, ports: &[Box<dyn Port>]) -> Result<(), SwitchError> {
    let refuse = |text: String| Err(SwitchError::Config(text));
    if !(2..=MAX_PORTS).contains(&ports.len()) {
        return refuse(format!("--forward l2: {} ports, expected 2 to {MAX_PORTS}", ports.len()));
    }
    let workers = config.lcores.len();
    if let Some((index, port)) =
        ports.iter().enumerate().find(|(_, port)| usize::from(port.queues()) < workers)
    {
        return refuse(format!(
            "--forward l2 with {workers} lcores: each takes a queue of every port, and port{index} ({}) has {}; give it \
             queues={workers} or more, or fewer --lcores",
            port.name(),
            port.queues(),
        ));
    }
    for (index, rule) in config.bridge.vlans.iter().enumerate() {
        if rule.port >= ports.len() {
            return refuse(format!("--vlan {rule}: there are {} ports, counted from 0", ports.len()));
        }
        if config.bridge.vlans[..index].iter().any(|other| other.port == rule.port) {
            return refuse(format!("--vlan names port {} twice: expected it once", rule.port));
        }
    }
    Ok(())
}

/// What the control thread does for the bridges.
#[derive(Debug)]
pub(super) struct Bridging {
    shared: Arc<Shared>,
    clock: Option<Clock>,
    started: Instant,
    /// Addresses, then stations forgotten by port.
    counters: Block,
    ports: usize,
}

impl Bridging {
    fn new(config: &SwitchConfig, ports: usize, page: &StatsPage) -> Result<Self, PageError> {
        let aged: Vec<String> = (0..ports).map(|port| format!("port{port}")).collect();
        let names: Vec<&str> = ["addresses"].into_iter().chain(aged.iter().map(String::as_str)).collect();
        let ageing = config.bridge.ageing;
        Ok(Self {
            shared: Arc::new(Shared::new(&config.bridge, ports, tsc::hz())),
            clock: (!ageing.is_zero()).then(|| Clock::new(ageing)),
            started: Instant::now(),
            counters: page.block("bridge/aged", &names)?,
            ports,
        })
    }

    /// Turns the database's clock.
    pub(super) fn tend(&mut self) {
        let fdb = &self.shared.fdb;
        if let Some(clock) = &mut self.clock {
            clock.turn(fdb, self.started.elapsed());
        }
        self.publish();
    }

    pub(super) fn publish(&self) {
        let fdb = &self.shared.fdb;
        self.counters.counter(0).set(fdb.addresses() as u64);
        for port in 0..self.ports {
            self.counters.counter(1 + port).set(fdb.aged(port));
        }
    }
}

impl Assembly<'_> {
    /// Gives each worker its bridge between the first `count` ports, over the queues that `routes` deals it.
    pub(super) fn add_bridges(
        &mut self,
        routes: &[Route],
        ports: &mut [Box<dyn Port>],
        count: usize,
    ) -> Result<Bridging, SwitchError> {
        let bridging = Bridging::new(self.config, count, &self.page)?;
        for worker in 0..self.config.lcores.len() {
            let lcore = self.config.lcores[worker];
            let mut inputs = Vec::new();
            let mut outputs: Vec<_> = (0..count).map(|_| Vec::new()).collect();
            for &Route { rx_port: port, queue, .. } in routes.iter().filter(|route| route.worker == worker) {
                let turn = outputs[port].len();
                inputs.push(Input { rx: self.open_rx(worker, port, queue, ports)?, port, turn });
                outputs[port].push(self.open_tx(worker, port, queue, ports)?);
            }
            let block = |port| self.page.block(&format!("bridge/port{port}/lcore{lcore}"), &COUNTERS);
            let counters = (0..count).map(block).collect::<Result<_, _>>()?;
            let bridge = Bridge::new(Arc::clone(&bridging.shared), inputs, outputs, counters, self.work());
            self.workers[worker].0.tasks.push(Box::new(bridge));
        }
        Ok(bridging)
    }
}
