//! Each fault alone, and all together, on a channel that otherwise makes every copy immediately.

use super::*;
use crate::cpu::CpuChannel;

const LEN: usize = 100;
const RING: usize = 64;

/// A faulty channel, a source, and a destination of zeros for `RING` copies.
struct Rig {
    channel: FaultyChannel,
    source: Vec<u8>,
    destination: Vec<u8>,
    completions: Completions,
}

impl Rig {
    fn new(faults: Faults) -> Self {
        Self {
            channel: FaultyChannel::new(Box::new(CpuChannel::new(RING).unwrap()), faults),
            source: (0..RING * LEN).map(|i| 1 + (i % 255) as u8).collect(),
            destination: vec![0; RING * LEN],
            completions: Completions::default(),
        }
    }

    fn copy_all(&mut self) {
        let ops: Vec<CopyOp> = (0..RING)
            .map(|i| CopyOp {
                src: self.source[i * LEN..].as_ptr(),
                dst: self.destination[i * LEN..].as_mut_ptr(),
                len: LEN as u32,
                token: i as u32,
            })
            .collect();
        // SAFETY: the buffers live as long as the channel and are only read between calls.
        assert_eq!(unsafe { self.channel.copy(&ops) }, RING);
        self.channel.submit();
    }

    /// Polls `times` times. Returns the tokens of successful copies, in order.
    fn poll(&mut self, times: usize) -> Vec<u32> {
        let mut tokens = Vec::new();
        for _ in 0..times {
            self.completions.tokens.clear();
            self.channel.poll(&mut self.completions);
            tokens.extend(&self.completions.tokens);
        }
        tokens
    }

    fn reset(&mut self) -> usize {
        (1..).find(|_| self.channel.reset() == Reset::Done).unwrap()
    }

    fn take(&mut self) -> Vec<u32> {
        let mut outstanding = Vec::new();
        self.channel.take_outstanding(&mut outstanding);
        outstanding.iter().map(|op| op.token).collect()
    }

    fn landed(&self, i: usize) -> bool {
        self.destination[i * LEN..][..LEN] == self.source[i * LEN..][..LEN]
    }

    fn untouched(&self, range: std::ops::Range<usize>) -> bool {
        self.destination[range].iter().all(|&byte| byte == 0)
    }
}

#[test]
fn failures_copy_the_reported_bytes() {
    for (faults, failure) in [
        (Faults { error: 1000, ..Faults::default() }, Failure::Hardware),
        (Faults { partial: 1000, ..Faults::default() }, Failure::PageFault),
    ] {
        let mut rig = Rig::new(faults);
        rig.copy_all();
        let mut seen = 0;
        while rig.channel.in_flight() > 0 {
            rig.completions.clear();
            rig.channel.poll(&mut rig.completions);
            for failed in rig.completions.failed.clone() {
                let start = failed.copy.token as usize * LEN;
                let done = start + failed.done as usize;
                assert_eq!((failed.copy.len as usize, failed.failure), (LEN, failure));
                assert!(failure == Failure::PageFault || failed.done == 0);
                assert_eq!(rig.destination[start..done], rig.source[start..done]);
                assert!(rig.untouched(done..start + LEN));
                seen += 1;
            }
        }
        let counts = rig.channel.counts();
        assert_eq!((seen, counts.errors.value() + counts.partials.value()), (RING, RING as u64));
    }
}

#[test]
fn stuck_copies_end_at_reset() {
    let mut rig = Rig::new(Faults { never: 1000, reset_calls: 3, ..Faults::default() });
    rig.copy_all();
    assert!(rig.poll(1000).is_empty());
    assert_eq!((rig.channel.room(), rig.reset()), (0, 4));
    assert_eq!(rig.take(), (0..RING as u32).collect::<Vec<_>>());
    assert_eq!((rig.channel.in_flight(), rig.channel.room()), (0, RING));
    assert!(rig.untouched(0..RING * LEN));
}

#[test]
fn late_copies_land_after_give_up() {
    let mut rig = Rig::new(Faults { late: 1000, late_polls: 10, reset_calls: 100, ..Faults::default() });
    rig.copy_all();
    assert_eq!(rig.take().len(), RING);
    assert_eq!(rig.channel.in_flight(), 0);
    assert!(rig.poll(5).is_empty());
    // A pending reset does not stop them.
    for call in 0..5 {
        assert!(rig.untouched(0..RING * LEN), "call {call}");
        assert_eq!(rig.channel.reset(), Reset::Pending);
    }
    assert_eq!(rig.destination, rig.source);
    assert!(rig.poll(100).is_empty(), "given up is not reported");
    assert_eq!(rig.channel.counts().late_after_taken.value(), RING as u64);
}

#[test]
fn finished_reset_stops_late_copies() {
    let mut rig = Rig::new(Faults { late: 500, late_polls: 10, reset_calls: 2, ..Faults::default() });
    rig.copy_all();
    let completed = rig.poll(1);
    assert_eq!(rig.reset(), 3);
    let outstanding = rig.take();
    assert!(rig.poll(1000).is_empty());
    for i in 0..RING as u32 {
        assert_eq!(completed.contains(&i), rig.landed(i as usize), "{i}");
        assert_eq!(outstanding.contains(&i), rig.untouched(i as usize * LEN..(i as usize + 1) * LEN), "{i}");
    }
    assert_eq!(rig.channel.counts().late_stopped.value(), outstanding.len() as u64);
    // The channel continues to work.
    assert_eq!(rig.channel.room(), RING);
    rig.copy_all();
    assert!(!rig.poll(1).is_empty());
}

#[test]
fn operations_end_exactly_once() {
    let faults = Faults {
        seed: 42,
        error: 50,
        partial: 50,
        delay: 200,
        never: 20,
        late: 20,
        reorder: 300,
        delay_polls: 4,
        late_polls: 50,
        reset_calls: 2,
    };
    let mut rig = Rig::new(faults);
    for round in 0..200 {
        rig.copy_all();
        let mut seen = [0; RING];
        for _ in 0..30 {
            rig.completions.clear();
            rig.channel.poll(&mut rig.completions);
            let failed = rig.completions.failed.iter().map(|failed| failed.copy.token);
            failed.chain(rig.completions.tokens.iter().copied()).for_each(|token| seen[token as usize] += 1);
            let stats = rig.channel.stats();
            let known = stats.completed + stats.failed + rig.channel.in_flight() as u64;
            assert_eq!(stats.submitted, known);
        }
        if round % 2 == 0 {
            rig.reset();
        }
        rig.take().into_iter().for_each(|token| seen[token as usize] += 1);
        assert_eq!(seen, [1; RING], "round {round}");
        // Copies given up in an odd round may be executed in the next round, with the same bytes as their successors.
    }
    let counts = rig.channel.counts();
    for counter in [&counts.errors, &counts.partials, &counts.delayed, &counts.reordered, &counts.never] {
        assert!(counter.value() > 0);
    }
    assert!(counts.late_after_taken.value() > 0 && counts.late_stopped.value() > 0);
}
