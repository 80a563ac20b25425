//! Tests of processes that attach, join, fork and misbehave.

use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use offcore_flow::host::App;
use offcore_flow::host::serve::{Serve, ServeError};
use offcore_port::Wake;
use offcore_session::control::Owner;
use offcore_session::message::{ASK, Call, Hello, KEY, NONE, Question, VERSION};
use offcore_session::slot::wish;
use offcore_tcp::proto::Config;
use rustix::event::{PollFd, PollFlags as Bits, Timespec, poll};
use rustix::io::Errno;

use crate::process::{
    Process, bind, bits, connect_to, greet, hear, knock, knock_as, listen, receive, send_with,
};
use crate::setup::{path, serve, serve_also, world, world_of_few, world_of_many_users, world_of_small};
use crate::world::World;

#[test]
fn only_dead_stack_is_replaced() {
    let path = path();
    let first = serve(&path).unwrap();
    let found = std::fs::symlink_metadata(&path).unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    let error = serve(&path).unwrap_err();
    assert!(matches!(error, ServeError::Taken { process, .. } if process == std::process::id()), "{error}");
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("another path"), "{text}");
    drop(first);
    assert!(!path.exists(), "it is removed");
    // A killed stack leaves its socket behind.
    drop(UnixListener::bind(&path).unwrap());
    drop(serve(&path).unwrap());
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(serve(&path), Err(ServeError::NoSocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(serve(Path::new("/nonexistent/socket")), Err(ServeError::Path { .. })));
}

/// Sockets on which another program listens, and files that replace the stack's socket, are not removed.
#[test]
fn foreign_sockets_and_files_are_kept() {
    let path = path();
    let others = UnixListener::bind(&path).unwrap();
    assert!(matches!(serve(&path), Err(ServeError::InUse { .. })));
    drop(UnixStream::connect(&path).unwrap());
    drop(others);
    let serve = serve(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    drop(serve);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
}

/// A file next to the path may belong to any program.
#[test]
fn foreign_lock_file_is_refused() {
    let path = path();
    let lock = PathBuf::from(format!("{}.lock", path.display()));
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(serve(&path), Err(ServeError::NoSocket { .. })));
    assert!(!lock.exists(), "nothing is left where nothing is served");
    std::fs::remove_file(&path).unwrap();
    for precious in ["precious", "12a\n", "123456789012", "12\n34\n"] {
        std::fs::write(&lock, precious).unwrap();
        assert!(matches!(serve(&path), Err(ServeError::NoLock { .. })), "{precious}");
        assert_eq!(std::fs::read_to_string(&lock).unwrap(), precious);
        assert!(!path.exists());
    }
    std::fs::remove_file(&lock).unwrap();
    let target = path.with_extension("target");
    std::fs::write(&target, "").unwrap();
    std::os::unix::fs::symlink(&target, &lock).unwrap();
    assert!(matches!(serve(&path), Err(ServeError::NoLock { .. })));
    std::fs::remove_file(&target).unwrap();
    std::fs::remove_file(&lock).unwrap();
    // Files that a killed stack has left, with or without its number.
    for left in ["", "4194304\n", "12"] {
        std::fs::write(&lock, left).unwrap();
        // A lock file of the stack is readable only by its owner.
        std::fs::set_permissions(&lock, Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(serve(&path), Err(ServeError::NoLock { .. })), "{left}");
        std::fs::set_permissions(&lock, Permissions::from_mode(0o600)).unwrap();
        let serve = serve(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&lock).unwrap(), format!("{}\n", std::process::id()));
        drop(serve);
        assert!(!lock.exists() && !path.exists());
    }
    let long = std::env::temp_dir().join("x".repeat(110));
    let error = serve(&long).unwrap_err();
    assert!(error.to_string().contains("expected 1 to 107: choose a shorter one"), "{error}");
    assert!(!PathBuf::from(format!("{}.lock", long.display())).exists());
}

