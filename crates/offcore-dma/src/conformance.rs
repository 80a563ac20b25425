//! Tests of the common behaviour of engines: one suite, run on each engine.
//!
//! [`conformance_suite!`](crate::conformance_suite) creates a test for each check of [`CHECKS`]. A check gets a
//! function that opens a channel with a given ring size, and a function that lets the engine make progress (a step, or
//! nothing if a thread or a device does the work). It panics with a description of the failure. Completions may come in
//! any order, unless the channel's capabilities exclude that, but none may be missing for 10 s.

mod content;
mod control;
mod ring;

use std::cell::Cell;
use std::time::{Duration, Instant};

use offcore_stats::SplitMix;

use crate::channel::{Channel, Completions, CopyOp, Failed, Token};

/// Opens a channel with room for this number of operations.
pub type Open<'a> = &'a dyn Fn(usize) -> Box<dyn Channel>;
/// Lets the engine make progress.
pub type Pump<'a> = &'a mut dyn FnMut();
/// A check.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    pub name: &'static str,
    /// Runs the check; panics if it fails.
    pub run: fn(Open<'_>, Pump<'_>),
}

/// Creates a module for each engine, with a test for each check: `conformance_suite! { engine => run }`. `run` is a
/// function of a [`Check`](crate::conformance::Check) that runs it on the engine; its path is resolved inside the
/// module.
#[macro_export]
macro_rules! conformance_suite {
    // Passes the list of checks, by module, to the rule `$rule`.
    (@ list $rule:ident $arguments:tt) => {
        $crate::conformance_suite! {
            @ $rule $arguments
            content: every_length_at_odd_offsets, every_alignment;
            ring: a_full_ring_takes_no_more, rings_wrap_in_bursts_of_every_length, each_token_comes_back_once,
                order_is_kept_unless_out_of_order, poll_appends_what_fits, channels_do_not_mix,
                ring_sizes_match_request;
            control: too_long_is_refused, statistics_are_exact, after_a_reset_nothing_lands,
                after_a_drop_nothing_lands, a_channel_moves_to_another_thread;
        }
    };
    (@ checks () $($module:ident: $($check:ident),+;)+) => {
        &[$($(Check { name: stringify!($check), run: $module::$check }),+),+]
    };
    (@ tests ($engine:ident, $run:expr) $($module:ident: $($check:ident),+;)+) => {
        mod $engine {
            fn run(name: &str) {
                let run: fn($crate::conformance::Check) = $run;
                run(*$crate::conformance::CHECKS.iter().find(|check| check.name == name).unwrap());
            }

            $($(
                #[test]
                fn $check() {
                    run(stringify!($check));
                }
            )+)+
        }
    };
    ($($engine:ident => $run:expr),+ $(,)?) => {
        $($crate::conformance_suite! { @ list tests ($engine, $run) })+
    };
}

/// Every check.
pub const CHECKS: &[Check] = crate::conformance_suite! { @ list checks () };

/// A channel under test and its reports.
struct Rig<'a> {
    channel: Box<dyn Channel>,
    pump: Pump<'a>,
    tokens: Vec<Token>,
    failed: Vec<Failed>,
}

impl<'a> Rig<'a> {
    fn new(channel: Box<dyn Channel>, pump: Pump<'a>) -> Self {
        Self { channel, pump, tokens: Vec::new(), failed: Vec::new() }
    }

    /// Lets the engine work and collects its reports, once. Returns their number.
    fn turn(&mut self) -> usize {
        (self.pump)();
        let mut completions = Completions::default();
        self.channel.poll(&mut completions);
        self.tokens.extend(&completions.tokens);
        self.failed.extend(completions.failed.iter().copied());
        completions.tokens.len() + completions.failed.len()
    }

    /// Lets the engine work until everything in flight has been reported.
    fn drain(&mut self) {
        let mut deadline = Deadline::new();
        while self.channel.in_flight() > 0 {
            if self.turn() > 0 {
                deadline = Deadline::new();
            }
            deadline.check(&*self.channel);
        }
    }

