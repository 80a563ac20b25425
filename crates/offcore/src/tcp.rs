//! `offcore tcp`: a TCP/IP host on ports, with a small application.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{fmt, fs};

use clap::Args;
use offcore_dma::Mode;
use offcore_flow::host::apps::streams::Stream;
use offcore_flow::host::apps::{Hosted, Service};
use offcore_flow::host::serve::ServeConfig;
use offcore_flow::switch::{HostIface, Hosting, Run};
use offcore_flow::{Idle, SwitchConfig};
use offcore_mem::BURST;
use offcore_port::spec::{PortSpec, split_fields};
use offcore_tcp::proto::{Algorithm, Prefix, Route};
use offcore_wire::MacAddr;
use rustix::process::Pid;

use crate::args::flags::by_flag;
use crate::args::{EngineArgs, RunArgs, congestion, idle, mode, port};
use crate::switch::{Watching, plan, report, run_switch};
use crate::{Failure, home};

/// The default of `--app-memory`, in MiB.
const APP_MEMORY: u32 = 256;
/// The default of `--app-connections`: a sixteenth of a stack's connections, and the number of an application's sessions.
const APP_CONNECTIONS: u32 = 65_536;

/// The examples of `offcore tcp --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Measure the cost of a segment, with copies by the core and by an engine. No
  root, hugepages or hardware needed:
    offcore tcp --demo
  It takes about 20 seconds; --quick is shorter and less accurate.

  Run a host with an echo service. The kernel reaches it through the new
  interface tap0; as root:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --app echo
  Then, in another terminal:
    ip addr add 10.0.0.1/24 dev tap0
    ping 10.0.0.2
    nc 10.0.0.2 7

  Run a sink, with copies by a helper thread on lcore 1, IPv4 and IPv6, and a
  gateway:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24,addr=fd00::2/64,gw=10.0.0.1 \\
      --app sink:5001 --dma 'rxq0@core:1;txq0@core:1' --mode offload

  Use two lcores, with a queue for each:
    offcore tcp --port tap:tap0,queues=2,addr=10.0.0.2/24 --lcores 0,1

  Serve the files of a directory by HTTP on port 8080; the worker sleeps while
  it is idle:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --app http:/srv/www:8080 \\
      --idle sleep

  Serve applications in other processes of root and of user 33, which attach to
  a socket:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --idle sleep \\
      --serve /run/offcore/stack.sock --allow-uid 33

A port is written as in `offcore switch --help`, plus addr=ADDRESS/LENGTH (once
or more), addr=dhcp, addr=slaac, gw=ADDRESS, route=NETWORK/LENGTH@GATEWAY (once
or more), vlan=NUMBER, mtu=BYTES and mac=ADDRESS. The MTU is that of the port's
interface, limited by mtu=. The host's Ethernet address is the port's by
default, except on a TAP port, whose interface address belongs to the kernel.
rxqN and txqN name the copies of the Nth lcore, counted from 0: from packets to
receive buffers and from send buffers to packets. Each flow belongs to one
lcore. For a port without multi-buffer packets a segment's payload fills one
buffer: more than 1792 bytes need a larger --mbuf-size.";

/// What `offcore tcp` understands.
#[derive(Args, Debug)]
pub(crate) struct TcpArgs {
    /// A port with its addresses, as KIND:ARGS,addr=10.0.0.2/24[,gw=10.0.0.1]; once for each port
    #[arg(long = "port", value_name = "SPEC", required = true)]
    pub ports: Vec<HostPortArg>,

    /// Lcores, packet buffers, reports.
    #[command(flatten)]
    pub run: RunArgs,

    /// Copy engines.
    #[command(flatten)]
    pub engines: EngineArgs,

    /// The service: echo, sink, source or http:DIR, optionally with a colon and another port [ports: 7, 9, 19, 80]
    #[arg(long, value_name = "APP", default_value = "echo", conflicts_with = "serve")]
    pub app: AppArg,

    /// Instead of --app: serves applications in other processes, which attach to a socket at this path
    #[arg(long, value_name = "PATH")]
    pub serve: Option<PathBuf>,

    /// Admits processes of the user with this number, in addition to the stack's user and root; once or more
    #[arg(long, value_name = "UID", requires = "serve", value_parser = uid)]
    pub allow_uid: Vec<u32>,

    /// Most MiB of memory for the data of one application's connections [default: 256]
    #[arg(long, value_name = "MIB", requires = "serve", value_parser = clap::value_parser!(u32).range(4..=65_536))]
    pub app_memory: Option<u32>,