#[test]
fn refused_process_gets_error() {
    let (mut world, path) = world();
    let mut refused = |bytes: &[u8]| {
        let socket = knock(&path);
        let (welcome, descriptors) = greet(&mut world, &socket, bytes).unwrap();
        assert!(descriptors.is_empty());
        (welcome.version, welcome.error)
    };
    let other = Hello { version: VERSION + 1, key: [0; KEY] }.to_bytes();
    assert_eq!(refused(&other), (VERSION, Errno::PROTO.raw_os_error() as u32));
    let longer = [&other[..], &[0; 100]].concat();
    assert_eq!(refused(&longer), (VERSION, Errno::PROTO.raw_os_error() as u32));
    assert!(greet(&mut world, &knock(&path), b"GET / HTTP/1.1").is_none());
    // A query of the version is answered and not counted.
    let ask = Hello { version: ASK, key: [0; KEY] }.to_bytes();
    let (welcome, descriptors) = greet(&mut world, &knock(&path), &ask).unwrap();
    assert_eq!((welcome.version, welcome.error, descriptors.len()), (VERSION, 0, 0));
    let counts = world.app.counts();
    assert_eq!((counts.applications, counts.refused, counts.misused), (0, 2, 1));
}

#[test]
fn process_beyond_share_gets_error() {
    let (mut world, path) = world_of_many_users();
    let first = Process::attach(&mut world, &path);
    let hello = Hello { version: VERSION, key: first.welcome.key }.to_bytes();
    let mut ends = Vec::new();
    let error = loop {
        match first.open(&mut world, &bind(2, "0.0.0.0:0".parse().unwrap())) {
            Ok(end) => ends.push(end),
            Err(error) => break error,
        }
        assert!(ends.len() < 1000, "the share has no limit");
    };
    assert_eq!(error, number(Errno::MFILE));
    let (welcome, descriptors) = greet(&mut world, &knock(&path), &hello).unwrap();
    assert_eq!((welcome.error, descriptors.len()), (number(Errno::MFILE), 0));
    ends.clear();
    first.look();
    world.run(0.1);
    assert_eq!(greet(&mut world, &knock(&path), &hello).unwrap().0.error, 0);
}

fn number(error: Errno) -> u32 {
    error.raw_os_error().unsigned_abs()
}

#[test]
fn listed_users_are_admitted() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP: listed_users_are_admitted: needs root");
    }
    let path = path();
    let mut world = World::new(serve_also(&path, &[54_321]).unwrap(), Config::default());
    // The kernel refuses users that are not on the access control list. If the file system has no such lists, the stack
    // refuses them.
    let error = |world: &mut World<Serve>, user, version, key| match knock_as(&path, user) {
        Ok(socket) => greet(world, &socket, &Hello { version, key }.to_bytes()).unwrap().0.error,
        Err(error) => number(error),
    };
    let (refused, new) = (number(Errno::ACCESS), [0; KEY]);
    for (user, expected) in [(54_322, refused), (54_321, 0)] {
        assert_eq!(error(&mut world, user, ASK, new), expected);
        assert_eq!(error(&mut world, user, VERSION, new), expected);
    }
    // An application belongs to one user.
    let process = Process::attach(&mut world, &path);
    let (before, key) = (world.app.counts().applications, process.welcome.key);
    assert_eq!(error(&mut world, 54_321, VERSION, key), 0);
    assert_eq!(world.app.counts().applications, before + 1, "the key of another user's is no key to that");
    assert_eq!(error(&mut world, 0, VERSION, process.welcome.key), 0);
}

#[test]
fn malformed_request_closes_only_its_socket() {
    let (mut world, path) = world();
    for bytes in [&b"nonsense"[..], &[0xff; Question::LEN], &[0; Question::LEN + 1]] {
        let process = Process::attach(&mut world, &path);
        send_with(process.socket.as_fd(), bytes, &[]);
        process.look();
        let answer = loop {
            world.turn();
            // The socket is closed in real time, not in the virtual time of the world.
            match receive(process.socket.as_fd(), &mut [0; 8]) {
                Err(Errno::AGAIN) => sleep(Duration::from_micros(100)),
                answer => break answer,
            }
        };
        assert!(matches!(answer, Ok((0, _)) | Err(Errno::CONNRESET)));
    }
    assert_eq!(world.app.counts().misused, 3);
    let process = Process::attach(&mut world, &path);
    for question in [
        Question::new(Call::Connect, 5, 0),
        Question::new(Call::Listen, 70_000, 0),
        Question::new(Call::Info, NONE, 0),
        Question::new(Call::Adopt, NONE, 0),
        Question::new(Call::Bind, NONE, 9),
    ] {
        assert_ne!(process.ask(&mut world, &question, &[]).0.error, 0, "{question:?}");
    }
    assert_eq!(process.ask(&mut world, &Question::new(Call::Segments, 9, 0), &[]).0.error, 0);
    let (answer, segments) = process.ask(&mut world, &Question::new(Call::Segments, 0, 0), &[]);
    assert_eq!((answer.error, segments.len() as u32), (0, process.welcome.segments));
}

