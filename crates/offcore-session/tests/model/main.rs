//! FIFOs, readers and writers against a byte map: many sessions in an arena that is too small for them, with copies
//! that complete late and in any order.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod sessions;

use offcore_session::{Arena, CAPACITY};
use proptest::prelude::*;
use sessions::Sessions;

const LARGE: usize = 65_536;

#[derive(Clone, Debug)]
enum Op {
    /// A segment arrives, `ahead` bytes beyond the committed edge.
    Receive {
        ahead: usize,
        len: usize,
        reserved: bool,
    },
    /// Any copy completes.
    Finish(usize),
    Commit,
    Read(usize),
    ReadSpans(usize),
    Consumed,
    ShrinkRx,
    Grant(usize),
    Write(usize),
    WriteSpans(usize, usize),
    /// The stack reads the written position, and sends some of the unacknowledged bytes.
    Send {
        ahead: usize,
        len: usize,
    },
    Acked(usize),
    ShrinkTx,
    /// The session ends and is replaced by another one.
    Close,
}

fn len() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..600, 1usize..5000, Just(4096), 1usize..LARGE + 1]
}

fn op() -> impl Strategy<Value = Op> {
    let ahead = || prop_oneof![4 => Just(0usize), 2 => 0usize..5000, 1 => 0usize..300_000];
    prop_oneof![
        4 => (ahead(), len(), any::<bool>())
            .prop_map(|(ahead, len, reserved)| Op::Receive { ahead, len, reserved }),
        6 => (0usize..64).prop_map(Op::Finish),
        3 => Just(Op::Commit),
        2 => len().prop_map(Op::Read),
        1 => len().prop_map(Op::ReadSpans),
        2 => Just(Op::Consumed),
        2 => Just(Op::ShrinkRx),
        3 => prop_oneof![Just(4096usize), 1usize..9000, 1usize..300_000].prop_map(Op::Grant),
        3 => len().prop_map(Op::Write),
        1 => (len(), len()).prop_map(|(max, n)| Op::WriteSpans(max, n)),
        3 => (ahead(), len()).prop_map(|(ahead, len)| Op::Send { ahead, len }),
        3 => len().prop_map(Op::Acked),
        2 => Just(Op::ShrinkTx),
        1 => Just(Op::Close),
    ]
}

proptest! {
    #[test]
    fn fifo_preserves_bytes(
        size in 2usize..20,
        reserve in 0usize..3,
        ops in prop::collection::vec((0usize..4, op()), 1..300),
    ) {
        let mut sessions = Sessions::new(4, size * LARGE, reserve);
        for (i, op) in ops {
            match op {
                Op::Receive { ahead, len, reserved } => sessions.receive(i, ahead, len, reserved),
                Op::Finish(copy) => sessions.finish(copy),
                Op::Commit => sessions.commit(i),
                Op::Read(len) => sessions.read(i, len),
                Op::ReadSpans(len) => sessions.read_spans(i, len),
                Op::Consumed => sessions.consumed(i),
                Op::ShrinkRx => sessions.shrink_rx(i),
                Op::Grant(more) => sessions.grant(i, more),
                Op::Write(len) => sessions.write(i, len),
                Op::WriteSpans(max, n) => sessions.write_spans(i, max, n),
                Op::Send { ahead, len } => sessions.send(i, ahead, len),
                Op::Acked(len) => sessions.acked(i, len),
                Op::ShrinkTx => sessions.shrink_tx(i),
                Op::Close => sessions.close(i),
            }
        }
        sessions.end();
    }
}

/// A stream of several times the capacity of a FIFO, so that the table wraps around, in segments that do not match
/// blocks. The window is always full.
#[test]
fn full_window_wraps_block_table() {
    let mut sessions = Sessions::new(1, 300 * LARGE, 0);
    for _ in 0..3 * CAPACITY / 61_001 {
        sessions.receive(0, 0, 61_001, false);
        sessions.finish(0);
        sessions.commit(0);
        if sessions.received(0) > CAPACITY - 61_001 {
            sessions.read(0, 70_000);
            sessions.consumed(0);
        }
    }
    sessions.end();
}

