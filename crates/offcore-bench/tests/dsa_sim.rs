//! Tests vhost on a simulated DSA device with injected faults: every packet arrives in order and unchanged, and every
//! credit is returned. The protecting mechanisms are shown to be necessary: with one mechanism switched off, the same
//! run fails.
//!
//! Each fault alone is tested with a hundred thousand packets, all of them together with a million. `OFFCORE_FULL=1`
//! selects ten times as many.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offcore_bench::guest::{Guests, PEER_MAC, PORT_MAC, Traffic, buffers_len};
use offcore_bench::temperature::Temperature;
use offcore_bench::workload::Workload;
use offcore_dma::mover::QueueId;
use offcore_dma::{Binding, Channel, Context, CopyDevice, Mode, Mover};
use offcore_dsa::driver::{DsaDevice, Options};
use offcore_dsa::sim::{SimDevice, SimEngine, SimOptions};
use offcore_flow::forward::{Addresses, Rewrite};
use offcore_mem::testing::guest_regions;
use offcore_mem::{Burst, Hugepages, Pool, PoolCache};
use offcore_ring::{Areas, Layout};
use offcore_stats::{StageClock, tsc};
use offcore_vhost::features::{VIRTIO_F_VERSION_1, VIRTIO_NET_F_MRG_RXBUF};
use offcore_vhost::{Dequeue, Enqueue, VringCell, VringConfig};

/// Address of a guest's memory as seen by the device.
const GUEST_ADDRESS: u64 = 0x1_0000_0000;
/// Size of each of a guest's two virtqueues in bytes.
const RING_BYTES: usize = 1 << 20;
const RING: u32 = 1024;
const WINDOW: usize = 256;
/// Virtual time on the device per round of the loop, in nanoseconds.
const ROUND_NS: u64 = 4_000;

/// A guest that sends packets to itself through the device under test.
struct Looped {
    guest: Guests,
    cells: [Arc<VringCell>; 2],
    dequeue: Dequeue,
    enqueue: Enqueue,
    held: Burst,
    queues: [QueueId; 2],
}

/// One worker, one device, and the guests whose packets they copy.
struct Loop {
    guests: Vec<Looped>,
    mover: Mover,
    cache: PoolCache,
    clock: StageClock,
    device: SimDevice,
    engine: SimEngine,
}

impl Loop {
    /// Creates one guest for each frame length. All use the work queues `wqs` of a device that `options` describes.
    fn new(options: &str, wqs: &[&str], frames: &[usize]) -> Self {
        Self::with_ring(1024, options, wqs, frames)
    }

    /// As [`Loop::new`], with channels of `ring` copies.
    fn with_ring(ring: usize, options: &str, wqs: &[&str], frames: &[usize]) -> Self {
        let options: SimOptions = options.parse().unwrap();
        let (device, engine) = SimDevice::stepped("dsa-sim0", options).unwrap();
        let mut mover = Mover::new();
        mover.set_lost_after(tsc::ticks(Duration::from_micros(500)));
        let mut ids = Vec::new();
        for wq in wqs {
            let opened = DsaDevice::simulated(&device, wq, Options::default()).unwrap();
            let channel: Box<dyn Channel> = opened.open_channel(ring).unwrap();
            ids.push(mover.add_channel(channel));
        }
        let pool = Pool::new(8192, 2048, Hugepages::None).unwrap();
        let guests = frames
            .iter()
            .map(|&frame| Looped::new(&mut mover, &Binding::new(Mode::Offload, ids.clone()), frame))
            .collect();
        Self { guests, mover, cache: pool.cache(), clock: StageClock::private(), device, engine }
    }

    /// Runs a round of the worker over every guest, and advances the device's time.
    fn round(&mut self) {
        let Self { guests, mover, cache, clock, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: 32 };
        ctx.mover.poll(ctx.clock);
        for guest in guests {
            guest.forward(&mut ctx);
        }
        self.engine.run_until(self.engine.now() + ROUND_NS);
    }

    /// Transfers `packets` packets of each guest, then stops their virtqueues.
    fn run(&mut self, packets: u64) -> Result<(), String> {
        let mut progress = (0, Instant::now());
        loop {
            for guest in &mut self.guests {
                guest.exchange(packets)?;
            }
            let received: Vec<u64> = self.guests.iter().map(|g| g.guest.seen().received).collect();
            if received.iter().all(|&n| n == packets) {
                break;
            }
            self.round();
            let sum = received.iter().sum();
            if sum != progress.0 {
                progress = (sum, Instant::now());
            } else if progress.1.elapsed() > Duration::from_secs(10) {
                return Err(format!("no progress for 10 s, {received:?} of {packets} packets received"));
            }
        }
        self.stop()
    }

