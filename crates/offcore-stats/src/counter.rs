//! Counters with one writer and any number of readers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter that one thread writes and any thread reads. An addition is a load and a store without a lock prefix.
///
/// If two threads added at the same time, counts would be lost, but nothing would be corrupted.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Creates a counter with the value zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. Only the owning thread may call it.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Stores `n`, for gauges.
    #[inline(always)]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Returns the present value. Any thread may call it.
    #[inline(always)]
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Declares counters that are counted separately and published together: a struct of plain numbers, the names of its
/// fields, and conversions to and from a [`Block`](crate::page::Block) created with these names. Sums and differences
/// wrap, because a counter may decrease.
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

            /// Returns the counters in the order of their names.
            #[inline]
            $vis const fn values(self) -> [u64; Self::NAMES.len()] {
                [$(self.$counter),*]
            }

            /// Reads the first counters of a block.
            $vis fn read(block: &$crate::page::Block) -> Self {
                let [$($counter),*] = std::array::from_fn(|index| block.counter(index).value());
                Self { $($counter),* }
            }

            /// Adds each value to its counter of the block.
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
