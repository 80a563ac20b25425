use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::cpu::CpuChannel;
use offcore_dma::fault::{Faults, FaultyChannel};
use offcore_dma::{CopyDevice, Mode};
use offcore_mem::{BURST, Hugepages, Pool, PoolCache};
use offcore_stats::time::Time;
use offcore_wire::MacAddr;

use super::*;
use crate::proto::{AppId, Config, IfaceConfig, Next, Out, Plan, Prefix};

const LEN: usize = 3000;

/// A connecting connection, a manually stepped engine, and a buffer of numbers.
struct Bed {
    stack: Stack,
    out: Out,
    conn: ConnId,
    writer: Option<Writer>,
    writes: Writes,
    mover: Mover,
    cache: PoolCache,
    clock: StageClock,
    stepper: Stepper,
    buffer: Arc<Mapping>,
    shown: usize,
}

impl Bed {
    fn new(mode: Mode, fails: bool) -> Self {
        let mut stack = Stack::new(Config { memory: 4 << 20, ..Config::default() }).unwrap();
        let mut out = Out::default();
        let address = [10, 0, 0, 1].into();
        let iface = IfaceConfig {
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            addresses: vec![Prefix { address, len: 24 }],
            routes: Vec::new(),
        };
        stack.add_iface(Time::from_micros(1), &iface, &mut out);
        let conn = stack
            .connect(Time::from_micros(1), AppId::OWN, None, "10.0.0.2:9".parse().unwrap(), &mut out)
            .unwrap();
        let writer = Writer::new(Arc::clone(stack.memory(AppId::OWN)), stack.slot(conn).unwrap());
        let mut mover = Mover::new();
        // Copies that the engine holds back must not count as lost.
        mover.set_lost_after(u64::MAX);
        let (device, stepper) = CoreDevice::stepped();
        let good = mover.add_channel(device.open_channel(64).unwrap());
        let faults = Faults { error: 1000, ..Faults::default() };
        let faulty = FaultyChannel::new(Box::new(CpuChannel::new(64).unwrap()), faults);
        let faulty = mover.add_channel(Box::new(faulty));
        let mut writes = Writes::open(&mut mover);
        writes.queue.set_lost_after(&mut mover, u64::MAX);
        let channel = if fails { faulty } else { good };
        writes.bind(&mut mover, &Binding::new(mode, vec![channel])).unwrap();
        let (buffer, _fd) = Mapping::memfd("buffer", 8192, Hugepages::None).unwrap();
        buffer.write_at(0, &content());
        let cache = Pool::new(64, 2048, Hugepages::None).unwrap().cache();
        let (clock, buffer) = (StageClock::private(), Arc::new(buffer));
        Self { stack, out, conn, writer, writes, mover, cache, clock, stepper, buffer, shown: 0 }
    }

    fn write(&mut self, range: Range<usize>) -> usize {
        let Self { stack, conn, writer, writes, mover, cache, clock, buffer, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: BURST };
        writes.write(&mut ctx, stack, *conn, writer.as_mut().unwrap(), buffer, range)
    }

    /// Shows the completed bytes.
    fn poll(&mut self) {
        let Self { stack, writer, writes, mover, cache, clock, shown, .. } = self;
        mover.poll(clock);
        let mut ctx = Context { mover, cache, clock, burst: BURST };
        writes.poll(&mut ctx, stack, |_, len| {
            *shown += len;
            if let Some(writer) = writer {
                writer.show(len);
            }
        });
    }

    fn step(&mut self) {
        self.stepper.step();
        self.poll();
    }

    /// Returns the bytes that have been shown to the stack.
    fn written(&mut self) -> Vec<u8> {
        self.stack.written(Time::from_micros(1), self.conn, &mut self.out).unwrap();
        let mut bytes = Vec::new();
        let all = Next { range: 0..self.shown as u64, fin: false, again: false };
        for (address, len) in self.stack.plan_pieces(&Plan::new(self.conn, 0, &all)).unwrap() {
            // SAFETY: the connection owns these blocks, and no copy to them is in flight.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address.as_ptr(), len) });
        }
        bytes
    }
}

fn content() -> Vec<u8> {
    (0..8192u32).map(|n| (n * 7 + n / 256) as u8).collect()
}

#[test]
fn data_is_published_after_its_copy() {
    let mut bed = Bed::new(Mode::Offload, false);
    assert_eq!((bed.write(0..1000), bed.write(1000..LEN)), (1000, LEN - 1000));
    bed.poll();
    assert_eq!((bed.shown, bed.writes.in_flight(&mut bed.mover)), (0, 2));
    assert_eq!(bed.written(), []);
    bed.step();
    assert_eq!((bed.shown, bed.writes.in_flight(&mut bed.mover)), (LEN, 0));
    assert_eq!(bed.written(), content()[..LEN]);
}

#[test]
fn cpu_mode_copies_immediately() {
    let mut bed = Bed::new(Mode::Cpu, false);
    assert_eq!(bed.write(0..LEN), LEN);
    bed.poll();
    assert_eq!(bed.written(), content()[..LEN]);
}

#[test]
fn cpu_performs_failed_copies() {
    let mut bed = Bed::new(Mode::Offload, true);
    assert_eq!(bed.write(0..LEN), LEN);
    while bed.writes.in_flight(&mut bed.mover) > 0 {
        bed.poll();
    }
    assert_eq!(bed.written(), content()[..LEN]);
}

#[test]
fn write_is_limited_to_space() {
    let mut bed = Bed::new(Mode::Offload, false);
    let room = bed.writer.as_ref().unwrap().space();
    assert!(room < 8192);
    assert_eq!(bed.write(0..8192), room);
    assert_eq!(bed.write(0..8192), 0);
    bed.step();
    assert_eq!(bed.written(), content()[..room]);
}

#[test]
fn memory_is_held_until_last_copy() {
    let mut bed = Bed::new(Mode::Offload, false);
    assert_eq!(bed.write(0..LEN), LEN);
    bed.stack.abort(Time::from_micros(2), bed.conn, &mut bed.out);
    bed.writer = None;
    let held = bed.stack.memory_used();
    assert!(bed.stack.filling(bed.conn, 0, 1).is_err(), "it is over");
    assert_eq!(bed.stack.connections(), 1);
    bed.step();
    assert_eq!((bed.shown, bed.stack.connections()), (LEN, 0));
    assert!(bed.stack.memory_used() < held, "the FIFO goes with the last copy");
}
