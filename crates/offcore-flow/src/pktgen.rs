//! A packet generator: sends packets on one port, receives them on another or the same port, and reports losses and
//! latency.
//!
//! ```text
//! control thread ── settings ──▶ Sender ──▶ port A ~~~ what is tested ~~~ port B ──▶ Receiver ── counts, latencies ──▶
//! ```
//!
//! Each packet carries a flow, a number and the time at which it was due ([`offcore_wire::stamp`]). From these, a
//! receiver detects packets that were lost, late, duplicated or changed. Latency is measured from the time at which the
//! packet was *due* according to the requested rate, even if it was sent later. Waiting time behind a stall is
//! therefore included. Without a requested rate, latency is measured from the creation of the packet.
//!
//! Captured packets are sent unchanged. Only their number is compared.
//!
//! * [`sizes`], [`rate`]: settings; [`control`]: passes settings to running senders,
//! * [`replay`]: capture files,
//! * [`report`]: reports of a generator,
//! * [`search`]: the throughput search, [`trial`]: its measurements.

pub mod control;
pub mod rate;
mod receiver;
pub mod replay;
pub mod report;
pub mod search;
mod sender;
pub mod sizes;
mod source;
pub mod trial;
mod worker;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_dma::{Binding, Mover};
use offcore_mem::Pool;
use offcore_port::{Port, QueueSetup, RxCounters, TxCounters};
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{Label, StageClock, tsc};
use offcore_wire::ethernet::FCS_LEN;
use offcore_wire::stamp::STAMP_LEN;
use offcore_wire::traffic::HeaderTemplate;

use crate::error::{Field, SwitchError, check_lcores, too_long};
use crate::worker::threads::Threads;
use control::{Control, Handover};
use receiver::{Expected, RECEIVER, Receiver};
use replay::{Capture, Replay};
use sender::{Packets, SENDER, Sender, Sent};
use source::Source;
use worker::Worker;

pub use control::Settings;
pub use source::MAX_FLOWS;

/// Bytes of the statistics page.
const STATS_PAGE: usize = 1 << 20;
/// Maximum time in which workers apply a change.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The packets to send.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Generated packets with these headers: the first for port 0, the second for port 1 if both ports send.
    Made(Vec<HeaderTemplate>),
    /// Packets of a capture.
    Captured {
        capture: Capture,
        /// Whether the capture is repeated.
        repeat: bool,
        /// Speed-up relative to the times in the capture. It has no effect if a rate is set.
        speed: f64,
    },
}

/// Configuration of a generator.
#[derive(Clone, Debug)]
pub struct PktgenConfig {
    pub payload: Payload,
    /// Whether port 1 also sends to port 0.
    pub bidirectional: bool,
    /// Initial settings of senders.
    pub settings: Settings,
    /// The content of one packet in `verify` is verified; none if 0.
    pub verify: u32,
    /// Seed of the choice of sizes.
    pub seed: u64,
    /// Each lcore has one worker. One lcore does everything. With two lcores, one sends and one receives. If both ports
    /// send, four lcores are possible, two for each port.
    pub lcores: Vec<usize>,
}

impl PktgenConfig {
    /// Returns the smallest frame size with room for headers and stamp, in bytes including the FCS; 0 for captures.
    pub fn min_size(&self) -> usize {
        match &self.payload {
            Payload::Made(templates) => {
                let longest = templates.iter().map(HeaderTemplate::len).max().unwrap_or(0);
                longest + STAMP_LEN + FCS_LEN
            }
            Payload::Captured { .. } => 0,
        }
    }

    fn check(&self, ports: &[Box<dyn Port>], pool: &Pool) -> Result<(), SwitchError> {
        match (ports.len(), self.bidirectional) {
            (1, false) | (2, _) => {}
            (1, true) => return Field::Bidirectional.refuse("one port, expected two"),
            (n, _) => {
                return Field::Ports.refuse(format!("{n}, expected one whose packets return, or two"));
            }
        }
        self.check_sizes(&self.settings.sizes, pool)?;
        let most = if self.bidirectional { 4 } else { 2 };
        let lcores = self.lcores.len();
        if lcores > 2 && lcores != most {
            return Field::Lcores.refuse(format!(
                "{lcores} lcores, expected 1 for all, 2 for what sends and what receives{}",
                if most > 2 { ", or 4" } else { "" }
            ));
        }
        if lcores == 0 {
            return Field::Lcores.refuse("none, expected one at least");
        }
        check_lcores(&self.lcores)
    }

