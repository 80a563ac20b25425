//! Tests of descriptors whose last close blocks. A worker must never wait for it.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use offcore_flow::host::serve::Serve;
use offcore_session::control::Owner;
use offcore_session::message::{ASK, Accepted, Call, Hello, KEY, NONE, Question};
use offcore_session::slot::wish;
use offcore_tcp::proto::Config;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_linger, set_socket_send_buffer_size};
use rustix::net::{SendFlags, Shutdown, SocketType, send as send_bytes, shutdown};

use crate::process::{Process, bind, connect_to, knock, knock_as, listen, receive, send_with};
use crate::setup::{path, serve_also, world, world_of_many_users};
use crate::world::World;

/// How long a close blocks.
const LINGER: Duration = Duration::from_secs(120);

/// A connection with more data than its peer accepts, and the peer.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    set_socket_linger(&stream, Some(LINGER)).unwrap();
    loop {
        match stream.write(&[0; 100_000]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break (stream.into(), peer),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Sends a request with copies of a descriptor, and closes the descriptor here.
fn send(process: &Process, question: &Question, fd: OwnedFd, count: usize) {
    send_with(process.socket.as_fd(), &question.to_bytes(), &vec![fd.as_fd(); count]);
    drop(fd);
    process.look();
}

/// Returns the error number of the answer.
fn error(world: &mut World<Serve>, process: &Process) -> u32 {
    process.hear(world).0.error
}

#[test]
fn lingering_close_blocks_no_worker() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let mut peers = Vec::new();
    let mut passed = || {
        let (fd, peer) = lingering();
        peers.push(peer);
        fd
    };
    // The thread of the errands also sends a child its socket.
    let child = process.socket_of_child(&mut world).unwrap();
    let start = Instant::now();

    // Before the process has identified itself: with unexpected descriptors, and without a message that is read.
    for hello in [Hello { version: ASK, key: [0; KEY] }, Hello { version: 0, key: [9; KEY] }] {
        let guest = knock(&path);
        let (first, second) = (passed(), passed());
        send_with(guest.as_fd(), &hello.to_bytes(), &[first.as_fd(), second.as_fd()]);
        send_with(guest.as_fd(), &hello.to_bytes(), &[passed().as_fd()]);
        drop((first, second));
        world.run(0.01);
    }
    // With more descriptors than a message needs, and with messages that need none or a different one.
    for call in [Call::Segments, Call::Bind, Call::Listen, Call::Adopt, Call::Connect] {
        for count in [1, 2, 20] {
            send(&process, &Question::new(call, NONE, 0), passed(), count);
            assert_eq!(error(&mut world, &process) == 0, call == Call::Segments, "{call:?}");
        }
    }
    send(&process, &Question::new(Call::Fork, NONE, 0), passed(), 1);
    // A socket that does not listen, passed as a kernel listener.
    send(&process, &listen(81, 16), passed(), 1);
    assert_eq!(error(&mut world, &process), Errno::INVAL.raw_os_error() as u32);
    // In the queues of closed sockets: a session's and a child's. An out-of-band byte hides what follows it from a
    // peek.
    for is_hidden in [false, true] {
        let end = process.open(&mut world, &connect_to(SocketAddr::from(([10, 0, 0, 2], 80)))).unwrap();
        if is_hidden {
            send_bytes(&end.fd, b"o", SendFlags::OOB).unwrap();
        }
        send_with(end.fd.as_fd(), b"x", &[passed().as_fd()]);
        // The stack opens a gate that it takes for closed.
        end.slot().wishes.gates.store(1000, Ordering::Relaxed);
        process.mark(&end);
        world.run(0.01);
        drop(end);
        process.look();
        world.run(0.01);
    }
    send_with(child.as_fd(), b"nonsense", &[]);
    send_with(child.as_fd(), b"nonsense", &[passed().as_fd()]);
    drop(child);
    process.look();
    world.run(1.0);
    assert!(start.elapsed() < LINGER / 2, "{:?}", start.elapsed());
    assert_eq!(world.app.counts().sessions, 0);
}

#[test]
fn close_detection_blocks_no_worker() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let end = process.listen(&mut world, 80, 1);
    let other = process.listen(&mut world, 81, 1);
    // The errands thread of the user is blocked. The query whether the session is closed waits for it, but the worker
    // does not.
    let (fd, peer) = lingering();
    send(&process, &Question::new(Call::Info, end.number(), 0), fd, 1);
    assert_eq!(error(&mut world, &process), 0);
    end.slot().wishes.options.store(wish::END | wish::NO_READ, Ordering::Release);
    shutdown(&end.fd, Shutdown::Both).unwrap();
    drop(end);
    world.run(0.5);
    assert_eq!(world.app.counts().sessions, 2, "the session is kept until the answer");
    let question = Question::new(Call::Info, other.number(), 0);
    assert_eq!(process.ask(&mut world, &question, &[]).0.error, 0);
    // The peer reads everything, which ends the blocking close.
    let reading = std::thread::spawn(move || std::io::copy(&mut { peer }, &mut std::io::sink()));
    let start = Instant::now();
    while world.app.counts().sessions != 1 {
        assert!(start.elapsed() < Duration::from_secs(30));
        world.turn();
    }
    reading.join().unwrap().unwrap();
}

