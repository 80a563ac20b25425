//! The command line's subcommands.

use std::ffi::OsString;
use std::sync::LazyLock;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::args::{DemoArgs, SwitchArgs};
use crate::bench::BenchCommand;
use crate::dsa::DsaCommand;

/// A packet data path with copies by an engine instead of the core.
#[derive(Debug, Parser)]
#[command(name = "offcore", version = VERSION.as_str(), after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Log more: -v events, -vv details, -vvv everything; without -v OFFCORE_LOG applies (default: warn)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    #[command(subcommand)]
    pub command: Command,
    /// The names of the subcommands, for messages about flags.
    #[arg(skip)]
    pub names: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a configuration file: ports, engines, and a switch, copy stage, pipelines or TCP/IP host
    #[command(after_help = MORE, after_long_help = crate::run::EXAMPLES)]
    Run(crate::run::RunFileArgs),
    /// Check a configuration file: all problems, with their lines
    Check(crate::run::CheckArgs),
    /// Print the JSON Schema of configuration files, for editors
    Schema,
    /// Print the completion script of a shell
    Completions(crate::service::CompletionArgs),
    /// Write the man pages of all commands
    #[command(hide = true)]
    Man(crate::service::ManArgs),
    /// Switch packets between ports, testpmd-like; --demo needs no other flag
    #[command(after_help = MORE, after_long_help = SWITCH_EXAMPLES, override_usage = SWITCH_USAGE)]
    Switch(Box<SwitchArgs>),
    /// Measure the benefit of offloading on this machine, in one process: about 20 seconds, without setup
    Demo(DemoArgs),
    /// The packet-copy forwarder, dpdk-dma-like: receive, copy, update addresses, send
    #[command(after_help = MORE, after_long_help = crate::copy::EXAMPLES)]
    Copy(Box<crate::copy::CopyArgs>),
    /// Pipelines like l2fwd-nv: receive, gather bursts, process them on a GPU or the CPU, send
    #[command(after_help = MORE, after_long_help = crate::gpu::EXAMPLES)]
    Gpu(Box<crate::gpu::GpuArgs>),
    /// Measure the published tables on this machine
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Send packets and check the returned ones: loss, order, content, latency; --rfc2544 searches for the throughput
    #[command(after_help = MORE, after_long_help = crate::pktgen::EXAMPLES)]
    Pktgen(Box<crate::pktgen::PktgenArgs>),
    /// A TCP/IP host on ports, with a small application: echo, sink, source or files by HTTP; --demo needs no other
    /// flag
    #[command(after_help = MORE, after_long_help = crate::tcp::EXAMPLES, override_usage = TCP_USAGE)]
    Tcp(Box<crate::tcp::TcpArgs>),
    /// Stream chunks to a TCP sink, as in the mTCP guide, with copies into the send buffer and into packets by the
    /// core or an engine
    #[command(after_help = MORE, after_long_help = crate::epping::EXAMPLES)]
    Epping(Box<crate::epping::EppingArgs>),
    /// Run an unmodified program with its sockets on the stack of `offcore tcp --serve`
    #[command(after_help = MORE, after_long_help = crate::exec::EXAMPLES)]
    Exec(crate::exec::ExecArgs),
    /// Predict the gain from DSA at your packet sizes, from measured core costs and a model of the device
    #[command(after_help = MORE, after_long_help = crate::predict::EXAMPLES)]
    Predict(crate::predict::PredictArgs),
    /// List devices that can be used as ports
    Port {
        #[command(subcommand)]
        command: crate::port::PortCommand,
    },
    /// Intel DSA devices: list, configure and diagnose them
    Dsa {
        #[command(subcommand)]
        command: DsaCommand,
    },
}

impl Command {
    /// Returns the verbosity of logging for subcommands whose -v flag is not the global one, and 0 for others.
    pub(crate) fn verbose(&self) -> u8 {
        match self {
            Self::Gpu(args) => args.pipelines.verbose,
            _ => 0,
        }
    }
}

/// The note at the end of -h.
const MORE: &str = "More, with examples: --help";

static VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("OFFCORE_COMMIT").map_or(String::new(), |commit| format!(", commit {commit}"));
    let dpdk = if cfg!(feature = "dpdk") { "with" } else { "without" };
    format!("{}{commit}, {dpdk} DPDK", env!("CARGO_PKG_VERSION"))
});

