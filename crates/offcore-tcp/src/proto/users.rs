//! The users of a stack: their shares of the connections and of the time for packets.
//!
//! **Sending.** The users take turns. Each may do a limited amount of work per turn ([`TURN`]), regardless of its
//! number of connections and sockets.
//!
//! **Receiving.** A worker receives packets in the order in which they arrive. A user receives less only if its peers
//! send less. While a worker is busy with the packets of several users, each user with more than its share of the work
//! gets a limit. Its connections then extend their windows only as fast as the limit permits. Datagrams and connection
//! requests above the limit are dropped. The limit grows while the worker has idle time, and is removed when no other
//! user has packets. Advertised windows never shrink.
//!
//! **Shares.** Users that need less than an equal share leave the rest to the others. A user is assumed to need a
//! multiple of its present work ([`ASSUMED_GROWTH`]), because waiting for other users may have reduced that work. A
//! limited user keeps at least a quarter of the rate that it had without a limit, because the worker may be busy with
//! other work.
//!
//! Work is measured in bytes: the payload, plus a constant for each packet, segment and connection.

use std::collections::VecDeque;

use offcore_stats::time::{Micros, Time};

use super::addr::{ConnId, UserIndex};

/// Work in bytes: of a packet in addition to its payload, of each segment into which the port divides it, and of a new
/// connection.
const PACKET: u64 = 2048;
const SEGMENT: u64 = 256;
const CONNECTION: u64 = 16 << 10;
/// Work of a visit to a connection or socket, even if it has nothing to send.
pub(super) const VISIT: i64 = 64;
/// Maximum work of a user in its turn to send.
const TURN: u64 = 64 << 10;
/// Length of a period. The work of the users is compared once per period.
const PERIOD: Micros = Micros::from_millis(2);
/// Periods of at least this length are not evaluated: the worker slept, or was not scheduled.
const LONGEST_PERIOD: Micros = Micros::from_millis(16);
/// Packets keep a worker busy if it was idle for at most 1/`IDLE_PART` of a period, and spent at most 1/`CALLS_PART` of
/// it on calls of applications, which have their own turns.
const IDLE_PART: u64 = 16;
const CALLS_PART: u64 = 2;
/// A user competes to send for this time after its last packet.
const RECENTLY_SENDING: Micros = Micros::from_millis(20);
/// A user competes to receive for this time after its last packet: for longer than several retransmission timeouts,
/// because a user whose packets are lost is silent until then.
const RECENTLY_RECEIVING: Micros = Micros::from_secs(1);
/// The smallest limit in bytes of work per period. If the worker is busy with other work, a lower limit would not help.
const SMALLEST_LIMIT: u64 = 128 << 10;
/// A limit that grows to this value is removed.
const LARGEST_LIMIT: u64 = 32 << 20;
/// A user is assumed to need this multiple of its work in the last period, but at least 1/`ASSUMED_GROWTH` of an equal
/// share.
const ASSUMED_GROWTH: u64 = 4;
/// Users may exceed their share by 1/`TOLERATED_PART`. Otherwise the limits of equal users would alternate.
const TOLERATED_PART: u64 = 16;
/// A limit grows by 1/`GROWTH_PART` per period.
const GROWTH_PART: u64 = 8;
/// The smallest window that a connection of a limited user gets in its turn, in bytes.
pub(super) const CHUNK: u64 = 16 << 10;
/// A limited user keeps at least 1/`KEPT_RATE_PART` of the rate that it had without a limit.
const KEPT_RATE_PART: u64 = 4;
/// The rate that counts as unlimited falls by 1/`UNLIMITED_PART` per period while the user does not reach its limit.
const UNLIMITED_PART: u64 = 16;
/// A user keeps unused credit for up to 1/`CREDIT_PART` of a period.
const CREDIT_PART: u64 = 8;
/// A user reaches its limit if it leaves at most 1/`REACHED_PART` of it unused.
const REACHED_PART: u64 = 8;
/// Maximum charge for a byte of a window, in bytes of work.
const MAX_WORK_PER_BYTE: u64 = 32;

