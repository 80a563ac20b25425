//! A script for a hostile guest, as a string of bytes. It defines the setup, the data that is written, and the rounds
//! of the worker. Any byte string is a valid script. Most of the generated data is almost valid, because most bugs are
//! found with such data.

use std::cell::RefCell;

use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_vhost::features::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1, VIRTIO_NET_F_MRG_RXBUF,
};

use crate::arena::{BUFFERS, END, RX, Ring, SEAM, START, TX, desc};
use crate::bytes::Script;
use crate::rig::{ENGINES, Memories, Rig, Setup};

/// Longer scripts are cut off, so that every case ends soon.
const MAX_STEPS: usize = 200;

thread_local! {
    /// State of the last successful case, for reuse.
    static MEMORIES: RefCell<Option<Memories>> = const { RefCell::new(None) };
}

/// Statistics of a script, so that tests can check that scripts exercise the code.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    /// Packets received from the hostile guest.
    pub(crate) dequeued: usize,
    /// Packets delivered to it.
    pub(crate) enqueued: usize,
    /// Chains that were not valid packets.
    pub(crate) dropped: usize,
    /// Number of times that a virtqueue of it was broken.
    pub(crate) broken: usize,
}

/// Runs a script and adds its results to `outcome`.
///
/// # Panics
/// Panics if the hostile guest has broken an invariant.
pub(crate) fn play(script: &[u8], outcome: &mut Outcome) {
    let memories = MEMORIES.take().unwrap_or_else(Memories::new);
    let mut script = Script(script);
    let (setup, base) = script.setup();
    memories.arena.clear();
    for (ring, used) in [(RX, base), (TX, script.u16())] {
        memories.arena.write_u16(ring.avail + 2, base);
        memories.arena.write_u16(ring.used + 2, used);
    }
    let mut rig = Rig::new(memories, setup, base);
    for _ in 0..MAX_STEPS {
        if script.0.is_empty() {
            break;
        }
        step(&mut script, &mut rig, outcome);
    }
    outcome.dequeued += rig.dequeued.packets;
    outcome.dropped += rig.dequeued.malformed + rig.dequeued.too_big;
    outcome.enqueued += rig.enqueued;
    MEMORIES.set(Some(rig.finish()));
}

/// Next step of the guest or the worker. Steps of the guest apply to its RX (0) or TX (1) virtqueue.
enum Op {
    /// Writes one descriptor and makes it available.
    Descriptor,
    /// Writes one descriptor of a table at any address.
    TableEntry,
    /// Makes a chain in the ring available.
    Chain,
    /// Makes a chain in an indirect table available.
    Indirect,
    /// Makes an entry available that may not be a chain.
    Offer,
    /// Changes the available index.
    Jump,
    /// Writes arbitrary data to an arbitrary address.
    Write(u64, u64),
    /// Lets the engine make this many steps.
    Steps(u8),
    /// The front end stops the virtqueue and restarts it at the same or at any position.
    Restart,
    /// The front end starts the virtqueue at this position without stopping it.
    Start(u16),
    /// A round of the worker with this many packets.
    Turn(u8),
}

fn step(script: &mut Script<'_>, rig: &mut Rig, outcome: &mut Outcome) {
    let (op, queue) = script.op();
    let ring = ring_of(queue);
    let size = rig.setup.size;
    let arena = &rig.arena;
    match op {
        Op::Descriptor => {
            let (index, entry) = (script.index(size), script.descriptor(queue, size));
            arena.descriptor(ring.desc, index, entry);
            arena.offer(ring, size, index);
        }
        Op::TableEntry => {
            let (table, index) = (script.address(), script.u8().into());
            arena.descriptor(table, index, script.descriptor(queue, size));
        }
        Op::Chain => {
            let first = script.index(size);
            let entries = script.entries().min(size);
            chain(script, rig, queue, ring.desc, first, entries);
            arena.offer(ring, size, first);
        }
        Op::Indirect => {
            let (table, entries) = (script.address(), script.entries());
            chain(script, rig, queue, table, 0, entries);
            let (index, wrong) = (script.index(size), script.u8());
            let len = if wrong < 16 { script.len() } else { u32::from(entries) * 16 };
            let flags = if wrong < 24 { script.u16() } else { VIRTQ_DESC_F_INDIRECT };
            if wrong > 32 && rig.setup.features & VIRTIO_F_INDIRECT_DESC == 0 {
                return;
            }
            arena.descriptor(ring.desc, index, desc(table, len, flags, script.index(size)));
            arena.offer(ring, size, index);
        }
        Op::Offer => arena.offer(ring, size, script.head(size)),
        Op::Jump => {
            let index = arena.read_u16(ring.avail + 2);
            let to = match script.u8() {
                jump @ 0..8 => index.wrapping_add(u16::from(jump)),
                8..16 => index.wrapping_sub(1 + u16::from(script.u8() % 8)),
                _ => script.u16(),
            };
            arena.write_u16(ring.avail + 2, to);
        }
        Op::Write(at, value) => arena.write(at, &value.to_le_bytes()),
        Op::Steps(steps) => {
            for _ in 0..steps {
                rig.stepper.step();
                rig.poll();
            }
        }
        Op::Restart => {
            let base = rig.cells[queue].report().base as u16;
            rig.stop(queue);
            rig.turn(&[]);
            let base = if script.u8() < 128 { base } else { script.u16() };
            rig.start(queue, base, script.u8() < 200);
        }
        Op::Start(base) => rig.start(queue, base, true),
        Op::Turn(packets) => {
            let lengths: Vec<usize> = (0..packets).map(|_| 14 + usize::from(script.u16()) % 1700).collect();
            turn(script, rig, outcome, &lengths);
        }
    }
}

