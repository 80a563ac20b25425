//! The neighbour cache of ARP and neighbour discovery: IP addresses and MAC addresses on a link (RFC 826; RFC 4861,
//! 7.3).

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use arrayvec::ArrayVec;
use offcore_stats::time::{Micros, Time};
use offcore_wire::MacAddr;

use super::packet::Control;

/// Time for which an answer is valid without another confirmation: RFC 4861's REACHABLE_TIME.
const REACHABLE: Micros = Micros::from_secs(30);
/// Minimum time between two confirmations that are stored.
const RENEWED: Micros = Micros::from_secs(1);
/// Time for a confirmation after a packet to a stale neighbour, before it is probed: DELAY_FIRST_PROBE_TIME.
const DELAY: Micros = Micros::from_secs(5);
/// Time between two solicitations: RETRANS_TIMER.
const RETRANS: Micros = Micros::from_secs(1);
/// Number of solicitations before a neighbour is given up: MAX_MULTICAST_SOLICIT and MAX_UNICAST_SOLICIT.
const PROBES: u8 = 3;
/// Time for which an unused entry is kept.
const UNUSED: Micros = Micros::from_secs(600);
/// Maximum number of packets per neighbour that wait for address resolution.
const WAITING: usize = 3;

/// A neighbour: the interface and its address there.
pub(crate) type NeighbourKey = (u8, IpAddr);

/// A solicitation to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ask {
    pub who: NeighbourKey,
    /// The MAC address for a unicast solicitation that confirms it. `None` for a multicast or broadcast.
    pub station: Option<MacAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A solicitation was sent; no answer yet.
    Incomplete,
    Reachable,
    /// No confirmation for some time, and no packet sent since.
    Stale,
    /// Used while stale.
    Delay,
    /// A confirmation was requested.
    Probe,
}

#[derive(Debug)]
struct Entry {
    mac: MacAddr,
    state: State,
    probes: u8,
    /// Time of the next action; also in the set `due`.
    due: Time,
    waiting: ArrayVec<Control, WAITING>,
}

/// The neighbour cache. It grows up to a limit. A full cache replaces the least recently used entry, or if all entries
/// are in use, the one with the earliest action.
#[derive(Debug)]
pub(crate) struct Neighbours {
    entries: HashMap<NeighbourKey, Entry>,
    due: BTreeSet<(Time, NeighbourKey)>,
    /// The unused entries among them, which are replaced first.
    unused: BTreeSet<(Time, NeighbourKey)>,
    limit: usize,
    /// Changes when a MAC address changes or is removed. Holders of a copy must then resolve it again.
    generation: u32,
    answered: u32,
}

impl Neighbours {
    pub(crate) fn new(limit: usize) -> Self {
        let (due, unused) = Default::default();
        Self { entries: HashMap::new(), due, unused, limit, generation: 0, answered: 0 }
    }

    /// Returns how many solicited neighbours have answered.
    pub(crate) fn answered(&self) -> u32 {
        self.answered
    }

