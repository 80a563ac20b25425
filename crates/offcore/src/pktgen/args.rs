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
  Send a million packets per second of mixed sizes on one interface, receive
  them on another, and report loss, order, content and latency; as root:
    offcore pktgen --port af_packet:eth0 --port af_packet:eth1 --rate 1M \\
      --size imix --flows 64 --duration 10

  Check the packets that a switch with macswap returns over a vhost-user
  socket, with JSON reports:
    offcore pktgen --port virtio-user:/tmp/vm1.sock --rate 100k \\
      --count 1000000 --format json

  Send a capture at ten times its original speed:
    offcore pktgen --port tap:tap0 --pcap in.pcap --speed 10

  Search for the throughput of a device between two ports, for three loss rates:
    offcore pktgen --port af_xdp:eth0 --port af_xdp:eth1 --rfc2544 \\
      --loss 0,0.01,0.1 --frame 64,512,1518 --plot throughput.svg

  From a script:
    (echo 'set rate 10k'; echo start; sleep 2; echo stats; echo quit) |
    offcore pktgen --port tap:tap0 --no-start

A run reads commands from standard input, one per line:
  start, stop       start or stop sending; start resets the count of --count
  set rate RATE     like --rate; also: set size, flows, burst, count
  stats             print a report
  clear             reset the counters
  help, quit
At the end of input a run stops only if it is not sending.

Sizes include the FCS: 64; 64-1518; 64:7,594:4,1518:1; imix (the same as the
previous one). A packet longer than a packet buffer uses several buffers.
Rates: 10k, 1.5M (packets per second), 2Gbps (bits of frames including FCS),
50% (of the link, including preambles and gaps), max. With --bidirectional the
rate applies to each port.

A packet carries a number and its due time behind its headers. Latency is
measured from the due time, even if the packet is sent later; at rate max, from
its creation. If the kernel is behind a sending port, the run compares its
counters with those of the interface and reports differences.";

const PORTS: &str = "\
A port, as KIND:ARGS (see `offcore switch --help`); once or twice. One port sends and receives; with two ports, the \
first sends and the second receives. Packets are sent on a port's first queue and received from all queues";
const LCORES: &str =
    "Lcores: one for everything, or one for sending and one for receiving [default: the first two]";
const DURATION: &str =
    "Stop after sending for this many seconds; with --rfc2544, the duration of each trial [default: 5]";

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
    /// TCP segments without a connection.
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
// fields-ok: command-line arguments
pub(crate) struct PktgenArgs {
    #[command(flatten)]
    pub at: PortArgs,

    #[command(flatten)]
    pub run: RunArgs,

    /// With two ports: send in both directions
    #[arg(long)]
    pub bidirectional: bool,

    /// Source MAC address [default: the sending port's]
    #[arg(long, value_name = "MAC")]
    pub src_mac: Option<MacAddr>,

    /// Destination MAC address [default: the receiving port's]
    #[arg(long, value_name = "MAC")]
    pub dst_mac: Option<MacAddr>,

    /// VLAN ID of an 802.1Q tag
    #[arg(long, value_name = "ID", value_parser = within(0..=4094))]
    pub vlan: Option<usize>,

    /// Source address, IPv4 or IPv6 [default: 198.18.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub src_ip: Option<IpAddr>,

    /// Destination address [default: 198.18.0.2, or its equivalent for IPv6]
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

    /// Number of flows, used in turn; each has its own packet numbers [default: 1]
    #[arg(long, value_name = "N", value_parser = within(1..=MAX_FLOWS as usize))]
    pub flows: Option<usize>,

    /// Fields that differ between flows [default: src-ip,src-port]
    #[arg(long, value_name = "FIELDS", value_delimiter = ',')]
    pub vary: Vec<Field>,

    /// Packet sizes, including FCS [default: 64, or the minimum for the headers]
    #[arg(long, value_name = "SIZES", conflicts_with = "rfc2544")]
    pub size: Option<Sizes>,

    /// Rate [default: max; with --pcap, the times of the capture]
    #[arg(long, value_name = "RATE")]
    pub rate: Option<Rate>,

    /// Link speed for a rate in percent, such as 10Gbps [default: the interface's]
    #[arg(long, value_name = "RATE", value_parser = link)]
    pub link: Option<f64>,

    /// With --rate: number of packets that are due together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=65536))]
    pub burst: usize,

    /// Stop after this many packets per sending port
    #[arg(long, value_name = "N", value_parser = number(1u64.., COUNT), conflicts_with = "rfc2544")]
    pub count: Option<u64>,

    /// Seconds to wait for missing packets, at the end and after each trial
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub wait: Duration,

    /// Seed of random packet sizes
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Compare all bytes of one in N packets; 0: of none. Numbers and lengths of all packets are checked
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(0..=1 << 30))]
    pub verify: usize,

    /// Send the packets of a capture
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_OF_CAPTURE)]
    pub pcap: Option<PathBuf>,

    /// Speed relative to the times of the capture [default: 1]
    #[arg(long, value_name = "X", value_parser = number(1e-6..=1e6, SPEED), requires = "pcap", conflicts_with = "rate",
        conflicts_with_all = NOT_OF_CAPTURE)]
    pub speed: Option<f64>,

    /// Repeat the capture
    #[arg(long = "loop", requires = "pcap", conflicts_with_all = NOT_OF_CAPTURE)]
    pub repeat: bool,

    /// Wait for the command `start` before sending
    #[arg(long, conflicts_with_all = ["no_interactive", "rfc2544"])]
    pub no_start: bool,

    /// Do not read commands
    #[arg(long)]
    pub no_interactive: bool,

    /// Search for the highest rate within the permitted loss (RFC 2544, 26.1), up to --rate [default: the highest
    /// rate at which the port can send]
    #[arg(long)]
    pub rfc2544: bool,

    /// Permitted loss in percent [default: 0]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', value_parser = number(0.0..100.0, LOSS), requires = "rfc2544",
        conflicts_with_all = NOT_OF_SEARCH)]
    pub loss: Vec<f64>,

    /// Resolution of the throughput, in percent of the highest rate [default: 1]
    #[arg(long, value_name = "PERCENT", value_parser = number(0.001..=50.0, RESOLUTION), requires = "rfc2544",
        conflicts_with_all = NOT_OF_SEARCH)]
    pub resolution: Option<f64>,

    /// Packet sizes of the search [default: 64,128,256,512,1024,1280,1518]
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = within(64..=65535), requires = "rfc2544",
        conflicts_with_all = NOT_OF_SEARCH)]
    pub frame: Vec<usize>,

    /// Plot the throughput
    #[arg(long, value_name = "FILE.svg", requires = "rfc2544", value_parser = plot_file,
        conflicts_with_all = NOT_OF_SEARCH)]
    pub plot: Option<PathBuf>,
}

fn link(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(Rate::Bits(bits)) => Ok(bits),
        _ => Err("expected bits per second such as 10Gbps".into()),
    }
}
