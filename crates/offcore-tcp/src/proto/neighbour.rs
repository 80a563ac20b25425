//! Who has which station address on a link: ARP's and neighbour discovery's cache (RFC 826; RFC 4861, 7.3).

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use arrayvec::ArrayVec;
use offcore_wire::MacAddr;

use super::packet::Control;

/// How long an answer is believed without another sign of life: RFC 4861's REACHABLE_TIME.
const REACHABLE: u64 = 30_000_000;
/// Minimum time in microseconds between two confirmations that are stored.
const RENEWED: u64 = 1_000_000;
/// How long a packet to a stale neighbour may bring a sign of life before it is asked: DELAY_FIRST_PROBE_TIME.
const DELAY: u64 = 5_000_000;
/// Time between two questions: RETRANS_TIMER.
const RETRANS: u64 = 1_000_000;
/// Questions until a neighbour is given up: MAX_MULTICAST_SOLICIT and MAX_UNICAST_SOLICIT.
const PROBES: u8 = 3;
/// How long an entry that nobody uses is kept.
const UNUSED: u64 = 600_000_000;
/// Packets that wait for an answer, of each neighbour.
const WAITING: usize = 3;

/// A neighbour: the interface and its address there.
pub(crate) type Who = (u8, IpAddr);

/// A question to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ask {
    pub who: Who,
    /// The station that is asked, when it only has to confirm; otherwise all are.
    pub station: Option<MacAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Asked; no answer yet.
    Incomplete,
    Reachable,
    /// It was reachable; nothing has been sent to it since that was long ago.
    Stale,
    /// Used while stale.
    Delay,
    /// Asked whether it is still there.
    Probe,
}

#[derive(Debug)]
struct Entry {
    mac: MacAddr,
    state: State,
    probes: u8,
    /// When something is to be done, in the set `due` too.
    due: u64,
    waiting: ArrayVec<Control, WAITING>,
}

/// The cache. It grows with the neighbours that there are, up to a limit; then the one gives way that was not used for the
/// longest time, or that is next due for something where all are used.
#[derive(Debug)]
pub(crate) struct Neighbours {
    entries: HashMap<Who, Entry>,
    due: BTreeSet<(u64, Who)>,
    /// Those of them that nobody uses: they give way first.
    unused: BTreeSet<(u64, Who)>,
    limit: usize,
    /// Changes when a station address changes or goes: who has kept one asks again.
    generation: u32,
    answered: u32,
}

impl Neighbours {
    pub(crate) fn new(limit: usize) -> Self {
        let (due, unused) = Default::default();
        Self { entries: HashMap::new(), due, unused, limit, generation: 0, answered: 0 }
    }

    /// How many neighbours have become known that were asked for.
    pub(crate) fn answered(&self) -> u32 {
        self.answered
    }

