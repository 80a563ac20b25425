//! The interface of a host's port: addresses, routes, VLAN, MTU.

use std::fs;
use std::net::IpAddr;
use std::str::FromStr;

use offcore_flow::switch::HostIface;
use offcore_port::PortError;
use offcore_port::spec::{PortSpec, TapSpec, split_fields};
use offcore_tcp::proto::{Prefix, Route};
use offcore_wire::MacAddr;

use crate::names::Names;

/// Option keys of every host port.
const KEYS: [&str; 6] = ["addr", "gw", "route", "vlan", "mtu", "mac"];

/// A port of a host, and its interface.
#[derive(Clone, Debug)]
pub struct HostPort {
    pub spec: PortSpec,
    pub iface: HostIface,
}

/// Parses a port as in `offcore tcp --port`: a port's specification with the keys of the interface.
impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut iface = HostIface::default();
        let mut rest = Vec::new();
        for field in split_fields(text)? {
            match field.split_once('=') {
                Some((key, value)) if KEYS.contains(&key) => set(&mut iface, key, value)?,
                _ => rest.push(field),
            }
        }
        // The text is left out of errors, because clap prints it before the error.
        let mut spec: PortSpec = rest.join(",").parse().map_err(|error| match error {
            PortError::Syntax { expected, .. } if expected.contains("key '") => {
                format!("{expected}, {}", KEYS.join(", "))
            }
            PortError::Syntax { expected, .. } => expected,
            other => other.to_string(),
        })?;
        check(&iface, Names::Flags)?;
        if let Some(mtu) = iface.mtu {
            set_mtu(&mut spec, mtu);
        }
        complete(&mut iface, &spec);
        Ok(Self { spec, iface })
    }
}

/// Sets one value of an interface.
///
/// # Errors
/// A wrong value, or an address that is given twice.
pub(crate) fn set(iface: &mut HostIface, key: &str, value: &str) -> Result<(), String> {
    match (key, value) {
        ("addr", "dhcp") => iface.dhcp = true,
        ("addr", "slaac") => iface.slaac = true,
        ("addr", _) => {
            let prefix = prefix(value)?;
            if iface.addresses.iter().any(|other| other.address == prefix.address) {
                return Err(format!("addr={value}: this address is given twice"));
            }
            iface.addresses.push(prefix);
        }
        ("gw", _) => {
            let gateway = value
                .parse()
                .map_err(|_| format!("gw={value}: expected an IPv4 or IPv6 address, such as 10.0.0.1"))?;
            iface.routes.push(Route::default_by(gateway));
        }
        ("route", _) => iface.routes.push(route(value)?),
        ("vlan", _) => {
            let vlan = value.parse().ok().filter(|vlan| (1..=4094).contains(vlan));
            iface.vlan = Some(vlan.ok_or_else(|| format!("vlan={value}: expected 1 to 4094"))?);
        }
        ("mtu", _) => {
            let mtu = value.parse().ok().filter(|mtu| (576..=9000).contains(mtu));
            iface.mtu = Some(mtu.ok_or_else(|| format!("mtu={value}: expected 576 to 9000"))?);
        }
        _ => {
            let mac = value.parse::<MacAddr>().ok().filter(|mac| mac.is_unicast());
            iface.mac = Some(mac.ok_or_else(|| {
                format!("mac={value}: expected a unicast address, such as 02:00:00:00:00:02")
            })?);
        }
    }
    Ok(())
}

/// Passes the MTU on to ports that configure their buffers or device for it.
pub(crate) fn set_mtu(spec: &mut PortSpec, mtu: u16) {
    match spec {
        PortSpec::Dpdk(spec) => spec.mtu = Some(mtu),
        PortSpec::VirtioUser(spec) => spec.mtu = Some(mtu),
        PortSpec::Impair(spec) => set_mtu(&mut spec.port, mtu),
        _ => {}
    }
}

