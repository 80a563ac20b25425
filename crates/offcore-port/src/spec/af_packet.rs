//! The specification of an `af_packet:` port.

use std::fmt;

use offcore_stats::named;

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Interface, Number, Queues, Switch, read_by_name};
use super::{flag, one, unless, yes};

/// Default number of slots of a ring.
const SLOTS: u32 = 1024;
type Slots = Number<64, 65536>;

const fn slots() -> u32 {
    SLOTS
}

/// `af_packet:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AfPacketSpec {
    /// Name of the interface.
    #[serde(rename = "interface", deserialize_with = "Interface::read")]
    #[schemars(with = "Interface")]
    pub name: String,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
    /// How received packets are distributed among several queues.
    #[serde(default)]
    pub fanout: Fanout,
    /// Number of packets that each queue's rings hold, in each direction.
    #[serde(default = "slots", deserialize_with = "Slots::read")]
    #[schemars(with = "Slots")]
    pub slots: u32,
    /// Whether packets for other stations are received, too.
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub promisc: bool,
    /// Whether packets bypass the interface's queueing discipline.
    #[serde(default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
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

read_by_name!(Fanout);

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
