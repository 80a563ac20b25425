//! The specification of a `dpdk:` port.

use std::fmt;

use offcore_stats::named;

use super::{Options, first, inner, narrow, unless};

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
        for (key, value) in [("mtu", self.mtu), ("rx_desc", self.rx_desc), ("tx_desc", self.tx_desc)] {
            unless(f, key, value.unwrap_or(0), 0)?;
        }
        match self.rss.as_deref() {
            None => {}
            Some([]) => f.write_str(",rss=off")?,
            Some(hashes) => {
                let names: Vec<&str> = hashes.iter().map(|hash| hash.name()).collect();
                write!(f, ",rss=[{}]", names.join(","))?;
            }
        }
        if !self.promisc {
            f.write_str(",promisc=off")?;
        }
        match &self.args {
            None => Ok(()),
            Some(args) => write!(f, ",args=[{args}]"),
        }
    }
}

impl DpdkSpec {
    /// Returns the interface of the kernel that the device's driver uses, as net_af_packet does.
    pub fn interface(&self) -> Option<&str> {
        self.args.as_deref()?.split(',').find_map(|argument| argument.trim().strip_prefix("iface="))
    }
}

#[cfg(test)]
mod tests {
    use crate::spec::PortSpec;

    #[test]
    fn dpdk_specs_round_trip() {
        for text in [
            "dpdk:0000:43:00.0",
            "dpdk:net_null0,queues=2,mtu=9000,rx_desc=512,tx_desc=2048",
            "dpdk:net_ring0,rss=off,promisc=off",
            "dpdk:43:00.1,queues=4,rss=[ip,tcp]",
            "dpdk:net_af_packet0,args=[iface=eth0,qpairs=2]",
        ] {
            let spec: PortSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.to_string().parse::<PortSpec>().unwrap(), spec);
        }
    }

    #[test]
    fn invalid_spec_is_named() {
        for (text, expected) in [
            ("dpdk:", "as in dpdk:0000:43:00.0"),
            ("dpdk:net_null0,mtu=9", "mtu=9: expected a number from 68"),
            ("dpdk:net_null0,rx_desc=1", "rx_desc=1: expected a number from 16"),
            ("dpdk:net_null0,rss=[ip,all]", "rss=[ip,all]: expected off, or some of ip, tcp"),
            ("dpdk:net_null0,promisc=maybe", "promisc=maybe: expected on or off"),
            ("dpdk:net_null0,args=[]", "'args' has no value"),
            ("dpdk:net_null0,speed=1", "key 'speed' is not known"),
        ] {
            let error = text.parse::<PortSpec>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
