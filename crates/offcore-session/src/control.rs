//! What an application's processes share with the stack beside sessions: which of them have something to be looked at.
//!
//! Two pages are shared. [`Control`] is written by both sides. [`Processes`] is written by the stack, and an application
//! can map it for reading only: it says which of the application's processes live.
//!
//! **Marks.** An application marks a session after it has written, read, or changed what it wants. A mark is a bit, and
//! no place in a ring: a process that is killed between two instructions blocks nobody. The stack takes all marks at
//! once. It sleeps only after it has stored `asleep`, executed a full fence and found no mark; who marks executes a full
//! fence between the mark and the look at `asleep`.

use core::net::Ipv4Addr;

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Sessions of an application, at most.
#[cfg(not(all(loom, test)))]
pub const SESSIONS: usize = 1 << 16;
/// The same for models, which look at every word.
#[cfg(all(loom, test))]
pub const SESSIONS: usize = 64;
/// Processes of an application, at most.
pub const PROCESSES: usize = 1 << 10;
/// The maximum number of broadcast addresses that an application knows.
pub const BROADCASTS: usize = 64;
const WORDS: usize = SESSIONS / 64;

/// The page, or rather pages, that both sides write.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Control {
    /// The stack sleeps: who marks is to wake it.
    asleep: Line,
    /// Somebody has woken it.
    kicked: Line,
    /// Something has happened that the kernel shows, on a socket.
    look: Line,
    /// A bit for each word of `marks` that is not 0.
    summary: [AtomicU64; WORDS.div_ceil(64)],
    marks: [AtomicU64; WORDS],
}

/// A word with a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line(AtomicU32);

#[cfg(test)]
impl Control {
    pub(crate) fn new() -> Self {
        let line = || Line(AtomicU32::new(0));
        let word = |_| AtomicU64::new(0);
        let (summary, marks) = (std::array::from_fn(word), std::array::from_fn(word));
        Self { asleep: line(), kicked: line(), look: line(), summary, marks }
    }
}

impl Control {
    /// The application marks session `number`; then it is to [`ring`](Self::ring).
    #[inline]
    pub fn mark(&self, number: u32) {
        let number = number as usize % SESSIONS;
        let word = number / 64;
        self.marks[word].fetch_or(1 << (number % 64), Ordering::AcqRel);
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// The application has sent a message, or closed a descriptor; then it is to [`ring`](Self::ring).
    #[inline]
    pub fn look(&self) {
        self.look.0.store(1, Ordering::Release);
    }

    /// After marks. `true`: the stack sleeps, and the caller is the one to wake it by the event.
    #[inline]
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.0.load(Ordering::Relaxed) != 0 && self.kicked.0.swap(1, Ordering::AcqRel) == 0
    }

    /// Whether there may be marks.
    #[inline]
    pub fn has_marks(&self) -> bool {
        self.summary.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// The stack takes marks: `each` is called with the number of each marked session, which is below [`SESSIONS`]. A call ends
    /// after `most` marks, or up to 63 more; a word without marks counts as one, because an application can claim that it has
    /// some. The next call continues where this one has ended: `from` is for that, and 0 at first.
    #[inline]
    pub fn take_marks(&self, from: &mut usize, most: usize, mut each: impl FnMut(u32)) {
        let mut taken = 0;
        // The word of the summary that it begins in has others before, which are the last ones.
        for _ in 0..=self.summary.len() {
            let first = *from % WORDS;
            let summary = &self.summary[first / 64];
            let mine = u64::MAX << (first % 64);
            let mut words = summary.load(Ordering::Relaxed) & mine;
            if words != 0 {
                words = summary.fetch_and(!mine, Ordering::AcqRel) & mine;
            }
            while words != 0 {
                let word = first / 64 * 64 + words.trailing_zeros() as usize;
                if taken >= most {
                    *from = word;
                    summary.fetch_or(words, Ordering::AcqRel);
                    return;
                }
                words &= words - 1;
                let mut bits = self.marks[word].swap(0, Ordering::AcqRel);
                taken += usize::from(bits == 0);
                while bits != 0 {
                    each((word * 64) as u32 + bits.trailing_zeros());
                    bits &= bits - 1;
                    taken += 1;
                }
            }
            *from = (first / 64 + 1) * 64;
        }
    }

    /// Whether the stack is to look at its sockets; it is told once.
    #[inline]
    pub fn take_look(&self) -> bool {
        self.look.0.load(Ordering::Relaxed) != 0 && self.look.0.swap(0, Ordering::AcqRel) != 0
    }

    /// The stack is going to sleep. `true`: there is something to do after all.
    pub fn arm(&self) -> bool {
        self.kicked.0.store(0, Ordering::Relaxed);
        self.asleep.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.look.0.load(Ordering::Relaxed) != 0 || self.has_marks()
    }

    /// The stack is awake.
    pub fn disarm(&self) {
        self.asleep.0.store(0, Ordering::Relaxed);
    }
}

/// Which of an application's processes live. The stack gives a process a number and a generation; the entry of that number
/// is the generation while it lives. The page also has the broadcast addresses of the stack's IPv4 networks: a send to one
/// needs `SO_BROADCAST`.
#[derive(Debug)]
#[repr(C)]
pub struct Processes {
    generations: [AtomicU32; PROCESSES],
    /// The first 0 ends the list.
    broadcasts: [AtomicU32; BROADCASTS],
}

impl Processes {
    /// The stack: process `number` has begun, or (with 0) is gone.
    pub fn set(&self, number: usize, generation: u32) {
        self.generations[number % PROCESSES].store(generation, Ordering::Release);
    }