#[test]
fn forked_child_gets_its_own_socket() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let child = process.fork(&mut world).unwrap();
    assert_eq!(child.welcome.key, process.welcome.key);
    assert_eq!(child.welcome.instance, process.welcome.instance);
    assert_ne!(child.welcome.owner, process.welcome.owner);
    assert_eq!(child.welcome.pid, std::process::id());
    let listener = child.listen(&mut world, 80, 1);
    // The child is this process again. Its previous entry is removed, and with it its locks.
    let counts = world.app.counts();
    assert_eq!((counts.applications, counts.processes, counts.sessions), (1, 1, 1));
    assert!(Owner::from_word(child.welcome.owner).is_some());

    // The end identifies its session.
    let adopt = Question::new(Call::Adopt, NONE, 0);
    let (answer, _) = child.ask(&mut world, &adopt, &[listener.fd.as_fd()]);
    assert_eq!((answer.error, answer.session), (0, listener.session));
    let other = Process::attach(&mut world, &path);
    let (answer, _) = other.ask(&mut world, &adopt, &[listener.fd.as_fd()]);
    assert_eq!(answer.error, Errno::BADF.raw_os_error() as u32, "of another application");
}

#[test]
fn child_is_identified_by_peer_credentials() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    // Another process, which the kernel identifies.
    let socket = process.socket_of_child(&mut world).unwrap();
    let hello = Hello { version: VERSION, key: process.welcome.key };
    let text: String = hello.to_bytes().iter().map(|byte| format!("\\{byte:03o}")).collect();
    let mut child = Command::new("sh");
    child.args(["-c", &format!("printf '{text}'; read end")]);
    let mut child = child.stdin(Stdio::piped()).stdout(socket.try_clone().unwrap()).spawn().unwrap();
    let (welcome, _) = hear(&mut world, &socket).unwrap();
    assert_eq!((welcome.error, world.app.counts().processes), (0, 2));
    // The child counts as ended when its process ends, although this process also holds its socket.
    drop(child.stdin.take());
    child.wait().unwrap();
    world.run(0.1);
    assert_eq!(world.app.counts().processes, 1);

    // Without the key the child cannot join.
    let socket = process.socket_of_child(&mut world).unwrap();
    let hello = Hello { version: VERSION, key: [7; KEY] };
    let (welcome, _) = greet(&mut world, &socket, &hello.to_bytes()).unwrap();
    assert_eq!(welcome.error, number(Errno::ACCESS));
}

#[test]
fn many_processes_attach_concurrently() {
    let (mut world, path) = world();
    // The number exceeds the limit of silent processes. All of them use the key of an application that does not exist
    // yet.
    let hello = Hello { version: VERSION, key: [5; KEY] }.to_bytes();
    let mut sockets = Vec::new();
    for _ in 0..60 {
        let socket = knock(&path);
        send_with(socket.as_fd(), &hello, &[]);
        sockets.push(socket);
        world.turn();
    }
    for socket in &sockets {
        let (welcome, _) = hear(&mut world, socket).unwrap();
        assert_eq!((welcome.error, welcome.key), (0, [5; KEY]));
    }
    assert_eq!(world.app.counts().applications, 1);
    // Excess silent processes are turned away, but not processes that are already waiting.
    let refused = world.app.counts().refused;
    let silent: Vec<_> = (0..40).map(|_| knock(&path)).collect();
    assert!(world.run_until(1, |world| world.app.counts().refused - refused == 8).is_some());
    // The sockets are closed in real time, not in the virtual time of the world.
    let is_closed = |socket: &OwnedFd, seconds| {
        let event = PollFd::from_borrowed_fd(socket.as_fd(), Bits::IN);
        poll(&mut [event], Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).unwrap() > 0
    };
    let (waiting, excess) = silent.split_at(32);
    assert!(excess.iter().all(|socket| is_closed(socket, 30)));
    assert!(!waiting.iter().any(|socket| is_closed(socket, 0)));
    world.run(2.0);
    let late = knock(&path);
    world.run(0.1);
    assert!(is_closed(&silent[0], 30), "it has been silent for long");
    assert!(!is_closed(&late, 0));
    assert_eq!(world.app.counts().refused - refused, 8);
}

