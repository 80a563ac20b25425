//! An application that stores arbitrary values anywhere in its slot and its tables, and a stack that does the same. The
//! other side gets an error or wrong bytes, but never an address outside of the arena.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ptr::NonNull;
use std::sync::Arc;

use offcore_session::slot::SLOT;
use offcore_session::{Arena, CAPACITY, Fifo, Misuse, Place, Reader, Rx, Tx, Writer};
use proptest::prelude::*;

const PAGE: usize = 4096;
/// A multiple of 2 MiB, so that the mapping has the same length with hugepages.
const LIMIT: usize = 2 << 20;

/// The memory to which the application may write: a slot, and the page of the tables.
struct Scribbler {
    /// First byte of the arena.
    base: NonNull<u8>,
    slot: Place,
    tables: Place,
}

impl Scribbler {
    /// Stores `bytes` bytes of `value` at `offset` of the slot, or of the tables' page, which follows it.
    fn store(&self, offset: usize, value: u64, bytes: usize) {
        let start = match offset.checked_sub(SLOT) {
            None => self.slot.number() as usize * SLOT + offset.min(SLOT - bytes),
            Some(offset) => self.tables.number() as usize * SLOT / PAGE * PAGE + offset.min(PAGE - bytes),
        };
        for (i, byte) in value.to_ne_bytes()[..bytes].iter().enumerate() {
            // SAFETY: a byte of the arena's first segment, which the test's arena keeps mapped.
            unsafe { self.base.add(start + i).write_volatile(*byte) };
        }
    }
}

