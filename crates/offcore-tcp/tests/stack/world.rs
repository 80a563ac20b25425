//! Two hosts and the link between them, in virtual time.

use std::collections::BinaryHeap;

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::Config;

use crate::host::Host;

/// Impairments of a link, each in frames per thousand.
#[derive(Clone, Copy, Default)]
pub(crate) struct Impairment {
    pub(crate) loss: u64,
    pub(crate) reorder: u64,
    pub(crate) duplicate: u64,
    pub(crate) corrupt: u64,
}

/// A frame in transit: arrival time, number, destination, bytes. The earliest frame is the greatest.
#[derive(PartialEq, Eq)]
struct Flying(Time, u64, usize, Vec<u8>);

impl Ord for Flying {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

impl PartialOrd for Flying {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) hosts: [Host; 2],
    pub(crate) impairment: Impairment,
    /// Transmission time of a frame.
    pub(crate) delay: Micros,
    /// Selects frames that are lost.
    pub(crate) swallows: fn(&[u8]) -> bool,
    /// All sent frames: time, sender, bytes.
    pub(crate) trace: Vec<(Time, usize, Vec<u8>)>,
    flying: BinaryHeap<Flying>,
    number: u64,
    chance: SplitMix,
}

impl World {
    pub(crate) fn new(seed: u64, mtu: u16, config: Config) -> Self {
        let hosts = [Host::new(1, mtu, config.clone()), Host::new(2, mtu, config)];
        Self {
            now: Time::from_micros(1),
            hosts,
            impairment: Impairment::default(),
            delay: Micros::new(100),
            swallows: |_| false,
            trace: Vec::new(),
            flying: BinaryHeap::new(),
            number: 0,
            chance: SplitMix::new(seed),
        }
    }

    /// Runs until `done` returns true, or for `within` virtual microseconds. Returns whether `done` returned true in
    /// time.
    pub(crate) fn run_until(&mut self, within: Micros, mut done: impl FnMut(&mut [Host; 2]) -> bool) -> bool {
        let end = self.now + within;
        loop {
            if done(&mut self.hosts) {
                return true;
            }
            let mut next = Time::NEVER;
            for host in &mut self.hosts {
                next = next.min(host.poll(self.now).unwrap_or(Time::NEVER));
            }
            self.collect();
            if let Some(first) = self.flying.peek() {
                next = next.min(first.0);
            }
            if next >= end {
                self.now = end;
                return done(&mut self.hosts);
            }
            self.now = self.now.max(next);
            self.deliver();
        }
    }

    /// Runs for `time` virtual microseconds.
    pub(crate) fn run(&mut self, time: Micros) {
        self.run_until(time, |_| false);
    }

    fn happens(&mut self, thousandths: u64) -> bool {
        self.chance.below(1000) < thousandths
    }

    /// Takes the frames that the hosts have sent.
    fn collect(&mut self) {
        for host in 0..2 {
            for mut frame in std::mem::take(&mut self.hosts[host].frames) {
                self.trace.push((self.now, host, frame.clone()));
                if (self.swallows)(&frame) || self.happens(self.impairment.loss) {
                    continue;
                }
                if self.happens(self.impairment.corrupt) {
                    let at = 14 + self.chance.below(frame.len() as u64 - 14) as usize;
                    frame[at] ^= 1 << self.chance.below(8);
                }
                let late = if self.happens(self.impairment.reorder) {
                    (4 * self.delay).random(&mut self.chance)
                } else {
                    Micros::ZERO
                };
                let copies = 1 + usize::from(self.happens(self.impairment.duplicate));
                for _ in 0..copies {
                    self.number += 1;
                    let at = self.now + self.delay + late;
                    self.flying.push(Flying(at, self.number, 1 - host, frame.clone()));
                }
            }
        }
    }

    fn deliver(&mut self) {
        let mut due = [Vec::new(), Vec::new()];
        while self.flying.peek().is_some_and(|first| first.0 <= self.now) {
            let Some(Flying(_, _, to, frame)) = self.flying.pop() else { break };
            due[to].push(frame);
        }
        for (host, mut frames) in self.hosts.iter_mut().zip(due) {
            if !frames.is_empty() {
                host.receive(self.now, &mut frames);
            }
        }
    }
}