/// The remaining number of packets, and the remaining work, which is negative if the last packets exceeded it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    pub packets: usize,
    pub work: i64,
}

impl Budget {
    pub(super) fn is_empty(self) -> bool {
        self.packets == 0 || self.work <= 0
    }

    /// Returns the number of packets without payload that use up the work.
    #[inline]
    pub(super) fn packets_of_work(self) -> usize {
        self.work.max(0).cast_unsigned().div_ceil(PACKET) as usize
    }

    /// Subtracts the work of `packets` packets with `bytes` bytes of payload, which the port sends as `segments`
    /// segments.
    #[inline]
    pub(super) fn take_work(&mut self, bytes: u64, packets: usize, segments: u64) {
        self.work -= (bytes + PACKET * packets as u64 + SEGMENT * segments).cast_signed();
    }
}

/// A user's packets.
#[derive(Debug, Default)]
struct Traffic {
    /// Work in this period: of sent packets and new connections, and of received packets.
    sent: u64,
    received: u64,
    /// Payload and work of stream data received in this period, and the work per byte in the last period with
    /// such data. The latter is rounded up, so large packets are charged up to twice their work.
    streams: (u64, u64),
    work_per_byte: u64,
    /// End of the last period with work.
    active: Time,
    /// Excess work of past turns to send, which is subtracted from the next turns.
    debt: i64,
    /// The limit of received work per period.
    limit: Option<u64>,
    /// The received work per period when the user last had no limit, or did not reach it.
    unlimited_rate: u64,
    /// The work that may be received now: through extended windows, and as datagrams.
    credit: i64,
    datagram_credit: i64,
    /// Connections that wait to extend their windows.
    waiting: VecDeque<ConnId>,
}

#[derive(Debug)]
struct User {
    /// User ID. `None` for applications without one.
    id: Option<u32>,
    /// Number of its applications.
    apps: usize,
    /// Number of its connections, sockets and listeners.
    entries: usize,
    traffic: Traffic,
}

/// All users.
#[derive(Debug)]
pub(super) struct Users {
    list: Vec<User>,
    /// Maximum number of connections, sockets and listeners of all users.
    most: usize,
    /// Start of the period, and its idle time.
    began: Time,
    idle: Micros,
    /// Time of calls in this period.
    calls: Micros,
    /// Time of the last turn, and whether packets have been received or sent since then.
    last: Time,
    is_busy: bool,
    /// The user that sends first in the next turn.
    first: usize,
    /// The number of users that compete to send ([`RECENTLY_SENDING`]).
    sending: u64,
    /// Whether any user has a limit or waiting connections.
    has_limits: bool,
}

impl Users {
    pub(super) fn new(most: usize) -> Self {
        let list = Vec::new();
        let (began, last, idle, calls) = (Time::ZERO, Time::ZERO, Micros::ZERO, Micros::ZERO);
        Self { list, most, began, idle, calls, last, is_busy: false, first: 0, sending: 0, has_limits: false }
    }

    /// Adds an application of a user.
    pub(super) fn add_app(&mut self, id: Option<u32>) -> UserIndex {
        let known = self.list.iter().position(|user| user.id == id && user.apps > 0);
        let at = known.or_else(|| self.list.iter().position(|user| user.apps == 0));
        let at = at.unwrap_or_else(|| {
            self.list.push(User { id, apps: 0, entries: 0, traffic: Traffic::default() });
            self.list.len() - 1
        });
        let user = &mut self.list[at];
        if user.apps == 0 {
            *user = User { id, apps: 0, entries: 0, traffic: Traffic::default() };
        }
        user.apps += 1;
        UserIndex::at(at)
    }

    /// Removes an application. Its connections, sockets and listeners have ended.
    pub(super) fn remove_app(&mut self, user: UserIndex) {
        self.list[user.number()].apps -= 1;
    }