    /// Most connections, datagram sockets and listeners of one application [default: 65536]
    #[arg(long, value_name = "N", requires = "serve", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub app_connections: Option<u32>,

    /// Ends when this parent process has ended and no application is left, and removes the socket's directory. Set by `offcore exec`
    #[arg(long, hide = true, value_name = "PID", requires = "serve", value_parser = clap::value_parser!(i32).range(1..))]
    pub parent: Option<i32>,

    /// The copy mode; auto chooses by measurements [default: offload if a queue is mapped, else cpu]
    #[arg(long, value_name = "MODE", value_parser = mode())]
    pub mode: Option<Mode>,

    /// Adds a table of up to 1000 connections to reports
    #[arg(long)]
    pub connections: bool,

    /// Congestion control of connections, unless an application sets another one (TCP_CONGESTION)
    #[arg(long, value_name = "NAME", default_value = "cubic", value_parser = congestion())]
    pub congestion: Algorithm,

    /// Behaviour of an idle worker: poll, or sleep until an event
    #[arg(long, value_name = "WHAT", default_value = "poll", value_parser = idle())]
    pub idle: Idle,
}

/// A user's number.
fn uid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| {
        format!("expected a user's number, such as 33: `id -u {text}` prints the number of a name")
    })
}

/// A port and its interface.
#[derive(Clone, Debug)]
pub(crate) struct HostPortArg {
    pub spec: PortSpec,
    pub iface: HostIface,
}

impl FromStr for HostPortArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut iface = HostIface::default();
        let (mut rest, mut given_mtu) = (Vec::new(), None);
        for field in split_fields(text)? {
            match field.split_once('=') {
                Some(("addr", "dhcp")) => iface.dhcp = true,
                Some(("addr", "slaac")) => iface.slaac = true,
                Some(("addr", value)) => iface.addresses.push(prefix(value)?),
                Some(("gw", value)) => {
                    let gateway = value.parse().map_err(|_| {
                        format!("gw={value}: expected an IPv4 or IPv6 address, such as 10.0.0.1")
                    })?;
                    iface.routes.push(Route::default_by(gateway));
                }
                Some(("route", value)) => iface.routes.push(route(value)?),
                Some(("vlan", value)) => {
                    let vlan = value.parse().ok().filter(|vlan| (1..=4094).contains(vlan));
                    iface.vlan = Some(vlan.ok_or_else(|| format!("vlan={value}: expected 1 to 4094"))?);
                }
                Some(("mtu", value)) => {
                    let mtu = value.parse().ok().filter(|mtu| (576..=9000).contains(mtu));
                    iface.mtu = Some(mtu.ok_or_else(|| format!("mtu={value}: expected 576 to 9000"))?);
                    given_mtu = Some(field);
                }
                Some(("mac", value)) => {
                    let mac = value.parse::<MacAddr>().ok().filter(|mac| mac.is_unicast());
                    iface.mac = Some(mac.ok_or_else(|| {
                        format!("mac={value}: expected a unicast address, such as 02:00:00:00:00:02")
                    })?);
                }
                _ => rest.push(field),
            }
        }
        let mut spec = port(&rest.join(","))?;
        if let Some(mtu) = iface.mtu.filter(|mtu| *mtu < 1280)
            && (iface.slaac || iface.addresses.iter().any(|prefix| prefix.address.is_ipv6()))
        {
            return Err(format!("mtu={mtu}: expected 1280 or more with an IPv6 address (RFC 8200)"));
        }
        if iface.addresses.is_empty() && !iface.is_configured() {
            return Err(
                "no address: expected addr=ADDRESS/LENGTH, such as addr=10.0.0.2/24, addr=dhcp or addr=slaac"
                    .into(),
            );
        }
        if let Some(prefix) = iface.addresses.iter().find(|prefix| !is_host(prefix)) {
            let Prefix { address, len } = prefix;
            return Err(format!(
                "addr={address}/{len}: this is a network or broadcast address, expected a host's address"
            ));
        }
        if let Some(route) = iface.routes.iter().find(|route| !on_link(&iface.addresses, route.gateway)) {
            return Err(format!(
                "{}: expected a gateway in the network of an addr=, or an addr= with /32 (IPv6: /128), which allows any \
                 gateway",
                described(route)
            ));
        }
        // These ports configure their buffers or device for the MTU.
        if let Some(field) = given_mtu
            && matches!(spec.bare(), PortSpec::Dpdk(_) | PortSpec::VirtioUser(_))
        {
            rest.push(field);
            spec = port(&rest.join(","))?;
        }
        if matches!(spec.bare(), PortSpec::Tap(_)) && iface.mac.is_none() {
            let named = || named_mac(rest.first().copied().unwrap_or(text));
            iface.mac = Some(iface.addresses.first().map_or_else(named, own_mac));
        }
        Ok(Self { spec, iface })
    }
}

