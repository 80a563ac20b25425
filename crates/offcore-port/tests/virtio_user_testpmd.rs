//! Tests the virtio-user port against dpdk-testpmd's net_vhost: generated packets are sent to it, come back, and are
//! checked.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{TIMEOUT, TempDir, Worker, pool, until};
use offcore_mem::Burst;
use offcore_port::generator::GenPort;
use offcore_port::spec::PortSpec;
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{Port, RxQueue, TxQueue};
use offcore_vhost::features::VIRTIO_F_RING_PACKED;

/// Maximum number of packets in flight: fewer than any ring has room for. testpmd drops packets that do not fit, so
/// there must be room for all of them.
const WINDOW: u64 = 128;

/// Only one peer runs at a time, because it occupies a core.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static PEER: Mutex<()> = Mutex::new(());
    PEER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A testpmd that sends all packets back to their source.
struct Testpmd {
    child: Child,
    output: Arc<Mutex<String>>,
}

impl Testpmd {
    /// Returns `None`, and prints a message, if testpmd is not installed.
    fn start(socket: &Path, queues: u16, options: &str) -> Option<Self> {
        // Without PCI devices, because the peer only needs the socket.
        let mut command = Command::new("dpdk-testpmd");
        command.args(["--no-pci", "--no-huge", "--no-shconf", "-m", "256", "--no-telemetry"]);
        command.args(["--file-prefix", &format!("offcore{}", std::process::id()), "--lcores", "0@0,1@0"]);
        command.args(["--vdev", &format!("net_vhost0,iface={},queues={queues}{options}", socket.display())]);
        command.args(["--", "-i", "--port-topology=loop", "--no-mlockall", "--total-num-mbufs=8192"]);
        command.args(["--forward-mode=io", "--auto-start"]);
        command.args([format!("--rxq={queues}"), format!("--txq={queues}")]);
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) => {
                eprintln!("SKIP: dpdk-testpmd cannot be run: {error}");
                return None;
            }
        };
        let (output, mut stdout) = (Arc::new(Mutex::new(String::new())), child.stdout.take().unwrap());
        let seen = Arc::clone(&output);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = stdout.read(&mut buffer) {
                seen.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..read]));
            }
        });
        let mut testpmd = Self { child, output };
        let start = Instant::now();
        while !testpmd.output().contains("testpmd>") {
            let running = testpmd.child.try_wait().unwrap().is_none();
            assert!(running && start.elapsed() < 3 * TIMEOUT, "testpmd does not start: {}", testpmd.output());
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(testpmd)
    }

    fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Kills the process, as a crash would.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = stdin.write_all(b"quit\n");
        }
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if start.elapsed() > TIMEOUT {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A generator, a virtio-user port, and one worker with all their queues.
struct Bench {
    worker: Worker,
    generator: GenPort,
    port: VirtioUserPort,
    queues: Vec<Queues>,
    chunks: usize,
}

struct Queues {
    source: Box<dyn RxQueue>,
    sink: Box<dyn TxQueue>,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    /// Packets that will not come back.
    lost: u64,
}

impl Queues {
    fn on_their_way(&self) -> u64 {
        self.source.counters().packets() - self.sink.counters().packets() - self.lost
    }
}

impl Bench {
    fn new(generator: &str, port: &str) -> Self {
        let pool = pool(8192);
        let mut worker = Worker::new(pool);
        let (Ok(PortSpec::Gen(generator)), Ok(PortSpec::VirtioUser(port))) =
            (generator.parse(), port.parse())
        else {
            panic!("a generator and a virtio-user port are expected");
        };
        let mut generator = GenPort::open(&generator, pool).unwrap();
        let mut port = VirtioUserPort::open(&port, pool).unwrap_or_else(|e| panic!("{e}"));
        let chunks = worker.free_chunks();
        let queues = (0..port.queues()).map(|index| Queues {
            source: worker.rx_queue(&mut generator, index).unwrap(),
            sink: worker.tx_queue(&mut generator, index).unwrap(),
            rx: worker.rx_queue(&mut port, index).unwrap(),
            tx: worker.tx_queue(&mut port, index).unwrap(),
            lost: 0,
        });
        let queues = queues.collect();
        let mut bench = Self { worker, generator, port, queues, chunks };
        bench.wait_for_peer();
        bench
    }

    /// Waits until the port is connected, and fills its RX rings: the peer needs RX buffers before it can send.
    fn wait_for_peer(&mut self) {
        until("the port is connected", || self.port.is_connected());
        for queues in &mut self.queues {
            let mut burst = Burst::new();
            self.worker.rx(&mut *queues.rx, &mut burst);
            assert!(burst.is_empty());
        }
    }

    /// Returns the negotiated virtio features, from the port's status.
    fn features(&self) -> u64 {
        let status = self.port.status();
        let (_, features) = status.rsplit_once("0x").unwrap();
        u64::from_str_radix(features, 16).unwrap()
    }

    /// Polls every queue once; returns whether a packet came back.
    fn round(&mut self, generate: bool) -> bool {
        let mut progress = false;
        for queues in &mut self.queues {
            let mut burst = Burst::new();
            let generate = generate && queues.on_their_way() < WINDOW - 64;
            let Queues { source, sink, rx, tx, .. } = queues;
            if generate {
                self.worker.rx(&mut **source, &mut burst);
                self.worker.tx(&mut **tx, &mut burst);
                assert!(burst.is_empty(), "the window is smaller than the ring");
            }
            tx.poll(&mut self.worker.ctx());
            self.worker.rx(&mut **rx, &mut burst);
            progress |= !burst.is_empty();
            self.worker.tx(&mut **sink, &mut burst);
        }
        progress
    }

    /// Polls until `count` packets have come back.
    fn run(&mut self, count: u64) {
        let mut last = Instant::now();
        while self.generator.report().received < count {
            if self.round(true) {
                last = Instant::now();
            }
            assert!(
                last.elapsed() < TIMEOUT,
                "no progress: {}; {}",
                self.generator.status(),
                self.port.status()
            );
        }
    }

    /// Closes the ports, and checks that no packet buffer was lost.
    fn close(self) {
        let Self { mut worker, port, queues, chunks, .. } = self;
        drop(queues);
        drop(port);
        assert_eq!(worker.free_chunks(), chunks);
    }
}

#[test]
fn every_packet_comes_back() {
    const COUNT: u64 = 30_000;
    let _one = one_at_a_time();
    for (size, options, queues) in [
        (64, "", 1),
        (1518, ",queue_size=1024", 1),
        (512, ",mrg=off", 1),
        (1518, ",mrg=off,queue_size=1024,event_idx=off", 1),
        (256, ",queues=2", 2),
        (64, ",packed", 1),
        (1518, ",packed,queue_size=1024", 1),
        (512, ",packed,mrg=off,event_idx=off", 1),
        (256, ",packed,queues=2", 2),
    ] {
        let dir = TempDir::new();
        let socket = dir.file("v.sock");
        let Some(testpmd) = Testpmd::start(&socket, queues, "") else { return };
        let generator = format!("gen:size={size},count={COUNT},flows=3,queues={queues}");
        let port = format!("virtio-user:{}{options}", socket.display());
        let mut bench = Bench::new(&generator, &port);
        bench.run(COUNT);
        assert_eq!(bench.features() & VIRTIO_F_RING_PACKED != 0, options.contains("packed"), "{port}");
        let report = bench.generator.report();
        assert!(report.is_clean() && report.missing() == Some(0), "{port}: {report:?}");
        assert_eq!((report.received, report.verified), (COUNT, COUNT), "{port}");
        for queues in &bench.queues {
            assert!(queues.rx.counters().packets() > 0, "{port}: both queues are used");
            assert_eq!(queues.rx.counters().dropped_total() + queues.tx.counters().dropped_total(), 0);
        }
        bench.close();
        drop(testpmd);
    }
}

#[test]
fn a_peer_that_connects_to_us_is_served() {
    let _one = one_at_a_time();
    let dir = TempDir::new();
    let socket = dir.file("v.sock");
    // The socket exists once the port is open, so the peer may start before or after it.
    let Some(testpmd) = Testpmd::start(&socket, 1, ",client=1") else { return };
    let mut bench = Bench::new("gen:size=1518", &format!("virtio-user:{},server", socket.display()));
    bench.run(5_000);
    assert!(bench.generator.report().is_clean());
    bench.close();
    drop(testpmd);
}

#[test]
fn crashed_testpmd_is_reconnected() {
    let _one = one_at_a_time();
    for options in ["", ",packed"] {
        crash(options);
    }
}

/// `options` are the options of the port.
fn crash(options: &str) {
    let dir = TempDir::new();
    let socket = dir.file("v.sock");
    let Some(testpmd) = Testpmd::start(&socket, 1, "") else { return };
    let mut bench = Bench::new("gen:size=1518", &format!("virtio-user:{}{options}", socket.display()));
    bench.run(5_000);
    testpmd.kill();
    until("the port notices", || {
        bench.round(false);
        !bench.port.is_connected()
    });
    bench.round(false);
    assert_eq!(bench.worker.free_chunks(), bench.chunks, "packet buffers in flight have come back");
    let lost = bench.generator.report().missing().unwrap();
    assert!(lost <= WINDOW, "{lost} packets were on their way");

    let _ = std::fs::remove_file(&socket);
    let _testpmd = Testpmd::start(&socket, 1, "").unwrap();
    bench.wait_for_peer();
    bench.queues[0].lost = lost;
    let received = bench.generator.report().received;
    bench.run(received + 5_000);
    let report = bench.generator.report();
    assert_eq!((report.lost, report.reordered, report.duplicates, report.corrupt), (lost, 0, 0, 0));
    bench.close();
}
