//! Clients on the kernel's stack that request one path repeatedly while the server is changed.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{self, sockopt::set_socket_recv_buffer_size};

use super::{Stage, TIMEOUT};

/// A connection to an HTTP server.
pub(super) struct Client(TcpStream);

impl Client {
    pub(super) fn connect(to: SocketAddr) -> io::Result<Self> {
        Self::new(TcpStream::connect_timeout(&to, TIMEOUT)?)
    }

    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self(stream))
    }

    /// Connects with a small receive buffer.
    pub(super) fn connect_slow(to: SocketAddr) -> io::Result<Self> {
        let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None)?;
        set_socket_recv_buffer_size(&socket, 4096)?;
        net::connect(&socket, &to)?;
        Self::new(socket.into())
    }

    /// Sets the receive buffer to an ordinary size.
    pub(super) fn speed_up(&self) -> io::Result<()> {
        Ok(set_socket_recv_buffer_size(&self.0, 1 << 20)?)
    }

    /// Returns the body of an answer, or `None` if the server closed the connection before it answered.
    pub(super) fn get(&mut self, path: &str, fields: &str) -> io::Result<Option<Vec<u8>>> {
        match self.ask(path, fields) {
            Err(error) if ended(&error) => Ok(None),
            asked => asked.and_then(|()| self.answer()),
        }
    }

    pub(super) fn ask(&mut self, path: &str, fields: &str) -> io::Result<()> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        self.0.write_all(request.as_bytes())
    }

    /// Like [`Client::get`], for a path that was already requested.
    pub(super) fn answer(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut answer = Vec::new();
        let mut buffer = vec![0; 65_536];
        loop {
            let read = match self.0.read(&mut buffer) {
                Err(error) if answer.is_empty() && ended(&error) => 0,
                read => read?,
            };
            answer.extend_from_slice(&buffer[..read]);
            if let Some(body) = body(&answer)? {
                return Ok(Some(body.to_vec()));
            }
            if read == 0 {
                let begun = !answer.is_empty();
                return if begun { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(None) };
            }
        }
    }
}

fn ended(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Returns the body of a complete answer.
fn body(answer: &[u8]) -> io::Result<Option<&[u8]>> {
    let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
    let head = String::from_utf8_lossy(&answer[..end]);
    if !head.starts_with("HTTP/1.1 200 ") {
        return Err(io::Error::other(head.into_owned()));
    }
    let len = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")?.parse().ok());
    let len: usize = len.ok_or_else(|| io::Error::other("no length"))?;
    let body = &answer[end + 4..];
    Ok((body.len() >= len).then(|| &body[..len]))
}

/// Counters of the clients.
#[derive(Default)]
pub(super) struct Load {
    answered: AtomicU64,
    over: AtomicBool,
}

impl Load {
    /// Waits for `answers` more answers.
    pub(super) fn more(&self, answers: u64) {
        let mut last = self.answered.load(Ordering::Relaxed);
        let (wanted, mut moved) = (last + answers, Instant::now());
        while last < wanted {
            assert!(!self.over.load(Ordering::Relaxed), "a client has failed");
            assert!(moved.elapsed() < TIMEOUT, "no answers any more, after {last}");
            thread::sleep(Duration::from_millis(5));
            let now = self.answered.load(Ordering::Relaxed);
            if now != last {
                (last, moved) = (now, Instant::now());
            }
        }
    }

    fn ask(&self, to: SocketAddr, path: &str, expected: &[u8], kept: bool) -> io::Result<()> {
        let mut client = None;
        while !self.over.load(Ordering::Relaxed) {
            let mut own = match client.take() {
                Some(client) => client,
                None => Client::connect(to)?,
            };
            match own.get(path, if kept { "" } else { "Connection: close\r\n" })? {
                Some(body) if body == expected => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                    client = kept.then_some(own);
                }
                Some(body) => return Err(io::Error::other(format!("{} other bytes", body.len()))),
                // A server may close an idle connection at any time.
                None if kept => {}
                None => return Err(io::Error::other("ended without an answer")),
            }
        }
        Ok(())
    }
}

/// Stops the clients, also if a test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `body` while four clients request a path. Two of them keep their connections. Each answer is compared, and no
/// request may fail.
pub(super) fn under_load<T>(
    stage: &Stage,
    to: SocketAddr,
    path: &str,
    expected: &[u8],
    body: impl FnOnce(&Load) -> T,
) -> T {
    let load = Load::default();
    let load = &load;
    thread::scope(|scope| {
        for kept in [false, true, false, true] {
            scope.spawn(move || {
                let _end = End(&load.over);
                let asked = stage.netns.within(|| Ok(load.ask(to, path, expected, kept)));
                asked.unwrap().unwrap_or_else(|error| panic!("kept {kept}: {error}"));
            });
        }
        let _end = End(&load.over);
        body(load)
    })
}
