//! The load: wrk, and a client that compares the received bytes.

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
use crate::tcp::cores::{Cores, seconds_of, ticks};
use crate::tcp::link::STALLED;

/// A script that makes wrk print its results in one line, after the number of its connections.
///
/// wrk invents latencies for requests that it would have sent while it waited for an answer (`stats_correct` in its
/// stats.c). The script removes them: from the longest latency down, the rest of each count was measured.
const SCRIPT: &str = "
done = function(summary, latency, requests)
  local stat = io.open('/proc/self/stat'):read('*a'):match('%) (.*)')
  local fields, counts, values, measured = {}, {}, {}, 0
  for field in stat:gmatch('%S+') do fields[#fields + 1] = field end
  for i = 1, #latency do
    local value, count = latency(i)
    values[i], counts[value], measured = value, count, measured + count
  end
  local each = math.floor(summary.requests / connections)
  local usual = each > 0 and math.floor(summary.duration / each) or math.huge
  for i = #values, 1, -1 do
    local value = values[i] - usual
    while value > usual do
      counts[value], measured = (counts[value] or 0) - counts[values[i]], measured - counts[values[i]]
      value = value - usual
    end
  end
  local percentile = function(share)
    local rank, sum = math.floor(share * measured + 0.5), 0
    for i = 1, #values do
      sum = sum + counts[values[i]]
      if sum >= rank then return values[i] end
    end
    return 0
  end
  local e = summary.errors
  io.write(string.format('wrk %d %d %d %d %d %d %d %d %d %d %d %d\\n', summary.duration, summary.requests, summary.bytes,
    e.connect, e.read, e.write, e.status, e.timeout, fields[12] + fields[13], measured, percentile(0.5), percentile(0.99)))
end
";
/// Pause of the comparing client between two rounds of requests, and number of its connections.
const REST: Duration = Duration::from_millis(50);
const COMPARED: usize = 8;

/// Parameters of a cell's windows.
#[derive(Debug)]
pub(super) struct Load<'a> {
    cell: Cell,
    /// Path prefix of the files in requests.
    place: &'static str,
    content: &'a [u8],
    script: PathBuf,
    far: &'a Netns,
    lcore: usize,
    /// Length of a window in seconds.
    seconds: u64,
}

impl<'a> Load<'a> {
    pub(super) fn new(
        cell: Cell,
        site: &'a Site<'_>,
        dir: &TempDir,
        far: &'a Netns,
        lcore: usize,
        seconds: u64,
    ) -> Result<Self> {
        let script = dir.file("wrk.lua");
        let text = format!("local connections = {}\n{SCRIPT}", cell.connections);
        fs::write(&script, text).context("wrk's script")?;
        let place = match cell.how {
            How::Read => "/read",
            How::Push => "/push",
            How::SendFile | How::Close => "",
        };
        Ok(Self { cell, place, content: site.content(cell.size), script, far, lcore, seconds })
    }

    /// Runs uncounted seconds of requests to `server`, in which files are read and every connection is served.
    ///
    /// # Errors
    /// As for [`Load::window`], and if a connection is not served.
    pub(super) fn first(&self, server: &Server) -> Result<()> {
        let over = AtomicBool::new(false);
        let served = thread::scope(|scope| {
            let watcher = scope.spawn(|| self.watch(server, &over));
            let window = self.window(server);
            over.store(true, Ordering::Relaxed);
            window.and(watcher.join().map_err(|_| anyhow!("a watcher has panicked"))?)
        })?;
        let Cell { connections, .. } = self.cell;
        ensure!(served >= connections, "{served} of {connections} connections had an answer");
        Ok(())
    }

    /// Returns the number of wrk's connections that have received an answer: the maximum over all samples.
    fn watch(&self, server: &Server, over: &AtomicBool) -> Result<usize> {
        // Connections that are closed after each answer rarely appear in a sample, and wrk counts all of them.
        let (connections, mut most) = (self.cell.connections, 0);
        if self.cell.how == How::Close {
            return Ok(connections);
        }
        while !over.load(Ordering::Relaxed) && most < connections {
            thread::sleep(REST);
            let filter = ["-tinHO", "state", "established", "dst", &server.address.to_string()];
            let sockets = self.far.run("ss", &filter)?;
            most = most.max(sockets.lines().filter(|line| line.contains(" bytes_received:")).count());
        }
        Ok(most)
    }

