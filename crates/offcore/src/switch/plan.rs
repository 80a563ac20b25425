//! Converts flags to a switch's configuration and rejects contradictions before anything is opened.

use std::time::Duration;

use offcore_config::free_lcore;
use offcore_config::names::Names;
use offcore_config::sections::{Forward, Switch};
use offcore_config::values::Choices;
use offcore_dma::Mode;
use offcore_flow::bridge::BridgeConfig;
use offcore_flow::mirror::Mirror;
use offcore_flow::switch::EthPeers;
use offcore_flow::{DmaMap, Simulator, SwitchConfig};
use offcore_port::spec::PortSpec;
use offcore_port::stats::PortNames;

use crate::args::flags::by_flag;
use crate::args::{BridgeArgs, Lcores, MirrorArg, SwitchArgs};

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
    if args.until_idle {
        check_ends(args)?;
    }
    let BridgeArgs { vlans, stations, .. } = &args.bridge;
    let rules = BridgeConfig { vlans: vlans.clone(), stations: stations.clone(), ..BridgeConfig::default() };
    let run = section(args).run(Names::Flags, eth_peers, rules).map_err(|refusal| refusal.text)?;
    let config = SwitchConfig {
        run,
        mirrors: mirrors(args, &ports)?,
        mode: args.mode.unwrap_or(if mapped { Mode::Offload } else { Mode::Cpu }),
        lcores: lcores(args.run.lcores.as_ref(), &args.engines.dsa_sims, &dma)?,
        simulators: args.engines.dsa_sims.clone(),
        names: PortNames::default(),
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

/// Returns the section of a configuration file with these flags.
pub(crate) fn section(args: &SwitchArgs) -> Switch {
    let BridgeArgs { ageing, fdb_size, flood_limit, .. } = args.bridge;
    Switch {
        forward: Some(args.forward),
        topology: args.port_topology,
        ageing,
        addresses: fdb_size,
        flood_limit,
        frame: args.txpkts,
        mac_updating: args.mac.updating(),
        work: args.work_ns.map(|nanos| Duration::from_nanos(nanos as u64)),
    }
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
        PortSpec::Impair(spec) => spec.line.delay + spec.line.jitter,
        _ => Duration::ZERO,
    };
    let longest = ports.iter().map(held).max().unwrap_or_default();
    ports.iter().filter_map(gap).max().map_or(IDLE, |gap| gap.max(IDLE)) + 2 * longest
}

/// Checks that no two ports create the same socket, interface or file.
pub(crate) fn check_duplicates(ports: &[PortSpec]) -> Result<(), String> {
    let labels: Vec<String> = ports.iter().map(|port| format!("--port {port}")).collect();
    offcore_config::check_duplicates(ports, &labels)
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

/// Checks that the packets end, which `--until-idle` requires.
fn check_ends(args: &SwitchArgs) -> Result<(), String> {
    if matches!(args.forward, Forward::Txonly | Forward::Flowgen) {
        let forward = args.forward.name_of();
        return Err(format!("--until-idle and --forward {forward}: this mode never stops sending"));
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
    match given {
        Some(Lcores(given)) => Ok(given.clone()),
        None => {
            free_lcore(simulators, dma).map(|lcore| vec![lcore]).map_err(|error| format!("--lcores: {error}"))
        }
    }
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
    use offcore_flow::switch::Run;
    use offcore_stats::lcore;

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
