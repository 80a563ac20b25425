//! Lists interfaces, addresses and routes through netlink: rtnetlink(7), and the generic netlink family `netdev` (the
//! kernel's Documentation/netlink/specs/netdev.yaml).

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::Xdp;
use crate::netdev::netlink::{Attributes, Netlink, attribute, number, route};

/// Length of a `struct ifaddrmsg` in bytes.
const IFADDRMSG: usize = 8;
const GETADDR: u16 = 22;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// Length of a `struct rtmsg` in bytes.
const RTMSG: usize = 12;
const GETROUTE: u16 = 26;
const RTN_UNICAST: u8 = 1;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_MULTIPATH: u16 = 9;
/// Length of a `struct rtnexthop` in bytes.
const RTNEXTHOP: usize = 8;

const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_PROG_ID: u16 = 4;

/// Length of a `struct genlmsghdr` in bytes.
const GENLMSGHDR: usize = 4;
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const XDP_ACT_BASIC: u64 = 1;
const XDP_ACT_REDIRECT: u64 = 1 << 1;
const XDP_ACT_XSK_ZEROCOPY: u64 = 1 << 3;

/// An interface in the kernel's list.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) index: u32,
    pub(super) name: String,
    /// The id of the attached XDP program.
    pub(super) program: Option<u32>,
    /// The index of the bridge or bond that the interface is a member of.
    pub(super) master: Option<u32>,
    /// The index of the lower interface, for a VLAN, a macvlan or a tunnel.
    pub(super) lower: Option<u32>,
}

fn narrow(value: &[u8]) -> Option<u32> {
    number(value).and_then(|number| u32::try_from(number).ok())
}

/// Returns the interfaces of this network namespace.
pub(super) fn list() -> io::Result<Vec<Listed>> {
    let answers = Netlink::route()?.dump(route::GETLINK, &route::link_request(0))?;
    let listed = answers.iter().filter_map(|answer| {
        let (fixed, attributes) = answer.parts(route::IFINFOMSG)?;
        let name = attributes.find(IFLA_IFNAME)?;
        let name = String::from_utf8_lossy(name.strip_suffix(b"\0").unwrap_or(name)).into_owned();
        let xdp = attributes.find(IFLA_XDP).map(Attributes);
        let program = xdp.and_then(|xdp| xdp.find(IFLA_XDP_PROG_ID)).and_then(narrow);
        // For a veth interface, IFLA_LINK is the peer. The index may also belong to another network namespace.
        let info = attributes.find(route::IFLA_LINKINFO).map(Attributes);
        let kind = info.and_then(|info| info.find(route::IFLA_INFO_KIND));
        let is_upper = !kind.is_some_and(|kind| kind.starts_with(b"veth"))
            && attributes.find(IFLA_LINK_NETNSID).is_none();
        Some(Listed {
            index: fixed.get(4..8).and_then(narrow)?,
            name,
            program: program.filter(|&id| id != 0),
            master: attributes.find(IFLA_MASTER).and_then(narrow),
            lower: attributes.find(IFLA_LINK).and_then(narrow).filter(|&lower| is_upper && lower != 0),
        })
    });
    Ok(listed.collect())
}

/// Returns IP addresses by interface index.
pub(super) fn addresses() -> io::Result<HashMap<u32, Vec<String>>> {
    let mut all: HashMap<u32, Vec<String>> = HashMap::new();
    for answer in Netlink::route()?.dump(GETADDR, &[0; IFADDRMSG])? {
        let Some((fixed, attributes)) = answer.parts(IFADDRMSG) else { continue };
        let Some(index) = fixed.get(4..8).and_then(narrow) else { continue };
        // On a point-to-point link, IFA_ADDRESS is the peer's address.
        let Some(value) = attributes.find(IFA_LOCAL).or_else(|| attributes.find(IFA_ADDRESS)) else {
            continue;
        };
        let address = match (value.as_array::<4>(), value.as_array::<16>()) {
            (Some(four), _) => Ipv4Addr::from(*four).to_string(),
            (_, Some(sixteen)) => Ipv6Addr::from(*sixteen).to_string(),
            _ => continue,
        };
        all.entry(index).or_default().push(format!("{address}/{}", fixed[1]));
    }
    Ok(all)
}

/// Returns the interfaces that have routes, and whether any of them is a default route. Routes that the kernel creates
/// for each interface are ignored: local routes, and link-local and multicast routes.
pub(super) fn routes() -> io::Result<HashMap<u32, bool>> {
    let mut all: HashMap<u32, bool> = HashMap::new();
    for answer in Netlink::route()?.dump(GETROUTE, &[0; RTMSG])? {
        let Some((fixed, attributes)) = answer.parts(RTMSG) else { continue };
        let link_local = |dst: &[u8]| matches!(dst, [0xfe, 0x80, ..] | [0xff, ..]) && dst.len() == 16;
        if fixed[7] != RTN_UNICAST || attributes.find(RTA_DST).is_some_and(link_local) {
            continue;
        }
        let one = attributes.find(RTA_OIF).and_then(narrow);
        let several = attributes.find(RTA_MULTIPATH).map(next_hops).unwrap_or_default();
        for index in one.into_iter().chain(several) {
            *all.entry(index).or_default() |= fixed[1] == 0;
        }
    }
    Ok(all)
}

/// Returns the interfaces of a list of `struct rtnexthop`.
fn next_hops(mut list: &[u8]) -> Vec<u32> {
    let mut interfaces = Vec::new();
    while let Some(hop) = list.get(..RTNEXTHOP) {
        interfaces.extend(narrow(&hop[4..]));
        let len = usize::from(u16::from_ne_bytes([hop[0], hop[1]])).max(RTNEXTHOP);
        list = list.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    interfaces
}

/// Returns a function that reports the XDP support of an interface's driver by interface index. `None` if the kernel
/// does not report it.
pub(super) fn xdp_features() -> Option<impl FnMut(u32) -> Xdp> {
    let mut netlink = Netlink::generic().ok()?;
    let request = |command: u8, attributes: &[u8]| [&[command, 1, 0, 0], attributes].concat();
    let family = netlink
        .ask(GENL_ID_CTRL, &request(CTRL_CMD_GETFAMILY, &attribute(CTRL_ATTR_FAMILY_NAME, b"netdev\0")));
    let family = family.ok()?.parts(GENLMSGHDR)?.1.find(CTRL_ATTR_FAMILY_ID).and_then(number)?;
    let family = u16::try_from(family).ok()?;
    Some(move |index: u32| {
        let body = request(NETDEV_CMD_DEV_GET, &attribute(NETDEV_A_DEV_IFINDEX, &index.to_ne_bytes()));
        let Ok(answer) = netlink.ask(family, &body) else { return Xdp::Unknown };
        let features = answer.parts(GENLMSGHDR).and_then(|(_, all)| all.find(NETDEV_A_DEV_XDP_FEATURES));
        match features.and_then(number) {
            None => Xdp::Unknown,
            Some(bits) if bits & XDP_ACT_XSK_ZEROCOPY != 0 => Xdp::ZeroCopy,
            Some(bits) if bits & XDP_ACT_BASIC != 0 && bits & XDP_ACT_REDIRECT != 0 => Xdp::Native,
            Some(_) => Xdp::Generic,
        }
    })
}
