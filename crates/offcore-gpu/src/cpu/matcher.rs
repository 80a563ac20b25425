//! The lowest pattern that occurs in a payload, by the automata of the crate `aho-corasick`.
//!
//! Which automaton: a DFA takes one load for each byte of payload, but 4 bytes for each state and class of bytes: 1 KiB
//! a state where patterns hold all byte values. 5,000 patterns of 8 to 32 random bytes take 93 MiB, 20,000 take 369 MiB.
//! It is the fastest as long as it can be had, so sets whose DFA is at most [`DFA_LIMIT`] long get one. Others get the
//! contiguous NFA, which has some 50 bytes a state: 65,536 such patterns take 54 MiB.
//!
//! A walk waits for memory at nearly every byte, since the next load's address is the last one's content, so several
//! payloads are walked in turn: the waits of one go on while the others are walked, which is several times faster where
//! tables are larger than the core's caches. Of up to 64 patterns, the crate's packed search (vector instructions) tells
//! first which payloads have any; the others are done. Payloads that have one are gone over twice then, which is right
//! as long as they are few.
//!
//! What matches at a state is told by the longest pattern that ends there: all others that do are its ends. So the
//! lowest number among them is looked up by the longest one's, however many match.

use std::collections::HashSet;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::{contiguous, noncontiguous};
use aho_corasick::packed::Searcher;
use aho_corasick::{Anchored, StartKind, dfa};
use arrayvec::ArrayVec;

use crate::patterns::Patterns;

/// Bytes of the largest DFA that is built; larger sets of patterns get an NFA.
pub const DFA_LIMIT: usize = 512 << 20;
/// Payloads that are walked in turn.
const LANES: usize = 8;
/// No pattern: one more is 0, the result that says so.
const NONE: u32 = u32::MAX;

/// No automaton can be made of the patterns.
#[derive(Debug, thiserror::Error)]
#[error("automaton of {count} patterns, {bytes} bytes: {reason}; use fewer or shorter patterns")]
pub struct MatcherError {
    /// Number of patterns.
    pub count: usize,
    /// Their bytes.
    pub bytes: usize,
    /// What the automaton's builder says.
    pub reason: String,
}

/// Finds the lowest pattern that occurs in a payload.
pub struct Matcher {
    automaton: Tables,
    /// Says whether any pattern occurs, faster than the automaton, if there are few.
    filter: Option<Searcher>,
    /// By the automaton's pattern: the lowest number of one that ends where this one does.
    lowest: Box<[u32]>,
}

enum Tables {
    Dfa(dfa::DFA),
    Nfa(contiguous::NFA),
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("dfa", &self.is_dfa())
            .field("filter", &self.filter.is_some())
            .field("memory", &self.memory())
            .finish_non_exhaustive()
    }
}

impl Matcher {
    /// A matcher of `patterns`. For 5,000 of 8 to 32 random bytes it takes 0.3 s to build, for 65,536 a second; its
    /// memory is said in the [module's text](self), and that of a second NFA is used while it is built.
    ///
    /// # Errors
    /// More or longer patterns than the automaton's tables can have.
    pub fn new(patterns: &Patterns) -> Result<Self, MatcherError> {
        Self::with_limit(patterns, DFA_LIMIT)
    }

    fn with_limit(patterns: &Patterns, dfa_limit: usize) -> Result<Self, MatcherError> {
        let failed = |error: aho_corasick::BuildError| MatcherError {
            count: patterns.len(),
            bytes: patterns.total_len(),
            reason: error.to_string(),
        };
        let mut seen = HashSet::new();
        let (numbers, distinct): (Vec<u32>, Vec<&[u8]>) =
            (0..).zip(patterns.iter()).filter(|(_, pattern)| seen.insert(*pattern)).unzip();
        // Without prefilters, which make the start state one that has to be looked at.
        let nfa = noncontiguous::Builder::new().prefilter(false).build(&distinct).map_err(failed)?;
        let lowest = lowest_ends(&nfa, &distinct, &numbers);
        let automaton = if dfa_size(patterns) <= dfa_limit {
            let mut builder = dfa::Builder::new();
            builder.prefilter(false).start_kind(StartKind::Unanchored);
            Tables::Dfa(builder.build_from_noncontiguous(&nfa).map_err(failed)?)
        } else {
            let mut builder = contiguous::Builder::new();
            Tables::Nfa(builder.prefilter(false).build_from_noncontiguous(&nfa).map_err(failed)?)
        };
        Ok(Self { automaton, filter: Searcher::new(&distinct), lowest })
    }

    /// Whether the patterns were few enough for a DFA.
    pub fn is_dfa(&self) -> bool {
        matches!(self.automaton, Tables::Dfa(_))
    }

    /// Bytes of the tables.
    pub fn memory(&self) -> usize {
        let automaton = match &self.automaton {
            Tables::Dfa(dfa) => dfa.memory_usage(),
            Tables::Nfa(nfa) => nfa.memory_usage(),
        };
        automaton + self.filter.as_ref().map_or(0, Searcher::memory_usage) + size_of_val(&*self.lowest)
    }

