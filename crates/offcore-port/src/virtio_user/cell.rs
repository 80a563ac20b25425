//! The seam between the control thread and the worker of one virtqueue.
//!
//! The control thread publishes a ring when a connection is there, and none when the connection is gone. The worker
//! looks at a generation number in every call, which is one load of a line that hardly ever changes; only when it has
//! changed does it take the lock. Publishing waits for nobody: rings keep their own memory.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offcore_mem::{Packet, Pool, PoolCache};
use offcore_ring::{RingError, driver};
use offcore_vhost::eventfd;
use offcore_vhost::features::{VIRTIO_F_EVENT_IDX, VIRTIO_NET_F_MRG_RXBUF, received, transmitted};
use offcore_vhost::frontend::DriverQueue;
use offcore_wire::virtio_net::Offloads;

use super::merging::Merging;

/// The driver's side of a virtqueue that the back end runs.
#[derive(Debug)]
pub(super) struct Ring {
    /// Packets in flight are its tokens.
    pub(super) driver: driver::Queue<Packet>,
    /// Whether a packet may come in several buffers.
    pub(super) mergeable: bool,
    /// What packets of this direction may ask for.
    pub(super) offloads: Offloads,
    /// RX: a packet that takes more buffers than have come so far.
    pub(super) merging: Option<Box<Merging>>,
    queue: DriverQueue,
}

impl Ring {
    /// A fresh ring, which asks for no notifications: it is polled. To be made before the back end starts its side.
    pub(super) fn new(queue: &DriverQueue) -> Self {
        let features = queue.features();
        let mut driver = driver::Queue::new(queue.layout(), features & VIRTIO_F_EVENT_IDX != 0);
        driver.set_notification(false);
        let offloads =
            if queue.index().is_multiple_of(2) { received(features) } else { transmitted(features) };
        let mergeable = features & VIRTIO_NET_F_MRG_RXBUF != 0;
        Self { driver, mergeable, offloads, merging: None, queue: queue.clone() }
    }

    /// Makes what was added visible to the back end, and kicks it if it sleeps.
    #[inline(always)]
    pub(super) fn publish(&mut self) {
        self.driver.publish();
        if self.driver.needs_kick() {
            self.kick();
        }
    }

    #[cold]
    fn kick(&self) {
        eventfd::signal(self.queue.kick());
    }

    /// Asks the back end to notify when it returns a chain.
    pub(super) fn ask_for_notification(&mut self) {
        self.driver.set_notification(true);
    }

    /// Becomes readable when the back end notifies.
    pub(super) fn call(&self) -> BorrowedFd<'_> {
        self.queue.call()
    }

    /// Asks for no notifications, and takes back those that have come.
    pub(super) fn refuse_notification(&mut self) {
        self.driver.set_notification(false);
        self.queue.forget_calls();
    }

    /// Frees every packet in flight: the connection is gone, so nobody else uses them.
    pub(super) fn reclaim(mut self, cache: &mut PoolCache) {
        if let Some(merging) = &mut self.merging {
            merging.free(cache);
        }
        cache.free_all(self.driver.take_in_flight());
    }
}

#[derive(Debug, Default)]
struct State {
    /// The ring for the worker to take.
    next: Option<Ring>,
    /// The ring of a worker that went away, until the connection is gone.
    returned: Option<Ring>,
    broken: Option<RingError>,
}

/// One virtqueue, shared by the control thread and the worker.
#[derive(Debug, Default)]
pub(super) struct Cell {
    generation: AtomicU32,
    state: Mutex<State>,
}

impl Cell {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- control side ----

    /// Exchanges the ring for one of a new connection, or for none. The connection of the old one is gone.
    pub(super) fn publish(&self, ring: Option<Ring>, pool: &'static Pool) {
        let returned = {
            let mut state = self.lock();
            // A ring that nobody has taken has nothing in flight.
            state.next = ring;
            state.broken = None;
            self.generation.fetch_add(1, Ordering::Release);
            state.returned.take()
        };
        if let Some(ring) = returned {
            ring.reclaim(&mut pool.cache());
        }
    }

    /// Why the present ring does not run, when it does not.
    pub(super) fn broken(&self) -> Option<RingError> {
        self.lock().broken
    }

    // ---- worker side ----

    /// The number of the last publication.
    #[inline(always)]
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// What was published last, and its number.
    pub(super) fn pick_up(&self) -> (u32, Option<Ring>) {
        let mut state = self.lock();
        (self.generation.load(Ordering::Relaxed), state.next.take())
    }

    /// The ring is broken.
    pub(super) fn report_broken(&self, error: RingError) {
        self.lock().broken = Some(error);
    }

    /// The worker goes away and leaves the ring that it picked up as publication `generation`.
    pub(super) fn give_back(&self, generation: u32, ring: Ring, pool: &'static Pool) {
        {
            let mut state = self.lock();
            if self.generation.load(Ordering::Relaxed) == generation {
                state.returned = Some(ring);
                return;
            }
        }
        ring.reclaim(&mut pool.cache());
    }
}
