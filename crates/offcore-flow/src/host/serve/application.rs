//! An application: a group of processes that share memory and sessions.

use std::sync::Arc;

use offcore_session::control::{Control, Owner, Processes};
use offcore_session::message::KEY;
use offcore_session::shared::Shared;
use offcore_session::slot::Slot;
use offcore_session::{Memory, Place, Segments};
use offcore_stats::time::Time;
use offcore_tcp::proto::AppId;

use super::acceptor::Acceptor;
use super::descriptors::DescriptorCharge;
use super::doorbell::Doorbell;
use super::feed::GrantedMemory;
use super::pending_work::{PendingWork, Work};
use super::processes::{Process, ProcessTable};
use super::session::Session;
use super::session_table::SessionTable;

/// One application.
#[derive(Debug)]
pub(super) struct Application {
    identity: Identity,
    memory: GrantedMemory,
    /// The pages with its marks and its living processes.
    shared: Shared,
    doorbell: Doorbell,
    /// The charge for the descriptors of the application. Processes and sessions have their own charges.
    charge: DescriptorCharge,
    /// The thread that accepts from the application's kernel listeners, if it has any.
    acceptor: Option<Acceptor>,
    processes: ProcessTable,
    sessions: SessionTable,
    pending: PendingWork,
}

/// The names of an application, and its user.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    id: AppId,
    key: [u8; KEY],
    instance: u64,
    user: u32,
}

impl Identity {
    /// `id` is the stack's name of the application. Its processes know it by `key`, which only applications of the same
    /// user share. `instance` distinguishes it from all applications that have ever had the key. Processes of `user`
    /// may join it.
    pub(super) fn new(id: AppId, key: [u8; KEY], instance: u64, user: u32) -> Self {
        Self { id, key, instance, user }
    }

    /// The key with which its processes identify it.
    pub(super) fn key(&self) -> [u8; KEY] {
        self.key
    }

    /// Identifies the application among all applications that have ever had the key.
    pub(super) fn instance(&self) -> u64 {
        self.instance
    }
}