/// Chooses the Ethernet address of a host on a TAP port, whose own address belongs to the kernel. Without addresses, it
/// depends on the interface's name.
pub(crate) fn complete(iface: &mut HostIface, spec: &PortSpec) {
    if let PortSpec::Tap(TapSpec { name, .. }) = spec.bare()
        && iface.mac.is_none()
    {
        let named = || named_mac(&format!("tap:{name}"));
        iface.mac = Some(iface.addresses.first().map_or_else(named, own_mac));
    }
}

/// Checks that no two ports of a host have the same address. Link-local IPv6 addresses must be unique only on their
/// link.
///
/// # Errors
/// Two ports and their common address.
pub fn check_addresses(ports: &[HostPort]) -> Result<(), String> {
    // copy-ok: a few addresses, once at the start
    let ifaces: Vec<HostIface> = ports.iter().map(|port| port.iface.clone()).collect();
    for (index, HostPort { spec, iface }) in ports.iter().enumerate() {
        if let Some((other, address)) = shared_address(iface, &ifaces[..index]) {
            return Err(format!(
                "--port {} and --port {spec}: both have addr={address}; expected a different address for each",
                ports[other].spec
            ));
        }
    }
    Ok(())
}

/// Returns the first of `others` that has an address of `iface`, with the address.
pub(crate) fn shared_address(iface: &HostIface, others: &[HostIface]) -> Option<(usize, IpAddr)> {
    iface.addresses.iter().find_map(|Prefix { address, .. }| {
        let is_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
        let has = |other: &HostIface| other.addresses.iter().any(|own| own.address == *address);
        let other = others.iter().position(has).filter(|_| !is_local)?;
        Some((other, *address))
    })
}

/// Checks an interface's options against each other.
///
/// # Errors
/// Settings that cannot work together.
pub(crate) fn check(iface: &HostIface, names: Names) -> Result<(), String> {
    let example = match names {
        Names::Flags => "addr=ADDRESS/LENGTH, such as addr=10.0.0.2/24, addr=dhcp or addr=slaac",
        Names::File => "addresses, such as [\"10.0.0.2/24\"], [\"dhcp\"] or [\"slaac\"]",
    };
    if let Some(mtu) = iface.mtu.filter(|mtu| *mtu < 1280)
        && (iface.slaac || iface.addresses.iter().any(|prefix| prefix.address.is_ipv6()))
    {
        return Err(format!("mtu={mtu}: expected 1280 or more with an IPv6 address (RFC 8200)"));
    }
    if iface.addresses.is_empty() && !iface.is_configured() {
        return Err(format!("no address: expected {example}"));
    }
    if let Some(prefix) = iface.addresses.iter().find(|prefix| !is_host(prefix)) {
        let Prefix { address, len } = prefix;
        let given = if names == Names::Flags { "addr=" } else { "" };
        return Err(format!(
            "{given}{address}/{len}: this is a network or broadcast address, expected a host's address"
        ));
    }
    if let Some(route) = iface.routes.iter().find(|route| !on_link(&iface.addresses, route.gateway)) {
        if !iface.addresses.iter().any(|own| own.address.is_ipv4() == route.gateway.is_ipv4()) {
            let family = if route.gateway.is_ipv4() { "IPv4" } else { "IPv6" };
            return Err(format!("{}: expected an {family} address beside it", described(route, names)));
        }
        return Err(format!(
            "{}: expected a gateway in the network of one of the addresses, or an address with /32 (IPv6: /128), which \
             allows any gateway",
            described(route, names)
        ));
    }
    Ok(())
}

/// Returns whether an address is a host's address, and neither the network's nor a broadcast address.
fn is_host(prefix: &Prefix) -> bool {
    let IpAddr::V4(address) = prefix.address else { return true };
    let hosts = u32::MAX.checked_shr(prefix.len.into()).unwrap_or(0);
    // Networks with one or two addresses have neither (RFC 3021).
    let host = address.to_bits() & hosts;
    hosts < 2 || (host != 0 && host != hosts)
}

