//! dpdk-testpmd, driven over its interactive prompt.
//!
//! Tested with DPDK 22.11 (Debian 12). Findings:
//! - On a pipe testpmd buffers its output, but not its prompt, so answers appear after the prompt that ends them. It is
//!   therefore run under `stdbuf -o0`.
//! - With hugepages, `--in-memory --single-file-segments` needs no mounted hugetlbfs and gives a vhost back end one
//!   memory region. `--in-memory` cannot be combined with `--no-huge`, but `--no-huge` alone also keeps its memory in
//!   one memfd, which vhost can share.
//! - A virtio-user front end in server mode prints no prompt before a back end connects: [`Testpmd::spawn`] both, then
//!   [`Testpmd::wait_ready`].
//! - A virtio-user front end with several queues needs `cq=1`.
//! - It ends by itself when its standard input closes.

mod stats;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

pub use stats::{CoreCycles, ForwardStats, PortForwardStats, PortStats, StreamStats};

use super::process::{Process, TIMEOUT};
use super::tempdir::{TempDir, unique_name};
use crate::machine::free_hugepage_mib;

const PROMPT: &str = "testpmd> ";

/// Configuration of a testpmd. [`TestpmdConfig::default`] has no port. The functions [`TestpmdConfig::virtio_user`] and
/// [`TestpmdConfig::net_vhost`] create a configuration with the given port.
#[derive(Debug, Clone)]
pub struct TestpmdConfig {
    /// The core of its forwarding lcore and of its main lcore, which mostly sleeps.
    pub core: usize,
    /// Virtual devices as for `--vdev`. Each becomes a port, in this order.
    pub vdevs: Vec<String>,
    pub burst: u16,
    /// Number of RX and TX queues of every port (`--rxq`, `--txq`).
    pub queues: u16,
    /// MiB of memory (`-m`).
    pub memory_mb: u32,
    pub memory: Memory,
    /// Number of packet buffers (`--total-num-mbufs`). testpmd's default would need hundreds of MiB.
    pub mbufs: u32,
    /// Size of a packet buffer's data room in bytes, including 128 bytes of headroom (`--mbuf-size`); `None` selects
    /// testpmd's 2176.
    pub mbuf_size: Option<u16>,
    /// Output port for the packets of a port (`--port-topology`): `loop` (the same), `paired` or `chained`.
    pub topology: &'static str,
    /// Whether to account for core cycles from the start (`--record-core-cycles`).
    pub record_core_cycles: bool,
    /// Additional arguments for the environment layer, before `--`.
    pub eal_args: Vec<String>,
    /// Additional arguments for testpmd itself, after `--`.
    pub args: Vec<String>,
    /// Network namespace in which it runs. TAP devices and packet sockets belong to it.
    pub netns: Option<String>,
}

/// Page type of a testpmd's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// 2 MiB hugepages if twice the memory is free in them at the start, otherwise ordinary pages.
    Auto,
    /// 2 MiB hugepages. Without them testpmd does not start.
    Hugepages,
    /// Ordinary pages.
    Ordinary,
}

/// A virtio-user front end (`net_virtio_user`), which acts as a guest.
#[derive(Debug, Clone)]
pub struct VirtioUser {
    pub socket: PathBuf,
    pub queues: u16,
    /// Descriptors per virtqueue, a power of two.
    pub queue_size: u16,
    /// Whether to offer mergeable receive buffers.
    pub mrg_rxbuf: bool,
    /// Whether to offer packed virtqueues.
    pub packed_vq: bool,
    /// Whether to offer in-order use of buffers, which selects special receive and transmit functions.
    pub in_order: bool,
    /// Whether to request the vectorised receive and transmit functions. With split rings only reception has such a
    /// function, and it needs `mrg_rxbuf` and `in_order` off. With packed rings both directions have one. Both need
    /// `in_order` on and AVX-512, and reception needs `mrg_rxbuf` off. Otherwise testpmd uses other functions, and its
    /// log says so ([`LOG_VIRTIO_PATHS`]).
    pub vectorized: bool,
    /// Whether this side creates the socket and waits for the back end to connect.
    pub server: bool,
    /// The port's MAC address; `None` selects a random address.
    pub mac: Option<String>,
    /// Additional device arguments, such as `speed=10000`; may be empty.
    pub extra: String,
}

