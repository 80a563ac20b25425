//! The link between both hosts, in virtual time.

use std::collections::BinaryHeap;

use offcore_dma::Mode;
use offcore_dma::fault::Faults;
use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_wire::ethernet;

use crate::client::Client;
use crate::datagrams::Datagrams;
use crate::end::End;
use crate::server::Server;
use crate::{AT_A_TIME, SECOND};

/// Duration of a transmission and of a round.
const DELAY: Micros = Micros::new(100);
const ROUND: Micros = Micros::new(10);
/// Maximum time that is skipped while nothing happens.
const SKIP: Micros = Micros::from_millis(100);
/// Number of frames per thousand that are lost, and likewise that are delayed, duplicated and corrupted.
const IMPAIRED: u64 = 10;

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

/// Both hosts and the link between them.
pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) client: Client,
    pub(crate) server: Server,
    pub(crate) datagrams: Datagrams,
    ends: [End; 2],
    flying: BinaryHeap<Flying>,
    number: u64,
    chance: SplitMix,
}

impl World {
    pub(crate) fn new(seed: u64, mode: Mode, faults: Faults) -> Self {
        let mut ends = [1, 2].map(|last| {
            let seed = seed << 8 | u64::from(last);
            End::new(last, mode, Faults { seed, ..faults })
        });
        let (client, server) = (Client::new(seed), Server::open(&mut ends[1]));
        let datagrams = Datagrams::open(seed, &mut ends);
        let chance = SplitMix::new(seed);
        let mut world = Self {
            now: Time::from_micros(1),
            client,
            server,
            datagrams,
            ends,
            flying: BinaryHeap::new(),
            number: 0,
            chance,
        };
        // Duplicate address detection of IPv6 takes some time.
        while world.now < Time::from_secs(3) {
            world.round();
        }
        world
    }

    /// Runs one turn of all parts.
    pub(crate) fn round(&mut self) {
        let now = self.now;
        self.deliver();
        let [client, server] = &mut self.ends;
        if now >= Time::from_secs(3) {
            self.client.round(now, client, AT_A_TIME);
            self.server.round(now, server);
            self.datagrams.round(now, [client, server], !self.client.is_done());
        }
        for from in 0..2 {
            let frames = self.ends[from].turn(now);
            for frame in frames {
                self.send(from, frame);
            }
        }
        let [client, server] = &mut self.ends;
        for event in std::mem::take(&mut client.events) {
            self.client.event(now, event, client);
        }
        for event in std::mem::take(&mut server.events) {
            self.server.event(now, event, server);
        }
        self.now = now + ROUND;
        if !self.ends.iter_mut().any(|end| end.is_busy()) {
            let due = self.ends.iter().filter_map(|end| end.path.stack.deadline(now)).min();
            let arrives = self.flying.peek().map(|first| first.0);
            let next = due.into_iter().chain(arrives).min().unwrap_or(Time::NEVER);
            let skip = if self.client.is_idle() && self.server.is_idle() { SKIP } else { SECOND / 1000 };
            self.now = next.clamp(self.now, now + skip);
        }
    }

    /// Describes the current state for debugging.
    pub(crate) fn state(&self) -> String {
        let stacks = self.ends.iter().map(|end| &end.path.stack);
        let infos: Vec<_> = stacks.flat_map(|stack| stack.all().map(|conn| stack.info(conn))).collect();
        format!("{:?} {infos:?} {:?} {:?}", self.now, self.client, self.server)
    }

    fn happens(&mut self) -> bool {
        self.chance.below(1000) < IMPAIRED
    }

    /// Sends a frame over the link.
    fn send(&mut self, from: usize, mut frame: Vec<u8>) {
        if self.happens() {
            return;
        }
        if self.happens() && is_checked(&frame) {
            let len = (frame.len() - ethernet::HEADER_LEN) as u64;
            let at = ethernet::HEADER_LEN + self.chance.below(len) as usize;
            frame[at] ^= 1 << self.chance.below(8);
        }
        let late = if self.happens() { (10 * DELAY).random(&mut self.chance) } else { Micros::ZERO };
        let copies = 1 + usize::from(self.happens());
        for _ in 0..copies {
            self.number += 1;
            self.flying.push(Flying(self.now + DELAY + late, self.number, 1 - from, frame.clone()));
        }
    }

    fn deliver(&mut self) {
        while self.flying.peek().is_some_and(|first| first.0 <= self.now) {
            let Some(Flying(_, _, to, frame)) = self.flying.pop() else { break };
            self.ends[to].receive(self.now, &frame);
        }
    }

    /// Waits until all connections have ended, and checks that nothing is left.
    pub(crate) fn finish(&mut self) {
        let end = self.now + 1200 * SECOND;
        while self.now < end && !(self.server.is_idle() && self.ends.iter().all(End::is_quiet)) {
            self.round();
        }
        let now = self.now;
        self.server.close(now, &mut self.ends[1]);
        self.datagrams.close(now, &mut self.ends);
        // Fragments of incomplete packets are kept for some time, and are then dropped.
        while self.now < now + 120 * SECOND {
            self.round();
        }
        self.flying.clear();
        self.ends.iter_mut().for_each(End::check_empty);
    }

    /// Returns the number of faults of each kind.
    pub(crate) fn faults(&self) -> Vec<u64> {
        let all = self.ends.iter().map(|end| &end.faults);
        all.flat_map(|counts| {
            [&counts.errors, &counts.partials, &counts.delayed, &counts.late, &counts.reordered]
                .map(offcore_stats::Counter::value)
        })
        .collect()
    }
}

/// Returns whether checksums detect an inverted bit. ARP has no checksum, and errors in several fragments may cancel
/// out.
fn is_checked(frame: &[u8]) -> bool {
    match frame[12..14] {
        [8, 0] => u16::from_be_bytes([frame[20], frame[21]]) & 0x1fff == 0,
        [0x86, 0xdd] => frame[20] != 44 || u16::from_be_bytes([frame[56], frame[57]]) & !7 == 0,
        _ => false,
    }
}
