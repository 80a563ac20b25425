//! Checks the copy stage against a simple model: every packet that is not too long comes out once, in order, unchanged
//! and with its marks, and at the end every packet buffer is back in the pool, once. This also holds for faulty
//! engines. The tests are effective: they fail if the recovery is switched off. The tests of offcore-vhost show the
//! same for the reorder ring and the quarantine.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use offcore_dma::Device;
use offcore_dma::Mode;
use offcore_dma::cpu::CpuDevice;
use offcore_dma::fault::{Faults, FaultyChannel};
use offcore_mem::{HEADROOM, Hugepages, PoolCache};
use offcore_stats::StageClock;
use proptest::prelude::*;

use super::*;

/// Length of a packet buffer in bytes.
const SIZE: usize = 2048;
/// Length of the content from which all packets' bytes are taken.
const CONTENT: usize = 1 << 17;
/// Packets that came out are checked when this many more have come out, so that a late copy has time to corrupt them.
const HELD: usize = 100;

/// The form of one packet.
#[derive(Clone, Copy, Debug)]
struct Form {
    len: usize,
    headroom: usize,
    offload: bool,
}

/// Every third packet has an offload request. One packet in `jumbo` has several buffers, unless `jumbo` is 0.
fn form(number: u64, jumbo: u64) -> Form {
    let random = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
    let long = jumbo > 0 && random.is_multiple_of(jumbo);
    let len = if long { 1800 + (random >> 8) as usize % 20_000 } else { 14 + (random >> 8) as usize % 1700 };
    Form { len, headroom: HEADROOM - (random >> 4) as usize % 64, offload: random % 3 == 1 }
}

/// A queue of numbered packets.
#[derive(Debug)]
struct Numbered {
    next: u64,
    until: u64,
    jumbo: u64,
    content: &'static [u8],
    waits: bool,
    counters: RxCounters,
}

impl Numbered {
    fn make(&self, cache: &mut PoolCache) -> Option<Packet> {
        let Form { len, headroom, offload } = form(self.next, self.jumbo);
        let mut packet = cache.take_chain(headroom, len)?;
        let mut from = &self.content[place(self.next)..];
        for part in cache.pool().segments_mut(&mut packet) {
            let (these, rest) = from.split_at(part.len());
            part.copy_from_slice(these);
            from = rest;
        }
        let header = [self.next as u8; 12];
        packet.headroom_mut(12).copy_from_slice(&header);
        packet.set_offload(offload);
        Some(packet)
    }
}

fn place(number: u64) -> usize {
    number as usize * 61 % (CONTENT / 2)
}

impl RxQueue for Numbered {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        for _ in 0..room(ctx, burst) {
            if self.next == self.until {
                return;
            }
            let Some(packet) = self.make(ctx.cache) else { return };
            burst.push(packet);
            self.next += 1;
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn waits(&self) -> bool {
        self.waits
    }
}

#[derive(Clone, Debug)]
struct Case {
    packets: u64,
    jumbo: u64,
    chunks: usize,
    in_flight: usize,
    batch: usize,
    max_frame: usize,
    min_copy: usize,
    at_least: usize,
    burst: usize,
    mode: Mode,
    /// One burst in this many is taken back; 0: none.
    back: u64,
    faults: Vec<Faults>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            packets: 20_000,
            jumbo: 0,
            chunks: 4096,
            in_flight: 512,
            batch: 64,
            max_frame: 0,
            min_copy: 0,
            at_least: 0,
            burst: 32,
            mode: Mode::Offload,
            back: 0,
            faults: vec![Faults::default()],
        }
    }
}

struct Bed {
    case: Case,
    content: &'static [u8],
    copy: CopyRx,
    mover: Mover,
    cache: PoolCache,
    clock: StageClock,
    expected: u64,
    too_long: u64,
    held: VecDeque<Packet>,
}

