//! Both sides: our stack at a TAP, and a relay between a TAP and the kernel's stack; and the programs on both sides.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::{ADDRESSES, BYTES};
use crate::machine::find_program;
use crate::peer::netns::{Netns, checked};
use crate::peer::process::{Process, TIMEOUT};
use crate::tcp::http::server::{self, Server, Site};
use crate::tcp::kernel::KernelOptions;
use crate::tcp::kernel::congestion_control;

pub(super) const NGINX: u16 = server::PORT;
pub(super) const PHP: u16 = 8081;
const POSTGRES: u16 = 5432;
/// Debian's directory of PostgreSQL versions.
const VERSIONS: &str = "/usr/lib/postgresql";
/// PostgreSQL's configuration, which does not wait for the disk.
const CONFIGURATION: &str =
    "listen_addresses = '*'\nfsync = off\nsynchronous_commit = off\nautovacuum = off\n";

/// The two sides.
#[derive(Debug)]
pub(super) struct Hosts<'a> {
    client: &'a Netns,
    kernel: &'a Netns,
    stack: Process,
    relay: Process,
    socket: PathBuf,
}

impl<'a> Hosts<'a> {
    /// Opens both sides in the client's namespace and the kernel's.
    pub(super) fn open(
        site: &Site<'_>,
        options: &KernelOptions,
        [client, kernel]: [&'a Netns; 2],
    ) -> Result<Self> {
        let lcore = options.lcore.to_string();
        let socket = site.dir.file("stack");
        let command = |arguments: &[&str]| {
            let mut command = site.command(client, &options.binary);
            command.args(arguments).args(["--lcores", &lcore, "--idle", "sleep", "--stats-interval", "0"]);
            command
        };
        let mut stack = command(&["tcp", "--port", &format!("tap:ours,addr={}/24", ADDRESSES[0])]);
        stack.arg("--serve").arg(&socket).args(["--allow-uid", &user()?]);
        let relay = command(&["switch", "--forward", "io", "--port", "tap:near", "--port", "tap:theirs"]);
        let stack = Process::spawn("offcore tcp", stack)?;
        let relay = Process::spawn("offcore switch", relay)?;
        let mut hosts = Self { client, kernel, stack, relay, socket };
        for interface in ["ours", "near", "theirs"] {
            hosts.wait(interface, |hosts| hosts.client.ip(&["link", "show", interface]).is_ok())?;
        }
        client.ip(&["link", "set", "theirs", "netns", kernel.name()])?;
        client.configure("ours", "10.77.0.1/24")?;
        client.configure("near", "10.78.0.1/24")?;
        kernel.configure("theirs", &format!("{}/24", ADDRESSES[1]))?;
        congestion_control(kernel, "theirs", client, ["near", "ours"], "cubic")?;
        hosts.wait("the stack's socket", |hosts| hosts.socket.exists())?;
        Ok(hosts)
    }

    fn wait(&mut self, what: &str, is_there: impl Fn(&Self) -> bool) -> Result<()> {
        let since = Instant::now();
        while !is_there(self) {
            let ended = [&mut self.stack, &mut self.relay]
                .into_iter()
                .any(|process| process.exit_status(Duration::ZERO).is_some());
            ensure!(!ended && since.elapsed() < TIMEOUT, "{what} is missing\n{}", self.tail());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns the commands that start a program of `user` on each side.
    fn commands(&self, site: &Site<'_>, options: &KernelOptions, user: &[&str]) -> [Command; 2] {
        let mut ours = site.command(self.client, Path::new("env"));
        ours.args(user).arg(&options.binary).args(["exec", "--stack"]).arg(&self.socket).arg("--");
        let mut theirs = site.command(self.kernel, Path::new("env"));
        theirs.args(user);
        [ours, theirs]
    }

    /// Returns the output of stack and relay for error messages.
    pub(super) fn tail(&self) -> String {
        self.stack.tail() + &self.relay.tail()
    }
}

/// The programs of both sides.
#[derive(Debug)]
pub(super) struct Programs {
    _nginx: [Server; 2],
    others: Vec<Process>,
}

impl Programs {
    pub(super) fn start(site: &Site<'_>, hosts: &Hosts<'_>, options: &KernelOptions) -> Result<Self> {
        let [ours, theirs] = hosts.commands(site, options, &[]);
        let nginx = [
            Server::start(site, ours, "ours", ADDRESSES[0], None)?,
            Server::start(site, theirs, "theirs", ADDRESSES[1], None)?,
        ];
        let mut programs = Self { _nginx: nginx, others: Vec::new() };
        let page = site.dir.file("php");
        fs::create_dir(&page).context("PHP's directory")?;
        let text = format!("<?php header('Content-Length: {BYTES}'); echo str_repeat('x', {BYTES});");
        fs::write(page.join("index.php"), text).context("PHP's page")?;
        for mut command in hosts.commands(site, options, &[]) {
            command.args(["php", "-S", &format!("0.0.0.0:{PHP}"), "-t"]).arg(&page);
            programs.others.push(Process::spawn("php", command)?);
        }
        let bin = postgres_directory()?;
        let as_user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"];
        let commands = hosts.commands(site, options, &as_user);
        for (mut command, name) in commands.into_iter().zip(["ours", "theirs"]) {
            let data = database(site, &bin, &as_user, name)?;
            command.arg(bin.join("postgres")).arg("-D").arg(data);
            programs.others.push(Process::spawn("postgres", command)?);
        }
        for address in ADDRESSES {
            for port in [PHP, POSTGRES] {
                programs.wait(site, address, port)?;
            }
        }
        Ok(programs)
    }

    fn wait(&mut self, site: &Site<'_>, address: &str, port: u16) -> Result<()> {
        let since = Instant::now();
        let connects = || site.far.within(|| Ok(std::net::TcpStream::connect((address, port)).is_ok()));
        while !connects()? {
            let ended = self.others.iter_mut().any(|process| process.exit_status(Duration::ZERO).is_some());
            ensure!(
                !ended && since.elapsed() < TIMEOUT,
                "{address}:{port} takes no connections\n{}",
                self.tail()
            );
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Returns the output of PHP and PostgreSQL for error messages.
    pub(super) fn tail(&self) -> String {
        self.others.iter().map(Process::tail).collect()
    }
}

impl Drop for Programs {
    /// Terminates the processes and their children.
    fn drop(&mut self) {
        for process in &mut self.others {
            let _ = process.signal(Signal::INT);
        }
        for process in &mut self.others {
            let _ = process.exit_status(TIMEOUT);
        }
    }
}

/// Creates an empty database. Returns its directory.
fn database(site: &Site<'_>, bin: &Path, as_user: &[&str], name: &str) -> Result<PathBuf> {
    let home = site.dir.file(&format!("postgres-{name}"));
    let data = home.join("data");
    checked(Command::new("install").args(["-d", "-o", "postgres"]).arg(&home))?;
    let mut initdb = Command::new("env");
    initdb.args(as_user).arg(bin.join("initdb")).args(["-A", "trust", "-D"]).arg(&data);
    checked(&mut initdb)?;
    let append = |file: &str, text: &str| -> Result<()> {
        let path = data.join(file);
        let before = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        fs::write(&path, before + text).with_context(|| path.display().to_string())
    };
    append("postgresql.conf", &format!("{CONFIGURATION}unix_socket_directories = '{}'\n", home.display()))?;
    append("pg_hba.conf", "host all all 0.0.0.0/0 trust\n")?;
    Ok(data)
}

/// Returns the directory of PostgreSQL's programs.
pub(super) fn postgres_directory() -> Result<PathBuf> {
    let versions =
        fs::read_dir(VERSIONS).map(|entries| entries.flatten().map(|entry| entry.path().join("bin")));
    let found = versions.ok().and_then(|mut all| all.find(|bin| bin.join("initdb").exists()));
    let other = || find_program("initdb").and_then(|initdb| Some(initdb.parent()?.to_owned()));
    found.or_else(other).context("there is no initdb: apt-get install postgresql")
}

/// Returns the user ID of PostgreSQL's user.
fn user() -> Result<String> {
    let users = fs::read_to_string("/etc/passwd").context("/etc/passwd")?;
    let line = users.lines().find(|line| line.starts_with("postgres:"));
    let user = line.and_then(|line| line.split(':').nth(2));
    user.map(str::to_owned).context("there is no user postgres: apt-get install postgresql")
}
