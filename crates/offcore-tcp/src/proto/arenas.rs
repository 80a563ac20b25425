//! The memory of each application. Applications neither share memory nor see each other's memory.
//!
//! Connections of an application that has gone may still send, and copies may be in flight. The memory stays until the
//! last of them has ended.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::layout::LARGE;
use offcore_session::{Arena, Charge, Memory, Segment, Wanted};
use offcore_stats::time::Time;

use super::addr::{AppId, UserIndex};
use super::memory::{self, AppMemory, PRIVATE};
use super::shortage::{AGAIN, MemoryWaiters};
use super::users::Users;

/// An application.
#[derive(Debug)]
pub(super) struct App {
    pub arena: Arena,
    /// The charge for private memory, and the number of connections, sockets and listeners that it covers.
    charge: Arc<Charge>,
    paid: usize,
    /// The numbers of its connections.
    pub conns: Vec<u32>,
    /// Its connections that wait for memory.
    pub shortage: MemoryWaiters,
    /// The number of its connections, sockets and listeners, including those left behind, and the limit.
    users: usize,
    limit: usize,
    pub user: UserIndex,
    /// The application has gone, and opens nothing any more.
    gone: bool,
    /// The system has no more memory for it.
    grown_out: bool,
    /// The caller that added the application supplies more memory.
    fed: bool,
    /// Whether it is in the list [`Arenas::changed`].
    changed: bool,
}

impl App {
    fn new(arena: Arena, charge: Arc<Charge>, fed: bool, user: UserIndex) -> Box<Self> {
        Box::new(Self {
            arena,
            charge,
            paid: 0,
            conns: Vec::new(),
            shortage: MemoryWaiters::default(),
            users: 0,
            limit: usize::MAX,
            user,
            gone: false,
            grown_out: false,
            fed,
            changed: true,
        })
    }

    /// Maps more memory if it is low, up to the limit. Returns whether it has tried to.
    #[inline]
    pub(super) fn grow(&mut self) -> bool {
        if self.fed || self.wanted().is_none() {
            return false;
        }
        // Without more memory the connections share the existing memory.
        self.grown_out = self.arena.grow().is_err();
        true
    }

    /// Returns the kind of memory that is low and may be extended.
    #[inline]
    fn wanted(&self) -> Option<Wanted> {
        if !memory::is_low(&self.arena) || self.grown_out {
            return None;
        }
        self.arena.wanted()
    }
}

/// All applications, by number.
#[derive(Debug)]
pub(super) struct Arenas {
    apps: Vec<Option<Box<App>>>,
    /// Applications whose memory has changed or is short.
    changed: Vec<usize>,
    pub users: Users,
}

impl Arenas {
    /// Creates the list with up to `memory` bytes for the stack's own process, and up to `most` connections, sockets
    /// and listeners, which the users share equally.
    pub(super) fn new(memory: usize, most: usize) -> Result<Self, MemoryError> {
        let mut users = Users::new(most);
        let own = App::new(memory::arena(memory)?, Arc::default(), false, users.add_app(None));
        Ok(Self { apps: vec![Some(own)], changed: vec![0], users })
    }

