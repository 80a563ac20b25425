//! The specification of a `gen:` port.

use std::fmt;

use offcore_wire::{probe, template};

use super::{FCS, MAX_FLOWS, Options, given, narrow, unless};

/// `gen:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenSpec {
    /// Length of a frame in bytes, including the FCS.
    pub size: usize,
    /// Number of packets to send over all queues; `None`: no limit.
    pub count: Option<u64>,
    /// Packets per second over all queues; `None`: as fast as possible.
    pub rate: Option<u64>,
    /// Number of flows. Packets belong to them in turn.
    pub flows: u32,
    /// The content of one packet in this many is checked; 0: of none. Sequence and length are always checked.
    pub verify: u32,
    pub queues: u16,
}

impl GenSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        // `gen:` alone means all defaults.
        let fields = if fields == [""] { &[] } else { fields };
        let options = Options::parse(fields, &["size", "count", "rate", "flows", "verify", "queues"])?;
        let sizes = (probe::MIN_FRAME_LEN + FCS) as u64..=(template::MAX_FRAME_LEN + FCS) as u64;
        let verify = match options.find("verify") {
            None | Some(None | Some("on")) => 1,
            Some(Some("off")) => 0,
            Some(Some(_)) => options.number("verify", 1, 1..=u32::MAX.into())?,
        };
        Ok(Self {
            size: narrow(options.number("size", 64, sizes)?),
            count: options.optional_number("count", 1..=u64::MAX)?,
            rate: options.optional_number("rate", 1..=1_000_000_000)?,
            flows: narrow(options.number("flows", 1, 1..=MAX_FLOWS.into())?),
            verify: narrow(verify),
            queues: options.queues()?,
        })
    }
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
