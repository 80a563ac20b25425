//! Tests of copy queues with engines that are stepped manually.

use proptest::prelude::*;

use super::*;
use crate::channel::CopyDevice;
use crate::core::{CoreDevice, Stepper};
use crate::mover::{ChannelId, Mode};

const IN_FLIGHT: usize = 64;
const LEN: usize = 16;
/// Maximum number of packets of a test.
const PLACES: usize = 4096;

/// A queue whose packet `n`, from 1 on, is copied to place `n`, with everything that it needs.
struct Bed {
    mover: Mover,
    channels: Vec<ChannelId>,
    steppers: Vec<Stepper>,
    queue: CopyQueue<usize>,
    clock: StageClock,
    source: Vec<u8>,
    target: Vec<u8>,
    sent: usize,
    received: usize,
}

/// A kind of packet to enter.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A packet with this number of copies.
    Plain(usize),
    /// A packet with one copy, which the core must make.
    ByCore,
    /// A packet with one copy, entered after other copies were cancelled.
    Cancelled,
}

impl Bed {
    fn new(mode: Mode, channels: usize, ring: usize) -> Self {
        let mut mover = Mover::new();
        let (channels, steppers): (Vec<_>, Vec<_>) = (0..channels)
            .map(|_| {
                let (device, stepper) = CoreDevice::stepped();
                (mover.add_channel(device.open_channel(ring).unwrap()), stepper)
            })
            .unzip();
        let mut queue = CopyQueue::open(&mut mover, IN_FLIGHT);
        queue.bind(&mut mover, &Binding::new(mode, channels.clone())).unwrap();
        let (source, target) = (vec![0; PLACES * LEN], vec![0; PLACES * LEN]);
        let clock = StageClock::private();
        Self { mover, channels, steppers, queue, clock, source, target, sent: 1, received: 1 }
    }

    /// Submits as many of `kinds` as fit. Returns whether they were complete at once.
    fn submit(&mut self, kinds: &[Kind]) -> bool {
        let mut plan = self.queue.plan(&mut self.mover);
        let Self { mover, queue, clock, source, target, sent, .. } = self;
        let first = *sent;
        let complete = match queue.begin(mover, &mut plan) {
            Begun::Immediate(batch) => gather(batch, kinds, source, target, sent, clock),
            Begun::Queued(batch) => gather(batch, kinds, source, target, sent, clock),
        };
        assert!(complete.is_empty() || complete == (first..*sent).collect::<Vec<_>>());
        complete.iter().for_each(|&number| self.check(number));
        !complete.is_empty()
    }

    /// Takes complete packets.
    fn reap(&mut self) -> usize {
        self.mover.poll(&mut self.clock);
        let mut ready = self.queue.ready(&mut self.mover);
        let packets = ready.len();
        let numbers: Vec<usize> = (0..packets).map(|index| *ready.holder(index)).collect();
        ready.retire(packets);
        numbers.iter().for_each(|&number| self.check(number));
        packets
    }

    fn check(&mut self, number: usize) {
        assert_eq!(number, self.received, "packets come out in the order in which they went in");
        assert!(self.is_copied(number), "packet {number}");
        self.received += 1;
    }

    fn is_copied(&self, number: usize) -> bool {
        self.target[number * LEN..][..LEN] == [number as u8 | 1; LEN]
    }

    /// Takes complete packets with this number of keys, in this number of calls.
    fn take(&mut self, keys: usize, calls: usize) -> Vec<usize> {
        self.mover.poll(&mut self.clock);
        let mut taken = Vec::new();
        let key = |&number: &usize| (number > 0).then_some((number % keys) as u32);
        for _ in 0..calls {
            self.queue.take_by_key(&mut self.mover, key, |number| taken.push(std::mem::take(number)));
        }
        assert!(taken.iter().all(|&number| self.is_copied(number)));
        taken
    }
}

