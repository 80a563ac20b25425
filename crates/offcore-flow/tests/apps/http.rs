//! Tests of the file server with peers that read slowly or not at all.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use offcore_flow::host::apps::http::FileServer;
use offcore_tcp::proto::{AppId, Config, Event};

use crate::world::{Client, World};

const PORT: u16 = 80;
/// More than a peer's receive window, and less than the sum of it and the send FIFO.
const MIDDLE: usize = 400_000;
const LONG: usize = 2_000_000;

/// A directory with files. It is removed on drop.
struct Site(PathBuf);

impl Site {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("offcore-apps-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let path = path.canonicalize().unwrap();
        for (name, len) in [("short", 10), ("middle", MIDDLE), ("long", LONG)] {
            fs::write(path.join(name), content(len)).unwrap();
        }
        Self(path)
    }

    /// Number of descriptors of this process for files of the directory.
    fn open_files(&self) -> usize {
        let names =
            fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        names.filter(|name| name.parent() == Some(Path::new(&self.0))).count()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 251) as u8 ^ at as u8).collect()
}

fn world(site: &Site) -> World<FileServer> {
    let app = FileServer::new(&site.0, PORT).unwrap().with_open_files(8);
    World::new(app, Config { memory: 256 << 20, ..Config::default() })
}

