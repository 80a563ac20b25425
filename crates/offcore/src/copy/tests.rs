use offcore_flow::switch::Copying;
use offcore_stats::lcore;

use super::*;
use crate::cli::Command;
use crate::cli::lines::{command, examples};

fn planned(line: &str) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    match command(line)? {
        Command::Copy(args) => plan(&args),
        other => panic!("{other:?} copies nothing"),
    }
}

fn copy(flags: &str) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    planned(&format!("offcore copy {flags}"))
}

fn copying(config: &SwitchConfig) -> &Copying {
    let Run::Copy(copying) = &config.run else { panic!("{:?} copies nothing", config.run) };
    copying
}

#[test]
fn defaults_match_dpdk_dma() {
    let (config, ports) = copy("--port gen:").unwrap();
    let copying = copying(&config);
    assert_eq!(*copying, Copying { two_lcores: false, ..Copying::default() });
    assert_eq!((copying.ring_size, copying.batch, copying.topology), (2048, 32, Topology::Loop));
    assert!(copying.eth_peers.is_some());
    assert_eq!((config.mode, config.burst, ports.len()), (Mode::Cpu, 32, 1));
}

#[test]
fn burst_follows_the_batch_size() {
    for (flags, batch, burst) in [("-b 8", 8, 32), ("-b 33", 33, 33), ("--dma-batch 64", 64, 64)] {
        let (config, _) = copy(&format!("--port gen: {flags}")).unwrap();
        assert_eq!((copying(&config).batch, config.burst), (batch, burst), "{flags}");
    }
}

#[test]
fn dpdk_dma_letters_and_words_agree() {
    let letters = "-p 0x3 -q 2 -c hw -s 1024 -b 16 -f 1518 -m 100 -i 2";
    let words = "--portmask 3 --nb-queue 2 --copy-type offload --ring-size 1024 --dma-batch-size 16 \
        --max-frame-size 1518 --force-min-copy-size 100 --stats-interval 2 --mac-updating";
    let both = [letters, words].map(|flags| copy(&format!("--port gen: --port tap:t {flags}")).unwrap());
    for (config, ports) in &both {
        let wanted = Copying {
            ports: Some(3),
            ring_size: 1024,
            batch: 16,
            max_frame: 1518,
            at_least: 100,
            ..Copying::default()
        };
        assert_eq!((copying(config), config.mode), (&wanted, Mode::Offload));
        assert!(ports.iter().all(|port| port.queues() == 2));
        // Without a named channel, `hw` uses all available ones for every queue.
        assert_eq!(config.dma.channels(1, QueueHalf::Rx, 1), ["dsa:auto"]);
    }
    let (config, _) = copy("--port gen: -c sw --min-copy-size 256 --no-mac-updating").unwrap();
    assert_eq!(
        (config.mode, copying(&config).min_copy, &copying(&config).eth_peers),
        (Mode::Cpu, 256, &None)
    );
    assert!(config.dma.entries.is_empty());
}

#[test]
fn even_lcore_counts_are_paired() {
    let all = lcore::available().unwrap();
    let [first, second, ..] = all[..] else { return };
    let two = |flags: &str| copying(&copy(&format!("--port gen: {flags}")).unwrap().0).two_lcores;
    assert!(two(&format!("--lcores {first},{second}")));
    assert!(!two(&format!("--lcores {first},{second} --lcores-per-port 1")));
    assert!(!two(&format!("--lcores {first}")));
}

#[test]
fn contradictions_are_refused_in_words() {
    for (flags, words) in [
        ("", &["--port"][..]),
        ("--port gen: -p 0x2", &["--portmask: 0x2", "one port", "0x1"]),
        ("--port gen: -p 0", &["--portmask", "hexadecimal"]),
        ("--port gen: -p xyz", &["--portmask", "hexadecimal"]),
        ("--port pcap:a -q 2", &["--queues 2", "pcap:a", "one queue"]),
        ("--port gen:queues=3 -q 2", &["--queues 2", "queues=3"]),
        ("--port gen: -q 0", &["--queues", "from 1 to 128"]),
        ("--port gen: -b 65", &["--dma-batch", "from 1 to 64"]),
        ("--port gen: -s 0", &["--ring-size", "from 1 to 32768"]),
        ("--port gen: -f 63", &["--max-frame", "from 64"]),
        ("--port gen: -c both", &["--mode", "sw, hw"]),
        ("--port gen: --dma 1.rxq0@cpu", &["--dma: port 1", "one port"]),
        ("--port gen: --dma rxq0@dsa-sim0:wq0.0", &["--dsa-sim: none is dsa-sim0"]),
        ("--port gen: --until-idle", &["--until-idle", "count=N"]),
    ] {
        let error = copy(flags).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{flags}: {error}");
    }
}

#[test]
fn help_examples_are_accepted() {
    for line in examples(EXAMPLES, 6) {
        // A machine with one lcore does not have a second one.
        let short = lcore::available().unwrap().len() < 2;
        if let Err(error) = planned(&line) {
            assert!(short && error.contains("--lcores"), "{line}: {error}");
        }
    }
}
