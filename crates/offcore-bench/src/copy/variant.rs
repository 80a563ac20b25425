//! A measured variant: the packet-copy forwarder with a mode and an engine, between the two queues of a network card.
//!
//! The timed part is the production worker's round: receive handles, copy each packet into a new buffer, rewrite its
//! addresses and hand it over. With an engine, a window of packets is first received and submitted (timed). Then the
//! engine makes some copies (untimed), and the worker runs a round (timed) in which it reaps completions and hands the
//! packets over. This repeats until all packets are sent.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use offcore_dma::{Binding, Mode};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_port::copy::{CopyRx, CopySetup};
use offcore_stats::page::StatsPage;
use offcore_wire::ethernet::FCS_LEN;

use super::nic::Nic;
use crate::BURST;
use crate::guests::guest::{PEER_MAC, PORT_MAC};
use crate::method::alternate::{Cost, Subject};
use crate::method::copier::{Copier, Setup};
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::method::timed_worker::{self, TimedWorker};

/// Maximum number of packets in flight, which exceeds a window.
const IN_FLIGHT: usize = 1024;
/// Addresses that are written into packets. The source changes with each window.
const ADDRESSES: Addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };

/// The forwarder.
#[derive(Debug)]
pub(super) struct Variant {
    /// Mode and engine.
    pub(super) setup: Setup,
    nic: Arc<Mutex<Nic>>,
    sent: Arc<AtomicUsize>,
    timed: TimedWorker,
    mode: Forward,
    /// Number of forwarded packets.
    packets: u64,
}

impl Variant {
    /// Creates a forwarder behind `nic`, which it shares with the other variants of its cell.
    pub(super) fn new(
        setup: Setup,
        nic: &Arc<Mutex<Nic>>,
        pool: &'static Pool,
        temperature: Temperature,
    ) -> Result<Self> {
        let mut engine = setup.open()?;
        let (mut mover, channels) = timed_worker::mover_with(engine.as_mut())?;
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
            port: "port0",
            index: 0,
        };
        let rx = Box::new(CopyRx::new(queues.0, copy)?);
        let rules = Rules::new(Forward::Mac, ADDRESSES, 0);
        let worker = Worker::new(vec![Box::new(Forwarding::new(rx, queues.1, rules))], mover, pool.cache());
        let mut timed = TimedWorker::new(worker, engine, temperature);
        // The time of the card's queues does not belong to the forwarder.
        timed.foreign_ticks = nic_ticks;
        Ok(Self { setup, nic: Arc::clone(nic), sent, timed, mode: Forward::Mac, packets: 0 })
    }

    /// Adds a background copier on the other core, which makes as many copies as this variant's core during the timed
    /// parts.
    #[must_use]
    pub(super) fn with_background(mut self, frame: usize) -> Self {
        self.timed.set_background(frame - FCS_LEN);
        self
    }

    /// Returns the background copier's copies per packet, or `None` without a background copier.
    pub(super) fn background_copies(&self) -> Option<f64> {
        Some(self.timed.background_copies()? as f64 / self.packets.max(1) as f64)
    }

    /// Returns the number of forwarded packets, which were all checked.
    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    /// Returns the bytes that core and engine have copied per packet so far.
    pub(super) fn copied_bytes(&self) -> f64 {
        self.timed.copied_bytes() as f64 / self.packets.max(1) as f64
    }

    /// Returns the engine's nanoseconds per copy, or `None` without an engine.
    pub(super) fn engine_ns_per_copy(&self) -> Option<f64> {
        self.timed.engine_ns_per_copy()
    }

    /// Returns the TSC ticks of a round without work.
    pub(super) fn empty_poll(&mut self) -> f64 {
        self.timed.empty_poll()
    }
}

impl Subject for Variant {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        let window = self.timed.temperature.window();
        other.run_on(self.timed.temperature, &self.nic, Nic::receive)?;
        {
            let mut nic = lock(&self.nic);
            nic.lend(&mut self.timed.worker.cache)?;
            let addresses = Addresses { source: nic.source(), ..ADDRESSES };
            *self.timed.rules()? = Rules::new(self.mode, addresses, 0);
        }
        let sent = || self.sent.load(Ordering::Relaxed);
        let ticks = self.timed.rounds_until(window / BURST, other, || sent() < window)?;
        let sent = sent();
        ensure!(sent == window, "{sent} of {window} packets were sent, and the engine has nothing to do");
        lock(&self.nic).take_back(&mut self.timed.worker.cache);
        other.run_on(self.timed.temperature, &self.nic, Nic::check)?;
        self.packets += window as u64;
        Ok(Cost { packets: window as u64, core: ticks, guest: 0 })
    }
}

/// Returns a predicate for the variant of `setup` without a background copier.
pub(super) fn is(setup: Setup) -> impl Fn(&Variant) -> bool {
    move |variant| variant.setup == setup && variant.background_copies().is_none()
}

/// Returns the variant's counterpart in another mode. The counterpart in mode `cpu` has no engine.
pub(super) fn counterpart(setup: Setup, mode: Mode) -> Setup {
    Setup { mode, copier: if mode == Mode::Cpu { Copier::Core } else { setup.copier } }
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
        variant.timed.worker.tasks = vec![Box::new(Forwarding::new(as_received, tx, rules))];
        let error = variant.window(&other).unwrap_err();
        assert!(format!("{error:#}").contains("not copied"), "{error:#}");
    }

    #[test]
    fn cold_packets_have_addresses_checked() {
        let (mut variant, other) = variant(Temperature::Cold);
        // After three windows, destination buffers are used again with the addresses of their previous turn.
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
