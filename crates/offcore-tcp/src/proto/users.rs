//! The users of a stack: their shares of connections, and of the time for packets.
//!
//! **Sending.** The users take turns. Each gets a limited amount of work per turn ([`TURN`]), however many connections
//! and sockets it has.
//!
//! **Receiving.** A worker receives packets in the order in which they arrive. A user receives less only if its peers
//! send less. If a worker is busy and a user has more than its share of the work, while other users have packets, the
//! user's rate is limited. Its connections then extend their windows only as fast as the rate permits, and datagrams
//! above the rate are dropped. The limit grows while the worker has idle time, and is removed when other users have no
//! packets. Advertised windows never shrink.
//!
//! **Shares.** Users that want little leave the rest to the others: a user is assumed to want a multiple of its present
//! work ([`WISH`]), because it may have less only since it waits for others. A limited user keeps at least a quarter of
//! the rate that it had without a limit, because the worker may be busy with something else.
//!
//! Work is measured in bytes: the payload, plus a constant for each packet, segment and connection.

use std::collections::VecDeque;

use super::addr::{ConnId, UserIndex};

/// Work of a packet in addition to its payload, of each segment that it is sent as, and of a new connection, in bytes.
const PACKET: u64 = 2048;
const SEGMENT: u64 = 256;
const CONNECTION: u64 = 16 << 10;
/// Maximum work of a user in its turn to send.
const TURN: u64 = 64 << 10;
/// Microseconds in which work is compared.
const PERIOD: u64 = 2_000;
/// Longer periods are not evaluated.
const LONGEST: u64 = 8 * PERIOD;
/// A worker is busy if at most one part in this many of a period was idle.
const IDLE_PART: u64 = 16;
/// A user competes with the others for this time after its last packet, in microseconds.
const RECENT: u64 = 20_000;
/// The smallest limit in bytes of work per period. If the worker is busy with other work, lower limits would not help.
const SMALLEST: u64 = 128 << 10;
/// A limit is removed when it exceeds this.
const LARGEST: u64 = 32 << 20;
/// A user wants at most this multiple of its work in the last period, but not less than one part in this many of an
/// equal share.
const WISH: u64 = 4;
/// Users may exceed their share by one part in this many. Otherwise the limits of equal users would alternate.
const TOLERATED_PART: u64 = 16;
/// A limit grows by one part in this many per period.
const GROWTH_PART: u64 = 8;
/// The smallest window that a connection of a limited user gets in its turn, in bytes.
pub(super) const CHUNK: u64 = 16 << 10;
/// A limited user keeps at least one part in this many of its rate.
const KEPT_RATE_PART: u64 = 4;
/// Unused rate is kept for one part in this many of a period.
const KEPT_PART: u64 = 8;
/// Maximum work per byte of a stream that an extension of a window is charged.
const HIGHEST_PRICE: u64 = 32;

/// The remaining number of packets and the remaining work, which is negative after work that exceeds it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    pub packets: usize,
    pub work: i64,
}

impl Budget {
    pub(super) fn is_empty(self) -> bool {
        self.packets == 0 || self.work <= 0
    }

    /// Takes the work of `packets` packets with `bytes` of payload that the port sends as `segments` segments.
    #[inline]
    pub(super) fn take_work(&mut self, bytes: u64, packets: usize, segments: u64) {
        self.work -= (bytes + PACKET * packets as u64 + SEGMENT * segments).cast_signed();
    }
}

/// A user's packets.
#[derive(Debug, Default)]
struct Traffic {
    /// Work of sent packets and new connections in this period, and of received packets.
    sent: u64,
    received: u64,
    /// Payload and work of received data of streams in this period, and the work per byte in the last such period.
    streams: (u64, u64),
    price: u64,
    /// End of the last period with work.
    active: u64,
    /// Excess work of the last turns to send.
    debt: i64,
    /// The limit of received work per period.
    limit: Option<u64>,
    /// The work that was received in a period before the limit was set, or while it was not reached.
    unlimited: u64,
    /// The work that may be received now: by extended windows, and by datagrams.
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
    /// Begin of the period, and its idle time.
    began: u64,
    idle: u64,
    /// Time of the last turn, and whether packets were received or sent since.
    last: u64,
    is_busy: bool,
    /// The user that sends first in the next turn.
    first: usize,
    /// The number of users with packets in the last periods.
    competing: u64,
    /// A user has a limit, or its connections wait.
    has_limits: bool,
}

