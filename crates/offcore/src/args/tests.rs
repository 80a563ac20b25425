use super::*;
use crate::cli::{Cli, Command};
use clap::CommandFactory;

#[test]
fn clap_definitions_are_consistent() {
    Cli::command().debug_assert();
}

fn switch(args: &[&str]) -> Result<SwitchArgs, String> {
    let args = ["offcore", "switch"].into_iter().chain(args.iter().copied());
    match Cli::of(args).map_err(|e| e.to_string())?.command {
        Command::Switch(args) => Ok(*args),
        other => panic!("{other:?} is no switch"),
    }
}

#[test]
fn values_of_every_flag() {
    let args = switch(&[
        "--port=gen:size=64",
        "--port=vhost:/tmp/a.sock,dmas=[txq0@core:1;rxq0@core:1]",
        "--forward=mac",
        "--port-topology=chained",
        "--eth-peer=1,02:00:00:00:00:09",
        "--ageing=0.5",
        "--fdb-size=10",
        "--flood-limit=100",
        "--vlan=0=access:10",
        "--vlan=1=trunk:10,20-30,native=1",
        "--fdb=1=02:00:00:00:00:01,locked",
        "--mirror=0:rx=pcap:-,m.pcap",
        "--mirror=1=tap:mon,queues=2",
        "--dma=0.txq0@core:1+core:2",
        "--dsa-sim=0:profile=vhost,lcore=1",
        "--mode=cpu",
        "--lcores=0,2-3",
        "--burst=64",
        "--mbufs=64",
        "--mbuf-size=4096",
        "--hugepages=2M",
        "--work-ns=100",
        "--rt-priority=1",
        "--idle=sleep",
        "--max-latency=20",
        "--stats-interval=0.5",
        "--format=json",
        "--duration=2",
        "--until-idle",
    ])
    .unwrap();
    assert_eq!(args.at.ports.len(), 2);
    assert_eq!((args.forward, args.port_topology), (Forward::Mac, Some(Topology::Chained)));
    assert_eq!(args.eth_peers, [(1, MacAddr([2, 0, 0, 0, 0, 9]))]);
    let BridgeArgs { ageing, fdb_size, flood_limit, vlans, stations } = args.bridge;
    assert_eq!((ageing, fdb_size, flood_limit), (Some(Duration::from_millis(500)), Some(10), Some(100)));
    assert_eq!(vlans.iter().map(|rule| rule.port).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(stations.iter().map(ToString::to_string).collect::<Vec<_>>(), ["1=02:00:00:00:00:01,locked"]);
    let mirrors = args.mirrors.iter().map(|m| (m.port, m.direction, m.spec.to_string()));
    let expected =
        [(0, Direction::Rx, "pcap:-,m.pcap".into()), (1, Direction::Both, "tap:mon,queues=2".into())];
    assert_eq!(mirrors.collect::<Vec<_>>(), expected);
    assert_eq!((args.engines.dsa_sims[0].number, args.engines.dsa_sims[0].lcore), (0, Some(1)));
    assert_eq!(args.mode, Some(Mode::Cpu));
    assert_eq!(args.run.lcores, Some(Lcores(vec![0, 2, 3])));
    assert_eq!((args.burst, args.run.pool.mbufs, args.run.pool.mbuf_size), (64, 64, 4096));
    assert_eq!(args.run.pool.hugepages, Hugepages::Size2M);
    assert_eq!((args.work_ns, args.rt_priority), (Some(100), Some(1)));
    assert_eq!((args.idle, args.max_latency), (Idle::Sleep, Some(20)));
    assert_eq!(args.run.stats_interval, Duration::from_millis(500));
    assert_eq!(args.run.duration, Some(Duration::from_secs(2)));
    assert!(args.until_idle && args.run.format == Format::Json);
}

#[test]
fn bad_value_names_flag_and_expectation() {
    for (flag, value, expected) in [
        ("--port", "vhost", "KIND:ARGS"),
        ("--port", "ring:a", "vhost, virtio-user, af_xdp"),
        ("--port", "gen:size=10", "expected a number from 64"),
        ("--port", "vhost:/tmp/a,wide", "key 'wide' is not known"),
        ("--forward", "l3", "macswap"),
        ("--ageing", "-1", "0 for never learning"),
        ("--fdb-size", "0", "from 1 to 1048576"),
        ("--flood-limit", "0", "from 1"),
        ("--vlan", "0=hybrid:1", "PORT=access:VLAN"),
        ("--vlan", "0=access:5000", "1 to 4094"),
        ("--fdb", "02:00:00:00:00:01", "no '='"),
        ("--fdb", "a=02:00:00:00:00:01", "'a' is no port number"),
        ("--fdb", "0=02:00:00:00:00", "expected PORT=MAC"),
        ("--fdb", "0=01:00:5e:00:00:01", "expected a unicast one"),
        ("--fdb", "0=locked,locked", "expected it once"),
        ("--fdb", "0=02:00:00:00:00:01,02:00:00:00:00:01", "given twice"),
        ("--mirror", "pcap:-,m", "no '='"),
        ("--mirror", "0:up=pcap:-,m", "expected rx, tx or both"),
        ("--mirror", "0=ring:m", "kind 'ring' is not known"),
        ("--port-topology", "ring", "paired, chained, loop"),
        ("--eth-peer", "02:00:00:00:00:01", "expected PORT,MAC"),
        ("--eth-peer", "x,02:00:00:00:00:01", "'x' is no port number"),
        ("--eth-peer", "0,02:00:00:00:00", "it has 5 parts"),
        ("--dma", "txq0", "no '@'"),
        ("--mode", "both", "cpu, offload, auto"),
        ("--dsa-sim", "x:seed=7", "'x' is no device number"),
        ("--lcores", "1-0", "numbers and ranges"),
        ("--lcores", "0,0", "listed twice"),
        ("--burst", "65", "from 1 to 64"),
        ("--burst", "0", "from 1 to 64"),
        ("--mbufs", "63", "from 64 to 16777216"),
        ("--mbuf-size", "2176", "the next one is 4096"),
        ("--mbuf-size", "1024", "power of two from 2048"),
        ("--hugepages", "4K", "auto, 1G, 2M, none"),
        ("--txpkts", "45", "from 46"),
        ("--work-ns", "-1", "from 1"),
        ("--idle", "nap", "poll, sleep"),
        ("--max-latency", "0", "from 1"),
        ("--rt-priority", "100", "from 1 to 99"),
        ("--stats-interval", "nan", "0 for none"),
        ("--duration", "0", "more than 0"),
        ("--format", "xml", "table, json"),
    ] {
        let error = switch(&["--port=gen:", &format!("{flag}={value}")]).unwrap_err();
        assert!(error.contains(flag) && error.contains(expected), "{flag}={value}: {error}");
    }
}

#[test]
fn exclusive_flags_are_both_named() {
    for (args, names) in [
        (&["--demo", "--port=gen:"][..], ["--demo", "--port"]),
        (&["--demo", "--dma=txq0@cpu"], ["--demo", "--dma"]),
        (&["--demo", "--lcores=0"], ["--demo", "--lcores"]),
        (&["--demo", "--burst=32"], ["--demo", "--burst"]),
        (&["--port=gen:", "--quick"], ["--demo", "--quick"]),
        (&[], ["--port", "required"]),
    ] {
        let error = switch(args).unwrap_err();
        assert!(names.iter().all(|name| error.contains(name)), "{args:?}: {error}");
    }
    let words = ["offcore", "switch", "--quick", "--demo", "--format=json", "-v"];
    let Command::Demo(args) = Cli::of(words).unwrap().command else { panic!("no demo") };
    assert!(args.quick && args.format == Format::Json);
}
