//! A forwarding loop over faulty engines: every packet must arrive complete, in order and unchanged. The test also
//! checks itself: it fails if the reorder ring or the quarantine is switched off.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_dma::cpu::CpuDevice;
use offcore_dma::fault::{FaultCounts, Faults, FaultyChannel};
use offcore_dma::{Binding, ChannelId, CopyDevice, Mode};
use offcore_mem::Burst;
use offcore_ring::{device::Direction, driver};
use offcore_stats::tsc;
use offcore_vhost::testing::*;
use offcore_vhost::{Dequeue, Enqueue, VringCell};
use offcore_wire::UdpFlow;
use offcore_wire::ethernet::MacAddr;
use offcore_wire::probe::{self, ProbeHeader};
use offcore_wire::template::UdpTemplate;

const SIZE: u16 = 256;
const HEADER: usize = 12;
/// Number of guest buffers in each half: the first half is for TX, the second for RX.
const BUFFERS_EACH: usize = 256;

struct Loop {
    guest: Guest,
    worker: Worker,
    rx: driver::RingDriver<u64>,
    tx: driver::RingDriver<u64>,
    cells: [Arc<VringCell>; 2],
    enqueue: Enqueue,
    dequeue: Dequeue,
    templates: Vec<UdpTemplate>,
    free_tx: Vec<u64>,
    /// Packets that have arrived, but were not checked by the guest yet. This gives late copies time to corrupt them.
    arrived: VecDeque<(u64, u32)>,
    held: Burst,
    sent: u64,
    received: u64,
    scratch: Vec<u8>,
}

fn length(sequence: u64) -> usize {
    60 + (sequence as usize * 677) % 1455
}

impl Loop {
    fn new(channels: Vec<Box<dyn offcore_dma::Channel>>) -> Self {
        let (guest, mut worker) = (Guest::new(SIZE), Worker::new());
        worker.mover.set_lost_after(tsc::ticks(Duration::from_micros(500)));
        // A channel that loses copies is used again soon, to cause as many faults as possible.
        let soon = tsc::ticks(Duration::from_micros(50));
        worker.mover.set_back_off(soon, soon);
        let ids: Vec<ChannelId> = channels.into_iter().map(|c| worker.mover.add_channel(c)).collect();
        let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
        for (cell, layout) in cells.iter().zip([&guest.layout, &guest.tx_layout]) {
            let config = offcore_vhost::VringConfig { layout: layout.clone(), ..guest.config(FEATURES) };
            cell.publish(|wanted| {
                wanted.vring = Some(Arc::new(config));
                wanted.binding = Binding::new(Mode::Offload, ids.clone());
            });
        }
        let enqueue = Enqueue::attach(&cells[0], &mut worker.mover).unwrap();
        let dequeue = Dequeue::attach(&cells[1], &mut worker.mover).unwrap();
        let mut rx = driver::RingDriver::new(guest.layout.clone(), false);
        for i in 0..BUFFERS_EACH {
            let address = guest.buffer(BUFFERS_EACH + i, 2048);
            rx.add(address, 2048, Direction::Writable, address).unwrap();
        }
        rx.publish();
        let tx = driver::RingDriver::new(guest.tx_layout.clone(), false);
        let flow = UdpFlow::txonly(MacAddr::local(1), MacAddr::local(2));
        let templates = (60..=1514).map(|len| UdpTemplate::new(&flow, len).unwrap()).collect();
        let free_tx = (0..BUFFERS_EACH).map(|i| guest.buffer(i, 2048)).collect();
        Self {
            guest,
            worker,
            rx,
            tx,
            cells,
            enqueue,
            dequeue,
            templates,
            free_tx,
            arrived: VecDeque::new(),
            held: Burst::new(),
            sent: 0,
            received: 0,
            scratch: vec![0; 2048],
        }
    }

    fn transmit(&mut self, until: u64) {
        while self.sent < until
            && let Some(address) = self.free_tx.pop()
        {
            let len = length(self.sent);
            let end = HEADER + len;
            self.scratch[..HEADER].fill(0);
            let frame = &mut self.scratch[HEADER..end];
            self.templates[len - 60].write(frame).unwrap();
            probe::write(frame, ProbeHeader { fill: self.sent as u32, sequence: self.sent }).unwrap();
            self.guest.write(address, &self.scratch[..end]);
            self.tx.add(address, end as u32, Direction::Readable, address).unwrap();
            self.sent += 1;
        }
        self.tx.publish();
    }

    fn forward(&mut self) {
        let mut ctx = self.worker.ctx();
        ctx.mover.poll(ctx.clock);
        if self.held.is_empty() {
            self.dequeue.try_dequeue(&mut ctx, &mut self.held);
        }
        self.enqueue.submit(&mut ctx, &mut self.held);
        self.enqueue.poll_completed(&mut ctx);
    }

