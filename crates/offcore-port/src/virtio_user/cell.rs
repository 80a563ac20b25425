//! The interface between the control thread and the worker of one virtqueue.
//!
//! The control thread publishes a ring when a connection is established, and `None` when it is lost. The worker reads a
//! generation number in every call, which is one load of a cache line that rarely changes. It takes the lock only when
//! the number has changed. Publishing never waits for the worker: rings keep their memory alive.

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

/// The driver's side of a virtqueue. The back end is the device side.
#[derive(Debug)]
pub(super) struct Ring {
    /// Its tokens are the packets in flight.
    pub(super) driver: driver::RingDriver<Packet>,
    /// Whether a packet may arrive in several buffers.
    pub(super) mergeable: bool,
    /// The offloads that packets of this direction may request.
    pub(super) offloads: Offloads,
    /// RX: a packet whose last buffers have not arrived yet.
    pub(super) merging: Option<Box<Merging>>,
    queue: DriverQueue,
}

impl Ring {
    /// Creates a new ring that is polled, without notifications. It must be created before the back end starts its
    /// side.
    pub(super) fn new(queue: &DriverQueue) -> Self {
        let features = queue.features();
        let mut driver = driver::RingDriver::new(queue.layout(), features & VIRTIO_F_EVENT_IDX != 0);
        driver.set_notification(false);
        let offloads =
            if queue.index().is_multiple_of(2) { received(features) } else { transmitted(features) };
        let mergeable = features & VIRTIO_NET_F_MRG_RXBUF != 0;
        Self { driver, mergeable, offloads, merging: None, queue: queue.clone() }
    }

    /// Makes added buffers visible to the back end, and kicks it if it sleeps.
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

    /// Returns the descriptor that becomes readable when the back end notifies.
    pub(super) fn call(&self) -> BorrowedFd<'_> {
        self.queue.call()
    }

    /// Disables notifications, and clears pending ones.
    pub(super) fn refuse_notification(&mut self) {
        self.driver.set_notification(false);
        self.queue.forget_calls();
    }

    /// Frees all packets in flight. The connection is closed, so the back end does not use them any more.
    pub(super) fn reclaim(mut self, cache: &mut PoolCache) {
        if let Some(merging) = &mut self.merging {
            merging.free(cache);
        }
        cache.free_all(self.driver.take_in_flight());
    }
}

#[derive(Debug, Default)]
struct State {
    /// The ring that the worker takes next.
    next: Option<Ring>,
    /// The ring of a worker that has stopped, until the connection is closed.
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

    /// Replaces the ring by a new connection's ring or by none. The old ring's connection must be closed.
    pub(super) fn publish(&self, ring: Option<Ring>, pool: &'static Pool) {
        let returned = {
            let mut state = self.lock();
            // A ring that was never taken has no packets in flight.
            state.next = ring;
            state.broken = None;
            self.generation.fetch_add(1, Ordering::Release);
            state.returned.take()
        };
        if let Some(ring) = returned {
            ring.reclaim(&mut pool.cache());
        }
    }

    /// Returns why the present ring is broken, if it is.
    pub(super) fn broken(&self) -> Option<RingError> {
        self.lock().broken
    }

    // ---- worker side ----

    /// Returns the number of the last publication.
    #[inline(always)]
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Takes the last publication, and returns its number.
    pub(super) fn latest_publication(&self) -> (u32, Option<Ring>) {
        let mut state = self.lock();
        (self.generation.load(Ordering::Relaxed), state.next.take())
    }

    /// Records that the ring is broken.
    pub(super) fn report_broken(&self, error: RingError) {
        self.lock().broken = Some(error);
    }

    /// Returns the ring of a worker that stops. The worker took it from publication `generation`.
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
