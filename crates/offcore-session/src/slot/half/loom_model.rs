//! Loom models of all loads and stores to a slot by both sides, in every interleaving. A loom cell stands for each byte
//! of a block.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

impl Half {
    fn new() -> Self {
        let (word, position) = (|| AtomicU32::new(0), || AtomicU64::new(0));
        let stack = StackLine {
            edge: position(),
            limit: position(),
            p0: position(),
            small: word(),
            table: word(),
            buffer: position(),
            answered: word(),
            mtu: word(),
            undelivered: word(),
            rest: word(),
            urgent: position(),
        };
        let app = AppLine {
            index: position(),
            writing: word(),
            gap: word(),
            claims: position(),
            held_from: position(),
            held_to: position(),
            wanted: position(),
            asks: word(),
            rest: word(),
            urgent_end: position(),
        };
        let half = Self { stack, app };
        half.reset();
        half
    }
}

/// A half, and its blocks: a small ring of two bytes and a large block.
struct Direction {
    half: Half,
    small: [UnsafeCell<u64>; 2],
    large: [UnsafeCell<u64>; 4],
}

// SAFETY: the models check the accesses to the bytes, and loom reports concurrent accesses by two threads.
unsafe impl Send for Direction {}
// SAFETY: the models check the accesses to the bytes, and loom reports concurrent accesses by two threads.
unsafe impl Sync for Direction {}

impl Direction {
    fn new() -> Arc<Self> {
        let cell = |_| UnsafeCell::new(u64::MAX);
        Arc::new(Self {
            half: Half::new(),
            small: std::array::from_fn(cell),
            large: std::array::from_fn(cell),
        })
    }

    fn byte(&self, position: u64, p0: u64) -> &UnsafeCell<u64> {
        if position < p0 { &self.small[position as usize % 2] } else { &self.large[position as usize] }
    }

    fn put(&self, position: u64, p0: u64) {
        // SAFETY: loom checks that no other thread accesses the byte.
        self.byte(position, p0).with_mut(|byte| unsafe { *byte = position });
    }

    /// Reads all available bytes as a reader does, and returns the new head.
    fn read(&self, head: u64) -> u64 {
        let edge = self.half.edge();
        if edge == head {
            thread::yield_now();
            return head;
        }
        let map = self.half.map();
        for position in head..edge {
            assert!(if position < map.p0 { map.small != 0 } else { map.table != 0 });
            // SAFETY: loom checks that no other thread writes the byte.
            self.byte(position, map.p0).with(|byte| assert_eq!(unsafe { *byte }, position));
        }
        self.half.set_index(edge);
        edge
    }
}

/// The FIFO is small, becomes large while the reader may be active, and then is empty and small again.
#[test]
fn reader_follows_map_changes() {
    let mut model = loom::model::Builder::new();
    // Two forced switches between the threads reach every pair of steps. Without a bound the model takes hours.
    model.preemption_bound = Some(2);
    model.check(|| {
        let stack = Direction::new();
        let application = Arc::clone(&stack);
        let thread = thread::spawn(move || {
            let mut head = 0;
            while head < 4 {
                head = application.read(head);
            }
        });
        stack.half.describe(Map { p0: NEVER, small: 1, table: 0 });
        stack.put(0, NEVER);
        stack.half.publish(1);
        stack.half.describe(Map { p0: 1, small: 1, table: 2 });
        stack.put(1, 1);
        stack.half.publish(2);
        while stack.half.index() != 2 {
            thread::yield_now();
        }
        stack.half.describe(Map::EMPTY);
        stack.half.describe(Map { p0: NEVER, small: 3, table: 0 });
        stack.put(2, NEVER);
        stack.half.publish(3);
        stack.put(3, NEVER);
        stack.half.publish(4);
        thread.join().unwrap();
    });
}

/// The stack takes granted room back from an idle writer, and uses it, while the writer may start to write.
#[test]
fn revoked_space_is_not_written() {
    loom::model(|| {
        let stack = Direction::new();
        stack.half.describe(Map { p0: NEVER, small: 1, table: 0 });
        stack.half.allow(1);
        let application = Arc::clone(&stack);
        let thread = thread::spawn(move || {
            let written = application.half.start_writing() > 0;
            if written {
                application.put(0, NEVER);
                application.half.set_index(1);
            }
            application.half.stop_writing();
            written
        });
        let taken = stack.half.revoke(0, 1);
        if taken {
            stack.half.describe(Map::EMPTY);
            stack.put(0, NEVER);
        }
        let written = thread.join().unwrap();
        assert!(!(taken && written));
        if written {
            assert_eq!((stack.half.index(), stack.half.limit()), (1, 1));
        }
    });
}

/// The fences are necessary: without them both sides may consider the block as theirs.
#[test]
#[should_panic(expected = "both")]
fn revoke_without_fences_races() {
    loom::model(|| {
        let stack = Direction::new();
        stack.half.allow(1);
        let application = Arc::clone(&stack);
        let thread = thread::spawn(move || {
            application.half.app.writing.store(1, Ordering::Relaxed);
            application.half.limit() > 0
        });
        stack.half.stack.limit.store(0, Ordering::Relaxed);
        let taken = stack.half.app.writing.load(Ordering::Acquire) == 0;
        let written = thread.join().unwrap();
        assert!(!(taken && written), "both");
    });
}
