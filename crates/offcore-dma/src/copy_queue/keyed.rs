//! Order by key: a packet waits for older ones of its own key only.

use super::CopyQueue;
use crate::mover::Mover;

/// Calls in which the oldest packet may stay outstanding until later ones overtake it: what completes in about the order
/// in which it was submitted is not worth a look at every packet.
const WAITS: u32 = 16;

/// What is known of keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// By key: the look in which a packet of it was found that waits.
    waiting: Vec<u32>,
    look: u32,
    /// Calls since the oldest packet became it, and its position.
    calls: u32,
    oldest: u32,
}

impl Keys {
    /// Begins another look.
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
    /// Takes the holders of packets that are complete: those of one key in the order in which they were entered. `key` is
    /// a number that should be small, the index of a connection, say, and `None` for a holder that is as
    /// [`Default`] has it, as which `each` leaves it.
    ///
    /// A copy that does not complete holds up its own key. While that lasts, each packet in flight is looked at in each
    /// call.
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