/// An argument for [`TestpmdConfig::eal_args`]. The log then shows the receive and transmit functions of a virtio-user
/// front end each time it is configured (`virtio: using packed ring standard Rx path on port 0`).
pub const LOG_VIRTIO_PATHS: &str = "--log-level=pmd.net.virtio.init:info";

/// A vhost back end (`net_vhost`), which acts as a switch.
#[derive(Debug, Clone)]
pub struct NetVhost {
    pub socket: PathBuf,
    pub queues: u16,
    /// Whether this side connects to the front end's socket, and reconnects after a loss, instead of creating the
    /// socket.
    pub client: bool,
    /// Additional device arguments; may be empty.
    pub extra: String,
}

/// A running testpmd. Dropping it makes it quit, and kills it if it does not end within 2 s.
#[derive(Debug)]
pub struct Testpmd {
    process: Process,
    ready: bool,
    /// Its runtime directory, which testpmd does not remove.
    _runtime: TempDir,
}

impl Default for TestpmdConfig {
    fn default() -> Self {
        Self {
            core: 0,
            vdevs: Vec::new(),
            burst: 32,
            queues: 1,
            memory_mb: 256,
            memory: Memory::Auto,
            mbufs: 16384,
            mbuf_size: None,
            topology: "loop",
            record_core_cycles: false,
            eal_args: Vec::new(),
            args: Vec::new(),
            netns: None,
        }
    }
}

impl TestpmdConfig {
    /// Returns the configuration of a testpmd on `core` with this front end as port 0.
    pub fn virtio_user(core: usize, port: &VirtioUser) -> Self {
        // DPDK uses 512-bit vectors only on request.
        let eal_args =
            if port.vectorized { vec!["--force-max-simd-bitwidth=512".into()] } else { Vec::new() };
        Self { core, vdevs: vec![port.vdev(0)], queues: port.queues, eal_args, ..Self::default() }
    }

    /// Returns the configuration of a testpmd on `core` with this back end as port 0.
    pub fn net_vhost(core: usize, port: &NetVhost) -> Self {
        Self { core, vdevs: vec![port.vdev(0)], queues: port.queues, ..Self::default() }
    }

    /// Returns the command line with the given runtime directory.
    fn command(&self, runtime: &TempDir) -> Command {
        let mut command = match &self.netns {
            None => Command::new("stdbuf"),
            Some(netns) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", netns, "stdbuf"]);
                command
            }
        };
        let hugepages = match self.memory {
            // Twice the memory, because its peer is often started at the same time and sees the same free pages.
            Memory::Auto => free_hugepage_mib() / 2 >= self.memory_mb,
            Memory::Hugepages => true,
            Memory::Ordinary => false,
        };
        // DPDK creates its runtime directory in this directory, which the service manager usually sets.
        command.env("RUNTIME_DIRECTORY", runtime.path());
        command.args(["-o0", "dpdk-testpmd", "--no-pci", "--file-prefix", &unique_name()]);
        command.args(["-m", &self.memory_mb.to_string()]);
        command.args(["--lcores", &format!("0@{core},1@{core}", core = self.core)]);
        command.args(if hugepages {
            ["--in-memory", "--single-file-segments"]
        } else {
            ["--no-huge", "--no-shconf"]
        });
        for vdev in &self.vdevs {
            command.args(["--vdev", vdev]);
        }
        command.args(&self.eal_args).args(["--", "-i", "--no-mlockall"]);
        command.arg(format!("--port-topology={}", self.topology));
        command.arg(format!("--burst={}", self.burst));
        command.arg(format!("--rxq={}", self.queues));
        command.arg(format!("--txq={}", self.queues));
        command.arg(format!("--total-num-mbufs={}", self.mbufs));
        if let Some(size) = self.mbuf_size {
            command.arg(format!("--mbuf-size={size}"));
        }
        if self.record_core_cycles {
            command.arg("--record-core-cycles");
        }
        command.args(&self.args);
        command
    }
}

