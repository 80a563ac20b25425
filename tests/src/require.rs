//! Requirements of tests on the machine, and the messages of tests that are skipped without them.

use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use offcore_bench::machine::{find_program, free_hugepage_mib};
use offcore_bench::peer::ovs;

use crate::offcore::Offcore;

/// A requirement of a test that a machine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// Root privileges, for namespaces, TAP interfaces and raw sockets.
    Root,
    /// The TUN/TAP device.
    Tun,
    Testpmd,
    /// Open vSwitch with DPDK, and its requirements.
    Ovs,
    /// QEMU, and the files from which a guest is built ([`crate::guest`]).
    Guest,
    Ip,
    /// A C compiler, `cc`.
    Cc,
    Ping,
    Dnsmasq,
    Ethtool,
    Iperf3,
    Tcpdump,
    Curl,
    /// `wrk`, a load generator for HTTP.
    Wrk,
    /// `ab`, another load generator for HTTP.
    Ab,
    Nginx,
    /// `redis-server`, and its clients.
    Redis,
    /// `sshd`, and its client.
    Ssh,
    Openssl,
    Python,
    /// This number of free MiB in 2 MiB hugepages.
    Hugepages(u32),
    /// At least this number of usable cores.
    Cores(usize),
    /// An `offcore` binary with `--device host`, which requires a C++ compiler at build time.
    HostDevice,
}

/// Checks that all requirements of a test are met. Otherwise the test returns immediately: `let Some(()) =
/// require(&[Need::Testpmd]) else { return };`
///
/// In that case this function has printed `SKIP: test: reason`, bypassing the test harness's capture, with the remedy.
///
/// # Panics
/// If a requirement is missing and the environment has `CI=true`: a skip is a failure in CI.
pub fn require(needs: &[Need]) -> Option<()> {
    let missing: Vec<_> = needs.iter().filter_map(|need| need.missing()).collect();
    if missing.is_empty() {
        return Some(());
    }
    let text = missing.join("; ");
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "SKIP under CI=true: {text}");
    say("SKIP", &text);
    None
}

/// Prints which check replaces an impossible check on this machine, bypassing the test harness's capture.
pub fn note(text: &str) {
    say("NOTE", text);
}

fn say(what: &str, text: &str) {
    let thread = std::thread::current();
    // The print macros would be captured. A failure to print does not affect the test.
    let _ = writeln!(io::stderr(), "{what}: {}: {text}", thread.name().unwrap_or("a test"));
}

impl Need {
    /// Returns why the requirement is missing and the remedy, or `None` if it is met.
    fn missing(self) -> Option<String> {
        match self {
            Self::Root => (!rustix::process::geteuid().is_root()).then(|| "not root: run as root".to_owned()),
            Self::Tun => (!Path::new("/dev/net/tun").exists())
                .then(|| "no /dev/net/tun: load the module tun, or give the container the device".to_owned()),
            Self::Testpmd => program("dpdk-testpmd", "dpdk-dev"),
            Self::Ovs => ovs::missing(),
            Self::Guest => GUEST_PROGRAMS.iter().find_map(|(name, package)| program(name, package)),
            Self::Ip => program("ip", "iproute2"),
            Self::Cc => program("cc", "gcc"),
            Self::Ping => program("ping", "iputils-ping"),
            Self::Dnsmasq => program("dnsmasq", "dnsmasq-base"),
            Self::Ethtool => program("ethtool", "ethtool"),
            Self::Iperf3 => program("iperf3", "iperf3"),
            Self::Tcpdump => program("tcpdump", "tcpdump"),
            Self::Curl => program("curl", "curl"),
            Self::Wrk => program("wrk", "wrk"),
            Self::Ab => program("ab", "apache2-utils"),
            Self::Nginx => program("nginx", "nginx-light"),
            Self::Redis => {
                program("redis-server", "redis-server").or_else(|| program("redis-cli", "redis-tools"))
            }
            Self::Ssh => program("sshd", "openssh-server").or_else(|| program("ssh", "openssh-client")),
            Self::Openssl => program("openssl", "openssl"),
            Self::Python => program("python3", "python3"),
            Self::Hugepages(mib) => {
                let free = free_hugepage_mib();
                (free < mib).then(|| {
                    format!("{free} MiB of free 2 MiB hugepages, {mib} needed: sysctl -w vm.nr_hugepages=N")
                })
            }
            Self::Cores(cores) => {
                let here = std::thread::available_parallelism().map_or(1, usize::from);
                (here < cores).then(|| format!("{here} cores to run on, {cores} needed"))
            }
            Self::HostDevice => (!has_host_device())
                .then(|| "offcore without --device host: apt-get install g++, and build it again".to_owned()),
        }
    }
}

