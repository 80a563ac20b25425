//! Open vSwitch with DPDK: a learning switch between two vhost-user ports, with one PMD thread.
//!
//! Tested with Debian 12's openvswitch-switch-dpdk (3.1.0). Findings:
//! - `OVS_RUNDIR` and similar variables determine the location of database, sockets and logs, so that no other Open
//!   vSwitch is affected. The names of the datapath's TAP devices are fixed. The switch therefore runs in a private
//!   network namespace, which is deleted with it.
//! - `dpdkvhostuser` ports, which create their sockets in the run directory, are deprecated but work.
//!   `dpdkvhostuserclient` would need a listening front end.
//! - A PMD thread always polls. While another program is measured on its core, the process is stopped (`SIGSTOP`).
//! - It starts DPDK with `--in-memory`, which DPDK supports only with hugepages.
//! - It also floods to the bridge's own TAP device, so both stations have to be known before the timed part.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use offcore_stats::lcore;
use rustix::process::Signal;

use super::netns::checked;
use super::process::{Process, TIMEOUT};
use super::tempdir::{TempDir, unique_name};
use crate::machine::find_program;

/// The switch with DPDK, which is not in PATH.
const VSWITCHD: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
const BRIDGE: &str = "br0";
/// MiB of memory for packet buffers.
const MEMORY_MIB: u32 = 256;

/// A running switch with two ports. Dropping it kills it.
#[derive(Debug)]
pub struct Ovs {
    // The switch is dropped before its database.
    switch: Process,
    _database: Process,
    dir: TempDir,
}

/// Returns a missing requirement with a remedy, or `None` if the switch can run.
pub fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root: run as root".into());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("no /dev/net/tun: load the module tun, or give the container the device".into());
    }
    let programs = ["ovsdb-server", "ovsdb-tool", "ovs-vsctl", "ovs-appctl"];
    let there = programs.iter().all(|name| find_program(name).is_some()) && Path::new(VSWITCHD).is_file();
    (!there).then(|| "no Open vSwitch with DPDK: apt-get install openvswitch-switch-dpdk".into())
}

impl Ovs {
    /// Starts a switch whose PMD thread runs on `core`. Its packet buffers are on hugepages.
    ///
    /// # Errors
    /// If a requirement is missing, or a program reports an error.
    pub fn start(core: usize) -> Result<Self> {
        if let Some(missing) = missing() {
            bail!("{missing}");
        }
        let dir = TempDir::new()?;
        let database = dir.file("conf.db");
        checked(Command::new("ovsdb-tool").arg("create").arg(&database).arg(SCHEMA))?;
        let mut server = Command::new(find_program("ovsdb-server").context("ovsdb-server")?);
        server.arg(&database).arg(format!("--remote=punix:{}", dir.file("db").display()));
        server.arg(format!("--unixctl={}", dir.file("db.ctl").display()));
        let server = Process::spawn("ovsdb-server", at_home(server, &dir))?;
        wait_until("the database's socket", || Ok(dir.file("db").exists()))?;

        let extra = format!("--no-pci --no-telemetry --single-file-segments --socket-mem {MEMORY_MIB}");
        // The main thread wakes up from time to time. It runs on another core, because on the PMD thread's core it
        // would be measured.
        let main = lcore::available()?.into_iter().find(|&other| other != core).unwrap_or(core);
        let mask = |core: usize| -> Result<u128> {
            1u128.checked_shl(u32::try_from(core)?).context("Open vSwitch's masks have 128 cores")
        };
        let settings = [
            "dpdk-init=true".into(),
            format!("pmd-cpu-mask={:#x}", mask(core)?),
            format!("dpdk-lcore-mask={:#x}", mask(main)?),
            format!("dpdk-extra=\"{extra} --file-prefix={}\"", unique_name()),
        ];
        let mut configure = vsctl(&dir);
        configure.args(["--no-wait", "set", "Open_vSwitch", "."]);
        configure.args(settings.iter().map(|setting| format!("other_config:{setting}")));
        checked(vsctl(&dir).args(["--no-wait", "init"]))?;
        checked(&mut configure)?;

        let mut switch = Command::new("unshare");
        switch.arg("--net").arg(VSWITCHD).arg(format!("unix:{}", dir.file("db").display()));
        switch.arg(format!("--unixctl={}", dir.file("ctl").display())).arg("-vconsole:info");
        let switch = Process::spawn("ovs-vswitchd", at_home(switch, &dir))?;
        let ovs = Self { switch, _database: server, dir };
        let mut bridge = vsctl(&ovs.dir);
        bridge.args(["add-br", BRIDGE, "--", "set", "bridge", BRIDGE, "datapath_type=netdev"]);
        for port in ["v0", "v1"] {
            bridge.args([
                "--",
                "add-port",
                BRIDGE,
                port,
                "--",
                "set",
                "Interface",
                port,
                "type=dpdkvhostuser",
            ]);
        }
        checked(&mut bridge).with_context(|| ovs.switch.tail())?;
        for socket in ovs.sockets() {
            wait_until("a port's socket", || Ok(socket.exists())).with_context(|| ovs.switch.tail())?;
        }
        Ok(ovs)
    }

