//! nginx on either stack, on one core.

use std::fs::{self, Permissions};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
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
use crate::tcp::cores::{seconds_of, ticks};

pub(in crate::tcp) const PORT: u16 = 8080;
/// Debian's configuration file of nginx.
const CONF: &str = "/etc/nginx/nginx.conf";

/// Resources of both servers: files and a core.
#[derive(Debug)]
pub(in crate::tcp) struct Site<'a> {
    pub(in crate::tcp) dir: &'a TempDir,
    lcore: usize,
    pub(in crate::tcp) far: &'a Netns,
    content: Vec<u8>,
}

impl<'a> Site<'a> {
    pub(in crate::tcp) fn new(dir: &'a TempDir, lcore: usize, far: &'a Netns) -> Result<Self> {
        let mut random = SplitMix::new(17);
        let largest = SIZES.into_iter().max().unwrap_or_default();
        let content: Vec<u8> = (0..2 * largest).map(|_| random.next() as u8).collect();
        // The workers run as another user.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).context("a directory for all")?;
        fs::create_dir(dir.file("files")).context("a directory of files")?;
        for size in SIZES {
            for (name, content) in [("wrk", &content[..size]), ("compared", &content[content.len() - size..])]
            {
                fs::write(dir.file(&format!("files/{name}-{size}")), content).context("a file")?;
            }
        }
        Ok(Self { dir, lcore, far, content })
    }

    /// Returns the content of the compared file of `size` bytes. wrk gets a file with other bytes.
    pub(in crate::tcp) fn content(&self, size: usize) -> &[u8] {
        &self.content[self.content.len() - size..]
    }

    /// Adds a file with [`content`](Self::content) and returns its name.
    pub(in crate::tcp) fn add(&self, size: usize) -> Result<String> {
        let name = format!("flow-{size}");
        fs::write(self.dir.file(&format!("files/{name}")), self.content(size)).context("a file")?;
        Ok(name)
    }

    /// Returns a command in a namespace on the servers' core.
    pub(in crate::tcp) fn command(&self, netns: &Netns, program: &Path) -> Command {
        let mut command = netns.command("taskset");
        command.args(["-c", &self.lcore.to_string()]).arg(program);
        command
    }

    /// Creates nginx's configuration: Debian's file with another PID file, other logs and sites, and another number of
    /// connections.
    fn configure(&self, name: &str) -> Result<String> {
        let dir = self.dir.path().display().to_string();
        let debians = fs::read_to_string(CONF).with_context(|| format!("{CONF}, expected Debian's"))?;
        let sites = format!("{dir}/{name}-sites");
        let text = configuration(&debians, &dir, name, &sites)?;
        fs::write(&sites, site(&dir)).context("nginx's site")?;
        let path = self.dir.file(&format!("{name}.conf"));
        fs::write(&path, text).context("nginx's configuration")?;
        Ok(path.display().to_string())
    }
}

/// Returns Debian's configuration with the paths of this run.
fn configuration(debians: &str, dir: &str, name: &str, sites: &str) -> Result<String> {
    let mut text = debians.to_owned();
    for (found, new) in [
        ("/run/nginx.pid", format!("{dir}/{name}.pid")),
        ("/var/log/nginx/error.log", format!("{dir}/{name}.log")),
        ("/var/log/nginx/access.log", "/dev/null".to_owned()),
        ("/etc/nginx/sites-enabled/*", sites.to_owned()),
        // The number of requests per connection is limited only by the window.
        ("\tworker_connections 768;", "\tworker_connections 8192;".to_owned()),
    ] {
        ensure!(text.contains(found), "{CONF} has no {found:?}, expected Debian's file");
        text = text.replace(found, &new);
    }
    ensure!(text.contains("\n\ttcp_nopush on;"), "{CONF} has tcp_nopush off, expected Debian's file");
    Ok(format!("daemon off;\nworker_rlimit_nofile 16384;\n{text}"))
}

/// Returns the configuration of the site with the files.
fn site(dir: &str) -> String {
    format!(
        "keepalive_requests 1000000000;\nkeepalive_timeout 600;\nopen_file_cache max=100 inactive=1h;\n\
         open_file_cache_valid 1h;\n\
         server {{\n  listen {PORT} backlog=8192;\n  root {dir}/files;\n\
         \x20 location /read/ {{ alias {dir}/files/; sendfile off; }}\n\
         \x20 location /push/ {{ alias {dir}/files/; tcp_nopush off; }}\n}}\n"
    )
}

