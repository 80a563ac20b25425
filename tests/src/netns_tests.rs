//! Tests of the network namespaces that the benchmarks and the end-to-end tests share.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Instant;

use offcore_bench::peer::process::TIMEOUT;

use crate::netns::{Netns, checked};
use crate::tempdir::unique_name;
use crate::{Need, require};

fn ip(args: &[&str]) -> anyhow::Result<String> {
    checked(Command::new("ip").args(args))
}

fn exists(name: &str) -> bool {
    ip(&["netns", "list"]).unwrap().lines().any(|line| line.split(' ').next() == Some(name))
}

#[test]
fn namespace_is_created_and_deleted() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    let netns = Netns::new().unwrap();
    let name = netns.name().to_owned();
    assert!(exists(&name));
    assert!(netns.run("ip", &["-o", "link", "show", "lo"]).unwrap().contains("UP"));
    drop(netns);
    assert!(!exists(&name));
}

#[test]
fn dropped_namespace_kills_its_processes() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    let netns = Netns::new().unwrap();
    let mut left = netns.command("sleep").arg("600").spawn().unwrap();
    let inside = || netns.run("ip", &["netns", "pids", netns.name()]).unwrap();
    let since = Instant::now();
    while !inside().lines().any(|pid| pid.trim() == left.id().to_string()) {
        assert!(since.elapsed() < TIMEOUT);
    }
    drop(netns);
    assert_eq!(left.wait().unwrap().signal(), Some(9));
}

#[test]
fn stale_namespace_is_removed() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    // A process that has ended and been waited for.
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let left = format!("oc{}n0", gone.id());
    ip(&["netns", "add", &left]).unwrap();
    let mine = Netns::new().unwrap();
    Netns::sweep().unwrap();
    assert!(!exists(&left) && exists(mine.name()));
}

#[test]
fn namespaces_reach_each_other() {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Ping, Need::Ethtool]) else { return };
    let (a, b) = (Netns::new().unwrap(), Netns::new().unwrap());
    a.veth("left", &b, "right").unwrap();
    a.configure("left", "10.77.1.1/24").unwrap();
    b.configure("right", "10.77.1.2/24").unwrap();
    a.disable_offloads("left").unwrap();
    let features = a.run("ethtool", &["-k", "left"]).unwrap();
    assert!(features.contains("generic-segmentation-offload: off"), "{features}");
    let text = a.run("ping", &["-c", "2", "-i", "0.2", "10.77.1.2"]).unwrap();
    assert!(text.contains("2 received"), "{text}");
}

#[test]
fn an_interface_moves_in() {
    let Some(()) = require(&[Need::Root, Need::Ip, Need::Tun]) else { return };
    let netns = Netns::new().unwrap();
    let tap = unique_name();
    ip(&["tuntap", "add", "dev", &tap, "mode", "tap"]).unwrap();
    netns.take(&tap).unwrap();
    netns.configure(&tap, "10.77.2.1/24").unwrap();
    assert!(netns.ip(&["address", "show", "dev", &tap]).unwrap().contains("10.77.2.1/24"));
    assert!(ip(&["link", "show", "dev", &tap]).is_err(), "it is still in the initial namespace");
}

#[test]
fn a_failing_command_says_why() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    let netns = Netns::new().unwrap();
    let error = netns.take("nosuchif").unwrap_err().to_string();
    assert!(error.contains("nosuchif") && error.contains("Cannot find device"), "{error}");
}