/// Formats a route in the syntax of `--port`, or of a file.
fn described(route: &Route, names: Names) -> String {
    let (gateway, network) = match names {
        Names::Flags => ("gw=", "route="),
        Names::File => ("gateway ", "route "),
    };
    match route.to {
        Prefix { address, len: 0 } if address.is_unspecified() => format!("{gateway}{}", route.gateway),
        Prefix { address, len } => format!("{network}{address}/{len}@{}", route.gateway),
    }
}

/// Parses a network and its gateway.
fn route(text: &str) -> Result<Route, String> {
    let expected = || {
        format!(
            "route={text}: expected NETWORK/LENGTH@GATEWAY, such as 10.1.0.0/16@10.0.0.254 or fd01::/48@fe80::1"
        )
    };
    let (network, gateway) = text.split_once('@').ok_or_else(expected)?;
    let (address, len) = network.split_once('/').ok_or_else(expected)?;
    let address: IpAddr = address.parse().map_err(|_| expected())?;
    let gateway: IpAddr = gateway.parse().map_err(|_| expected())?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let len: u8 = len.parse().ok().filter(|len| *len <= longest).ok_or_else(expected)?;
    if address.is_ipv4() != gateway.is_ipv4() {
        return Err(format!("route={text}: expected a network and a gateway of the same address family"));
    }
    let to = Prefix { address, len };
    let network = to.network();
    if network != address {
        return Err(format!("route={text}: bits after the prefix are set, expected {network}/{len}"));
    }
    Ok(Route { to, gateway })
}

/// Returns whether a gateway can be reached on the link. A host with a /32 or /128 address reaches any gateway there,
/// as with `onlink` of ip-route(8). Clouds and Calico configure hosts like that.
fn on_link(addresses: &[Prefix], gateway: IpAddr) -> bool {
    let link_local = matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
    let alone = if gateway.is_ipv4() { 32 } else { 128 };
    let reaches = |prefix: &Prefix| {
        prefix.contains(gateway) || prefix.len == alone && prefix.address.is_ipv4() == gateway.is_ipv4()
    };
    let is_host = !gateway.is_multicast() && !gateway.is_unspecified() && !gateway.is_loopback();
    let is_own = addresses.iter().any(|prefix| prefix.address == gateway);
    is_host && !is_own && (link_local || addresses.iter().any(reaches))
}

/// Parses an address and the length of its network's prefix.
fn prefix(text: &str) -> Result<Prefix, String> {
    let expected = || {
        format!("addr={text}: expected ADDRESS/LENGTH, such as 10.0.0.2/24 or fd00::2/64, or dhcp or slaac")
    };
    let (address, len) = text.split_once('/').ok_or_else(expected)?;
    let address: IpAddr = address.parse().map_err(|_| expected())?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let len = len.parse().ok().filter(|len| *len <= longest);
    let len = len.ok_or_else(|| format!("addr={text}: expected a length of 0 to {longest}"))?;
    if address.is_multicast() || address.is_unspecified() || address.is_loopback() {
        return Err(format!("addr={text}: expected a unicast address that is not a loopback address"));
    }
    Ok(Prefix { address, len })
}

/// Returns a locally administered Ethernet address derived from an IP address, so that hosts on one link differ.
fn own_mac(prefix: &Prefix) -> MacAddr {
    match prefix.address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            MacAddr([0x02, 0x0f, a, b, c, d])
        }
        IpAddr::V6(address) => {
            let [.., a, b, c, d] = address.octets();
            MacAddr([0x02, 0x6f, a, b, c, d])
        }
    }
}