impl Users {
    pub(super) fn new(most: usize) -> Self {
        let list = Vec::new();
        let (began, idle, last, first, competing) = (0, 0, 0, 0, 0);
        Self { list, most, began, idle, last, is_busy: false, first, competing, has_limits: false }
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
    pub(super) fn turns(&mut self) -> impl Iterator<Item = UserIndex> + use<> {
        let (first, count) = (self.first, self.list.len());
        (first..count).chain(0..first).map(UserIndex::at)
    }

    /// Begins the turn of a user to send. Returns its work, or `None` if earlier turns have used it up.
    #[inline]
    pub(super) fn begin_sending(&mut self, user: UserIndex, most: i64) -> Option<i64> {
        if self.competing < 2 {
            return Some(most);
        }
        let traffic = &mut self.list[user.number()].traffic;
        let work = TURN.cast_signed() - traffic.debt;
        traffic.debt = (-work).max(0);
        (work > 0).then_some(work.min(most))
    }

    /// Charges a user for its turn to send, in which `work` of `budget` was used. If it has sent a packet, the user
    /// after it sends first in the next turn.
    #[inline]
    pub(super) fn end_sending(&mut self, user: UserIndex, work: i64, rest: i64, has_sent: bool) {
        let traffic = &mut self.list[user.number()].traffic;
        traffic.sent += (work - rest).cast_unsigned();
        traffic.debt = (-rest).max(0);
        if has_sent {
            self.is_busy = true;
            self.first = if user.number() + 1 < self.list.len() { user.number() + 1 } else { 0 };
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

    /// Charges a user for a received datagram of `len` bytes. Returns `false` if it exceeds the user's limit.
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
        traffic.credit -= (bytes * traffic.price.clamp(1, HIGHEST_PRICE)).cast_signed();
    }

    /// Returns whether a user has a limit, or its connections wait.
    pub(super) fn has_limits(&self) -> bool {
        self.has_limits
    }

    /// Removes and returns the connection of a user that waits longest to extend its window, if it may do that now.
    pub(super) fn next_waiting(&mut self, user: UserIndex) -> Option<ConnId> {
        let traffic = &mut self.list[user.number()].traffic;
        if traffic.limit.is_some() && traffic.credit <= 0 {
            return None;
        }
        traffic.waiting.pop_front()
    }

    /// Returns when waiting connections are checked again.
    pub(super) fn deadline(&self) -> Option<u64> {
        let waits = self.has_limits && self.list.iter().any(|user| !user.traffic.waiting.is_empty());
        waits.then_some(self.last + PERIOD / KEPT_PART)
    }

    /// Records work at time `now`.
    #[inline]
    pub(super) fn set_busy(&mut self, now: u64) {
        self.advance(now);
        self.is_busy = true;
    }

    /// Returns whether the windows of a user are limited.
    pub(super) fn is_limited(&self, user: UserIndex) -> bool {
        self.list[user.number()].traffic.limit.is_some()
    }

    /// Begins a turn.
    #[inline]
    pub(super) fn begin_turn(&mut self, now: u64) {
        self.advance(now);
        if now.saturating_sub(self.began) >= PERIOD {
            self.end_period(now);
        }
    }

    /// Counts the time since the last turn. A turn may consist of several calls with the same time.
    #[inline]
    fn advance(&mut self, now: u64) {
        let passed = now.saturating_sub(self.last);
        if passed == 0 {
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
    fn end_period(&mut self, now: u64) {
        let passed = now - self.began;
        // A worker that was not scheduled has no measured period.
        let is_saturated = self.idle <= passed / IDLE_PART && passed < LONGEST;
        (self.began, self.idle) = (now, 0);
        let (mut total, mut competing) = (0, 0);
        for traffic in self.list.iter_mut().map(|user| &mut user.traffic) {
            if traffic.work() > 0 {
                traffic.active = now;
            }
            total += traffic.work();
            competing += u64::from(traffic.competes(now));
        }
        self.competing = competing;
        let share = (is_saturated && competing > 1).then(|| self.share(now, total));
        self.has_limits = false;
        for traffic in self.list.iter_mut().map(|user| &mut user.traffic) {
            traffic.end_period(share, competing, passed);
            self.has_limits |= traffic.limit.is_some() || !traffic.waiting.is_empty();
        }
    }

    /// Returns the share of users that want more than it, of `total` work (max-min fairness).
    fn share(&self, now: u64, total: u64) -> u64 {
        let least = total / (WISH * self.competing);
        let users = || self.list.iter().map(|user| &user.traffic).filter(|traffic| traffic.competes(now));
        let wishes = || users().map(|traffic| least.max(WISH * traffic.work()));
        let mut share = total / self.competing;
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

    fn competes(&self, now: u64) -> bool {
        self.active > 0 && now - self.active < RECENT
    }

    /// Adds the credit for `passed` microseconds.
    fn add_credit(&mut self, passed: u64) {
        let Some(limit) = self.limit else { return };
        let new = limit * passed.min(PERIOD) / PERIOD;
        let most = new.max(limit / KEPT_PART).max(CHUNK).cast_signed();
        // Half of it is for datagrams, half for windows, and what either does not use is for the other.
        let half = (new / 2).cast_signed();
        let [windows, datagrams] = [self.credit, self.datagram_credit].map(|credit| credit + half);
        let [unused, unused_datagrams] = [windows, datagrams].map(|credit| (credit - most).max(0));
        self.credit = (windows + unused_datagrams).min(most);
        self.datagram_credit = (datagrams + unused).min(most);
    }

    /// Adapts the limit at the end of a period that lasted `passed` microseconds. `share` is the share of a busy worker's
    /// work if users compete.
    fn end_period(&mut self, share: Option<u64>, competing: u64, passed: u64) {
        let Self { sent, received, streams: (bytes, work), .. } = *self;
        self.price = work.div_ceil(bytes.max(1)).max(if bytes > 0 { 1 } else { self.price });
        let rate = received * PERIOD / passed.max(PERIOD);
        match share {
            // A user that sends its share may still receive half of it, so that it gets acknowledgements and requests.
            Some(share) if sent + received > share + share / TOLERATED_PART && received > share / 2 => {
                let limit = self.limit.unwrap_or_else(|| {
                    (self.credit, self.datagram_credit) = (0, 0);
                    u64::MAX
                });
                if rate < limit - limit / KEPT_PART {
                    self.unlimited = rate;
                }
                let fair = share.saturating_sub(sent).max(share / 2) * PERIOD / passed.max(PERIOD);
                let least = (self.unlimited / KEPT_RATE_PART).max(SMALLEST);
                self.limit = Some(fair.max(least));
            }
            _ if competing < 2 || passed >= LONGEST => self.limit = None,
            _ => {
                let steps = (passed / PERIOD).max(1);
                let grown = self.limit.map(|limit| limit + steps * (limit / GROWTH_PART));
                self.limit = grown.filter(|limit| *limit < LARGEST);
            }
        }
        (self.sent, self.received, self.streams) = (0, 0, (0, 0));
    }
}
