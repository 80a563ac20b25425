//! Converts flags to a switch's configuration and rejects contradictions before anything is opened.

use std::path::PathBuf;
use std::time::Duration;

use offcore_dma::Mode;
use offcore_flow::bridge::BridgeConfig;
use offcore_flow::mirror::Mirror;
use offcore_flow::switch::{Copying, EthPeers, Run};
use offcore_flow::{DmaMap, Forward, Simulator, SwitchConfig, Topology};
use offcore_port::spec::PortSpec;
use offcore_stats::lcore;

use crate::args::flags::by_flag;
use crate::args::{BridgeArgs, ForwardArg, Lcores, MirrorArg, SwitchArgs};

/// Default frame length of `txonly` and `flowgen`.
const FRAME: usize = 64;
/// Default idle time before `--until-idle` stops.
const IDLE: Duration = Duration::from_secs(1);

pub(crate) fn config(args: &SwitchArgs) -> Result<SwitchConfig, String> {
    let ports = ports(args);
    check_duplicates(&ports)?;
    let dma = dma_map(args.engines.dma.clone(), &ports)?;
    let mapped = !dma.entries.is_empty();
    check_mode(args.mode, &dma)?;
    if args.max_latency.is_some() && args.mode != Some(Mode::Auto) {
        return Err("--max-latency is for --mode auto, which chooses between core and engine: add it".into());
    }
    let mut eth_peers = EthPeers::new();
    for &(port, mac) in &args.eth_peers {
        if eth_peers.insert(port, mac).is_some() {
            return Err(format!("--eth-peer names port {port} twice: expected it once"));
        }
    }
    check_forward(args)?;
    if args.until_idle {
        check_ends(args)?;
    }
    let bridge = bridge(args)?;
    let frame = args.txpkts.unwrap_or(FRAME);
    let topology = args.port_topology.unwrap_or(Topology::Paired);
    let forward = |mode, eth_peers| Run::Forward { mode, topology, eth_peers };
    let run = match args.forward {
        ForwardArg::Io => forward(Forward::Io, eth_peers),
        ForwardArg::Mac => forward(Forward::Mac, eth_peers),
        ForwardArg::Macswap => forward(Forward::Macswap, eth_peers),
        ForwardArg::Rxonly => forward(Forward::Rxonly, eth_peers),
        ForwardArg::Txonly => forward(Forward::Txonly { frame }, eth_peers),
        ForwardArg::Flowgen => forward(Forward::Flowgen { frame }, eth_peers),
        ForwardArg::L2 => Run::Bridge(bridge),
        ForwardArg::Copy => {
            let eth_peers = args.mac.updating().unwrap_or(true).then_some(eth_peers);
            Run::Copy(Copying { topology, eth_peers, ..Copying::default() })
        }
    };
    let config = SwitchConfig {
        run,
        mirrors: mirrors(args, &ports)?,
        mode: args.mode.unwrap_or(if mapped { Mode::Offload } else { Mode::Cpu }),
        lcores: lcores(args.run.lcores.as_ref(), &args.engines.dsa_sims, &dma)?,
        simulators: args.engines.dsa_sims.clone(),
        dma,
        burst: args.burst,
        work_ns: args.work_ns.unwrap_or(0) as u64,
        rt_priority: args.rt_priority.and_then(|priority| i32::try_from(priority).ok()),
        idle: args.idle,
        max_latency: args.max_latency.map(|us| Duration::from_micros(us as u64)),
    };
    config.check(&ports).map_err(by_flag)?;
    Ok(config)
}

/// Returns the ports to open: the given ones, then the targets of mirrors, without duplicates.
pub(crate) fn ports(args: &SwitchArgs) -> Vec<PortSpec> {
    let mut ports = args.at.ports.to_vec();
    for mirror in &args.mirrors {
        if !ports[args.at.ports.len()..].contains(&mirror.spec) {
            ports.push(mirror.spec.clone());
        }
    }
    ports
}

