//! Times and durations of the protocol stack, in microseconds.
//!
//! * [`Time`]: a point in time,
//! * [`Micros`]: a duration.
//!
//! Both are a `u64`, so operations have the cost of integer operations. A `u64` of microseconds covers 584,000 years:
//! it does not wrap, and `<` compares times. The epoch is arbitrary: only differences have a meaning.
//! `std::time::Duration` is unsuitable per packet, because its conversions divide integers of 128 bits.

use std::ops::{Add, AddAssign, Div, Mul, Shl, Sub};
use std::time::Duration;

use crate::SplitMix;

/// A duration in microseconds.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(u64);

impl Micros {
    /// No time.
    pub const ZERO: Self = Self(0);
    /// The longest duration, which means no limit.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns a duration of microseconds.
    #[inline]
    pub const fn new(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns a duration of milliseconds.
    #[inline]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1000)
    }

    /// Returns a duration of seconds.
    #[inline]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs * 1_000_000)
    }

    /// Returns the microseconds.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the whole milliseconds.
    #[inline]
    pub const fn as_millis(self) -> u64 {
        self.0 / 1000
    }

    /// Returns the whole seconds.
    #[inline]
    pub const fn as_secs(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Returns a random shorter duration. This duration must not be zero.
    pub const fn random(self, random: &mut SplitMix) -> Self {
        Self(random.below(self.0))
    }

    /// Subtracts a duration; a longer one leaves zero.
    #[inline]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

/// Converts a duration, rounded down. A duration of over 584,000 years becomes [`Micros::MAX`].
impl From<Duration> for Micros {
    fn from(duration: Duration) -> Self {
        Self(duration.as_micros().try_into().unwrap_or(u64::MAX))
    }
}

impl Add for Micros {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Micros {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Micros {
    type Output = Self;

    #[inline]
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl Mul<u64> for Micros {
    type Output = Self;

    #[inline]
    fn mul(self, factor: u64) -> Self {
        Self(self.0 * factor)
    }
}

impl Mul<Micros> for u64 {
    type Output = Micros;

    #[inline]
    fn mul(self, duration: Micros) -> Micros {
        duration * self
    }
}

impl Div<u64> for Micros {
    type Output = Self;

    #[inline]
    fn div(self, divisor: u64) -> Self {
        Self(self.0 / divisor)
    }
}

/// Doubles a duration `times` times.
impl Shl<u8> for Micros {
    type Output = Self;

    #[inline]
    fn shl(self, times: u8) -> Self {
        Self(self.0 << times)
    }
}

/// A point in time, in microseconds since the start of a clock.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The epoch.
    pub const ZERO: Self = Self(0);
    /// A time that no clock reaches.
    pub const NEVER: Self = Self(u64::MAX);

    /// Returns the time `micros` microseconds after the epoch.
    #[inline]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns the microseconds since the epoch.
    #[inline]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns the time `secs` seconds after the epoch.
    #[inline]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs * 1_000_000)
    }

    /// Returns the time `millis` milliseconds after the epoch.
    #[inline]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1000)
    }

    /// Returns the whole milliseconds since the epoch.
    #[inline]
    pub const fn as_millis(self) -> u64 {
        self.0 / 1000
    }

    /// Returns the lower 32 bits of the milliseconds, which wrap after 49 days.
    #[inline]
    pub const fn wrapping_millis(self) -> u32 {
        self.as_millis() as u32
    }

    /// Returns the whole seconds since the start of the clock.
    #[inline]
    pub const fn as_secs(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Returns the duration since `earlier`, or zero if that time is later.
    #[inline]
    pub const fn saturating_since(self, earlier: Self) -> Micros {
        Micros(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time `duration` earlier, or the start of the clock.
    #[inline]
    pub const fn saturating_sub(self, duration: Micros) -> Self {
        Self(self.0.saturating_sub(duration.0))
    }

    /// Returns the time `duration` earlier, or `None` before the start of the clock.
    #[inline]
    pub const fn checked_sub(self, duration: Micros) -> Option<Self> {
        match self.0.checked_sub(duration.0) {
            Some(micros) => Some(Self(micros)),
            None => None,
        }
    }

    /// Returns the time `duration` later, or [`Time::NEVER`].
    #[inline]
    pub const fn saturating_add(self, duration: Micros) -> Self {
        Self(self.0.saturating_add(duration.0))
    }
}

impl Add<Micros> for Time {
    type Output = Self;

    #[inline]
    fn add(self, duration: Micros) -> Self {
        Self(self.0 + duration.0)
    }
}

impl AddAssign<Micros> for Time {
    #[inline]
    fn add_assign(&mut self, duration: Micros) {
        self.0 += duration.0;
    }
}

impl Sub<Micros> for Time {
    type Output = Self;

    #[inline]
    fn sub(self, duration: Micros) -> Self {
        Self(self.0 - duration.0)
    }
}

/// Returns the duration since an earlier time.
impl Sub for Time {
    type Output = Micros;

    #[inline]
    fn sub(self, earlier: Self) -> Micros {
        Micros(self.0 - earlier.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_differ_by_durations() {
        let (began, took) = (Time::from_micros(5), Micros::from_millis(3));
        let ended = began + took;
        assert_eq!(ended - began, took);
        assert_eq!(ended - took, began);
        assert!(began < ended && ended < Time::NEVER);
        assert_eq!((ended.saturating_since(began), began.saturating_since(ended)), (took, Micros::ZERO));
    }

    #[test]
    fn clock_limits_saturate() {
        let time = Time::from_micros(5);
        assert_eq!(time.saturating_sub(Micros::new(6)), Time::ZERO);
        assert_eq!(time.checked_sub(Micros::new(6)), None);
        assert_eq!(time.checked_sub(Micros::new(2)), Some(Time::from_micros(3)));
        assert_eq!(time.saturating_add(Micros::MAX), Time::NEVER);
    }

    #[test]
    fn units_are_converted() {
        assert_eq!(Micros::from_secs(2), Micros::from_millis(2000));
        assert_eq!(Micros::from(Duration::from_nanos(1999)), Micros::new(1));
        assert_eq!(Micros::from(Duration::MAX), Micros::MAX);
        assert_eq!((Micros::new(2_999_999).as_secs(), Micros::new(2999).as_millis()), (2, 2));
        assert_eq!(Time::from_micros((1 << 32) * 1000 + 7999).wrapping_millis(), 7);
    }

    #[test]
    fn types_have_size_of_u64() {
        assert_eq!((size_of::<Time>(), size_of::<Micros>()), (8, 8));
        assert_eq!(Micros::new(3) << 2, Micros::new(3) * 4);
    }
}