/// Whether an address is a host's address, and neither the network's nor a broadcast address.
fn is_host(prefix: &Prefix) -> bool {
    let IpAddr::V4(address) = prefix.address else { return true };
    let hosts = u32::MAX.checked_shr(prefix.len.into()).unwrap_or(0);
    // Networks with one or two addresses have neither (RFC 3021).
    let host = address.to_bits() & hosts;
    hosts < 2 || (host != 0 && host != hosts)
}

/// A route in the syntax of `--port`.
fn described(route: &Route) -> String {
    match route.to {
        Prefix { address, len: 0 } if address.is_unspecified() => format!("gw={}", route.gateway),
        Prefix { address, len } => format!("route={address}/{len}@{}", route.gateway),
    }
}

/// A network and its gateway.
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

/// Whether a gateway can be reached on the link. A host with a /32 or /128 address reaches any gateway there, as with
/// `onlink` of ip-route(8): clouds and Calico configure hosts like that.
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

/// An address and the length of its network's prefix.
fn prefix(text: &str) -> Result<Prefix, String> {
    let expected = || format!("addr={text}: expected ADDRESS/LENGTH, such as 10.0.0.2/24 or fd00::2/64");
    let (address, len) = text.split_once('/').ok_or_else(expected)?;
    let address: IpAddr = address.parse().map_err(|_| expected())?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let len = len.parse().ok().filter(|len| *len <= longest).ok_or_else(expected)?;
    if address.is_multicast() || address.is_unspecified() || address.is_loopback() {
        return Err(format!("addr={text}: expected a unicast address"));
    }
    Ok(Prefix { address, len })
}

/// A locally administered Ethernet address derived from an IP address, so that hosts on one link differ.
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

/// A local Ethernet address for a host whose IP addresses come from the network. It depends on the machine, its host name and the
/// port, so the network recognizes the host after a restart. Containers have no machine number of their own.
fn named_mac(port: &str) -> MacAddr {
    let machine = fs::read("/etc/machine-id").unwrap_or_default();
    let host = fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    // FNV-1a.
    let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let name = machine.iter().chain(&host).chain(port.as_bytes());
    let [a, b, c, d, e, ..] = name.fold(0xcbf2_9ce4_8422_2325, hash).to_be_bytes();
    MacAddr([0x02, a, b, c, d, e])
}

/// The application and where it listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AppArg {
    service: Service,
    port: u16,
}

impl FromStr for AppArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let (stream, usual) = match name {
            "echo" => (Stream::Echo, 7),
            "sink" => (Stream::Sink, 9),
            "source" => (Stream::Source, 19),
            "http" => return http_app(rest.unwrap_or_default()),
            _ => return Err("expected echo, sink, source or http:DIR, such as echo:7000".into()),
        };
        let port = rest.map_or(Ok(usual), tcp_port)?;
        Ok(Self { service: Service::Stream(stream), port })
    }
}

/// The part of `--app` behind `http:`: a directory, and a port behind its last colon, where a number is.
fn http_app(rest: &str) -> Result<AppArg, String> {
    let is_number = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let (directory, port) = match rest.rsplit_once(':').filter(|(_, port)| is_number(port)) {
        Some((directory, port)) => (directory, tcp_port(port)?),
        None => (rest, 80),
    };
    if directory.is_empty() {
        return Err("expected http:DIR, such as http:/srv/www or http:/srv/www:8080".into());
    }
    Ok(AppArg { service: Service::Http(PathBuf::from(directory)), port })
}

fn tcp_port(port: &str) -> Result<u16, String> {
    let number = port.parse().ok().filter(|port| *port > 0);
    number.ok_or_else(|| format!("port '{port}': expected 1 to 65535"))
}

impl fmt::Display for AppArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.service {
            Service::Stream(Stream::Echo) => write!(f, "echo:{}", self.port),
            Service::Stream(Stream::Sink) => write!(f, "sink:{}", self.port),
            Service::Stream(Stream::Source) => write!(f, "source:{}", self.port),
            Service::Http(directory) => write!(f, "http:{}:{}", directory.display(), self.port),
        }
    }
}

