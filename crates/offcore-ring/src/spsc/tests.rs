//! Tests of the ring against a model queue, against a second thread, and with loom.

use super::*;

impl<T: Copy> Producer<T> {
    /// Copies items into the ring until it is full, and publishes them together. Returns their number.
    fn push_slice(&mut self, items: &[T]) -> usize {
        let n = self.room(items.len()).min(items.len());
        let (first, second) = self.spare(n);
        let (head, tail) = items[..n].split_at(first.len());
        first.write_copy_of_slice(head);
        second.write_copy_of_slice(tail);
        // SAFETY: the two slices are the `n` slots that were just written.
        unsafe { self.advance(n) };
        self.publish();
        n
    }
}

#[cfg(not(loom))]
mod plain {
    use std::collections::VecDeque;
    use std::sync::atomic::AtomicUsize as Count;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Push,
        PushSlice(usize),
        PushIter(usize),
        Stage(usize, usize),
        Publish,
        Pop,
        PopBurst(usize, usize),
        Peek(usize),
        Release(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let n = || 0usize..12;
        prop_oneof![
            Just(Op::Push),
            n().prop_map(Op::PushSlice),
            n().prop_map(Op::PushIter),
            (n(), n()).prop_map(|(max, n)| Op::Stage(max, n)),
            Just(Op::Publish),
            Just(Op::Pop),
            (n(), n()).prop_map(|(max, taken)| Op::PopBurst(max, taken)),
            n().prop_map(Op::Peek),
            n().prop_map(Op::Release),
        ]
    }

    /// A model of the ring: its items, how many of them are published, and how many the consumer has seen.
    struct Model {
        capacity: usize,
        next: u64,
        items: VecDeque<u64>,
        published: usize,
    }

    impl Model {
        fn room(&self) -> usize {
            self.capacity - self.items.len()
        }

        fn add(&mut self, n: usize) -> Vec<u64> {
            let added: Vec<u64> = (self.next..self.next + n as u64).collect();
            self.next += n as u64;
            self.items.extend(&added);
            added
        }

        fn take(&mut self, n: usize) -> Vec<u64> {
            self.published -= n;
            self.items.drain(..n).collect()
        }
    }

    proptest! {
        #[test]
        fn behaves_like_a_queue(ops in prop::collection::vec(op(), 0..200), bits in 0u32..5) {
            let capacity = 1usize << bits;
            let (mut producer, mut consumer) = ring::<u64>(capacity).unwrap();
            let mut model = Model { capacity, next: 0, items: VecDeque::new(), published: 0 };
            for op in ops {
                match op {
                    Op::Push => {
                        let fits = model.room() > 0;
                        prop_assert_eq!(producer.push(model.next), if fits { Ok(()) } else { Err(model.next) });
                        if fits {
                            model.add(1);
                            model.published = model.items.len();
                        }
                    }
                    Op::PushSlice(n) => {
                        let offered: Vec<u64> = (model.next..model.next + n as u64).collect();
                        let fits = model.room().min(n);
                        prop_assert_eq!(producer.push_slice(&offered), fits);
                        model.add(fits);
                        model.published = model.items.len();
                    }
                    Op::PushIter(n) => {
                        let mut offered = model.next..model.next + n as u64;
                        let fits = model.room().min(n);
                        prop_assert_eq!(producer.push_iter(&mut offered), fits);
                        prop_assert_eq!(offered.count(), n - fits, "what does not fit stays");
                        model.add(fits);
                        model.published = model.items.len();
                    }
                    Op::Stage(max, n) => {
                        let (first, second) = producer.spare(max);
                        let spare = first.len() + second.len();
                        prop_assert_eq!(spare, model.room().min(max));
                        let n = n.min(spare);
                        for (slot, item) in first.iter_mut().chain(second).zip(model.add(n)) {
                            slot.write(item);
                        }
                        // SAFETY: the first `n` spare slots were just written.
                        unsafe { producer.advance(n) };
                        producer.prefetch(max);
                    }
                    Op::Publish => {
                        producer.publish();
                        model.published = model.items.len();
                    }
                    Op::Pop => {
                        let expected = (model.published > 0).then(|| model.take(1)[0]);
                        prop_assert_eq!(consumer.pop(), expected);
                    }
                    Op::PopBurst(max, taken) => {
                        let n = model.published.min(max);
                        let mut burst = consumer.pop_burst(max);
                        prop_assert_eq!(burst.len(), n);
                        let got: Vec<u64> = burst.by_ref().take(taken).collect();
                        drop(burst);
                        prop_assert_eq!(&got[..], &model.take(n)[..taken.min(n)]);
                    }
                    Op::Peek(max) => {
                        let (first, second) = consumer.peek(max);
                        let seen: Vec<u64> = first.iter().chain(second).copied().collect();
                        let n = model.published.min(max);
                        prop_assert_eq!(seen, model.items.range(..n).copied().collect::<Vec<_>>());
                    }
                    Op::Release(n) => {
                        let (first, second) = consumer.peek(n);
                        let n = first.len() + second.len();
                        consumer.release(n);
                        model.take(n);
                    }
                }
                let written = model.next as usize;
                prop_assert_eq!(producer.written(), written);
                prop_assert_eq!(producer.published(), written - (model.items.len() - model.published));
                prop_assert_eq!(producer.released(), written - model.items.len());
                for at in [0, written.saturating_sub(capacity + 1), written.saturating_sub(capacity), written] {
                    let kept = at < written && written - at <= capacity;
                    // SAFETY: every spare slot that was written was also counted.
                    prop_assert_eq!(unsafe { producer.get(at) }, kept.then_some(at as u64));
                }
            }
        }
    }