/// Connects a client that requests a file.
fn ask(world: &mut World<FileServer>, name: &str) -> Client {
    let mut client = world.connect(PORT);
    let request = format!("GET /{name} HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(world.write(&mut client, request.as_bytes()), request.len());
    client
}

/// Reads a complete file and checks it.
fn read_file(world: &mut World<FileServer>, client: &mut Client, len: usize) {
    let mut got = Vec::new();
    let body = |got: &[u8]| Some(got.windows(4).position(|end| end == b"\r\n\r\n")? + 4);
    world
        .run_until(60, |world| {
            got.extend(world.read(client, usize::MAX));
            let head = body(&got[..got.len().min(1000)]);
            head.is_some_and(|head| got.len() >= head + len)
        })
        .unwrap_or_else(|| panic!("{} bytes have come", got.len()));
    assert!(got.starts_with(b"HTTP/1.1 200 OK\r\n"));
    assert!(got[body(&got).unwrap()..] == content(len));
}

#[test]
fn stalled_reader_is_reset() {
    let site = Site::new("stalled");
    let mut world = world(&site);
    // The rest of the first answer is entirely in the send FIFO. The third client has ended its stream.
    let [middle, long, ended] = ["middle", "long", "middle"].map(|name| ask(&mut world, name));
    let now = world.now;
    let (stack, out) = world.client.path.call();
    stack.shutdown(now, ended.conn, out).unwrap();
    world.run(20.0);
    assert_eq!(world.server.path.stack.connections(), 3, "given up too early");
    let seconds = world.run_until(60, |world| world.server.path.stack.connections() == 0);
    assert!(seconds.is_some_and(|seconds| (8..15).contains(&seconds)), "given up after 20 and {seconds:?} s");
    world.run(1.0);
    for client in [middle, long, ended] {
        assert!(world.is_closed(&client), "a client was not told");
    }
    assert_eq!(site.open_files(), 0);
}

#[test]
fn slow_reader_gets_whole_file() {
    let site = Site::new("slow");
    let mut world = world(&site);
    let mut client = ask(&mut world, "long");
    // The client opens its window by half of its buffer, every 13 seconds.
    const EACH: usize = 10_000;
    for _ in 0..90 {
        world.run(1.0);
        assert_eq!(world.read(&mut client, EACH).len(), EACH);
    }
    assert!(!world.is_closed(&client) && !world.has_ended(&client));
    let mut rest = 0;
    world.run_until(30, |world| {
        rest += world.read(&mut client, usize::MAX).len();
        rest >= LONG - 90 * EACH
    });
    assert!(rest >= LONG - 90 * EACH, "{rest} bytes more have come");
    // The idle time of the connection starts now, and not earlier.
    let seconds = world.run_until(60, |world| world.has_ended(&client));
    assert!(seconds.is_some_and(|seconds| (25..35).contains(&seconds)), "closed after {seconds:?} s");
}

#[test]
fn slow_readers_leave_descriptors_to_others() {
    let site = Site::new("descriptors");
    let mut world = world(&site);
    let mut slow: Vec<Client> = (0..40).map(|_| ask(&mut world, "long")).collect();
    world.run(1.0);
    assert!((1..=8).contains(&site.open_files()), "{} files are open", site.open_files());
    let mut quick = ask(&mut world, "short");
    read_file(&mut world, &mut quick, 10);
    for client in &mut slow {
        read_file(&mut world, client, LONG);
    }
    assert_eq!(site.open_files(), 0);
}

/// The rest of a modified file does not belong to the part that was already sent.
#[test]
fn changed_file_aborts_response() {
    let site = Site::new("changed");
    let mut world = world(&site);
    world.app = FileServer::new(&site.0, PORT).unwrap().with_open_files(0);
    let mut client = ask(&mut world, "long");
    world.run(1.0);
    assert_eq!(site.open_files(), 0);
    fs::write(site.0.join("new"), vec![1; LONG]).unwrap();
    fs::rename(site.0.join("new"), site.0.join("long")).unwrap();
    let closed = world.run_until(20, |world| {
        let bytes = world.read(&mut client, usize::MAX);
        assert!(!bytes.windows(9).any(|bytes| bytes == [1; 9]), "bytes of another file");
        world.is_closed(&client)
    });
    assert!(closed.is_some());
}

#[test]
fn empty_lines_before_a_request_are_skipped() {
    let site = Site::new("empty");
    let mut world = world(&site);
    let mut client = world.connect(PORT);
    let (lines, mut sent) = ([b'\n'; 500_000], 0);
    world.run_until(30, |world| {
        sent += world.write(&mut client, &lines[sent..]);
        sent == lines.len()
    });
    assert_eq!(sent, lines.len());
    let request = b"GET /short HTTP/1.1\r\nHost: a\r\n\r\n";
    world.run_until(10, |world| world.write(&mut client, &[]) == 0);
    assert_eq!(world.write(&mut client, request), request.len());
    read_file(&mut world, &mut client, 10);
    assert!(!world.events.iter().any(|event| matches!(event, Event::Closed(..))));
}

/// Few, because answers to silent peers are retransmitted.
#[test]
fn few_late_requests_get_answers() {
    let site = Site::new("late");
    let mut world = world(&site);
    let mut late: Vec<Client> = (0..100).map(|_| world.connect(PORT)).collect();
    for client in &mut late {
        world.write(client, b"GET /short HTTP/1.1\r\nHost: ");
    }
    let mut answers = vec![Vec::new(); late.len()];
    let closed = world.run_until(20, |world| {
        for (client, answer) in late.iter_mut().zip(&mut answers) {
            answer.extend(world.read(client, usize::MAX));
        }
        late.iter().zip(&answers).all(|(client, answer)| !answer.is_empty() || world.is_closed(client))
    });
    assert!(closed.is_some());
    let answered = answers.iter().filter(|answer| answer.starts_with(b"HTTP/1.1 408 ")).count();
    assert_eq!(answered, 64);
    // The limit applies to connections that exist.
    world.run(5.0);
    let mut client = world.connect(PORT);
    world.write(&mut client, b"GET /short");
    let answered =
        world.run_until(20, |world| world.read(&mut client, usize::MAX).starts_with(b"HTTP/1.1 408 "));
    assert!(answered.is_some());
}

/// A world whose server has little memory.
fn small_world(site: &Site) -> World<FileServer> {
    let app = FileServer::new(&site.0, PORT).unwrap();
    World::new(app, Config { memory: 16 << 20, ..Config::default() })
}

#[test]
fn stalled_readers_do_not_exhaust_memory() {
    let site = Site::new("scarce");
    let mut world = small_world(&site);
    // Each connection would occupy 256 KB of the server's memory for 30 seconds.
    let stalled: Vec<_> = (0..150).map(|_| ask(&mut world, "long")).collect();
    world.run(2.0);
    let mut client = ask(&mut world, "middle");
    let began = world.now;
    read_file(&mut world, &mut client, MIDDLE);
    let seconds = (world.now - began).as_secs();
    assert!(seconds < 10, "a file took {seconds} s beside stalled readers");
    drop(stalled);
}

#[test]
fn partial_requests_do_not_exhaust_memory() {
    let site = Site::new("halves");
    let mut world = small_world(&site);
    // Each connection has a block of 4 KB for its data, and the server has 4,096 blocks.
    let mut halves = Vec::new();
    for _ in 0..6000 {
        let (stack, out) = world.client.path.call();
        let server = SocketAddr::from(([10, 0, 0, 1], PORT));
        let Ok(conn) = stack.connect(world.now, AppId::OWN, None, server, out) else { break };
        halves.push(world.as_client(conn));
        if halves.len() % 20 == 0 {
            world.turn();
        }
    }
    world.run(1.0);
    for half in &mut halves {
        if !world.is_closed(half) {
            world.write(half, b"GET /short HTTP/1.1\r\nHost: ");
        }
    }
    world.run(2.0);
    let mut client = ask(&mut world, "middle");
    let began = world.now;
    read_file(&mut world, &mut client, MIDDLE);
    let seconds = (world.now - began).as_secs();
    assert!(seconds < 5, "a file took {seconds} s beside half requests");
}