fn gather<const IMMEDIATE: bool>(
    mut batch: Batch<'_, usize, IMMEDIATE>,
    kinds: &[Kind],
    source: &mut [u8],
    target: &mut [u8],
    sent: &mut usize,
    clock: &mut StageClock,
) -> Vec<usize> {
    let mut complete = Vec::new();
    for kind in kinds.iter().take(batch.packets()) {
        let at = *sent * LEN;
        let (source, target) = (&mut source[at..][..LEN], &mut target[at..][..LEN]);
        source.fill(*sent as u8 | 1);
        target.fill(0);
        let copies = if let Kind::Plain(copies) = kind { *copies } else { 1 };
        if batch.room() < copies {
            break;
        }
        if copies == 0 {
            target.fill(*sent as u8 | 1);
        }
        if matches!(kind, Kind::Cancelled) {
            batch.copy(source.as_ptr(), std::ptr::null_mut(), LEN as u32);
            batch.cancel();
        }
        for (from, to) in source.chunks(LEN / copies.max(1)).zip(target.chunks_mut(LEN / copies.max(1))) {
            if copies > 0 {
                batch.copy(from.as_ptr(), to.as_mut_ptr(), from.len() as u32);
            }
        }
        let entered = match kind {
            Kind::ByCore => batch.enter_by_core(*sent),
            _ => batch.enter(*sent),
        };
        complete.extend(entered);
        *sent += 1;
    }
    // SAFETY: a place belongs to a single packet until the packet is checked. Both vectors outlive the mover's copies,
    // which are made when the engine is stepped.
    unsafe { batch.submit(clock) };
    complete
}

#[test]
fn core_copies_wait_for_older_ones() {
    let mut bed = Bed::new(Mode::Cpu, 1, 64);
    assert!(bed.submit(&[Kind::Plain(1); 8]));
    assert_eq!(bed.queue.in_flight(&mut bed.mover), 0);
    let offload = Binding::new(Mode::Offload, bed.channels.clone());
    bed.queue.bind(&mut bed.mover, &offload).unwrap();
    assert!(!bed.submit(&[Kind::Plain(1); 8]));
    bed.queue.bind(&mut bed.mover, &Binding::core()).unwrap();
    assert!(!bed.submit(&[Kind::Plain(1); 8]), "eight of an engine are before them");
    assert_eq!((bed.reap(), bed.queue.in_flight(&mut bed.mover)), (0, 16));
    bed.steppers[0].step();
    assert_eq!(bed.reap(), 16);
    assert!(bed.submit(&[Kind::Plain(1); 8]));
}

#[test]
fn full_channel_falls_back_to_core() {
    let mut bed = Bed::new(Mode::Offload, 1, 8);
    bed.submit(&[Kind::Plain(2); 8]);
    assert_eq!((bed.sent, bed.mover.stats().core_copies), (5, 0));
    // The channel is full: the core copies.
    bed.submit(&[Kind::Plain(2); 8]);
    assert_eq!((bed.sent, bed.mover.stats().core_copies), (13, 16));
    assert_eq!(bed.reap(), 0);
    bed.steppers[0].step();
    assert_eq!(bed.reap(), 12);
}

#[test]
fn short_copies_are_left_to_core() {
    let mut bed = Bed::new(Mode::Offload, 1, 64);
    bed.submit(&[Kind::ByCore, Kind::ByCore, Kind::Plain(1), Kind::ByCore]);
    assert_eq!((bed.reap(), bed.mover.stats().core_copies), (2, 3));
    bed.steppers[0].step();
    assert_eq!(bed.reap(), 2);
}

#[test]
fn room_includes_core_copies() {
    let mut bed = Bed::new(Mode::Offload, 1, 1024);
    let mut plan = bed.queue.plan(&mut bed.mover);
    let Begun::Queued(mut batch) = bed.queue.begin(&mut bed.mover, &mut plan) else {
        panic!("an engine copies")
    };
    let (from, to) = (bed.source.as_ptr(), bed.target.as_mut_ptr());
    let mut packets = 0;
    // Packets of many copies are added, with a room check before each copy, until the next packet does not fit.
    loop {
        let copies = (0..100)
            .take_while(|_| {
                batch.room() > 0 && {
                    batch.copy(from, to, 1);
                    true
                }
            })
            .count();
        if copies < 100 {
            batch.cancel();
            break;
        }
        batch.enter_by_core(0);
        packets += 1;
    }
    // SAFETY: both vectors are alive, and nothing else uses them.
    unsafe { batch.submit(&mut bed.clock) };
    assert_eq!((packets, bed.mover.stats().core_copies), (LIST / 100, LIST as u64 / 100 * 100));
}