impl Bed {
    fn new(case: Case) -> Self {
        let pool = Pool::new(case.chunks, SIZE, Hugepages::None).unwrap();
        let mut mover = Mover::new();
        mover.set_lost_after(tsc::ticks(Duration::from_micros(500)));
        let soon = tsc::ticks(Duration::from_micros(50));
        mover.set_back_off(soon, soon);
        let channel = |&faults: &Faults| FaultyChannel::new(CpuDevice.open_channel(256).unwrap(), faults);
        let channels =
            case.faults.iter().map(channel).map(|channel| mover.add_channel(Box::new(channel))).collect();
        let mut random = 1u64;
        let byte = |_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 56) as u8
        };
        let content: &'static [u8] = Box::leak((0..CONTENT).map(byte).collect());
        let counters = RxCounters::private();
        let waits = case.back > 0;
        let inner = Numbered { next: 0, until: case.packets, jumbo: case.jumbo, content, waits, counters };
        let stats = StatsPage::new(1 << 14).unwrap();
        let setup = CopySetup {
            mover: &mut mover,
            binding: Binding::new(case.mode, channels),
            in_flight: case.in_flight,
            max_frame: case.max_frame,
            min_copy: case.min_copy,
            pool,
            stats: &stats,
            port: "port0",
            index: 0,
        };
        let copy = CopyRx::new(Box::new(inner), setup).unwrap();
        let copy = copy.with_at_least(case.at_least).with_batch(case.batch);
        let (cache, clock) = (pool.cache(), StageClock::private());
        Self { case, content, copy, mover, cache, clock, expected: 0, too_long: 0, held: VecDeque::new() }
    }

    /// Makes one call of `rx`, or of `drain`, which accepts no new packets.
    fn round(&mut self, drain: bool, burst: &mut Burst) -> usize {
        self.mover.poll(&mut self.clock);
        let Self { mover, cache, clock, case, copy, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: case.burst };
        let left = match drain {
            true => copy.drain(&mut ctx, burst),
            false => {
                copy.rx(&mut ctx, burst);
                copy.in_flight(ctx.mover)
            }
        };
        self.mover.end_round();
        left
    }

    fn look_at(&mut self, packet: Packet) -> Result<(), String> {
        loop {
            let Form { len, .. } = form(self.expected, self.case.jumbo);
            if self.case.max_frame == 0 || len <= self.case.max_frame {
                break;
            }
            self.too_long += 1;
            self.expected += 1;
        }
        let number = self.expected;
        let Form { len, offload, .. } = form(number, self.case.jumbo);
        let pool = self.cache.pool();
        let found = pool.total_len(&packet);
        if found != len {
            return Err(format!("packet {number} has {found} bytes, not {len}"));
        }
        let mut wanted = &self.content[place(number)..][..len];
        for part in pool.segments(&packet) {
            let (these, rest) = wanted.split_at(part.len());
            if part != these {
                return Err(format!("packet {number} was changed"));
            }
            wanted = rest;
        }
        if packet.has_offload() != offload || offload && packet.headroom_bytes(12) != [number as u8; 12] {
            return Err(format!("packet {number} has lost its header"));
        }
        self.expected += 1;
        self.cache.free(packet);
        Ok(())
    }

    fn run(&mut self) -> Result<(), String> {
        let (mut progress, mut rounds) = (Instant::now(), 0u64);
        let mut stopping = false;
        loop {
            let mut burst = Burst::new();
            let mut left = self.round(stopping, &mut burst);
            rounds += 1;
            if !burst.is_empty() {
                progress = Instant::now();
                if self.case.back > 0 && rounds.is_multiple_of(self.case.back) {
                    // The other side has no room for the second half of the burst.
                    let mut back: Burst = burst.drain(burst.len() / 2..).collect();
                    left += back.len();
                    self.copy.take_back(&mut back);
                    assert!(back.is_empty(), "what waits takes everything back");
                }
            }
            let nothing = burst.is_empty() && left == 0;
            for packet in burst {
                self.held.push_back(packet);
            }
            // A small pool does not have enough buffers to hold back that many packets.
            while self.held.len() > HELD.min(self.case.chunks / 8) {
                let packet = self.held.pop_front().unwrap();
                self.look_at(packet)?;
            }
            if nothing && stopping {
                break;
            }
            let taken: u64 =
                [0, 2, 3].iter().map(|&index| self.copy.pending.stats.counter(index).value()).sum();
            // The last packets are in flight at this point.
            stopping |= taken == self.case.packets;
            if progress.elapsed() > Duration::from_secs(10) {
                return Err(format!("packet {} and {left} in flight: no progress for 10 s", self.expected));
            }
        }
        while let Some(packet) = self.held.pop_front() {
            self.look_at(packet)?;
        }
        let rest = self.expected..self.case.packets;
        let too_long = |&number: &u64| {
            self.case.max_frame > 0 && form(number, self.case.jumbo).len > self.case.max_frame
        };
        self.too_long += rest.filter(too_long).count() as u64;
        let counted = [0, 2, 3].map(|index| self.copy.pending.stats.counter(index).value());
        let all = self.case.packets;
        if counted != [all - self.too_long, self.too_long, 0] {
            return Err(format!("counted {counted:?} of {all}, {} too long", self.too_long));
        }
        let chunks: HashSet<u32> = std::iter::from_fn(|| self.cache.take()).map(|p| p.chunk()).collect();
        match chunks.len() == self.case.chunks.next_multiple_of(offcore_mem::pool::MAGAZINE) {
            true => Ok(()),
            false => Err(format!("{} of {} packet buffers are back", chunks.len(), self.case.chunks)),
        }
    }
}

