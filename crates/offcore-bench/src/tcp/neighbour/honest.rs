//! The honest clients: each repeatedly fetches a file, each time on a new connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::setpriority_process;

use crate::peer::process::TIMEOUT;

/// Number of concurrent clients.
pub(super) const CLIENTS: usize = 4;
/// Nice value of nginx and of its clients. It reduces the time that hostile programs take from them on their core.
/// Hostile peers need that time for their attacks.
pub(super) const NICE: i32 = -20;
/// Maximum time of a request without progress.
const LONGEST: Duration = Duration::from_secs(2);

/// Clients that fetch a file.
#[derive(Debug)]
pub(super) struct Client<'a> {
    pub(super) address: SocketAddr,
    pub(super) name: String,
    pub(super) content: &'a [u8],
    /// Length of a window.
    pub(super) window: Duration,
    /// Nice value of the clients.
    pub(super) nice: i32,
}

/// The result of a window.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// Answers per second of all clients together.
    pub(super) rate: f64,
    /// Duration of each request, from `connect` to the end of the stream.
    pub(super) latencies: Vec<Duration>,
    /// Number of requests without a complete answer.
    pub(super) failed: u64,
}

impl Window {
    pub(super) fn answers(&self) -> u64 {
        self.latencies.len() as u64
    }
}

/// Returns the latency in nanoseconds that the given share of the requests of all windows did not exceed. A failed
/// request counts as the maximum time without progress.
pub(super) fn percentile(windows: &[Window], share: f64) -> Option<f64> {
    let failed = windows.iter().map(|window| window.failed as usize).sum();
    let answers = windows.iter().flat_map(|window| &window.latencies);
    let mut all: Vec<_> = answers.chain(std::iter::repeat_n(&LONGEST, failed)).collect();
    all.sort();
    let last = all.len().checked_sub(1)?;
    all.get((last as f64 * share).round() as usize).map(|latency| latency.as_secs_f64() * 1e9)
}

impl Client<'_> {
    /// # Errors
    /// If no answer arrives for 30 seconds.
    pub(super) fn wait_for_server(&self) -> Result<()> {
        let since = Instant::now();
        while self.fetch()?.is_none() {
            ensure!(since.elapsed() < TIMEOUT, "{} does not answer", self.address);
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Fetches the file with all clients until the window ends.
    ///
    /// # Errors
    /// If an answer is not the file.
    pub(super) fn window(&self) -> Result<Window> {
        thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| self.client())).collect();
            let mut window = Window::default();
            for client in clients {
                let part = client.join().map_err(|_| anyhow!("a client has panicked"))??;
                window.rate += part.rate;
                window.latencies.extend(part.latencies);
                window.failed += part.failed;
            }
            Ok(window)
        })
    }

    /// Runs one client. Its rate includes the time of a request that lasts longer than the window.
    fn client(&self) -> Result<Window> {
        // Without a process ID, the value applies to the calling thread.
        setpriority_process(None, self.nice).context("the nice value of a client")?;
        let (start, mut window) = (Instant::now(), Window::default());
        while start.elapsed() < self.window {
            match self.fetch()? {
                Some(latency) => window.latencies.push(latency),
                None => window.failed += 1,
            }
        }
        window.rate = window.latencies.len() as f64 / start.elapsed().as_secs_f64();
        Ok(window)
    }

    /// Returns the duration of the request, or `None` without a complete answer.
    fn fetch(&self) -> Result<Option<Duration>> {
        let (start, mut answer) = (Instant::now(), Vec::with_capacity(self.content.len() + 1024));
        let is_complete = self.answer(&mut answer).is_ok();
        let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
        let (head, body) = answer.split_at(end + 4);
        ensure!(self.content.starts_with(body), "other bytes than the file's in {} bytes", body.len());
        let is_whole = is_complete && head.starts_with(b"HTTP/1.1 200 ") && body.len() == self.content.len();
        Ok(is_whole.then(|| start.elapsed()))
    }

    /// Fetches the file. After an error, `answer` has the bytes before it.
    fn answer(&self, answer: &mut Vec<u8>) -> std::io::Result<usize> {
        let mut stream = TcpStream::connect_timeout(&self.address, LONGEST)?;
        stream.set_read_timeout(Some(LONGEST))?;
        stream.set_write_timeout(Some(LONGEST))?;
        let request = format!("GET /{} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", self.name);
        stream.write_all(request.as_bytes())?;
        stream.read_to_end(answer)
    }
}
