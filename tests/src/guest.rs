//! A QEMU guest: Linux's virtio-net driver as a front end, driven over its serial console.
//!
//! Known to work with QEMU 7.2 (Debian 12) and Debian's 6.1 cloud kernel. Known constraints:
//! - Software emulation (TCG) is used, so a guest needs no KVM. It is slow: it shows whether things work, not their
//!   speed.
//! - `vectors=0` on the device. With MSI-X, QEMU 7.2 crashes when the guest loads virtio_net on a vhost-user device
//!   under TCG.
//! - `la57=off`: with five-level page tables an emulated guest needs 20 % longer to boot.
//! - Guest memory must be shareable (`memory-backend-memfd,share=on`), or a back end cannot map it.
//! - With `reconnect=1`, QEMU as a client of the socket tries to connect every second, at the start and after a loss of
//!   the connection.
//! - With several queues the guest uses as many as it has CPUs.

mod image;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_bench::peer::process::Process;

use image::Image;

/// Maximum time for which an emulated guest may print nothing, while it boots or runs a command.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Maximum length of a command. A guest's console accepts lines of up to 4095 bytes.
const LONGEST_COMMAND: usize = 4000;

/// The configuration of a guest.
#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Memory in MiB.
    pub memory_mb: u32,
    /// Number of virtual CPUs. Each is a thread on the host.
    pub cpus: u16,
    /// The host core to which QEMU is pinned. `None` is any core.
    pub core: Option<usize>,
    /// Network interfaces. In the guest they are `eth0`, `eth1` and so on, in this order.
    pub nics: Vec<Nic>,
    /// Additional parameters for the kernel command line. The default disables IPv6, whose neighbour solicitations
    /// would be packets that no test sent.
    pub kernel_args: String,
    /// Additional arguments for QEMU.
    pub args: Vec<String>,
}

/// A virtio-net interface on a vhost-user socket.
#[derive(Debug, Clone)]
pub struct Nic {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// The MAC address.
    pub mac: String,
    /// The IPv4 address with its prefix length, such as `10.77.0.2/24`. `None` for no address.
    pub address: Option<String>,
    /// Number of queue pairs. See [`GuestConfig::cpus`].
    pub queues: u16,
    /// Whether packed virtqueues are offered.
    pub packed: bool,
    /// Whether checksum and segmentation offloads are offered. Without them, packets on the ring have the format of the
    /// wire.
    pub offloads: bool,
}

/// A running guest. Dropping it kills QEMU.
#[derive(Debug)]
pub struct Guest {
    qemu: Process,
    /// Number of commands since the guest booted.
    commands: u32,
    /// Position in the console's output at which the current boot begins.
    boot: usize,
}

/// The result of a command in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The command's exit status, as the shell reports it.
    pub status: i32,
    /// The command's standard output and standard error, combined.
    pub text: String,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self {
            memory_mb: 256,
            cpus: 1,
            core: None,
            nics: Vec::new(),
            kernel_args: "ipv6.disable=1".to_owned(),
            args: Vec::new(),
        }
    }
}

impl GuestConfig {
    fn command(&self, image: &Image) -> Command {
        let mut command = match self.core {
            Some(core) => {
                let mut command = Command::new("taskset");
                command.args(["-c", &core.to_string(), "qemu-system-x86_64"]);
                command
            }
            None => Command::new("qemu-system-x86_64"),
        };
        let mut kernel_args = "console=ttyS0 quiet panic=-1 mitigations=off ".to_owned() + &self.kernel_args;
        command.args(["-accel", "tcg", "-cpu", "max,la57=off", "-machine", "q35,memory-backend=mem"]);
        command.args(["-m", &self.memory_mb.to_string(), "-smp", &self.cpus.to_string()]);
        command.args(["-object", &format!("memory-backend-memfd,id=mem,size={}M,share=on", self.memory_mb)]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"]);
        command.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        for (index, nic) in self.nics.iter().enumerate() {
            for (option, value) in nic.arguments(index) {
                command.args([option, &value]);
            }
            kernel_args += &match &nic.address {
                Some(address) => format!(" offcore.nic={},{address}", nic.mac),
                None => format!(" offcore.nic={}", nic.mac),
            };
        }
        command.arg("-append").arg(kernel_args).args(&self.args);
        command
    }
}

impl Nic {
    /// Returns an interface with one split queue pair and no offloads, which connects to `socket`.
    pub fn new(socket: impl Into<PathBuf>, mac: &str, address: &str) -> Self {
        Self {
            socket: socket.into(),
            mac: mac.to_owned(),
            address: Some(address.to_owned()),
            queues: 1,
            packed: false,
            offloads: false,
        }
    }

    /// Returns QEMU's arguments for interface number `index`.
    fn arguments(&self, index: usize) -> [(&'static str, String); 3] {
        let chardev = format!("socket,id=c{index},path={},reconnect=1", self.socket.display());
        let netdev = format!("vhost-user,id=n{index},chardev=c{index},queues={}", self.queues);
        let mut device = format!(
            "virtio-net-pci,netdev=n{index},mac={},romfile=,vectors=0,packed={}",
            self.mac,
            if self.packed { "on" } else { "off" }
        );
        if self.queues > 1 {
            device += ",mq=on";
        }
        if !self.offloads {
            for offload in
                "csum guest_csum gso guest_tso4 guest_tso6 guest_ecn guest_ufo host_tso4 host_tso6 host_ecn host_ufo"
                    .split(' ')
            {
                device += &format!(",{offload}=off");
            }
        }
        [("-chardev", chardev), ("-netdev", netdev), ("-device", device)]
    }
}

impl Guest {
    /// Boots a guest and waits until it accepts commands. This takes about 5 s, and longer the first time on a machine,
    /// when the kernel is downloaded.
    ///
    /// # Errors
    /// If the image does not exist and cannot be built, QEMU ends, the guest reports an error, or its console prints
    /// nothing for 180 s.
    pub fn boot(config: &GuestConfig) -> Result<Self> {
        let mut guest = Self::spawn(config)?;
        guest.wait_ready()?;
        Ok(guest)
    }

