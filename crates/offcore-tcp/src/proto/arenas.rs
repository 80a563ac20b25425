//! The memory of each application: what one of them uses is not taken from another, nor seen by it.
//!
//! An application that is gone may leave connections that still send, and copies that are in flight. Its memory stays until
//! the last of them is over.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::{Arena, Memory, Segment, Wanted};

use super::addr::AppId;
use super::memory::{self, AppMemory};
use super::shortage::{AGAIN, Shortage};

/// An application.
#[derive(Debug)]
pub(super) struct App {
    pub arena: Arena,
    /// Its connections that wait for memory.
    pub shortage: Shortage,
    /// Connections, sockets and listeners that it has, or has left behind; and how many there may be.
    users: usize,
    limit: usize,
    /// The application's user, if known.
    user: Option<u32>,
    /// It opens nothing any more.
    gone: bool,
    /// The system has no more memory for it.
    grown_out: bool,
    /// Who has added it gives it more memory.
    fed: bool,
    /// Whether it is in the list [`Arenas::changed`].
    changed: bool,
}

impl App {
    fn new(arena: Arena, fed: bool) -> Box<Self> {
        Box::new(Self {
            arena,
            shortage: Shortage::default(),
            users: 0,
            limit: usize::MAX,
            user: None,
            gone: false,
            grown_out: false,
            fed,
            changed: true,
        })
    }

    /// Adds memory when it is low, until there is as much as may be. Whether it has tried to.
    #[inline]
    pub(super) fn grow(&mut self) -> bool {
        if self.fed || self.wanted().is_none() {
            return false;
        }
        // Without more memory connections share what there is.
        self.grown_out = self.arena.grow().is_err();
        true
    }

    /// What it needs more of, where it is low and may have more.
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
}

impl Arenas {
    /// With `memory` bytes, at most, for the stack's own process.
    pub(super) fn new(memory: usize) -> Result<Self, MemoryError> {
        Ok(Self { apps: vec![Some(App::new(memory::arena(memory)?, false))], changed: vec![0] })
    }

    /// Adds an application.
    pub(super) fn add(&mut self, memory: AppMemory) -> AppId {
        let app = App::new(memory.0, true);
        let free = self.apps.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.apps.push(None);
            self.apps.len() - 1
        });
        self.apps[index] = Some(app);
        // An earlier application with this number may have left it there.
        if !self.changed.contains(&index) {
            self.changed.push(index);
        }
        // The data path pushes without an allocation.
        self.changed.reserve(self.apps.len() - self.changed.len());
        AppId::at(index)
    }

    /// What applications need more of.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (AppId, Wanted)> {
        self.changed.iter().filter_map(|&index| {
            let app = self.apps.get(index)?.as_deref().filter(|this| this.fed && !this.gone)?;
            Some((AppId::at(index), app.wanted()?))
        })
    }

    /// Calls `keeps` for each application whose memory has changed or is short. It returns whether the memory is short still.
    #[inline]
    pub(super) fn look_after(&mut self, mut keeps: impl FnMut(&mut App) -> bool) {
        let Self { apps, changed } = self;
        changed.retain(|&index| {
            let Some(app) = apps.get_mut(index).and_then(Option::as_deref_mut) else { return false };
            app.changed = keeps(app);
            app.changed
        });
    }

    /// It gets that; or the system has no more. What it does not take comes back.
    pub(super) fn feed(&mut self, app: AppId, segment: Option<Segment>) -> Option<Segment> {
        let Some(this) = self.place(app).filter(|this| this.fed) else { return segment };
        // Without more memory connections share what there is.
        this.grown_out |= segment.is_none();
        this.arena.add(segment?).err()
    }

    /// The application is gone; its memory, too, when nothing of it is left. The stack's own process stays.
    pub(super) fn remove(&mut self, app: AppId) {
        if let Some(this) = self.place(app).filter(|_| app != AppId::OWN) {
            this.gone = true;
            self.free_when_left(app);
        }
    }

    /// Which application that is gone has this memory.
    pub(super) fn find_gone(&self, memory: &Arc<Memory>) -> Option<AppId> {
        let is = |app: &App| app.gone && Arc::ptr_eq(app.arena.memory(), memory);
        self.apps.iter().position(|app| app.as_deref().is_some_and(is)).map(AppId::at)
    }

    pub(super) fn set_user(&mut self, app: AppId, user: u32) {
        if let Some(this) = self.place(app) {
            this.user = Some(user);
        }
    }

    /// The user of an application.
    pub(super) fn user(&self, app: AppId) -> Option<u32> {
        self.apps.get(app.number() as usize)?.as_deref()?.user
    }

    /// Whether the application may open something.
    pub(super) fn is_open(&self, app: AppId) -> bool {
        let this = self.apps.get(app.number() as usize).and_then(Option::as_deref);
        this.is_some_and(|this| !this.gone)
    }

    /// How many connections, sockets and listeners the application may have.
    pub(super) fn limit(&mut self, app: AppId, users: usize) {
        if let Some(this) = self.place(app) {
            this.limit = users;
        }
    }

    /// Whether it may have one more.
    pub(super) fn may_enter(&self, app: AppId) -> bool {
        let this = self.apps.get(app.number() as usize).and_then(Option::as_deref);
        this.is_some_and(|this| this.users < this.limit)
    }

    /// The application has one more connection, socket or listener.
    pub(super) fn enter(&mut self, app: AppId) {
        self.app(app).users += 1;
    }

    /// One of them is over, and its memory is given back.
    pub(super) fn leave(&mut self, app: AppId) {
        self.app(app).users -= 1;
        self.free_when_left(app);
    }

    fn free_when_left(&mut self, app: AppId) {
        if let Some(place) = self.apps.get_mut(app.number() as usize) {
            place.take_if(|this| this.gone && this.users == 0);
        }
    }

    fn place(&mut self, app: AppId) -> Option<&mut App> {
        self.apps.get_mut(app.number() as usize)?.as_deref_mut()
    }

    /// An application that has something open.
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

    /// When connections that wait for memory are looked after again.
    pub(super) fn deadline(&self, now: u64) -> Option<u64> {
        let waits = |index: &usize| {
            self.apps.get(*index).is_some_and(|app| app.as_ref().is_some_and(|app| !app.shortage.is_empty()))
        };
        self.changed.iter().any(waits).then_some(now + AGAIN)
    }

    /// All of them.
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