    /// Runs a window of requests to `server`.
    ///
    /// # Errors
    /// If a request is not answered, or an answer is wrong.
    pub(super) fn window(&self, server: &Server) -> Result<Window> {
        let over = AtomicBool::new(false);
        let (used, cores) = (server.used()?, Cores::watch([server.lcore, self.lcore])?);
        let (said, compared) = thread::scope(|scope| {
            let client = scope.spawn(|| self.far.within(|| self.compare(server.address, &over)));
            let said = self.wrk(server.address);
            over.store(true, Ordering::Relaxed);
            let compared = client.join().map_err(|_| anyhow!("a client has panicked"))?;
            Ok::<_, anyhow::Error>((said, compared))
        })?;
        let used = server.used()? - used;
        let compared = compared.with_context(|| format!("a client\n{}", server.tail()))?;
        let window = self.read(&said.with_context(|| server.tail())?, &compared)?;
        // The time that wrk spends on its statistics at the end counts as time of other processes. It follows the
        // measured part.
        let others = cores.others([used, window.client])?;
        Ok(Window { server: used, others, ..window })
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

    /// Parses wrk's line and adds the results of the other client.
    fn read(&self, said: &str, compared: &Compared) -> Result<Window> {
        let line = said.lines().find_map(|line| line.strip_prefix("wrk ")).unwrap_or_default();
        let words: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
        let &[micros, requests, bytes, connect, read, write, status, timeout, ticks, measured, p50, p99] =
            &words[..]
        else {
            return Err(anyhow!("no figures in the output of wrk:\n{said}"));
        };
        let errors = [connect, read, write, status, timeout];
        ensure!(
            errors == [0; 5],
            "errors of wrk (connect, read, write, status, timeout): {errors:?}\n{said}"
        );
        ensure!(requests > 0, "no request was answered");
        ensure!(measured == requests, "wrk has {measured} latencies of {requests} requests\n{said}");
        // Requests in flight at the end are partly included.
        let (least, most) = (requests, requests + self.cell.connections as u64);
        let [least, most] = [least, most].map(|answers| answers * compared.len as u64);
        ensure!(
            (least..=most).contains(&bytes),
            "{requests} answers of {} bytes are {bytes} bytes, expected {least} to {most}",
            compared.len
        );
        Ok(Window {
            requests,
            seconds: micros as f64 / 1e6,
            p50: p50 as f64,
            p99: p99 as f64,
            server: 0.0,
            client: seconds_of(ticks) + compared.seconds,
            compared: compared.answers,
            others: 0.0,
        })
    }

    /// Sends requests on some connections from time to time and compares every byte, until `over` is set.
    fn compare(&self, address: SocketAddr, over: &AtomicBool) -> Result<Compared> {
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
        Ok(Compared { answers: compared, len, seconds: seconds_of(ticks("thread-self")?) })
    }

    fn ask(&self, stream: &mut TcpStream) -> Result<()> {
        let closes = if self.cell.how == How::Close { "Connection: close\r\n" } else { "" };
        let Cell { size, .. } = self.cell;
        write!(stream, "GET {}/compared-{size} HTTP/1.1\r\nHost: a\r\n{closes}\r\n", self.place)
            .context("a request")
    }

    /// Reads and checks an answer. Returns its length including the head.
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

/// Result of the comparing client.
#[derive(Clone, Copy, Debug)]
struct Compared {
    answers: u64,
    /// Length of an answer in bytes, including the head.
    len: usize,
    /// CPU time in seconds.
    seconds: f64,
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream =
        TcpStream::connect_timeout(&address, STALLED).with_context(|| format!("connecting to {address}"))?;
    stream.set_read_timeout(Some(STALLED))?;
    stream.set_write_timeout(Some(STALLED))?;
    Ok(stream)
}