/// Runs the host until something stops it.
///
/// # Errors
/// [`Failure::Usage`] for flags that contradict each other, [`Failure::Failed`] for the rest.
pub(crate) fn run(args: &TcpArgs) -> Result<(), Failure> {
    let (config, ports) = plan(args)?;
    if let Some(path) = &args.serve {
        home::make_way(path)?;
    }
    // Files that are sent take descriptors, and so does each session of another process.
    if args.serve.is_some() || matches!(args.app.service, Service::Http(_)) {
        crate::switch::ports::raise_descriptors();
    }
    let watching = Watching::new(&ports, &args.run, false, report::tables);
    let result = run_switch(&config, Watching { parent: args.parent.and_then(Pid::from_raw), ..watching });
    if let (Some(_), Some(directory)) = (args.parent, args.serve.as_deref().and_then(Path::parent)) {
        let _ = fs::remove_dir(directory);
    }
    result
}

fn plan(args: &TcpArgs) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    let app = match &args.serve {
        Some(path) => Hosted::Others(ServeConfig {
            path: path.clone(),
            allow: args.allow_uid.clone(),
            memory: (args.app_memory.unwrap_or(APP_MEMORY) as usize) << 20,
            connections: args.app_connections.unwrap_or(APP_CONNECTIONS) as usize,
        }),
        None => Hosted::Service(args.app.service.clone(), args.app.port),
    };
    let (mut config, ports) = host(&args.ports, app, &args.run, &args.engines, args.mode)?;
    if let Run::Host(hosting) = &mut config.run {
        hosting.connections = args.connections;
        hosting.congestion = args.congestion;
    }
    Ok((SwitchConfig { idle: args.idle, ..config }, ports))
}

