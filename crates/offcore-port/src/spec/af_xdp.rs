//! The specification of an `af_xdp:` port.

use std::fmt;

use offcore_stats::named;

use super::{Options, first, flag, given, interface_name, narrow, unless};

/// Default number of packets that an RX or TX ring holds.
const RING_SIZE: u32 = 1024;

/// `af_xdp:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfXdpSpec {
    pub name: String,
    pub queues: u16,
    /// The interface's queue index of the port's first queue.
    pub first: u16,
    /// How packets get from the interface to the port.
    pub mode: XdpMode,
    /// Number of packets that the RX ring and the TX ring hold; a power of two.
    pub ring_size: u32,
    /// Maximum number of packets that the kernel receives when the worker calls it, in place of interrupts; `None`:
    /// interrupts are used.
    pub busy_poll: Option<u32>,
    /// Whether the kernel may sleep until it is called (XDP_USE_NEED_WAKEUP).
    pub need_wakeup: bool,
    /// Whether the interface receives packets for all addresses.
    pub promiscuous: bool,
    /// Whether an interface that the kernel's network stack uses may be taken over.
    pub force: bool,
}

named! {
    /// How packets get from an interface to an XDP socket.
    pub enum XdpMode {
        /// The first of the other modes that works.
        Auto = "auto",
        /// Zero-copy: the driver uses the packet buffers.
        ZeroCopy = "zc",
        /// The driver passes packets on, and the kernel copies them.
        Copy = "copy",
        /// The kernel's network stack passes packets on, and the kernel copies them: any interface supports this mode.
        Skb = "skb",
    }
}

impl AfXdpSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (name, options) = first(fields, "the interface's name, as in af_xdp:eth0")?;
        let known = ["queues", "first", "mode", "ring_size", "busy_poll", "need_wakeup", "promisc", "force"];
        let options = Options::parse(options, &known)?;
        let mode = match options.find("mode") {
            None => XdpMode::Auto,
            Some(value) => {
                let found = value.unwrap_or_default();
                XdpMode::find(found).ok_or_else(|| format!("mode={found}: expected auto, zc, copy or skb"))?
            }
        };
        let ring_size: u32 = narrow(options.number("ring_size", RING_SIZE.into(), 64..=32768)?);
        if !ring_size.is_power_of_two() {
            return Err(format!("ring_size={ring_size}: expected a power of two from 64 to 32768"));
        }
        Ok(Self {
            name: interface_name(name)?,
            queues: options.queues()?,
            first: narrow(options.number("first", 0, 0..=4095)?),
            mode,
            ring_size,
            busy_poll: options.optional_number("busy_poll", 1..=65535)?.map(narrow),
            need_wakeup: options.switch("need_wakeup", true)?,
            promiscuous: options.switch("promisc", true)?,
            force: options.switch("force", false)?,
        })
    }
}

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