    #[test]
    fn two_threads_pass_everything_in_order() {
        const ITEMS: u64 = 500_000;
        let (mut producer, mut consumer) = ring::<u64>(64).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut next, mut size) = (0u64, 1u64);
            while next < ITEMS {
                size = size % 37 + 1;
                let burst: Vec<u64> = (next..(next + size).min(ITEMS)).collect();
                let pushed = producer.push_slice(&burst) as u64;
                producer.prefetch(32);
                next += pushed;
                if pushed == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut expected = 0u64;
        while expected < ITEMS {
            let (first, second) = consumer.peek(32);
            let n = first.len() + second.len();
            for &item in first.iter().chain(second) {
                assert_eq!(item, expected);
                expected += 1;
            }
            consumer.release(n);
            for item in consumer.pop_burst(5) {
                assert_eq!(item, expected);
                expected += 1;
            }
            if n == 0 {
                std::thread::yield_now();
            }
        }
        thread.join().unwrap();
        assert!(consumer.is_abandoned() && consumer.pop().is_none());
    }

    /// Counts how often it is dropped.
    struct Counted<'a>(&'a Count);

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn every_item_is_dropped_once() {
        let drops = Count::new(0);
        let (mut producer, mut consumer) = ring(8).unwrap();
        let mut items = std::iter::repeat_with(|| Counted(&drops));
        assert_eq!(producer.push_iter(&mut items), 8);
        consumer.available(8);
        consumer.release(1);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        drop(consumer.pop());
        assert_eq!(drops.load(Ordering::Relaxed), 2);
        let mut burst = consumer.pop_burst(3);
        drop(burst.next());
        drop(burst);
        assert_eq!(drops.load(Ordering::Relaxed), 5);
        // A leaked burst keeps its untaken items in the ring: one item is taken here, two stay in the ring.
        let mut burst = consumer.pop_burst(3);
        let taken = burst.next();
        std::mem::forget(burst);
        drop((producer, consumer));
        assert_eq!(drops.load(Ordering::Relaxed), 7);
        drop(taken);
        assert_eq!(drops.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn capacity_is_a_power_of_two() {
        for bad in [0, 3, 100] {
            assert_eq!(ring::<u8>(bad).map(|_| ()), Err(CapacityError(bad)));
        }
    }

    #[test]
    #[should_panic(expected = "3 items to release, 2 seen")]
    fn release_beyond_peek_panics() {
        let (mut producer, mut consumer) = ring(4).unwrap();
        producer.push_slice(&[1, 2]);
        consumer.peek(2);
        producer.push(3).unwrap();
        consumer.release(3);
    }
}

#[cfg(loom)]
mod loom_model {
    use super::*;

    /// Items that wrap around in a ring of two slots, written by slice and in place, and taken by peeking and popping.
    /// Loom reports any slot that both sides access without ordering.
    #[test]
    fn every_interleaving_keeps_order() {
        const ITEMS: u32 = 4;
        let mut model = loom::model::Builder::new();
        // Three forced switches between the threads reach every pair of bursts. Without a limit, the model takes hours.
        model.preemption_bound = Some(3);
        model.check(|| {
            let (mut producer, mut consumer) = ring::<u32>(2).unwrap();
            let thread = loom::thread::spawn(move || {
                let mut next = 0;
                while next < ITEMS {
                    let before = next;
                    if next == 2 {
                        let (first, _) = producer.spare(1);
                        if let Some(slot) = first.first_mut() {
                            slot.write(next);
                            // SAFETY: one slot was spare and has been written.
                            unsafe { producer.advance(1) };
                            producer.publish();
                            next += 1;
                        }
                    } else {
                        next +=
                            producer.push_slice(&[next, next + 1][..(ITEMS - next).min(2) as usize]) as u32;
                    }
                    // The producer may read back a slot while the consumer reads it.
                    // SAFETY: `spare` is not called, so no uncounted slot is written.
                    let last = unsafe { producer.get(producer.written().saturating_sub(1)) };
                    assert_eq!(last, next.checked_sub(1));
                    if next == before {
                        loom::thread::yield_now();
                    }
                }
            });
            let mut expected = 0;
            while expected < ITEMS {
                let (first, second) = consumer.peek(2);
                let n = first.len() + second.len();
                for &item in first.iter().chain(second) {
                    assert_eq!(item, expected);
                    expected += 1;
                }
                if n > 0 {
                    consumer.release(n);
                } else if let Some(item) = consumer.pop() {
                    assert_eq!(item, expected);
                    expected += 1;
                } else {
                    loom::thread::yield_now();
                }
            }
            thread.join().unwrap();
        });
    }

    /// Items left in the ring are dropped after both sides are dropped, in either order.
    #[test]
    fn last_dropped_side_drops_items() {
        loom::model(|| {
            let item = std::sync::Arc::new(());
            let (mut producer, mut consumer) = ring(2).unwrap();
            let sent = std::sync::Arc::clone(&item);
            let thread = loom::thread::spawn(move || {
                producer.push_iter(&mut [std::sync::Arc::clone(&sent), sent].into_iter());
            });
            drop(consumer.pop());
            drop(consumer);
            thread.join().unwrap();
            assert_eq!(std::sync::Arc::strong_count(&item), 1);
        });
    }
}