impl VirtioUser {
    /// Creates a front end that connects to `socket`. It has one split queue pair of 256 descriptors and offers
    /// mergeable buffers and in-order use, like DPDK's defaults.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            mrg_rxbuf: true,
            packed_vq: false,
            in_order: true,
            vectorized: false,
            server: false,
            mac: None,
            extra: String::new(),
        }
    }

    /// Returns the device string of the device with index `index`.
    pub fn vdev(&self, index: u16) -> String {
        let mut vdev = format!(
            "net_virtio_user{index},path={},queues={},queue_size={},packed_vq={},mrg_rxbuf={},in_order={}",
            self.socket.display(),
            self.queues,
            self.queue_size,
            u8::from(self.packed_vq),
            u8::from(self.mrg_rxbuf),
            u8::from(self.in_order)
        );
        if self.vectorized {
            vdev += ",vectorized=1";
        }
        if self.queues > 1 {
            vdev += ",cq=1";
        }
        if self.server {
            vdev += ",server=1";
        }
        if let Some(mac) = &self.mac {
            vdev += &format!(",mac={mac}");
        }
        with_extra(vdev, &self.extra)
    }
}

impl NetVhost {
    /// Creates a back end with one queue pair that creates `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), queues: 1, client: false, extra: String::new() }
    }

    /// Returns the device string of the device with index `index`.
    pub fn vdev(&self, index: u16) -> String {
        let mut vdev = format!("net_vhost{index},iface={},queues={}", self.socket.display(), self.queues);
        if self.client {
            vdev += ",client=1";
        }
        with_extra(vdev, &self.extra)
    }
}

fn with_extra(vdev: String, extra: &str) -> String {
    if extra.is_empty() { vdev } else { format!("{vdev},{extra}") }
}

impl Testpmd {
    /// Starts a testpmd and waits for its prompt.
    ///
    /// # Errors
    /// If it ends instead, or prints nothing for 30 s.
    pub fn start(config: &TestpmdConfig) -> Result<Self> {
        let mut testpmd = Self::spawn(config)?;
        testpmd.wait_ready()?;
        Ok(testpmd)
    }

    /// Starts a testpmd that first has to wait for its peer: see [`Testpmd::wait_ready`].
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(config: &TestpmdConfig) -> Result<Self> {
        let runtime = TempDir::new()?;
        let process = Process::spawn("testpmd", config.command(&runtime))?;
        Ok(Self { process, ready: false, _runtime: runtime })
    }

    /// Waits for the first prompt. Every command includes this wait.
    ///
    /// # Errors
    /// If testpmd ends instead, or prints nothing for 30 s.
    pub fn wait_ready(&mut self) -> Result<()> {
        if !self.ready {
            self.process.wait_for(0, TIMEOUT, "its first prompt", |text| {
                without_events(text).contains(PROMPT).then_some(())
            })?;
            self.ready = true;
        }
        Ok(())
    }

    /// Runs a command, which must be one line, and returns the standard output of testpmd until its next prompt.
    /// Messages of its libraries go to standard error and are not part of the answer. Testpmd's messages about ports
    /// (`Port 0: link state change event`) are removed.
    ///
    /// # Errors
    /// If testpmd does not know the command or its arguments, ends, or prints nothing for 30 s.
    pub fn command(&mut self, command: &str) -> Result<String> {
        ensure!(!command.contains(['\n', '\t']), "testpmd commands are one line without tabs: {command:?}");
        self.wait_ready()?;
        let mark = self.process.printed();
        self.process.write_line(command)?;
        let echo = format!("{command}\r\n");
        let answer =
            self.process.wait_for(mark, TIMEOUT, &format!("the end of command {command:?}"), |text| {
                let text = without_events(text);
                let (_, answer) = text.split_once(&echo)?;
                answer.split_once(PROMPT).map(|(answer, _)| answer.to_owned())
            })?;
        for refusal in ["Command not found", "Bad arguments", "Ambiguous command"] {
            if answer.trim_start().starts_with(refusal) {
                bail!("testpmd refuses {command:?}: {}", answer.trim());
            }
        }
        Ok(answer)
    }

    /// Runs a command whose answer contains `expected` on success.
    ///
    /// # Errors
    /// As [`Testpmd::command`], and if `expected` is not in the answer.
    pub fn command_expecting(&mut self, command: &str, expected: &str) -> Result<String> {
        let answer = self.command(command)?;
        ensure!(
            answer.contains(expected),
            "testpmd answered {command:?} without {expected:?}:\n{answer}\n{}",
            self.process.tail()
        );
        Ok(answer)
    }