/// A host with an application on it.
pub(crate) fn host(
    ports: &[HostPortArg],
    app: Hosted,
    run: &RunArgs,
    engines: &EngineArgs,
    mode: Option<Mode>,
) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    let ifaces = ports.iter().map(|port| port.iface.clone()).collect();
    let ports: Vec<PortSpec> = ports.iter().map(|port| port.spec.clone()).collect();
    plan::check_twice(&ports)?;
    let dma = plan::dma_map(engines.dma.clone(), &ports)?;
    let mapped = !dma.entries.is_empty();
    let lcores = match &run.lcores {
        Some(_) => plan::lcores(run.lcores.as_ref(), &engines.dsa_sims, &dma)?,
        None => plan::lcores(None, &engines.dsa_sims, &dma)?.into_iter().take(1).collect(),
    };
    let config = SwitchConfig {
        run: Run::Host(Hosting { ifaces, app, congestion: Algorithm::default(), connections: false }),
        mode: mode.unwrap_or(if mapped { Mode::Offload } else { Mode::Cpu }),
        lcores,
        simulators: engines.dsa_sims.clone(),
        dma,
        burst: BURST,
        ..SwitchConfig::default()
    };
    config.check(&ports).map_err(by_flag)?;
    Ok((config, ports))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Command;
    use crate::cli::lines::command;

    #[test]
    fn ports_have_addresses() {
        let port: HostPortArg =
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
            assert_eq!(text.parse::<HostPortArg>().unwrap().spec.to_string(), spec);
        }
        let port: HostPortArg = "impair:loss=1%,delay=5ms,tap:tap0,addr=10.0.0.2/24".parse().unwrap();
        assert_eq!(port.spec.to_string(), "impair:loss=1%,delay=5ms,tap:tap0");
        assert_eq!(port.iface.mac, Some(MacAddr([0x02, 0x0f, 10, 0, 0, 2])));
    }

    #[test]
    fn ports_have_routes_and_a_vlan() {
        let text = "tap:tap0,addr=10.0.0.2/24,addr=fd00::2/64,gw=10.0.0.1,route=10.1.0.0/16@10.0.0.254,\
                    route=fd01::/48@fe80::1,vlan=10";
        let port: HostPortArg = text.parse().unwrap();
        assert_eq!((port.spec.to_string(), port.iface.vlan), ("tap:tap0".into(), Some(10)));
        let routes: Vec<String> = port.iface.routes.iter().map(described).collect();
        assert_eq!(routes, ["gw=10.0.0.1", "route=10.1.0.0/16@10.0.0.254", "route=fd01::/48@fe80::1"]);
    }

    #[test]
    fn dhcp_gives_the_address() {
        let port: HostPortArg = "tap:tap0,addr=dhcp,addr=fd00::2/64".parse().unwrap();
        assert!(port.iface.dhcp && port.iface.addresses.len() == 1);
        let [one, same, other] = ["tap:tap0,addr=dhcp", "tap:tap0,addr=dhcp", "tap:tap1,addr=dhcp"]
            .map(|text| text.parse::<HostPortArg>().unwrap().iface.mac.unwrap());
        assert!(one == same && one != other && one.is_unicast());
    }

    #[test]
    fn lone_address_takes_any_gateway() {
        for text in [
            "tap:tap0,addr=10.9.0.2/32,gw=169.254.1.1",
            "tap:tap0,addr=10.0.0.2/24,addr=10.9.0.2/32,gw=10.1.0.1",
            "tap:tap0,addr=2001:db8::2/128,gw=2001:db8:1::1",
        ] {
            let port: HostPortArg = text.parse().unwrap();
            assert_eq!(port.iface.routes.len(), 1, "{text}");
        }
    }

    #[test]
    fn wrong_addresses_are_named() {
        for (text, expected) in [
            ("tap:tap0", "no address"),
            ("tap:tap0,addr=10.0.0.2", "addr=10.0.0.2: expected ADDRESS/LENGTH"),
            ("tap:tap0,addr=10.0.0.2/33", "expected ADDRESS/LENGTH"),
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
            let error = text.parse::<HostPortArg>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn apps_have_ports() {
        assert_eq!("sink".parse::<AppArg>().unwrap().to_string(), "sink:9");
        assert_eq!("echo:7000".parse::<AppArg>().unwrap().to_string(), "echo:7000");
        assert_eq!("http:/srv/www".parse::<AppArg>().unwrap().to_string(), "http:/srv/www:80");
        assert_eq!("http:a:b:8080".parse::<AppArg>().unwrap().to_string(), "http:a:b:8080");
        assert_eq!("http:a:b".parse::<AppArg>().unwrap().to_string(), "http:a:b:80");
        for nothing in ["http", "http:", "http::80"] {
            assert!(nothing.parse::<AppArg>().unwrap_err().contains("expected http:DIR"), "{nothing}");
        }
        assert!("http:/srv/www:0".parse::<AppArg>().unwrap_err().contains("expected 1 to 65535"));
        assert!("http:/srv/www:70000".parse::<AppArg>().unwrap_err().contains("expected 1 to 65535"));
        assert!("ftp".parse::<AppArg>().unwrap_err().contains("expected echo, sink, source or http:DIR"));
        assert!("echo:0".parse::<AppArg>().unwrap_err().contains("expected 1 to 65535"));
    }

    fn planned(flags: &str) -> Result<SwitchConfig, String> {
        let line = format!("offcore tcp --port tap:tap0,addr=10.0.0.2/24 {flags}");
        match command(&line) {
            Ok(Command::Tcp(args)) => plan(&args).map(|(config, _)| config),
            Ok(_) => Err("another command".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn congestion_control_has_its_name() {
        for (flags, expected) in [("", Algorithm::Cubic), ("--congestion bbr", Algorithm::Bbr)] {
            let Run::Host(hosting) = planned(flags).unwrap().run else { panic!("{flags}") };
            assert_eq!(hosting.congestion, expected);
        }
        assert!(planned("--congestion vegas").unwrap_err().contains("[possible values: cubic, reno, bbr]"));
    }

    #[test]
    fn applications_elsewhere_are_served_in_place_of_one_here() {
        let config =
            planned("--serve /run/s --allow-uid 33 --allow-uid 34 --app-memory 64 --app-connections 100")
                .unwrap();
        let Run::Host(Hosting { app: Hosted::Others(serve), .. }) = config.run else { panic!("{config:?}") };
        let expected =
            ServeConfig { path: "/run/s".into(), allow: vec![33, 34], memory: 64 << 20, connections: 100 };
        assert_eq!(serve, expected);
        for (flags, expected) in [
            ("--serve /run/s --app sink", "cannot be used with"),
            ("--allow-uid 33", "--serve"),
            ("--serve /run/s --allow-uid www-data", "expected a user's number, such as 33: `id -u www-data`"),
            ("--app-memory 64", "--serve"),
            ("--serve /run/s --app-memory 1", "4..=65536"),
            ("--app-connections 9", "--serve"),
            ("--serve /run/s --app-connections 0", "1..=1048576"),
            ("--serve /run/s --lcores 0,1", "served by one lcore"),
        ] {
            let error = planned(flags).unwrap_err();
            assert!(error.contains(expected), "{flags}: {error}");
        }
    }
}