    /// Starts QEMU without waiting for the guest, for cases in which the back end is started afterwards.
    ///
    /// # Errors
    /// If the image does not exist and cannot be built, or QEMU cannot be started.
    pub fn spawn(config: &GuestConfig) -> Result<Self> {
        let image = Image::ready()?;
        let qemu = Process::spawn("QEMU guest", config.command(&image))?;
        Ok(Self { qemu, commands: 0, boot: 0 })
    }

    /// Waits until the guest has booted, its interfaces have their addresses, and it accepts commands.
    ///
    /// # Errors
    /// As [`Guest::boot`].
    pub fn wait_ready(&mut self) -> Result<()> {
        let outcome = self.qemu.wait_for(self.boot, TIMEOUT, "the guest to boot", |text| {
            lines(text).find_map(|line| match line.strip_prefix("@@offcore ")? {
                "ready" => Some(Ok(())),
                line => line.strip_prefix("not ready: ").map(|why| Err(why.to_owned())),
            })
        })?;
        if let Err(why) = outcome {
            bail!("the guest is not ready: {why}\n{}", self.qemu.tail());
        }
        Ok(())
    }

    /// Runs a command in the guest's shell to its end. Its input is empty.
    ///
    /// Background processes must not keep its output open: `iperf3 -s >/dev/null 2>&1 &`.
    ///
    /// # Errors
    /// If the command is longer than 4000 bytes or one line, the guest's kernel panics, QEMU ends, or the console
    /// prints nothing for 180 s. A status other than 0 is not an error: see [`Guest::check`].
    pub fn run(&mut self, command: &str) -> Result<Output> {
        ensure!(
            !command.contains('\n') && command.len() <= LONGEST_COMMAND,
            "a guest's command is one line of at most {LONGEST_COMMAND} bytes, this has {}",
            command.len()
        );
        self.commands += 1;
        let number = self.commands;
        let mark = self.qemu.printed();
        self.qemu.write_line(&format!("{number} {command}"))?;
        let begin = format!("@@offcore begin {number}\n");
        let end = format!("\n@@offcore end {number} ");
        let outcome = self.qemu.wait_for(mark, TIMEOUT, &format!("the end of {command:?}"), |text| {
            if text.contains("Kernel panic") {
                return Some(None);
            }
            let text = text.replace('\r', "");
            let (_, text) = text.split_once(&begin)?;
            let (text, rest) = text.rsplit_once(&end)?;
            let (status, _) = rest.split_once('\n')?;
            Some(Some((text.to_owned(), status.to_owned())))
        })?;
        let Some((text, status)) = outcome else {
            bail!("the guest's kernel panicked in {command:?}\n{}", self.qemu.tail());
        };
        let status =
            status.parse().with_context(|| format!("the guest gave {status:?} for an exit status"))?;
        Ok(Output { status, text })
    }

    /// Runs a command that must succeed and returns its output.
    ///
    /// # Errors
    /// As [`Guest::run`], and if the status is not 0.
    pub fn check(&mut self, command: &str) -> Result<String> {
        let output = self.run(command)?;
        ensure!(
            output.status == 0,
            "in the guest, {command:?} ended with status {}:\n{}",
            output.status,
            output.text
        );
        Ok(output.text)
    }

    /// Starts an iperf3 server in the guest and waits until it accepts connections on port 5201.
    ///
    /// # Errors
    /// As [`Guest::check`], and if it does not listen within 10 s of the guest's time.
    pub fn start_iperf3_server(&mut self) -> Result<()> {
        let wait = "for i in $(seq 100); do netstat -ltn | grep -q :5201 && exit; sleep 0.1; done; exit 1";
        self.check(&format!("iperf3 -s >/tmp/iperf3.log 2>&1 & {wait}"))
            .map(drop)
            .context("the guest's iperf3 server does not come up")
    }

    /// Resets the guest's machine, without a clean shutdown, and waits until it accepts commands again.
    ///
    /// # Errors
    /// As [`Guest::boot`].
    pub fn reboot(&mut self) -> Result<()> {
        self.boot = self.qemu.printed();
        self.commands += 1;
        self.qemu.write_line(&format!("{} reboot -f", self.commands))?;
        self.wait_ready()?;
        self.commands = 0;
        Ok(())
    }

    /// Returns QEMU's process ID.
    pub fn id(&self) -> u32 {
        self.qemu.id()
    }

    /// Returns the end of the console's output and of QEMU's messages, for assertion messages.
    pub fn tail(&self) -> String {
        self.qemu.tail()
    }
}

/// Returns the complete lines of console output.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'))
        .map(|line| line.trim_end_matches('\r'))
}

#[cfg(test)]
mod tests;
