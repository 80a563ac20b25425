//! Finds the lowest pattern in a payload with automata of the crate `aho-corasick`.
//!
//! Choice of the automaton: a DFA needs one load per byte of payload, but 4 bytes per state and byte class, or 1 KiB
//! per state if the patterns use all byte values. 5,000 patterns of 8 to 32 random bytes take 93 MiB, 20,000 take 369
//! MiB. A DFA is the fastest, so sets get one if it is at most [`DFA_LIMIT`] long. Others get the contiguous NFA, which
//! has about 50 bytes per state: 65,536 such patterns take 54 MiB.
//!
//! A walk waits for memory at nearly every byte, because each load's address depends on the previous load. Therefore
//! several payloads are walked interleaved, which is several times faster if tables exceed the core's caches. For up to
//! 64 patterns the crate's packed search (vector instructions) first finds the payloads without a match. A payload with
//! a match is then read twice, which is worthwhile while matches are rare.
//!
//! The matches at a state are the suffixes of its longest match. Therefore the lowest number among them is looked up by
//! the longest match, however many there are.

use std::collections::HashSet;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::{contiguous, noncontiguous};
use aho_corasick::packed::Searcher;
use aho_corasick::{Anchored, StartKind, dfa};
use arrayvec::ArrayVec;

use crate::patterns::Patterns;

/// Maximum size of a DFA in bytes; larger sets get an NFA.
pub const DFA_LIMIT: usize = 512 << 20;
/// Payloads walked interleaved.
const INTERLEAVE: usize = 8;
/// No pattern. Plus one it is 0, the result for no match.
const NONE: u32 = u32::MAX;

/// automaton of {count} patterns, {bytes} bytes: {reason}; use fewer or shorter patterns
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub struct MatcherError {
    pub count: usize,
    pub bytes: usize,
    pub reason: String,
}

/// Finds the lowest pattern in a payload.
pub struct Matcher {
    automaton: Tables,
    /// Detects faster than the automaton whether any pattern occurs. Only used with few patterns.
    filter: Option<Searcher>,
    /// For each pattern of the automaton: the lowest number among its suffixes.
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
    /// Builds a matcher. 5,000 patterns of 8 to 32 random bytes take 0.3 s, 65,536 take one second. The [module](self)
    /// documents its memory. Building it takes a second NFA.
    ///
    /// # Errors
    /// The patterns exceed the automaton's limits.
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
        // Without prefilters, which would make the start state special.
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

    /// Returns whether the patterns were few enough for a DFA.
    pub fn is_dfa(&self) -> bool {
        matches!(self.automaton, Tables::Dfa(_))
    }

    /// Returns the size of the tables in bytes.
    pub fn memory(&self) -> usize {
        let automaton = match &self.automaton {
            Tables::Dfa(dfa) => dfa.memory_usage(),
            Tables::Nfa(nfa) => nfa.memory_usage(),
        };
        automaton + self.filter.as_ref().map_or(0, Searcher::memory_usage) + size_of_val(&*self.lowest)
    }

