//! The specification of a `gen:` port.

use std::fmt;

use offcore_wire::{probe, template};
use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Number, NumberOrSwitch, Queues};
use super::{FCS, MAX_FLOWS, given, one, unless};

type Size = Number<{ (probe::MIN_FRAME_LEN + FCS) as u64 }, { (template::MAX_FRAME_LEN + FCS) as u64 }>;
type Count = Number<1, { u64::MAX }>;
type Rate = Number<1, 1_000_000_000>;
type Flows = Number<1, { MAX_FLOWS as u64 }>;
type Verify = Number<1, { u32::MAX as u64 }>;

const fn size() -> usize {
    64
}

const fn single() -> u32 {
    1
}

/// `gen:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenSpec {
    /// Length of a frame in bytes, including the FCS.
    #[serde(default = "size", deserialize_with = "Size::read")]
    #[schemars(with = "Size")]
    pub size: usize,
    /// Number of packets to send over all queues. Default: no limit.
    #[serde(default, deserialize_with = "Count::optional")]
    #[schemars(with = "Count")]
    pub count: Option<u64>,
    /// Packets per second over all queues. Default: as fast as possible.
    #[serde(default, deserialize_with = "Rate::optional")]
    #[schemars(with = "Rate")]
    pub rate: Option<u64>,
    /// Number of flows. Packets belong to them in turn.
    #[serde(default = "single", deserialize_with = "Flows::read")]
    #[schemars(with = "Flows")]
    pub flows: u32,
    /// The content of one packet in this many is checked; off: of none. Sequence and length are always checked.
    #[serde(default = "single", deserialize_with = "Verify::or_switch")]
    #[schemars(with = "NumberOrSwitch")]
    pub verify: u32,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
}

impl fmt::Display for GenSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gen:size={}", self.size)?;
        given(f, "count", self.count)?;
        given(f, "rate", self.rate)?;
        unless(f, "flows", self.flows, 1)?;
        match self.verify {
            0 => f.write_str(",verify=off")?,
            verify => unless(f, "verify", verify, 1)?,
        }
        unless(f, "queues", self.queues, 1)
    }
}
