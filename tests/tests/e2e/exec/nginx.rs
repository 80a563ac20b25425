//! nginx on the stack.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use offcore_bench::peer::process::Process;
use peers::offcore::Signal;
use peers::{Need, TempDir, offcore, one_core};

use super::super::http::curl;
use super::super::tcp::content;
use super::load::{Client, under_load};
use super::{KERNEL, NEEDS, STACK, Stage, children, finish, lives, until};

const PORT: u16 = 8080;
const SIZES: [usize; 6] = [1, 100, 1448, 4096, 65_536, 1_000_000];

fn stage(more: &[Need]) -> Option<Stage> {
    Stage::new(&[&[Need::Nginx, Need::Curl], more].concat())
}

/// The nginx configuration of a test.
pub(super) struct Wanted<'a> {
    pub(super) workers: u32,
    pub(super) listen: &'a str,
    /// Lines of the `server` block.
    pub(super) server: &'a str,
    /// Lines of the main block.
    pub(super) main: &'a str,
}

pub(super) const PLAIN: Wanted<'static> =
    Wanted { workers: 1, listen: "listen 8080; listen [::]:8080;", server: "", main: "daemon off;" };

impl Wanted<'_> {
    /// Writes a configuration file. Returns its path.
    fn write(&self, stage: &Stage, name: &str) -> String {
        if !stage.dir.file("site").exists() {
            SIZES.iter().for_each(|&len| drop(stage.write(&format!("site/{len}"), file(len))));
        }
        let Self { workers, listen, server, main } = self;
        let dir = stage.dir.path().display();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {dir}/{name};\n"))
            .concat();
        let text = format!(
            "{main}
            user root;
            worker_processes {workers};
            pid {dir}/{name}.pid;
            error_log {dir}/{name}.log notice;
            events {{ worker_connections 1024; }}
            http {{
                access_log off;
                {temporary}
                server {{
                    {listen}
                    root {dir}/site;
                    location = /memory {{ return 200 'from memory'; }}
                    location = /pid {{ return 200 $pid; }}
                    {server}
                }}
            }}"
        );
        stage.write(&format!("{name}.conf"), text)
    }

    /// Starts nginx, and waits for it to listen.
    pub(super) fn start(&self, stage: &Stage) -> Server {
        stage.wait_free(STACK[0], PORT);
        let conf = self.write(stage, "nginx");
        Server::listening(stage, stage.start(&[&nginx(), "-c", &conf]), self.workers)
    }

    /// Like `start`, for programs that reach the kernel's address through the stack.
    fn start_apart(&self, stage: &Stage) -> Server {
        let conf = self.write(stage, "nginx");
        Server::listening(stage, stage.start_apart(&[&nginx(), "-c", &conf]), self.workers)
    }
}

/// Returns the path of nginx. nginx executes itself by the name with which it was started.
fn nginx() -> String {
    let paths = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"];
    paths.into_iter().find(|path| Path::new(path).is_file()).unwrap().to_owned()
}

pub(super) struct Server {
    pub(super) process: Process,
    pub(super) log: String,
}

impl Server {
    fn listening(stage: &Stage, process: Process, workers: u32) -> Self {
        stage.wait_listening(STACK[0], PORT, &process);
        // The master listens before it has started its workers.
        until("workers", || children(process.id()).len() >= workers as usize, || process.tail());
        Self { process, log: stage.path("nginx.log") }
    }

    /// Ends nginx, whose log must have no complaints.
    pub(super) fn stop(mut self) {
        self.quit();
        complaints(&self.log);
    }

    /// Ends nginx.
    pub(super) fn quit(&mut self) {
        self.process.signal(Signal::QUIT).unwrap();
        let status = self.process.wait_for_exit(super::TIMEOUT).unwrap();
        assert!(status.success(), "{status}: {}", self.process.tail());
    }
}

/// Fails if a log contains an alert, an emergency or a critical error.
fn complaints(log: &str) {
    let log = fs::read_to_string(log).unwrap();
    let bad = log.lines().find(|line| ["[emerg]", "[alert]", "[crit]"].iter().any(|bad| line.contains(bad)));
    assert_eq!(bad, None, "{log}");
}

pub(super) fn file(len: usize) -> Vec<u8> {
    content(len as u64, len)
}

fn url(address: &str, path: &str) -> String {
    super::super::http::url(address, path)
}

