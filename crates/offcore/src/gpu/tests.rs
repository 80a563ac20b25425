use offcore_flow::Topology;
use offcore_flow::pipeline::OnHit;
use offcore_flow::switch::Working;
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::layout::Kind;

use super::*;
use crate::cli::lines::{command, examples};
use crate::cli::{Cli, Command};

fn working_of(config: SwitchConfig) -> Working {
    let Run::Pipelines(working) = config.run else { panic!("{:?} has no pipelines", config.run) };
    working
}

fn pipelines(line: &str) -> Result<PipelineArgs, String> {
    match command(line)? {
        Command::Gpu(args) => Ok(args.pipelines),
        other => panic!("{other:?} has no pipelines"),
    }
}

fn gpu(flags: &str) -> Result<(Working, Vec<PortSpec>), String> {
    let (config, ports) = plan(&pipelines(&format!("offcore gpu {flags}"))?)?;
    Ok((working_of(config), ports))
}

fn working(flags: &str) -> Working {
    gpu(&format!("--port gen: {flags}")).unwrap().0
}

#[test]
fn default_run_swaps_and_sends_back() {
    let (working, ports) = gpu("--port gen:").unwrap();
    assert_eq!((working.topology, ports.len()), (Topology::Loop, 1));
    assert_eq!((working.workload, working.kind, working.swap), (Workload::Cpu, Kind::Nothing, true));
    assert_eq!((working.burst, working.forced_ns, working.split_at), (64, 0, None));
}

#[test]
fn work_on_payloads_has_gpu_memory_and_blocks() {
    let of = |flags: &str| {
        let working = working(flags);
        (working.memory, working.blocks)
    };
    for work in ["crc32c", "checksum", "match --patterns x"] {
        for workload in ["persistent", "graph"] {
            let flags = format!("-w {workload} --work {work}");
            assert_eq!(of(&flags), (Memory::Gpu, 32), "{flags}");
            assert_eq!(of(&format!("{flags} -g host")), (Memory::Host, 4));
            assert_eq!(of(&format!("{flags} -m host --blocks 8")), (Memory::Host, 8));
        }
    }
    assert_eq!(of("-w persistent"), (Memory::Host, 4));
    assert_eq!(of("-w cpu --work crc32c").0, Memory::Host);
}

#[test]
fn l2fwd_nv_letters_equal_long_flags() {
    let letters = "-b 1024 -d 2048 -g 1 -m 1 -n -p 2 -s -t 500 -v 1000 -w 3 -z 10";
    let words = "--burst 1024 --data-room 2048 --device cuda:1 --memory gpu --profile --pipelines 2 --split \
                 --packet-time 500 --packets 1000 --workload persistent --warm-up 10";
    for flags in [letters, words] {
        let args = pipelines(&format!("offcore gpu --port gen: {flags}")).unwrap();
        assert_eq!((args.packets, args.warm_up, args.run().pool.mbuf_size), (1000, 10, 4096));
        let (config, ports) = plan(&args).unwrap();
        assert_eq!(ports[0].queues(), 2);
        let working = working_of(config);
        assert_eq!(working.workload, Workload::Device(Launch::Persistent));
        assert_eq!(
            (working.devices, working.memory, working.profile),
            (vec!["cuda:1".into()], Memory::Gpu, true)
        );
        assert_eq!((working.burst, working.forced_ns, working.split_at), (1024, 500, Some(60)));
    }
    for (letter, word) in [("0", "none"), ("1", "cpu"), ("2", "kernel"), ("3", "persistent"), ("4", "graph")]
    {
        let both = [letter, word].map(|workload| working(&format!("-w {workload}")).workload);
        assert_eq!((both[0], both[0].name()), (both[1], word));
    }
}

#[test]
fn devices_are_numbers_or_names() {
    let devices = |list: &str| working(&format!("-w 2 -g {list}")).devices;
    assert_eq!(devices("0,cuda:1,host"), ["cuda:0", "cuda:1", "host"]);
    assert_eq!(devices("cuda"), ["cuda:0"]);
    for name in ["gpu0", "cuda:host", "cuda:cuda:0", "cuda:", "cuda0", "0,cuda:cuda"] {
        let error = gpu(&format!("--port gen: -w 2 -g {name}")).unwrap_err();
        let named = name.rsplit(',').next().unwrap();
        assert!(error.contains(&format!("'{named}' is no device")), "{error}");
    }
}