    fn stop(&mut self) -> Result<(), String> {
        for cell in self.guests.iter().flat_map(|guest| &guest.cells) {
            cell.publish(|wanted| wanted.vring = None);
        }
        // Waits longer than the time after which a copy counts as lost, so that outstanding copies are redone.
        let end = Instant::now() + Duration::from_millis(20);
        while Instant::now() < end || self.mover.channels().any(|(_, channel)| channel.in_flight() > 0) {
            self.round();
            if Instant::now() > end + Duration::from_secs(10) {
                return Err("copies are in flight 10 s after the stop".into());
            }
        }
        for guest in &self.guests {
            for cell in &guest.cells {
                cell.wait(Duration::ZERO).map_err(|e| e.to_string())?;
                if cell.in_flight() != 0 {
                    return Err(format!("{} packets are in flight after the stop", cell.in_flight()));
                }
            }
            let seen = guest.guest.seen();
            if seen.verified != seen.sent {
                return Err(format!("packets lost or not verified: {seen:?}"));
            }
        }
        for (_, channel) in self.mover.channels() {
            let (room, ring) = (channel.room(), channel.info().ring_size);
            if room != ring {
                return Err(format!("room for {room} of {ring} copies: credits are gone"));
            }
        }
        Ok(())
    }

    /// Returns the number of free packet buffers. It must be the total number if no packet is in flight.
    fn free_buffers(mut self) -> usize {
        self.guests.clear();
        std::iter::from_fn(|| self.cache.take()).count()
    }
}

impl Looped {
    fn new(mover: &mut Mover, binding: &Binding, frame: usize) -> Self {
        let buffers = 2 * buffers_len(Temperature::Remote);
        let memory = guest_regions([(GUEST_ADDRESS, GUEST_ADDRESS, buffers + 2 * RING_BYTES)]);
        let ring = |index: usize| {
            let start = GUEST_ADDRESS + (buffers + index * RING_BYTES) as u64;
            let areas = Areas { descriptors: start, driver: start + 0x2_0000, device: start + 0x4_0000 };
            Layout::in_memory(&memory, areas, RING, false).unwrap()
        };
        let workload = Workload::table8(Temperature::Remote, frame);
        let traffic = Arc::new(Mutex::new(Traffic::new(&memory, &memory, &workload).unwrap()));
        let guest = Guests::new(&traffic, ring(0), ring(1), 0);
        let cells = [Arc::new(VringCell::new(0)), Arc::new(VringCell::new(1))];
        for (cell, layout) in cells.iter().zip([ring(0), ring(1)]) {
            let vring = VringConfig {
                memory: Arc::clone(&memory),
                layout,
                start: VringConfig::next_start(),
                base: 0,
                features: VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF,
                call: None,
                kick: None,
                log: None,
                inflight: None,
                enabled: true,
            };
            cell.publish(|wanted| {
                wanted.vring = Some(Arc::new(vring));
                wanted.binding = binding.clone();
            });
        }
        let before: Vec<QueueId> = mover.queues().collect();
        let enqueue = Enqueue::attach(&cells[0], mover).unwrap();
        let dequeue = Dequeue::attach(&cells[1], mover).unwrap();
        let new: Vec<QueueId> = mover.queues().filter(|queue| !before.contains(queue)).collect();
        let queues = [new[0], new[1]];
        Self { guest, cells, dequeue, enqueue, held: Burst::new(), queues }
    }

    fn forward(&mut self, ctx: &mut Context<'_>) {
        if self.held.is_empty() {
            self.dequeue.try_dequeue(ctx, &mut self.held);
            let addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };
            Rewrite::Mac(addresses).burst(&mut self.held);
        }
        self.enqueue.submit(ctx, &mut self.held);
        self.enqueue.poll_completed(ctx);
    }

    /// Runs the guest's side: collects and checks received packets, and keeps a window of packets in flight.
    fn exchange(&mut self, packets: u64) -> Result<(), String> {
        self.guest.collect().map_err(|error| format!("packet: {error:#}"))?;
        let room = WINDOW - self.guest.outstanding();
        let left = packets - self.guest.seen().sent;
        // Sends half a window at a time. Buffers are used in order, so that a buffer is not rewritten while it is being
        // copied.
        if room >= WINDOW / 2 || left < WINDOW as u64 {
            let n = room.min(WINDOW / 2).min(left as usize);
            self.guest.transmit(n).map_err(|error| format!("{error:#}"))?;
        }
        Ok(())
    }
}

/// Returns a tenth of a soak test's packets unless `OFFCORE_FULL` is set.
fn soak(packets: u64) -> u64 {
    if std::env::var_os("OFFCORE_FULL").is_some() { packets } else { packets / 10 }
}

const ALL_FAULTS: &str = "profile=vhost,seed=7,fault=page:0.001+hw:0.0001+drop:0.0005+late:0.0001";

