//! Order by key: a packet waits only for older packets with the same key.

use super::CopyQueue;
use crate::mover::Mover;

/// Number of calls in which the oldest packet may stay outstanding before later packets overtake it. If copies complete
/// approximately in order, a scan of all packets is not worthwhile.
const WAITS: u32 = 16;

/// The scan state by key.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// By key: the number of the scan in which a waiting packet with this key was found.
    waiting: Vec<u32>,
    look: u32,
    /// Number of calls in which the oldest packet has not changed, and its position.
    calls: u32,
    oldest: u32,
}

impl Keys {
    /// Begins another scan.
    fn begin(&mut self) {
        self.look = self.look.wrapping_add(1);
        if self.look == 0 {
            self.waiting.fill(0);
            self.look = 1;
        }
    }

    fn waits(&self, key: u32) -> bool {
        self.waiting.get(key as usize) == Some(&self.look)
    }

    fn wait(&mut self, key: u32) {
        let key = key as usize;
        if key >= self.waiting.len() {
            self.waiting.resize((key + 1).next_power_of_two(), 0);
        }
        self.waiting[key] = self.look;
    }
}

impl<T> CopyQueue<T> {
    /// Takes the holders of complete packets. Packets with the same key are taken in the order in which they were
    /// entered. `key` returns a number that should be small, such as the index of a connection, and `None` for a holder
    /// that equals [`Default`], as `each` leaves it.
    ///
    /// A copy that does not complete delays only its own key. Meanwhile, every call scans all packets in flight.
    pub fn take_by_key(
        &mut self,
        mover: &mut Mover,
        key: impl Fn(&T) -> Option<u32>,
        mut each: impl FnMut(&mut T),
    ) {
        let Self { holders, keys, .. } = self;
        let (queue, channels) = mover.parts(self.id);
        let ring = &mut queue.ring;
        if ring.passed().is_empty() {
            let ready = ring.ready();
            for slot in ring.slots().take(ready) {
                if key(&holders[slot]).is_some() {
                    each(&mut holders[slot]);
                }
            }
            ring.retire(ready);
            if ring.in_flight() == 0 || ring.oldest() != keys.oldest {
                (keys.oldest, keys.calls) = (ring.oldest(), 0);
            } else {
                keys.calls = keys.calls.wrapping_add(1);
            }
        }
        if ring.in_flight() > 0 && (!ring.passed().is_empty() || keys.calls >= WAITS || ring.room() == 0) {
            keys.calls = 0;
            keys.begin();
            let mut look = |slot: usize, done: bool| {
                let Some(key) = key(&holders[slot]) else { return false };
                if done && !keys.waits(key) {
                    each(&mut holders[slot]);
                    return false;
                }
                keys.wait(key);
                true
            };
            ring.keep_passed(&mut look);
            for slot in ring.slots() {
                look(slot, ring.is_done(slot));
            }
            ring.pass_over(|slot| key(&holders[slot]).is_some());
        }
        queue.reaped(channels.max_latency);
    }
}
