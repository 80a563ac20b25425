//! What a lane of a vhost measurement moves: from whom to whom, over which virtqueues, how warm, how long.

use std::fmt;
use std::str::FromStr;

use offcore_vhost::features::RING_PACKED;

use crate::temperature::Temperature;

/// The format of virtqueues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ring {
    /// A descriptor table, an available and a used ring (virtio 1.2, 2.7).
    #[default]
    Split,
    /// One ring of descriptors that both sides write (virtio 1.2, 2.8).
    Packed,
}

impl Ring {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Split, Self::Packed];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Packed => "packed",
        }
    }

    /// Where the device begins with a fresh virtqueue, as in vhost-user's vring state: a packed one has its wrap counters
    /// set.
    pub const fn base(self) -> u32 {
        match self {
            Self::Split => 0,
            Self::Packed => 0x8000_8000,
        }
    }

    /// The feature bits that a front end asks for to get this format.
    pub const fn features(self) -> u64 {
        match self {
            Self::Split => 0,
            Self::Packed => RING_PACKED,
        }
    }
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Ring {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|ring| ring.name() == text);
        known.ok_or_else(|| format!("ring '{text}': expected split or packed"))
    }
}

/// Where the packets of a guest go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Route {
    /// Back to the guest that sent them, as in Table 8 of the vhost guide.
    #[default]
    Loop,
    /// To another guest with memory of its own.
    GuestToGuest,
}

impl Route {
    /// The case's name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::GuestToGuest => "guest-to-guest",
        }
    }

    /// Guests, and sockets, that it takes.
    pub const fn guests(self) -> usize {
        match self {
            Self::Loop => 1,
            Self::GuestToGuest => 2,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a lane moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// From whom to whom.
    pub route: Route,
    /// The format of all virtqueues.
    pub ring: Ring,
    /// Where the data is.
    pub temperature: Temperature,
    /// Frame length in bytes, FCS included.
    pub frame: usize,
    /// Whether ours copies a payload from guest to guest once, where it can.
    pub one_copy: bool,
}

impl Workload {
    /// The loop of Table 8 over split virtqueues.
    pub const fn table8(temperature: Temperature, frame: usize) -> Self {
        Self { route: Route::Loop, ring: Ring::Split, temperature, frame, one_copy: true }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { route, ring, temperature, frame, .. } = self;
        write!(f, "{route}, {ring}, {temperature}, {frame} B")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_names() {
        for ring in Ring::ALL {
            assert_eq!(ring.name().parse::<Ring>().unwrap(), ring);
        }
        assert!("chained".parse::<Ring>().unwrap_err().contains("split or packed"));
        assert_eq!(Workload::table8(Temperature::Hot, 64).to_string(), "loop, split, hot, 64 B");
    }
}