#[test]
fn stalled_copy_holds_up_its_key_only() {
    let mut bed = Bed::new(Mode::Offload, 1, 8);
    // The engine has the first packet, of key 1, and never completes it. The core makes the other packets' copies.
    bed.submit(&[Kind::Plain(1)]);
    let mut taken = Vec::new();
    for _ in 0..10 * IN_FLIGHT {
        bed.submit(&[Kind::ByCore, Kind::ByCore, Kind::ByCore]);
        taken.append(&mut bed.take(64, 17));
    }
    let sent = bed.sent;
    assert!(sent > 20 * IN_FLIGHT, "there is room for {sent} only");
    let expected: Vec<usize> = (1..sent).filter(|number| number % 64 != 1).collect();
    assert_eq!(taken, expected);
    bed.steppers[0].step();
    let late: Vec<usize> = (1..sent).filter(|number| number % 64 == 1).collect();
    assert_eq!((bed.take(64, 1), bed.queue.in_flight(&mut bed.mover)), (late, 0));
    // Every slot can be used again.
    for packets in [IN_FLIGHT, IN_FLIGHT, 7, IN_FLIGHT] {
        bed.submit(&vec![Kind::ByCore; packets]);
        assert_eq!(bed.take(64, 1).len(), packets);
    }
}

proptest! {
    #[test]
    fn keys_keep_packet_order(
        rounds in prop::collection::vec((0..32usize, 0..8usize, 0..20usize), 1..100), keys in 1..20usize,
    ) {
        let mut bed = Bed::new(Mode::Offload, 3, 16);
        let mut left: Vec<usize> = Vec::new();
        for (packets, steps, calls) in rounds {
            let sent = bed.sent;
            prop_assert!(!bed.submit(&vec![Kind::Plain(1); packets]) || left.is_empty());
            left.extend(sent..bed.sent);
            for (index, stepper) in bed.steppers.iter_mut().enumerate() {
                // The last engine hangs most of the time.
                if steps >> index & 1 == 1 && (index < 2 || steps == 7) {
                    stepper.step();
                }
            }
            let taken = bed.take(keys, calls);
            for &number in &taken {
                let first = left.iter().position(|&other| other % keys == number % keys).unwrap();
                prop_assert_eq!(left.remove(first), number);
            }
            prop_assert_eq!(bed.queue.in_flight(&mut bed.mover) == 0, left.is_empty());
            if calls > 17 {
                let mut stalled: Vec<usize> = Vec::new();
                for &number in &left {
                    prop_assert!(stalled.contains(&(number % keys)) || !bed.is_copied(number), "{number} waits");
                    stalled.push(number % keys);
                }
            }
        }
        bed.steppers.iter_mut().for_each(|stepper| _ = stepper.step());
        let taken = bed.take(keys, 1);
        prop_assert_eq!((taken.len(), bed.queue.in_flight(&mut bed.mover)), (left.len(), 0));
    }

    #[test]
    fn copy_queue_keeps_packet_order(
        rounds in prop::collection::vec((prop::collection::vec(0..7usize, 0..32), 0..4usize), 1..100),
    ) {
        let mut bed = Bed::new(Mode::Offload, 2, 16);
        for (kinds, steps) in rounds {
            let kinds: Vec<Kind> = kinds.into_iter().map(|kind| match kind {
                0 => Kind::Plain(0),
                1 => Kind::Plain(4),
                2 => Kind::ByCore,
                3 => Kind::Cancelled,
                _ => Kind::Plain(1),
            }).collect();
            bed.submit(&kinds);
            // Step either engine, both or none.
            for (index, stepper) in bed.steppers.iter_mut().enumerate() {
                if steps >> index & 1 == 1 {
                    stepper.step();
                }
            }
            bed.reap();
        }
        bed.steppers.iter_mut().for_each(|stepper| _ = stepper.step());
        bed.reap();
        prop_assert_eq!(bed.received, bed.sent);
    }
}
