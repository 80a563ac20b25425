//! Socket options that are stored in a slot.

use crate::sync::{AtomicU64, Ordering};

/// Options set by a program. Datagram sockets: name and value of each option, in the two halves of a word. Streams: 16
/// numbers, see [`number`].
#[derive(Debug, Default)]
#[repr(C)]
pub struct Kept([AtomicU64; 8]);

/// Number of a stream's numbers in [`Kept`].
pub const OPTIONS: usize = 16;

/// Indices of a stream's numbers in [`Kept`]. Numbers 0 and 1 are bits for the application's use.
pub mod number {
    /// `IP_TOS`, for IPv4 packets.
    pub const TOS: KeptByte = KeptByte { at: 2, shift: 0 };
    /// `IPV6_TCLASS`.
    pub const TCLASS: KeptByte = KeptByte { at: 2, shift: 16 };
    /// `TCP_NOTSENT_LOWAT`, in bytes.
    pub const NOTSENT_LOWAT: usize = 3;
    /// `IP_TTL`.
    pub const TTL: KeptByte = KeptByte { at: 4, shift: 0 };
    /// `IPV6_UNICAST_HOPS`.
    pub const HOPS: KeptByte = KeptByte { at: 4, shift: 16 };
    /// `TCP_WINDOW_CLAMP`, in bytes.
    pub const WINDOW_CLAMP: usize = 5;
    /// `TCP_MAXSEG`.
    pub const MAXSEG: usize = 6;
    /// `SO_RCVLOWAT`.
    pub const RCVLOWAT: usize = 7;
    /// `SO_MAX_PACING_RATE` in bytes per second, all bits inverted: 0 is no limit. This is the low half; the next
    /// number is the high one.
    pub const PACING_RATE: usize = 8;
    /// `TCP_DEFER_ACCEPT`, in seconds.
    pub const DEFER_ACCEPT: usize = 10;
    /// `TCP_LINGER2`, in seconds.
    pub const LINGER2: usize = 11;
    /// `TCP_USER_TIMEOUT`, in milliseconds.
    pub const USER_TIMEOUT: usize = 12;
    /// `TCP_SYNCNT`.
    pub const SYNCNT: usize = 13;
    /// `SO_LINGER`, in seconds.
    pub const LINGER: usize = 14;
    /// `TCP_CONGESTION`: index of the name.
    pub const CONGESTION: usize = 15;

    /// Encodes a value so that 0 means none. The value -1 is possible.
    pub const fn encode(value: u32) -> u32 {
        value.wrapping_add(2)
    }

    /// Decodes a value. Returns `None` for the default.
    pub const fn decode(kept: u32) -> Option<u32> {
        if kept == 0 { None } else { Some(kept.wrapping_sub(2)) }
    }

    /// The location of a one-byte value: 16 bits of a number.
    #[derive(Clone, Copy, Debug)]
    pub struct KeptByte {
        pub at: usize,
        shift: u32,
    }

    impl KeptByte {
        /// Returns its value in the number, or `None` for the default.
        pub const fn of(self, number: u32) -> Option<u8> {
            match (number >> self.shift) as u16 {
                0 => None,
                kept => Some((kept - 1) as u8),
            }
        }

        /// Returns the number with another value. `None` is the default.
        pub fn replace(self, number: u32, value: Option<u8>) -> u32 {
            let kept = value.map_or(0, |value| u32::from(value) + 1);
            number & !(0xffff << self.shift) | kept << self.shift
        }
    }
}

impl Kept {
    /// Returns all numbers of a stream.
    pub fn numbers(&self) -> [u32; OPTIONS] {
        core::array::from_fn(|at| self.number(at))
    }

    /// Sets all numbers.
    pub fn set_numbers(&self, numbers: &[u32; OPTIONS]) {
        numbers.iter().enumerate().for_each(|(at, number)| self.change(at, |_| *number));
    }

    /// Returns a number of a stream.
    pub fn number(&self, at: usize) -> u32 {
        self.0.get(at / 2).map_or(0, |word| (word.load(Ordering::Relaxed) >> (at % 2 * 32)) as u32)
    }

    /// Returns the maximum pacing rate of a stream in bytes per second, see [`number::PACING_RATE`].
    pub fn pacing_rate(&self) -> u64 {
        !self.0[number::PACING_RATE / 2].load(Ordering::Relaxed)
    }

    /// Sets the maximum pacing rate. `u64::MAX` is no limit.
    pub fn set_pacing_rate(&self, rate: u64) {
        self.0[number::PACING_RATE / 2].store(!rate, Ordering::Relaxed);
    }

    /// Changes a number of a stream.
    pub fn change(&self, at: usize, change: impl Fn(u32) -> u32) {
        let shift = at % 2 * 32;
        let Some(word) = self.0.get(at / 2) else { return };
        let new = |old: u64| {
            let number = change((old >> shift) as u32);
            old & !(u64::from(u32::MAX) << shift) | u64::from(number) << shift
        };
        let mut old = word.load(Ordering::Relaxed);
        while let Err(now) = word.compare_exchange(old, new(old), Ordering::Relaxed, Ordering::Relaxed) {
            old = now;
        }
    }

    /// Returns the value of an option, or `None` if it was not set. Names are not 0.
    pub fn get(&self, name: u32) -> Option<u32> {
        let words = self.0.iter().map(|word| word.load(Ordering::Relaxed));
        words.into_iter().find(|word| (word >> 32) as u32 == name).map(|word| word as u32)
    }

    /// Stores an option, if there is room for it.
    pub fn set(&self, name: u32, value: u32) {
        let new = u64::from(name) << 32 | u64::from(value);
        for word in &self.0 {
            let found = word.load(Ordering::Relaxed);
            let is_its = found == 0 || (found >> 32) as u32 == name;
            if is_its && word.compare_exchange(found, new, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    /// Copies all options of `other`.
    pub fn inherit(&self, other: &Self) {
        for (to, from) in self.0.iter().zip(&other.0) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