#[test]
fn packets_survive_faults_and_a_halt() {
    let mut looped = Loop::new(ALL_FAULTS, &["wq0.0", "wq0.1"], &[64, 590, 1518]);
    let packets = soak(10_000_000) / 3;
    // The device halts in the middle and resumes some rounds later.
    let (mut halted, mut back) = (false, 0);
    let mut progress = (0, Instant::now());
    loop {
        for guest in &mut looped.guests {
            guest.exchange(packets).unwrap();
        }
        let received: u64 = looped.guests.iter().map(|g| g.guest.seen().received).sum();
        if received == 3 * packets {
            break;
        }
        if !halted && received > packets {
            halted = true;
            looped.device.halt();
            back = received + 10_000;
        }
        if halted && back != 0 && received > back {
            back = 0;
            looped.device.reset();
        }
        looped.round();
        if received != progress.0 {
            progress = (received, Instant::now());
        }
        assert!(progress.1.elapsed() < Duration::from_secs(10), "no progress, {received} received");
    }
    looped.stop().unwrap();
    let (device, mover) = (looped.device.stats(), looped.mover.stats());
    assert!(halted && back == 0, "the device halted and came back");
    assert!(device.injected_page_faults > packets / 1000, "{device:?}");
    assert!(device.injected_hardware_errors > 0 && device.injected_late > 0, "{device:?}");
    assert!(device.injected_drops > 0 && (device.halts, device.resets) == (1, 1), "{device:?}");
    assert!(mover.fallbacks > 0 && mover.resets > 0, "{mover:?}");
    // After the halt the channels were probed and accepted copies again.
    for (_, channel) in looped.mover.channels() {
        let stats = channel.stats();
        assert!(stats.completed > packets, "{stats:?}");
        assert_eq!(stats.submitted, stats.completed + stats.failed);
    }
    assert_eq!(looped.free_buffers(), 8192);
}

#[test]
fn disabled_reorder_ring_is_detected() {
    let mut looped = Loop::new(ALL_FAULTS, &["wq0.0", "wq0.1"], &[1518]);
    looped.mover.switch_off_order();
    let error = looped.run(100_000).unwrap_err();
    assert!(error.starts_with("packet"), "{error}");
}

#[test]
fn disabled_dsa_recovery_is_detected() {
    let mut looped = Loop::new(ALL_FAULTS, &["wq0.0", "wq0.1"], &[1518]);
    looped.mover.switch_off_recovery();
    let error = looped.run(100_000).unwrap_err();
    assert!(error.starts_with("packet"), "{error}");
}

/// The test needs a late copy that lands in reused memory after a packet has been copied there and before it is
/// checked. Most runs have such a copy. Lateness and the detection of lost copies use different clocks, so several
/// kinds of runs are tried.
#[test]
fn disabled_quarantine_is_detected() {
    let noticed = (0..32).find_map(|seed| {
        let options = format!("profile=vhost,seed={seed},fault=late:0.01:{}", 5000 << (seed % 4));
        let mut looped = Loop::new(&options, &["wq0.0", "wq0.1"], &[1518]);
        looped.mover.switch_off_quarantine();
        looped.run(300_000).err()
    });
    let error = noticed.unwrap();
    assert!(error.starts_with("packet"), "{error}");
}

#[test]
fn packets_survive_each_fault_alone() {
    for fault in ["page:0.01", "hw:0.01", "drop:0.0001", "late:0.001", "page:0.5"] {
        let options = format!("profile=vhost,seed=3,fault={fault}");
        let mut looped = Loop::new(&options, &["wq0.0", "wq0.1"], &[60 + 4, 1518]);
        looped.run(soak(1_000_000) / 4).unwrap_or_else(|error| panic!("{fault}: {error}"));
    }
}

/// Runs two guests on a channel of a slow device. The first offers eight bursts per round, the second offers one burst.
/// Returns the share of the device's copies that the second guest gets.
fn part_of_the_modest(shares: bool) -> f64 {
    // The channel has fewer places than a single guest would fill.
    let mut looped = Loop::with_ring(32, "profile=vpp,seed=3", &["wq0.0"], &[1518, 1518]);
    if !shares {
        looped.mover.switch_off_shares();
    }
    let copies = |looped: &Loop, guest: usize| -> u64 {
        looped.guests[guest].queues.iter().map(|&queue| looped.mover.decisions(queue).by_engine).sum()
    };
    for round in 0..80_000 {
        for guest in &mut looped.guests {
            guest.exchange(u64::MAX).unwrap();
        }
        if round % 8 == 0 {
            looped.round();
        } else {
            let Loop { guests, mover, cache, clock, .. } = &mut looped;
            let mut ctx = Context { mover, cache, clock, burst: 32 };
            ctx.mover.poll(ctx.clock);
            guests[0].forward(&mut ctx);
        }
    }
    let (flood, modest) = (copies(&looped, 0), copies(&looped, 1));
    assert!(flood + modest > 20_000, "{flood} + {modest} copies");
    modest as f64 / (flood + modest) as f64
}

#[test]
fn flooding_guest_leaves_a_share() {
    let part = part_of_the_modest(true);
    assert!(part >= 0.45, "the modest guest got {part:.3} of the copies");
    let part = part_of_the_modest(false);
    assert!(part < 0.45, "without shares the modest guest nevertheless got {part:.3}");
}

#[test]
fn small_transfers_split_packets() {
    let mut looped = Loop::new("profile=net,seed=3", &["wq0.0", "wq0.1", "wq0.2", "wq0.3"], &[64, 1518]);
    looped.run(50_000).unwrap();
    assert_eq!(looped.mover.stats().core_copies, 0, "the device made every copy");
}