    /// Sets the forwarding mode: `io`, `mac`, `macswap`, `rxonly`, `txonly`, `flowgen`, `5tswap`, ….
    ///
    /// # Errors
    /// As [`Testpmd::command`], for instance for an unknown mode.
    pub fn set_forward(&mut self, mode: &str) -> Result<()> {
        self.command_expecting(&format!("set fwd {mode}"), &format!("Set {mode} packet forwarding mode"))
            .map(drop)
    }

    /// Sets the length, without FCS, of the frames that `txonly` and `start tx_first` send.
    ///
    /// # Errors
    /// As [`Testpmd::command`].
    pub fn set_tx_length(&mut self, bytes: u16) -> Result<()> {
        self.command(&format!("set txpkts {bytes}"))?;
        self.command_expecting("show config txpkts", &bytes.to_string()).map(drop)
    }

    /// Sets the destination address that forwarding mode `mac` writes into packets sent from `port`.
    ///
    /// # Errors
    /// As [`Testpmd::command`].
    pub fn set_peer_address(&mut self, port: u16, mac: &str) -> Result<()> {
        self.command(&format!("set eth-peer {port} {mac}")).map(drop)
    }

    /// Starts forwarding.
    ///
    /// # Errors
    /// As [`Testpmd::command`], and if forwarding does not start.
    pub fn start_forwarding(&mut self) -> Result<()> {
        self.command_expecting("start", "packet forwarding - ports=").map(drop)
    }

    /// Sends `bursts` bursts of packets from every port, then starts forwarding.
    ///
    /// # Errors
    /// As [`Testpmd::start_forwarding`].
    pub fn start_forwarding_tx_first(&mut self, bursts: u32) -> Result<()> {
        self.command_expecting(&format!("start tx_first {bursts}"), "packet forwarding - ports=").map(drop)
    }

    /// Stops forwarding and returns the statistics since its start.
    ///
    /// # Errors
    /// As [`Testpmd::command`], and if forwarding was not running.
    pub fn stop_forwarding(&mut self) -> Result<ForwardStats> {
        let answer = self.command("stop")?;
        ForwardStats::parse(&answer)
            .with_context(|| format!("testpmd's answer to \"stop\":\n{answer}\n{}", self.process.tail()))
    }

    /// Enables or disables the recording of the cycles that forwarding takes ([`ForwardStats::cycles`]). Takes effect
    /// at the next start of forwarding.
    ///
    /// # Errors
    /// As [`Testpmd::command`].
    pub fn record_core_cycles(&mut self, on: bool) -> Result<()> {
        self.command(&format!("set record-core-cycles {}", if on { "on" } else { "off" })).map(drop)
    }

    /// Returns the statistics of all ports, in order of port numbers.
    ///
    /// # Errors
    /// As [`Testpmd::command`].
    pub fn all_port_stats(&mut self) -> Result<Vec<PortStats>> {
        let answer = self.command("show port stats all")?;
        PortStats::parse_all(&answer).with_context(|| format!("in testpmd's answer:\n{answer}"))
    }

    /// Returns the statistics of a port.
    ///
    /// # Errors
    /// As [`Testpmd::command`], and if the port does not exist.
    pub fn port_stats(&mut self, port: u16) -> Result<PortStats> {
        let stats = self.all_port_stats()?;
        let count = stats.len();
        let of_port = stats.into_iter().find(|stats| stats.port == port);
        of_port.with_context(|| format!("testpmd has {count} ports, and none is port {port}"))
    }

    /// Resets the statistics of all ports.
    ///
    /// # Errors
    /// As [`Testpmd::command`].
    pub fn clear_port_stats(&mut self) -> Result<()> {
        self.command("clear port stats all").map(drop)
    }

