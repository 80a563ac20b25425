//! Which routine a queue's bursts are copied by: a choice among those that can be better for their size, from what
//! bursts of that queue took. No clock in here: times come in, pauses come out.
//!
//! Two bursts that follow each other are compared, one by the present routine, one by a rival; that does not mind what
//! happened to the data's temperature since the last time. A rival that wins three times in a row takes over. As long
//! as nothing changes, that is one burst in 256; after a change of what the present routine takes, one in four.
//!
//! What was measured for the table below (two cores of a Zen 4, virtual; forwarding between virtqueues, TSC cycles a
//! packet, medians of runs that alternated):
//! * In the core's own caches `plain` is up to 12 % faster end to end, most for small packets. Elsewhere `ahead` is, up
//!   to 1.5 times. AVX-512 in the place of AVX2 made no difference that could be told from noise, for any routine.
//! * Past the caches saves the core time wherever the destination is not in its own, but then the guest reads its
//!   packet from memory. With the guest on a distant core `non-temporal` took 0.3 to 0.4 of the copy time of `ahead`
//!   at 1024 and 1518 bytes: 910 cycles became 620, 1380 became 800, and the guest's check of a packet 200 longer. At
//!   512 and 768 bytes, with a guest nearby and with cold data it took 0.55 to 0.8, and the guest paid what the core
//!   saved, or more. Hence the factor of a half, which is the sign of a real gain, and the least size.
//!   Two Zen 3 cores, always past the caches against never, core and guest together: 0.8 of the speed with the guest
//!   nearby, where the copy took 0.9 of the time; 1.03 at 1518 bytes with a distant one, where it took 0.65
//!   (docs/measuring.md). The guest's time is not seen here, so that the factor has to stand for it.
//! * The first copy of a packet, into a packet buffer that this core reads next, took twice as long past the caches,
//!   so that the same comparison rejects it.
//! * `rep movsb` was never better for packets (reference figures: hot, 1.0 to 1.5 times the time) and is not offered.
//! * `direct` could not be measured where the rest was. Elsewhere it was as good as `non-temporal` (cold, 668 against
//!   631 cycles for 1518 bytes) or up to 1.5 times better (a loop over cold memory, no reader), so it is a candidate.

/// The kinds of routine; the width of their vectors is settled by the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Ahead,
    NonTemporal,
    Direct,
}

/// Sizes of copies that have candidates of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Size {
    Small,
    Large,
}

impl Size {
    /// From this many bytes on average on, a copy may pay past the caches.
    const LARGE: u64 = 768;

    /// The size of `copies` copies of `bytes` bytes together.
    pub(super) fn of(bytes: u64, copies: usize) -> Self {
        if bytes < Self::LARGE * copies as u64 { Self::Small } else { Self::Large }
    }
}

/// Which routines that store past the caches are candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Past {
    /// None: whoever reads the copies is to find them in a cache.
    None,
    /// All but [`Kind::Direct`], for which the CPU lacks the instruction.
    NonTemporal,
    /// All.
    Direct,
}

impl Past {
    fn allows(self, kind: Kind) -> bool {
        match kind {
            Kind::Plain | Kind::Ahead => true,
            Kind::NonTemporal => self != Self::None,
            Kind::Direct => self == Self::Direct,
        }
    }
}

/// A routine that may be better than the present one: it is, when it takes less than this part of the present one's time.
#[derive(Clone, Copy, Debug)]
struct Rival(Kind, f64);

/// The candidates. Past the caches is only tried where `plain` has lost: what is in the core's own caches shall stay
/// there. They are the last of a list, [`Kind::Direct`] behind the other: where they are no candidates it ends before them.
const fn rivals(present: Kind, size: Size) -> &'static [Rival] {
    match (present, size) {
        (Kind::Plain, _) => &[Rival(Kind::Ahead, 0.95)],
        (Kind::Ahead, Size::Small) => &[Rival(Kind::Plain, 0.95)],
        (Kind::Ahead, Size::Large) => {
            &[Rival(Kind::Plain, 0.95), Rival(Kind::NonTemporal, 0.5), Rival(Kind::Direct, 0.5)]
        }
        // Back to the caches when hardly more than a third is saved.
        (Kind::NonTemporal, _) => &[Rival(Kind::Ahead, 1.7), Rival(Kind::Direct, 0.87)],
        (Kind::Direct, _) => &[Rival(Kind::Ahead, 1.7), Rival(Kind::NonTemporal, 0.87)],
    }
}

