//! The choice of the copy routine for a queue: the candidates depend on the copy size, and measured times of the
//! queue's bursts decide. This module reads no clock: callers pass times in, and get pauses.
//!
//! Two consecutive bursts are compared: one copied by the present routine, one by a rival. The comparison is therefore
//! independent of earlier changes of the data's location in the caches. A rival that wins three times in a row takes
//! over. While nothing changes, one burst in 256 is a trial; after a change of the present routine's time, one in four.
//!
//! The table below is based on these measurements (two cores of a Zen 4, virtual; forwarding between virtqueues, TSC
//! cycles per packet, medians of alternating runs):
//! * In the core's own caches, `plain` is up to 12 % faster end to end, most for small packets. Elsewhere `ahead` is up
//!   to 1.5 times faster. For all routines, AVX-512 instead of AVX2 made no difference above the noise.
//! * Bypassing the caches saves core time if the destination is not in the core's own caches, but then the guest reads
//!   its packet from memory. With the guest on a distant core, `non-temporal` took 0.3 to 0.4 of the copy time of
//!   `ahead` at 1024 and 1518 bytes: 620 instead of 910 cycles, 800 instead of 1380, while the guest's check of a
//!   packet took 200 cycles longer. At 512 and 768 bytes, with a guest nearby and with cold data it took 0.55 to 0.8,
//!   and the guest's additional time equalled or exceeded the core's gain. Hence the factor of one half, which
//!   indicates a real gain, and the minimum size. On two Zen 3 cores, always bypassing the caches was compared with
//!   never doing so, core and guest together: the speed was 0.8 with the guest nearby (copy time 0.9), and 1.03 at 1518
//!   bytes with a distant guest (copy time 0.65; docs/measuring.md). The guest's time is not visible here, so the
//!   factor stands in for it.
//! * The first copy of a packet, into a packet buffer that this core reads next, took twice as long when it bypassed
//!   the caches, so the same comparison rejects it.
//! * `rep movsb` was never faster for packets (reference figures: hot, 1.0 to 1.5 times the time) and is not offered.
//! * `direct` could not be measured on the same machine. On others it was as good as `non-temporal` (cold, 668 versus
//!   631 cycles for 1518 bytes) or up to 1.5 times better (a loop over cold memory, no reader), so it is a candidate.

/// The kinds of routine. The vector width depends on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoutineKind {
    Plain,
    Ahead,
    NonTemporal,
    Direct,
}

/// Sizes of copies that have separate candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    Small,
    Large,
}

impl Size {
    /// Average copy size in bytes from which bypassing the caches may be worthwhile.
    const LARGE: u64 = 768;

    /// Returns the size class of `copies` copies with `bytes` bytes in total.
    pub(super) fn of(bytes: u64, copies: usize) -> Self {
        if bytes < Self::LARGE * copies as u64 { Self::Small } else { Self::Large }
    }
}

/// The candidates among the routines that bypass the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Past {
    /// None: the copies' reader must find them in a cache.
    None,
    /// All except [`RoutineKind::Direct`], because the CPU does not have the instruction.
    NonTemporal,
    /// All of them.
    Direct,
}

impl Past {
    fn allows(self, kind: RoutineKind) -> bool {
        match kind {
            RoutineKind::Plain | RoutineKind::Ahead => true,
            RoutineKind::NonTemporal => self != Self::None,
            RoutineKind::Direct => self == Self::Direct,
        }
    }
}

/// A routine that may replace the present one: it wins if it takes less than this fraction of the present routine's
/// time.
#[derive(Clone, Copy, Debug)]
struct Rival(RoutineKind, f64);

/// Returns the rivals of a routine. Bypassing the caches is only tried if `plain` has lost, because data in the core's
/// own caches shall stay there. These rivals are at the end of a list, with [`RoutineKind::Direct`] last: the list is
/// cut before the routines that are not candidates.
const fn rivals(present: RoutineKind, size: Size) -> &'static [Rival] {
    match (present, size) {
        (RoutineKind::Plain, _) => &[Rival(RoutineKind::Ahead, 0.95)],
        (RoutineKind::Ahead, Size::Small) => &[Rival(RoutineKind::Plain, 0.95)],
        (RoutineKind::Ahead, Size::Large) => &[
            Rival(RoutineKind::Plain, 0.95),
            Rival(RoutineKind::NonTemporal, 0.5),
            Rival(RoutineKind::Direct, 0.5),
        ],
        // Returns to the caches if the saving is not much more than a third.
        (RoutineKind::NonTemporal, _) => &[Rival(RoutineKind::Ahead, 1.7), Rival(RoutineKind::Direct, 0.87)],
        (RoutineKind::Direct, _) => &[Rival(RoutineKind::Ahead, 1.7), Rival(RoutineKind::NonTemporal, 0.87)],
    }
}