    fn check_sizes(&self, sizes: &sizes::Sizes, pool: &Pool) -> Result<(), SwitchError> {
        let largest = match &self.payload {
            Payload::Made(_) => sizes.largest(),
            Payload::Captured { capture, .. } => capture.largest(),
        };
        let most = pool.longest() + FCS_LEN;
        if largest > most {
            return too_long(largest, most);
        }
        let (min, smallest) = (self.min_size(), sizes.smallest());
        if smallest < min {
            return Field::Sizes.refuse(format!(
                "{smallest}, but these headers, {STAMP_LEN} bytes that number a packet and the FCS take {min} bytes: \
                 choose at least that"
            ));
        }
        Ok(())
    }
}

/// The counters of one direction, for the control thread.
#[derive(Debug)]
struct Direction {
    from: usize,
    to: usize,
    sent: Block,
    tx: Vec<TxCounters>,
    received: Block,
    rx: Vec<RxCounters>,
    handover: Arc<Handover>,
}

/// The counters of one port, for the control thread.
#[derive(Debug)]
struct PortCounters {
    rx: Vec<RxCounters>,
    tx: Vec<TxCounters>,
}

/// A running generator.
#[derive(Debug)]
pub struct Running {
    /// Declared before the fields that workers use, so that workers are dropped first.
    workers: Threads,
    config: PktgenConfig,
    ports: Vec<Box<dyn Port>>,
    control: Arc<Control>,
    directions: Vec<Direction>,
    counters: Vec<PortCounters>,
    pool: &'static Pool,
    _page: StatsPage,
}

/// Puts the generator together and starts its workers.
///
/// # Errors
/// [`SwitchError`]; no worker runs then.
pub fn start(
    config: PktgenConfig,
    mut ports: Vec<Box<dyn Port>>,
    pool: &'static Pool,
) -> Result<Running, SwitchError> {
    config.check(&ports, pool)?;
    let page = StatsPage::new(STATS_PAGE)?;
    let control = Arc::new(Control::new(config.settings.clone()));
    let mut workers: Vec<_> = config.lcores.iter().map(|_| worker(pool)).collect();
    let (mut directions, mut counters) = (Vec::new(), Vec::new());
    // Port `n` receives the packets that port `last - n` sends.
    let last = ports.len() - 1;
    let stream = RandomState::new().hash_one("stream") as u16;
    let sends = |port: usize| port == 0 || config.bidirectional;
    let mut sent = Vec::new();
    for (index, port) in ports.iter_mut().enumerate() {
        let name = format!("port{index}");
        // With two lcores, the first one sends and the second one receives. With four, the other two do this for port
        // 1.
        let place = match (workers.len(), index) {
            (1, _) => [0, 0],
            (4, 1) => [2, 3],
            _ => [0, 1],
        };
        let [sending, receiving] = place;
        let (mut tx, mut rx) = (Vec::new(), Vec::new());
        for queue in 0..port.queues() {
            rx.push(port.rx_queue(queue, setup(&mut workers[receiving].mover, &page, &name))?);
            tx.push(port.tx_queue(queue, setup(&mut workers[sending].mover, &page, &name))?);
        }
        let packets = if sends(index) { packets(&config, index, stream) } else { Packets::None };
        // A port receives the packets of the other port; a single port receives its own.
        let from = last - index;
        let expected = match &config.payload {
            _ if !sends(from) => Expected::Nothing,
            Payload::Made(_) => Expected::Stream(stream.wrapping_add(from as u16)),
            Payload::Captured { .. } => Expected::Anything,
        };
        let sent_block = page.block(&SENDER, &[(Label::Port, &name)])?;
        let received = page.block(&RECEIVER, &[(Label::Port, &name)])?;
        let handover = Arc::new(Handover::new());
        let sender = Sender::new(tx, packets, Arc::clone(&control), sent_block.clone());
        let receiver = Receiver::new(rx, expected, config.verify, Arc::clone(&handover), received.clone());
        counters.push(PortCounters { rx: receiver.rx_counters(), tx: sender.tx_counters() });
        sent.push((sent_block, sender.tx_counters()));
        directions.push((index, received, receiver.rx_counters(), handover));
        workers[sending].senders.push(sender);
        workers[receiving].receivers.push(receiver);
    }
    let directions = directions.into_iter().filter(|(to, ..)| sends(last - to));
    let mut directions: Vec<_> = directions
        .map(|(to, received, rx, handover)| {
            let from = last - to;
            let (block, tx) = &sent[from];
            Direction { from, to, sent: block.clone(), tx: tx.clone(), received, rx, handover }
        })
        .collect();
    directions.sort_by_key(|direction| direction.from);
    let mut threads = Threads::default();
    for (worker, &lcore) in workers.into_iter().zip(&config.lcores) {
        threads.start(lcore, None, |stop| worker.run(stop))?;
    }
    Ok(Running { workers: threads, config, ports, control, directions, counters, pool, _page: page })
}

fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage, port: &'a str) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::core(), port }
}

fn worker(pool: &'static Pool) -> Worker {
    Worker {
        senders: Vec::new(),
        receivers: Vec::new(),
        mover: Mover::new(),
        cache: pool.cache(),
        clock: StageClock::private(),
    }
}

/// Returns the packets that port `index` sends.
fn packets(config: &PktgenConfig, index: usize, stream: u16) -> Packets {
    match &config.payload {
        Payload::Made(templates) => {
            let Some(template) = templates.get(index) else { return Packets::None };
            let (stream, seed) = (stream.wrapping_add(index as u16), config.seed.wrapping_add(index as u64));
            let Settings { sizes, flows, .. } = &config.settings;
            Packets::Made(Box::new(Source::new(template.clone(), stream, seed, sizes, *flows)))
        }
        Payload::Captured { capture, repeat, speed } => {
            Packets::Captured(Box::new(Replay::new(capture.clone(), *repeat, *speed, tsc::hz())))
        }
    }
}

impl Running {
    /// Returns the ports.
    pub fn ports(&self) -> &[Box<dyn Port>] {
        &self.ports
    }

    /// Lets every port maintain its interface or device. Call it about every 20 ms.
    pub fn tend(&mut self) {
        self.ports.iter_mut().for_each(|port| port.tend());
    }

    /// Returns the settings of the senders.
    pub fn settings(&self) -> Settings {
        self.control.settings()
    }

    /// Changes the settings, and waits until senders have applied them.
    ///
    /// # Errors
    /// If the settings are invalid (nothing is changed then), or if a worker does not apply them.
    pub fn change(&mut self, change: impl FnOnce(&mut Settings)) -> Result<(), SwitchError> {
        let mut settings = self.settings();
        change(&mut settings);
        self.config.check_sizes(&settings.sizes, self.pool)?;
        if !(1..=MAX_FLOWS).contains(&settings.flows) {
            return Field::Flows.refuse(format!("{}, expected 1 to {MAX_FLOWS}", settings.flows));
        }
        if settings.burst == 0 {
            return Field::Burst.refuse("0, expected at least 1");
        }
        let version = self.control.change(|now| *now = settings);
        let asked = Instant::now();
        let applied = |sender: &Block| sender.counter(Sent::Applied as usize).value() >= version;
        while !self.directions.iter().all(|direction| applied(&direction.sent)) {
            if asked.elapsed() > TIMEOUT || !self.is_running() {
                let lcores = &self.config.lcores;
                return Field::Lcores
                    .refuse(format!("{lcores:?}, of which a worker does not follow: is it busy?"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Starts sending. A count starts from zero, a capture from its first packet.
    ///
    /// # Errors
    /// As for [`change`](Self::change).
    pub fn begin(&mut self) -> Result<(), SwitchError> {
        self.change(|settings| (settings.running, settings.start) = (true, settings.start + 1))
    }

    /// Stops sending. Packets in flight are still received.
    ///
    /// # Errors
    /// As for [`change`](Self::change).
    pub fn pause(&mut self) -> Result<(), SwitchError> {
        self.change(|settings| settings.running = false)
    }

    /// Whether the count or the capture has been sent completely since the last start.
    pub fn is_done(&self) -> bool {
        self.directions.iter().all(|direction| direction.sent.counter(Sent::Done as usize).value() == 1)
    }

    /// Whether every worker is still running.
    pub fn is_running(&self) -> bool {
        self.workers.all_run()
    }

    /// Stops the workers after they have finished the packets in flight. Returns the number of unfinished packets.
    pub fn stop(&mut self) -> usize {
        self.workers.stop()
    }
}