/// Returns a local Ethernet address for a host whose IP addresses come from the network. It depends on the machine ID,
/// the host name and the port, so the network recognizes the host after a restart. Containers do not have their own
/// machine ID.
fn named_mac(port: &str) -> MacAddr {
    let machine = fs::read("/etc/machine-id").unwrap_or_default();
    let host = fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    // FNV-1a.
    let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let name = machine.iter().chain(&host).chain(port.as_bytes());
    let [a, b, c, d, e, ..] = name.fold(0xcbf2_9ce4_8422_2325, hash).to_be_bytes();
    MacAddr([0x02, a, b, c, d, e])
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use super::*;

    #[test]
    fn ports_have_addresses() {
        let port: HostPort =
            "tap:tap0,addr=10.0.0.2/24,offloads=off,addr=fd00::2/64,gw=10.0.0.1,mtu=9000".parse().unwrap();
        assert_eq!(port.spec.to_string(), "tap:tap0,offloads=off");
        assert_eq!((port.iface.addresses.len(), port.iface.routes.len(), port.iface.mtu), (2, 1, Some(9000)));
        assert_eq!(port.iface.mac, Some(MacAddr([0x02, 0x0f, 10, 0, 0, 2])));
        // Some ports get the MTU, too. Fields in brackets belong to the port.
        for (text, spec) in [
            ("virtio-user:/s,mtu=9000,addr=10.0.0.2/24,packed", "virtio-user:/s,packed,mtu=9000"),
            ("vhost:/s,mtu=9000,addr=10.0.0.2/24", "vhost:/s"),
            (
                "impair:loss=1%,dpdk:net_tap0,mtu=3000,args=[iface=a,mac=fixed],addr=10.0.0.2/24",
                "impair:loss=1%,dpdk:net_tap0,mtu=3000,args=[iface=a,mac=fixed]",
            ),
        ] {
            assert_eq!(text.parse::<HostPort>().unwrap().spec.to_string(), spec);
        }
        let port: HostPort = "impair:loss=1%,delay=5ms,tap:tap0,addr=10.0.0.2/24".parse().unwrap();
        assert_eq!(port.spec.to_string(), "impair:loss=1%,delay=5ms,tap:tap0");
        assert_eq!(port.iface.mac, Some(MacAddr([0x02, 0x0f, 10, 0, 0, 2])));
    }

    #[test]
    fn ports_have_routes_and_a_vlan() {
        let text = "tap:tap0,addr=10.0.0.2/24,addr=fd00::2/64,gw=10.0.0.1,route=10.1.0.0/16@10.0.0.254,\
                    route=fd01::/48@fe80::1,vlan=10";
        let port: HostPort = text.parse().unwrap();
        assert_eq!((port.spec.to_string(), port.iface.vlan), ("tap:tap0".into(), Some(10)));
        let routes: Vec<String> =
            port.iface.routes.iter().map(|route| described(route, Names::Flags)).collect();
        assert_eq!(routes, ["gw=10.0.0.1", "route=10.1.0.0/16@10.0.0.254", "route=fd01::/48@fe80::1"]);
    }

    #[test]
    fn dhcp_gives_the_address() {
        let port: HostPort = "tap:tap0,addr=dhcp,addr=fd00::2/64".parse().unwrap();
        assert!(port.iface.dhcp && port.iface.addresses.len() == 1);
        let [one, same, other] = ["tap:tap0,addr=dhcp", "tap:tap0,addr=dhcp", "tap:tap1,addr=dhcp"]
            .map(|text| text.parse::<HostPort>().unwrap().iface.mac.unwrap());
        assert!(one == same && one != other && one.is_unicast());
    }

    #[test]
    fn duplicate_host_addresses_are_refused() {
        let checked = |texts: [&str; 2]| check_addresses(&texts.map(|text| text.parse().unwrap()));
        let error =
            checked(["tap:a,addr=10.0.0.2/24,addr=fd00::2/64", "tap:b,addr=10.0.1.2/24,addr=fd00::2/48"])
                .unwrap_err();
        assert!(error.starts_with("--port tap:a and --port tap:b: both have addr=fd00::2;"), "{error}");
        checked(["tap:a,addr=10.0.0.2/24,addr=fe80::2/64", "tap:b,addr=10.0.0.3/24,addr=fe80::2/64"])
            .unwrap();
    }

    #[test]
    fn slash_32_address_takes_any_gateway() {
        for text in [
            "tap:tap0,addr=10.9.0.2/32,gw=169.254.1.1",
            "tap:tap0,addr=10.0.0.2/24,addr=10.9.0.2/32,gw=10.1.0.1",
            "tap:tap0,addr=2001:db8::2/128,gw=2001:db8:1::1",
        ] {
            let port: HostPort = text.parse().unwrap();
            assert_eq!(port.iface.routes.len(), 1, "{text}");
        }
    }

    #[test]
    fn wrong_addresses_are_named() {
        for (text, expected) in [
            ("tap:tap0", "no address"),
            ("tap:tap0,addr=10.0.0.2", "addr=10.0.0.2: expected ADDRESS/LENGTH"),
            ("tap:tap0,addr=10.0.0.2/33", "expected a length of 0 to 32"),
            ("tap:tap0,addr=dhpc", "or dhcp or slaac"),
            ("tap:tap0,addr=127.0.0.1/8", "not a loopback address"),
            ("tap:tap0,addr=10.0.0.2/24,addr=10.0.0.2/24", "given twice"),
            ("tap:tap0,adr=10.0.0.2/24", "addr, gw, route"),
            ("tap:tap0,addr=10.0.0.2/24,gw=fd00::1", "expected an IPv6 address"),
            ("tap:tap0,addr=224.0.0.1/24", "expected a unicast address"),
            ("tap:tap0,addr=10.0.0.0/24", "addr=10.0.0.0/24: this is a network or broadcast address"),
            ("tap:tap0,addr=10.0.0.255/24", "expected a host's address"),
            ("tap:tap0,addr=10.0.0.2/24,gw=10.0.1.1", "gw=10.0.1.1: expected a gateway in the network"),
            ("tap:tap0,addr=10.0.0.2/24,addr=fd00::2/128,gw=10.0.1.1", "gw=10.0.1.1: expected a gateway"),
            ("tap:tap0,addr=10.0.0.2/32,gw=10.0.0.2", "gw=10.0.0.2: expected a gateway"),
            ("tap:tap0,addr=10.0.0.2/32,gw=224.0.0.1", "gw=224.0.0.1: expected a gateway"),
            ("tap:tap0,addr=10.0.0.2/24,gw=x", "gw=x: expected an IPv4 or IPv6 address"),
            ("tap:tap0,addr=10.0.0.2/24,route=10.1.0.0/16", "expected NETWORK/LENGTH@GATEWAY"),
            ("tap:tap0,addr=10.0.0.2/24,route=10.1.2.3/16@10.0.0.1", "expected 10.1.0.0/16"),
            ("tap:tap0,addr=10.0.0.2/24,route=10.1.0.0/16@fe80::1", "same address family"),
            (
                "tap:tap0,addr=10.0.0.2/24,route=10.1.0.0/16@10.0.1.1",
                "route=10.1.0.0/16@10.0.1.1: expected a gateway",
            ),
            ("tap:tap0,addr=10.0.0.2/24,vlan=0", "vlan=0: expected 1 to 4094"),
            ("tap:tap0,addr=10.0.0.2/24,vlan=4095", "vlan=4095: expected 1 to 4094"),
            ("tap:tap0,addr=10.0.0.2/24,mtu=60", "mtu=60: expected 576 to 9000"),
            ("tap:tap0,addr=fd00::2/64,mtu=600", "mtu=600: expected 1280 or more"),
            ("tap:tap0,addr=10.0.0.2/24,mac=ff:ff:ff:ff:ff:ff", "expected a unicast address"),
            ("tap:tap0,addr=10.0.0.2/24,what=1", "what"),
        ] {
            let error = text.parse::<HostPort>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
