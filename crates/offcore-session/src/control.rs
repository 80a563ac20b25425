//! State that an application's processes share with the stack in addition to sessions: marks for sessions that need
//! attention.
//!
//! Two pages are shared. [`Control`] is written by both sides. [`Processes`] is written by the stack, and an
//! application can only map it for reading. It says which of the application's processes are alive, and whether the
//! stack has ended.
//!
//! **Marks.** An application marks a session after it has written, read, or changed its wishes. A mark is a bit and not
//! an entry in a ring, so a process that is killed between two instructions does not block others. The stack takes all
//! marks at once. It sleeps only after it has stored `asleep`, executed a full fence and found no mark. An application
//! executes a full fence between setting a mark and loading `asleep`.

use core::net::Ipv4Addr;

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Maximum number of sessions of an application.
#[cfg(not(all(loom, test)))]
pub const SESSIONS: usize = 1 << 16;
/// A smaller maximum for models, which check every word.
#[cfg(all(loom, test))]
pub const SESSIONS: usize = 64;
/// Maximum number of processes of an application.
pub const PROCESSES: usize = 1 << 10;
/// Maximum number of broadcast addresses that an application knows.
pub const BROADCASTS: usize = 64;
const WORDS: usize = SESSIONS / 64;
/// The kernel sets this bit in a robust futex when the thread that holds it ends (`FUTEX_OWNER_DIED`).
const OWNER_DIED: u32 = 1 << 30;

/// The pages that both sides write.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Control {
    /// The stack sleeps, so an application that sets a mark must wake it.
    asleep: Line,
    /// A process has woken the stack.
    kicked: Line,
    /// The stack must check its sockets for an event.
    look: Line,
    /// A bit for each word of `marks` that is not 0.
    summary: [AtomicU64; WORDS.div_ceil(64)],
    marks: [AtomicU64; WORDS],
}

