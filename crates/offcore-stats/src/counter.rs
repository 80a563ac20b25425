//! Counters with one writer and any number of readers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter that one thread writes and any thread reads: a load and a store, no lock prefix.
///
/// Two threads adding at once would lose counts, not corrupt anything.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// A counter at zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. For the owning thread only.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Stores `n`: for gauges.
    #[inline(always)]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// The present value, from any thread.
    #[inline(always)]
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Declares counters once that are counted apart and published together: a struct of plain numbers, the names of its
/// fields, and the way to and from a [`Block`](crate::page::Block) that is made with these names. Sums and differences
/// wrap, since a counter may go back.
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($(#[$doc:meta])* $counter:ident,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $($(#[$doc])* $vis $counter: u64,)*
        }

        #[allow(dead_code, reason = "not every struct of counters needs every one")]
        impl $name {
            /// The names of the counters.
            $vis const NAMES: [&'static str; [$(stringify!($counter)),*].len()] = [$(stringify!($counter)),*];

            /// The counters in the order of their names.
            #[inline]
            $vis const fn values(self) -> [u64; Self::NAMES.len()] {
                [$(self.$counter),*]
            }

            /// What the first counters of a block hold.
            $vis fn read(block: &$crate::page::Block) -> Self {
                let [$($counter),*] = std::array::from_fn(|index| block.counter(index).value());
                Self { $($counter),* }
            }

            /// Adds each to its counter of the block.
            #[inline]
            $vis fn add_to(self, block: &$crate::page::Block) {
                for (index, value) in self.values().into_iter().enumerate() {
                    block.counter(index).add(value);
                }
            }
        }

        impl std::ops::Add for $name {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self { $($counter: self.$counter.wrapping_add(other.$counter),)* }
            }
        }

        impl std::ops::Sub for $name {
            type Output = Self;

            fn sub(self, before: Self) -> Self {
                Self { $($counter: self.$counter.wrapping_sub(before.$counter),)* }
            }
        }
    };
}