    /// Returns one plus the number of the lowest pattern in the payload whose consecutive pieces are `parts`, or 0
    /// without a match.
    #[inline]
    pub fn result<'a>(&self, parts: impl Iterator<Item = &'a [u8]>) -> u32 {
        match &self.automaton {
            Tables::Dfa(dfa) => self.walk(dfa, parts),
            Tables::Nfa(nfa) => self.walk(nfa, parts),
        }
    }

    /// Writes the [`result`](Self::result) of each payload to its reference.
    #[inline]
    pub fn results<'a>(&self, payloads: impl Iterator<Item = (&'a [u8], &'a mut u32)>) {
        // The filter settles the payloads without a match.
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
        let mut walks: ArrayVec<Walk<'a>, INTERLEAVE> = ArrayVec::new();
        loop {
            let free = walks.remaining_capacity();
            let fresh = payloads.by_ref().take(free);
            walks.extend(fresh.map(|(rest, result)| Walk { state: start, lowest: NONE, rest, result }));
            // All walks advance by the shortest remainder.
            let Some(steps) = walks.iter().map(|walk| walk.rest.len()).min() else { return };
            match <&mut [Walk<'a>; INTERLEAVE]>::try_from(&mut *walks) {
                Ok(walks) => self.step_all(automaton, walks, steps),
                Err(_) => self.step_some(automaton, &mut walks, steps),
            }
            walks.retain(|walk| {
                if walk.rest.is_empty() {
                    *walk.result = walk.lowest.wrapping_add(1);
                }
                !walk.rest.is_empty()
            });
        }
    }

    /// Advances every walk by `steps` bytes, with the states in registers.
    #[allow(
        clippy::needless_range_loop,
        reason = "the index is one into every head, not into the list of heads"
    )]
    fn step_all<A: Automaton>(&self, automaton: &A, walks: &mut [Walk<'_>; INTERLEAVE], steps: usize) {
        let mut states = walks.each_ref().map(|walk| walk.state);
        let heads = walks.each_mut().map(|walk| walk.take(steps));
        for at in 0..steps {
            for walk in 0..INTERLEAVE {
                states[walk] = automaton.next_state(Anchored::No, states[walk], heads[walk][at]);
                if automaton.is_special(states[walk]) {
                    let lowest = &mut walks[walk].lowest;
                    *lowest = (*lowest).min(self.lowest_at(automaton, states[walk]));
                }
            }
        }
        walks.iter_mut().zip(states).for_each(|(walk, state)| walk.state = state);
    }

    /// Like `step_all`, for fewer walks.
    fn step_some<A: Automaton>(&self, automaton: &A, walks: &mut [Walk<'_>], steps: usize) {
        for at in 0..steps {
            for walk in &mut *walks {
                walk.state = automaton.next_state(Anchored::No, walk.state, walk.rest[at]);
                if automaton.is_special(walk.state) {
                    walk.lowest = walk.lowest.min(self.lowest_at(automaton, walk.state));
                }
            }
        }
        walks.iter_mut().for_each(|walk| walk.rest = &walk.rest[steps..]);
    }

    /// Returns the lowest number of the patterns that end at a state.
    #[cold]
    fn lowest_at<A: Automaton>(&self, automaton: &A, state: StateID) -> u32 {
        // The state's own pattern is first, followed by the patterns of its failure links, so the first is the longest.
        if automaton.is_match(state) {
            self.lowest[automaton.match_pattern(state, 0).as_usize()]
        } else {
            NONE
        }
    }
}

/// A walk through a payload.
struct Walk<'a> {
    state: StateID,
    lowest: u32,
    rest: &'a [u8],
    result: &'a mut u32,
}

impl<'a> Walk<'a> {
    /// Takes the next `steps` bytes, which must exist.
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

/// Returns, for each of the distinct `patterns`, the lowest of the `numbers` of its suffixes, including itself.
fn lowest_ends(automaton: &impl Automaton, patterns: &[&[u8]], numbers: &[u32]) -> Box<[u32]> {
    let lowest_end = |pattern: &&[u8]| {
        let end = pattern
            .iter()
            .fold(start(automaton), |state, byte| automaton.next_state(Anchored::No, state, *byte));
        // A pattern has at most as many suffixes as bytes.
        let ends = (0..automaton.match_len(end)).map(|index| automaton.match_pattern(end, index));
        ends.map(|pattern| numbers[pattern.as_usize()]).min().unwrap_or(NONE)
    };
    patterns.iter().map(lowest_end).collect()
}

/// Returns the size of the patterns' DFA in bytes: for each state a row of 4 bytes per byte class, padded to a power of
/// two. Bytes that no pattern distinguishes are in one class.
fn dfa_size(patterns: &Patterns) -> usize {
    let mut used = [false; 256];
    patterns.iter().flatten().for_each(|byte| used[usize::from(*byte)] = true);
    let classes = 1 + used.windows(2).filter(|pair| pair[0] || pair[1]).count();
    patterns.states() * classes.next_power_of_two() * size_of::<StateID>()
}

#[cfg(test)]
mod tests;
