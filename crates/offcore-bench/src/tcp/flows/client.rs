//! A client that fetches a file on many connections.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Window;
use crate::tcp::link::STALLED;

/// Number of file descriptors reserved for purposes other than connections.
const OTHERS: u64 = 100;

/// Flows from one server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load<'a> {
    pub(super) address: SocketAddr,
    /// Name of the file.
    pub(super) name: &'a str,
    pub(super) content: &'a [u8],
    pub(super) flows: usize,
}

/// A connection.
#[derive(Debug)]
struct Flow {
    stream: TcpStream,
    since: Instant,
    is_asked: bool,
    /// Head of the answer, and number of received bytes of the file.
    head: Vec<u8>,
    body: Option<usize>,
}

impl Load<'_> {
    /// Runs all flows, `at_once` at a time.
    ///
    /// # Errors
    /// If an answer is not the file, or without progress for 30 seconds.
    pub(super) fn run(&self, at_once: usize) -> Result<Window> {
        let limit = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let wanted = at_once as u64 + OTHERS;
        ensure!(wanted <= limit, "{limit} descriptors (ulimit -n), expected {wanted}");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("epoll")?;
        let (mut open, mut begun, mut done) = (HashMap::new(), 0, Vec::with_capacity(self.flows));
        let (start, mut moved) = (Instant::now(), Instant::now());
        let mut buffer = vec![0; 64 << 10];
        while done.len() < self.flows {
            while begun < self.flows && open.len() < at_once {
                open.insert(begun as u64, self.open(&epoll, begun as u64)?);
                begun += 1;
            }
            let mut events = Vec::with_capacity(256);
            let wait = Timespec { tv_sec: 1, tv_nsec: 0 };
            match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("epoll"),
            }
            ensure!(
                !events.is_empty() || moved.elapsed() < STALLED.max(Duration::from_secs(30)),
                "{} of {} flows have ended, then no progress",
                done.len(),
                self.flows
            );
            for event in events {
                moved = Instant::now();
                let number = event.data.u64();
                let Some(flow) = open.get_mut(&number) else { continue };
                if self.serve(flow, &mut buffer).with_context(|| format!("flow {number}"))? {
                    done.push(flow.since.elapsed().as_secs_f64());
                    open.remove(&number);
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        done.sort_by(f64::total_cmp);
        Ok(Window { seconds, flows: done })
    }

    fn open(&self, epoll: &impl std::os::fd::AsFd, number: u64) -> Result<Flow> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).context("a socket")?;
        let since = Instant::now();
        match connect(&socket, &self.address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error).context("connect"),
        }
        let wanted = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(epoll, &socket, epoll::EventData::new_u64(number), wanted).context("epoll")?;
        Ok(Flow { stream: socket.into(), since, is_asked: false, head: Vec::new(), body: None })
    }

    /// Sends the request and compares received bytes. Returns whether the flow has ended.
    fn serve(&self, flow: &mut Flow, buffer: &mut [u8]) -> Result<bool> {
        if !flow.is_asked {
            let request = format!("GET /{} HTTP/1.0\r\nHost: a\r\n\r\n", self.name);
            match flow.stream.write(request.as_bytes()) {
                Ok(len) => ensure!(len == request.len(), "a request was written in part"),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("a request"),
            }
            flow.is_asked = true;
        }
        loop {
            let len = match flow.stream.read(buffer) {
                Ok(0) => {
                    let found = flow.body.unwrap_or(0);
                    ensure!(found == self.content.len(), "{found} bytes, expected {}", self.content.len());
                    return Ok(true);
                }
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("an answer"),
            };
            flow.take(&buffer[..len], self.content)?;
        }
    }
}

impl Flow {
    /// Compares bytes of the answer.
    fn take(&mut self, bytes: &[u8], content: &[u8]) -> Result<()> {
        let Some(body) = &mut self.body else {
            self.head.extend_from_slice(bytes);
            let Some(end) = self.head.windows(4).position(|bytes| bytes == b"\r\n\r\n") else {
                return Ok(());
            };
            let rest = self.head.split_off(end + 4);
            let head = String::from_utf8_lossy(&self.head);
            ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
            self.body = Some(0);
            return self.take(&rest, content);
        };
        let expected = content.get(*body..*body + bytes.len()).unwrap_or_default();
        ensure!(bytes == expected, "other bytes than the file's after byte {body}");
        *body += bytes.len();
        Ok(())
    }
}