impl Application {
    pub(super) fn new(
        identity: Identity,
        memory: GrantedMemory,
        shared: Shared,
        doorbell: Doorbell,
        charge: DescriptorCharge,
    ) -> Self {
        Self {
            identity,
            memory,
            shared,
            doorbell,
            charge,
            acceptor: None,
            processes: ProcessTable::default(),
            sessions: SessionTable::default(),
            pending: PendingWork::default(),
        }
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The stack's name of the application.
    #[inline]
    pub(super) fn id(&self) -> AppId {
        self.identity.id
    }

    /// The user whose processes may join the application.
    #[inline]
    pub(super) fn user(&self) -> u32 {
        self.identity.user
    }

    #[inline]
    pub(super) fn memory(&self) -> &Arc<Memory> {
        self.memory.memory()
    }

    pub(super) fn memory_mut(&mut self) -> &mut GrantedMemory {
        &mut self.memory
    }

    pub(super) fn slot(&self, place: Place) -> Option<&Slot> {
        self.memory.memory().slot(place)
    }

    pub(super) fn charge(&self) -> &DescriptorCharge {
        &self.charge
    }

    pub(super) fn acceptor(&self) -> Option<&Acceptor> {
        self.acceptor.as_ref()
    }

    pub(super) fn acceptor_mut(&mut self) -> Option<&mut Acceptor> {
        self.acceptor.as_mut()
    }

    pub(super) fn set_acceptor(&mut self, acceptor: Acceptor) {
        self.acceptor = Some(acceptor);
    }

    pub(super) fn take_acceptor(&mut self) -> Option<Acceptor> {
        self.acceptor.take()
    }

    /// The pages that the application shares with the stack.
    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The page that both sides write.
    #[inline]
    pub(super) fn control(&self) -> &Control {
        self.shared.control()
    }

    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Whether the application has neither processes nor sessions.
    pub(super) fn is_over(&self) -> bool {
        self.processes.len() == 0 && self.sessions.len() == 0
    }

    pub(super) fn processes(&self) -> &ProcessTable {
        &self.processes
    }

    /// Adds a process and returns its number, or `None` if the application has the maximum number of processes.
    pub(super) fn add_process(&mut self, process: Process) -> Option<(usize, Owner)> {
        self.processes.add(process, self.shared.processes())
    }

    /// The process with this number and generation, if it is still alive.
    pub(super) fn process(&mut self, number: u32, generation: u32) -> Option<&mut Process> {
        self.processes.get(number, generation)
    }

    /// Removes a process.
    pub(super) fn remove_process(&mut self, number: u32) -> Option<Process> {
        self.processes.remove(number, self.shared.processes())
    }

    #[inline]
    pub(super) fn pending(&self) -> &PendingWork {
        &self.pending
    }

    #[inline]
    pub(super) fn pending_mut(&mut self) -> &mut PendingWork {
        &mut self.pending
    }

    /// Checks for marks. They are taken in the application's turn. Returns whether the application requests a look at
    /// the kernel's events.
    #[inline]
    pub(super) fn scan_for_marks(&mut self) -> bool {
        self.pending.scan_for_marks(self.shared.control());
        self.shared.control().take_look()
    }

    /// Notes the time of the application's work, if it has work that is due.
    #[inline]
    pub(super) fn note_work(&mut self, now: Time) {
        if self.pending.is_due() {
            self.doorbell.record_work(now);
        }
    }

    /// Notes that the application has work at the time `now`, and wakes it. Returns whether it was asleep.
    #[inline]
    pub(super) fn wake(&mut self, now: Time) -> bool {
        self.doorbell.record_work(now);
        self.doorbell.wake(self.shared.control())
    }

    /// Puts the application to sleep if it had no recent work. Returns whether it is asleep.
    pub(super) fn fall_asleep(&mut self, now: Time) -> bool {
        if !self.doorbell.is_idle(now) || self.has_work() {
            return false;
        }
        self.doorbell.fall_asleep(self.shared.control())
    }

    /// Whether there is work, now or later.
    fn has_work(&self) -> bool {
        self.pending.has_work() || self.acceptor.as_ref().is_some_and(Acceptor::is_leaving)
    }

    /// Returns the next unit of work.
    pub(super) fn next_work(&mut self) -> Option<Work> {
        self.pending.next(self.shared.control(), self.sessions.number_bound())
    }

    /// Requests that all sessions are handled.
    pub(super) fn request_full_scan(&mut self) {
        self.pending.request_full_scan(self.sessions.number_bound());
    }

    /// Begins to end the application. Its sessions are closed in its turns.
    pub(super) fn start_ending(&mut self) {
        self.pending.start_ending(self.sessions.number_bound());
        self.shared.end();
    }

    /// Tells the processes that the stack ends all their sessions.
    pub(super) fn announce_end(&mut self) {
        self.shared.end();
    }

    pub(super) fn sessions(&self) -> &SessionTable {
        &self.sessions
    }

    pub(super) fn sessions_mut(&mut self) -> &mut SessionTable {
        &mut self.sessions
    }

    #[inline]
    pub(super) fn session(&self, number: u32) -> Option<&Session> {
        self.sessions.get(number)
    }

    #[inline]
    pub(super) fn session_mut(&mut self, number: u32) -> Option<&mut Session> {
        self.sessions.get_mut(number)
    }

    /// A session and its slot.
    #[inline]
    pub(super) fn both(&mut self, number: u32) -> Option<(&mut Session, &Slot)> {
        let session = self.sessions.get_mut(number)?;
        let slot = self.memory.memory().slot(session.place())?;
        Some((session, slot))
    }

    /// A session, its slot, and the table of living processes.
    pub(super) fn all(&mut self, number: u32) -> Option<(&mut Session, &Slot, &Processes)> {
        let session = self.sessions.get_mut(number)?;
        let slot = self.memory.memory().slot(session.place())?;
        Some((session, slot, self.shared.processes()))
    }
}