    /// Makes every copy and waits for all of them. At most `burst` copies are submitted at once.
    fn copy_all(&mut self, ops: &[CopyOp], burst: usize) {
        let mut deadline = Deadline::new();
        let mut at = 0;
        while at < ops.len() {
            let offered = &ops[at..(at + burst).min(ops.len())];
            // SAFETY: every check's buffers outlive its rig, and are only accessed while nothing is in flight.
            let accepted = unsafe { self.channel.copy(offered) };
            self.channel.submit();
            at += accepted;
            if self.turn() + accepted > 0 {
                deadline = Deadline::new();
            }
            deadline.check(&*self.channel);
        }
        self.drain();
    }

    /// Asserts that every operation succeeded, and that the reported tokens equal `expected`, including repetitions.
    /// Then forgets the reports.
    fn expect_tokens(&mut self, expected: impl IntoIterator<Item = Token>) {
        assert!(self.failed.is_empty(), "operations failed: {:?}", self.failed);
        let mut expected: Vec<Token> = expected.into_iter().collect();
        if !self.channel.info().capabilities.out_of_order {
            assert_eq!(self.tokens, expected, "tokens of a channel that promises order");
        }
        expected.sort_unstable();
        self.tokens.sort_unstable();
        assert_eq!(self.tokens, expected, "tokens that came back");
        self.tokens.clear();
    }
}

/// Number of polls after which a thread yields its core. On a machine with fewer cores than threads, the engine needs
/// the core from time to time. On a busy machine, a yielded core is only available again after milliseconds.
const POLLS_TO_YIELD: u32 = 1024;

/// A deadline: ten seconds without progress are a failure.
struct Deadline {
    at: Instant,
    polls: Cell<u32>,
}

impl Deadline {
    fn new() -> Self {
        Self { at: Instant::now() + Duration::from_secs(10), polls: Cell::new(0) }
    }

    fn check(&self, channel: &dyn Channel) {
        assert!(
            Instant::now() < self.at,
            "{}: no progress for 10 s, {} operations in flight",
            channel.info().name,
            channel.in_flight()
        );
        self.polls.set(self.polls.get() + 1);
        if self.polls.get().is_multiple_of(POLLS_TO_YIELD) {
            std::thread::yield_now();
        }
    }
}

/// Memory for destinations, surrounded by guard bytes, and its expected contents.
struct Canvas {
    memory: Vec<u8>,
    expected: Vec<u8>,
    used: usize,
}

/// Minimum number of guard bytes on either side of a destination.
const GUARD: usize = 64;

impl Canvas {
    fn new(size: usize) -> Self {
        let mut random = SplitMix::new(size as u64);
        let memory: Vec<u8> = (0..size).map(|_| random.next().to_le_bytes()[0]).collect();
        Self { expected: memory.clone(), memory, used: 0 }
    }

    /// Allocates `len` bytes at `offset` past a multiple of 64, with `content` as the expected contents.
    fn place(&mut self, offset: usize, content: impl Iterator<Item = u8>) -> (*mut u8, u32) {
        let base = self.memory.as_mut_ptr();
        let aligned = (base.addr() + self.used + GUARD).next_multiple_of(64) - base.addr();
        let start = aligned + offset % 64;
        let mut end = start;
        for (place, byte) in self.expected[start..].iter_mut().zip(content) {
            *place = byte;
            end += 1;
        }
        self.used = end + GUARD;
        assert!(self.used <= self.memory.len(), "the canvas is too small");
        (base.wrapping_add(start), u32::try_from(end - start).expect("destinations are short"))
    }

    /// Returns a copy of `content` to a new place.
    fn copy(&mut self, offset: usize, content: &[u8], token: Token) -> CopyOp {
        let (dst, len) = self.place(offset, content.iter().copied());
        CopyOp { src: content.as_ptr(), dst, len, token }
    }

    /// Asserts that exactly the requested bytes have been written, and starts over.
    fn check(&mut self, what: &str) {
        if self.memory != self.expected {
            let differs =
                self.memory.iter().zip(&self.expected).position(|(found, expected)| found != expected);
            let at = differs.unwrap_or_default();
            let (found, expected) = (self.memory[at], self.expected[at]);
            panic!("{what}: byte {at} of the canvas is {found:#04x}, expected {expected:#04x}");
        }
        self.used = 0;
    }
}

/// Returns bytes to copy from.
fn source(len: usize) -> Vec<u8> {
    let mut random = SplitMix::new(7);
    (0..len).map(|_| random.next().to_le_bytes()[0]).collect()
}
