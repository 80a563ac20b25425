//! Tests how the EAL behaves in a process. Each test runs in a separate process, because a process can have only one
//! EAL.
#![cfg(feature = "dpdk")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::Command;

use offcore_dpdk::eal;
use offcore_dpdk::ethdev::{Ethdev, Request};
use offcore_mem::{Burst, Hugepages, Pool};

const CHILD: &str = "OFFCORE_TEST_EAL_CHILD";

/// Runs the rest of the test `name` in a child process; returns whether this is the child.
fn is_child(name: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("Usage:") && !text.contains("EAL: "), "DPDK printed: {text}");
    false
}

/// Receives a few packets from net_null.
fn receives() {
    let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
    let request = Request { device: "net_null0".into(), queues: 1, ..Request::default() };
    let device = Ethdev::open(&request, pool).unwrap();
    let (mut cache, mut burst) = (pool.cache(), Burst::new());
    assert_eq!(device.rx(0).rx(&mut cache, &mut burst, 32).packets, 32);
    cache.free_all(burst.drain(..));
}

fn status(field: &str, task: &std::path::Path) -> String {
    let text = std::fs::read_to_string(task.join("status")).unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

#[test]
fn eal_keeps_affinity_and_signals() {
    if !is_child("eal_keeps_affinity_and_signals") {
        return;
    }
    let me = std::path::Path::new("/proc/thread-self");
    let fields = ["Cpus_allowed_list:", "SigBlk:", "SigCgt:"];
    let before = fields.map(|field| status(field, me));
    let ours: Vec<_> = std::fs::read_dir("/proc/self/task").unwrap().map(|t| t.unwrap().path()).collect();
    receives();
    assert_eq!(fields.map(|field| status(field, me)), before);
    let theirs = std::fs::read_dir("/proc/self/task").unwrap().map(|t| t.unwrap().path());
    let theirs: Vec<_> = theirs.filter(|task| !ours.contains(task)).collect();
    assert!(!theirs.is_empty(), "the EAL has threads");
    // SIGINT is bit 1, SIGTERM bit 14.
    for task in theirs {
        let blocked = u64::from_str_radix(&status("SigBlk:", &task), 16).unwrap();
        assert_eq!(blocked & 0x4002, 0x4002, "{}", task.display());
    }
}

#[test]
fn eal_runs_without_hugepages() {
    if !is_child("eal_runs_without_hugepages") {
        return;
    }
    eal::configure("--no-huge").unwrap();
    assert!(eal::start().unwrap().contains("without hugepages"));
    receives();
    let late = eal::configure("--in-memory").unwrap_err().to_string();
    assert!(late.contains("runs already"), "{late}");
    let taken = eal::claim("another part").unwrap_err().to_string();
    assert!(taken.contains("only one"), "{taken}");
}

#[test]
fn eal_errors_are_returned_not_printed() {
    if !is_child("eal_errors_are_returned_not_printed") {
        return;
    }
    eal::configure("--bogus=1").unwrap();
    for _ in 0..2 {
        let error = eal::start().unwrap_err().to_string();
        let words = ["--bogus=1", "unrecognized option", "Invalid argument", "correct --eal"];
        // The prefix is removed, because the parent would take the line for the EAL's output.
        assert!(words.iter().all(|word| error.contains(word)), "{}", error.replace("EAL:", "EAL"));
    }
}

#[test]
fn a_device_made_by_its_arguments_is_found() {
    if !is_child("a_device_made_by_its_arguments_is_found") {
        return;
    }
    eal::configure("--no-huge -m 64 --vdev 'net_null0,size=128'").unwrap();
    receives();
}

#[test]
fn eal_claim_is_exclusive() {
    if !is_child("eal_claim_is_exclusive") {
        return;
    }
    eal::claim("a peer").unwrap();
    eal::claim("a peer").unwrap();
    let errors =
        [eal::start().unwrap_err(), eal::configure("-m 64").unwrap_err(), eal::claim("we").unwrap_err()];
    for error in errors {
        assert!(error.to_string().contains("a peer has started an EAL"), "{error}");
    }
}
