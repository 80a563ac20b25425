//! The flags of `offcore pktgen`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use offcore_flow::pktgen::MAX_FLOWS;
use offcore_flow::pktgen::rate::Rate;
use offcore_flow::pktgen::sizes::Sizes;
use offcore_wire::MacAddr;

use crate::args::{PortArgs, RunArgs, interval, number, within};
use crate::bench::plot_file;

pub(crate) const EXAMPLES: &str = "\
Examples:
  A million packets a second of mixed sizes out of one interface and in at
  another, with what was lost, late or changed and how long they took, as root:
    offcore pktgen --port af_packet:eth0 --port af_packet:eth1 --rate 1M \\
      --size imix --flows 64 --duration 10

  What a switch with macswap behind a vhost-user socket sends back, as JSON:
    offcore pktgen --port virtio-user:/tmp/vm1.sock --rate 100k \\
      --count 1000000 --format json

  A capture byte for byte, ten times as fast as it was:
    offcore pktgen --port tap:tap0 --pcap in.pcap --speed 10

  The throughput of what is behind two ports without loss, and with little:
    offcore pktgen --port af_xdp:eth0 --port af_xdp:eth1 --rfc2544 \\
      --loss 0,0.01,0.1 --frame 64,512,1518 --plot throughput.svg

  From a script:
    (echo 'set rate 10k'; echo start; sleep 2; echo stats; echo quit) |
    offcore pktgen --port tap:tap0 --no-start

While it runs it reads commands, one a line:
  start, stop       send, or do not: a count begins anew
  set rate RATE     as --rate; in the same way: size, flows, burst, count
  stats             a report now
  clear             count from 0 again
  help, quit
The end of input ends a run only if nothing is being sent.

Sizes are with FCS: 64; 64-1518; 64:7,594:4,1518:1; imix (which is that).
Packets longer than a packet buffer take several.
Rates: 10k, 1.5M (packets a second), 2Gbps (bits of frames with FCS), 50%
(of the link with preambles and gaps), max. Of two ports, each has that rate.

A packet has a number, and the time it was due, behind its headers. Latencies
count from then, whether it could be sent then or not; at rate max, from when
it was made. A run that sends to a port the kernel is behind compares its counts with the
interface's, and says what differs.";

const PORTS: &str = "\
A port, as KIND:ARGS (see `offcore switch --help`): sends on it and receives from it; of two, sends on the first and \
receives from the second. Packets go to a port's first queue and come from all";
const LCORES: &str =
    "The lcores: one for all, or one for what sends and one for what receives [default: the first two]";
const DURATION: &str = "Stop after sending for this time; with --rfc2544, of each trial [default there: 5]";

// The parser ignores `requires` if a given flag conflicts with the required flag. Therefore, flags that require a
// capture or a search conflict with the same flags as the capture or the search.
const NOT_OF_CAPTURE: [&str; 13] = [
    "src_mac", "dst_mac", "vlan", "src_ip", "dst_ip", "src_port", "dst_port", "proto", "flows", "vary",
    "size", "burst", "rfc2544",
];
const NOT_OF_SEARCH: [&str; 4] = ["size", "count", "pcap", "no_start"];

const COUNT: &str = "expected a number of packets, 1 or more";
const SPEED: &str = "expected a factor such as 2 or 0.5";
const LOSS: &str = "expected percent such as 0 or 0.01, less than 100";
const RESOLUTION: &str = "expected percent from 0.001 to 50";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Proto {
    /// UDP.
    Udp,
    /// TCP segments of no connection.
    Tcp,
}

/// A field that differs from flow to flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Field {
    /// The source address.
    SrcIp,
    /// The destination address.
    DstIp,
    /// The source port.
    SrcPort,
    /// The destination port.
    DstPort,
}

#[derive(Args, Debug)]
#[command(mut_arg("ports", |arg| arg.help(PORTS)))]
#[command(mut_arg("lcores", |arg| arg.help(LCORES)))]
#[command(mut_arg("duration", |arg| arg.help(DURATION)))]
pub(crate) struct PktgenArgs {
    #[command(flatten)]
    pub at: PortArgs,

    #[command(flatten)]
    pub run: RunArgs,

    /// With two ports: each sends to the other
    #[arg(long)]
    pub bidirectional: bool,

    /// Source MAC address [default: the sending port's]
    #[arg(long, value_name = "MAC")]
    pub src_mac: Option<MacAddr>,

    /// Destination MAC address [default: the receiving port's]
    #[arg(long, value_name = "MAC")]
    pub dst_mac: Option<MacAddr>,