/// Requests every file on its own connection, and all of them on one connection.
fn all_files(stage: &Stage, address: &str) {
    for len in SIZES {
        let url = url(address, &len.to_string());
        assert!(curl(&stage.netns, &["--header", "Connection: close", &url]) == file(len), "{url}");
    }
    let urls: Vec<String> = SIZES.iter().chain(&SIZES).map(|len| url(address, &len.to_string())).collect();
    let all: Vec<&str> = urls.iter().map(String::as_str).collect();
    let expected = SIZES.iter().chain(&SIZES).flat_map(|&len| file(len)).collect::<Vec<u8>>();
    assert!(curl(&stage.netns, &all) == expected, "{address}");
}

#[test]
fn files() {
    let Some(stage) = stage(&[]) else { return };
    for (workers, server) in [(1, "sendfile on;"), (2, "sendfile off;"), (2, "sendfile on; tcp_nopush on;")] {
        let server = Wanted { workers, server, ..PLAIN }.start(&stage);
        for address in [STACK[0], STACK[1], "127.0.0.1", KERNEL] {
            all_files(&stage, address);
            assert_eq!(curl(&stage.netns, &[&url(address, "memory")]), b"from memory");
        }
        let range = curl(&stage.netns, &["--range", "123456-654321", &url(STACK[0], "1000000")]);
        assert!(range == file(1_000_000)[123_456..=654_321]);
        server.stop();
    }
}

/// Debian's configuration, except for the paths of the PID file and of logs. It corks answers (`tcp_nopush`), so that
/// each answer is one segment.
#[test]
fn debian_configuration_sends_one_segment() {
    const CONF: &str = "/etc/nginx/nginx.conf";
    // One connection with ten answers. The number of segments with data is at byte 152 of `struct tcp_info`.
    const CLIENT: &str = r#"
import http.client, socket, struct, sys
site = http.client.HTTPConnection(sys.argv[1], 80)
site.connect()
count = lambda: struct.unpack_from("I", site.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 156), 152)[0]
for _ in range(10):
    before = count()
    site.request("GET", "/")
    answer = site.getresponse()
    print(answer.status, len(answer.read()) > 100, count() - before)
"#;
    for idle in ["sleep", "poll"] {
        let needs = [Need::Nginx, Need::Curl, Need::Python];
        let Some(stage) = Stage::with_options(&needs, &["--idle", idle]) else { return };
        let conf = fs::read_to_string(CONF).unwrap();
        assert!(conf.contains("\n\ttcp_nopush on;"), "{CONF} is not Debian's: {conf}");
        let conf = conf.replace("/run/nginx.pid", &stage.path("nginx.pid"));
        let conf = conf.replace("/var/log/nginx/error.log", &stage.path("nginx.log"));
        let conf = stage.write("nginx.conf", conf.replace("/var/log/nginx/", &stage.path("log-")));
        stage.wait_free(STACK[0], 80);
        let process = stage.start(&[&nginx(), "-c", &conf, "-g", "daemon off;"]);
        stage.wait_listening(STACK[0], 80, &process);
        let server = Server { process, log: stage.path("nginx.log") };
        let said = stage.run_beside(&["python3", "-c", CLIENT, STACK[0]]);
        assert_eq!(said, "200 True 1\n".repeat(10));
        server.stop();
    }
}

#[test]
fn files_by_tls() {
    let Some(stage) = stage(&[Need::Openssl]) else { return };
    let (key, certificate) = (stage.path("key"), stage.path("certificate"));
    let request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let names = ["-nodes", "-subj", "/CN=stack", "-keyout", &key, "-out", &certificate];
    stage.run_beside(&[&request[..], &names].concat());
    let server = format!("ssl_certificate {certificate}; ssl_certificate_key {key};");
    let wanted = Wanted { workers: 2, listen: "listen 8080 ssl;", server: &server, ..PLAIN };
    let server = wanted.start(&stage);
    for address in [STACK[0], "127.0.0.1"] {
        for len in SIZES {
            let url = format!("https://{address}:{PORT}/{len}");
            assert!(curl(&stage.netns, &["--insecure", &url, &url]) == file(len).repeat(2), "{url}");
        }
    }
    server.stop();
}