    fn collect(&mut self) -> Result<(), String> {
        self.tx.used().map_err(|e| e.to_string())?;
        while let Some(used) = self.tx.pop().map_err(|e| e.to_string())? {
            self.free_tx.push(used.token);
        }
        // Checks packets that arrived a while ago.
        let look = self.arrived.len().saturating_sub(64).max(self.arrived.len().min(8));
        for (address, len) in self.arrived.drain(..look).collect::<Vec<_>>() {
            self.check(address, len)?;
            self.rx.add(address, 2048, Direction::Writable, address).map_err(|_| "the RX ring is full")?;
        }
        self.rx.publish();
        self.rx.used().map_err(|e| e.to_string())?;
        while let Some(used) = self.rx.pop().map_err(|e| e.to_string())? {
            self.arrived.push_back((used.token, used.len));
        }
        Ok(())
    }

    fn check(&mut self, address: u64, len: u32) -> Result<(), String> {
        let due = self.received;
        let bytes = self.guest.read(address, len as usize);
        if bytes.len() != HEADER + length(due) {
            return Err(format!("packet {due} is {} bytes long", bytes.len()));
        }
        let frame = &bytes[HEADER..];
        let header = probe::check_header(frame).map_err(|e| format!("packet {due}: {e}"))?;
        if header.sequence != due || header.fill != due as u32 {
            return Err(format!("packet {} arrived where {due} was due", header.sequence));
        }
        probe::check_content(frame).map_err(|e| format!("packet {due}: {e}"))?;
        self.received += 1;
        Ok(())
    }

    /// Forwards `packets` packets and stops both virtqueues.
    fn run(&mut self, packets: u64) -> Result<(), String> {
        let mut progress = (0, Instant::now());
        while self.received < packets {
            self.transmit(packets);
            self.forward();
            self.collect()?;
            if self.received != progress.0 {
                progress = (self.received, Instant::now());
            } else if progress.1.elapsed() > Duration::from_secs(10) {
                return Err(format!("no progress after packet {}", self.received));
            }
        }
        for cell in &self.cells {
            cell.publish(|wanted| wanted.vring = None);
        }
        for _ in 0..100_000 {
            self.forward();
        }
        for cell in &self.cells {
            cell.wait(Duration::ZERO).map_err(|e| e.to_string())?;
            if cell.in_flight() != 0 {
                return Err(format!("{} packets are in flight after the stop", cell.in_flight()));
            }
        }
        Ok(())
    }
}

fn faults(seed: u64) -> Faults {
    Faults {
        seed,
        error: 6,
        partial: 4,
        delay: 50,
        delay_polls: 20,
        reorder: 500,
        // 1 in 1000 is never completed or late. The unit is per mille, and the copies are split between two channels:
        // one never completes some copies, the other completes some late.
        never: 0,
        late: 0,
        late_polls: 3000,
        reset_calls: 3,
    }
}

/// Returns a channel that never completes some copies, and a channel that completes `late` of a thousand copies late.
fn channels(late: u32) -> (Vec<Box<dyn offcore_dma::Channel>>, [Arc<FaultCounts>; 2]) {
    let open = |faults| FaultyChannel::new(CpuDevice.open_channel(1024).unwrap(), faults);
    let never = open(Faults { never: 1, ..faults(1) });
    let late = open(Faults { late, ..faults(2) });
    let counts = [never.counts(), late.counts()];
    (vec![Box::new(never), Box::new(late)], counts)
}

/// Number of packets for the full run. Shorter runs are sufficient to detect a missing mechanism.
const MILLION: u64 = 1_000_000;

#[test]
fn a_million_packets_survive_every_fault() {
    let (channels, counts) = channels(1);
    let mut looped = Loop::new(channels);
    looped.run(MILLION).unwrap();
    let total =
        |f: fn(&FaultCounts) -> &offcore_stats::Counter| counts.iter().map(|c| f(c).value()).sum::<u64>();
    assert!(total(|c| &c.errors) + total(|c| &c.partials) > 10_000, "about 1 % of two million copies fail");
    assert!(total(|c| &c.reordered) > 10_000);
    assert!(total(|c| &c.never) > 100, "{} never completed", total(|c| &c.never));
    assert!(total(|c| &c.late) > 100, "{} were late", total(|c| &c.late));
    let stats = looped.worker.mover.stats();
    assert!(stats.resets > 100 && stats.quarantined > 100, "{stats:?}");
    // Every packet buffer is returned.
    drop(looped.enqueue);
    let left = std::iter::from_fn(|| looped.worker.cache.take()).count();
    assert_eq!(left, 4096);
}

#[test]
fn disabled_reorder_ring_is_detected() {
    let (channels, _) = channels(1);
    let mut looped = Loop::new(channels);
    looped.worker.mover.switch_off_order();
    let error = looped.run(MILLION).unwrap_err();
    assert!(error.starts_with("packet"), "{error}");
}

#[test]
fn disabled_quarantine_is_detected() {
    let (channels, counts) = channels(10);
    let mut looped = Loop::new(channels);
    looped.worker.mover.switch_off_quarantine();
    let error = looped.run(MILLION).unwrap_err();
    assert!(error.starts_with("packet"), "{error}");
    assert!(counts[1].late_after_taken.value() > 0, "a copy landed after it had been given up");
}