    /// Id of an 802.1Q tag
    #[arg(long, value_name = "ID", value_parser = within(0..=4094))]
    pub vlan: Option<usize>,

    /// Source address, IPv4 or IPv6 [default: 198.18.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub src_ip: Option<IpAddr>,

    /// Destination address [default: 198.18.0.2, or its like for IPv6]
    #[arg(long, value_name = "ADDRESS")]
    pub dst_ip: Option<IpAddr>,

    /// Source port [default: 9]
    #[arg(long, value_name = "PORT")]
    pub src_port: Option<u16>,

    /// Destination port [default: 9]
    #[arg(long, value_name = "PORT")]
    pub dst_port: Option<u16>,

    /// UDP or TCP [default: udp]
    #[arg(long, value_name = "PROTOCOL")]
    pub proto: Option<Proto>,

    /// Flows, which take turns; each has its own numbers [default: 1]
    #[arg(long, value_name = "N", value_parser = within(1..=MAX_FLOWS as usize))]
    pub flows: Option<usize>,

    /// What differs from flow to flow [default: src-ip,src-port]
    #[arg(long, value_name = "FIELDS", value_delimiter = ',')]
    pub vary: Vec<Field>,

    /// Sizes of packets, FCS included [default: 64, or the least that headers leave]
    #[arg(long, value_name = "SIZES", conflicts_with = "rfc2544")]
    pub size: Option<Sizes>,

    /// How fast [default: max; of a capture, its own time]
    #[arg(long, value_name = "RATE")]
    pub rate: Option<Rate>,

    /// Speed of the link that a rate in percent is a share of, such as 10Gbps [default: what the interface says]
    #[arg(long, value_name = "RATE", value_parser = link)]
    pub link: Option<f64>,

    /// Packets that are due together, at a rate
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=65536))]
    pub burst: usize,

    /// Stop after so many packets, of each sending port
    #[arg(long, value_name = "N", value_parser = number(1u64.., COUNT), conflicts_with = "rfc2544")]
    pub count: Option<u64>,

    /// How long to wait for packets that have not come, in the end and after each trial
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub wait: Duration,

    /// What decides on sizes: the same ones with the same seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Look at the content of one packet in N, byte for byte; 0: of none. Numbers and lengths are looked at in all
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(0..=1 << 30))]
    pub verify: usize,

    /// Send a capture's packets, byte for byte
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_OF_CAPTURE)]
    pub pcap: Option<PathBuf>,

    /// Send the capture so many times as fast as it was [default: 1]
    #[arg(long, value_name = "X", value_parser = number(1e-6..=1e6, SPEED), requires = "pcap", conflicts_with = "rate",
        conflicts_with_all = NOT_OF_CAPTURE)]
    pub speed: Option<f64>,

    /// Send the capture again and again
    #[arg(long = "loop", requires = "pcap", conflicts_with_all = NOT_OF_CAPTURE)]
    pub repeat: bool,

    /// Do not send before the command `start`
    #[arg(long, conflicts_with_all = ["no_interactive", "rfc2544"])]
    pub no_start: bool,

    /// Do not read commands
    #[arg(long)]
    pub no_interactive: bool,

    /// Search for the throughput at a loss (RFC 2544, 26.1); --rate is the highest that is tried [default: what can be
    /// sent]
    #[arg(long)]
    pub rfc2544: bool,

    /// Percent of packets that may be lost [default: 0]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', value_parser = number(0.0..100.0, LOSS), requires = "rfc2544",
        conflicts_with_all = NOT_OF_SEARCH)]
    pub loss: Vec<f64>,

    /// How exact the throughput is to be, in percent of the highest rate [default: 1]
    #[arg(long, value_name = "PERCENT", value_parser = number(0.001..=50.0, RESOLUTION), requires = "rfc2544",
        conflicts_with_all = NOT_OF_SEARCH)]
    pub resolution: Option<f64>,

    /// Sizes to search for [default: 64,128,256,512,1024,1280,1518]
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = within(64..=65535), requires = "rfc2544",
        conflicts_with_all = NOT_OF_SEARCH)]
    pub frame: Vec<usize>,

    /// Draw the throughputs
    #[arg(long, value_name = "FILE.svg", requires = "rfc2544", value_parser = plot_file,
        conflicts_with_all = NOT_OF_SEARCH)]
    pub plot: Option<PathBuf>,
}

fn link(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(Rate::Bits(bits)) => Ok(bits),
        _ => Err("expected bits a second such as 10Gbps".into()),
    }
}
