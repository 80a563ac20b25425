//! The specification of an `af_packet:` port.

use std::fmt;

use offcore_stats::named;

use super::{Options, first, flag, interface_name, narrow, unless};

/// Default number of slots of a ring.
const SLOTS: u32 = 1024;

/// `af_packet:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfPacketSpec {
    pub name: String,
    pub queues: u16,
    /// How received packets are distributed among several queues.
    pub fanout: Fanout,
    /// Number of packets that each queue's rings hold, in each direction.
    pub slots: u32,
    /// Whether packets for other stations are received, too.
    pub promisc: bool,
    /// Whether packets bypass the interface's queueing discipline.
    pub qdisc_bypass: bool,
}

named! {
    /// How the kernel distributes received packets among the queues of a port: packet(7), PACKET_FANOUT.
    #[derive(Default)]
    pub enum Fanout {
        /// By flow: packets of a flow go to one queue and stay in order.
        #[default]
        Hash = "hash",
        /// Round robin.
        Lb = "lb",
        /// By the CPU core that received the packet.
        Cpu = "cpu",
        /// To the first queue until it is full, then to the next.
        Rollover = "rollover",
        /// At random.
        Rnd = "rnd",
        /// By the network card's queue that received the packet.
        Qm = "qm",
    }
}

impl Fanout {
    fn parse(text: &str) -> Result<Self, String> {
        Self::find(text).ok_or_else(|| format!("fanout={text}: expected one of {}", Self::NAMES.join(", ")))
    }
}

impl AfPacketSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (name, options) = first(fields, "the interface's name, as in af_packet:eth0")?;
        let options = Options::parse(options, &["queues", "fanout", "slots", "promisc", "qdisc_bypass"])?;
        let fanout = match options.find("fanout") {
            None => Fanout::default(),
            Some(mode) => Fanout::parse(mode.unwrap_or_default())?,
        };
        Ok(Self {
            name: interface_name(name)?,
            queues: options.queues()?,
            fanout,
            slots: narrow(options.number("slots", SLOTS.into(), 64..=65536)?),
            promisc: options.switch("promisc", true)?,
            qdisc_bypass: options.switch("qdisc_bypass", false)?,
        })
    }
}

impl fmt::Display for AfPacketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "af_packet:{}", self.name)?;
        unless(f, "queues", self.queues, 1)?;
        unless(f, "fanout", self.fanout, Fanout::default())?;
        unless(f, "slots", self.slots, SLOTS)?;
        f.write_str(flag(!self.promisc, ",promisc=off"))?;
        f.write_str(flag(self.qdisc_bypass, ",qdisc_bypass"))
    }
}
