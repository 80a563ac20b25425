//! The host stack's cases for `cargo xtask counts`: the cost of a segment of 1448 bytes on the sending or receiving
//! host, including acknowledgements, with an engine for the payload. Two hosts run in one process, and rings connect
//! them.
//!
//! Without arguments it prints the names of the cases. With one argument it runs that case and prints the number of
//! segments transferred. Only the work inside [`counted`] is measured, without the other host, the applications and the
//! engine.

use std::hint::black_box;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, CopyDevice, Mode, Mover};
use offcore_flow::host::{App, Calls, Host, HostPort};
use offcore_flow::ring::{RingSetup, ring};
use offcore_flow::worker::Worker;
use offcore_mem::{Hugepages, Pool};
use offcore_session::{Reader, Writer};
use offcore_stats::page::StatsPage;
use offcore_stats::time::Time;
use offcore_tcp::path::Path;
use offcore_tcp::proto::{AppId, CallError, Config, ConnId, Event, IfaceConfig, Out, Prefix, Stack};
use offcore_wire::MacAddr;

/// Bytes per segment, segments per window, and numbers of windows. The first `WARM` windows are not measured.
const SEGMENT: usize = 1448;
const WINDOW: usize = 64;
const WARM: usize = 50;
const WINDOWS: usize = 100;
/// Maximum number of rounds per window.
const ROUNDS: usize = 10_000;

const CASES: [(&str, bool); 2] = [("tcp-receive-offload", true), ("tcp-send-offload", false)];

/// The measured function.
#[inline(never)]
fn counted<T>(work: impl FnOnce() -> T) -> T {
    black_box(work())
}

/// The FIFOs of a connection. The measurement sets `touched` after it has used them, so that the application notifies
/// the stack.
#[derive(Debug, Default)]
struct Ends {
    conn: Option<(ConnId, Reader, Writer)>,
    touched: bool,
}

type Shared = Arc<Mutex<Ends>>;

fn lock(ends: &Shared) -> MutexGuard<'_, Ends> {
    ends.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The application of both hosts. The client connects.
#[derive(Debug)]
struct Talk {
    client: bool,
    ends: Shared,
}

impl Talk {
    fn open(&self, conn: ConnId, calls: &Calls<'_>) {
        let (memory, slot) = (calls.stack.memory(AppId::OWN), calls.stack.slot(conn));
        let fifos = slot.and_then(|slot| {
            Some((conn, Reader::new(Arc::clone(memory), slot)?, Writer::new(Arc::clone(memory), slot)?))
        });
        lock(&self.ends).conn = fifos;
    }
}

impl App for Talk {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        if self.client {
            calls
                .stack
                .connect(calls.now, AppId::OWN, None, ([10, 0, 0, 2], 4000).into(), calls.out)
                .map(drop)
        } else {
            calls.stack.listen(AppId::OWN, None, 4000, 1, false).map(drop)
        }
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Connected(conn) if self.client => self.open(conn, calls),
            Event::Incoming { listener } => {
                if let Some(conn) = calls.stack.accept(listener) {
                    self.open(conn, calls);
                }
            }
            _ => {}
        }
    }

    fn round(&mut self, _: &mut offcore_dma::Context<'_>, calls: &mut Calls<'_>) {
        let mut ends = lock(&self.ends);
        if std::mem::take(&mut ends.touched)
            && let Some((conn, ..)) = ends.conn
        {
            let _ = calls.stack.written(calls.now, conn, calls.out);
            let _ = calls.stack.consumed(calls.now, conn, calls.out);
        }
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}

/// A host's worker, its engine, and its end of the connection.
struct End {
    worker: Worker,
    engine: Stepper,
    ends: Shared,
}

