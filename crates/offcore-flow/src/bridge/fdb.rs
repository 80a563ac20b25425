//! The forwarding database: behind which port a station was seen last.
//!
//! All workers share one, without locks. An entry is one 64-bit word, so that whoever reads it gets a whole one:
//!
//! ```text
//! | valid 1 | seen 7 | port 6 | rest of the station 50 |
//! ```
//! A station is a VLAN (12 bits) and an address (48 bits). Its 60 bits are mixed by a function that can be undone; some
//! of the result are the number of its bucket, eight entries on one cache line, and the others are in the entry. So an
//! entry never stands for another station than the one that it was made of, whatever two workers do at the same time:
//! the worst of that is an entry that was overwritten, and then packets are flooded, in the station's VLAN, until it is
//! learned again; or one too many, and then packets of a station that has moved may go to its old port, until the older
//! entry is swept. That a packet leaves its VLAN is impossible in any case: ports that are no members
//! of it are never sent to, whatever the database says.
//!
//! The mixture begins with a random number, so that nobody can choose addresses that share a bucket.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use offcore_wire::MacAddr;

/// Ports that a database tells apart.
pub const MAX_PORTS: usize = 64;
/// Ticks of the clock in the time after which a station is forgotten.
const AGE: u64 = 32;
/// Ticks in which every bucket is swept once. With [`AGE`] well below the 128 that an entry tells apart.
const SWEEP: u64 = 8;
/// Entries of a bucket.
const WAYS: usize = 8;
/// Entries for each address that there shall be room for: so few buckets are full before the database is.
const SPARE: usize = 4;
/// Bits of a station.
const STATION: u32 = 60;
const STATION_MASK: u64 = (1 << STATION) - 1;
/// Bits of it in an entry.
const REST: u32 = 50;
const REST_MASK: u64 = (1 << REST) - 1;
const PORT: u32 = REST;
const PORT_MASK: u64 = 0x3f;
const SEEN: u32 = 56;
const SEEN_MASK: u64 = 0x7f;
const VALID: u64 = 1 << 63;
/// How often a worker looks again when another one was faster; then it leaves the station for its next packet.
const TRIES: usize = 4;

/// A station of a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Station(u64);

impl Station {
    /// The station with this address in this VLAN, 0 to 4095.
    #[inline]
    pub fn new(vlan: u16, mac: MacAddr) -> Self {
        let [a, b, c, d, e, f] = mac.0;
        Self(u64::from(vlan & 0xfff) << 48 | u64::from_be_bytes([0, 0, a, b, c, d, e, f]))
    }
}

/// What came of learning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// It was known.
    Known,
    /// It is new.
    New,
    /// It was behind another port.
    Moved,
    /// There is no room for it, or its port has its part.
    Full,
}

#[repr(align(64))]
#[derive(Debug, Default)]
struct Bucket([AtomicU64; WAYS]);

/// The database.
#[derive(Debug)]
pub struct Fdb {
    buckets: Box<[Bucket]>,
    /// Bits of a mixed station that are its bucket.
    bits: u32,
    seed: u64,
    /// Addresses of one port that nobody else can take from it, and of all ports beyond theirs.
    own: usize,
    common: usize,
    /// Addresses of each port, and how many of them are beyond its own.
    counts: [AtomicUsize; MAX_PORTS],
    beyond: AtomicUsize,
    /// Time in 1/[`AGE`] of the time after which a station is forgotten.
    now: AtomicU64,
    /// Stations forgotten, by port.
    aged: [AtomicU64; MAX_PORTS],
}

