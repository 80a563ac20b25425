//! The specification of a `dpdk:` port.

use std::fmt;

use offcore_stats::named;
use schemars::JsonSchema;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::values::{Bracketed, Number, Queues, Switch, inner, read_by_name};
use super::{flag, given, one, unless, yes};

type Mtu = Number<68, 65517>;
type Descriptors = Number<16, 32768>;

/// `dpdk:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DpdkSpec {
    /// The device's name in the EAL: `0000:43:00.0`, `net_null0`.
    #[serde(deserialize_with = "not_empty")]
    pub device: String,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
    /// MTU in bytes. Default: the device's present MTU.
    #[serde(default, deserialize_with = "Mtu::optional")]
    #[schemars(with = "Mtu")]
    pub mtu: Option<u16>,
    /// Number of descriptors of an RX queue. Default: the driver's default.
    #[serde(default, deserialize_with = "Descriptors::optional")]
    #[schemars(with = "Descriptors")]
    pub rx_desc: Option<u16>,
    /// Number of descriptors of a TX queue. Default: the driver's default.
    #[serde(default, deserialize_with = "Descriptors::optional")]
    #[schemars(with = "Descriptors")]
    pub tx_desc: Option<u16>,
    /// The fields that determine a packet's queue. Default: all that the device supports of IP, TCP and UDP.
    #[serde(default, deserialize_with = "hashes")]
    #[schemars(with = "Hashes")]
    pub rss: Option<Vec<Hash>>,
    /// Whether packets for other addresses are received, too.
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub promisc: bool,
    /// Device arguments, passed on unchanged, without the brackets.
    #[serde(default, deserialize_with = "Bracketed::optional")]
    #[schemars(with = "Bracketed")]
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

read_by_name!(Hash);

/// A list of fields, or `off`.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code, reason = "describes the values in the schema")]
enum Hashes {
    List(Vec<Hash>),
    /// `off`, or names as on the command line.
    Text(String),
}

/// Reads `off` (an empty list), a list, or on the command line a list in brackets.
fn hashes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Hash>>, D::Error> {
    struct List;

    impl<'de> Visitor<'de> for List {
        type Value = Vec<Hash>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("off, or some of ip, tcp, udp, sctp as in rss=[ip,tcp]")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Vec<Hash>, E> {
            if text == "off" {
                return Ok(Vec::new());
            }
            let names = inner(text).split(',');
            let hashes: Option<Vec<Hash>> = names.map(Hash::find).collect();
            hashes.ok_or_else(|| E::custom("expected off, or some of ip, tcp, udp, sctp as in rss=[ip,tcp]"))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Hash>, A::Error> {
            let mut hashes = Vec::new();
            while let Some(hash) = list.next_element()? {
                hashes.push(hash);
            }
            Ok(hashes)
        }
    }

    deserializer.deserialize_any(List).map(Some)
}

/// Reads the name of a device.
fn not_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    if name.is_empty() { Err(D::Error::custom("expected the device's name")) } else { Ok(name) }
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