/// Waits until a stack has created its socket `socket`.
pub(in crate::tcp) fn wait_for_socket(stack: &mut Process, socket: &Path) -> Result<()> {
    let since = Instant::now();
    while !socket.exists() {
        let ended = stack.exit_status(Duration::ZERO).is_some() || since.elapsed() > TIMEOUT;
        ensure!(!ended, "the stack does not serve\n{}", stack.tail());
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Returns a missing file of this machine, if any.
pub(in crate::tcp) fn missing() -> Option<String> {
    (!Path::new(CONF).exists()).then(|| format!("{CONF} is missing"))
}

/// Returns the description of the peer: the kernel's version, its congestion control, and the version of nginx, which
/// is the same on our side.
pub(in crate::tcp) fn version() -> Result<String> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("the kernel's version")?;
    let nginx = find_program("nginx").context("there is no nginx")?;
    let said = Command::new(nginx).arg("-v").output().context("nginx -v")?;
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let nginx = said.trim().trim_start_matches("nginx version: ");
    Ok(format!("Linux {}, cubic, {nginx}", kernel.trim()))
}

/// A running server.
#[derive(Debug)]
pub(in crate::tcp) struct Server {
    pub(in crate::tcp) address: SocketAddr,
    pub(super) lcore: usize,
    nginx: Process,
    stack: Option<Process>,
}

impl Server {
    /// Starts nginx on our stack, on an interface of `netns`.
    pub(in crate::tcp) fn ours(
        site: &Site<'_>,
        netns: &Netns,
        interface: &str,
        binary: &Path,
    ) -> Result<Self> {
        let socket = site.dir.file("stack").display().to_string();
        let mut stack = site.command(netns, binary);
        stack.args(["tcp", "--lcores", &site.lcore.to_string(), "--stats-interval", "0", "--idle", "sleep"]);
        stack.args(["--port", &format!("af_packet:{interface},addr=10.77.0.2/24"), "--serve", &socket]);
        let mut stack = Process::spawn("offcore tcp", stack)?;
        wait_for_socket(&mut stack, Path::new(&socket))?;
        let mut nginx = site.command(netns, binary);
        nginx.args(["exec", "--stack", &socket, "--"]);
        Self::start(site, nginx, "ours", "10.77.0.2", Some(stack))
    }

    /// Starts nginx on the kernel's stack.
    pub(in crate::tcp) fn kernels(site: &Site<'_>, netns: &Netns) -> Result<Self> {
        netns.run("sysctl", &["-qw", "net.core.somaxconn=8192"])?;
        Self::start(site, site.command(netns, Path::new("env")), "theirs", "10.78.0.2", None)
    }

    pub(in crate::tcp) fn start(
        site: &Site<'_>,
        mut command: Command,
        name: &str,
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

    /// Waits until the server accepts connections.
    fn wait(&mut self) -> Result<()> {
        let since = Instant::now();
        while TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_err() {
            let ended = self.nginx.exit_status(Duration::ZERO).is_some() || since.elapsed() > TIMEOUT;
            ensure!(!ended, "{} takes no connections\n{}", self.address, self.nginx.tail());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns the CPU time that its processes have used so far, in seconds.
    pub(in crate::tcp) fn used(&self) -> Result<f64> {
        let master = self.nginx.id();
        let children = fs::read_to_string(format!("/proc/{master}/task/{master}/children"))
            .context("the kernel does not tell a process's children")?;
        let workers = children.split_whitespace().map(str::to_owned);
        let stack = self.stack.iter().map(|stack| stack.id().to_string());
        let ticks: Result<u64> = workers.chain(stack).map(|process| ticks(&process)).sum();
        Ok(seconds_of(ticks?))
    }

    /// Returns its output for error messages.
    pub(in crate::tcp) fn tail(&self) -> String {
        self.stack.iter().chain([&self.nginx]).map(Process::tail).collect()
    }
}

impl Drop for Server {
    /// Terminates nginx gracefully, together with its workers.
    fn drop(&mut self) {
        let _ = self.nginx.signal(Signal::TERM);
        let _ = self.nginx.exit_status(TIMEOUT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debians_configuration_is_used() {
        let debians = "pid /run/nginx.pid;\nerror_log /var/log/nginx/error.log;\nevents {\n\tworker_connections 768;\n}\n\
            http {\n\ttcp_nopush on;\n\taccess_log /var/log/nginx/access.log;\n\tinclude /etc/nginx/sites-enabled/*;\n}\n";
        let text = configuration(debians, "/d", "ours", "/d/ours-sites").unwrap();
        assert!(
            text.contains("\ttcp_nopush on;\n\taccess_log /dev/null;\n\tinclude /d/ours-sites;\n"),
            "{text}"
        );
        assert!(text.contains("pid /d/ours.pid;") && text.contains("error_log /d/ours.log;"), "{text}");
        for (from, to) in [("tcp_nopush on", "tcp_nopush off"), ("768", "1024")] {
            assert!(configuration(&debians.replace(from, to), "/d", "ours", "/s").is_err());
        }
    }
}
