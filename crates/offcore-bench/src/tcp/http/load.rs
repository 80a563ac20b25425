//! wrk, and a client that compares what it gets.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use super::server::{Server, Site};
use super::{Cell, How, Window};
use crate::peer::netns::{Netns, checked};
use crate::peer::tempdir::TempDir;
use crate::tcp::link::STALLED;

/// Has wrk say in one line what it knows.
const SCRIPT: &str = "\
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(\"wrk %d %d %d %d %d %d %d %d %d %d\\n\", summary.duration, summary.requests, summary.bytes,
    e.connect, e.read, e.write, e.status, e.timeout, latency:percentile(50), latency:percentile(99)))
end
";
/// A client's rest between two rounds of requests, and its connections.
const REST: Duration = Duration::from_millis(50);
const COMPARED: usize = 8;

/// What a cell's windows are made with.
#[derive(Debug)]
pub(super) struct Load<'a> {
    cell: Cell,
    /// Where the files are, for requests.
    place: &'static str,
    content: &'a [u8],
    script: PathBuf,
    far: &'a Netns,
    lcore: usize,
    /// Seconds of a window.
    seconds: u64,
}

impl<'a> Load<'a> {
    pub(super) fn new(
        cell: Cell,
        site: &'a Site<'_>,
        dir: &TempDir,
        (far, lcore): (&'a Netns, usize),
        seconds: u64,
    ) -> Result<Self> {
        let script = dir.file("wrk.lua");
        fs::write(&script, SCRIPT).context("wrk's script")?;
        let place = match cell.how {
            How::Read => "/read",
            How::NoPush => "/nopush",
            How::SendFile | How::Close => "",
        };
        Ok(Self { cell, place, content: site.content(cell.size), script, far, lcore, seconds })
    }

    /// So many seconds of requests to `server`.
    ///
    /// # Errors
    /// When one is not answered, or an answer is another one.
    pub(super) fn window(&self, server: &Server) -> Result<Window> {
        let over = AtomicBool::new(false);
        let (used, before) = (server.used()?, reaped()?);
        let (said, compared) = thread::scope(|scope| {
            let client = scope.spawn(|| self.far.within(|| self.compare(server.address, &over)));
            let said = self.wrk(server.address);
            over.store(true, Ordering::Relaxed);
            let compared = client.join().map_err(|_| anyhow!("a client has panicked"))?;
            Ok::<_, anyhow::Error>((said, compared))
        })?;
        let (server_used, client) = (server.used()? - used, reaped()? - before);
        let (compared, answer) = compared.with_context(|| format!("a client\n{}", server.tail()))?;
        let window = self.read(&said.with_context(|| server.tail())?, answer)?;
        Ok(Window { server: server_used, client, compared, ..window })
    }

    fn wrk(&self, address: SocketAddr) -> Result<String> {
        let mut wrk = self.far.command("taskset");
        wrk.args(["-c", &self.lcore.to_string(), "wrk", "-t1", "--timeout", "10s"]);
        wrk.args([format!("-c{}", self.cell.connections), format!("-d{}s", self.seconds)]);
        wrk.arg("-s").arg(&self.script);
        if self.cell.how == How::Close {
            wrk.args(["-H", "Connection: close"]);
        }
        checked(wrk.arg(format!("http://{address}{}/wrk-{}", self.place, self.cell.size)))
    }

    /// What wrk's line says. `answer` is how long an answer is, with its head.
    fn read(&self, said: &str, answer: usize) -> Result<Window> {
        let line = said.lines().find_map(|line| line.strip_prefix("wrk ")).unwrap_or_default();
        let words: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
        let &[micros, requests, bytes, connect, read, write, status, timeout, p50, p99] = &words[..] else {
            return Err(anyhow!("wrk said no numbers:\n{said}"));
        };
        let errors = [connect, read, write, status, timeout];
        ensure!(
            errors == [0; 5],
            "errors of wrk (connect, read, write, status, timeout): {errors:?}\n{said}"
        );
        ensure!(requests > 0, "no request was answered");
        // Those that were under way at the end are in part.
        let (least, most) = (requests, requests + self.cell.connections as u64);
        let [least, most] = [least, most].map(|answers| answers * answer as u64);
        ensure!(
            (least..=most).contains(&bytes),
            "{requests} answers of {answer} bytes are {bytes} bytes, expected {least} to {most}"
        );
        let (seconds, p50, p99) = (micros as f64 / 1e6, p50 as f64, p99 as f64);
        Ok(Window { requests, seconds, p50, p99, server: 0.0, client: 0.0, compared: 0 })
    }

    /// Asks on some connections now and then, and compares every byte, until it is over. How many answers, and how long one is
    /// with its head.
    fn compare(&self, address: SocketAddr, over: &AtomicBool) -> Result<(u64, usize)> {
        offcore_stats::lcore::pin(self.lcore)?;
        let (mut compared, mut len, mut kept) = (0, 0, Vec::new());
        while !over.load(Ordering::Relaxed) || compared == 0 {
            while kept.len() < COMPARED {
                kept.push(connect(address)?);
            }
            kept.iter_mut().try_for_each(|stream| self.ask(stream))?;
            for stream in &mut kept {
                let answer = self.answer(stream)?;
                ensure!(len == 0 || len == answer, "answers of {len} bytes, and one of {answer}");
                (len, compared) = (answer, compared + 1);
            }
            if self.cell.how == How::Close {
                kept.clear();
            }
            thread::sleep(REST);
        }
        Ok((compared, len))
    }

    fn ask(&self, stream: &mut TcpStream) -> Result<()> {
        let closes = if self.cell.how == How::Close { "Connection: close\r\n" } else { "" };
        let Cell { size, .. } = self.cell;
        write!(stream, "GET {}/compared-{size} HTTP/1.1\r\nHost: a\r\n{closes}\r\n", self.place)
            .context("a request")
    }

    /// How long the answer is, with its head.
    fn answer(&self, stream: &mut TcpStream) -> Result<usize> {
        let mut answer = Vec::with_capacity(self.content.len() + 4096);
        let mut buffer = vec![0; 64 << 10];
        loop {
            let n = stream.read(&mut buffer).context("an answer")?;
            ensure!(n > 0, "the server closed after {} bytes of an answer", answer.len());
            answer.extend_from_slice(&buffer[..n]);
            let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { continue };
            let body = &answer[end + 4..];
            if body.len() >= self.content.len() {
                let head = String::from_utf8_lossy(&answer[..end]);
                ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
                ensure!(body == self.content, "the file of {} bytes has other ones", self.cell.size);
                return Ok(answer.len());
            }
        }
    }
}

/// Seconds of this process's children that have ended: of wrk, while nothing else ends.
fn reaped() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/stat").context("/proc/self/stat")?;
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    // cutime and cstime (proc_pid_stat(5)).
    let ticks: u64 = fields.skip(13).take(2).map_while(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream =
        TcpStream::connect_timeout(&address, STALLED).with_context(|| format!("connecting to {address}"))?;
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_write_timeout(Some(STALLED))?;
    Ok(stream)
}
