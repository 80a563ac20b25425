//! `offcore tcp` on one end of a veth pair and the kernel's TCP/IP stack on the other, each in its own namespace.
//!
//! ```text
//! ours: p0 ── vc :kernel
//! ```

mod applications;
mod checksums;
mod files;
mod impaired;
mod links;
mod router;

use peers::{Need, Netns, Offcore};

use super::tcp::{self, KERNEL, OURS};

/// Offcore's end, and the kernel's.
pub(crate) const PORT: &str = "p0";
pub(crate) const PEER: &str = "vc";
pub(crate) const NEEDS: [Need; 5] = [Need::Root, Need::Ip, Need::Ping, Need::Ethtool, Need::Cores(2)];

/// A veth pair with both ends up.
#[derive(Debug)]
pub(crate) struct Veth {
    ours: Netns,
    pub(crate) kernel: Netns,
}

impl Veth {
    pub(crate) fn new(mtu: u16) -> Self {
        let veth = Self { ours: Netns::new().unwrap(), kernel: Netns::new().unwrap() };
        veth.connect(mtu);
        veth
    }

    /// Creates the pair.
    fn connect(&self, mtu: u16) {
        self.ours.veth(PORT, &self.kernel, PEER).unwrap();
        // The kernel has no address at Offcore's end and sends no packets there.
        self.ours.run("sysctl", &["-qw", &format!("net.ipv6.conf.{PORT}.disable_ipv6=1")]).unwrap();
        let mtu = mtu.to_string();
        for (netns, end) in [(&self.ours, PORT), (&self.kernel, PEER)] {
            netns.ip(&["link", "set", end, "mtu", &mtu, "up"]).unwrap();
        }
        self.kernel.ip(&["addr", "add", KERNEL[0], "dev", PEER]).unwrap();
        self.kernel.ip(&["addr", "add", KERNEL[1], "dev", PEER, "nodad"]).unwrap();
    }

    /// Starts a host on Offcore's end with the port string `port`. It answers pings.
    pub(crate) fn host(&self, port: &str, more: &[&str]) -> Offcore {
        let port = format!("{port},addr={}/24,addr={}/64", OURS[0], OURS[1]);
        let offcore = tcp::start(&self.ours, &port, more);
        for address in OURS {
            assert!((0..20).any(|_| self.ping(address, 56)), "{address} answers no ping: {}", offcore.tail());
        }
        offcore
    }

    /// Sets checksum and segmentation offloads of the interface at Offcore's end (0) or at the kernel's end (1).
    pub(crate) fn set_offloads(&self, end: usize, on: bool) {
        let (netns, interface) = [(&self.ours, PORT), (&self.kernel, PEER)][end];
        if on { netns.enable_offloads(interface) } else { netns.disable_offloads(interface) }.unwrap();
    }

    /// Returns the namespace of Offcore's end.
    pub(crate) fn ours(&self) -> &Netns {
        &self.ours
    }

    /// Sets the MTU of both ends.
    pub(crate) fn set_mtu(&self, mtu: u16) {
        let mtu = mtu.to_string();
        for (netns, end) in [(&self.ours, PORT), (&self.kernel, PEER)] {
            netns.ip(&["link", "set", end, "mtu", &mtu]).unwrap();
        }
    }

    /// Returns whether a ping with `len` bytes of payload is answered, without fragmentation.
    pub(crate) fn ping(&self, address: &str, len: usize) -> bool {
        let len = len.to_string();
        self.kernel.run("ping", &["-c1", "-W1", "-M", "do", "-s", &len, address]).is_ok()
    }
}