#[test]
fn on_match_follows_the_flags() {
    let flags = |more: &str| working(&format!("--work match --patterns p.txt {more}"));
    assert_eq!(flags("").on_hit, OnHit::Pass);
    assert_eq!(flags("--on-match mark").on_hit, OnHit::Mark(46));
    assert_eq!(flags("--on-match mark --mark 8").on_hit, OnHit::Mark(8));
    let (working, ports) = gpu("--port gen: --work match --patterns p.txt --steer tap:t").unwrap();
    assert_eq!((working.on_hit, working.elsewhere, ports.len()), (OnHit::Steer, Some(1), 2));
}

#[test]
fn contradictions_are_refused_by_name() {
    for (flags, words) in [
        ("-b 0", "from 1 to 4096"),
        ("-b 4097", "from 1 to 4096"),
        ("-w 5", "persistent (3)"),
        ("-w gpu", "persistent (3)"),
        ("-w 2 -m 3", "gpu (1) or direct (2)"),
        ("-m 2", "--memory is for a device"),
        ("-w 0 -m direct", "--memory is for a device"),
        ("-w 2 -m 2", "gen:size=64 cannot access"),
        ("-w 2 -m 2 -g 0,1", "--device: cuda:0,cuda:1, expected one"),
        ("-w 2 -m 2 -s", "--split: puts first bytes"),
        ("-w 2 -m 2 --work match --patterns p --on-match mark", "--on-match: mark, which the CPU writes"),
        ("-t 20000001", "from 0 to 20000000"),
        ("-p 0", "from 1"),
        ("-d 0", "from 1"),
        ("-d 2048 --mbuf-size 4096", "cannot be used with"),
        ("--split-at 13", "from 14"),
        ("--slots 3", "power of two"),
        ("-g 0", "--device is for a device"),
        ("-m 0", "--memory is for a device"),
        ("-w 0 -t 5", "--packet-time with --workload none"),
        ("-w 0 --work crc32c", "--work with --workload none"),
        ("--no-swap", "nothing would be done"),
        ("--work match", "needs --patterns"),
        ("--patterns p.txt", "is for --work match"),
        ("--on-match drop", "is for --work match"),
        ("--steer tap:t", "is for --work match"),
        ("--work match --patterns p --on-match steer", "needs --steer"),
        ("--work match --patterns p --on-match drop --steer tap:t", "found drop"),
        ("--work match --patterns p --mark 4", "is for --on-match mark"),
        ("-s --skip 4", "leave --skip out"),
        ("--skip 4", "--skip is for --work crc32c, checksum or match"),
        ("--port pcap:a.pcap -p 2", "has one queue"),
        ("-z 5", "--packets"),
        ("-w kernel --blocks 4", "is for --workload persistent or graph"),
        ("-w graph -b 4096 --threads 32 -t 20000000", "raise that"),
    ] {
        let error = gpu(&format!("--port gen: {flags}")).unwrap_err();
        assert!(error.contains(words), "{flags}: {error}");
    }
    let error = gpu("").unwrap_err();
    assert!(error.contains("--port"), "{error}");
}

#[test]
fn memory_direct_needs_dpdk_ports() {
    for memory in ["-m 2", "--memory direct"] {
        let (working, ports) = gpu(&format!("--port dpdk:net_null0 -w 3 {memory}")).unwrap();
        assert_eq!((working.memory, ports.len()), (Memory::Direct, 1));
    }
    let flags = "--port dpdk:net_null0 -w 3 -m 2 --work match --patterns p --steer";
    gpu(&format!("{flags} dpdk:net_null1")).unwrap();
    let error = gpu(&format!("{flags} tap:t")).unwrap_err();
    assert!(error.contains("tap:t") && error.contains("only ports dpdk:"), "{error}");
}

#[test]
fn help_examples_are_accepted() {
    for line in examples(EXAMPLES, 8) {
        match command(&line).unwrap() {
            Command::Gpu(args) if args.command.is_none() => drop(plan(&args.pipelines).unwrap()),
            Command::Gpu(_) => {}
            other => panic!("{line} is {other:?}"),
        }
    }
}

#[test]
fn verbose_has_no_letter() {
    assert_eq!(command("offcore gpu --port gen: --verbose --verbose -v 7").unwrap().verbose(), 2);
    assert_eq!(Cli::of(["offcore", "-vv", "gpu", "--port", "gen:"]).unwrap().verbose, 2);
}
