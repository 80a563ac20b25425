//! Stack and application in two threads, and the application has its own mappings. Bytes and their order are checked in
//! both directions, while the FIFOs become large, small and empty.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use offcore_session::{Arena, Fifo, Memory, Place, Reader, Rx, Tx, Writer};

const BYTES: u64 = 24 << 20;

fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Returns lengths that do not match blocks, mostly short, in a reproducible sequence.
fn length(round: u64) -> usize {
    let mixed = round.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
    1 + (mixed % if round % 64 < 48 { 900 } else { 40_000 }) as usize
}

/// Panics when no progress has been made for 10 s.
struct Progress {
    last: u64,
    since: Instant,
}

impl Progress {
    fn new() -> Self {
        Self { last: 0, since: Instant::now() }
    }

    fn made(&mut self, now: u64) {
        if now != self.last {
            (self.last, self.since) = (now, Instant::now());
        } else {
            assert!(self.since.elapsed() < Duration::from_secs(10), "no progress at {now}");
            std::thread::yield_now();
        }
    }
}

fn application(memory: Memory, slot: Place) {
    let memory = Arc::new(memory);
    let mut reader = Reader::new(Arc::clone(&memory), slot).unwrap();
    let mut writer = Writer::new(memory, slot).unwrap();
    let (mut read, mut written, mut round) = (0, 0, 0);
    let mut progress = Progress::new();
    let mut buffer = vec![0; 40_000];
    while read < BYTES || written < BYTES {
        round += 1;
        let n = reader.read(&mut buffer[..length(round)]);
        for (&found, at) in buffer[..n].iter().zip(read..) {
            assert_eq!(found, byte(at), "at {at}");
        }
        read += n as u64;
        let len = (length(round + 7) as u64).min(BYTES - written);
        let bytes: Vec<u8> = (written..written + len).map(byte).collect();
        written += writer.write(&bytes) as u64;
        progress.made(read + written);
    }
}

#[test]
fn streams_arrive_whole_and_in_order() {
    let mut arena = Arena::new(3 << 20).unwrap();
    let free = arena.free();
    let slot = arena.take_slot().unwrap();
    let memory = Memory::attach(arena.memory().segments()).unwrap();
    let thread = std::thread::spawn(move || application(memory, slot));
    let (mut rx, mut tx) = (Fifo::<Rx>::new(slot), Fifo::<Tx>::new(slot));
    let (mut round, mut draining, mut empty) = (0, false, [0; 2]);
    let mut progress = Progress::new();
    while tx.edge() < BYTES || rx.released() < BYTES {
        round += 1;
        let (from, len) = (rx.edge(), (length(round) as u64).min(BYTES - rx.edge()) as usize);
        // The window keeps one size for a while, so that the small ring is also used.
        let window = if round % 4096 < 2048 { 4096 } else { 600_000 };
        if !draining && from + len as u64 - rx.released() <= window && rx.cover(&mut arena, from, len) {
            let mut at = from;
            for (address, len) in rx.pieces(&arena, from, len) {
                let bytes: Vec<u8> = (at..at + len as u64).map(byte).collect();
                // SAFETY: the piece has `len` bytes, which are covered and not committed.
                unsafe { address.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), len) };
                at += len as u64;
            }
            rx.commit(&arena, at);
            // Occasionally the reader gets the time to catch up.
            draining = from >> 17 != at >> 17;
        }
        rx.consumed(&mut arena).unwrap();
        tx.grant(&mut arena, (tx.released() + window).min(BYTES));
        let (from, to) = (tx.released(), tx.written(&arena).unwrap());
        let mut at = from;
        for (address, len) in tx.pieces(&arena, from, (to - from) as usize) {
            // SAFETY: the application has written these `len` bytes and waits for more space.
            let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), len) };
            for (&found, at) in bytes.iter().zip(at..) {
                assert_eq!(found, byte(at), "at {at}");
            }
            at += len as u64;
        }
        assert_eq!(at, to);
        tx.acked(&mut arena, to);
        if round % 32 == 0 || draining {
            let shrunk = rx.shrink(&mut arena);
            draining &= !shrunk;
            empty[0] += u32::from(shrunk);
            empty[1] += u32::from(tx.shrink(&mut arena));
        }
        progress.made(rx.released() + rx.edge() + tx.edge());
    }
    thread.join().unwrap();
    assert!(empty.iter().all(|&times| times > 0), "{empty:?}");
    rx.discard(&mut arena);
    tx.discard(&mut arena);
    arena.give_slot(slot);
    assert_eq!(arena.free(), free);
}