    /// Adds an application.
    pub(super) fn add(&mut self, memory: AppMemory) -> AppId {
        let app = App::new(memory.arena, memory.charge, true, self.users.add_app(None));
        let free = self.apps.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.apps.push(None);
            self.apps.len() - 1
        });
        self.apps[index] = Some(app);
        // An earlier application with this number may have left its entry.
        if !self.changed.contains(&index) {
            self.changed.push(index);
        }
        // Reserves capacity so that the data path pushes without an allocation.
        self.changed.reserve(self.apps.len() - self.changed.len());
        AppId::at(index)
    }

    /// Returns the applications that need more memory, and its kind.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (AppId, Wanted)> {
        self.changed.iter().filter_map(|&index| {
            let app = self.apps.get(index)?.as_deref().filter(|this| this.fed && !this.gone)?;
            Some((AppId::at(index), app.wanted()?))
        })
    }

    /// Calls `keeps` for each application whose memory has changed or is short. `keeps` returns whether it is still
    /// short.
    #[inline]
    pub(super) fn visit_changed_apps(&mut self, mut keeps: impl FnMut(&mut App) -> bool) {
        let Self { apps, changed, .. } = self;
        changed.retain(|&index| {
            let Some(app) = apps.get_mut(index).and_then(Option::as_deref_mut) else { return false };
            app.changed = keeps(app);
            app.changed
        });
    }

    /// Adds memory to an application. `None` means that the system has no more. Returns memory that was not accepted.
    pub(super) fn feed(&mut self, app: AppId, segment: Option<Segment>) -> Option<Segment> {
        let Some(this) = self.place(app).filter(|this| this.fed) else { return segment };
        // Without more memory the connections share the existing memory.
        this.grown_out |= segment.is_none();
        this.arena.add(segment?).err()
    }

    /// Marks an application as gone. Its memory is freed when it is no longer used. The stack's own process stays.
    pub(super) fn remove(&mut self, app: AppId) {
        if let Some(this) = self.place(app).filter(|_| app != AppId::OWN) {
            this.gone = true;
            self.free_when_left(app);
        }
    }

    /// Returns the application that has gone and owns this memory.
    pub(super) fn find_removed_app(&self, memory: &Arc<Memory>) -> Option<AppId> {
        let is = |app: &App| app.gone && Arc::ptr_eq(app.arena.memory(), memory);
        self.apps.iter().position(|app| app.as_deref().is_some_and(is)).map(AppId::at)
    }

    pub(super) fn set_user(&mut self, app: AppId, user: u32) {
        let Self { apps, users, .. } = self;
        let this = apps.get_mut(app.number() as usize).and_then(Option::as_deref_mut);
        if let Some(this) = this.filter(|this| this.users == 0) {
            users.remove_app(this.user);
            this.user = users.add_app(Some(user));
        }
    }

    /// Returns the user of an application.
    pub(super) fn user(&self, app: AppId) -> Option<u32> {
        self.users.id(self.apps.get(app.number() as usize)?.as_deref()?.user)
    }

    /// Returns whether the windows of an application's user are limited.
    pub(super) fn is_limited(&self, app: AppId) -> bool {
        let this = self.apps.get(app.number() as usize).and_then(Option::as_deref);
        this.is_some_and(|this| self.users.is_limited(this.user))
    }

    /// Charges an application's user for a peer's connection request. Returns `false` if it exceeds the user's limit.
    pub(super) fn connection_requested(&mut self, app: AppId) -> bool {
        let Self { apps, users, .. } = self;
        let this = apps.get(app.number() as usize).and_then(Option::as_deref);
        this.is_some_and(|this| users.connection_requested(this.user))
    }

    /// Returns whether the application may open connections, sockets and listeners.
    pub(super) fn is_open(&self, app: AppId) -> bool {
        let this = self.apps.get(app.number() as usize).and_then(Option::as_deref);
        this.is_some_and(|this| !this.gone)
    }

    /// Limits the number of connections, sockets and listeners of an application.
    pub(super) fn limit(&mut self, app: AppId, users: usize) {
        if let Some(this) = self.place(app) {
            this.limit = users;
        }
    }

    /// Returns whether the application may have one more connection, socket or listener: it is below its limit, its
    /// user is below its share, and the user's budget has room for the private memory. A charged block covers several
    /// of them and stays charged until the application ends.
    pub(super) fn may_enter(&mut self, app: AppId) -> bool {
        let Self { apps, users, .. } = self;
        let Some(Some(this)) = apps.get_mut(app.number() as usize) else { return false };
        if this.users >= this.limit || !users.may_enter(this.user) {
            return false;
        }
        if this.users == this.paid && this.charge.take(1) {
            this.paid += LARGE / PRIVATE;
        }
        this.users < this.paid
    }

    /// Counts a new connection, socket or listener.
    pub(super) fn enter(&mut self, app: AppId) {
        let this = self.app(app);
        this.users += 1;
        let user = this.user;
        self.users.enter(user);
    }

    /// Counts the end of a connection, socket or listener whose memory has been freed.
    pub(super) fn leave(&mut self, app: AppId) {
        let this = self.app(app);
        this.users -= 1;
        let user = this.user;
        self.users.leave(user);
        self.free_when_left(app);
    }

    fn free_when_left(&mut self, app: AppId) {
        if let Some(place) = self.apps.get_mut(app.number() as usize)
            && let Some(this) = place.take_if(|this| this.gone && this.users == 0)
        {
            self.users.remove_app(this.user);
        }
    }

    fn place(&mut self, app: AppId) -> Option<&mut App> {
        self.apps.get_mut(app.number() as usize)?.as_deref_mut()
    }

    /// Returns an application that has open connections, sockets or listeners.
    #[inline(always)]
    pub(super) fn app(&mut self, app: AppId) -> &mut App {
        let index = app.number() as usize;
        match self.apps.get_mut(index) {
            Some(Some(this)) => {
                if !this.changed {
                    this.changed = true;
                    self.changed.push(index);
                }
                this
            }
            _ => unknown(app),
        }
    }

    /// Returns when connections that wait for memory are checked again.
    pub(super) fn deadline(&self, now: Time) -> Option<Time> {
        let waits = |index: &usize| {
            self.apps.get(*index).is_some_and(|app| app.as_ref().is_some_and(|app| !app.shortage.is_empty()))
        };
        self.changed.iter().any(waits).then_some(now + AGAIN)
    }

    /// Returns all applications.
    pub(super) fn iter(&self) -> impl Iterator<Item = &App> {
        self.apps.iter().flatten().map(|app| &**app)
    }
}

impl Index<AppId> for Arenas {
    type Output = Arena;

    #[inline(always)]
    fn index(&self, app: AppId) -> &Arena {
        match self.apps.get(app.number() as usize) {
            Some(Some(this)) => &this.arena,
            _ => unknown(app),
        }
    }
}

impl IndexMut<AppId> for Arenas {
    #[inline(always)]
    fn index_mut(&mut self, app: AppId) -> &mut Arena {
        &mut self.app(app).arena
    }
}

#[cold]
fn unknown(app: AppId) -> ! {
    panic!("there is no application {}", app.number())
}
