//! What a round costs a worker as a whole, when the core copies and when an engine does.
//!
//! What a queue's policy times are parts: the copy, its submission, its return. Who copies also decides what other parts
//! cost: an engine leaves the packet in another cache, and whoever reads its header next pays for that. So whole rounds
//! are timed now and then, as long as all their copies go the same way. What they take beyond the parts is charged to
//! that way.

use offcore_stats::tsc;

use super::policy::Average;
use super::stats::Way;

/// Rounds from the end of a survey to the next one.
const PAUSE: u32 = 512;
/// Rounds that go by after a change before a survey counts: packets are about that an engine has brought from elsewhere, or
/// an engine has not yet as many in flight as it will.
const SETTLED: [u32; 2] = [4, 16];
/// Copies that a survey sees: by the core, whose packets are done at once, and by an engine, which has some in flight.
const COPIES: [u64; 2] = [128, 1024];

/// The rounds of one worker.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pause: u32,
    /// Rounds in a row whose copies all went the same way, and which.
    settled: u32,
    way: Way,
    start: u64,
    /// Of the rounds of this survey: ticks, copies by the core and by engines, and what their parts should have taken.
    ticks: u64,
    copies: [u64; 2],
    expected: f32,
    /// Whether anything was submitted or returned in this round.
    worked: bool,
    /// What a copy takes beyond its parts.
    rest: [Average; 2],
}

impl Survey {
    /// A round begins.
    #[inline(always)]
    pub(super) fn begin(&mut self) {
        self.start = if self.pause == 0 { tsc::now() } else { 0 };
    }

    /// Whether rounds are being timed.
    #[inline(always)]
    pub(super) fn is_on(&self) -> bool {
        self.start != 0
    }

    /// Notes copies that went one way, and what they cost by what is known; `None` when that is not yet known.
    #[inline]
    pub(super) fn copied(&mut self, way: Way, copies: u32, expected: Option<f32>) {
        self.worked = true;
        self.copies[way as usize] += u64::from(copies);
        match expected {
            Some(ticks) => self.expected += ticks,
            None => self.give_up(),
        }
    }

    /// Notes that packets were returned in this round.
    #[inline(always)]
    pub(super) fn returned(&mut self) {
        self.worked = self.is_on();
    }

    /// A round ends; says whether [`Survey::note`] wants to know more about it.
    #[inline(always)]
    pub(super) fn end(&mut self) -> bool {
        self.pause = self.pause.saturating_sub(1);
        self.worked
    }

    /// A round that was timed has ended, with copies in flight or not; `chosen` is the way that is not just being tried.
    /// Returns how much dearer a copy is by an engine than its parts say, when there is something new to say.
    #[cold]
    pub(super) fn note(&mut self, in_flight: bool, chosen: Way) -> Option<f32> {
        self.worked = false;
        if self.pause > 0 {
            // Given up in this round: what a copy should cost was not known.
            return None;
        }
        let ticks = tsc::now().wrapping_sub(self.start);
        let way = match self.copies {
            // Nothing but returns: they belong to what was submitted before.
            [0, 0] => self.way,
            [0, _] => Way::Engine,
            // What waits for an engine is neither.
            [_, 0] if !in_flight => Way::Core,
            _ => {
                self.settled = 0;
                self.clear();
                return None;
            }
        };
        if way != self.way {
            (self.way, self.settled) = (way, 0);
        }
        self.settled += 1;
        if self.settled <= SETTLED[way as usize] {
            self.clear();
            return None;
        }
        self.ticks += ticks;
        let copies = self.copies[way as usize];
        if copies < COPIES[way as usize] {
            return None;
        }
        let beyond = (self.ticks as f32 - self.expected) / copies as f32;
        let rest = &mut self.rest[way as usize];
        if way == chosen {
            rest.follow(beyond);
            self.give_up();
        } else {
            rest.replace(beyond, false);
            self.clear();
        }
        let [core, engine] = self.rest.map(|rest| rest.value());
        (core > 0.0 && engine > 0.0).then_some(engine - core)
    }

    fn give_up(&mut self) {
        self.clear();
        self.pause = PAUSE;
    }

    fn clear(&mut self) {
        (self.ticks, self.copies, self.expected, self.worked) = (0, [0; 2], 0.0, false);
    }

    /// Something is tried for long: the next rounds are timed.
    pub(super) fn try_out(&mut self) {
        self.clear();
        (self.pause, self.settled) = (0, 0);
    }
}