/// The choice for one queue and one size.
#[derive(Clone, Debug)]
pub(super) struct RoutineChoice {
    size: Size,
    past: Past,
    present: RoutineKind,
    /// Index of the next rival in the list.
    next: usize,
    /// Number of consecutive wins of that rival.
    wins: u32,
    /// The time of the present routine in the preceding burst, if the rival is next.
    present_cost: Option<f64>,
    /// Number of trials still to be made in quick succession.
    quick_trials: usize,
    /// Number of timed bursts until the next trial.
    quiet: u32,
    /// The usual time of the present routine; `None` before the first measurement.
    usual: Option<f64>,
    /// Number of consecutive timed bursts with an unusual time.
    unusual: u32,
}

impl RoutineChoice {
    /// Number of bursts between two timed ones.
    pub(super) const TIMED: u32 = 16;
    /// Number of bursts between two trials, while nothing changes.
    const TRIAL: u32 = 256;
    /// Number of bursts between two trials after a change, or after a rival's win.
    const QUICK_TRIAL_INTERVAL: u32 = 4;
    /// Number of quick trials per rival: a single pair of bursts may have been disturbed.
    const ROUNDS: usize = 2;
    /// Number of consecutive wins that a rival needs.
    const WINS: u32 = 3;
    /// Factor above or below the usual time at which a burst is unusual: the data's location has changed.
    const UNUSUAL: f64 = 1.6;
    /// Number of consecutive unusual bursts that indicate a change.
    const CHANGED: u32 = 2;

    /// Creates the choice for copies of `size` among the routines that use the caches and the ones allowed by `past`.
    /// It starts with `ahead`, until a rival has won.
    pub(super) fn new(size: Size, past: Past) -> Self {
        let mut choice = Self {
            size,
            past,
            present: RoutineKind::Ahead,
            next: 0,
            wins: 0,
            present_cost: None,
            quick_trials: 0,
            quiet: 0,
            usual: None,
            unusual: 0,
        };
        choice.schedule_quick_trials();
        choice
    }

    #[cfg(test)]
    pub(super) fn past(&self) -> Past {
        self.past
    }

    /// Returns the routine for bursts that are not timed.
    pub(super) fn present(&self) -> RoutineKind {
        self.present
    }

    /// Returns the routine for the next timed burst.
    pub(super) fn timed(&self) -> RoutineKind {
        match self.present_cost {
            Some(_) => self.rivals()[self.next].0,
            None => self.present,
        }
    }

    /// Abandons a trial without its second burst.
    pub(super) fn abandon(&mut self) {
        self.present_cost = None;
    }

    /// Records the time, per amount copied, of the burst copied by [`timed`](Self::timed). Returns the number of bursts
    /// until the next timed one: 1 means the following burst.
    pub(super) fn record(&mut self, cost: f64) -> u32 {
        match self.present_cost.take() {
            Some(present_cost) => {
                self.judge(cost, present_cost);
                if self.has_quick_trials() { Self::QUICK_TRIAL_INTERVAL } else { Self::TIMED }
            }
            None => {
                self.watch(cost);
                if self.has_quick_trials() || self.quiet == 0 {
                    self.quiet = Self::TRIAL / Self::TIMED - 1;
                    self.present_cost = Some(cost);
                    return 1;
                }
                self.quiet -= 1;
                Self::TIMED
            }
        }
    }

    /// Schedules quick trials of every rival after a change.
    fn schedule_quick_trials(&mut self) {
        self.quick_trials = Self::ROUNDS * self.rivals().len();
    }

    fn has_quick_trials(&self) -> bool {
        self.quick_trials > 0 || self.wins > 0
    }

    fn rivals(&self) -> &'static [Rival] {
        let all = rivals(self.present, self.size);
        let candidates = all.iter().take_while(|rival| self.past.allows(rival.0)).count();
        &all[..candidates]
    }

    /// Compares the rival's time `cost` with the present routine's time `present_cost`.
    fn judge(&mut self, cost: f64, present_cost: f64) {
        let Rival(kind, within) = self.rivals()[self.next];
        if cost >= within * present_cost {
            self.wins = 0;
            self.quick_trials = self.quick_trials.saturating_sub(1);
            self.next = (self.next + 1) % self.rivals().len();
            return;
        }
        self.wins += 1;
        if self.wins == Self::WINS {
            self.present = kind;
            (self.next, self.wins, self.usual, self.unusual) = (0, 0, None, 0);
            // The new routine has other rivals.
            self.schedule_quick_trials();
        }
    }

    /// Tracks the time of the present routine to detect a change of the data's location.
    fn watch(&mut self, cost: f64) {
        let usual = self.usual.unwrap_or(cost);
        if (usual / Self::UNUSUAL..=usual * Self::UNUSUAL).contains(&cost) {
            self.unusual = 0;
            self.usual = Some(usual + (cost - usual) / 8.0);
            return;
        }
        self.unusual += 1;
        if self.unusual == Self::CHANGED {
            self.unusual = 0;
            self.usual = Some(cost);
            self.schedule_quick_trials();
        }
    }
}

#[cfg(test)]
mod tests;
