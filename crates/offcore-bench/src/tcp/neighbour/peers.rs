//! Hostile peers: they open connections, send a few bytes, and read nothing. They replace connections that end.

use std::collections::HashMap;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections that are opened in a step, and the length of a step: at most 10,000 a second.
const STEP: usize = 50;
const PAUSE: Duration = Duration::from_millis(5);
/// The number of descriptors for other things than connections.
const OTHERS: u64 = 1000;

/// The connections of hostile peers.
#[derive(Clone, Debug)]
pub(super) struct Peers {
    /// The addresses that they come from.
    pub(super) from: Vec<IpAddr>,
    /// The addresses that they connect to.
    pub(super) to: Vec<SocketAddr>,
    pub(super) count: usize,
    /// Bytes that each sends.
    pub(super) request: Vec<u8>,
    /// Bytes of the receive buffer.
    pub(super) receives: usize,
}

/// A thread that holds these connections.
#[derive(Debug)]
pub(super) struct Thread {
    over: Arc<AtomicBool>,
    open: Arc<AtomicUsize>,
    handle: JoinHandle<Result<()>>,
}

impl Thread {
    pub(super) fn start(peers: Peers) -> Self {
        let (over, open) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (its_over, its_open) = (Arc::clone(&over), Arc::clone(&open));
        let handle = thread::spawn(move || peers.hold(&its_over, &its_open));
        Self { over, open, handle }
    }

    /// Waits until `count` connections have been opened, or until it has lasted `longest`.
    pub(super) fn wait(&self, count: usize, longest: Duration) {
        let since = Instant::now();
        while self.open.load(Ordering::Relaxed) < count
            && since.elapsed() < longest
            && !self.handle.is_finished()
        {
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// # Errors
    /// When connections could not be opened.
    pub(super) fn stop(self) -> Result<()> {
        self.over.store(true, Ordering::Relaxed);
        self.handle.join().map_err(|_| anyhow!("a thread of hostile peers has panicked"))?
    }
}

impl Peers {
    fn hold(&self, over: &AtomicBool, opened: &AtomicUsize) -> Result<()> {
        let wanted = self.count as u64 + OTHERS;
        let maximum = getrlimit(Resource::Nofile).maximum.map(|most| most.max(wanted));
        let limit = Rlimit { current: maximum, maximum };
        setrlimit(Resource::Nofile, limit).with_context(|| format!("{} descriptors", self.count))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).context("epoll")?;
        let (mut open, mut number) = (HashMap::new(), 0);
        while !over.load(Ordering::Relaxed) {
            for _ in 0..STEP.min(self.count - open.len()) {
                let stream = self.open(&epoll, number).context("a hostile peer")?;
                open.insert(number as u64, (stream, false));
                number += 1;
            }
            opened.store(number, Ordering::Relaxed);
            let mut events = Vec::with_capacity(1024);
            let wait = Timespec { tv_sec: 0, tv_nsec: 0 };
            match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("epoll"),
            }
            for event in events {
                let (number, flags) = (event.data.u64(), event.flags);
                let Some((stream, is_sent)) = open.get_mut(&number) else { continue };
                let ends = epoll::EventFlags::HUP | epoll::EventFlags::ERR | epoll::EventFlags::RDHUP;
                let mut sends = || std::mem::replace(is_sent, true) || stream.write(&self.request).is_ok();
                if flags.intersects(ends) || !sends() {
                    open.remove(&number);
                }
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn open(&self, epoll: &impl std::os::fd::AsFd, number: usize) -> Result<TcpStream> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).context("a socket")?;
        sockopt::set_socket_recv_buffer_size(&socket, self.receives)?;
        sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
        bind(&socket, &SocketAddr::new(self.from[number % self.from.len()], 0)).context("bind")?;
        match connect(&socket, &self.to[number % self.to.len()]) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error).context("connect"),
        }
        let wanted = epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(epoll, &socket, epoll::EventData::new_u64(number as u64), wanted).context("epoll")?;
        Ok(socket.into())
    }
}