/// A word with its own cache line.
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
    /// Marks session `number` for the stack. The application then calls [`ring`](Self::ring).
    #[inline]
    pub fn mark(&self, number: u32) {
        let number = number as usize % SESSIONS;
        let word = number / 64;
        self.marks[word].fetch_or(1 << (number % 64), Ordering::AcqRel);
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// Tells the stack that a message was sent or a descriptor was closed. The application then calls
    /// [`ring`](Self::ring).
    #[inline]
    pub fn look(&self) {
        self.look.0.store(1, Ordering::Release);
    }

    /// Checks, after setting marks, whether the stack sleeps. If it returns `true`, the caller must wake the stack by
    /// the event.
    #[inline]
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        self.asleep.0.load(Ordering::Relaxed) != 0 && self.kicked.0.swap(1, Ordering::AcqRel) == 0
    }

    /// Returns whether there may be marks.
    #[inline]
    pub fn has_marks(&self) -> bool {
        self.summary.iter().any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Takes marks on the stack's side: `each` is called with the number of each marked session, which is below
    /// [`SESSIONS`]. A call ends after `most` marks, or up to 63 more. A word without marks counts as one mark, because
    /// an application can claim that it has some. The next call continues at the position in `from`, which is initially
    /// 0.
    #[inline]
    pub fn take_marks(&self, from: &mut usize, most: usize, mut each: impl FnMut(u32)) {
        let mut taken = 0;
        // The loop starts in the middle of a summary word, and ends with the earlier bits of that word.
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

    /// Returns whether the stack must check its sockets, and clears the request.
    #[inline]
    pub fn take_look(&self) -> bool {
        self.look.0.load(Ordering::Relaxed) != 0 && self.look.0.swap(0, Ordering::AcqRel) != 0
    }

    /// Announces that the stack is about to sleep. Returns `true` if it must not sleep, because there is work.
    pub fn arm(&self) -> bool {
        self.kicked.0.store(0, Ordering::Relaxed);
        self.asleep.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.look.0.load(Ordering::Relaxed) != 0 || self.has_marks()
    }

    /// Announces that the stack is awake.
    pub fn disarm(&self) {
        self.asleep.0.store(0, Ordering::Relaxed);
    }
}

/// Lists an application's processes that are alive. The stack gives a process a number and a generation. While the
/// process is alive, the entry of that number is the generation. The page also contains the broadcast addresses of the
/// stack's IPv4 networks: sending to one requires `SO_BROADCAST`.
///
/// The stack's worker holds a robust mutex in the page. The kernel changes its word when the worker ends, even if the
/// stack is killed, and before it closes the stack's descriptors. It does so for at most 2,048 mutexes of a thread
/// (`ROBUST_LIST_LIMIT`), and therefore for 2,048 applications. The processes of other applications notice the end when
/// a call waits.
#[derive(Debug)]
#[repr(C, align(8))]
pub struct Processes {
    generations: [AtomicU32; PROCESSES],
    /// The first 0 ends the list.
    broadcasts: [AtomicU32; BROADCASTS],
    /// A `pthread_mutex_t` of the stack. Its first word is the futex.
    pub(crate) worker: [AtomicU32; 16],
}

impl Processes {
    /// Returns whether the stack has ended, or has ended all sessions of the application.
    #[inline]
    pub fn has_stack_ended(&self) -> bool {
        self.worker[0].load(Ordering::Acquire) & OWNER_DIED != 0
    }

    /// Stores, for the stack, that it ends all sessions of the application.
    pub(crate) fn end(&self) {
        self.worker[0].store(OWNER_DIED, Ordering::Release);
    }

    /// Stores, for the stack, that process `number` has started, or (with generation 0) has ended.
    pub fn set(&self, number: usize, generation: u32) {
        self.generations[number % PROCESSES].store(generation, Ordering::Release);
    }

    /// Stores the broadcast addresses of the stack's networks, up to [`BROADCASTS`] of them.
    pub fn set_broadcasts(&self, addresses: impl Iterator<Item = Ipv4Addr>) {
        let addresses = addresses.map(Ipv4Addr::to_bits).chain(core::iter::repeat(0));
        for (word, address) in self.broadcasts.iter().zip(addresses) {
            word.store(address, Ordering::Relaxed);
        }
    }

    /// Returns whether an address is the broadcast address of a network of the stack.
    pub fn is_broadcast(&self, address: Ipv4Addr) -> bool {
        let words = self.broadcasts.iter().map(|word| word.load(Ordering::Relaxed));
        words.take_while(|word| *word != 0).any(|word| word == address.to_bits())
    }

    /// Returns whether the holder of a lock is alive. The stack is always alive, and holds a lock only for a few
    /// instructions.
    pub fn lives(&self, owner: Owner) -> bool {
        owner == Owner::STACK
            || self.generations[owner.number() % PROCESSES].load(Ordering::Acquire) == owner.generation()
    }
}

/// A process of an application, as stored in a lock: number and generation. It is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(u32);

const NUMBER_BITS: u32 = PROCESSES.trailing_zeros();

impl Owner {
    /// Generations are numbered from 1 to this, then from 1 again. The lowest bit of a lock says that there are
    /// waiters.
    pub const GENERATIONS: u32 = (1 << (31 - NUMBER_BITS)) - 1;

    /// The stack. No process has this number.
    pub const STACK: Self = Self(1 << NUMBER_BITS | (PROCESSES as u32 - 1));

    /// Returns process `number` of that generation, or `None` if either is out of range.
    pub fn new(number: usize, generation: u32) -> Option<Self> {
        let in_range = number < PROCESSES && (1..=Self::GENERATIONS).contains(&generation);
        in_range.then_some(Self(generation << NUMBER_BITS | number as u32))
    }

    /// Returns the owner with this word, or `None` for 0.
    pub fn from_word(word: u32) -> Option<Self> {
        (word >> NUMBER_BITS != 0).then_some(Self(word))
    }

    /// Returns a word of 31 bits.
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
    fn false_summary_bits_end_scan() {
        let (control, mut from) = (Control::new(), 0);
        // A hostile application can do this.
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

    /// Calls may start anywhere, even behind the last word, because a caller's number is not checked.
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

    /// Marks in words at the edges of the summary's words, from every start, a few at a time: each is taken once, and
    /// the summary has no bits left.
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
    fn owner_word_round_trips() {
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
