//! One thing to be measured: the packet-copy forwarder of one mode and engine, between the two queues of a network card.
//!
//! Timed is the production worker's round: receive handles, copy each packet into a new buffer, rewrite its addresses,
//! hand it over. With an engine a window of packets is received and submitted (timed); then the engine makes some copies,
//! untimed, and the worker a round, timed, in which it reaps what is done and hands it over, until all are.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use offcore_dma::{Binding, Mode, Mover};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_port::copy::{CopyRx, CopySetup};
use offcore_stats::page::StatsPage;
use offcore_stats::tsc;
use offcore_wire::ethernet::FCS_LEN;

use super::nic::Nic;
use crate::BURST;
use crate::alternate::{Cost, Subject};
use crate::background::Background;
use crate::copier::{Copier, Engine, Setup};
use crate::core_cost::NEVER_LOST;
use crate::guest::{PEER_MAC, PORT_MAC};
use crate::lockstep::OtherCore;
use crate::rules::rules;
use crate::temperature::Temperature;

/// Packets that may be in flight at a time: more than a window.
const IN_FLIGHT: usize = 1024;
/// What is written into packets; the source changes with each window.
const ADDRESSES: Addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };
/// How often in a row the engine is run for nothing, at most.
const MOST_IN_VAIN: usize = 64;

/// The forwarder.
#[derive(Debug)]
pub(super) struct Variant {
    /// Who copies.
    pub(super) setup: Setup,
    nic: Arc<Mutex<Nic>>,
    sent: Arc<AtomicUsize>,
    /// TSC ticks that the card's queues have taken, which are not the forwarder's.
    nic_ticks: Arc<AtomicU64>,
    worker: Worker,
    engine: Option<Arc<Mutex<Engine>>>,
    /// Whether it has copied anything when it was run last.
    engine_worked: Arc<AtomicBool>,
    background: Option<Background>,
    temperature: Temperature,
    mode: Forward,
    /// Packets forwarded.
    packets: u64,
}

impl Variant {
    /// A forwarder behind `nic`, which it shares with the other variants of its cell.
    ///
    /// # Errors
    /// When the engine cannot be had.
    pub(super) fn new(
        setup: Setup,
        nic: &Arc<Mutex<Nic>>,
        pool: &'static Pool,
        temperature: Temperature,
    ) -> Result<Self> {
        let mut mover = Mover::new();
        // Whoever steps the engine may be taken off its core for long; no copy is lost by that.
        mover.set_lost_after(tsc::ticks(NEVER_LOST));
        let mut engine = setup.open()?;
        if let Some(engine) = &mut engine {
            mover.add_channel(
                engine.take_channel().context("the engine's channel belongs to another variant")?,
            );
        }
        let channels: Vec<_> = mover.channels().map(|(id, _)| id).collect();
        let (queues, sent, nic_ticks) = {
            let nic = lock(nic);
            ((nic.rx_queue(), nic.tx_queue()), nic.sent(), nic.taken_ticks())
        };
        let copy = CopySetup {
            mover: &mut mover,
            binding: Binding::new(setup.mode, channels),
            in_flight: IN_FLIGHT,
            max_frame: 0,
            min_copy: 0,
            pool,
            stats: &StatsPage::new(1 << 16)?,
            name: "port0/rx0",
        };
        let rx = Box::new(CopyRx::new(queues.0, copy)?);
        let rules = Rules::new(Forward::Mac, ADDRESSES, 0);
        let worker = Worker::new(vec![Box::new(Forwarding::new(rx, queues.1, rules))], mover, pool.cache());
        Ok(Self {
            setup,
            nic: Arc::clone(nic),
            sent,
            nic_ticks,
            worker,
            engine: engine.map(|engine| Arc::new(Mutex::new(engine))),
            engine_worked: Arc::default(),
            background: None,
            temperature,
            mode: Forward::Mac,
            packets: 0,
        })
    }

    /// Puts a copier on the other core that makes as many copies as this variant's core, while that is timed.
    #[must_use]
    pub(super) fn with_background(mut self, frame: usize) -> Self {
        self.background = Some(Background::new(frame - FCS_LEN));
        self
    }

    /// Copies that the copier beside has made for each packet; `None` without one.
    pub(super) fn background_copies(&self) -> Option<f64> {
        Some(self.background.as_ref()?.made() as f64 / self.packets.max(1) as f64)
    }

    /// Packets forwarded, every one of them checked.
    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    /// Bytes that core and engine have copied for each packet so far.
    pub(super) fn copied_bytes(&self) -> f64 {
        let by_engine: u64 = self.worker.mover.channels().map(|(_, channel)| channel.stats().bytes).sum();
        (self.worker.mover.stats().core_bytes + by_engine) as f64 / self.packets.max(1) as f64
    }

    /// Nanoseconds that the engine took for a copy; `None` without one.
    pub(super) fn engine_ns_per_copy(&self) -> Option<f64> {
        Some(lock(self.engine.as_ref()?).ns_per_copy())
    }

    /// TSC ticks of a round that finds nothing.
    pub(super) fn empty_poll(&mut self) -> f64 {
        const ROUNDS: usize = 1000;
        self.rounds(ROUNDS) as f64 / ROUNDS as f64
    }

    fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    fn rounds(&mut self, rounds: usize) -> u64 {
        let before = self.nic_ticks.load(Ordering::Relaxed);
        let start = tsc::now();
        for _ in 0..rounds {
            self.worker.round();
        }
        let all = tsc::now() - start;
        all.saturating_sub(self.nic_ticks.load(Ordering::Relaxed) - before)
    }

    /// As many rounds as it takes to receive a window, with the copier beside where there is one.
    fn take_window(&mut self, other: &OtherCore) -> Result<u64> {
        let beside = self.background.as_ref().map(|background| background.begin(other)).transpose()?;
        let before = self.worker.mover.stats().core_copies;
        let ticks = self.rounds(self.temperature.window() / BURST);
        if let Some(beside) = beside {
            beside.end()?;
        }
        let copies = self.worker.mover.stats().core_copies - before;
        if let Some(background) = &mut self.background {
            background.follow(ticks, copies);
        }
        Ok(ticks)
    }

    /// Some copies by the engine, always on the other core: on this one it would leave the packets in its caches. Returns
    /// whether it has made any.
    fn run_engine(&self, other: &OtherCore) -> Result<bool> {
        let Some(engine) = self.engine.as_ref().map(Arc::clone) else { return Ok(false) };
        let made = Arc::clone(&self.engine_worked);
        other.run(move || {
            made.store(lock(&engine).run_portion().copies > 0, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(self.engine_worked.load(Ordering::Relaxed))
    }

    /// Hot data stays with the measured core; otherwise the other core does it.
    fn elsewhere(&self, other: &OtherCore, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        if self.temperature == Temperature::Hot { job() } else { other.run(job) }
    }

    fn on_nic(
        &self,
        other: &OtherCore,
        job: impl FnOnce(&mut Nic) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let nic = Arc::clone(&self.nic);
        self.elsewhere(other, move || job(&mut lock(&nic)))
    }
}

impl Subject for Variant {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        let window = self.temperature.window();
        self.on_nic(other, Nic::receive)?;
        {
            let mut nic = lock(&self.nic);
            nic.lend(&mut self.worker.cache)?;
            let addresses = Addresses { source: nic.source(), ..ADDRESSES };
            *rules(&mut self.worker)? = Rules::new(self.mode, addresses, 0);
        }
        let mut ticks = self.take_window(other)?;
        // In mode `auto` the core may have made all copies: then there is nothing to wait for.
        let mut in_vain = 0;
        while self.sent() < window && in_vain < MOST_IN_VAIN {
            in_vain = if self.run_engine(other)? { 0 } else { in_vain + 1 };
            ticks += self.rounds(1);
        }
        let sent = self.sent();
        ensure!(sent == window, "{sent} of {window} packets were sent, and the engine has nothing to do");
        lock(&self.nic).take_back(&mut self.worker.cache);
        self.on_nic(other, Nic::check)?;
        self.packets += window as u64;
        Ok(Cost { packets: window as u64, core: ticks, guest: 0 })
    }
}

/// The variant of `setup` without a copier beside.
pub(super) fn is(setup: Setup) -> impl Fn(&Variant) -> bool {
    move |variant| variant.setup == setup && variant.background.is_none()
}

/// The variant's counterpart in another mode: the core's has no engine.
pub(super) fn counterpart(setup: Setup, mode: Mode) -> Setup {
    Setup { mode, copier: if mode == Mode::Cpu { Copier::Core } else { setup.copier } }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_mem::Hugepages;

    fn variant(temperature: Temperature) -> (Variant, OtherCore) {
        let pool = Pool::new(super::super::nic::buffers(temperature), 2048, Hugepages::None).unwrap();
        let nic = Arc::new(Mutex::new(Nic::new(pool, temperature, 128).unwrap()));
        (Variant::new(Setup::CPU, &nic, pool, temperature).unwrap(), OtherCore::start(None).unwrap())
    }

    #[test]
    fn a_packet_that_was_not_copied_is_noticed() {
        let (mut variant, other) = variant(Temperature::Hot);
        variant.window(&other).unwrap();
        let as_received = lock(&variant.nic).rx_queue();
        let tx = lock(&variant.nic).tx_queue();
        let rules = Rules::new(Forward::Mac, ADDRESSES, 0);
        variant.worker.tasks = vec![Box::new(Forwarding::new(as_received, tx, rules))];
        let error = variant.window(&other).unwrap_err();
        assert!(format!("{error:#}").contains("not copied"), "{error:#}");
    }

    #[test]
    fn cold_packets_have_addresses_checked() {
        let (mut variant, other) = variant(Temperature::Cold);
        // Buffers that have been copied into come round again with the addresses of their last turn.
        for _ in 0..3 {
            variant.window(&other).unwrap();
        }
        variant.mode = Forward::Io;
        let error = variant.window(&other).unwrap_err();
        assert!(format!("{error:#}").contains("addresses"), "{error:#}");
    }

    #[test]
    fn a_packet_that_is_not_sent_is_noticed() {
        let (mut variant, other) = variant(Temperature::Hot);
        variant.mode = Forward::Rxonly;
        let error = variant.window(&other).unwrap_err();
        assert!(format!("{error:#}").contains("0 of 32 packets were sent"), "{error:#}");
    }
}
