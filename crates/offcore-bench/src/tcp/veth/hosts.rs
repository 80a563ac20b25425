//! The near ends: our host on a port, or the kernel's TCP.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use offcore_dma::{Binding, Context, Mover};
use offcore_flow::host::{self, App, Calls, HostPort};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_port::af_packet::AfPacketPort;
use offcore_port::af_xdp::AfXdpPort;
use offcore_port::spec::PortSpec;
use offcore_port::{Port, QueueSetup};
use offcore_session::{Reader, Writer};
use offcore_stats::page::StatsPage;
use offcore_stats::time::Time;
use offcore_stats::{Stage, lcore};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{AppId, CallError, Config, ConnId, Event, IfaceConfig, Out, Prefix, Stack};

use super::stream::{CHUNK, Phase, Position, bound_waits, read, write};
use super::{Cell, Under};
use crate::peer::netns::Netns;
use crate::tcp::link::{STALLED, Side};
use crate::tcp::streams::fifos;

/// A near end.
pub(in crate::tcp) trait Near: Send {
    fn address(&self) -> SocketAddr;

    /// Returns the number of bytes read or written so far.
    fn moved(&self) -> Arc<AtomicU64>;

    /// Serves a connection on a core until its window is over. Returns the busy share of the counted time, if it is
    /// known.
    fn serve(&mut self, lcore: usize, phase: &Phase) -> Result<Option<f64>>;
}

/// The kernel's TCP.
#[derive(Debug)]
pub(in crate::tcp) struct Kernel {
    side: Side,
    listener: TcpListener,
    moved: Arc<AtomicU64>,
}

impl Kernel {
    pub(in crate::tcp) fn listen(side: Side, netns: &Netns) -> Result<Self> {
        let listener = netns.within(|| Ok(TcpListener::bind(near_address(78))?))?;
        listener.set_nonblocking(true)?;
        Ok(Self { side, listener, moved: Arc::default() })
    }
}

impl Near for Kernel {
    fn address(&self) -> SocketAddr {
        near_address(78)
    }

    fn moved(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.moved)
    }

    fn serve(&mut self, lcore: usize, phase: &Phase) -> Result<Option<f64>> {
        lcore::pin(lcore)?;
        let since = Instant::now();
        let stream = loop {
            match self.listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if phase.is_over() {
                return Ok(None);
            }
            ensure!(since.elapsed() < STALLED, "no connection within {STALLED:?}");
            thread::sleep(Duration::from_millis(1));
        };
        stream.set_nonblocking(false)?;
        bound_waits(&stream)?;
        match self.side {
            Side::Send => write(&stream, &self.moved, phase)?,
            Side::Receive => read(&stream, &self.moved, phase)?,
        }
        drop(stream);
        thread::sleep(phase.drain);
        Ok(None)
    }
}

/// Our host.
#[derive(Debug)]
pub(in crate::tcp) struct Host {
    worker: Worker,
    moved: Arc<AtomicU64>,
    wrong: Arc<AtomicBool>,
    ending: Arc<AtomicBool>,
    /// Dropped after the worker, which owns its queues.
    _port: Box<dyn Port>,
}

impl Host {
    /// Opens a host on an interface of `netns`.
    pub(in crate::tcp) fn open(
        cell: Cell,
        netns: &Netns,
        interface: &str,
        pool: &'static Pool,
    ) -> Result<Self> {
        let page = StatsPage::new(1 << 16)?;
        let mut mover = Mover::new();
        let (mut port, rx, tx) = netns.within(|| {
            let mut port = open(cell.under, interface, pool)?;
            let rx = port.rx_queue(0, setup(&mut mover, &page))?;
            let tx = port.tx_queue(0, setup(&mut mover, &page))?;
            Ok((port, rx, tx))
        })?;
        port.tend();
        let mut stack = Stack::new(Config { secret: [7; 16], ..Config::default() }).context("FIFOs")?;
        let mut out = Out::default();
        let address = near_address(77).ip();
        let addresses = vec![Prefix { address, len: 24 }];
        let iface = IfaceConfig { mac: port.mac(), mtu: 1500, addresses, routes: Vec::new() };
        stack.add_iface(Time::from_micros(1), &iface, &mut out);
        let mut path = Path::new(stack, out, &mut mover, pool);
        path.bind(&mut mover, &Binding::core(), &Binding::core())?;
        let (moved, wrong, ending) = (Arc::default(), Arc::default(), Arc::default());
        let app = Talk {
            side: cell.side,
            stream: None,
            buffer: vec![0; CHUNK].into(),
            moved: Arc::clone(&moved),
            wrong: Arc::clone(&wrong),
            ending: Arc::clone(&ending),
        };
        let ports = vec![HostPort { rx: vec![rx], tx, spread: None }];
        let host = host::Host::new(path, ports, Box::new(app))?;
        let worker = Worker::new(vec![Box::new(host)], mover, pool.cache());
        Ok(Self { worker, moved, wrong, ending, _port: port })
    }

