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

/// Declares counters that are counted separately and published together: a struct of plain numbers, the
/// [descriptions](crate::family::Description) of its fields, and conversions to and from a
/// [`Block`](crate::page::Block) whose [family](crate::family::Family) begins with them. The doc comment of a field is
/// the counter's help. A [unit](crate::family::Unit) follows the name, and the word `gauge` follows the unit of a
/// current value. Sums and differences wrap, because a counter may decrease.
///
/// With an `enum`, the counters also have named indices for [`Block::counter`](crate::page::Block::counter).
///
/// ```
/// offcore_stats::counters! {
///     /// Counters of a door.
///     pub struct DoorCounts, enum DoorCount {
///         /// Visitors that came in.
///         Entered = entered: Events,
///         /// Visitors inside.
///         Inside = inside: Events gauge,
///     }
/// }
/// assert_eq!(DoorCounts::COUNTERS[DoorCount::Inside as usize].help, "Visitors inside.");
/// ```
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* $vis:vis struct $name:ident, enum $index:ident {
        $($(#[doc = $help:literal])+ $variant:ident = $counter:ident: $unit:ident $($gauge:ident)?,)*
    }) => {
        $crate::counters! {
            $(#[$meta])*
            $vis struct $name {
                $($(#[doc = $help])+ $counter: $unit $($gauge)?,)*
            }
        }

        $crate::named! {
            #[doc = concat!("The indices of [`", stringify!($name), "`] in a block.")]
            $vis enum $index {
                $($(#[doc = $help])+ $variant = stringify!($counter),)*
            }
        }
    };
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[doc = $help:literal])+ $counter:ident: $unit:ident $($gauge:ident)?,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $($(#[doc = $help])+ $vis $counter: u64,)*
        }

        #[allow(dead_code, reason = "not every struct of counters needs every one")]
        impl $name {
            /// The declarations of the counters.
            $vis const COUNTERS: [$crate::family::Description; [$(stringify!($counter)),*].len()] = [
                $($crate::family::Description::new(
                    stringify!($counter),
                    $crate::family::Unit::$unit,
                    $crate::counter_kind!($($gauge)?),
                    concat!($($help),+),
                )),*
            ];

            /// Returns the counters in the order of their declarations.
            #[inline]
            $vis const fn values(self) -> [u64; Self::COUNTERS.len()] {
                [$(self.$counter),*]
            }

            /// Returns the names and values of the counters.
            $vis fn named(self) -> impl Iterator<Item = (&'static str, u64)> {
                Self::COUNTERS.iter().map(|counter| counter.name).zip(self.values())
            }

            /// Reads the first counters of a block.
            $vis fn read(block: &$crate::page::Block) -> Self {
                let [$($counter),*] = std::array::from_fn(|index| block.counter(index).value());
                Self { $($counter),* }
            }

            /// Returns the counters with these names in a snapshot. A counter that the snapshot lacks is 0.
            $vis fn decode(block: &$crate::page::Snapshot) -> Self {
                Self { $($counter: block.value(stringify!($counter)),)* }
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

/// Returns the kind of a counter that is declared with or without the word `gauge`.
#[doc(hidden)]
#[macro_export]
macro_rules! counter_kind {
    () => {
        $crate::family::Kind::Counter
    };
    (gauge) => {
        $crate::family::Kind::Gauge
    };
}
