//! Private network namespaces: the kernel's TCP/IP stack as a peer, isolated from the machine's network.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::process::{Command, Output};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, getpid, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::leftovers;
use super::tempdir::unique_name;
use crate::machine::find_program;

/// A network namespace with its loopback interface up. Dropping it deletes the namespace and kills its processes. Needs
/// root.
///
/// Its interfaces are deleted with it: the kernel deletes veth and TAP interfaces of a deleted namespace after the last
/// process in the namespace has ended.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Creates a namespace with a unique name.
    ///
    /// # Errors
    /// If `ip netns add` fails. The error contains its output.
    pub fn new() -> Result<Self> {
        let name = unique_name();
        leftovers::make(&name, || ip(&["netns", "add", &name]).map(drop), remove)?;
        let netns = Self { name };
        netns.ip(&["link", "set", "lo", "up"])?;
        Ok(netns)
    }

    /// Deletes the namespaces that killed processes have left behind: namespaces with a name from [`Netns::new`] whose
    /// process no longer exists, and which contain no process.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn sweep() -> Result<()> {
        for line in ip(&["netns", "list"])?.lines() {
            let name = line.split(' ').next().unwrap_or_default();
            let process = name.strip_prefix("oc").and_then(|rest| rest.split_once('n'));
            let process = process.and_then(|(id, count)| count.parse::<u32>().and(id.parse::<u32>()).ok());
            let gone = |id| !std::path::Path::new(&format!("/proc/{id}")).exists();
            if process.is_some_and(gone) && ip(&["netns", "pids", name]).is_ok_and(|pids| pids.is_empty()) {
                // Another process may have deleted it in the meantime.
                let _ = ip(&["netns", "delete", name]);
            }
        }
        Ok(())
    }

    /// Returns the namespace's name, as in `ip netns list`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a command that runs `program` in the namespace.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Runs `program` in the namespace until it ends and returns its standard output.
    ///
    /// # Errors
    /// If it cannot be started, or ends with a status other than 0. The error contains the status and both streams.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        let mut command = self.command(program);
        command.args(args);
        checked(&mut command)
    }

    /// Runs `ip` on the namespace, which works for the interfaces in it.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn ip(&self, args: &[&str]) -> Result<String> {
        let mut all = vec!["-n", self.name.as_str()];
        all.extend_from_slice(args);
        ip(&all)
    }

    /// Moves the calling thread permanently into the namespace. Sockets that it opens afterwards belong to the
    /// namespace.
    ///
    /// # Errors
    /// If the thread lacks CAP_SYS_ADMIN.
    pub fn enter(&self) -> Result<()> {
        let entered = std::fs::File::open(format!("/run/netns/{}", self.name))
            .and_then(|file| Ok(move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?));
        entered.with_context(|| format!("cannot enter the network namespace {}", self.name))
    }

    /// Runs `job` on a new thread in the namespace. Sockets that it opens stay in the namespace.
    ///
    /// # Errors
    /// The job's errors, and the errors of [`Netns::enter`].
    pub fn within<T: Send>(&self, job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter()?;
                job()
            });
            thread.join().map_err(|_| anyhow!("a thread in the namespace {} has panicked", self.name))?
        })
    }

    /// Adds an address, such as `10.77.0.1/24`, to an interface of the namespace and sets the interface up.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn configure(&self, interface: &str, address: &str) -> Result<()> {
        self.ip(&["address", "add", address, "dev", interface])?;
        self.ip(&["link", "set", interface, "up"]).map(drop)
    }

    /// Creates a veth pair: `interface` in this namespace, `peer_interface` in `peer`. Both are down and have no
    /// address.
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

    /// Disables the offloads of an interface (checksums, segmentation, coalescing), which a userspace port behind it
    /// may not support.
    ///
    /// # Errors
    /// As [`Netns::run`].
    pub fn disable_offloads(&self, interface: &str) -> Result<()> {
        let off = ["-K", interface, "rx", "off", "tx", "off", "tso", "off", "gso", "off", "gro", "off"];
        self.run("ethtool", &off).map(drop)
    }

    /// Enables checksum and TCP segmentation offload of an interface.
    ///
    /// # Errors
    /// As [`Netns::run`], and if the interface does not support the offloads.
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

/// Returns a missing requirement of this machine for measurements with private interfaces and two lcores, if any.
/// `programs` lists the required programs, in addition to ip and ethtool, with their packages.
pub(crate) fn missing(lcore: usize, other: Option<usize>, programs: &[(&str, &str)]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces and interfaces take root".into());
    }
    if other.is_none_or(|other| other == lcore) {
        return Some("it needs two lcores, one for each end; see --lcores".into());
    }
    let mut all = [("ip", "iproute2"), ("ethtool", "ethtool")].iter().chain(programs);
    let missing = all.find(|(program, _)| find_program(program).is_none());
    missing.map(|(program, package)| format!("there is no {program}: apt-get install {package}"))
}

impl Drop for Netns {
    fn drop(&mut self) {
        leftovers::remove(&self.name);
    }
}

/// Deletes a namespace and kills its remaining processes, such as the workers of a killed server.
fn remove(name: &str) {
    let pids = ip(&["netns", "pids", name]).unwrap_or_default();
    let pids = pids.lines().filter_map(|pid| Pid::from_raw(pid.trim().parse().ok()?));
    for pid in pids.filter(|pid| *pid != getpid()) {
        let _ = kill_process(pid, Signal::KILL);
    }
    // A failure cannot be handled here, and a failing test already has another error to report.
    let _ = ip(&["netns", "delete", name]);
}

fn ip(args: &[&str]) -> Result<String> {
    checked(Command::new("ip").args(args))
}

/// Runs a command until it ends and returns its standard output. An error contains its whole output.
///
/// # Errors
/// If it cannot be started, or ends with a status other than 0.
pub fn checked(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("cannot start {shown}"))?;
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    if !status.success() {
        bail!("{shown} ended with {status}\n{}{}", stdout, String::from_utf8_lossy(&stderr));
    }
    Ok(stdout)
}