    /// Reads the statistics of a port ten times per second until `done` accepts them.
    ///
    /// # Errors
    /// If the port has received and sent no packet for 30 s. The error contains the last statistics.
    pub fn wait_for_port_stats(
        &mut self,
        port: u16,
        what: &str,
        done: impl Fn(&PortStats) -> bool,
    ) -> Result<PortStats> {
        let mut last = None;
        let mut moved = Instant::now();
        loop {
            let stats = self.port_stats(port)?;
            if done(&stats) {
                return Ok(stats);
            }
            let now = (stats.rx_packets, stats.tx_packets);
            if last != Some(now) {
                last = Some(now);
                moved = Instant::now();
            } else if moved.elapsed() >= TIMEOUT {
                bail!(
                    "testpmd: waited for {what}; no packet for {:.1} s: {stats:?}\n{}",
                    moved.elapsed().as_secs_f64(),
                    self.process.tail()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until a port's link is up. For a vhost port this means that the other side is connected and ready.
    ///
    /// # Errors
    /// If the link is not up within 30 s.
    pub fn wait_link_up(&mut self, port: u16) -> Result<()> {
        let start = Instant::now();
        loop {
            let answer = self.command(&format!("show port info {port}"))?;
            if answer.contains("Link status: up") {
                return Ok(());
            }
            ensure!(
                start.elapsed() < TIMEOUT,
                "testpmd: the link of port {port} is not up after {:.1} s\n{}",
                start.elapsed().as_secs_f64(),
                self.process.tail()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Returns the log of its libraries, such as a back end's log of received vhost-user messages.
    pub fn log(&self) -> String {
        self.process.stderr()
    }

    /// Returns the end of both output streams, for the message of an assertion.
    pub fn tail(&self) -> String {
        self.process.tail()
    }

    /// Kills it immediately, to simulate the crash of a peer.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Makes it stop forwarding, close its ports and end.
    ///
    /// # Errors
    /// If it does not end, or ends with a status other than 0.
    pub fn quit(mut self) -> Result<()> {
        self.process.write_line("quit")?;
        let status = self.process.wait_for_exit(TIMEOUT)?;
        ensure!(status.success(), "testpmd quit with {status}\n{}", self.process.tail());
        Ok(())
    }
}

/// Returns `text` without testpmd's messages about ports, such as `Port 0: link state change event` between two
/// newlines. Another thread prints them, possibly within the prompt or the echo of a command, which are printed byte by
/// byte.
fn without_events(text: &str) -> String {
    const HEAD: &str = "\nPort ";
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(HEAD) {
        let (before, message) = rest.split_at(at);
        kept += before;
        let line = message[1..].split_once('\n').filter(|(line, _)| line.ends_with(" event"));
        match line {
            Some((_, after)) => rest = after,
            None => {
                kept += HEAD;
                rest = &message[HEAD.len()..];
            }
        }
    }
    kept + rest
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // It is asked to quit first, because a back end then notifies its front end and removes its socket.
        if self.ready && self.process.write_line("quit").is_ok() {
            self.process.exit_status(Duration::from_secs(2));
        }
        self.process.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_messages_are_taken_out() {
        let printed = "sh\nPort 0: queue state event\now port info 0\r\n\nPort 0: x\nPort 1 y\n\
                       tes\nPort 12: link state change event\ntpmd> \nPort 0: half";
        let expected = "show port info 0\r\n\nPort 0: x\nPort 1 y\ntestpmd> \nPort 0: half";
        assert_eq!(without_events(printed), expected);
    }

    #[test]
    fn device_strings() {
        let front_end = VirtioUser {
            queues: 2,
            queue_size: 1024,
            mrg_rxbuf: false,
            packed_vq: true,
            server: true,
            vectorized: true,
            mac: Some("02:00:00:00:00:01".into()),
            extra: "speed=10000".into(),
            ..VirtioUser::new("/x/s")
        };
        assert_eq!(
            front_end.vdev(3),
            "net_virtio_user3,path=/x/s,queues=2,queue_size=1024,packed_vq=1,mrg_rxbuf=0,in_order=1,vectorized=1,\
             cq=1,server=1,mac=02:00:00:00:00:01,speed=10000"
        );
        let eal_args = TestpmdConfig::virtio_user(0, &front_end).eal_args;
        assert_eq!(eal_args, ["--force-max-simd-bitwidth=512"]);
        assert_eq!(
            VirtioUser { in_order: false, ..VirtioUser::new("/x/s") }.vdev(0),
            "net_virtio_user0,path=/x/s,queues=1,queue_size=256,packed_vq=0,mrg_rxbuf=1,in_order=0"
        );
        let back_end = NetVhost { client: true, ..NetVhost::new("/x/s") };
        assert_eq!(back_end.vdev(1), "net_vhost1,iface=/x/s,queues=1,client=1");
    }
}
