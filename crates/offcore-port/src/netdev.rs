//! Network interfaces of the kernel: address, MTU, link, counters, driver.
//!
//! A [`NetDev`] sends its requests through sockets that are created when it is opened. It therefore refers to the
//! network namespace of the thread that opened it, whichever thread uses it. Files in /sys would refer to the namespace
//! of the mount.

mod ioctl;
pub(crate) mod netlink;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use offcore_wire::ethernet::MacAddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

pub(crate) use ioctl::{interface_request, ioctl};
use netlink::Netlink;

/// One network interface, identified by its name at the time of opening.
#[derive(Debug)]
pub struct NetDev {
    name: String,
    index: u32,
    /// Any socket in the interface's network namespace, for ioctl requests.
    control: OwnedFd,
    route: Mutex<Netlink>,
}

/// State of an interface's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The interface is up and has a carrier.
    Up,
    /// The interface is up without a carrier: the cable is unplugged or the peer is down.
    NoCarrier,
    /// The interface is down.
    Down,
    /// The interface was deleted, renamed, or moved to another network namespace. An interface recreated under the same
    /// name is another interface: see [`NetDev::reopen`].
    Gone,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Up => "is up",
            Self::NoCarrier => "has no carrier",
            Self::Down => "is down",
            Self::Gone => "is gone (deleted, renamed, or in another network namespace)",
        })
    }
}

/// Counters of the kernel for an interface, since the interface was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetDevCounters {
    pub rx_packets: u64,
    /// Bytes received, without FCS.
    pub rx_bytes: u64,
    /// Received packets with errors.
    pub rx_errors: u64,
    /// Received packets dropped for lack of buffers.
    pub rx_dropped: u64,
    pub tx_packets: u64,
    /// Bytes sent, without FCS.
    pub tx_bytes: u64,
    /// Packets that could not be sent.
    pub tx_errors: u64,
    /// Packets to send that were dropped for lack of buffers.
    pub tx_dropped: u64,
}

/// Queues of an interface in use (`ethtool -l`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Channels {
    /// Queues that receive and send.
    pub combined: u32,
    pub rx: u32,
    pub tx: u32,
}

/// Explains to the user why an interface cannot be opened.
pub(crate) fn advice(name: &str, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENODEV) => format!(
            "there is no interface '{name}' in this network namespace: `offcore port list` shows those there are"
        ),
        _ => format!("opening interface '{name}'"),
    }
}

/// Returns whether the kernel is version `major`.`minor` or later. An unknown version counts as older.
pub(crate) fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok());
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

impl NetDev {
    /// Opens the interface called `name` in the calling thread's network namespace.
    ///
    /// # Errors
    /// ENODEV if no interface has that name; otherwise the kernel's error.
    pub fn open(name: &str) -> io::Result<Self> {
        let control =
            rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let index = ioctl::index(&control, name)?;
        Ok(Self { name: name.into(), index, control, route: Mutex::new(Netlink::route()?) })
    }

    /// Looks up the interface of that name again, in the same namespace. To be called when the link is [`Link::Gone`].
    ///
    /// # Errors
    /// ENODEV if no interface has the name.
    pub fn reopen(&mut self) -> io::Result<()> {
        self.index = ioctl::index(&self.control, &self.name)?;
        Ok(())
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The interface's index. It can be reused for a later interface on request.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The longest payload of a frame in bytes: the bytes behind the Ethernet header and a VLAN tag.
    ///
    /// # Errors
    /// ENODEV if the interface is gone.
    pub fn mtu(&self) -> io::Result<usize> {
        ioctl::mtu(&self.control, &self.name)
    }

    /// The interface's Ethernet address.
    ///
    /// # Errors
    /// ENODEV if the interface is gone.
    pub fn mac(&self) -> io::Result<MacAddr> {
        Ok(ioctl::hardware(&self.control, &self.name)?.1)
    }

    /// Returns whether its frames are Ethernet frames. Those carried by layer 3 tunnels are not.
    ///
    /// # Errors
    /// ENODEV if the interface is gone.
    pub fn is_ethernet(&self) -> io::Result<bool> {
        let kind = ioctl::hardware(&self.control, &self.name)?.0;
        Ok(matches!(kind, libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK))
    }

    /// The present state of the link.
    pub fn link(&self) -> Link {
        if ioctl::index(&self.control, &self.name).ok() != Some(self.index) {
            return Link::Gone;
        }
        match ioctl::flags(&self.control, &self.name) {
            Err(_) => Link::Gone,
            Ok(flags) if flags & libc::IFF_UP == 0 => Link::Down,
            Ok(flags) if flags & libc::IFF_RUNNING == 0 => Link::NoCarrier,
            Ok(_) => Link::Up,
        }
    }

    /// Sets the interface up, unless it is up.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn set_up(&self) -> io::Result<()> {
        ioctl::set_up(&self.control, &self.name)
    }

    /// Sets the interface's MTU, unless it has this one.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN, EINVAL if the driver does not support it.
    pub fn set_mtu(&self, mtu: u16) -> io::Result<()> {
        if self.mtu()? == usize::from(mtu) { Ok(()) } else { ioctl::set_mtu(&self.control, &self.name, mtu) }
    }

    /// Sets the interface's Ethernet address, unless it has this one.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn set_mac(&self, mac: MacAddr) -> io::Result<()> {
        if self.mac()? == mac { Ok(()) } else { ioctl::set_mac(&self.control, &self.name, mac) }
    }

    /// The interface's counters.
    ///
    /// # Errors
    /// ENODEV if the interface is gone.
    pub fn counters(&self) -> io::Result<NetDevCounters> {
        self.netlink().counters(self.index)
    }

    /// Name of the interface's driver (`ethtool -i`), such as `ice` or `veth`, if the driver reports one.
    pub fn driver(&self) -> Option<String> {
        ioctl::driver(&self.control, &self.name).map(|(name, _)| name).filter(|name| !name.is_empty())
    }

    /// Bus address of the interface's device, such as `0000:43:00.0`, if it has one.
    pub fn bus(&self) -> Option<String> {
        ioctl::driver(&self.control, &self.name).map(|(_, bus)| bus).filter(|bus| !bus.is_empty())
    }

    /// The numbers of queues in use, if the driver reports them.
    pub fn channels(&self) -> Option<Channels> {
        ioctl::channels(&self.control, &self.name)
    }

    /// Speed of the link in Mbit/s, if the driver reports it.
    pub fn speed(&self) -> Option<u32> {
        ioctl::speed(&self.control, &self.name)
    }

    fn netlink(&self) -> MutexGuard<'_, Netlink> {
        self.route.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_known() {
        let lo = NetDev::open("lo").unwrap();
        assert_eq!((lo.name(), lo.index()), ("lo", 1));
        assert!(lo.mtu().unwrap() >= 1500);
        assert_eq!(lo.mac().unwrap(), MacAddr([0; 6]));
        assert!(lo.is_ethernet().unwrap());
        assert_ne!(lo.link(), Link::Gone);
        let counters = lo.counters().unwrap();
        // The loopback interface receives all packets sent through it.
        assert_eq!(counters.tx_errors, 0);
        assert!(counters.rx_bytes >= counters.rx_packets);
    }

    #[test]
    fn missing_interface_is_enodev() {
        let error = NetDev::open("nosuchdev0").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        let error = NetDev::open("a-name-that-is-much-too-long").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert_eq!(NetDev::open("").unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