/// Returns offsets of fields, and arbitrary ones. The tables' page follows the slot.
fn place() -> impl Strategy<Value = usize> {
    let fields = [0usize, 8, 16, 24, 28, 64, 72];
    let field = prop::sample::select(
        fields.iter().flat_map(|field| [64 + field, 192 + field]).chain([0, 4]).collect::<Vec<_>>(),
    );
    prop_oneof![4 => field, 1 => 0..SLOT, 2 => SLOT..SLOT + PAGE]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0u64..10,
        0u64..CAPACITY as u64 * 2,
        Just(u64::MAX),
        Just(1 << 63),
        (0u32..64, 0u64..3).prop_map(|(shift, less)| (1u64 << shift).wrapping_sub(less)),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Store(usize, u64, usize),
    Cover(u64, usize),
    Commit(u64),
    Consumed,
    Grant(u64),
    Written,
    Send(usize),
    Acked(u64),
    Shrink,
    Read(usize),
    Write(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![1usize..5000, 1usize..200_000];
    prop_oneof![
        8 => (place(), value(), prop::sample::select(vec![1usize, 4, 8]))
            .prop_map(|(at, value, bytes)| Op::Store(at, value, bytes)),
        2 => (0u64..300_000, len()).prop_map(|(ahead, len)| Op::Cover(ahead, len)),
        2 => any::<u64>().prop_map(Op::Commit),
        3 => Just(Op::Consumed),
        2 => (1u64..300_000).prop_map(Op::Grant),
        3 => Just(Op::Written),
        2 => len().prop_map(Op::Send),
        2 => any::<u64>().prop_map(Op::Acked),
        2 => Just(Op::Shrink),
        2 => len().prop_map(Op::Read),
        2 => len().prop_map(Op::Write),
    ]
}

struct Session {
    arena: Arena,
    /// First byte of the arena.
    base: NonNull<u8>,
    slot: Place,
    rx: Fifo<Rx>,
    tx: Fifo<Tx>,
    /// The stack's private state, with correct values.
    committed: u64,
    consumed: u64,
    written: u64,
}

impl Session {
    /// Performs the stack's operations, whatever shared memory contains. Every address is used.
    fn stack(&mut self, op: &Op) -> Result<(), Misuse> {
        let Self { arena, base, rx, tx, .. } = self;
        match *op {
            Op::Cover(ahead, len) => {
                let from = rx.edge() + ahead;
                if rx.cover(arena, from, len) {
                    inside(*base, rx.pieces(arena, from, len), len);
                }
            }
            Op::Commit(any) => {
                self.committed += any % (rx.end() - rx.edge() + 1);
                rx.commit(arena, self.committed);
            }
            Op::Consumed => self.consumed = rx.consumed(arena)?,
            Op::Grant(more) => {
                tx.grant(arena, tx.end() + more);
            }
            Op::Written => self.written = tx.written(arena)?,
            Op::Send(len) => {
                let from = tx.released();
                let len = len.min((tx.edge() - from) as usize);
                tx.hold(from, len);
                inside(*base, tx.pieces(arena, from, len), len);
                tx.acked(arena, from + len as u64 / 2);
                tx.unhold(arena, from, len);
            }
            Op::Acked(any) => tx.acked(arena, tx.released() + any % (tx.edge() - tx.released() + 1)),
            Op::Shrink => {
                rx.shrink(arena);
                tx.shrink(arena);
            }
            Op::Store(..) | Op::Read(_) | Op::Write(_) => {}
        }
        assert_eq!((rx.edge(), rx.released(), tx.edge()), (self.committed, self.consumed, self.written));
        Ok(())
    }

    /// Performs an application's operations, whatever shared memory contains. In the worst case, bytes are wrong.
    fn application(&self, op: &Op) {
        let memory = || Arc::clone(self.arena.memory());
        match *op {
            Op::Read(len) => {
                let mut reader = Reader::new(memory(), self.slot).unwrap();
                let available = reader.available();
                assert!(available <= CAPACITY);
                let spans = reader.spans().map(|span| (span.address(), span.len()));
                inside(self.base, spans, 0);
                reader.consume(len);
            }
            Op::Write(len) => {
                let mut writer = Writer::new(memory(), self.slot).unwrap();
                assert!(writer.space() <= CAPACITY);
                let spans: Vec<_> = writer.spans(len).map(|span| (span.address(), span.len())).collect();
                // The addresses are only checked: if the stack stores nonsense, they may be inside the slot itself.
                inside(self.base, spans.into_iter(), 0);
                writer.commit(len);
            }
            _ => {}
        }
    }
}

/// Asserts that the pieces are in the arena and have at least `least` bytes. Accesses their first and last bytes.
fn inside(base: NonNull<u8>, pieces: impl Iterator<Item = (NonNull<u8>, usize)>, least: usize) {
    let (start, end) = (base.addr().get(), base.addr().get() + LIMIT);
    let mut total = 0;
    for (address, len) in pieces {
        let at = address.addr().get();
        assert!(at >= start && len > 0 && at + len <= end, "{address:p}+{len}");
        // SAFETY: the range is mapped, as just checked.
        let _ = unsafe { (address.read_volatile(), address.add(len - 1).read_volatile()) };
        total += len;
    }
    assert!(total >= least && total <= CAPACITY);
}

/// Returns the address of page 0.
fn base(arena: &mut Arena) -> NonNull<u8> {
    let block = arena.take_large().unwrap();
    arena.give_large(block);
    // SAFETY: the arena has one segment, and the block's page is counted from its start.
    unsafe { arena.address(block).sub(block.page() as usize * PAGE) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn arbitrary_shared_memory_is_harmless(ops in prop::collection::vec(op(), 1..250)) {
        let mut arena = Arena::new(LIMIT).unwrap();
        let free = arena.free();
        let (slot, tables) = (arena.take_slot().unwrap(), arena.take_table().unwrap());
        let base = base(&mut arena);
        let scribbler = Scribbler { base, slot, tables };
        let mut session = Session {
            arena, base, slot, rx: Fifo::new(slot), tx: Fifo::new(slot), committed: 0, consumed: 0, written: 0,
        };
        for op in &ops {
            match op {
                Op::Store(at, value, bytes) => scribbler.store(*at, *value, *bytes),
                Op::Read(_) | Op::Write(_) => session.application(op),
                // A misuse changes nothing, so a stack that continues after it is as safe as before.
                _ => drop(session.stack(op)),
            }
        }
        session.rx.discard(&mut session.arena);
        session.tx.discard(&mut session.arena);
        prop_assert!(session.rx.is_empty() && session.tx.is_empty());
        session.arena.give_table(tables);
        session.arena.give_slot(slot);
        prop_assert_eq!(session.arena.free(), free);
    }
}

/// Each index alone, at the limits of the valid range.
#[test]
fn indices_are_checked() {
    let mut arena = Arena::new(LIMIT).unwrap();
    let slot = arena.take_slot().unwrap();
    let scribbler = Scribbler { base: base(&mut arena), slot, tables: slot };
    let (mut rx, mut tx) = (Fifo::<Rx>::new(slot), Fifo::<Tx>::new(slot));
    assert!(rx.cover(&mut arena, 0, 200) && tx.grant(&mut arena, 200));
    rx.commit(&arena, 100);
    let (head, tail) = (64 + 64, 192 + 64);
    for (index, from, to) in [(0, 0, 100), (10, 0, 100), (101, 10, 100), (9, 10, 100), (u64::MAX, 10, 100)] {
        scribbler.store(head, index, 8);
        let expected = Misuse::Head { found: index, from, to };
        let answer = rx.consumed(&mut arena);
        assert_eq!(answer, if (from..=to).contains(&index) { Ok(index) } else { Err(expected) });
    }
    for (index, from, to) in [(0, 0, 200), (10, 0, 200), (201, 10, 200), (9, 10, 200), (1 << 63, 10, 200)] {
        scribbler.store(tail, index, 8);
        let expected = Misuse::Tail { found: index, from, to };
        let answer = tx.written(&arena);
        assert_eq!(answer, if (from..=to).contains(&index) { Ok(index) } else { Err(expected) });
    }
    let text = Misuse::Tail { found: 201, from: 10, to: 200 }.to_string();
    assert_eq!(text, "tail 201 of the transmit direction: expected 10 to 200");
}

/// A writer that sets `writing` forever keeps only its own blocks.
#[test]
fn unfinished_writer_keeps_only_its_blocks() {
    let mut arena = Arena::new(LIMIT).unwrap();
    let free = arena.free();
    let slot = arena.take_slot().unwrap();
    let mut tx = Fifo::<Tx>::new(slot);
    assert!(tx.grant(&mut arena, 4096));
    let mut writer = Writer::new(Arc::clone(arena.memory()), slot).unwrap();
    assert_eq!(writer.spans(10).count(), 1);
    assert!(!tx.shrink(&mut arena));
    assert_eq!(writer.space(), 4086, "the limit is as before");
    drop(writer);
    assert!(tx.shrink(&mut arena), "one that is dropped has stopped");
    tx.discard(&mut arena);
    arena.give_slot(slot);
    assert_eq!(arena.free(), free);
}