impl End {
    fn new(last: u8, port: HostPort, pool: &'static Pool) -> Result<Self, Box<dyn std::error::Error>> {
        let (mut mover, mut out) = (Mover::new(), Out::default());
        // Copies are slow under valgrind, and must not be treated as lost.
        mover.set_lost_after(u64::MAX >> 1);
        let (device, engine) = CoreDevice::stepped();
        let channel = mover.add_channel(device.open_channel(1024)?);
        let config = Config {
            secret: [last; 16],
            largest_segment: SEGMENT as u16,
            memory: 64 << 20,
            ..Config::default()
        };
        let mut stack = Stack::new(config)?;
        let iface = IfaceConfig {
            mac: MacAddr([2, 0, 0, 0, 0, last]),
            mtu: 1500,
            addresses: vec![Prefix { address: [10, 0, 0, last].into(), len: 24 }],
            routes: Vec::new(),
        };
        stack.add_iface(Time::ZERO, &iface, &mut out);
        let mut path = Path::new(stack, out, &mut mover, pool);
        let binding = Binding::new(Mode::Offload, vec![channel]);
        path.bind(&mut mover, &binding, &binding)?;
        let ends = Shared::default();
        let app = Talk { client: last == 1, ends: Arc::clone(&ends) };
        let host = Host::new(path, vec![port], Box::new(app))?;
        Ok(Self { worker: Worker::new(vec![Box::new(host)], mover, pool.cache()), engine, ends })
    }

    /// Runs a round, which is counted on request, and the engine's copies.
    fn round(&mut self, count: bool) {
        if count {
            counted(|| self.worker.round());
        } else {
            self.worker.round();
        }
        self.engine.step();
    }
}

/// Transfers a window. `count` selects the host whose rounds are counted: the receiver if `true`, the sender if
/// `false`.
fn window(from: &mut End, to: &mut End, count: Option<bool>) -> Result<(), String> {
    let bytes = WINDOW * SEGMENT;
    let (mut written, mut read) = (0, 0);
    for _ in 0..ROUNDS {
        let mut open = true;
        if let Ends { conn: Some((.., writer)), touched } = &mut *lock(&from.ends) {
            let n = writer.write(&vec![7; bytes - written]);
            written += n;
            *touched |= n > 0;
            open = writer.unacknowledged() > 0;
        }
        if read == bytes && !open {
            return Ok(());
        }
        from.round(count == Some(false));
        to.round(count == Some(true));
        if let Ends { conn: Some((_, reader, _)), touched } = &mut *lock(&to.ends) {
            let there = reader.available();
            reader.consume(there);
            read += there;
            *touched = there > 0;
        }
    }
    Err(format!("{read} of {bytes} bytes have come"))
}

fn run(receive: bool) -> Result<usize, Box<dyn std::error::Error>> {
    let (pool, stats) = (Pool::new(4096, 2048, Hugepages::None)?, StatsPage::new(1 << 16)?);
    let wire = |name| {
        let (waits, wakes, index) = (false, false, 0);
        ring(RingSetup { packets: 512, pool, waits, wakes, stats: &stats, name, index })
    };
    let ((there, there_rx), (back, back_rx)) = (wire("ring0")?, wire("ring1")?);
    let port = |rx, tx| HostPort { rx: vec![rx], tx, spread: None };
    let mut client = End::new(1, port(Box::new(back_rx), Box::new(there)), pool)?;
    let mut server = End::new(2, port(Box::new(there_rx), Box::new(back)), pool)?;
    while [&client, &server].iter().any(|end| lock(&end.ends).conn.is_none()) {
        client.round(false);
        server.round(false);
    }
    for number in 0..WARM + WINDOWS {
        window(&mut client, &mut server, (number >= WARM).then_some(receive))?;
    }
    Ok(WINDOWS * WINDOW)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(wanted) = std::env::args().nth(1) else {
        CASES.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(());
    };
    let (_, receive) = CASES.iter().find(|(name, _)| *name == wanted).ok_or("no such case")?;
    println!("{}", run(*receive)?);
    Ok(())
}