/// Programs that run a guest or are copied into it, and their Debian packages.
const GUEST_PROGRAMS: [(&str, &str); 8] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("iperf3", "iperf3"),
    ("ethtool", "ethtool"),
    ("cpio", "cpio"),
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("taskset", "util-linux"),
];

/// Asks `offcore gpu doctor`. If the binary does not exist, the test reports that itself.
fn has_host_device() -> bool {
    let Ok(doctor) = Offcore::run(&["gpu", "doctor", "--all", "--format", "json"]) else { return true };
    let mut findings = doctor.lines.iter().filter_map(|line| line.json.as_ref());
    findings.any(|finding| finding["check"] == "host-device" && finding["verdict"] == "ok")
}

fn program(name: &str, package: &str) -> Option<String> {
    find_program(name).is_none().then(|| format!("no {name}: apt-get install {package}"))
}

/// Held by the only test on this machine that may use both cores. See [`exclusive`].
#[derive(Debug)]
#[must_use = "the cores are given back when this is dropped"]
pub struct Exclusive {
    _lock: File,
}

/// Calls [`require`]. If all requirements are met, waits until no other test, in this process or another, holds a core,
/// then holds both until the result is dropped. A test that keeps a core busy (a polling port, a testpmd) calls this
/// first.
///
/// A second call while the first result lives waits forever.
///
/// # Panics
/// As [`require`], and if the lock file in the temporary directory cannot be opened or locked.
pub fn exclusive(needs: &[Need]) -> Option<Exclusive> {
    require(needs)?;
    let path = both_cores();
    match lock(&path) {
        Ok(lock) => Some(Exclusive { _lock: lock }),
        Err(e) => panic!("cannot lock {}: {e}", path.display()),
    }
}

/// Held by a test that keeps one core busy. See [`one_core`].
#[derive(Debug)]
#[must_use = "the core is given back when this is dropped"]
pub struct OneCore {
    number: usize,
    _one: File,
    _not_both: File,
}

impl OneCore {
    /// Returns the core's number, 0 or 1. Busy processes are pinned to it.
    pub fn number(&self) -> usize {
        self.number
    }
}