/// Small rings of sessions that answer requests never need a large block.
#[test]
fn small_requests_use_no_large_block() {
    let mut sessions = Sessions::new(2, 2 * LARGE, 0);
    for round in 0..1000 {
        let i = round % 2;
        sessions.receive(i, 0, 1 + round % 700, false);
        sessions.finish(0);
        sessions.commit(i);
        sessions.read(i, 700);
        sessions.consumed(i);
    }
    assert_eq!(sessions.arena().free().large, 1);
    sessions.shrink_rx(0);
    sessions.shrink_rx(1);
    assert_eq!(sessions.arena().free(), sessions.free_without_blocks());
    sessions.end();
}

/// 10,000 sessions that were used and are idle occupy only their slots.
#[test]
fn idle_sessions_hold_only_slots() {
    let mut sessions = Sessions::new(10_000, 128 * LARGE, 0);
    let free = sessions.arena().free();
    for i in 0..10_000 {
        sessions.receive(i, 0, 9000, false);
        sessions.finish(0);
        sessions.commit(i);
        sessions.grant(i, 4096);
        sessions.read(i, 9000);
        sessions.consumed(i);
        sessions.write(i, 100);
        sessions.acked(i, 100);
        sessions.shrink_rx(i);
        sessions.shrink_tx(i);
    }
    assert_eq!(sessions.arena().free(), free);
    sessions.end();
}

/// With a reserve, a session that holds everything does not prevent another one from receiving its next segment.
#[test]
fn reserve_covers_next_segment() {
    let mut sessions = Sessions::new(2, 10 * LARGE, 2);
    while sessions.covers(0, 0, 30_000, false) {
        sessions.finish(0);
        sessions.commit(0);
    }
    assert!(!sessions.covers(1, 0, 20_000, false));
    assert!(sessions.covers(1, 0, 20_000, true));
    sessions.end();
}

/// A full arena refuses a range as a whole, and its state does not change.
#[test]
fn refused_range_allocates_nothing() {
    let mut arena = Arena::new(3 * LARGE).unwrap();
    let slot = arena.take_slot().unwrap();
    let mut rx = offcore_session::Fifo::<offcore_session::Rx>::new(slot);
    let free = arena.free();
    assert!(!rx.cover(&mut arena, 0, 3 * LARGE));
    assert_eq!(arena.free(), free);
    assert!(rx.cover(&mut arena, 0, 100));
    let free = arena.free();
    assert!(!rx.cover(&mut arena, 0, 2 * LARGE + 101));
    assert_eq!((arena.free(), rx.end()), (free, 100));
    assert!(!rx.cover(&mut arena, 0, CAPACITY + 1) && !rx.cover(&mut arena, u64::MAX, 2));
    assert!(rx.cover(&mut arena, 100, LARGE));
    assert!(rx.cover(&mut arena, 0, 0), "nothing always fits");
    rx.discard(&mut arena);
    assert!(rx.is_empty());
}

/// A block that is released while a copy holds it keeps its table entry: the next lap waits for the copy.
#[test]
fn a_held_block_keeps_its_entry() {
    let mut arena = Arena::new(300 * LARGE).unwrap();
    let slot = arena.take_slot().unwrap();
    let free = arena.free();
    let mut tx = offcore_session::Fifo::<offcore_session::Tx>::new(slot);
    let mut writer = offcore_session::Writer::new(arena.memory().clone(), slot).unwrap();
    assert!(tx.grant(&mut arena, CAPACITY as u64));
    assert_eq!(writer.write(&vec![7; CAPACITY]), CAPACITY);
    let all = tx.written(&arena).unwrap();
    tx.hold(10, 20);
    let (held, _) = tx.pieces(&arena, 10, 20).next().unwrap();
    tx.acked(&mut arena, all);
    assert_eq!(arena.free().large, free.large - 1, "the held block alone");
    let lap = (CAPACITY + LARGE) as u64;
    assert!(tx.grant(&mut arena, lap), "up to the held block's entry");
    assert!(!tx.grant(&mut arena, lap + 1));
    assert_eq!((writer.space(), tx.end()), (LARGE, lap), "nothing has changed");
    assert_eq!(writer.write(&vec![8; LARGE]), LARGE);
    // SAFETY: a byte of the block that is held.
    assert_eq!(unsafe { held.read_volatile() }, 7);
    tx.unhold(&mut arena, 10, 20);
    assert!(tx.grant(&mut arena, lap + 1));
    tx.discard(&mut arena);
    assert_eq!((tx.is_empty(), arena.free()), (true, free));
}
