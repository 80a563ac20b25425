//! A custom application on the host stack: a server that counts the bytes of each connection, and its client. Both
//! hosts run in this process, and rings connect them.
//!
//!     cargo run --release -p offcore-flow --example host

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offcore_dma::{Binding, Mover};
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

type Fifos = (Reader, Writer);

/// The FIFOs of a connection.
fn fifos(conn: ConnId, calls: &Calls<'_>) -> Option<Fifos> {
    let (memory, slot) = (calls.stack.memory(AppId::OWN), calls.stack.slot(conn)?);
    Some((Reader::new(Arc::clone(memory), slot)?, Writer::new(Arc::clone(memory), slot)?))
}

/// Answers with the number of received bytes when the peer has ended its stream.
#[derive(Debug, Default)]
struct Counter(HashMap<ConnId, (Fifos, usize)>);

impl App for Counter {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        calls.stack.listen(AppId::OWN, None, 4000, 16, false).map(drop)
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = calls.stack.accept(listener) {
                    self.0.extend(fifos(conn, calls).map(|fifos| (conn, (fifos, 0))));
                    // Data that arrived with the handshake is not reported by another event.
                    self.event(Event::Readable(conn), calls);
                }
            }
            Event::Readable(conn) => {
                let Some(((reader, _), count)) = self.0.get_mut(&conn) else { return };
                // The data is not copied: the spans refer to the memory into which the engine has written.
                let there: usize = reader.spans().map(|span| span.len()).sum();
                reader.consume(there);
                *count += there;
                let _ = calls.stack.consumed(calls.now, conn, calls.out);
            }
            Event::EndOfStream(conn) => {
                let Some(((_, mut writer), count)) = self.0.remove(&conn) else { return };
                writer.write(format!("{count} bytes").as_bytes());
                let _ = calls.stack.written(calls.now, conn, calls.out);
                calls.close(conn);
            }
            Event::Closed(conn, _) => drop(self.0.remove(&conn)),
            _ => {}
        }
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}

/// Sends a megabyte and prints the answer.
#[derive(Debug, Default)]
struct Client {
    open: Option<(ConnId, Fifos)>,
    left: usize,
    over: Arc<AtomicBool>,
}

impl Client {
    fn write(&mut self, calls: &mut Calls<'_>) {
        let Some((conn, (_, writer))) = &mut self.open else { return };
        self.left -= writer.write(&vec![7; self.left]);
        let _ = calls.stack.written(calls.now, *conn, calls.out);
        if self.left > 0 {
            // Event::Writable reports more room.
            calls.stack.want_room(*conn);
        } else {
            let _ = calls.stack.shutdown(calls.now, *conn, calls.out);
        }
    }
}

impl App for Client {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        self.left = 1 << 20;
        calls.stack.connect(calls.now, AppId::OWN, None, ([10, 0, 0, 2], 4000).into(), calls.out).map(drop)
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Connected(conn) => {
                self.open = fifos(conn, calls).map(|fifos| (conn, fifos));
                self.write(calls);
            }
            Event::Writable(_) => self.write(calls),
            Event::EndOfStream(conn) => {
                let Some((_, (mut reader, _))) = self.open.take() else { return };
                let mut answer = vec![0; reader.available()];
                reader.read(&mut answer);
                println!("the server has counted {}", String::from_utf8_lossy(&answer));
                calls.close(conn);
            }
            Event::Closed(_, cause) => {
                if self.open.take().is_some() {
                    println!("the connection is over: {cause:?}");
                }
                self.over.store(true, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}

/// Creates a host with one port. The core makes its copies.
fn worker(
    last: u8,
    port: HostPort,
    app: Box<dyn App>,
    pool: &'static Pool,
) -> Result<Worker, Box<dyn std::error::Error>> {
    let (mut mover, mut out) = (Mover::new(), Out::default());
    // Hashes, sequence numbers and ports are derived from the secret, which must not be predictable.
    let mut stack = Stack::new(Config { secret: [last; 16], ..Config::default() })?;
    let iface = IfaceConfig {
        mac: MacAddr([2, 0, 0, 0, 0, last]),
        mtu: 1500,
        addresses: vec![Prefix { address: [10, 0, 0, last].into(), len: 24 }],
        routes: Vec::new(),
    };
    stack.add_iface(Time::ZERO, &iface, &mut out);
    let mut path = Path::new(stack, out, &mut mover, pool);
    // Channels of engines that were added to the mover would be named here.
    path.bind(&mut mover, &Binding::core(), &Binding::core())?;
    let host = Host::new(path, vec![port], app)?;
    Ok(Worker::new(vec![Box::new(host)], mover, pool.cache()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (pool, stats) = (Pool::new(4096, 2048, Hugepages::Auto)?, StatsPage::new(1 << 16)?);
    let wire = |name| {
        let (waits, wakes, index) = (false, false, 0);
        ring(RingSetup { packets: 512, pool, waits, wakes, stats: &stats, name, index })
    };
    let ((to_server, from_client), (to_client, from_server)) = (wire("ring0")?, wire("ring1")?);
    let client = HostPort { rx: vec![Box::new(from_server)], tx: Box::new(to_server), spread: None };
    let server = HostPort { rx: vec![Box::new(from_client)], tx: Box::new(to_client), spread: None };
    let app = Client::default();
    let over = Arc::clone(&app.over);
    let mut client = worker(1, client, Box::new(app), pool)?;
    let mut server = worker(2, server, Box::new(Counter::default()), pool)?;
    // Workers of real hosts run on separate lcores. The stack first probes the addresses, which takes some seconds.
    while !over.load(Ordering::Relaxed) {
        client.round();
        server.round();
    }
    Ok(())
}