const EXAMPLES: &str = "\
Examples:
  offcore demo
  offcore switch --help
  offcore bench vhost --quick
  offcore dsa doctor

Exit codes: 0 done, 1 failed, 2 usage.";

const SWITCH_USAGE: &str = "\
offcore switch --port <SPEC>... [OPTIONS]
       offcore switch --demo [--quick] [--format <FORMAT>]";

const TCP_USAGE: &str = "\
offcore tcp --port <SPEC>... [OPTIONS]
       offcore tcp --demo [--quick] [--format <FORMAT>]";

impl Cli {
    /// Parses the words of a command line.
    pub(crate) fn of<W: Into<OsString>>(words: impl IntoIterator<Item = W>) -> Result<Self, clap::Error> {
        let mut words: Vec<OsString> = words.into_iter().map(Into::into).collect();
        let is_alias = replace_demo_alias(&mut words);
        let parsed = Self::command().try_get_matches_from(&words);
        let mut matches = parsed.map_err(|error| if is_alias { alone(error) } else { error })?;
        let mut cli = Self::from_arg_matches(&matches)?;
        if let Command::Epping(args) = &cli.command
            && let Some(flags) = args.file_flags()?
        {
            // The file's flags come first, so that flags on the command line override them.
            let at = words.iter().position(|word| word == "epping").map_or(words.len(), |at| at + 1);
            words.splice(at..at, flags.into_iter().map(Into::into));
            matches = Self::command().args_override_self(true).try_get_matches_from(words)?;
            cli = Self::from_arg_matches(&matches)?;
        }
        let mut next = matches.subcommand();
        while let Some((name, matches)) = next {
            cli.names.push(name.into());
            next = matches.subcommand();
        }
        Ok(cli)
    }
}

/// Replaces `switch --demo` by `demo switch`, and `tcp --demo` by `demo tcp`. Returns whether it did.
fn replace_demo_alias(words: &mut Vec<OsString>) -> bool {
    // The first word that is not a flag is the subcommand.
    let is_flag = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
    let command = (1..words.len()).find(|at| !is_flag(&words[*at]));
    let Some(command) = command.filter(|at| words[*at] == "switch" || words[*at] == "tcp") else {
        return false;
    };
    let Some(flag) = words.iter().position(|word| word == "--demo") else { return false };
    words.remove(flag);
    words.insert(if flag < command { command - 1 } else { command }, "demo".into());
    true
}

/// Replaces the error of other flags, because the demo chooses ports and lcores itself.
fn alone(error: clap::Error) -> clap::Error {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) if error.kind() == ErrorKind::UnknownArgument => {
            let text = format!("{flag} cannot be used with --demo: expected only --quick and --format");
            let usage = "offcore demo [switch|tcp] [--quick] [--format <FORMAT>]";
            Cli::command().override_usage(usage).error(ErrorKind::ArgumentConflict, text)
        }
        _ => error,
    }
}

pub(crate) const SWITCH_EXAMPLES: &str = "\
Examples:
  Measure the core's cost per packet, with copies by the core and by an engine.
  No root, hugepages or hardware needed:
    offcore switch --demo
  It takes about 20 seconds on an idle machine, and shows its progress.
  --quick is shorter and less accurate.

  Two generators that check each other's packets, for two seconds:
    offcore switch --port gen:size=64 --port gen:size=1518 --duration 2

  Two guests, with copies by a helper thread on lcore 1:
    offcore switch --port vhost:/tmp/vm1.sock --port vhost:/tmp/vm2.sock \\
      --dma 'txq0@core:1;rxq0@core:1'

  The same with a simulated DSA device, if it is cheaper than the core:
    offcore switch --port vhost:/tmp/vm1.sock --port vhost:/tmp/vm2.sock \\
      --dsa-sim 0:profile=vhost --dma 'txq0@dsa-sim0:wq0.0;rxq0@dsa-sim0:wq0.1' \\
      --mode auto

  A guest and the host's network, as root; channels in the vhost guide's syntax:
    offcore switch --port tap:tap0 \\
      --port 'vhost:/tmp/vm1.sock,dmas=[txq0@core:1;rxq0@core:1]'

  Copy all packets of a capture into another one, with new addresses:
    offcore switch --port pcap:in.pcap --port pcap:-,out.pcap \\
      --forward mac --eth-peer 1,02:00:00:00:00:09 --until-idle

  Copy all packets between two ports, by a helper thread:
    offcore switch --port gen:size=1518 --port gen:size=64 --forward copy \\
      --dma rxq0@core:1 --duration 2

  Generate traffic for the guest of another switch, with JSON reports:
    offcore switch --port virtio-user:/tmp/vm1.sock --forward txonly \\
      --txpkts 1518 --format json

  A learning switch between two guests in VLANs 10 and 20 and the host's network,
  which gets both VLANs tagged; packets of the first guest are captured:
    offcore switch --forward l2 --port vhost:/tmp/vm1.sock \\
      --port vhost:/tmp/vm2.sock --port tap:tap0 --vlan 0=access:10 \\
      --vlan 1=access:20 --vlan 2=trunk:10,20 --mirror 0=pcap:-,vm1.pcap