fn run(case: Case) -> Result<Bed, String> {
    let mut bed = Bed::new(case);
    bed.run().map(|()| bed)
}

fn misbehaves(seed: u64) -> Faults {
    Faults {
        seed,
        error: 5,
        partial: 5,
        delay: 100,
        reorder: 300,
        delay_polls: 20,
        late_polls: 3000,
        reset_calls: 3,
        ..Faults::default()
    }
}

/// Two channels: one loses copies, and the other performs `late` of a thousand copies after they were given up.
fn two(late: u32) -> Vec<Faults> {
    vec![Faults { never: 1, ..misbehaves(1) }, Faults { late, ..misbehaves(2) }]
}

#[test]
fn cpu_mode_copies_immediately() {
    let bed = run(Case { mode: Mode::Cpu, faults: Vec::new(), jumbo: 20, ..Case::default() }).unwrap();
    let stats = bed.mover.stats();
    assert!(stats.core_copies >= bed.case.packets && stats.held_by_order == 0, "{stats:?}");
}

#[test]
fn engine_copies_every_buffer() {
    let bed = run(Case { jumbo: 5, ..Case::default() }).unwrap();
    let (_, channel) = bed.mover.channels().next().unwrap();
    assert!(channel.stats().submitted > bed.case.packets / 2, "{:?}", channel.stats());
}

/// The long run. Debug builds, in which checking every byte is slow, make a tenth of it.
#[test]
fn packets_survive_every_fault() {
    let packets = if cfg!(debug_assertions) { 50_000 } else { 500_000 };
    let bed = run(Case { packets, jumbo: 50, faults: two(1), back: 7, ..Case::default() }).unwrap();
    let stats = bed.mover.stats();
    assert!(stats.resets > 10 && stats.quarantined > 10 && stats.fallbacks > 100, "{stats:?}");
}

#[test]
fn disabled_recovery_is_detected() {
    let mut bed = Bed::new(Case { faults: two(0), ..Case::default() });
    bed.mover.switch_off_recovery();
    let error = bed.run().unwrap_err();
    assert!(error.contains("was changed") || error.contains("lost its header"), "{error}");
}

#[test]
fn too_long_packets_are_counted() {
    let case = Case { max_frame: 1500, jumbo: 10, ..Case::default() };
    let bed = run(case).unwrap();
    assert!(bed.too_long > 1000, "{} of 20000", bed.too_long);
}

#[test]
fn short_packets_are_copied_by_core() {
    let bed = run(Case { min_copy: 400, jumbo: 20, ..Case::default() }).unwrap();
    let short = (0..bed.case.packets).filter(|&number| form(number, 20).len < 400).count() as u64;
    assert!(short > 1000);
    let stats = bed.mover.stats();
    // The core also copies packets that find all channels full.
    assert!(stats.core_copies - stats.overflow >= short, "{stats:?}: {short} are short");
    let (_, channel) = bed.mover.channels().next().unwrap();
    assert!(channel.stats().submitted > 0);
}