    /// Returns the ID of a user.
    pub(super) fn id(&self, user: UserIndex) -> Option<u32> {
        self.list[user.number()].id
    }

    /// Returns whether a user may have one more connection, socket or listener. If a share shrinks because there are
    /// more users, existing connections stay.
    pub(super) fn may_enter(&self, user: UserIndex) -> bool {
        let entries = self.list[user.number()].entries;
        let users = self.list.iter().filter(|user| user.entries > 0).count();
        entries < self.most / (users + usize::from(entries == 0))
    }

    /// Counts a new connection, socket or listener.
    pub(super) fn enter(&mut self, user: UserIndex) {
        let user = &mut self.list[user.number()];
        user.entries += 1;
        user.traffic.sent += CONNECTION;
    }

    /// Counts the end of a connection, socket or listener.
    pub(super) fn leave(&mut self, user: UserIndex) {
        self.list[user.number()].entries -= 1;
    }

    /// Returns the users in the order in which they send in this turn.
    pub(super) fn turns(&self) -> impl Iterator<Item = UserIndex> + use<> {
        let (first, count) = (self.first, self.list.len());
        (first..count).chain(0..first).map(UserIndex::at)
    }

    /// Begins a user's turn to send. Returns the work that it may do, at most `most`, or `None` if earlier turns have
    /// used it up.
    #[inline]
    pub(super) fn begin_sending(&mut self, user: UserIndex, most: i64) -> Option<i64> {
        if self.sending < 2 {
            return Some(most);
        }
        let traffic = &mut self.list[user.number()].traffic;
        let work = TURN.cast_signed() - traffic.debt;
        traffic.debt = (-work).max(0);
        (work > 0).then_some(work.min(most))
    }

    /// Ends a user's turn to send, and charges the user for `work` minus `rest`. If the user has sent a packet, the
    /// user after it sends first in the next turn, unless the turn was cut short because others had used up the
    /// packets.
    #[inline]
    pub(super) fn end_sending(
        &mut self,
        user: UserIndex,
        work: i64,
        rest: i64,
        has_sent: bool,
        is_cut: bool,
    ) {
        let traffic = &mut self.list[user.number()].traffic;
        traffic.sent += (work - rest).cast_unsigned();
        traffic.debt = (-rest).max(0);
        if has_sent {
            self.is_busy = true;
            let next = user.number() + usize::from(!is_cut);
            self.first = if next < self.list.len() { next } else { 0 };
        }
    }

    /// Charges a user for `packets` packets of a connection, which have extended its received data by `bytes`. Returns
    /// whether the windows of the user are limited.
    #[inline]
    pub(super) fn charge_received(&mut self, user: UserIndex, bytes: u64, packets: u32) -> bool {
        let traffic = &mut self.list[user.number()].traffic;
        let work = bytes + PACKET * u64::from(packets);
        traffic.received += work;
        if bytes > 0 {
            traffic.streams = (traffic.streams.0 + bytes, traffic.streams.1 + work);
        }
        traffic.limit.is_some()
    }

    /// Charges a user for a received datagram of `len` bytes. Returns `false` if the datagram exceeds the user's limit.
    pub(super) fn datagram_received(&mut self, user: UserIndex, len: usize) -> bool {
        let traffic = &mut self.list[user.number()].traffic;
        if traffic.limit.is_some() && traffic.datagram_credit <= 0 {
            traffic.received += SEGMENT;
            return false;
        }
        let work = len as u64 + PACKET;
        traffic.received += work;
        traffic.datagram_credit -= work.cast_signed();
        true
    }

    /// Charges a user for a peer's connection request. Returns `false` if it exceeds the user's limit.
    pub(super) fn connection_requested(&mut self, user: UserIndex) -> bool {
        let traffic = &mut self.list[user.number()].traffic;
        let is_allowed = traffic.limit.is_none() || traffic.datagram_credit > 0;
        if is_allowed {
            traffic.datagram_credit -= CONNECTION.cast_signed();
        }
        is_allowed
    }