    /// Returns the sockets of both ports.
    pub fn sockets(&self) -> [PathBuf; 2] {
        ["v0", "v1"].map(|port| self.dir.file(port))
    }

    /// Returns its name and version: `Open vSwitch 3.1.0`.
    ///
    /// # Errors
    /// If the version is not available.
    pub fn version(&self) -> Result<String> {
        let said = self.ask(&["version"])?;
        let version = said.lines().next().and_then(|line| line.rsplit(' ').next());
        Ok(format!("Open vSwitch {}", version.context("ovs-vswitchd has no version")?))
    }

    /// Waits until both ports have front ends.
    ///
    /// # Errors
    /// If a front end is missing after [`TIMEOUT`].
    pub fn wait_ready(&self) -> Result<()> {
        for socket in self.sockets() {
            let added = format!("'{}' has been added", socket.display());
            wait_until("a port's front end", || Ok(self.switch.stderr().contains(&added)))
                .with_context(|| self.switch.tail())?;
        }
        Ok(())
    }

    /// Waits until it has learned the port of a station.
    ///
    /// # Errors
    /// If it has not after [`TIMEOUT`].
    pub fn wait_learned(&self, station: &str) -> Result<()> {
        wait_until("a station to be learned", || Ok(self.ask(&["fdb/show", BRIDGE])?.contains(station)))
    }

    /// Stops or continues all its threads.
    ///
    /// # Errors
    /// If it has ended.
    pub fn set_running(&mut self, running: bool) -> Result<()> {
        self.switch.signal(if running { Signal::CONT } else { Signal::STOP })?;
        let stat = format!("/proc/{}/stat", self.switch.id());
        wait_until("the switch to stop or go on", || {
            let stat = std::fs::read_to_string(&stat)?;
            Ok(stat.contains(") T ") != running)
        })
    }

    /// Resets the counters of its PMD thread.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn clear_counters(&self) -> Result<()> {
        self.ask(&["dpif-netdev/pmd-stats-clear"]).map(drop)
    }

    /// Returns the number of packets that the PMD thread has received, and the TSC ticks per packet without empty
    /// polls.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn counters(&self) -> Result<(u64, Option<f64>)> {
        let said = self.ask(&["dpif-netdev/pmd-stats-show"])?;
        counters(&said).with_context(|| format!("what ovs-vswitchd says of its PMD thread:\n{said}"))
    }

    /// Returns the process ID of the switch.
    pub fn id(&self) -> u32 {
        self.switch.id()
    }

    fn ask(&self, question: &[&str]) -> Result<String> {
        let mut appctl = Command::new("ovs-appctl");
        appctl.args(["--timeout=10", "-t"]).arg(self.dir.file("ctl")).args(question);
        checked(&mut appctl)
    }
}

/// Parses the first PMD thread's packets and processing cycles per packet.
fn counters(said: &str) -> Option<(u64, Option<f64>)> {
    let of_thread = said.lines().skip_while(|line| !line.starts_with("pmd thread")).skip(1);
    let of_thread: Vec<_> = of_thread.take_while(|line| line.starts_with(' ')).collect();
    let value =
        |name: &str| of_thread.iter().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(": "));
    let packets = value("packets received")?.parse().ok()?;
    let cycles = value("avg processing cycles per packet");
    Some((packets, cycles.and_then(|value| value.split(' ').next()?.parse().ok())))
}

fn vsctl(dir: &TempDir) -> Command {
    let mut vsctl = Command::new("ovs-vsctl");
    vsctl.arg("--timeout=20").arg(format!("--db=unix:{}", dir.file("db").display()));
    vsctl
}

/// Configures a program to keep all its files in `dir`.
fn at_home(mut command: Command, dir: &TempDir) -> Command {
    for variable in ["OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR", "OVS_SYSCONFDIR", "RUNTIME_DIRECTORY"] {
        command.env(variable, dir.path());
    }
    command
}

fn wait_until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !done()? {
        ensure!(start.elapsed() < TIMEOUT, "waited {} s for {what}", TIMEOUT.as_secs());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pmd_threads_counters_are_read() {
        let said = "pmd thread numa_id 0 core_id 0:\n  packets received: 1200\n  emc hits: 3\n  \
                    avg cycles per packet: 300.00 (360000/1200)\n  \
                    avg processing cycles per packet: 123.45 (148140/1200)\nmain thread:\n  packets received: 7\n";
        assert_eq!(counters(said), Some((1200, Some(123.45))));
        let idle =
            "main thread:\n  packets received: 7\npmd thread numa_id 0 core_id 1:\n  packets received: 0\n";
        assert_eq!(counters(idle), Some((0, None)));
        assert_eq!(counters("main thread:\n  packets received: 7\n"), None);
    }
}
