//! Applications in processes that are killed, or run out of descriptors. A process that starts another one shares its
//! descriptors with it for a moment, so these tests are separate from tests that check closed descriptors.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code, reason = "others use all of it")]
#[path = "../serve/process.rs"]
mod process;
#[allow(dead_code, reason = "others use all of it")]
#[path = "../serve/setup.rs"]
mod setup;
#[allow(dead_code, reason = "others use all of it")]
#[path = "../apps/world.rs"]
mod world;

use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

use offcore_flow::host::serve::Serve;
use offcore_session::message::{Hello, KEY, VERSION, Welcome};
use rustix::event::{PollFlags as Bits, Timespec};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use process::{Process, bind, connect_to, greet, knock, listen, receive, send_with};
use world::World;

/// Path of the stack for a test's child, and the key of the application that it joins.
const CHILD: &str = "OFFCORE_TEST_SERVE";
const KEY_OF_CHILD: &str = "OFFCORE_TEST_KEY";

/// Starts a child process: it attaches, listens on port 80, and waits to be killed.
fn child(path: &Path, key: [u8; KEY]) -> Child {
    let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process_entry_point", "--nocapture"])
        .env(CHILD, path)
        .env(KEY_OF_CHILD, key)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The child's main function. Without a stack to attach to, it does nothing.
#[test]
fn child_process_entry_point() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let digits = std::env::var(KEY_OF_CHILD).unwrap();
    let key = std::array::from_fn(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap());
    let socket = knock(Path::new(&path));
    send_with(socket.as_fd(), &Hello { version: VERSION, key }.to_bytes(), &[]);
    let wait = || {
        let mut events = [rustix::event::PollFd::new(&socket, Bits::IN)];
        rustix::event::poll(&mut events, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
    };
    wait();
    let mut bytes = [0; Welcome::LEN];
    let (len, descriptors) = receive(socket.as_fd(), &mut bytes).unwrap();
    let process =
        Process::new(socket.try_clone().unwrap(), Welcome::from_bytes(&bytes[..len]).unwrap(), descriptors);
    send_with(process.socket.as_fd(), &listen(80, 8).to_bytes(), &[]);
    process.look();
    wait();
    let _listener = receive(socket.as_fd(), &mut [0; 256]).unwrap();
    // Until this process or the test is killed.
    let _ = std::io::stdin().read(&mut [0; 1]);
}

fn run_until(world: &mut World<Serve>, mut done: impl FnMut(&World<Serve>) -> bool) {
    for _ in 0..10_000 {
        if done(world) {
            return;
        }
        world.turn();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{:?}", world.app.counts());
}

#[test]
fn killed_process_resources_are_released() {
    let (mut world, path) = setup::world();
    let mut child = child(&path, [0; KEY]);
    run_until(&mut world, |world| world.app.counts().sessions == 1);
    let clients: Vec<_> = (0..3).map(|_| world.connect(80)).collect();
    run_until(&mut world, |world| world.app.counts().sessions == 4);
    let memory = world.server.path.stack.counts().memory;
    child.kill().unwrap();
    child.wait().unwrap();
    run_until(&mut world, |world| world.app.counts().applications == 0);
    world.run(0.5);
    let counts = world.app.counts();
    assert_eq!((counts.processes, counts.sessions), (0, 0));
    // Until the last connection has ended, which the peers delay.
    world.run(70.0);
    assert_eq!(world.server.path.stack.counts().memory, memory - (64 << 20), "its memory is free");
    assert!(clients.iter().all(|client| world.has_ended(client) || world.is_closed(client)));
    // The port is free, so another process can listen on it.
    let process = Process::attach(&mut world, &path);
    process.listen(&mut world, 80, 1);
}

#[test]
fn killed_process_does_not_block_others() {
    let (mut world, path) = setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 79, 4);
    let mut client = world.connect(79);
    world.run(0.1);
    let mut end = process.accept(&listener).unwrap();
    let mut child = child(&path, process.welcome.key);
    run_until(&mut world, |world| world.app.counts().sessions == 3);
    assert_eq!(world.app.counts().processes, 2);

    // A thread of the child has stored its written data, taken the token and closed the gate. It is killed before it
    // has announced any of that.
    world.write(&mut client, b"to be read");
    world.run(0.1);
    assert_eq!(end.bits(), Bits::IN | Bits::OUT);
    rustix::net::recv(&end.fd, &mut [0; 1], rustix::net::RecvFlags::DONTWAIT).unwrap();
    for _ in 0..process.welcome.gate {
        end.slot().wishes.gates.fetch_add(1, Ordering::Relaxed);
        rustix::io::write(&end.fd, &[0]).unwrap();
    }
    assert_eq!(end.writer.write(b"written"), 7);
    world.run(0.1);
    assert_eq!(end.bits(), Bits::empty());
    child.kill().unwrap();
    child.wait().unwrap();
    run_until(&mut world, |world| world.app.counts().processes == 1);
    world.run(0.1);
    assert_eq!(end.bits(), Bits::IN | Bits::OUT);
    assert_eq!(world.read(&mut client, 100), b"written");
    assert_eq!(process.read(&mut end, 100), b"to be read");
    assert_eq!(world.app.counts().sessions, 2, "its listener is gone");
}

/// Set for a process that runs out of descriptors. Otherwise, other tests would have the same limit.
const ALONE: &str = "OFFCORE_TEST_ALONE";

#[test]
fn without_descriptors_connections_are_refused() {
    if std::env::var_os(ALONE).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "without_descriptors_connections_are_refused", "--nocapture"]);
        let output = child.env(ALONE, "1").output().unwrap();
        let [told, error] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success() && told.contains("1 passed"), "{told}{error}");
        return;
    }
    let (mut world, path) = setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    let limit = getrlimit(Resource::Nofile);
    let set = |current| setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit }).unwrap();
    set(0);
    let client = world.connect(80);
    world.run(0.1);
    assert!(world.is_closed(&client), "it is reset");
    assert_eq!((world.app.counts().refused, world.app.counts().sessions), (1, 1));
    let error = process.open(&mut world, &connect_to(SocketAddr::from(([10, 0, 0, 2], 7)))).err();
    assert_eq!(error, errno(Errno::MFILE));
    assert_eq!(process.open(&mut world, &listen(81, 1)).err(), errno(Errno::MFILE));
    assert_eq!(process.open(&mut world, &bind(1, any(82))).err(), errno(Errno::MFILE));
    assert_eq!(process.open(&mut world, &bind(2, any(83))).err(), errno(Errno::MFILE));
    // A process that knocks waits, and is admitted when descriptors are available.
    set(limit.current.unwrap());
    let socket = knock(&path);
    set(0);
    let before = world.app.counts().refused;
    world.run(0.5);
    let tries = world.app.counts().refused - before;
    assert!((1..=50).contains(&tries), "{tries} tries in 50 turns");
    set(limit.current.unwrap());
    let hello = Hello { version: VERSION, key: [0; KEY] };
    let (welcome, _) = greet(&mut world, &socket, &hello.to_bytes()).unwrap();
    assert_eq!(welcome.error, 0);
    // The failed calls have left nothing behind.
    for port in [81, 82] {
        process.listen(&mut world, port, 1);
    }
    process.open(&mut world, &bind(2, any(83))).unwrap();
    world.connect(80);
    world.run(0.1);
    assert!(process.accept(&listener).is_some());
    assert_eq!(world.server.path.stack.connections(), 1);
}

fn any(port: u16) -> SocketAddr {
    SocketAddr::from(([0, 0, 0, 0], port))
}

fn errno(error: Errno) -> Option<u32> {
    Some(error.raw_os_error() as u32)
}