    /// Returns a value that changes when a neighbour answers, moves, or is given up.
    pub(crate) fn seen(&self) -> (u32, u32) {
        (self.answered, self.generation)
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Makes connections resolve their next hops again before they send.
    pub(crate) fn renew(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// Returns the MAC address of a neighbour. Calls `ask` if it is unknown or must be confirmed.
    pub(crate) fn resolve(&mut self, now: Time, who: NeighbourKey, ask: impl FnOnce(Ask)) -> Option<MacAddr> {
        if let Some(entry) = self.entries.get_mut(&who) {
            return match entry.state {
                State::Incomplete => None,
                State::Stale => {
                    let mac = entry.mac;
                    self.enter(who, State::Delay, now + DELAY);
                    Some(mac)
                }
                _ => Some(entry.mac),
            };
        }
        self.make_room();
        let entry = Entry {
            mac: MacAddr([0; 6]),
            state: State::Incomplete,
            probes: 1,
            due: now + RETRANS,
            waiting: ArrayVec::new(),
        };
        self.due.insert((entry.due, who));
        self.entries.insert(who, entry);
        ask(Ask { who, station: None });
        None
    }

    /// Queues a packet until the neighbour answers. If the queue is full, its oldest packet is dropped (RFC 4861,
    /// 7.2.2).
    pub(crate) fn wait(&mut self, who: NeighbourKey, packet: Control) {
        let Some(entry) = self.entries.get_mut(&who) else { return };
        if entry.waiting.is_full() {
            entry.waiting.remove(0);
        }
        entry.waiting.push(packet);
    }

    /// Processes a MAC address that a neighbour has announced, as described by `said`. An unknown neighbour is stored
    /// only if it is `wanted`. Returns the packets that have waited for the address.
    pub(crate) fn learn(
        &mut self,
        now: Time,
        who: NeighbourKey,
        mac: MacAddr,
        said: AdvertFlags,
    ) -> ArrayVec<Control, WAITING> {
        if !self.entries.contains_key(&who) {
            if !said.wanted {
                return ArrayVec::new();
            }
            self.make_room();
            let waiting = ArrayVec::new();
            let entry = Entry { mac, state: State::Stale, probes: 0, due: now + UNUSED, waiting };
            self.due.insert((entry.due, who));
            self.unused.insert((entry.due, who));
            self.entries.insert(who, entry);
        }
        let Some(entry) = self.entries.get_mut(&who) else { return ArrayVec::new() };
        let new = entry.state == State::Incomplete;
        let moved = !new && entry.mac != mac;
        // An unsolicited message does not change the MAC address of a reachable neighbour (RFC 4861, 7.2.5).
        if moved && !said.replaces {
            if entry.state == State::Reachable {
                self.enter(who, State::Stale, now + UNUSED);
            }
            return ArrayVec::new();
        }
        entry.mac = mac;
        let mut waiting = std::mem::take(&mut entry.waiting);
        for packet in &mut waiting {
            packet.bytes_mut()[..6].copy_from_slice(&mac.0);
        }
        if said.answer {
            self.enter(who, State::Reachable, now + REACHABLE);
        } else if new || moved {
            self.enter(who, State::Stale, now + UNUSED);
        }
        self.answered = self.answered.wrapping_add(u32::from(new));
        if moved {
            self.generation = self.generation.wrapping_add(1);
        }
        waiting
    }

    /// Confirms a neighbour after data sent to it has been acknowledged (RFC 4861, 7.3.1).
    pub(crate) fn confirm(&mut self, now: Time, who: NeighbourKey) {
        let Some(entry) = self.entries.get(&who) else { return };
        // Most acknowledgements come soon after the previous one and change nothing.
        let recent = entry.state == State::Reachable && entry.due > now + REACHABLE - RENEWED;
        if entry.state != State::Incomplete && !recent {
            self.enter(who, State::Reachable, now + REACHABLE);
        }
    }

    /// Performs up to `at_most` due actions. Calls `ask` for every solicitation and `gone` for every neighbour that
    /// does not answer.
    pub(crate) fn expire(
        &mut self,
        now: Time,
        at_most: usize,
        mut ask: impl FnMut(Ask),
        mut gone: impl FnMut(NeighbourKey),
    ) {
        for _ in 0..at_most {
            let Some(&(due, who)) = self.due.first().filter(|(due, _)| *due <= now) else { return };
            let Some(entry) = self.entries.get_mut(&who) else {
                self.due.remove(&(due, who));
                continue;
            };
            match entry.state {
                State::Reachable => self.enter(who, State::Stale, now + UNUSED),
                State::Stale => self.forget(who),
                State::Delay => {
                    ask(Ask { who, station: Some(entry.mac) });
                    entry.probes = 1;
                    self.enter(who, State::Probe, now + RETRANS);
                }
                State::Incomplete | State::Probe if entry.probes < PROBES => {
                    entry.probes += 1;
                    let station = (entry.state == State::Probe).then_some(entry.mac);
                    ask(Ask { who, station });
                    let state = entry.state;
                    self.enter(who, state, now + RETRANS);
                }
                State::Incomplete | State::Probe => {
                    self.forget(who);
                    gone(who);
                }
            }
        }
    }

    /// Returns the number of entries, including unresolved ones.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the time of the next action.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
    }

    fn enter(&mut self, who: NeighbourKey, state: State, due: Time) {
        let Some(entry) = self.entries.get_mut(&who) else { return };
        self.due.remove(&(entry.due, who));
        self.unused.remove(&(entry.due, who));
        self.due.insert((due, who));
        if state == State::Stale {
            self.unused.insert((due, who));
        }
        entry.state = state;
        entry.due = due;
    }

    fn forget(&mut self, who: NeighbourKey) {
        if let Some(entry) = self.entries.remove(&who) {
            self.due.remove(&(entry.due, who));
            self.unused.remove(&(entry.due, who));
            self.generation = self.generation.wrapping_add(1);
        }
    }

    fn make_room(&mut self) {
        if self.entries.len() >= self.limit
            && let Some(&(_, who)) = self.unused.first().or(self.due.first())
        {
            self.forget(who);
        }
    }
}

/// The properties of a neighbour's message, in addition to its address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdvertFlags {
    /// It answers a solicitation.
    pub answer: bool,
    /// It overrides a known address.
    pub replaces: bool,
    /// The neighbour will be sent a reply, so an entry is useful.
    pub wanted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: AdvertFlags = AdvertFlags { answer: true, replaces: true, wanted: false };
    const SECOND: Micros = Micros::from_secs(1);

    fn who(last: u8) -> NeighbourKey {
        (0, IpAddr::from([10, 0, 0, last]))
    }

    fn mac(last: u8) -> MacAddr {
        MacAddr([2, 0, 0, 0, 0, last])
    }