/// A user at the limit of errands cannot attach processes, but other users can.
#[test]
fn blocked_user_spares_other_users() {
    const OTHER: u32 = 54_321;
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP: blocked_user_spares_other_users: needs root");
    }
    let path = path();
    let mut world = World::new(serve_also(&path, &[OTHER]).unwrap(), Config::default());
    let blocked = Process::attach_as(&mut world, &path, OTHER);
    let (fd, peer) = lingering();
    send(&blocked, &Question::new(Call::Segments, NONE, 0), fd, 1);
    assert_eq!(error(&mut world, &blocked), 0);
    // Closing each file of a message that needs none is an errand.
    let file = || OwnedFd::from(File::open("/dev/null").unwrap());
    for _ in 0..13 {
        send(&blocked, &Question::new(Call::Segments, NONE, 0), file(), 20);
        assert_eq!(error(&mut world, &blocked), 0);
    }
    world.run(0.01);
    // The stack refuses processes, and then the kernel refuses connections of the user.
    let mut refused = Vec::new();
    while let Ok(socket) = knock_as(&path, OTHER) {
        world.run(0.002);
        refused.push(socket);
        assert!(refused.len() < 1000, "the user can still connect");
    }
    assert!(!refused.is_empty());
    let honest = Process::attach(&mut world, &path);
    assert_eq!(honest.ask(&mut world, &Question::new(Call::Segments, NONE, 0), &[]).0.error, 0);
    // The peer reads everything, which ends the blocking close.
    let reading = std::thread::spawn(move || std::io::copy(&mut { peer }, &mut std::io::sink()));
    let start = Instant::now();
    while knock_as(&path, OTHER).is_err() {
        assert!(start.elapsed() < Duration::from_secs(60), "the user stays barred");
        world.turn();
    }
    reading.join().unwrap().unwrap();
}