/// Calls [`require`]. If all requirements are met, waits for a core and holds it until the result is dropped. A test
/// calls this first if it keeps one core busy (with a guest), and only has workers on the other core that sleep when
/// idle.
///
/// # Panics
/// As [`require`], and if a lock file in the temporary directory cannot be opened or locked.
pub fn one_core(needs: &[Need]) -> Option<OneCore> {
    require(needs)?;
    let hold = || -> io::Result<OneCore> {
        let not_both = open(&both_cores())?;
        retry_on_eintr(|| not_both.lock_shared())?;
        let cores = [0, 1].map(|core| std::env::temp_dir().join(format!("offcore-tests.core{core}.lock")));
        let cores = [open(&cores[0])?, open(&cores[1])?];
        loop {
            for (number, core) in cores.iter().enumerate() {
                match core.try_lock() {
                    Ok(()) => return Ok(OneCore { number, _one: core.try_clone()?, _not_both: not_both }),
                    Err(TryLockError::WouldBlock) => {}
                    Err(TryLockError::Error(e)) => return Err(e),
                }
            }
            // A process cannot wait for either of two locks, so it polls.
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    match hold() {
        Ok(core) => Some(core),
        Err(e) => panic!("cannot lock a core in {}: {e}", std::env::temp_dir().display()),
    }
}

fn both_cores() -> PathBuf {
    std::env::temp_dir().join("offcore-tests.lock")
}

/// Waits until no other holder, in this process or another, has the file's lock, and holds it until the result is
/// dropped. Creates the file if it does not exist.
pub(crate) fn lock(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    retry_on_eintr(|| file.lock())?;
    Ok(file)
}

fn open(path: &Path) -> io::Result<File> {
    // A file of another user in a sticky directory can be opened, but not with O_CREAT.
    File::open(path).or_else(|_| File::options().append(true).create(true).open(path))
}

fn retry_on_eintr(mut wait: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match wait() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn present_needs_are_found() {
        assert_eq!(program("sh", "dash"), None);
        assert_eq!(Need::Cores(1).missing(), None);
        assert_eq!(Need::Hugepages(0).missing(), None);
        assert_eq!(require(&[]), Some(()));
    }

    #[test]
    fn missing_need_names_its_remedy() {
        let text = program("no-such-program", "some-package").unwrap();
        assert!(text.contains("no-such-program") && text.contains("apt-get install some-package"), "{text}");
        let text = Need::Hugepages(u32::MAX).missing().unwrap();
        assert!(text.contains("vm.nr_hugepages"), "{text}");
        assert!(Need::Cores(usize::MAX).missing().unwrap().contains("needed"));
    }

    /// A separate process runs the skipped test, because the result depends on the environment and bypasses the
    /// capture.
    #[test]
    fn missing_peer_skips_or_fails_in_ci() {
        const CHILD: &str = "OFFCORE_TEST_REQUIRE_CHILD";
        const NAME: &str = "require::tests::missing_peer_skips_or_fails_in_ci";
        if std::env::var_os(CHILD).is_some() {
            assert_eq!(require(&[Need::Cores(usize::MAX)]), None);
            return;
        }
        let run = |ci: Option<&str>| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", NAME]).env(CHILD, "1").env_remove("CI");
            if let Some(ci) = ci {
                child.env("CI", ci);
            }
            child.output().unwrap()
        };
        let skipped = run(None);
        assert!(skipped.status.success());
        let text = String::from_utf8_lossy(&skipped.stderr).into_owned();
        assert!(text.contains(&format!("SKIP: {NAME}: ")), "{text}");
        assert!(!run(Some("true")).status.success());
    }

    #[test]
    fn only_one_holds_the_cores() {
        static HOLDERS: AtomicU32 = AtomicU32::new(0);
        let hold = || {
            let _cores = exclusive(&[]);
            assert_eq!(HOLDERS.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
            std::thread::sleep(Duration::from_millis(20));
            HOLDERS.fetch_sub(1, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(hold);
            }
        });
        // Another process cannot take the lock either: flock(1) gives up with status 1.
        let held = exclusive(&[]);
        let lock = std::env::temp_dir().join("offcore-tests.lock");
        let try_lock = || Command::new("flock").args(["-n"]).arg(&lock).arg("true").status().unwrap();
        assert_eq!(try_lock().code(), Some(1));
        drop(held);
    }

    #[test]
    fn two_hold_a_core_each() {
        static HOLDERS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
        let hold = || {
            let core = one_core(&[]).unwrap();
            assert_eq!(HOLDERS[core.number()].fetch_add(1, Ordering::SeqCst), 0, "two on one core");
            std::thread::sleep(Duration::from_millis(20));
            HOLDERS[core.number()].fetch_sub(1, Ordering::SeqCst);
        };
        let hold_both = || {
            let _cores = exclusive(&[]);
            assert_eq!(
                HOLDERS.each_ref().map(|held| held.load(Ordering::SeqCst)),
                [0, 0],
                "one of both is held"
            );
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(hold);
                scope.spawn(hold_both);
            }
        });
    }
}
