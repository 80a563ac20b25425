//! Network namespaces of a test's own: the kernel's TCP/IP stack as a peer, out of the way of the machine's network.

use std::ffi::OsStr;
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};

use crate::tempdir::unique_name;

/// A network namespace with its loopback interface up, deleted on drop. Needs root.
///
/// Its interfaces go with it: a veth or TAP interface in a deleted namespace is deleted, once the last process in
/// the namespace has ended.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes a namespace whose name no other process uses.
    ///
    /// # Errors
    /// When `ip netns add` fails; the text has what it said.
    pub fn new() -> Result<Self> {
        let name = unique_name();
        ip(&["netns", "add", &name])?;
        let netns = Self { name };
        netns.ip(&["link", "set", "lo", "up"])?;
        Ok(netns)
    }

    /// The namespace's name, as in `ip netns list`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A command that will run `program` in the namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Runs `program` in the namespace to its end and returns its standard output.
    ///
    /// # Errors
    /// When it cannot be started, or ends with a status other than 0: the text has the status and both streams.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        let mut command = self.command(program);
        command.args(args);
        checked(&mut command)
    }

    /// Runs `ip` on the namespace, which works for interfaces in it.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn ip(&self, args: &[&str]) -> Result<String> {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend_from_slice(args);
        ip(&all)
    }

    /// Moves an interface of the initial namespace into this one. The kernel takes its addresses and sets it down.
    ///
    /// # Errors
    /// As [`Netns::run`], for instance when there is no such interface.
    pub fn take(&self, interface: &str) -> Result<()> {
        ip(&["link", "set", interface, "netns", &self.name]).map(drop)
    }

    /// Gives an interface of the namespace an address, such as `10.77.0.1/24`, and sets it up.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn configure(&self, interface: &str, address: &str) -> Result<()> {
        self.ip(&["address", "add", address, "dev", interface])?;
        self.ip(&["link", "set", interface, "up"]).map(drop)
    }

    /// Makes a veth pair: `interface` here, `peer_interface` in `peer`. Both are down, without an address.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn veth(&self, interface: &str, peer: &Self, peer_interface: &str) -> Result<()> {
        ip(&[
            "link",
            "add",
            interface,
            "netns",
            &self.name,
            "type",
            "veth",
            "peer",
            "name",
            peer_interface,
            "netns",
            &peer.name,
        ])
        .map(drop)
    }

    /// Turns off what lets the kernel leave work to an interface (checksums, segmentation, coalescing), which a
    /// userspace port behind it may not do.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn disable_offloads(&self, interface: &str) -> Result<()> {
        let off = ["-K", interface, "rx", "off", "tx", "off", "tso", "off", "gso", "off", "gro", "off"];
        self.run("ethtool", &off).map(drop)
    }

    /// Lets the kernel leave checksums and segmentation of TCP to an interface.
    ///
    /// # Errors
    /// As [`Netns::run`], and when what is behind the interface has not said that it does them.
    pub fn enable_offloads(&self, interface: &str) -> Result<()> {
        self.run(
            "ethtool",
            &["-K", interface, "tx", "on", "sg", "on", "tso", "on", "gso", "on", "gro", "on"],
        )?;
        let features = self.run("ethtool", &["-k", interface])?;
        for feature in ["tx-checksumming: on", "tcp-segmentation-offload: on"] {
            ensure!(features.contains(feature), "{interface} has no {feature:?}:\n{features}");
        }
        Ok(())
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        // Nothing to be done about a failure here, and a test that is failing already has its reason.
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// An interface name that no other process uses, for an interface that starts in the initial namespace.
pub fn unique_interface() -> String {
    unique_name()
}

fn ip(args: &[&str]) -> Result<String> {
    checked(Command::new("ip").args(args))
}

/// Runs a command to its end and returns its standard output; an error has everything it printed.
pub(crate) fn checked(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("cannot start {shown}"))?;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    if !status.success() {
        bail!("{shown} ended with {status}\n{}{}", stdout, String::from_utf8_lossy(&stderr));
    }
    Ok(stdout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Need, require};

    fn exists(name: &str) -> bool {
        ip(&["netns", "list"]).unwrap().lines().any(|line| line.split(' ').next() == Some(name))
    }

    #[test]
    fn a_namespace_comes_and_goes() {
        let Some(()) = require(&[Need::Root, Need::Ip]) else { return };
        let netns = Netns::new().unwrap();
        let name = netns.name().to_owned();
        assert!(exists(&name));
        assert!(netns.run("ip", &["-o", "link", "show", "lo"]).unwrap().contains("UP"));
        drop(netns);
        assert!(!exists(&name));
    }

    #[test]
    fn two_namespaces_reach_each_other_over_veth() {
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
        let tap = unique_interface();
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
}