/// A round of the worker. In most cases, a queue that breaks is restarted later.
fn turn(script: &mut Script<'_>, rig: &mut Rig, outcome: &mut Outcome, lengths: &[usize]) {
    let was = rig.cells.each_ref().map(|cell| cell.report().broken.is_some());
    rig.turn(lengths);
    for (queue, was) in was.into_iter().enumerate() {
        let Some(error) = rig.cells[queue].report().broken else { continue };
        outcome.broken += usize::from(!was);
        assert!(!error.to_string().is_empty());
        if was && script.u8() < 192 {
            rig.start(queue, rig.arena.read_u16(ring_of(queue).avail + 2), true);
        }
    }
}

/// Writes a chain of `entries` descriptors from `first` on. Most of them are valid.
fn chain(script: &mut Script<'_>, rig: &Rig, queue: usize, table: u64, first: u16, entries: u16) {
    let in_ring = table == ring_of(queue).desc;
    let wrap = |index: u16| if in_ring { index & (rig.setup.size - 1) } else { index };
    let plain = script.u8();
    for i in 0..entries {
        let (index, next) = (wrap(first.wrapping_add(i)), wrap(first.wrapping_add(i + 1)));
        let mut entry = if plain < 240 {
            let addr = BUFFERS + u64::from(script.u8()) * 512;
            let len = [60, 12, 1526, u32::from(script.u8()), 0, 200, 300, 400][usize::from(script.u8() & 7)];
            desc(addr, len, 0, next)
        } else {
            desc(script.address(), script.len(), 0, next)
        };
        let last = i + 1 == entries;
        entry.flags = [VIRTQ_DESC_F_WRITE, 0][queue] | if last { 0 } else { VIRTQ_DESC_F_NEXT };
        rig.arena.descriptor(table, index, entry);
    }
}

fn ring_of(queue: usize) -> Ring {
    [RX, TX][queue]
}

impl Script<'_> {
    fn setup(&mut self) -> (Setup, u16) {
        let options = self.u8();
        let mut features = VIRTIO_F_VERSION_1;
        for (bit, feature) in
            [(1, VIRTIO_NET_F_MRG_RXBUF), (2, VIRTIO_F_INDIRECT_DESC), (4, VIRTIO_F_EVENT_IDX)]
        {
            features |= if options & bit != 0 { feature } else { 0 };
        }
        let size = [4, 8, 64, 1024][usize::from(options >> 3 & 3)];
        let engine = ENGINES[usize::from(options >> 5 & 3)];
        // Most virtqueues begin at 0, some just before the index wraps.
        let base = match self.u8() {
            0..160 => 0,
            160..250 => 0xfff8,
            _ => self.u16(),
        };
        (Setup { engine, features, size, seed: self.u8().into() }, base)
    }

    /// Returns the next operation and its virtqueue.
    fn op(&mut self) -> (Op, usize) {
        let byte = self.u8();
        let op = match byte & 0x7f {
            0..4 => Op::Descriptor,
            4..6 => Op::TableEntry,
            6..40 => Op::Chain,
            40..60 => Op::Indirect,
            60..62 => Op::Offer,
            62..66 => Op::Jump,
            66..68 => Op::Write(START + u64::from(self.u16()), self.u64()),
            68..72 => Op::Write(self.address(), self.u64()),
            72..80 => Op::Steps(self.u8()),
            80..86 if self.u8() < 128 => Op::Restart,
            80..86 => Op::Start(self.u16()),
            _ => Op::Turn(self.u8() % 8),
        };
        (op, usize::from(byte >> 7))
    }

    fn index(&mut self, size: u16) -> u16 {
        u16::from(self.u8()) & (size - 1)
    }

    /// Returns an index that may be out of range.
    fn head(&mut self, size: u16) -> u16 {
        if self.u8() < 16 { self.u16() } else { self.index(size) }
    }

    fn entries(&mut self) -> u16 {
        match self.u8() {
            few @ 0..200 => 1 + u16::from(few % 6),
            many @ 200..250 => u16::from(many - 200) * 4,
            _ => 4096,
        }
    }

    fn address(&mut self) -> u64 {
        let near = u64::from(self.u8());
        match self.u8() % 8 {
            0..3 => BUFFERS + near * 512,
            3 => SEAM - near,
            4 => END - near,
            5 => START.wrapping_sub(128).wrapping_add(near),
            6 => START + u64::from(self.u16()),
            _ => self.u64(),
        }
    }

    fn len(&mut self) -> u32 {
        let near = u32::from(self.u8());
        match self.u8() % 8 {
            0 => 0,
            1 => near,
            2 => 12 + 14 - 2 + near % 4,
            3 => 1780 + near % 32,
            4 => near * 16,
            5 => 1526,
            6 => u32::MAX - near,
            _ => u32::from(self.u16()) << (near % 17),
        }
    }

    fn descriptor(&mut self, queue: usize, size: u16) -> offcore_ring::split::Descriptor {
        let (addr, len) = (self.address(), self.len());
        let flags = match self.u8() {
            0..180 => [VIRTQ_DESC_F_WRITE, 0][queue],
            180..230 => [VIRTQ_DESC_F_WRITE, 0][queue] | VIRTQ_DESC_F_NEXT,
            _ => self.u16() & 15,
        };
        desc(addr, len, flags, self.head(size))
    }
}