fn mirrors(args: &SwitchArgs, ports: &[PortSpec]) -> Result<Vec<Mirror>, String> {
    let count = args.at.ports.len();
    let mut mirrors = Vec::new();
    for MirrorArg { port, direction, spec } in &args.mirrors {
        let to = ports.iter().skip(count).position(|port| port == spec).map_or(count, |at| count + at);
        let mirror = Mirror { port: *port, direction: *direction, to };
        if mirrors.contains(&mirror) {
            return Err(format!("--mirror {port}={spec} is given twice: expected it once"));
        }
        mirrors.push(mirror);
    }
    Ok(mirrors)
}

fn bridge(args: &SwitchArgs) -> Result<BridgeConfig, String> {
    let BridgeArgs { ageing, fdb_size, flood_limit, vlans, stations } = &args.bridge;
    let given = [
        ("--ageing", ageing.is_some()),
        ("--fdb-size", fdb_size.is_some()),
        ("--flood-limit", flood_limit.is_some()),
        ("--vlan", !vlans.is_empty()),
        ("--fdb", !stations.is_empty()),
    ];
    if let Some((flag, _)) = given.into_iter().find(|&(_, given)| given && args.forward != ForwardArg::L2) {
        return Err(format!(
            "{flag} is for --forward l2, found --forward {}, which learns no addresses",
            args.forward
        ));
    }
    Ok(BridgeConfig {
        ageing: ageing.unwrap_or(BridgeConfig::AGEING),
        addresses: fdb_size.unwrap_or(BridgeConfig::ADDRESSES),
        flood_limit: flood_limit.map(|pps| pps as u64),
        vlans: vlans.clone(),
        stations: stations.clone(),
    })
}

/// Returns the idle time before `--until-idle` stops. It depends on the interval between packets of a slow generator.
pub(crate) fn idle_timeout(ports: &[PortSpec]) -> Duration {
    let gap = |port: &PortSpec| match port.bare() {
        PortSpec::Gen(gen_port) => {
            gen_port.rate.map(|rate| Duration::from_secs_f64(2.0 * f64::from(gen_port.queues) / rate as f64))
        }
        _ => None,
    };
    // All packets in flight may be delayed by an impaired port.
    let held = |port: &PortSpec| match port {
        PortSpec::Impair(spec) => spec.delay + spec.jitter,
        _ => Duration::ZERO,
    };
    let longest = ports.iter().map(held).max().unwrap_or_default();
    ports.iter().filter_map(gap).max().map_or(IDLE, |gap| gap.max(IDLE)) + 2 * longest
}

/// Checks that no two ports create the same socket, interface or file.
pub(crate) fn check_duplicates(ports: &[PortSpec]) -> Result<(), String> {
    let made = |port: &PortSpec| match port.bare() {
        PortSpec::Vhost(vhost) if !vhost.client => Some(("listen at", vhost.path.clone())),
        PortSpec::VirtioUser(virtio) if virtio.server => Some(("listen at", virtio.path.clone())),
        PortSpec::Tap(tap) => Some(("have interface", PathBuf::from(&tap.name))),
        PortSpec::AfPacket(spec) => Some(("have interface", PathBuf::from(&spec.name))),
        PortSpec::AfXdp(spec) => Some(("have interface", PathBuf::from(&spec.name))),
        PortSpec::Pcap(pcap) => pcap.output.clone().map(|path| ("write", path)),
        _ => None,
    };
    for (index, port) in ports.iter().enumerate() {
        let other = ports[..index].iter().find(|other| made(port).is_some() && made(other) == made(port));
        if let (Some(other), Some((does, what))) = (other, made(port)) {
            return Err(format!(
                "--port {other} and --port {port}: both {does} {}; expected a different one for each",
                what.display()
            ));
        }
    }
    Ok(())
}

pub(crate) fn dma_map(dma: Option<DmaMap>, ports: &[PortSpec]) -> Result<DmaMap, String> {
    let mut map = dma.unwrap_or_default();
    for (index, port) in ports.iter().enumerate() {
        if let PortSpec::Vhost(vhost) = port.bare()
            && let Some(dmas) = &vhost.dmas
        {
            let add = map.add_for_port(index, dmas);
            add.map_err(|error| format!("--port {port} (port {index}), with --dma: {error}"))?;
        }
    }
    Ok(map)
}

