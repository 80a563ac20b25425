//! The forwarding database: the port behind which each station was last seen.
//!
//! All workers share one database without locks. An entry is one 64-bit word, so a reader always sees a complete entry:
//!
//! ```text
//! | valid 1 | seen 7 | port 6 | rest of the station 50 |
//! ```
//! A station is a VLAN (12 bits) and an address (48 bits). A reversible function mixes these 60 bits. Some bits of the
//! result select the bucket, which has eight entries on one cache line. The entry stores the other bits. An entry
//! therefore always identifies exactly one station, even when two workers write at the same time. Such a race can
//! overwrite an entry: packets are then flooded in the station's VLAN until the station is learned again. It can also
//! leave two entries: packets to a station that has moved may then go to its old port until the older entry is swept. A
//! packet never leaves its VLAN, because the bridge only sends to members of the VLAN, whatever the database contains.
//!
//! The function starts with a random number, so an attacker cannot choose addresses that share a bucket.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use offcore_wire::MacAddr;

/// Maximum number of ports.
pub const MAX_PORTS: usize = 64;
/// Clock ticks in the ageing time.
const AGE: u64 = 32;
/// Ticks in which every bucket is swept once. The sum with [`AGE`] is well below the 128 ticks that an entry
/// distinguishes.
const SWEEP: u64 = 8;
/// Entries per bucket.
const WAYS: usize = 8;
/// Entries per address of the limit. With this spare room, few buckets fill up before the database does.
const SPARE: usize = 4;
/// Bits of a station.
const STATION: u32 = 60;
const STATION_MASK: u64 = (1 << STATION) - 1;
/// Bits of a mixed station that an entry stores.
const REST: u32 = 50;
const REST_MASK: u64 = (1 << REST) - 1;
const PORT: u32 = REST;
const PORT_MASK: u64 = 0x3f;
const SEEN: u32 = 56;
const SEEN_MASK: u64 = 0x7f;
const VALID: u64 = 1 << 63;
/// Attempts when other workers change the same entry. After these, the station is left to its next packet.
const TRIES: usize = 4;

/// A station in a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Station(u64);

impl Station {
    /// Returns the station with the address `mac` in `vlan`, 0 to 4095.
    #[inline]
    pub fn new(vlan: u16, mac: MacAddr) -> Self {
        let [a, b, c, d, e, f] = mac.0;
        Self(u64::from(vlan & 0xfff) << 48 | u64::from_be_bytes([0, 0, a, b, c, d, e, f]))
    }
}

/// Result of learning a station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// The station was known.
    Known,
    /// The station is new.
    New,
    /// The station was behind another port.
    Moved,
    /// The bucket or the database is full, or the port has used up its share.
    Full,
}

#[repr(align(64))]
#[derive(Debug, Default)]
struct Bucket([AtomicU64; WAYS]);

/// The database.
#[derive(Debug)]
pub struct Fdb {
    buckets: Box<[Bucket]>,
    /// Number of bits of a mixed station that select its bucket.
    bits: u32,
    seed: u64,
    /// Addresses reserved for each port; `common` more are shared by all ports.
    own: usize,
    common: usize,
    /// Addresses of each port; `beyond` is the number of addresses beyond the reserved ones.
    counts: [AtomicUsize; MAX_PORTS],
    beyond: AtomicUsize,
    /// Time in units of 1/[`AGE`] of the ageing time.
    now: AtomicU64,
    /// Stations forgotten so far, by port.
    aged: [AtomicU64; MAX_PORTS],
}

impl Fdb {
    /// Creates a database with room for `limit` addresses. Half of them are reserved in equal shares for `ports` ports,
    /// 1 to [`MAX_PORTS`]; addresses of other ports cannot take these. The other half is shared by all ports.
    pub fn new(limit: usize, ports: usize) -> Self {
        let own = limit / (2 * ports);
        // The bucket number needs at least the bits of a station that an entry does not store.
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

    /// Returns the time for [`learn`](Self::learn) and [`find`](Self::find). One value serves a whole burst.
    #[inline]
    pub fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// Returns the number of addresses, including aged ones that have not been swept yet.
    pub fn addresses(&self) -> usize {
        self.counts.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Returns the number of stations behind `port` that were forgotten so far.
    pub fn aged(&self, port: usize) -> u64 {
        self.aged[port].load(Relaxed)
    }

    /// Returns the port, below [`MAX_PORTS`], behind which the station was last seen.
    #[inline]
    pub fn find(&self, station: Station, now: u64) -> Option<usize> {
        let (bucket, rest) = self.place(station);
        let of = |entry: &AtomicU64| Some(entry.load(Relaxed)).filter(|&entry| is_of(entry, rest));
        // Two workers may have made two entries at the same time. The first entry that is not too old counts.
        bucket.0.iter().filter_map(of).find(|&entry| !is_old(entry, now)).map(port_of)
    }

    /// Records that the station was seen behind `port`, which is below [`MAX_PORTS`].
    #[inline]
    pub fn learn(&self, station: Station, port: usize, now: u64) -> Learned {
        let (bucket, rest) = self.place(station);
        let fresh = VALID | (now & SEEN_MASK) << SEEN | (port as u64 & PORT_MASK) << PORT | rest;
        match bucket.0.iter().any(|entry| entry.load(Relaxed) == fresh) {
            true => Learned::Known,
            false => self.write(bucket, fresh, now),
        }
    }

    /// Writes an entry. For a known station, this happens once per tick.
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
                // The station is no longer behind its old port.
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

    /// Whether `port` may have one more address. If so, the address is counted.
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
        // During a storm of new addresses, this only reads.
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

    /// Forgets the stations in these buckets whose entries satisfy `is_over`.
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

/// Mixes the bits of a station. Each step is reversible, so two stations never have the same result: odd factors have
/// an inverse, and XOR with the word shifted right preserves the upper bits.
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

/// The clock of the database. The control thread advances it; workers only read the time.
#[derive(Debug)]
pub struct Clock {
    tick: Duration,
    next: usize,
}

impl Clock {
    /// Creates a clock that lets stations age after `ageing` without a packet, with a resolution of `ageing` / 32.
    pub fn new(ageing: Duration) -> Self {
        Self { tick: (ageing / AGE as u32).max(Duration::from_nanos(1)), next: 0 }
    }

    /// Advances the clock to `time` since the start, and forgets stations that are too old.
    pub fn turn(&mut self, fdb: &Fdb, time: Duration) {
        let now = (time.as_nanos() / self.tick.as_nanos()) as u64;
        let ticks = now.saturating_sub(fdb.now());
        if ticks == 0 {
            return;
        }
        let buckets = fdb.buckets.len();
        if ticks > AGE {
            // After such a pause, the 7-bit times of entries may have wrapped around. All entries are removed.
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
