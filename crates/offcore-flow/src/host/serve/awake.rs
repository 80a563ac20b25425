//! Selects the applications whose marks are read in each round.
//!
//! Reading the marks of an application takes time, so a round reads only the marks of applications that had work within
//! the last milliseconds, and of a few others. All other applications are armed, as all applications are while the
//! worker sleeps: an application that marks a session then writes to its eventfd. The kernel reports this event, and
//! the application is awake again.

use offcore_stats::time::Time;
use offcore_stats::tsc;

use super::Serve;

/// Number of applications that stay awake without work.
const KEPT: usize = 16;

/// The indices of awake applications, and the number of the others.
#[derive(Debug, Default)]
pub(super) struct Awake {
    apps: Vec<usize>,
    asleep: usize,
    /// Index of the application whose user is charged for the next scan.
    charged: usize,
}

impl Awake {
    /// Adds a new application, which is awake.
    pub(super) fn add(&mut self, app: usize) {
        self.apps.push(app);
    }

    /// Removes an application that has ended.
    pub(super) fn remove(&mut self, app: usize) {
        match self.apps.iter().position(|other| *other == app) {
            Some(at) => drop(self.apps.swap_remove(at)),
            None => self.asleep -= 1,
        }
    }

    /// Selects the application whose user is charged for a scan. Repeated calls return all awake applications.
    fn next_charged(&mut self) -> Option<usize> {
        self.charged = if self.charged + 1 < self.apps.len() { self.charged + 1 } else { 0 };
        self.apps.get(self.charged).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.apps.len()
    }

    pub(super) fn all_are(&self) -> bool {
        self.asleep == 0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.apps.iter().copied()
    }
}

impl Serve {
    /// Checks the awake applications for marks.
    pub(super) fn scan_for_marks(&mut self, now: Time) {
        let (from, look) = (tsc::now(), &mut self.polling.look);
        self.registry.visit_awake(|application| {
            *look |= application.scan_for_marks();
            application.note_work(now);
        });
        // The whole scan is charged to one user, so that no clock is read per application.
        if let Some(user) = self.registry.awake.next_charged().and_then(|app| self.registry.user_of(app)) {
            let now = tsc::now();
            self.schedule.turns.pay(user, now - from);
        }
    }

    /// Wakes an application that has or may have work.
    pub(super) fn wake_application(&mut self, app: usize) {
        let Some(application) = self.registry.app(app) else { return };
        if application.wake(self.polling.looked) {
            // Marks from before `wake` are read here, so this scan must follow it. The next round finds later marks.
            self.polling.look |= application.scan_for_marks();
            self.registry.awake.apps.push(app);
            self.registry.awake.asleep -= 1;
        }
    }

    /// Puts applications without recent work to sleep, down to [`KEPT`] awake applications.
    pub(super) fn fall_asleep(&mut self, now: Time) {
        let registry = &mut self.registry;
        let (apps, Awake { apps: awake, asleep, .. }) = (&mut registry.apps, &mut registry.awake);
        let mut surplus = awake.len().saturating_sub(KEPT);
        if surplus == 0 {
            return;
        }
        awake.retain(|&app| {
            let application = apps.get_mut(app).and_then(Option::as_deref_mut);
            let falls = surplus > 0 && application.is_some_and(|application| application.fall_asleep(now));
            surplus -= usize::from(falls);
            *asleep += usize::from(falls);
            !falls
        });
    }
}