    /// The stack stores the broadcast addresses of its networks, the first [`BROADCASTS`] of them.
    pub fn set_broadcasts(&self, addresses: impl Iterator<Item = Ipv4Addr>) {
        let addresses = addresses.map(Ipv4Addr::to_bits).chain(core::iter::repeat(0));
        for (word, address) in self.broadcasts.iter().zip(addresses) {
            word.store(address, Ordering::Relaxed);
        }
    }

    /// Whether an address is the broadcast address of a network of the stack.
    pub fn is_broadcast(&self, address: Ipv4Addr) -> bool {
        let words = self.broadcasts.iter().map(|word| word.load(Ordering::Relaxed));
        words.take_while(|word| *word != 0).any(|word| word == address.to_bits())
    }

    /// Whether the holder of a lock lives. The stack does, and has a lock for some instructions only.
    pub fn lives(&self, owner: Owner) -> bool {
        owner == Owner::STACK
            || self.generations[owner.number() % PROCESSES].load(Ordering::Acquire) == owner.generation()
    }
}

/// A process of an application, as it stands in a lock: number and generation; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u32);

const NUMBER_BITS: u32 = PROCESSES.trailing_zeros();

impl Owner {
    /// Generations are from 1 to this; then 1 comes again. The lowest bit of a lock says that somebody waits.
    pub const GENERATIONS: u32 = (1 << (31 - NUMBER_BITS)) - 1;

    /// The stack: no process has this number.
    pub const STACK: Self = Self(1 << NUMBER_BITS | (PROCESSES as u32 - 1));

    /// Process `number` of that generation; `None` where either is out of range.
    pub fn new(number: usize, generation: u32) -> Option<Self> {
        let in_range = number < PROCESSES && (1..=Self::GENERATIONS).contains(&generation);
        in_range.then_some(Self(generation << NUMBER_BITS | number as u32))
    }

    /// The one whose word that is; `None` for 0.
    pub fn from_word(word: u32) -> Option<Self> {
        (word >> NUMBER_BITS != 0).then_some(Self(word))
    }

    /// As a word of 31 bits.
    pub fn word(self) -> u32 {
        self.0
    }

    fn number(self) -> usize {
        self.0 as usize % PROCESSES
    }

    fn generation(self) -> u32 {
        self.0 >> NUMBER_BITS
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn claimed_marks_end_a_call() {
        let (control, mut from) = (Control::new(), 0);
        // As a hostile application does.
        control.summary.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        for call in 1..=5 {
            control.take_marks(&mut from, 100, |_| panic!("there is no mark"));
            assert_eq!(from, 100 * call);
        }
    }

    fn taken(control: &Control, from: &mut usize, most: usize) -> Vec<u32> {
        let mut taken = Vec::new();
        control.take_marks(from, most, |number| taken.push(number));
        taken
    }

    /// Wherever a call begins, also beyond the words: a caller's number is not checked.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn every_mark_is_found() {
        let control = Control::new();
        for number in 0..SESSIONS as u32 {
            control.mark(number);
            assert!(control.has_marks());
            let mut from = number as usize * 7;
            assert_eq!(taken(&control, &mut from, usize::MAX), [number]);
            assert!(!control.has_marks());
        }
    }

    /// Marks in words at the edges of the summary's words, from every start, some at a time: each is taken once, and the summary
    /// has no bit left.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn every_set_of_marks_is_taken_once() {
        let control = Control::new();
        let last = SESSIONS as u32 - 1;
        let numbers = [0, 1, 63, 64, 4095, 4096, 8191, last];
        for set in 0..1_u32 << numbers.len() {
            let marked =
                || numbers.iter().enumerate().filter(|(bit, _)| set >> bit & 1 != 0).map(|(_, n)| *n);
            for (start, most) in [(0, 1), (1, 2), (63, 1), (64, usize::MAX), (1023, 3), (usize::MAX, 1)] {
                marked().for_each(|number| control.mark(number));
                let (mut from, mut found) = (start, Vec::new());
                for _ in 0..=numbers.len() {
                    found.extend(taken(&control, &mut from, most));
                }
                found.sort_unstable();
                assert!(found.into_iter().eq(marked()), "{set:#b} from {start}");
                assert!(control.summary.iter().all(|word| word.load(Ordering::Relaxed) == 0));
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn every_number_of_an_owner_reads_back() {
        for number in 0..=PROCESSES {
            for generation in [0, 1, 2, Owner::GENERATIONS - 1, Owner::GENERATIONS, Owner::GENERATIONS + 1] {
                let owner = Owner::new(number, generation);
                let in_range = number < PROCESSES && (1..=Owner::GENERATIONS).contains(&generation);
                assert_eq!(owner.is_some(), in_range);
                let Some(owner) = owner else { continue };
                assert_eq!((owner.number(), owner.generation()), (number, generation));
                assert_eq!(Owner::from_word(owner.word()), Some(owner));
                assert!(owner.word() != 0 && owner.word() >> 31 == 0, "a lock has one more bit");
            }
        }
    }
}