#[test]
fn user_has_hundreds_of_applications() {
    let (mut world, path) = world_of_small(4 << 20);
    let processes: Vec<_> = (0..300).map(|_| Process::attach(&mut world, &path)).collect();
    assert_eq!(world.app.counts().applications, 300);
    // Events contain the number of their application.
    let listeners: Vec<_> =
        processes.iter().zip(8000..).map(|(process, port)| process.listen(&mut world, port, 1)).collect();
    for (number, port) in [(44, 8044), (299, 8299)] {
        world.connect(port);
        world.run(0.1);
        assert!(processes[number].accept(&listeners[number]).is_some(), "{number}");
    }
}

#[test]
fn applications_of_a_user_are_limited() {
    let path = path();
    // The maximum of 4,096 applications is divided among these users, root and the stack's own user.
    let users: Vec<u32> = (1..=2046).collect();
    let mut world = World::new(serve_also(&path, &users).unwrap(), Config::default());
    let hello = Hello { version: VERSION, key: [0; KEY] }.to_bytes();
    let first = [(); 2].map(|()| Process::attach(&mut world, &path));
    let (welcome, _) = greet(&mut world, &knock(&path), &hello).unwrap();
    assert_eq!(welcome.error, number(Errno::USERS));
    let again = Process::join(&mut world, &path, first[0].welcome.key);
    assert_eq!(again.welcome.error, 0, "another process of an application");
}

#[test]
fn a_sleeping_worker_wakes() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 1);
    let mut client = world.connect(80);
    world.run(0.1);
    let mut end = process.accept(&listener).unwrap();
    process.read(&mut end, 1);
    world.run(0.1);
    let is_woken = |world: &mut World<_>| {
        let Some(wakes) = App::wakes(&mut world.app) else { return false };
        let woken = match wakes.arm() {
            Wake::Now => true,
            Wake::Event(fd) => bits(fd).contains(Bits::IN),
            other => panic!("{other:?}"),
        };
        if woken {
            wakes.disarm();
        }
        woken
    };
    assert!(!is_woken(&mut world), "nothing has happened");
    // The application is armed: the next mark wakes the worker.
    assert_eq!(process.write(&mut end, b"x"), 1);
    assert!(is_woken(&mut world));
    world.run(0.1);
    assert_eq!(world.read(&mut client, 10), b"x");
    assert_eq!(world.app.counts().woken, 1);
    // A mark was set just before.
    process.mark(&end);
    assert!(is_woken(&mut world));
    world.run(0.1);
    // Events of the kernel: a message, a close, a new process.
    assert!(!is_woken(&mut world));
    send_with(process.socket.as_fd(), &listen(81, 1).to_bytes(), &[]);
    assert!(is_woken(&mut world));
    world.run(0.1);
    assert!(!is_woken(&mut world));
    drop(end);
    assert!(is_woken(&mut world));
    world.run(0.1);
    assert!(!is_woken(&mut world));
    let _socket = knock(&path);
    assert!(is_woken(&mut world));
}

#[test]
fn connections_per_application_are_limited() {
    let (mut world, path) = world_of_few(5);
    let greedy = Process::attach(&mut world, &path);
    let listener = greedy.listen(&mut world, 80, 16);
    let clients: Vec<_> = (0..5).map(|_| world.connect(80)).collect();
    world.run(1.0);
    let mut accepted: Vec<_> = std::iter::from_fn(|| greedy.accept(&listener)).collect();
    assert_eq!((clients.len(), accepted.len()), (5, 3), "a listener counts as two");
    let refused = Some(Errno::NOBUFS.raw_os_error() as u32);
    for kind in [1, 2] {
        assert_eq!(greedy.open(&mut world, &bind(kind, "10.0.0.1:0".parse().unwrap())).err(), refused);
    }
    assert_eq!(greedy.open(&mut world, &connect_to("10.0.0.2:9".parse().unwrap())).err(), refused);
    assert_eq!(greedy.open(&mut world, &listen(81, 16)).err(), refused);
    // Another application has a separate limit.
    let other = Process::attach(&mut world, &path);
    let theirs = other.listen(&mut world, 81, 16);
    world.connect(81);
    world.run(1.0);
    assert!(other.accept(&theirs).is_some());
    // An ended session no longer counts: the connection that was refused tries again.
    let slot = accepted[0].slot();
    slot.wishes.options.store(wish::RESET, Ordering::Release);
    drop(accepted.remove(0));
    world.run(10.0);
    assert!(greedy.accept(&listener).is_some());
    assert_eq!(greedy.open(&mut world, &listen(82, 16)).err(), refused);
}