    #[test]
    fn solicitation_is_repeated_every_second() {
        let mut cache = Neighbours::new(16);
        let mut asked = 0;
        assert_eq!(cache.resolve(Time::ZERO, who(1), |_| asked += 1), None);
        assert_eq!(cache.resolve(Time::from_micros(10), who(1), |_| asked += 1), None);
        assert_eq!(asked, 1);
        let mut gone = Vec::new();
        for second in 1..=5 {
            cache.expire(Time::ZERO + second * SECOND, 8, |_| asked += 1, |who| gone.push(who));
        }
        assert_eq!((asked, gone), (3, vec![who(1)]), "three questions, then it is given up");
        assert_eq!(cache.deadline(), None);
    }

    #[test]
    fn unused_neighbour_is_evicted_first() {
        let mut cache = Neighbours::new(2);
        cache.resolve(Time::ZERO, who(1), |_| ());
        cache.learn(Time::ZERO, who(1), mac(1), ANSWER);
        // Announced by the neighbour itself. Its action is due much later than the first entry's, which is in use.
        cache.learn(Time::ZERO, who(2), mac(2), AdvertFlags { answer: false, replaces: true, wanted: true });
        cache.learn(Time::ZERO, who(3), mac(3), AdvertFlags { answer: false, replaces: true, wanted: true });
        assert_eq!(cache.resolve(Time::from_micros(1), who(1), |_| ()), Some(mac(1)));
        assert_eq!((cache.len(), cache.resolve(Time::from_micros(1), who(3), |_| ())), (2, Some(mac(3))));
    }

    #[test]
    fn packets_await_address_resolution() {
        let mut cache = Neighbours::new(16);
        cache.resolve(Time::ZERO, who(1), |_| ());
        for number in 0..5 {
            let packet = Control::new(0, |bytes| {
                bytes[14] = number;
                20
            });
            cache.wait(who(1), packet);
        }
        let sent = cache.learn(Time::from_micros(5), who(1), mac(7), ANSWER);
        assert_eq!(sent.iter().map(|packet| packet.bytes()[14]).collect::<Vec<_>>(), [2, 3, 4]);
        assert!(sent.iter().all(|packet| packet.bytes()[..6] == mac(7).0));
        assert_eq!(cache.resolve(Time::from_micros(6), who(1), |_| ()), Some(mac(7)));
    }

    #[test]
    fn stale_neighbour_is_used_and_probed() {
        let mut cache = Neighbours::new(16);
        cache.resolve(Time::ZERO, who(1), |_| ());
        cache.learn(Time::ZERO, who(1), mac(7), ANSWER);
        cache.expire(Time::from_secs(31), 8, |_| panic!("no neighbour is asked"), |_| ());
        assert_eq!(cache.resolve(Time::from_secs(32), who(1), |_| panic!("not yet")), Some(mac(7)));
        let mut asked = Vec::new();
        cache.expire(Time::from_secs(38), 8, |ask| asked.push(ask), |_| ());
        assert_eq!(asked, [Ask { who: who(1), station: Some(mac(7)) }]);
        cache.learn(Time::from_secs(38), who(1), mac(7), ANSWER);
        assert_eq!(cache.deadline(), Some(Time::from_secs(68)));
    }

    #[test]
    fn unsolicited_claim_changes_no_entry() {
        let mut cache = Neighbours::new(16);
        cache.resolve(Time::ZERO, who(1), |_| ());
        cache.learn(Time::ZERO, who(1), mac(7), ANSWER);
        let claim = AdvertFlags { answer: false, replaces: false, wanted: true };
        cache.learn(Time::from_micros(1), who(1), mac(8), claim);
        assert_eq!(cache.resolve(Time::from_micros(2), who(1), |_| ()), Some(mac(7)));
        cache.learn(Time::from_micros(3), who(2), mac(9), AdvertFlags { wanted: false, ..claim });
        assert_eq!(cache.resolve(Time::from_micros(4), who(2), |_| ()), None, "it had not been requested");
    }

    #[test]
    fn changed_mac_advances_generation() {
        let mut cache = Neighbours::new(16);
        cache.resolve(Time::ZERO, who(1), |_| ());
        cache.learn(Time::ZERO, who(1), mac(7), ANSWER);
        let before = cache.generation();
        cache.learn(Time::from_micros(1), who(1), mac(7), ANSWER);
        assert_eq!(cache.generation(), before);
        cache.learn(Time::from_micros(2), who(1), mac(8), ANSWER);
        assert_ne!(cache.generation(), before);
    }

    #[test]
    fn neighbour_cache_is_bounded() {
        let mut cache = Neighbours::new(4);
        for last in 0..100 {
            cache.resolve(Time::from_micros(last.into()), who(last), |_| ());
        }
        assert_eq!(cache.entries.len(), 4);
        assert_eq!(cache.due.len(), 4);
    }
}