/// The choice for one queue and one size.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    size: Size,
    past: Past,
    present: Kind,
    /// Place of the next rival in the list.
    next: usize,
    /// How often in a row that rival has won.
    wins: u32,
    /// What the present routine took just now, when the rival's turn is next.
    to_beat: Option<f64>,
    /// Trials still to be made in quick succession.
    hurried: usize,
    /// Timed bursts until the next trial.
    quiet: u32,
    /// What the present routine usually takes; `None` before it has been timed.
    usual: Option<f64>,
    /// Timed bursts in a row that took something else.
    unusual: u32,
}

impl Choice {
    /// Bursts from one that is timed to the next.
    pub(super) const TIMED: u32 = 16;
    /// Bursts from one trial to the next, as long as nothing changes.
    const TRIAL: u32 = 256;
    /// The same, when something has changed or a rival has just won.
    const HURRIED: u32 = 4;
    /// How often each rival is then tried: a single pair of bursts may have been disturbed.
    const ROUNDS: usize = 2;
    /// Times in a row that a rival must win.
    const WINS: u32 = 3;
    /// A burst that takes so many times what is usual, or so many times less, is unusual: a change of temperature.
    const UNUSUAL: f64 = 1.6;
    /// Unusual bursts in a row that are no accident.
    const CHANGED: u32 = 2;

    /// The choice for copies of `size` among the routines through the caches and those of `past`: fetching ahead, until
    /// something else has won.
    pub(super) fn new(size: Size, past: Past) -> Self {
        let mut choice = Self {
            size,
            past,
            present: Kind::Ahead,
            next: 0,
            wins: 0,
            to_beat: None,
            hurried: 0,
            quiet: 0,
            usual: None,
            unusual: 0,
        };
        choice.hurry();
        choice
    }

    #[cfg(test)]
    pub(super) fn past(&self) -> Past {
        self.past
    }

    /// The routine for bursts that are not timed.
    pub(super) fn present(&self) -> Kind {
        self.present
    }

    /// The routine for the burst that is timed next.
    pub(super) fn timed(&self) -> Kind {
        match self.to_beat {
            Some(_) => self.rivals()[self.next].0,
            None => self.present,
        }
    }

    /// Forgets a trial whose second burst will not come.
    pub(super) fn abandon(&mut self) {
        self.to_beat = None;
    }

    /// Notes what the burst took that was copied by [`timed`](Self::timed), as time per amount copied. Returns after
    /// how many bursts the next one is to be timed: 1 is the very next.
    pub(super) fn record(&mut self, cost: f64) -> u32 {
        match self.to_beat.take() {
            Some(to_beat) => {
                self.judge(cost, to_beat);
                if self.is_hurried() { Self::HURRIED } else { Self::TIMED }
            }
            None => {
                self.watch(cost);
                if self.is_hurried() || self.quiet == 0 {
                    self.quiet = Self::TRIAL / Self::TIMED - 1;
                    self.to_beat = Some(cost);
                    return 1;
                }
                self.quiet -= 1;
                Self::TIMED
            }
        }
    }

    /// Something is new: tries every rival soon.
    fn hurry(&mut self) {
        self.hurried = Self::ROUNDS * self.rivals().len();
    }

    fn is_hurried(&self) -> bool {
        self.hurried > 0 || self.wins > 0
    }

    fn rivals(&self) -> &'static [Rival] {
        let all = rivals(self.present, self.size);
        let candidates = all.iter().take_while(|rival| self.past.allows(rival.0)).count();
        &all[..candidates]
    }

    /// The rival took `cost`, the present routine `to_beat`.
    fn judge(&mut self, cost: f64, to_beat: f64) {
        let Rival(kind, within) = self.rivals()[self.next];
        if cost >= within * to_beat {
            self.wins = 0;
            self.hurried = self.hurried.saturating_sub(1);
            self.next = (self.next + 1) % self.rivals().len();
            return;
        }
        self.wins += 1;
        if self.wins == Self::WINS {
            self.present = kind;
            (self.next, self.wins, self.usual, self.unusual) = (0, 0, None, 0);
            // The new one has rivals of its own.
            self.hurry();
        }
    }

    /// The present routine took `cost`: notices when that is another temperature.
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
            self.hurry();
        }
    }
}

#[cfg(test)]
mod tests;