/// Checks that a queue has a channel if the mode needs one.
pub(crate) fn check_mode(mode: Option<Mode>, dma: &DmaMap) -> Result<(), String> {
    match mode {
        Some(mode @ (Mode::Offload | Mode::Auto)) if dma.entries.is_empty() => {
            Err(format!("--mode {mode} needs --dma, or dmas=[...] on a vhost --port: no queue has a channel"))
        }
        _ => Ok(()),
    }
}

fn check_forward(args: &SwitchArgs) -> Result<(), String> {
    let forward = args.forward;
    let generates = matches!(forward, ForwardArg::Txonly | ForwardArg::Flowgen);
    if args.txpkts.is_some() && !generates {
        return Err(format!(
            "--txpkts is for --forward txonly or flowgen, found --forward {forward}, which generates no packets"
        ));
    }
    if !args.eth_peers.is_empty() && !generates && !matches!(forward, ForwardArg::Mac | ForwardArg::Copy) {
        return Err(format!(
            "--eth-peer is for --forward mac, copy, txonly or flowgen, found --forward {forward}, which sets none"
        ));
    }
    if args.mac.updating().is_some() && forward != ForwardArg::Copy {
        return Err(format!(
            "--mac-updating and --no-mac-updating are for --forward copy, found --forward {forward}"
        ));
    }
    if args.port_topology.is_some() && forward == ForwardArg::L2 {
        return Err(
            "--port-topology cannot be used with --forward l2, which forwards by learned addresses".into()
        );
    }
    if args.work_ns.is_some() && forward == ForwardArg::Txonly {
        return Err("--work-ns is work per received packet, and --forward txonly receives none".into());
    }
    Ok(())
}

/// Checks that the packets end, which `--until-idle` requires.
fn check_ends(args: &SwitchArgs) -> Result<(), String> {
    if matches!(args.forward, ForwardArg::Txonly | ForwardArg::Flowgen) {
        return Err(format!("--until-idle and --forward {}: this mode never stops sending", args.forward));
    }
    check_ports_end(&args.at.ports)
}