impl Fdb {
    /// One with room for `limit` addresses. Of half of it each of `ports` ports, 1 to [`MAX_PORTS`], has its part, however many
    /// addresses another one comes with; the other half is for all.
    pub fn new(limit: usize, ports: usize) -> Self {
        let own = limit / (2 * ports);
        // At least what the rest of a station leaves to the bucket's number.
        let buckets = (limit * SPARE / WAYS).next_power_of_two().max(1 << (STATION - REST));
        Self {
            bits: buckets.trailing_zeros(),
            buckets: (0..buckets).map(|_| Bucket::default()).collect(),
            seed: RandomState::new().hash_one("stations") & STATION_MASK,
            own,
            common: limit - own * ports,
            counts: [const { AtomicUsize::new(0) }; MAX_PORTS],
            beyond: AtomicUsize::new(0),
            now: AtomicU64::new(0),
            aged: [const { AtomicU64::new(0) }; MAX_PORTS],
        }
    }

    /// The time, for a burst's [`learn`](Self::learn) and [`find`](Self::find).
    #[inline]
    pub fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// Addresses at present, those included that are to be forgotten and have not been swept yet.
    pub fn addresses(&self) -> usize {
        self.counts.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Stations behind `port` that were forgotten so far.
    pub fn aged(&self, port: usize) -> u64 {
        self.aged[port].load(Relaxed)
    }

    /// The port, below [`MAX_PORTS`], that the station was seen behind.
    #[inline]
    pub fn find(&self, station: Station, now: u64) -> Option<usize> {
        let (bucket, rest) = self.place(station);
        let of = |entry: &AtomicU64| Some(entry.load(Relaxed)).filter(|&entry| is_of(entry, rest));
        // With two entries, which two workers may have made at the same time, the first that is not too old.
        bucket.0.iter().filter_map(of).find(|&entry| !is_old(entry, now)).map(port_of)
    }

    /// Notes that the station was seen behind `port`, which is below [`MAX_PORTS`].
    #[inline]
    pub fn learn(&self, station: Station, port: usize, now: u64) -> Learned {
        let (bucket, rest) = self.place(station);
        let fresh = VALID | (now & SEEN_MASK) << SEEN | (port as u64 & PORT_MASK) << PORT | rest;
        match bucket.0.iter().any(|entry| entry.load(Relaxed) == fresh) {
            true => Learned::Known,
            false => self.write(bucket, fresh, now),
        }
    }

    /// Once in a tick for a station that is known.
    #[cold]
    fn write(&self, bucket: &Bucket, fresh: u64, now: u64) -> Learned {
        for _ in 0..TRIES {
            let entries = bucket.0.each_ref().map(|entry| entry.load(Relaxed));
            let known = entries.iter().position(|&entry| is_of(entry, fresh & REST_MASK));
            let place = known.or_else(|| entries.iter().position(|&entry| entry == 0 || is_old(entry, now)));
            let Some(place) = place else { return Learned::Full };
            let old = entries[place];
            let stays = old != 0 && port_of(old) == port_of(fresh);
            if !stays && !self.count_one(port_of(fresh)) {
                // Where it was it is no more.
                if known.is_some() && bucket.0[place].compare_exchange(old, 0, Relaxed, Relaxed).is_ok() {
                    self.uncount_one(port_of(old));
                }
                return Learned::Full;
            }
            if bucket.0[place].compare_exchange(old, fresh, Relaxed, Relaxed).is_err() {
                if !stays {
                    self.uncount_one(port_of(fresh));
                }
                continue;
            }
            if old != 0 && !stays {
                self.uncount_one(port_of(old));
            }
            if old != 0 && is_old(old, now) {
                self.aged[port_of(old)].fetch_add(1, Relaxed);
                return Learned::New;
            }
            return match known {
                None => Learned::New,
                Some(_) if port_of(old) == port_of(fresh) => Learned::Known,
                Some(_) => Learned::Moved,
            };
        }
        Learned::Known
    }

    /// Whether `port` may have one address more, which is counted then.
    fn count_one(&self, port: usize) -> bool {
        let count = &self.counts[port];
        let mut has = count.load(Relaxed);
        loop {
            let is_beyond = has >= self.own;
            if is_beyond && !self.take_beyond() {
                return false;
            }
            match count.compare_exchange_weak(has, has + 1, Relaxed, Relaxed) {
                Ok(_) => return true,
                Err(now) => {
                    self.beyond.fetch_sub(usize::from(is_beyond), Relaxed);
                    has = now;
                }
            }
        }
    }

    fn take_beyond(&self) -> bool {
        // A storm of new addresses only reads.
        if self.beyond.load(Relaxed) >= self.common {
            return false;
        }
        let may = self.beyond.fetch_add(1, Relaxed) < self.common;
        if !may {
            self.beyond.fetch_sub(1, Relaxed);
        }
        may
    }

    fn uncount_one(&self, port: usize) {
        let had = self.counts[port].fetch_sub(1, Relaxed);
        self.beyond.fetch_sub(usize::from(had > self.own), Relaxed);
    }

    #[inline]
    fn place(&self, station: Station) -> (&Bucket, u64) {
        let mixed = mix(station.0 ^ self.seed);
        let bucket = mixed as usize & (self.buckets.len() - 1);
        (&self.buckets[bucket], mixed >> self.bits)
    }

    /// Forgets the stations of these buckets whose entries are over.
    fn sweep(&self, buckets: impl Iterator<Item = usize>, is_over: impl Fn(u64) -> bool) {
        for entry in buckets.flat_map(|bucket| &self.buckets[bucket].0) {
            let old = entry.load(Relaxed);
            if is_over(old) && entry.compare_exchange(old, 0, Relaxed, Relaxed).is_ok() {
                self.uncount_one(port_of(old));
                self.aged[port_of(old)].fetch_add(1, Relaxed);
            }
        }
    }
}

/// Mixes the bits of a station. Each step can be undone, so two stations are never mixed to the same: odd factors have
/// an inverse, and a word shifted to the right and added to itself without carry has its upper bits as they were.
#[inline]
fn mix(station: u64) -> u64 {
    let mixed = station.wrapping_mul(0x9e37_79b9_7f4a_7c15) & STATION_MASK;
    let mixed = mixed ^ mixed >> 31;
    let mixed = mixed.wrapping_mul(0xd6e8_feb8_6659_fd93) & STATION_MASK;
    mixed ^ mixed >> 29
}

#[inline]
fn is_of(entry: u64, rest: u64) -> bool {
    entry & (VALID | REST_MASK) == VALID | rest
}

#[inline]
fn is_old(entry: u64, now: u64) -> bool {
    entry & VALID != 0 && now.wrapping_sub(entry >> SEEN) & SEEN_MASK > AGE
}

#[inline]
fn port_of(entry: u64) -> usize {
    (entry >> PORT & PORT_MASK) as usize
}

/// The database's clock, which the control thread turns: workers only read what time it is.
#[derive(Debug)]
pub struct Clock {
    tick: Duration,
    next: usize,
}

impl Clock {
    /// A clock for stations that are forgotten when nothing was heard of them for `ageing`, to a thirty-second.
    pub fn new(ageing: Duration) -> Self {
        Self { tick: (ageing / AGE as u32).max(Duration::from_nanos(1)), next: 0 }
    }

    /// It is `time` since the start: stations that nothing was heard of for too long are forgotten.
    pub fn turn(&mut self, fdb: &Fdb, time: Duration) {
        let now = (time.as_nanos() / self.tick.as_nanos()) as u64;
        let ticks = now.saturating_sub(fdb.now());
        if ticks == 0 {
            return;
        }
        let buckets = fdb.buckets.len();
        if ticks > AGE {
            // Nobody has turned it for so long that the time as entries have it may come round to when they were seen.
            fdb.sweep(0..buckets, |entry| entry != 0);
        }
        fdb.now.store(now, Relaxed);
        let count = (buckets as u64 * ticks).div_ceil(SWEEP).min(buckets as u64) as usize;
        fdb.sweep((self.next..self.next + count).map(|bucket| bucket % buckets), |entry| is_old(entry, now));
        self.next = (self.next + count) % buckets;
    }
}

#[cfg(test)]
mod tests;
