//! nginx on either stack, on one core.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use offcore_stats::SplitMix;
use rustix::process::Signal;

use super::SIZES;
use crate::machine::find_program;
use crate::peer::netns::Netns;
use crate::peer::process::{Process, TIMEOUT};
use crate::peer::tempdir::TempDir;

const PORT: u16 = 8080;

/// What both servers have: files, and a core.
#[derive(Debug)]
pub(super) struct Site<'a> {
    dir: &'a TempDir,
    lcore: usize,
    far: &'a Netns,
    content: Vec<u8>,
}

impl<'a> Site<'a> {
    pub(super) fn new(dir: &'a TempDir, lcore: usize, far: &'a Netns) -> Result<Self> {
        let mut random = SplitMix::new(17);
        let largest = SIZES.into_iter().max().unwrap_or_default();
        let content: Vec<u8> = (0..2 * largest).map(|_| random.next() as u8).collect();
        fs::create_dir(dir.file("files")).context("a directory of files")?;
        for size in SIZES {
            for (name, content) in [("wrk", &content[..size]), ("compared", &content[content.len() - size..])]
            {
                fs::write(dir.file(&format!("files/{name}-{size}")), content).context("a file")?;
            }
        }
        Ok(Self { dir, lcore, far, content })
    }

    /// What is in the file of `size` bytes that is compared: other bytes than wrk is sent.
    pub(super) fn content(&self, size: usize) -> &[u8] {
        &self.content[self.content.len() - size..]
    }

    /// A command in a namespace, on the servers' core.
    fn command(&self, netns: &Netns, program: &Path) -> Command {
        let mut command = netns.command("taskset");
        command.args(["-c", &self.lcore.to_string()]).arg(program);
        command
    }

    /// A configuration of nginx. The root's worker reads what only root may.
    fn configure(&self, name: &str) -> Result<String> {
        let dir = self.dir.path().display();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("  {kind}_temp_path {dir}/{name}-{kind};\n"))
            .concat();
        let text = format!(
            "daemon off;\nuser root;\nworker_processes 1;\nworker_rlimit_nofile 8192;\n\
             pid {dir}/{name}.pid;\nerror_log {dir}/{name}.log;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n{temporary}  access_log off;\n  sendfile on;\n  keepalive_requests 1000000000;\n\
             \x20 keepalive_timeout 600;\n  open_file_cache max=100 inactive=1h;\n  open_file_cache_valid 1h;\n\
             \x20 server {{\n    listen {PORT} backlog=4096;\n    root {dir}/files;\n\
             \x20   location /read/ {{ alias {dir}/files/; sendfile off; }}\n\
             \x20   location /nopush/ {{ alias {dir}/files/; tcp_nopush on; }}\n  }}\n}}\n"
        );
        let path = self.dir.file(&format!("{name}.conf"));
        fs::write(&path, text).context("nginx's configuration")?;
        Ok(path.display().to_string())
    }
}

/// What the peer is: the kernel, its congestion control, and the same nginx as ours.
pub(super) fn version() -> Result<String> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("the kernel's version")?;
    let nginx = find_program("nginx").context("there is no nginx")?;
    let said = Command::new(nginx).arg("-v").output().context("nginx -v")?;
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let nginx = said.trim().trim_start_matches("nginx version: ");
    Ok(format!("Linux {}, cubic, {nginx}", kernel.trim()))
}

/// A running server.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) address: SocketAddr,
    pub(super) lcore: usize,
    nginx: Process,
    stack: Option<Process>,
}

impl Server {
    /// nginx on our stack, on the interface `ours0`.
    pub(super) fn ours(site: &Site<'_>, netns: &Netns, binary: &Path) -> Result<Self> {
        let socket = site.dir.file("stack").display().to_string();
        let mut stack = site.command(netns, binary);
        stack.args(["tcp", "--lcores", &site.lcore.to_string(), "--stats-interval", "0", "--idle", "sleep"]);
        stack.args(["--port", "af_packet:ours0,addr=10.77.0.2/24", "--serve", &socket]);
        let mut stack = Process::spawn("offcore tcp", stack)?;
        let since = Instant::now();
        while !Path::new(&socket).exists() {
            let ended = stack.exit_status(Duration::ZERO).is_some() || since.elapsed() > TIMEOUT;
            ensure!(!ended, "the stack does not serve\n{}", stack.tail());
            thread::sleep(Duration::from_millis(10));
        }
        let mut nginx = site.command(netns, binary);
        nginx.args(["exec", "--stack", &socket, "--"]);
        Self::start(site, (nginx, "ours"), "10.77.0.2", Some(stack))
    }

    /// nginx on the kernel's stack.
    pub(super) fn kernels(site: &Site<'_>, netns: &Netns) -> Result<Self> {
        Self::start(site, (site.command(netns, Path::new("env")), "theirs"), "10.78.0.2", None)
    }

    fn start(
        site: &Site<'_>,
        (mut command, name): (Command, &str),
        address: &str,
        stack: Option<Process>,
    ) -> Result<Self> {
        let nginx = find_program("nginx").context("there is no nginx")?;
        command.arg(nginx).args(["-c", &site.configure(name)?]);
        let nginx = Process::spawn(&format!("nginx, {name}"), command)?;
        let address = SocketAddr::new(address.parse()?, PORT);
        let mut server = Self { address, lcore: site.lcore, nginx, stack };
        site.far.within(|| server.wait())?;
        Ok(server)
    }

    /// Waits until it takes connections.
    fn wait(&mut self) -> Result<()> {
        let since = Instant::now();
        while TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_err() {
            let ended = self.nginx.exit_status(Duration::ZERO).is_some() || since.elapsed() > TIMEOUT;
            ensure!(!ended, "{} takes no connections\n{}", self.address, self.nginx.tail());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Seconds that its processes have used so far.
    pub(super) fn used(&self) -> Result<f64> {
        let master = self.nginx.id();
        let children = fs::read_to_string(format!("/proc/{master}/task/{master}/children"))
            .context("the kernel does not tell a process's children")?;
        let workers = children.split_whitespace().map(str::to_owned);
        let stack = self.stack.iter().map(|stack| stack.id().to_string());
        let ticks: Result<u64> = workers.chain(stack).map(|process| ticks(&process)).sum();
        Ok(seconds_of(ticks?))
    }

    /// What it has printed, for errors.
    pub(super) fn tail(&self) -> String {
        self.stack.iter().chain([&self.nginx]).map(Process::tail).collect()
    }
}

impl Drop for Server {
    /// Ends nginx as it wants to be ended, with its workers.
    fn drop(&mut self) {
        let _ = self.nginx.signal(Signal::TERM);
        let _ = self.nginx.exit_status(TIMEOUT);
    }
}

/// Seconds of ticks of the kernel's clock.
pub(super) fn seconds_of(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Ticks of the kernel's clock that a process, or this thread (`thread-self`), has used, its own and the kernel's for it (proc_pid_stat(5)).
pub(super) fn ticks(process: &str) -> Result<u64> {
    let path = format!("/proc/{process}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("{path}: a process has ended"))?;
    // The name is in brackets, and may have any characters.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let used: Vec<u64> = fields.skip(11).take(2).map_while(|field| field.parse().ok()).collect();
    ensure!(used.len() == 2, "{path}: {text:?}");
    Ok(used.iter().sum())
}
