//! `cargo xtask setup`: installs the programs that tests run against, and reserves hugepages.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// A requirement that a Debian package provides, and how to detect it.
pub(crate) struct Peer {
    package: &'static str,
    what: &'static str,
    seen_by: SeenBy,
}

enum SeenBy {
    Program(&'static str),
    /// A library that pkg-config finds in this version or a later one.
    Library(&'static str),
    File(&'static str),
}

const PEERS: [Peer; 29] = [
    Peer::program("g++", "g++"),
    Peer::program("pkg-config", "pkg-config"),
    Peer::program("dpdk", "dpdk-devbind.py"),
    Peer::program("dpdk-dev", "dpdk-testpmd"),
    Peer { package: "libdpdk-dev", what: LIBDPDK, seen_by: SeenBy::Library(LIBDPDK) },
    Peer::program("qemu-system-x86", "qemu-system-x86_64"),
    Peer::program("iproute2", "ip"),
    Peer::program("ethtool", "ethtool"),
    Peer::program("busybox-static", "busybox"),
    Peer::program("cpio", "cpio"),
    Peer::program("iperf3", "iperf3"),
    Peer::program("tcpdump", "tcpdump"),
    Peer::program("curl", "curl"),
    Peer::program("wrk", "wrk"),
    Peer::program("apache2-utils", "ab"),
    Peer::program("dnsmasq-base", "dnsmasq"),
    Peer::program("nginx-light", "nginx"),
    Peer::program("redis-server", "redis-server"),
    Peer::program("redis-tools", "redis-benchmark"),
    Peer::program("postgresql", "pgbench"),
    Peer::program("php-cli", "php"),
    Peer::program("openssh-server", "sshd"),
    Peer::program("openssh-client", "ssh"),
    Peer::program("openssl", "openssl"),
    Peer::program("python3", "python3"),
    Peer::program("iputils-ping", "ping"),
    Peer::program("valgrind", "valgrind"),
    Peer::program("util-linux", "taskset"),
    Peer::file("openvswitch-switch-dpdk", "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"),
];

const LIBDPDK: &str = "libdpdk >= 22.11";

/// The package whose dependency names Debian's current kernel, which the guest of the end-to-end tests boots.
const GUEST_KERNEL: &str = "linux-image-cloud-amd64";

/// Maximum number of 2 MiB hugepages to reserve on a machine without any.
const HUGEPAGES: u64 = 1024;

impl Peer {
    /// Returns a program, detected by its name.
    pub(crate) const fn program(package: &'static str, program: &'static str) -> Self {
        Self { package, what: program, seen_by: SeenBy::Program(program) }
    }

    /// Returns a file or directory, detected by its path.
    pub(crate) const fn file(package: &'static str, path: &'static str) -> Self {
        Self { package, what: path, seen_by: SeenBy::File(path) }
    }

    fn is_there(&self) -> bool {
        match self.seen_by {
            SeenBy::Program(name) => find_program(name).is_some(),
            SeenBy::Library(name) => has_library(name),
            SeenBy::File(path) => Path::new(path).exists(),
        }
    }
}

/// Installs missing packages, as root. Returns a line for each requirement that is still missing.
pub(crate) fn run() -> Result<Vec<String>> {
    let root = rustix::process::geteuid().is_root();
    let wanted: Vec<&str> = PEERS.iter().filter(|peer| !peer.is_there()).map(|peer| peer.package).collect();
    let mut failure = None;
    if root && (!wanted.is_empty() || !knows_package(GUEST_KERNEL)) {
        failure = install(&wanted).err();
    }
    let missing: Vec<String> = PEERS
        .iter()
        .filter(|peer| !peer.is_there())
        .map(|peer| {
            let remedy = match &failure {
                Some(error) => format!("{error:#}"),
                None => "as root, cargo xtask setup installs it".to_owned(),
            };
            format!("no {}: apt-get install {} ({remedy})", peer.what, peer.package)
        })
        .collect();
    println!("peers: {} of {} are there", PEERS.len() - missing.len(), PEERS.len());
    println!("hugepages: {}", hugepages(root)?);
    Ok(missing)
}

/// Returns cargo's arguments for the features that can be built here: `dpdk` if its library is installed.
pub(crate) fn features() -> &'static [&'static str] {
    if has_library(LIBDPDK) { &["--features", "offcore/dpdk"] } else { &[] }
}

/// Installs missing packages, as root.
///
/// # Errors
/// If a package is missing and this is not root, or it cannot be installed.
pub(crate) fn install_missing(peers: &[Peer]) -> Result<()> {
    let wanted: Vec<&str> = peers.iter().filter(|peer| !peer.is_there()).map(|peer| peer.package).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let remedy = format!("apt-get install {}", wanted.join(" "));
    ensure!(rustix::process::geteuid().is_root(), "missing packages: as root, {remedy}");
    install(&wanted)
}

/// Returns whether the `python3` in PATH can create virtual environments. Debian needs an additional package for this.
pub(crate) fn has_python_venv() -> bool {
    succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"]))
}

/// Returns the path of a program, from PATH or from directories that are not in an ordinary user's PATH.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

fn has_library(name: &str) -> bool {
    succeeds(Command::new("pkg-config").args(["--exists", name]))
}

fn knows_package(name: &str) -> bool {
    succeeds(Command::new("apt-cache").args(["show", name]))
}

fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn install(packages: &[&str]) -> Result<()> {
    ensure!(find_program("apt-get").is_some(), "there is no apt-get here");
    println!("reading the package lists");
    apt(&["update"])?;
    if packages.is_empty() {
        return Ok(());
    }
    println!("installing {}", packages.join(" "));
    let _no_daemons = NoDaemons::new()?;
    apt(&[&["install", "--yes", "--no-install-recommends"], packages].concat())
}

/// While this lives, installed packages start no daemons, because tests start their own. It uses the file that Debian's
/// policy specifies (invoke-rc.d(8), deb-systemd-invoke(1p)). An existing file is left unchanged.
struct NoDaemons {
    made: bool,
}

const POLICY: &str = "/usr/sbin/policy-rc.d";

impl NoDaemons {
    fn new() -> Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        match fs::OpenOptions::new().write(true).create_new(true).mode(0o755).open(POLICY) {
            Ok(mut file) => {
                let made = Self { made: true };
                file.write_all(b"#!/bin/sh\nexit 101\n").with_context(|| format!("cannot write {POLICY}"))?;
                Ok(made)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Self { made: false }),
            Err(error) => Err(error).with_context(|| format!("cannot make {POLICY}")),
        }
    }
}

impl Drop for NoDaemons {
    fn drop(&mut self) {
        if self.made
            && let Err(error) = fs::remove_file(POLICY)
        {
            eprintln!("cannot remove {POLICY}, which keeps packages from starting daemons: {error}");
        }
    }
}

/// Runs apt-get. Its output is shown only after a failure.
fn apt(args: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .args(["-o", "DPkg::Lock::Timeout=120", "--quiet"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .context("cannot run apt-get")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "apt-get {} failed: {}",
        args[0],
        said.lines().last().unwrap_or("it says nothing")
    );
    Ok(())
}

/// Reserves hugepages if the machine has none and memory allows it. Returns a description of the result.
fn hugepages(root: bool) -> Result<String> {
    let setting = Path::new("/proc/sys/vm/nr_hugepages");
    let meminfo = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let total = field(&meminfo, "HugePages_Total").unwrap_or(0);
    if total > 0 {
        let free = field(&meminfo, "HugePages_Free").unwrap_or(0);
        return Ok(format!("{total} of {} KiB, {free} free", field(&meminfo, "Hugepagesize").unwrap_or(0)));
    }
    let wanted = affordable(&meminfo);
    if wanted == 0 {
        return Ok("none, and too little memory is available to reserve some: ordinary pages".to_owned());
    }
    if !root {
        return Ok(format!("none: as root, sysctl -w vm.nr_hugepages={wanted}; until then ordinary pages"));
    }
    if let Err(error) = fs::write(setting, wanted.to_string()) {
        return Ok(format!("none, and the kernel gives none ({error}): ordinary pages"));
    }
    let got = fs::read_to_string(setting).context("cannot read vm.nr_hugepages")?;
    Ok(format!("reserved {} of the {wanted} asked for", got.trim()))
}

/// Returns the number of 2 MiB pages to reserve: up to a third of the available memory.
fn affordable(meminfo: &str) -> u64 {
    let available_kib = field(meminfo, "MemAvailable").unwrap_or(0);
    if field(meminfo, "Hugepagesize") != Some(2048) {
        return 0;
    }
    (available_kib / 3 / 2048).min(HUGEPAGES)
}

/// Returns a number from /proc/meminfo.
fn field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hugepage_reservation_leaves_free_memory() {
        let meminfo =
            |kib| format!("MemTotal: 9 kB\nMemAvailable:   {kib} kB\nHugepagesize:       2048 kB\n");
        assert_eq!(affordable(&meminfo(20 << 20)), 1024);
        assert_eq!(affordable(&meminfo(3 << 20)), 512);
        assert_eq!(affordable(&meminfo(1000)), 0);
        assert_eq!(affordable("MemAvailable: 99999999 kB\nHugepagesize: 1048576 kB\n"), 0);
    }

    #[test]
    fn programs_are_found() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program").is_none());
    }
}
