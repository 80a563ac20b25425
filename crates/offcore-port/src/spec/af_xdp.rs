//! The specification of an `af_xdp:` port.

use std::fmt;

use offcore_stats::named;

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Interface, Number, Queues, Switch, read_by_name};
use super::{flag, given, one, unless, yes};

/// Default number of packets that an RX or TX ring holds.
const RING_SIZE: u32 = 1024;
type RingSize = Number<64, 32768>;
type First = Number<0, 4095>;
type BusyPoll = Number<1, 65535>;

const fn ring_size() -> u32 {
    RING_SIZE
}

/// `af_xdp:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AfXdpSpec {
    /// Name of the interface.
    #[serde(rename = "interface", deserialize_with = "Interface::read")]
    #[schemars(with = "Interface")]
    pub name: String,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
    /// The interface's queue index of the port's first queue.
    #[serde(default, deserialize_with = "First::read")]
    #[schemars(with = "First")]
    pub first: u16,
    /// How packets get from the interface to the port.
    #[serde(default)]
    pub mode: XdpMode,
    /// Number of packets that the RX ring and the TX ring hold; a power of two.
    #[serde(default = "ring_size", deserialize_with = "RingSize::power_of_two")]
    #[schemars(with = "RingSize")]
    pub ring_size: u32,
    /// Maximum number of packets that the kernel receives when the worker calls it, in place of interrupts. Default:
    /// /// interrupts are used.
    #[serde(default, deserialize_with = "BusyPoll::optional")]
    #[schemars(with = "BusyPoll")]
    pub busy_poll: Option<u32>,
    /// Whether the kernel may sleep until it is called (XDP_USE_NEED_WAKEUP).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub need_wakeup: bool,
    /// Whether the interface receives packets for all addresses.
    #[serde(rename = "promisc", default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub promiscuous: bool,
    /// Whether an interface that the kernel's network stack uses may be taken over.
    #[serde(default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub force: bool,
}

named! {
    /// How packets get from an interface to an XDP socket.
    #[derive(Default)]
    pub enum XdpMode {
        /// The first of the other modes that works.
        #[default]
        Auto = "auto",
        /// Zero-copy: the driver uses the packet buffers.
        ZeroCopy = "zc",
        /// The driver passes packets on, and the kernel copies them.
        Copy = "copy",
        /// The kernel's network stack passes packets on, and the kernel copies them: any interface supports this mode.
        Skb = "skb",
    }
}

read_by_name!(XdpMode);

impl fmt::Display for AfXdpSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "af_xdp:{}", self.name)?;
        unless(f, "queues", self.queues, 1)?;
        unless(f, "first", self.first, 0)?;
        unless(f, "mode", self.mode, XdpMode::Auto)?;
        unless(f, "ring_size", self.ring_size, RING_SIZE)?;
        given(f, "busy_poll", self.busy_poll)?;
        f.write_str(flag(!self.need_wakeup, ",need_wakeup=off"))?;
        f.write_str(flag(!self.promiscuous, ",promisc=off"))?;
        f.write_str(flag(self.force, ",force"))
    }
}