/// Checks that the packets that ports send end.
pub(crate) fn check_ports_end(ports: &[PortSpec]) -> Result<(), String> {
    for port in ports {
        match port.bare() {
            PortSpec::Gen(gen_port) if gen_port.count.is_none() => {
                return Err(format!(
                    "--until-idle and --port {port}: the port never stops sending; add count=N"
                ));
            }
            PortSpec::Pcap(pcap) if pcap.repeat => {
                return Err(format!(
                    "--until-idle and --port {port}: the port never stops sending; remove loop"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the given lcores, or the first unused one.
pub(crate) fn lcores(
    given: Option<&Lcores>,
    simulators: &[Simulator],
    dma: &DmaMap,
) -> Result<Vec<usize>, String> {
    let available = lcore::available().map_err(|error| format!("--lcores: {error}"))?;
    if let Some(Lcores(given)) = given {
        return Ok(given.clone());
    }
    let helper = |lcore: &usize| {
        let name = format!("core:{lcore}");
        dma.entries.iter().any(|entry| entry.channels.contains(&name))
            || simulators.iter().any(|simulator| simulator.lcore == Some(*lcore))
    };
    let free = available.iter().find(|lcore| !helper(lcore)).or(available.first());
    free.map(|&lcore| vec![lcore]).ok_or_else(|| "--lcores: no lcore is available to this process".into())
}

/// Returns the ports with the number of queues from `flag`, if it was given.
pub(crate) fn with_queues(
    ports: &[PortSpec],
    queues: Option<usize>,
    flag: &str,
) -> Result<Vec<PortSpec>, String> {
    let mut ports = ports.to_vec();
    let Some(wanted) = queues.and_then(|queues| u16::try_from(queues).ok()) else { return Ok(ports) };
    for port in &mut ports {
        let text = port.to_string();
        match port.queues_mut() {
            Some(queues) if *queues == 1 || *queues == wanted => *queues = wanted,
            Some(queues) => {
                return Err(format!(
                    "{flag} {wanted} and --port {text}: the port specifies {queues} queues; remove one of the two"
                ));
            }
            None if wanted == 1 => {}
            None => return Err(format!("{flag} {wanted}: --port {text} has one queue")),
        }
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::lines::{command, examples};
    use crate::cli::{Command, SWITCH_EXAMPLES};
    use offcore_flow::mirror::Direction;

    fn switch(flags: &str) -> Result<SwitchConfig, String> {
        match command(&format!("offcore switch {flags}"))? {
            Command::Switch(args) => config(&args),
            other => panic!("{other:?} is no switch"),
        }
    }

    #[test]
    fn contradictions_name_both_flags() {
        for (flags, words) in [
            ("--port gen: --mode offload", &["--mode offload", "--dma"][..]),
            ("--port gen: --mode auto", &["--mode auto", "--dma"]),
            ("--port gen: --dsa-sim 0", &["--dsa-sim: no channel names dsa-sim0", "txq0@dsa-sim0:wq0.0"]),
            ("--port gen: --dma txq0@foo:1", &["--dma: channel 'foo:1'", "expected cpu, core:N"]),
            ("--port gen: --dsa-sim 0 --dsa-sim 0:seed=1", &["--dsa-sim", "dsa-sim0 twice"]),
            ("--port vhost:/a --dma txq0@dsa-sim1:wq1.0 --dsa-sim 0", &["--dsa-sim: none is dsa-sim1"]),
            ("--port gen: --txpkts 64", &["--txpkts", "--forward io"]),
            ("--port gen: --forward mac --txpkts 64", &["--txpkts", "--forward mac"]),
            ("--port gen: --eth-peer 0,02:00:00:00:00:01", &["--eth-peer", "--forward io"]),
            ("--port gen: --forward mac --eth-peer 1,02:00:00:00:00:01", &["--eth-peer: port 1", "one port"]),
            (
                "--port gen: --forward mac --eth-peer 0,02:00:00:00:00:01 --eth-peer 0,02:00:00:00:00:02",
                &["--eth-peer", "port 0 twice"],
            ),
            ("--port gen: --no-mac-updating", &["--no-mac-updating", "--forward io"]),
            ("--port gen: --port gen: --ageing 5", &["--ageing", "--forward l2", "--forward io"]),
            ("--port gen: --port gen: --vlan 0=access:1", &["--vlan", "--forward l2"]),
            ("--port gen: --port gen: --fdb 0=02:00:00:00:00:01", &["--fdb", "--forward l2"]),
            ("--port gen: --forward l2", &["--port: 1, expected 2 to 64"]),
            ("--port gen: --port gen: --forward l2 --vlan 2=access:1", &["--vlan: port 2", "2 ports"]),
            (
                "--port gen: --port gen: --forward l2 --vlan 1=access:1 --vlan 1=access:2",
                &["--vlan", "port 1 twice"],
            ),
            ("--port gen: --port gen: --forward l2 --fdb 2=locked", &["--fdb: port 2", "2 ports"]),
            (
                "--port gen: --port gen: --forward l2 --fdb 1=locked --fdb 1=locked",
                &["--fdb", "port 1 twice"],
            ),
            (
                "--port gen: --port gen: --forward l2 --fdb 0=02:00:00:00:00:01 --fdb 1=02:00:00:00:00:01",
                &["--fdb", "of two ports"],
            ),
            ("--port gen: --mirror 1=pcap:-,m", &["--mirror: port 1", "one port"]),
            ("--port gen: --mirror 0=pcap:-,m --mirror 0=pcap:-,m", &["--mirror 0=", "twice"]),
            ("--port tap:t --mirror 0=tap:t", &["--port tap:t and", "both have interface t"]),
            (
                "--port gen: --port gen: --forward l2 --port-topology loop",
                &["--port-topology", "--forward l2"],
            ),
            ("--port gen: --max-latency 20", &["--max-latency", "--mode auto"]),
            ("--port gen: --forward txonly --work-ns 5", &["--work-ns", "--forward txonly"]),
            ("--port gen: --until-idle", &["--until-idle", "--port gen:", "count=N"]),
            ("--port pcap:a,loop --until-idle", &["--until-idle", "--port pcap:", "loop"]),
            ("--port tap:t --forward flowgen --until-idle", &["--until-idle", "--forward flowgen"]),
            ("--port vhost:/a --dma 1.txq0@cpu", &["--dma: port 1", "one port"]),
            ("--port vhost:/a,dmas=[txq0@cpu] --dma 0.txq0@core:1", &["--port vhost:/a", "--dma", "twice"]),
            (
                "--port vhost:/a --port virtio-user:/a,server",
                &["--port vhost:/a and", "--port virtio-user:/a"],
            ),
            ("--port tap:t --port tap:t,queues=2", &["--port tap:t and", "--port tap:t,queues=2"]),
            ("--port pcap:a,o --port pcap:b,o", &["both write o"]),
        ] {
            let error = switch(flags).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
        }
    }

    #[test]
    fn port_dma_mapping_enables_offload() {
        let config = switch("--port gen: --port vhost:/a,dmas=[txq0@core:0]").unwrap();
        assert_eq!(config.mode, Mode::Offload);
        assert_eq!(config.dma.entries[0].port, Some(1));
        // The helper has lcore 0, so the worker uses another lcore if the machine has one.
        assert!(config.lcores != [0] || lcore::available().unwrap().len() == 1);
        assert_eq!(switch("--port gen:").unwrap().mode, Mode::Cpu);
        assert_eq!(switch("--port vhost:/a --dma txq0@core:0 --mode cpu").unwrap().mode, Mode::Cpu);
    }

    #[test]
    fn copying_updates_addresses_by_default() {
        let updates = |flags: &str| match switch(&format!("--port gen: --forward copy {flags}")).unwrap().run
        {
            Run::Copy(copying) => copying.eth_peers.is_some(),
            other => panic!("{other:?} copies nothing"),
        };
        assert!(updates("") && updates("--eth-peer 0,02:00:00:00:00:01"));
        assert!(!updates("--no-mac-updating"));
        assert!(updates("--no-mac-updating --mac-updating"), "the last one counts");
    }

    #[test]
    fn mirror_ports_are_appended() {
        let flags =
            "--port gen: --port tap:t --mirror 1:rx=pcap:-,m --mirror 0=tap:mon --mirror 0:tx=pcap:-,m";
        let mirrors = switch(flags).unwrap().mirrors;
        let found: Vec<_> = mirrors.iter().map(|m| (m.port, m.direction, m.to)).collect();
        assert_eq!(found, [(1, Direction::Rx, 2), (0, Direction::Both, 3), (0, Direction::Tx, 2)]);
    }

    #[test]
    fn one_switch_may_hold_both_socket_ends() {
        switch("--port vhost:/a --port virtio-user:/a").unwrap();
    }

    #[test]
    fn idle_timeout_allows_slow_generators() {
        let timeout = |text: &str| idle_timeout(&[text.parse().unwrap()]);
        assert_eq!(timeout("gen:count=5"), IDLE);
        assert_eq!(timeout("gen:count=5,rate=1"), Duration::from_secs(2));
        assert_eq!(timeout("pcap:a"), IDLE);
    }

    #[test]
    fn help_examples_are_accepted() {
        for line in examples(SWITCH_EXAMPLES, 9) {
            match command(&line) {
                Ok(Command::Switch(args)) => {
                    drop(config(&args).unwrap_or_else(|error| panic!("{line}: {error}")))
                }
                other => assert!(matches!(other, Ok(Command::Demo(_))), "{line}: {other:?}"),
            }
        }
    }
}