Ports:
  vhost:SOCKET[,queues=N,client,owner=USER,group=GROUP,mode=MODE,
        packed=off,in_order=off,mrg=off,indirect=off,event_idx=off,
        offloads=off,max_memory=SIZE,dmas=[txq0@CH;rxq0@CH]]
                             MODE: permissions of the socket, such as 0660
  virtio-user:SOCKET[,queues=N,queue_size=N,server,packed,mrg=off,
        event_idx=off,offloads=off,mtu=N,mac=MAC,peer=USER]
  af_xdp:INTERFACE[,queues=N,first=N,mode=auto|zc|copy|skb,ring_size=N,
        busy_poll=N,need_wakeup=off,promisc=off,force]
                             force: use an interface even if it is in use
  af_packet:INTERFACE[,queues=N,fanout=hash|lb|cpu|rollover|rnd|qm,
        slots=N,promisc=off,qdisc_bypass]
  tap:NAME[,queues=N,offloads=off,mac=MAC,mtu=N]
                             mac and mtu: of the kernel's interface
  dpdk:DEVICE[,queues=N,mtu=N,rx_desc=N,tx_desc=N,rss=off,
       rss=[ip,tcp,udp,sctp],promisc=off,args=[KEY=VALUE,...]]
                             DEVICE: a PCI address, or a name such as net_null0
  pcap:IN[,OUT][,loop,overwrite]
                             IN or OUT may be '-' or missing
  gen:[size=N,count=N,rate=N,flows=N,verify=N,queues=N]
  impair:[loss=P%,reorder=P%,duplicate=P%,corrupt=P%,delay=TIME,
         jitter=TIME,rate=N,seed=N,]PORT
                             impairs the packets of any port above; TIME such
                             as 200us, 5ms or 1s; rate in bit/s

Channels:
  Both directions of a vhost port's queues make copies. With --forward copy, rxqN
  of any port names the copies of that queue's packets.
  cpu             the worker's core
  core:N          a helper thread on lcore N
  dsa:wqN.M       work queue M of DSA device N; short: wqN.M
  dsa:auto        all work queues that are enabled for users; only those on the
                  NUMA node of the packet buffers if there are any
  dsa-simN:wqN.M  a work queue of the simulated device N (--dsa-sim)
  dmadev:NAME     a DMA device of DPDK: a PCI address, or dma_skeleton
  Suffixes of a work queue: /direct (no batch descriptors), /memory (copies are
  not written to the cache), /block (the device waits for page faults).
  Several workers can share a work queue; a lock protects a dedicated one.

Simulated devices:
  N[:profile=NAME|FILE,gen=spr|dsa2,seed=N,fault=...,lcore=N]

Ctrl-C, SIGTERM or SIGHUP stops the switch: packets in flight are completed, and
a final report follows. Another signal, at least two seconds after the first,
ends it immediately.";

/// Helpers for command lines in tests.
#[cfg(test)]
pub(crate) mod lines {
    use super::{Cli, Command};

    /// Parses a command line. Quotes may only enclose whole words.
    pub(crate) fn command(line: &str) -> Result<Command, String> {
        let words = line.split_whitespace().map(|word| word.trim_matches('\''));
        Cli::of(words).map(|cli| cli.command).map_err(|error| error.to_string())
    }

    /// Returns the examples of a help text and asserts their `count`.
    pub(crate) fn examples(help: &str, count: usize) -> Vec<String> {
        let whole = help.replace("\\\n", " ");
        let lines = whole.lines().map(str::trim).filter(|line| line.starts_with("offcore "));
        let lines: Vec<String> = lines.map(Into::into).collect();
        assert_eq!(lines.len(), count, "{lines:?}");
        lines
    }
}