    /// A number that changes when a neighbour answers, moves, or is given up.
    pub(crate) fn seen(&self) -> (u32, u32) {
        (self.answered, self.generation)
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Has connections look their neighbours up again before they send.
    pub(crate) fn renew(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// The station address of a neighbour; when it is not known, or has to be confirmed, `ask` is called.
    pub(crate) fn resolve(&mut self, now: u64, who: Who, ask: impl FnOnce(Ask)) -> Option<MacAddr> {
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

    /// Keeps a packet until the neighbour answers. The oldest of too many is dropped (RFC 4861, 7.2.2).
    pub(crate) fn wait(&mut self, who: Who, packet: Control) {
        let Some(entry) = self.entries.get_mut(&who) else { return };
        if entry.waiting.is_full() {
            entry.waiting.remove(0);
        }
        entry.waiting.push(packet);
    }

    /// A neighbour has said which station it is. `answer` says that it was asked, `replaces` that what was known before is
    /// wrong. One that nobody has asked about is only noted when `wanted`. Returns the packets that have waited.
    pub(crate) fn learn(
        &mut self,
        now: u64,
        who: Who,
        mac: MacAddr,
        said: Said,
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
        // Who is reachable at one station is not moved to another by what nobody asked for (RFC 4861, 7.2.5).
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

    /// What was sent to the neighbour has been acknowledged (RFC 4861, 7.3.1).
    pub(crate) fn confirm(&mut self, now: u64, who: Who) {
        let Some(entry) = self.entries.get(&who) else { return };
        // Most acknowledgements come soon after the last one, and change nothing.
        let recent = entry.state == State::Reachable && entry.due > now + REACHABLE - RENEWED;
        if entry.state != State::Incomplete && !recent {
            self.enter(who, State::Reachable, now + REACHABLE);
        }
    }

    /// Does what is due, `at_most` times; `ask` is called for every question, `gone` for every neighbour that does not
    /// answer.
    pub(crate) fn expire(
        &mut self,
        now: u64,
        at_most: usize,
        mut ask: impl FnMut(Ask),
        mut gone: impl FnMut(Who),
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

    /// How many are known, or asked for.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// When something is due next.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.due.first().map(|(due, _)| *due)
    }

    fn enter(&mut self, who: Who, state: State, due: u64) {
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

    fn forget(&mut self, who: Who) {
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

/// What a neighbour's message says beside its address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Said {
    /// It answers a question.
    pub answer: bool,
    /// It holds even against what is known.
    pub replaces: bool,
    /// The neighbour is going to be answered, so it is worth knowing.
    pub wanted: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: Said = Said { answer: true, replaces: true, wanted: false };
    const SECOND: u64 = 1_000_000;

    fn who(last: u8) -> Who {
        (0, IpAddr::from([10, 0, 0, last]))
    }

    fn mac(last: u8) -> MacAddr {
        MacAddr([2, 0, 0, 0, 0, last])
    }

    #[test]
    fn asks_once_and_then_every_second() {
        let mut cache = Neighbours::new(16);
        let mut asked = 0;
        assert_eq!(cache.resolve(0, who(1), |_| asked += 1), None);
        assert_eq!(cache.resolve(10, who(1), |_| asked += 1), None);
        assert_eq!(asked, 1);
        let mut gone = Vec::new();
        for second in 1..=5 {
            cache.expire(second * SECOND, 8, |_| asked += 1, |who| gone.push(who));
        }
        assert_eq!((asked, gone), (3, vec![who(1)]), "three questions, then it is given up");
        assert_eq!(cache.deadline(), None);
    }

    #[test]
    fn who_is_not_used_gives_way_first() {
        let mut cache = Neighbours::new(2);
        cache.resolve(0, who(1), |_| ());
        cache.learn(0, who(1), mac(1), ANSWER);
        // It says so itself, and is due much later than the first one, which is used.
        cache.learn(0, who(2), mac(2), Said { answer: false, replaces: true, wanted: true });
        cache.learn(0, who(3), mac(3), Said { answer: false, replaces: true, wanted: true });
        assert_eq!(cache.resolve(1, who(1), |_| ()), Some(mac(1)));
        assert_eq!((cache.len(), cache.resolve(1, who(3), |_| ())), (2, Some(mac(3))));
    }

    #[test]
    fn packets_wait_for_the_answer() {
        let mut cache = Neighbours::new(16);
        cache.resolve(0, who(1), |_| ());
        for number in 0..5 {
            let packet = Control::new(0, |bytes| {
                bytes[14] = number;
                20
            });
            cache.wait(who(1), packet);
        }
        let sent = cache.learn(5, who(1), mac(7), ANSWER);
        assert_eq!(sent.iter().map(|packet| packet.bytes()[14]).collect::<Vec<_>>(), [2, 3, 4]);
        assert!(sent.iter().all(|packet| packet.bytes()[..6] == mac(7).0));
        assert_eq!(cache.resolve(6, who(1), |_| ()), Some(mac(7)));
    }

    #[test]
    fn a_stale_neighbour_is_used_and_asked() {
        let mut cache = Neighbours::new(16);
        cache.resolve(0, who(1), |_| ());
        cache.learn(0, who(1), mac(7), ANSWER);
        cache.expire(31 * SECOND, 8, |_| panic!("nobody is asked"), |_| ());
        assert_eq!(cache.resolve(32 * SECOND, who(1), |_| panic!("not yet")), Some(mac(7)));
        let mut asked = Vec::new();
        cache.expire(38 * SECOND, 8, |ask| asked.push(ask), |_| ());
        assert_eq!(asked, [Ask { who: who(1), station: Some(mac(7)) }]);
        cache.learn(38 * SECOND, who(1), mac(7), ANSWER);
        assert_eq!(cache.deadline(), Some(68 * SECOND));
    }

    #[test]
    fn unasked_claims_do_not_move_it() {
        let mut cache = Neighbours::new(16);
        cache.resolve(0, who(1), |_| ());
        cache.learn(0, who(1), mac(7), ANSWER);
        let claim = Said { answer: false, replaces: false, wanted: true };
        cache.learn(1, who(1), mac(8), claim);
        assert_eq!(cache.resolve(2, who(1), |_| ()), Some(mac(7)));
        cache.learn(3, who(2), mac(9), Said { wanted: false, ..claim });
        assert_eq!(cache.resolve(4, who(2), |_| ()), None, "nobody had asked for it");
    }

    #[test]
    fn moves_change_the_generation() {
        let mut cache = Neighbours::new(16);
        cache.resolve(0, who(1), |_| ());
        cache.learn(0, who(1), mac(7), ANSWER);
        let before = cache.generation();
        cache.learn(1, who(1), mac(7), ANSWER);
        assert_eq!(cache.generation(), before);
        cache.learn(2, who(1), mac(8), ANSWER);
        assert_ne!(cache.generation(), before);
    }

    #[test]
    fn the_cache_has_a_limit() {
        let mut cache = Neighbours::new(4);
        for last in 0..100 {
            cache.resolve(u64::from(last), who(last), |_| ());
        }
        assert_eq!(cache.entries.len(), 4);
        assert_eq!(cache.due.len(), 4);
    }
}