#[test]
fn proxy() {
    let Some(stage) = stage(&[Need::Python]) else { return };
    let site = stage.path("site");
    let behind = "location /loopback/ { proxy_pass http://127.0.0.1:9001/; }
        location /link/ { proxy_pass http://10.77.0.1:9001/; }";
    let other = stage.start_beside(&["python3", "-u", "-m", "http.server", "9001", "--directory", &site]);
    stage.wait_listening(KERNEL, 9001, &other);
    let all = |way: &str| {
        for len in SIZES {
            let url = url(STACK[0], &format!("{way}/{len}"));
            let got = curl(&stage.netns, &[&url, &url]);
            let begin = || String::from_utf8_lossy(&got[..got.len().min(300)]).into_owned();
            let log = || fs::read_to_string(stage.path("nginx.log")).unwrap_or_default();
            assert!(got == file(len).repeat(2), "{url}: {} bytes: {}\n{}", got.len(), begin(), log());
        }
    };
    let wanted = Wanted { workers: 2, server: behind, ..PLAIN };
    let server = wanted.start(&stage);
    all("loopback");
    server.stop();
    let server = wanted.start_apart(&stage);
    all("link");
    server.stop();
    // The server logs the client's address for each request.
    let text = other.stderr();
    let from = |who: &str| text.lines().filter(|line| line.starts_with(who)).count();
    assert_eq!((from("127.0.0.1"), from(STACK[0])), (2 * SIZES.len(), 2 * SIZES.len()), "{text}");
}

#[test]
fn many_connections() {
    let Some(stage) = stage(&[Need::Wrk, Need::Ab]) else { return };
    for (listen, path) in [(PLAIN.listen, "memory"), ("listen 8080 reuseport;", "4096")] {
        let server = Wanted { workers: 2, listen, ..PLAIN }.start(&stage);
        let url = url(STACK[0], path);
        let wrk =
            stage.start_beside(&["wrk", "--threads", "1", "--connections", "100", "--duration", "2s", &url]);
        all_files(&stage, STACK[0]);
        let report = finish(wrk);
        assert!(!report.contains("Socket errors") && !report.contains("Non-2xx"), "{report}");
        let requests = report.lines().find_map(|line| line.trim().split_once(" requests in ")).unwrap().0;
        assert!(requests.parse::<u64>().unwrap() >= 100, "{report}");
        for kept in [&[][..], &["-k"]] {
            let report =
                stage.run_beside(&[&["ab", "-q", "-c", "100", "-n", "2000"], kept, &[&url]].concat());
            let line = |start: &str| report.lines().find(|line| line.starts_with(start)).unwrap_or_default();
            assert!(line("Complete requests:").ends_with(" 2000"), "{report}");
            assert!(line("Failed requests:").ends_with(" 0") && line("Non-2xx").is_empty(), "{report}");
        }
        server.stop();
    }
}

/// Returns the address and path that clients request, and the expected answer.
fn asked() -> (SocketAddr, &'static str, Vec<u8>) {
    (SocketAddr::new(STACK[0].parse().unwrap(), PORT), "/65536", file(65_536))
}

/// More data waits for readers than fits into the initial memory of a program.
#[test]
fn answers_wait_for_readers() {
    const CLIENTS: usize = 400;
    const BEGUN_WITH: u64 = 64 << 20;
    let Some(mut stage) = stage(&[]) else { return };
    let server = PLAIN.start(&stage);
    let (to, expected) = (asked().0, file(1_000_000));
    let connect = || (0..CLIENTS).map(|_| Client::connect_slow(to)).collect::<io::Result<Vec<_>>>();
    let mut clients = stage.netns.within(|| Ok(connect()?)).unwrap();
    clients.iter_mut().for_each(|client| client.ask("/1000000", "").unwrap());
    let used = |report: &serde_json::Value| report["tcp"][0]["memory_used"].as_u64();
    stage.stack.as_mut().unwrap().wait_for_count("memory in use", BEGUN_WITH, used).unwrap();
    for client in &mut clients {
        client.speed_up().unwrap();
        assert!(client.answer().unwrap().unwrap() == expected);
    }
    server.stop();
}

#[test]
fn reload_under_load() {
    let Some(stage) = stage(&[]) else { return };
    for listen in [PLAIN.listen, "listen 8080 reuseport;"] {
        let mut server = Wanted { workers: 2, listen, ..PLAIN }.start(&stage);
        let master = server.process.id();
        let (to, path, expected) = asked();
        under_load(&stage, to, path, &expected, |load| {
            for round in 0..3 {
                load.more(20);
                let text = format!("round {round}");
                let line = format!("location = /round {{ return 200 '{text}'; }}");
                Wanted { workers: 2 + round, listen, server: &line, ..PLAIN }.write(&stage, "nginx");
                let old = children(master);
                server.process.signal(Signal::HUP).unwrap();
                let are_gone = || !old.iter().any(|&worker| lives(worker));
                until("the old workers' end", are_gone, || server.process.tail());
                assert_eq!(children(master).len() as u32, 2 + round);
                assert_eq!(curl(&stage.netns, &[&url(STACK[0], "round")]), text.as_bytes());
                load.more(20);
            }
        });
        server.stop();
    }
}

#[test]
fn upgrade_under_load() {
    let Some(stage) = stage(&[]) else { return };
    // Only a daemon can be upgraded, because it has no parent.
    let wanted = Wanted { workers: 2, main: "daemon on;", ..PLAIN };
    let conf = wanted.write(&stage, "nginx");
    stage.run(&[&nginx(), "-c", &conf]);
    let number = |name: &str| fs::read_to_string(stage.path(name)).ok()?.trim().parse::<u32>().ok();
    let log = || fs::read_to_string(stage.path("nginx.log")).unwrap();
    until("the server", || stage.connects(STACK[0], PORT), log);
    let signal = |to: u32, signal| {
        rustix::process::kill_process(rustix::process::Pid::from_raw(to as i32).unwrap(), signal).unwrap();
    };
    let (to, path, expected) = asked();
    under_load(&stage, to, path, &expected, |load| {
        for _ in 0..2 {
            load.more(20);
            let old = number("nginx.pid").unwrap();
            let workers = children(old);
            assert_eq!(workers.len(), 2);
            signal(old, Signal::USR2);
            until("the new master", || number("nginx.pid").is_some_and(|new| new != old), log);
            let new = number("nginx.pid").unwrap();
            until("new workers", || children(new).len() == 2, log);
            load.more(20);
            signal(old, Signal::WINCH);
            until("the old workers' end", || !workers.iter().any(|&worker| lives(worker)), log);
            load.more(20);
            signal(old, Signal::QUIT);
            until("the old master's end", || !lives(old), log);
            load.more(20);
        }
    });
    all_files(&stage, STACK[0]);
    let master = number("nginx.pid").unwrap();
    signal(master, Signal::QUIT);
    until("the end", || !lives(master), log);
    assert!(!stage.connects(STACK[0], PORT));
    complaints(&stage.path("nginx.log"));
}

/// Opens connections to each of two workers. Returns them by process ID.
fn to_each_worker(workers: &[u32]) -> anyhow::Result<Vec<(u32, Vec<Client>)>> {
    let to = asked().0;
    let mut found: Vec<(u32, Vec<Client>)> = workers.iter().map(|&worker| (worker, Vec::new())).collect();
    let mut round = 0;
    // An idle worker may accept all connections that arrive one by one.
    while found.iter().any(|(_, clients)| clients.is_empty()) {
        let clients: io::Result<Vec<Client>> = (0..16).map(|_| Client::connect(to)).collect();
        for mut client in clients? {
            let worker = client.get("/pid", "")?.context("an answer")?;
            let worker: u32 = String::from_utf8(worker)?.parse()?;
            let (_, clients) = found.iter_mut().find(|(id, _)| *id == worker).context("a worker")?;
            clients.push(client);
        }
        round += 1;
        ensure!(round < 60, "one worker takes all");
    }
    Ok(found)
}

#[test]
fn worker_is_killed() {
    let Some(stage) = stage(&[]) else { return };
    for listen in [PLAIN.listen, "listen 8080 reuseport;"] {
        let server = Wanted { workers: 2, listen, ..PLAIN }.start(&stage);
        let master = server.process.id();
        let workers = children(master);
        let mut clients = stage.netns.within(|| to_each_worker(&workers)).unwrap();
        let (killed, dead) = clients.pop().unwrap();
        let pid = rustix::process::Pid::from_raw(killed as i32).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
        for mut client in dead {
            assert_eq!(client.get("/pid", "").unwrap(), None);
        }
        let new = || children(master).iter().any(|worker| !workers.contains(worker));
        until("a new worker", new, || server.process.tail());
        for (worker, clients) in &mut clients {
            for client in clients {
                let body = client.get("/pid", "").unwrap().unwrap();
                assert_eq!(String::from_utf8(body).unwrap(), worker.to_string());
                assert!(client.get("/1000000", "").unwrap().unwrap() == file(1_000_000));
            }
        }
        let workers = children(master);
        stage.netns.within(|| to_each_worker(&workers)).unwrap();
        let log = fs::read_to_string(&server.log).unwrap();
        let killed = format!("worker process {killed} exited on signal 9");
        assert!(log.contains(&killed), "{log}");
        // nginx logs this as an alert.
        fs::write(&server.log, log.lines().filter(|line| !line.contains(&killed)).collect::<String>())
            .unwrap();
        server.stop();
    }
}

/// The example configuration, started from another directory with a binary at another path.
#[test]
fn example_runs_from_any_directory() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Nginx, Need::Curl]].concat()) else { return };
    let dir = TempDir::new().unwrap();
    std::os::unix::fs::symlink(offcore::binary().unwrap(), dir.file("offcore")).unwrap();
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/nginx/run");
    let mut command = Command::new(run);
    let output = command.current_dir(dir.path()).env("OFFCORE", "./offcore").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("<h1>served by nginx"), "{output:?}");
}
