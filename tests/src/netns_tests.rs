//! Tests of the network namespaces that the benchmarks and the end-to-end tests share.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Instant;

use offcore_bench::peer::process::TIMEOUT;

use crate::netns::{Netns, checked};
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
fn a_failing_command_says_why() {
    let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
    let netns = Netns::new().unwrap();
    let error = netns.configure("nosuchif", "10.77.2.1/24").unwrap_err().to_string();
    assert!(error.contains("nosuchif") && error.contains("Cannot find device"), "{error}");
}