/// The stack closes its copy of each connection that it passes. While closes of the user block, it passes a limited
/// number of them.
#[test]
fn blocked_user_gets_few_kernel_connections() {
    const LIMIT: usize = 400;
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let (fd, peer) = lingering();
    send(&process, &Question::new(Call::Segments, NONE, 0), fd, 1);
    assert_eq!(error(&mut world, &process), 0);
    let kernel = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = kernel.local_addr().unwrap();
    let (answer, mut descriptors) = process.ask(&mut world, &listen(80, 16), &[kernel.as_fd()]);
    assert_eq!(answer.error, 0);
    let listener = process.end(answer.session, descriptors.pop().unwrap());
    let mut passes = || {
        // Fails while the kernel's queue is full.
        drop(TcpStream::connect_timeout(&to, Duration::from_millis(1)));
        world.turn();
        let passed = receive(listener.fd.as_fd(), &mut [0; Accepted::LEN]).is_ok();
        if !passed {
            std::thread::sleep(Duration::from_millis(1));
        }
        passed
    };
    let (mut passed, mut failed) = (0, 0);
    while failed < 200 {
        match passes() {
            true => (passed, failed) = (passed + 1, 0),
            false => failed += 1,
        }
        assert!(passed < LIMIT, "each one occupies a descriptor");
    }
    // The peer reads everything, which ends the blocking close.
    let reading = std::thread::spawn(move || std::io::copy(&mut { peer }, &mut std::io::sink()));
    let start = Instant::now();
    while passed < LIMIT {
        passed += usize::from(passes());
        assert!(start.elapsed() < Duration::from_secs(60), "{passed} connections");
    }
    reading.join().unwrap().unwrap();
}

/// A reset session leaves its queue, with the descriptors in it, to the user's thread. They stay charged until the
/// thread has closed them.
#[test]
fn queue_of_reset_session_is_charged() {
    const LIMIT: usize = 200;
    let (mut world, path) = world_of_many_users();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    let (fd, peer) = lingering();
    send(&process, &Question::new(Call::Segments, NONE, 0), fd, 1);
    assert_eq!(error(&mut world, &process), 0);
    let file = File::open("/dev/null").unwrap();
    let resets = |world: &mut World<Serve>| {
        let client = world.connect(80);
        world.run(0.1);
        let end = process.accept(&listener);
        if let Some(end) = &end {
            send_with(end.fd.as_fd(), b"x", &[file.as_fd()]);
        }
        let now = world.now;
        let (stack, out) = world.client.path.call();
        stack.abort(now, client.conn, out);
        world.run(0.1);
        let accepted = end.is_some();
        drop(end);
        process.look();
        world.run(0.1);
        accepted
    };
    let mut count = 0;
    while resets(&mut world) {
        count += 1;
        assert!(count < LIMIT, "each one occupies a descriptor");
    }
    assert!(count > 0);
    // The peer reads everything, which ends the blocking close.
    let reading = std::thread::spawn(move || std::io::copy(&mut { peer }, &mut std::io::sink()));
    let start = Instant::now();
    let socket = bind(SocketType::DGRAM.as_raw(), SocketAddr::from(([0, 0, 0, 0], 0)));
    while process.open(&mut world, &socket).is_err() {
        assert!(start.elapsed() < Duration::from_secs(60), "the descriptors stay charged");
    }
    reading.join().unwrap().unwrap();
}

/// An application whose sessions hold their own ends in their queues is removed after its last process has ended.
#[test]
fn ends_in_own_queues_are_closed() {
    let (mut world, path) = world();
    let (process, mut child) = Process::attach_as_child(&mut world, &path);
    // Plain, hidden behind an out-of-band byte, behind more data than one turn relays, and behind a forged lock.
    for case in 0..4 {
        let end = process.open(&mut world, &connect_to(SocketAddr::from(([10, 0, 0, 9], 80)))).unwrap();
        match case {
            1 => assert_eq!(send_bytes(&end.fd, b"o", SendFlags::OOB).unwrap(), 1),
            2 => {
                set_socket_send_buffer_size(&end.fd, 100_000).unwrap();
                assert_eq!(send_bytes(&end.fd, &[b'd'; 5000], SendFlags::empty()).unwrap(), 5000);
            }
            3 => end.slot().wishes.writing.store(u64::from(Owner::STACK.word()) << 1, Ordering::Relaxed),
            _ => {}
        }
        send_with(end.fd.as_fd(), b"x", &[end.fd.as_fd()]);
    }
    assert_eq!(world.app.counts().sessions, 4);
    child.kill().unwrap();
    child.wait().unwrap();
    drop(process);
    let start = Instant::now();
    while world.app.counts().applications > 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "{} sessions", world.app.counts().sessions);
        world.run(0.01);
    }
}
