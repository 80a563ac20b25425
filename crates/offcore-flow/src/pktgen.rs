//! A packet generator: sends packets on one port, receives them from another or the same, and tells what became of them.
//!
//! ```text
//! control thread ── settings ──▶ Sender ──▶ port A ~~~ what is tested ~~~ port B ──▶ Receiver ── counts, latencies ──▶
//! ```
//!
//! A sender's packets carry a flow, a number and the time they were due ([`offcore_wire::stamp`]). A receiver knows from
//! them what was lost, came late or twice, or was changed. A latency is counted from when a packet was *due* by the rate
//! that was asked for, whether it could be sent then or not, so what waits behind a stall counts as waiting; where no
//! rate was asked for, from when it was made.
//!
//! A captured packet is sent as it is: of those only the number is compared.
//!
//! * [`sizes`], [`rate`]: what can be asked for; [`control`]: how it reaches senders while they run,
//! * captures are in [`replay`],
//! * [`report`]: what a generator tells,
//! * [`search`]: the search for a throughput, [`trial`]: its measurements.

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
use offcore_stats::{StageClock, tsc};
use offcore_wire::ethernet::FCS_LEN;
use offcore_wire::stamp::STAMP_LEN;
use offcore_wire::traffic::HeaderTemplate;

use crate::error::{Field, SwitchError, check_lcores, too_long};
use crate::worker::threads::Threads;
use control::{Control, Handover};
use receiver::{Expected, Received, Receiver};
use replay::{Capture, Replay};
use sender::{Packets, Sender, Sent};
use source::Source;
use worker::Worker;

pub use control::Settings;
pub use source::MAX_FLOWS;

/// Bytes of the statistics page.
const STATS_PAGE: usize = 1 << 20;
/// How long workers may take to follow a change.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What is sent.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Packets that are made, with these headers from port 0, and with those from port 1 where both send.
    Made(Vec<HeaderTemplate>),
    /// A capture's.
    Captured {
        capture: Capture,
        /// Whether it begins anew at its end.
        repeat: bool,
        /// How many times faster than it was captured; without meaning where there is a rate.
        speed: f64,
    },
}

/// What a generator shall do.
#[derive(Clone, Debug)]
pub struct PktgenConfig {
    pub payload: Payload,
    /// Whether port 1 sends to port 0, too.
    pub bidirectional: bool,
    /// What senders do at first.
    pub settings: Settings,
    /// The content of one packet in so many is verified; of none when 0.
    pub verify: u32,
    /// What decides on sizes.
    pub seed: u64,
    /// One worker each: one for all; or one for what sends and one for what receives; or, where both ports send, two for
    /// each.
    pub lcores: Vec<usize>,
}

impl PktgenConfig {
    /// The smallest size for which headers and stamp fit, in bytes with FCS; 0 for captures.
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
                return Field::Ports.refuse(format!("{n}, expected one with a loop behind it, or two"));
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
    /// Before what they use: they are dropped first.
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
/// [`SwitchError`]; nothing runs then.
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
    // Where each port's packets come from, and where they are expected.
    let last = ports.len() - 1;
    let stream = RandomState::new().hash_one("stream") as u16;
    let sends = |port: usize| port == 0 || config.bidirectional;
    let mut sent = Vec::new();
    for (index, port) in ports.iter_mut().enumerate() {
        let name = format!("port{index}");
        // With two lcores 0 and 1 are what sends and what receives, with four also 2 and 3.
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
        // What comes to a port is what the other one sent; to the only one, its own.
        let from = last - index;
        let expected = match &config.payload {
            _ if !sends(from) => Expected::Nothing,
            Payload::Made(_) => Expected::Stream(stream.wrapping_add(from as u16)),
            Payload::Captured { .. } => Expected::Anything,
        };
        let sent_block = page.block(&format!("{name}/sender"), &Sent::NAMES)?;
        let received = page.block(&format!("{name}/receiver"), &Received::NAMES)?;
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

/// What port `index` sends.
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
    /// The ports.
    pub fn ports(&self) -> &[Box<dyn Port>] {
        &self.ports
    }

    /// Lets every port look after what it hangs on; to be called about every 20 ms.
    pub fn tend(&mut self) {
        self.ports.iter_mut().for_each(|port| port.tend());
    }

    /// What senders are told to do.
    pub fn settings(&self) -> Settings {
        self.control.settings()
    }

    /// Changes what senders do, and waits until they do so.
    ///
    /// # Errors
    /// When the settings cannot be followed (nothing is changed then), or a worker does not follow.
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

    /// Begins to send: a count from its beginning, a capture from its first packet.
    ///
    /// # Errors
    /// As for [`change`](Self::change).
    pub fn begin(&mut self) -> Result<(), SwitchError> {
        self.change(|settings| (settings.running, settings.start) = (true, settings.start + 1))
    }

    /// Sends nothing more; what is on its way is still received.
    ///
    /// # Errors
    /// As for [`change`](Self::change).
    pub fn pause(&mut self) -> Result<(), SwitchError> {
        self.change(|settings| settings.running = false)
    }

    /// Whether everything that was to be sent since the last start was: the count, or the capture.
    pub fn is_done(&self) -> bool {
        self.directions.iter().all(|direction| direction.sent.counter(Sent::Done as usize).value() == 1)
    }

    /// Whether every worker is still running.
    pub fn is_running(&self) -> bool {
        self.workers.all_run()
    }

    /// Stops the workers; what they had taken over is finished first. Returns the packets that could not be.
    pub fn stop(&mut self) -> usize {
        self.workers.stop()
    }
}
