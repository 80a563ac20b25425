//! Clients: arrival, submissions and departure.

use std::mem;
use std::sync::atomic::Ordering;

use super::{INTAKE, Job, Served, SimEngine, WorkQueue};
use crate::descriptor::Descriptor;
use crate::sim::DeviceState;
use crate::sim::execute::Injected;
use crate::sim::shared::{Client, lock};

impl SimEngine {
    #[cold]
    pub(super) fn take_note(&mut self, generation: u64) {
        let pending_requests = mem::take(&mut *lock(&self.shared.pending_requests));
        if pending_requests.reset {
            self.reset();
        }
        if let Some(faults) = pending_requests.faults {
            self.set_faults(faults);
        }
        for client in pending_requests.arriving {
            let served = Some(Served { client, dead: false, taken: 0, jobs: 0 });
            match self.clients.iter().position(Option::is_none) {
                Some(place) => self.clients[place] = served,
                None => self.clients.push(served),
            }
        }
        for client in 0..self.clients.len() {
            let withdrawn = |served: &Served| served.client.cell.withdrawn.load(Ordering::SeqCst);
            if self.clients[client].as_ref().is_some_and(|served| !served.dead && withdrawn(served)) {
                self.drop_client(client);
            }
        }
        self.changed = true;
        self.generation = generation;
        self.shared.acknowledged.store(generation, Ordering::Release);
    }

    /// Aborts everything.
    fn reset(&mut self) {
        let inside = self.jobs.iter().flatten().count() as u64;
        self.count(|counters| &counters.aborted, inside);
        self.clients.clear();
        self.jobs.clear();
        self.free.clear();
        self.lay_out();
    }

    /// Aborts the descriptors of a client that closed its portal: waiting descriptors leave their queues, and
    /// descriptors in a DSA engine continue without effect.
    fn drop_client(&mut self, client: usize) {
        if let Some(served) = &mut self.clients[client] {
            served.dead = true;
            let Served { client: Client { ring, occupancy, cell, .. }, jobs, .. } = served;
            // Descriptors still in the portal count as well, also as entries of a shared queue.
            let outside = ring.available(usize::MAX);
            ring.release(outside);
            cell.free_entries(occupancy);
            let inside = u64::from(*jobs) + outside as u64;
            self.count(|counters| &counters.aborted, inside);
        }
        for queue in 0..self.queues.len() {
            let WorkQueue { arriving, waiting, .. } = &mut self.queues[queue];
            let arriving = mem::take(arriving);
            let waiting = mem::take(waiting);
            for (at, job) in arriving {
                if self.client_of(job) == client {
                    self.leave_queue(job)
                } else {
                    self.queues[queue].arriving.push_back((at, job));
                }
            }
            for job in waiting {
                if self.client_of(job) == client {
                    self.leave_queue(job)
                } else {
                    self.queues[queue].waiting.push_back(job);
                }
            }
        }
        self.forget_if_done(client);
    }

    pub(super) fn client_of(&self, job: usize) -> usize {
        self.job(job).client
    }

    /// Removes a job that no DSA engine has.
    pub(super) fn leave_queue(&mut self, job: usize) {
        self.free_entry(job);
        self.remove(job);
    }

    /// Releases the entry of the job's queue, so that a shared queue accepts the next descriptor.
    pub(super) fn free_entry(&mut self, job: usize) {
        let client = self.client_of(job);
        if let Some(Served { client: Client { cell, occupancy, .. }, .. }) = &self.clients[client] {
            cell.free_entry(occupancy);
        }
    }

    pub(super) fn forget_if_done(&mut self, client: usize) {
        if self.clients[client].as_ref().is_some_and(|served| served.dead && served.jobs == 0) {
            self.clients[client] = None;
        }
    }

    /// Takes descriptors from the portals. They reach their queues `portal_ns` later.
    pub(super) fn accept_submissions(&mut self) {
        if self.shared.state() == DeviceState::Halted {
            return;
        }
        let at = self.after(self.timing.portal_ns);
        for client in 0..self.clients.len() {
            while let Some(served) = self.clients[client].as_mut().filter(|served| !served.dead) {
                if served.client.ring.available(1) == 0 {
                    break;
                }
                let mut taken = [Descriptor::default(); INTAKE];
                let mut n = 0;
                for descriptor in served.client.ring.pop_burst(INTAKE) {
                    taken[n] = descriptor;
                    n += 1;
                }
                let (first, queue) = (served.taken, served.client.wq);
                served.taken += n;
                for (descriptor, number) in taken[..n].iter().zip(first..) {
                    let late_store = self.is_late_store(client, number);
                    let job = self.add(Job {
                        descriptor: *descriptor,
                        client,
                        queue,
                        batch: None,
                        refused: None,
                        injected: Injected::Nothing,
                        answered: None,
                        late_store,
                        lost: false,
                    });
                    self.queues[queue].arriving.push_back((at, job));
                }
                if n < INTAKE {
                    break;
                }
            }
        }
    }

    fn is_late_store(&self, client: usize, number: usize) -> bool {
        if !self.faults.weak_ordering {
            return false;
        }
        let Some(served) = &self.clients[client] else { return false };
        let mut numbers = lock(&served.client.cell.late_stores);
        let place = numbers.iter().position(|&late| late == number);
        place.map(|place| numbers.swap_remove(place)).is_some()
    }
}