#[test]
fn long_packets_span_copy_lists() {
    let case = Case { min_copy: 30_000, jumbo: 2, burst: 64, chunks: 8192, ..Case::default() };
    let bed = run(case).unwrap();
    assert!(bed.mover.stats().core_copies > 3 * bed.case.packets, "{:?}", bed.mover.stats());
}

#[test]
fn copy_minimum_is_bounded() {
    let bed = run(Case { at_least: 1700, ..Case::default() }).unwrap();
    let bytes = bed.copy.pending.stats.counter(CopyCount::Bytes as usize).value();
    assert!(bytes >= 1700 * bed.case.packets * 2 / 3, "{bytes}");
    // If this exceeds the packet buffer, the rest of the buffer is copied.
    run(Case { at_least: 5000, ..Case::default() }).unwrap();
}

#[test]
fn a_pool_that_runs_dry_loses_nothing() {
    for mode in [Mode::Cpu, Mode::Offload] {
        let bed = run(Case { chunks: 192, mode, jumbo: 30, burst: 64, ..Case::default() }).unwrap();
        assert!(
            bed.copy.pending.stats.counter(CopyCount::Starved as usize).value() > 0 || mode == Mode::Cpu,
            "the pool was never dry"
        );
    }
}

#[test]
fn pool_deadlock_drops_one_packet() {
    // Received packets occupy all packet buffers.
    let mut bed = Bed::new(Case { chunks: 64, burst: 64, packets: 64, mode: Mode::Cpu, ..Case::default() });
    let start = Instant::now();
    let mut out = 0;
    while out < 63 {
        let mut burst = Burst::new();
        bed.round(false, &mut burst);
        out += burst.len();
        bed.cache.free_all(burst);
        assert!(start.elapsed() < Duration::from_secs(10), "{out} of 63 came out");
    }
    assert_eq!(
        bed.copy.pending.stats.counter(CopyCount::NoBuffer as usize).value(),
        1,
        "one packet made room for the others"
    );
}

#[test]
fn invalid_settings_are_explained() {
    let pool = Pool::new(64, SIZE, Hugepages::None).unwrap();
    let stats = StatsPage::new(1 << 14).unwrap();
    for in_flight in [0, 32769] {
        let inner = Numbered {
            next: 0,
            until: 0,
            jumbo: 0,
            content: &[],
            waits: false,
            counters: RxCounters::private(),
        };
        let setup = CopySetup {
            mover: &mut Mover::new(),
            binding: Binding::core(),
            in_flight,
            max_frame: 0,
            min_copy: 0,
            pool,
            stats: &stats,
            port: "port0",
            index: 0,
        };
        let error = CopyRx::new(Box::new(inner), setup).unwrap_err().to_string();
        assert!(error.contains("port0/rx0") && error.contains("1 to 32768"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn packets_come_out_once_in_order(
        (in_flight, batch, burst) in (1usize..200, 1usize..=64, 1usize..=64),
        (max_frame, min_copy, at_least) in (0usize..3000, 0usize..2000, 0usize..3000),
        (jumbo, back, chunks) in (0u64..20, prop::sample::select(vec![0u64, 2, 5]), 256usize..2048),
        mode in prop::sample::select(vec![Mode::Cpu, Mode::Offload, Mode::Auto]),
        (seed, error, reorder, delay) in (any::<u64>(), 0u32..50, 0u32..500, 0u32..200),
        channels in 1usize..3,
    ) {
        let faults = Faults { seed, error, partial: error, reorder, delay, delay_polls: 30, ..Faults::default() };
        let case = Case {
            packets: 3000, jumbo, chunks, in_flight, batch, burst, max_frame, min_copy, at_least, mode, back,
            faults: vec![faults; channels],
        };
        if let Err(error) = run(case) {
            prop_assert!(false, "{}", error);
        }
    }
}
