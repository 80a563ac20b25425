use super::*;
use crate::message::VringFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

fn pair() -> (Connection, Connection) {
    let (a, b) = UnixStream::pair().unwrap();
    (Connection::new(a.into()).unwrap(), Connection::new(b.into()).unwrap())
}

fn eventfds(count: usize) -> Vec<OwnedFd> {
    let new = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    (0..count).map(|_| new()).collect()
}

/// A separate path for each test and process.
fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("offcore-{}-{name}.sock", std::process::id()))
}

#[test]
fn message_is_assembled_from_single_bytes() {
    let (a, mut b) = pair();
    let fd = eventfds(1);
    let (bytes, fds) = Request::SetVringKick(VringFd { index: 1, fd: Some(fd[0].as_fd()) }).encode(true);
    for (at, byte) in bytes.iter().enumerate() {
        assert!(b.receive().unwrap().is_none(), "whole after {at} bytes");
        a.send(&[*byte], if at == 0 { &fds } else { &[] }).unwrap();
    }
    let received = b.receive().unwrap().unwrap();
    assert!(received.header.need_reply);
    assert!(matches!(received.request(), Ok(Request::SetVringKick(VringFd { index: 1, fd: Some(_) }))));
    assert!(b.receive().unwrap().is_none());
}

#[test]
fn close_is_detected() {
    let (a, mut b) = pair();
    assert!(b.is_alive());
    drop(a);
    assert!(!b.is_alive());
    assert!(matches!(b.receive(), Err(ConnectionError::Closed)));
    assert!(matches!(b.send(&[0], &[]), Err(ConnectionError::Closed)));
}

#[test]
fn too_many_descriptors_end_the_connection() {
    let fds = eventfds(MAX_FDS + 8);
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let bytes = Request::<BorrowedFd<'_>>::SetOwner.encode(false).0;
    let (a, mut b) = pair();
    a.send(&bytes, &borrowed).unwrap();
    let found = b.receive();
    assert!(matches!(found, Err(ConnectionError::TooManyFds { found }) if found == MAX_FDS + 8), "{found:?}");
    // The same number of descriptors, spread over the pieces of one message.
    let (a, mut b) = pair();
    for byte in &bytes[..2] {
        a.send(&[*byte], &borrowed[..30]).unwrap();
    }
    assert!(matches!(b.receive(), Err(ConnectionError::TooManyFds { found: 60 })));
}

#[test]
fn send_to_unread_socket_times_out() {
    let (a, _b) = pair();
    let sent = a.send(&vec![0; 16 << 20], &[]);
    assert!(matches!(sent, Err(ConnectionError::SendTimedOut { .. })), "{sent:?}");
}

const OPEN: SocketAccess = SocketAccess { owner: None, group: None, mode: None };

#[test]
fn socket_has_configured_owner_and_mode() {
    use std::os::unix::fs::MetadataExt;
    let path = path("whose");
    let is_root = rustix::process::geteuid().is_root();
    let (owner, group) = if is_root { (Some(54_321), Some(54_322)) } else { (None, None) };
    let listener =
        Listener::bind(&path, SocketAccess { owner, group, mode: Some(0o640) }, Duration::ZERO).unwrap();
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o640);
    assert!(!is_root || (found.uid(), found.gid()) == (54_321, 54_322));
    let client = connect(&path);
    assert_eq!(peer_user(&client.unwrap()), Ok(rustix::process::geteuid().as_raw()));
    drop(listener);
    assert!(!path.exists());
    if !is_root {
        let error =
            Listener::bind(&path, SocketAccess { owner: Some(0), ..OPEN }, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("chown (root only"), "{error}");
        assert!(!path.exists(), "nothing is left");
    }
}

#[test]
fn socket_mode_ignores_umask() {
    use std::os::unix::fs::PermissionsExt;
    let path = path("umask");
    // Other tests of this process create files meanwhile. Their permissions are not checked.
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    let listener = Listener::bind(&path, OPEN, Duration::ZERO);
    rustix::process::umask(umask);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(listener);
}

#[test]
fn socket_swap_race_changes_no_file() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use rustix::fs::{CWD, RenameFlags, renameat_with};
    let [path, victim, link] = ["swapped", "victim", "link"].map(path);
    std::fs::write(&victim, "").unwrap();
    std::fs::set_permissions(&victim, PermissionsExt::from_mode(0o600)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let _ = renameat_with(CWD, &path, CWD, &link, RenameFlags::EXCHANGE);
            }
        });
        for _ in 0..500 {
            let _ = (std::fs::remove_file(&path), std::fs::remove_file(&link));
            let _ = symlink(&victim, &link);
            let _ = Listener::bind(&path, SocketAccess { mode: Some(0o666), ..OPEN }, Duration::ZERO);
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(std::fs::metadata(&victim).unwrap().permissions().mode() & 0o777, 0o600);
    for left in [path, victim, link] {
        let _ = std::fs::remove_file(left);
    }
}

#[test]
fn path_in_use_is_refused() {
    let path = path("in-use");
    let listener = Listener::bind(&path, OPEN, Duration::ZERO).unwrap();
    let second = Listener::bind(&path, OPEN, Duration::ZERO).unwrap_err();
    assert!(matches!(second, SocketError::InUse { .. }));
    assert!(second.to_string().contains("a process is listening on it"), "{second}");
    drop(listener);
    assert!(!path.exists(), "removed with its listener");

    // A killed process leaves its socket behind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&path, OPEN, Duration::ZERO).unwrap();
    assert!(listener.accept().unwrap().is_none());
    let _client = connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());

    // Another process's socket at the path is not removed.
    std::fs::remove_file(&path).unwrap();
    let theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(theirs);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn non_socket_paths_are_refused() {
    let path = path("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(Listener::bind(&path, OPEN, Duration::ZERO), Err(SocketError::NotASocket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    let long = PathBuf::from("/tmp").join("x".repeat(120));
    assert!(matches!(
        Listener::bind(&long, OPEN, Duration::ZERO),
        Err(SocketError::TooLong { found: 125, .. })
    ));
    assert!(matches!(
        Listener::bind(&PathBuf::from("/nowhere/x.sock"), OPEN, Duration::ZERO),
        Err(SocketError::System { .. })
    ));
    assert!(connect(&PathBuf::from("/nowhere/x.sock")).is_err());
}
