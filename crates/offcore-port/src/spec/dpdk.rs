//! The specification of a `dpdk:` port.

use std::fmt;

use offcore_stats::named;

use super::{Options, first, flag, given, inner, narrow, unless};

/// `dpdk:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkSpec {
    /// The device's name in the EAL: `0000:43:00.0`, `net_null0`.
    pub device: String,
    pub queues: u16,
    /// MTU in bytes; `None`: the device's present MTU.
    pub mtu: Option<u16>,
    /// Number of descriptors of an RX queue; `None`: the driver's default.
    pub rx_desc: Option<u16>,
    /// Number of descriptors of a TX queue; `None`: the driver's default.
    pub tx_desc: Option<u16>,
    /// The fields that determine a packet's queue; `None`: all that the device supports of IP, TCP and UDP.
    pub rss: Option<Vec<Hash>>,
    /// Whether packets for other addresses are received, too.
    pub promisc: bool,
    /// Device arguments, passed on unchanged, without the brackets.
    pub args: Option<String>,
}

named! {
    /// The fields that a device hashes to select a packet's queue.
    pub enum Hash {
        /// IP addresses.
        Ip = "ip",
        /// IP addresses and TCP ports.
        Tcp = "tcp",
        /// IP addresses and UDP ports.
        Udp = "udp",
        /// IP addresses and SCTP ports.
        Sctp = "sctp",
    }
}

impl DpdkSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (device, options) =
            first(fields, "the device's name, as in dpdk:0000:43:00.0 or dpdk:net_null0")?;
        let known = ["queues", "mtu", "rx_desc", "tx_desc", "rss", "promisc", "args"];
        let options = Options::parse(options, &known)?;
        let args = match options.find("args") {
            None => None,
            Some(Some(text)) if !inner(text).is_empty() => Some(inner(text).to_string()),
            Some(_) => return Err("'args' has no value, expected args=[KEY=VALUE,...]".into()),
        };
        let number = |key, range| Ok::<_, String>(options.optional_number(key, range)?.map(narrow::<u16>));
        Ok(Self {
            device: device.into(),
            queues: options.queues()?,
            mtu: number("mtu", 68..=65517)?,
            rx_desc: number("rx_desc", 16..=32768)?,
            tx_desc: number("tx_desc", 16..=32768)?,
            rss: options.find("rss").map(|value| hashes(value.unwrap_or_default())).transpose()?,
            promisc: options.switch("promisc", true)?,
            args,
        })
    }
}

/// Parses `off` or a comma-separated list of names.
fn hashes(text: &str) -> Result<Vec<Hash>, String> {
    if text == "off" {
        return Ok(Vec::new());
    }
    let hash = |name: &str| {
        Hash::find(name).ok_or_else(|| {
            format!("rss={text}: expected off, or some of ip, tcp, udp, sctp as in rss=[ip,tcp]")
        })
    };
    inner(text).split(',').map(hash).collect()
}

impl fmt::Display for DpdkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dpdk:{}", self.device)?;
        unless(f, "queues", self.queues, 1)?;
        given(f, "mtu", self.mtu)?;
        given(f, "rx_desc", self.rx_desc)?;
        given(f, "tx_desc", self.tx_desc)?;
        match self.rss.as_deref() {
            None => {}
            Some([]) => f.write_str(",rss=off")?,
            Some(hashes) => {
                let names: Vec<&str> = hashes.iter().map(|hash| hash.name()).collect();
                write!(f, ",rss=[{}]", names.join(","))?;
            }
        }
        f.write_str(flag(!self.promisc, ",promisc=off"))?;
        self.args.as_ref().map_or(Ok(()), |args| write!(f, ",args=[{args}]"))
    }
}

impl DpdkSpec {
    /// Returns the interface of the kernel that the device's driver uses, as net_af_packet does.
    pub fn interface(&self) -> Option<&str> {
        self.args.as_deref()?.split(',').find_map(|argument| argument.trim().strip_prefix("iface="))
    }
}