    /// Returns whether a connection may extend its window now.
    pub(super) fn may_extend(&self, user: UserIndex) -> bool {
        let traffic = &self.list[user.number()].traffic;
        traffic.credit > 0 && traffic.waiting.is_empty()
    }

    /// Adds a connection that waits to extend its window.
    pub(super) fn wait(&mut self, user: UserIndex, id: ConnId) {
        self.list[user.number()].traffic.waiting.push_back(id);
    }

    /// Charges a user for the extension of a window by `bytes`.
    pub(super) fn charge_window(&mut self, user: UserIndex, bytes: u64) {
        let traffic = &mut self.list[user.number()].traffic;
        traffic.credit -= (bytes * traffic.work_per_byte.clamp(1, MAX_WORK_PER_BYTE)).cast_signed();
    }

    /// Returns whether any user has a limit or waiting connections.
    pub(super) fn has_limits(&self) -> bool {
        self.has_limits
    }

    /// Removes and returns the connection of a user that has waited longest to extend its window, unless the user has
    /// no credit.
    pub(super) fn next_waiting(&mut self, user: UserIndex) -> Option<ConnId> {
        let traffic = &mut self.list[user.number()].traffic;
        if traffic.limit.is_some() && traffic.credit <= 0 {
            return None;
        }
        traffic.waiting.pop_front()
    }

    /// Returns the time of the next check of waiting connections.
    pub(super) fn deadline(&self) -> Option<Time> {
        let waits = self.has_limits && self.list.iter().any(|user| !user.traffic.waiting.is_empty());
        waits.then_some(self.last + PERIOD / CREDIT_PART)
    }

    /// Records time that the worker has spent on calls of applications.
    #[inline]
    pub(super) fn record_calls(&mut self, time: Micros) {
        self.calls += time;
    }

    /// Records that the worker was busy until `now`, so that this time does not count as idle.
    #[inline]
    pub(super) fn mark_busy(&mut self, now: Time) {
        self.advance(now);
        self.is_busy = true;
    }

    /// Returns whether the windows of a user are limited.
    pub(super) fn is_limited(&self, user: UserIndex) -> bool {
        self.list[user.number()].traffic.limit.is_some()
    }

    /// Begins a turn.
    #[inline]
    pub(super) fn begin_turn(&mut self, now: Time) {
        self.advance(now);
        if now.saturating_since(self.began) >= PERIOD {
            self.end_period(now);
        }
    }

    /// Adds idle time and credit for the time since the last turn. A turn may consist of several calls with the same
    /// time.
    #[inline]
    fn advance(&mut self, now: Time) {
        let passed = now.saturating_since(self.last);
        if passed == Micros::ZERO {
            return;
        }
        self.last = now;
        if !std::mem::take(&mut self.is_busy) {
            self.idle += passed;
        }
        if self.has_limits {
            self.list.iter_mut().for_each(|user| user.traffic.add_credit(passed));
        }
    }

    #[cold]
    fn end_period(&mut self, now: Time) {
        let passed = now - self.began;
        // A period in which the worker slept or was not scheduled is not evaluated.
        let has_calls = self.calls > passed / CALLS_PART;
        let is_saturated = self.idle <= passed / IDLE_PART && !has_calls && passed < LONGEST_PERIOD;
        (self.began, self.idle, self.calls) = (now, Micros::ZERO, Micros::ZERO);
        let (mut total, mut sending, mut competing) = (0, 0, 0);
        for traffic in self.list.iter_mut().map(|user| &mut user.traffic) {
            if traffic.work() > 0 {
                traffic.active = now;
            }
            total += traffic.work();
            sending += u64::from(traffic.is_active(now, RECENTLY_SENDING));
            competing += u64::from(traffic.is_active(now, RECENTLY_RECEIVING));
        }
        self.sending = sending;
        let share = (is_saturated && competing > 1).then(|| self.share(now, total, competing));
        self.has_limits = false;
        for traffic in self.list.iter_mut().map(|user| &mut user.traffic) {
            traffic.end_period(share, competing, passed);
            self.has_limits |= traffic.limit.is_some() || !traffic.waiting.is_empty();
        }
    }