    /// One more than the number of the lowest pattern in the payload that `parts` are, one after the other; 0 if there
    /// is none.
    #[inline]
    pub fn result<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        match &self.automaton {
            Tables::Dfa(dfa) => self.walk(dfa, parts),
            Tables::Nfa(nfa) => self.walk(nfa, parts),
        }
    }

    /// [`result`](Self::result) of many payloads, each written to the number behind it.
    #[inline]
    pub fn results<'a>(&self, payloads: impl Iterator<Item = (&'a [u8], &'a mut u32)>) {
        // Those that the filter finds nothing in are done; without a filter, none is.
        let left = payloads.filter_map(|(payload, result)| {
            *result = 0;
            let done = self.filter.as_ref().is_some_and(|filter| filter.find(payload).is_none());
            (!done).then_some((payload, result))
        });
        match &self.automaton {
            Tables::Dfa(dfa) => self.walk_in_turn(dfa, left),
            Tables::Nfa(nfa) => self.walk_in_turn(nfa, left),
        }
    }

    fn walk<'a, A: Automaton>(&self, automaton: &A, parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        let (mut state, mut lowest) = (start(automaton), NONE);
        for part in parts {
            for byte in part {
                state = automaton.next_state(Anchored::No, state, *byte);
                if automaton.is_special(state) {
                    lowest = lowest.min(self.lowest_at(automaton, state));
                }
            }
        }
        lowest.wrapping_add(1)
    }

    fn walk_in_turn<'a, A: Automaton>(
        &self,
        automaton: &A,
        mut payloads: impl Iterator<Item = (&'a [u8], &'a mut u32)>,
    ) {
        let start = start(automaton);
        let mut lanes: ArrayVec<Lane<'a>, LANES> = ArrayVec::new();
        loop {
            let free = lanes.remaining_capacity();
            let fresh = payloads.by_ref().take(free);
            lanes.extend(fresh.map(|(rest, result)| Lane { state: start, lowest: NONE, rest, result }));
            // All go on as far as the one with the least left.
            let Some(steps) = lanes.iter().map(|lane| lane.rest.len()).min() else { return };
            match <&mut [Lane<'a>; LANES]>::try_from(&mut *lanes) {
                Ok(lanes) => self.step_all(automaton, lanes, steps),
                Err(_) => self.step_some(automaton, &mut lanes, steps),
            }
            lanes.retain(|lane| {
                if lane.rest.is_empty() {
                    *lane.result = lane.lowest.wrapping_add(1);
                }
                !lane.rest.is_empty()
            });
        }
    }

    /// `steps` bytes of every lane, their states in registers.
    #[allow(
        clippy::needless_range_loop,
        reason = "the index is one into every head, not into the list of heads"
    )]
    fn step_all<A: Automaton>(&self, automaton: &A, lanes: &mut [Lane<'_>; LANES], steps: usize) {
        let mut states = lanes.each_ref().map(|lane| lane.state);
        let heads = lanes.each_mut().map(|lane| lane.take(steps));
        for at in 0..steps {
            for lane in 0..LANES {
                states[lane] = automaton.next_state(Anchored::No, states[lane], heads[lane][at]);
                if automaton.is_special(states[lane]) {
                    let lowest = &mut lanes[lane].lowest;
                    *lowest = (*lowest).min(self.lowest_at(automaton, states[lane]));
                }
            }
        }
        lanes.iter_mut().zip(states).for_each(|(lane, state)| lane.state = state);
    }

    /// The same where fewer lanes are left.
    fn step_some<A: Automaton>(&self, automaton: &A, lanes: &mut [Lane<'_>], steps: usize) {
        for at in 0..steps {
            for lane in &mut *lanes {
                lane.state = automaton.next_state(Anchored::No, lane.state, lane.rest[at]);
                if automaton.is_special(lane.state) {
                    lane.lowest = lane.lowest.min(self.lowest_at(automaton, lane.state));
                }
            }
        }
        lanes.iter_mut().for_each(|lane| lane.rest = &lane.rest[steps..]);
    }

    /// The lowest number of those patterns that end at a state.
    #[cold]
    fn lowest_at<A: Automaton>(&self, automaton: &A, state: StateID) -> u32 {
        // Its own pattern comes first, then those of its failure links: the longest is the first.
        if automaton.is_match(state) {
            self.lowest[automaton.match_pattern(state, 0).as_usize()]
        } else {
            NONE
        }
    }
}

/// A payload that is walked: where its walk is, and what it found.
struct Lane<'a> {
    state: StateID,
    lowest: u32,
    rest: &'a [u8],
    result: &'a mut u32,
}

impl<'a> Lane<'a> {
    /// The next `steps` bytes, which there are.
    fn take(&mut self, steps: usize) -> &'a [u8] {
        let (head, rest) = self.rest.split_at(steps);
        self.rest = rest;
        head
    }
}

#[inline(always)]
fn start<A: Automaton>(automaton: &A) -> StateID {
    automaton.start_state(Anchored::No).expect("the automaton was built for unanchored walks")
}

/// For each of `patterns`, all different, the lowest of the `numbers` of those that are its end, itself included.
fn lowest_ends(automaton: &impl Automaton, patterns: &[&[u8]], numbers: &[u32]) -> Box<[u32]> {
    let lowest_end = |pattern: &&[u8]| {
        let end = pattern
            .iter()
            .fold(start(automaton), |state, byte| automaton.next_state(Anchored::No, state, *byte));
        // At most as many as the pattern has bytes.
        let ends = (0..automaton.match_len(end)).map(|index| automaton.match_pattern(end, index));
        ends.map(|pattern| numbers[pattern.as_usize()]).min().unwrap_or(NONE)
    };
    patterns.iter().map(lowest_end).collect()
}

/// Bytes of the patterns' DFA: a row of 4 bytes for each class of bytes, their number rounded up to a power of two, for
/// each state. Bytes between which no pattern tells are of one class.
fn dfa_size(patterns: &Patterns) -> usize {
    let mut used = [false; 256];
    patterns.iter().flatten().for_each(|byte| used[usize::from(*byte)] = true);
    let classes = 1 + used.windows(2).filter(|pair| pair[0] || pair[1]).count();
    patterns.states() * classes.next_power_of_two() * size_of::<StateID>()
}

#[cfg(test)]
mod tests;