    /// Resets the connection, and handles its remaining packets for `length`.
    fn drain(&mut self, length: Duration) {
        self.ending.store(true, Ordering::Relaxed);
        let since = Instant::now();
        while since.elapsed() < length {
            self.worker.round();
        }
        self.ending.store(false, Ordering::Relaxed);
    }

    /// Returns the ticks of the stage clock so far, and the idle ticks among them.
    fn ticks(&self) -> [u64; 2] {
        let all = Stage::ALL.iter().map(|&stage| self.worker.clock.ticks(stage)).sum();
        [all, self.worker.clock.ticks(Stage::Idle)]
    }
}

fn open(under: Under, interface: &str, pool: &'static Pool) -> Result<Box<dyn Port>> {
    Ok(match format!("{}:{interface}", under.port()).parse()? {
        PortSpec::AfXdp(spec) => Box::new(AfXdpPort::open(&spec, pool)?),
        PortSpec::AfPacket(spec) => Box::new(AfPacketPort::open(&spec, pool)?),
        other => bail!("{other} is no port that goes over veth"),
    })
}

fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::core(), port: "port0" }
}

impl Near for Host {
    fn address(&self) -> SocketAddr {
        near_address(77)
    }

    fn moved(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.moved)
    }

    fn serve(&mut self, lcore: usize, phase: &Phase) -> Result<Option<f64>> {
        lcore::pin(lcore)?;
        let mut before = None;
        while !phase.is_over() {
            self.worker.round();
            if before.is_none() && phase.counts() {
                before = Some(self.ticks());
            }
        }
        let after = self.ticks();
        self.drain(phase.drain);
        ensure!(!self.wrong.load(Ordering::Relaxed), "wrong bytes have come");
        let busy = |before: [u64; 2]| {
            let [all, idle] = [0, 1].map(|i| (after[i] - before[i]) as f64);
            1.0 - idle / all.max(1.0)
        };
        Ok(before.map(busy))
    }
}

/// Writes a stream to the connecting peer, or reads and compares a stream.
#[derive(Debug)]
struct Talk {
    side: Side,
    stream: Option<Stream>,
    buffer: Box<[u8]>,
    moved: Arc<AtomicU64>,
    wrong: Arc<AtomicBool>,
    /// The window is over: the connection is reset. The kernel resets its own, because unread data is left.
    ending: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Stream {
    conn: ConnId,
    reader: Reader,
    writer: Writer,
    at: Position,
}

impl Talk {
    fn serve(&mut self, calls: &mut Calls<'_>) {
        let Some(Stream { conn, reader, writer, at }) = &mut self.stream else { return };
        let mut moved = 0;
        loop {
            let n = match self.side {
                Side::Send => writer.write(at.next(CHUNK)),
                Side::Receive => reader.read(&mut self.buffer),
            };
            if n == 0 {
                break;
            }
            moved += n as u64;
            let told = match self.side {
                Side::Send => {
                    at.advance(n);
                    calls.stack.written(calls.now, *conn, calls.out)
                }
                Side::Receive => {
                    if !at.take(&self.buffer[..n]) {
                        self.wrong.store(true, Ordering::Relaxed);
                    }
                    calls.stack.consumed(calls.now, *conn, calls.out)
                }
            };
            if told.is_err() {
                break;
            }
        }
        if self.side == Side::Send {
            calls.stack.want_room(*conn);
        }
        self.moved.fetch_add(moved, Ordering::Relaxed);
    }
}

impl App for Talk {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        calls.stack.listen(AppId::OWN, None, near_address(77).port(), 16, false).map(drop)
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = calls.stack.accept(listener) {
                    let at = Position::default();
                    let stream = |(reader, writer)| Stream { conn, reader, writer, at };
                    self.stream = fifos(conn, calls).map(stream);
                    self.serve(calls);
                }
            }
            Event::Readable(_) | Event::Writable(_) | Event::Connected(_) => self.serve(calls),
            Event::EndOfStream(conn) | Event::Closed(conn, _) => {
                self.stream = self.stream.take().filter(|stream| stream.conn != conn);
                calls.close(conn);
            }
            Event::Failed(..) | Event::AddressConflict { .. } | Event::Address { .. } => {}
        }
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        if self.ending.load(Ordering::Relaxed)
            && let Some(stream) = self.stream.take()
        {
            calls.stack.abort(calls.now, stream.conn, calls.out);
        }
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}

/// Returns the near end's address and port.
fn near_address(network: u8) -> SocketAddr {
    ([10, network, 0, 2], 5001).into()
}