    /// Divides `total` work by max-min fairness. Returns the share of each user that needs more than its share.
    fn share(&self, now: Time, total: u64, competing: u64) -> u64 {
        let least = total / (ASSUMED_GROWTH * competing);
        let users = || {
            let all = self.list.iter().map(|user| &user.traffic);
            all.filter(|traffic| traffic.is_active(now, RECENTLY_RECEIVING))
        };
        let wishes = || users().map(|traffic| least.max(ASSUMED_GROWTH * traffic.work()));
        let mut share = total / competing;
        loop {
            let (left, wanting) = wishes().fold((total, 0), |(left, wanting), wish| match wish <= share {
                true => (left.saturating_sub(wish), wanting),
                false => (left, wanting + 1),
            });
            // Each step satisfies at least one more user.
            match left.checked_div(wanting) {
                Some(larger) if larger > share => share = larger,
                _ => return share,
            }
        }
    }
}

impl Traffic {
    /// Returns the work of this period.
    fn work(&self) -> u64 {
        self.sent + self.received
    }

    /// Returns whether the user has had a packet within the last `time`.
    fn is_active(&self, now: Time, time: Micros) -> bool {
        self.active > Time::ZERO && now - self.active < time
    }

    /// Adds the credit for the time `passed`.
    fn add_credit(&mut self, passed: Micros) {
        let Some(limit) = self.limit else { return };
        let new = limit * passed.min(PERIOD).get() / PERIOD.get();
        let most = new.max(limit / CREDIT_PART).max(CHUNK).cast_signed();
        // Windows and datagrams get half of the credit each. Each may also use what the other leaves.
        let half = (new / 2).cast_signed();
        let [windows, datagrams] = [self.credit, self.datagram_credit].map(|credit| credit + half);
        let [unused, unused_datagrams] = [windows, datagrams].map(|credit| (credit - most).max(0));
        self.credit = (windows + unused_datagrams).min(most);
        self.datagram_credit = (datagrams + unused).min(most);
    }

    /// Adapts the limit at the end of a period of length `passed`. `share` is the user's share of the work if the
    /// worker was busy and users compete.
    fn end_period(&mut self, share: Option<u64>, competing: u64, passed: Micros) {
        let Self { sent, received, streams: (bytes, work), .. } = *self;
        self.work_per_byte = work.div_ceil(bytes.max(1)).max(if bytes > 0 { 1 } else { self.work_per_byte });
        let rate = received * PERIOD.get() / passed.max(PERIOD).get();
        match share {
            // A user that uses its share for sending may still receive half a share, so that it gets acknowledgements
            // and requests.
            Some(share) if sent + received > share + share / TOLERATED_PART && received > share / 2 => {
                let limit = self.limit.unwrap_or_else(|| {
                    (self.credit, self.datagram_credit, self.unlimited_rate) = (0, 0, rate);
                    u64::MAX
                });
                if rate < limit - limit / REACHED_PART {
                    self.unlimited_rate =
                        rate.max(self.unlimited_rate - self.unlimited_rate / UNLIMITED_PART);
                }
                let fair =
                    share.saturating_sub(sent).max(share / 2) * PERIOD.get() / passed.max(PERIOD).get();
                let least = (self.unlimited_rate / KEPT_RATE_PART).max(SMALLEST_LIMIT);
                self.limit = Some(fair.max(least));
            }
            _ if competing < 2 || passed >= LONGEST_PERIOD => self.limit = None,
            _ => {
                let steps = (passed.get() / PERIOD.get()).max(1);
                let grown = self.limit.map(|limit| limit + steps * (limit / GROWTH_PART));
                self.limit = grown.filter(|limit| *limit < LARGEST_LIMIT);
            }
        }
        (self.sent, self.received, self.streams) = (0, 0, (0, 0));
    }
}
