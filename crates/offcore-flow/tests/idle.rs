//! A switch that sleeps when idle: it leaves its core to other threads, and every packet wakes it.
//!
//! This is the only place where time is asserted. The smallest of several windows counts, so a busy machine does not
//! matter. The tests take some seconds, since idleness takes time.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../offcore-port/tests/common/mod.rs"]
mod common;

use std::net::UdpSocket;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{TempDir, Worker, pool, root_or_skip, until};
use offcore_flow::{Idle, Running, SwitchConfig};
use offcore_mem::{Burst, Pool};
use offcore_port::spec::PortSpec;
use offcore_port::tap::TapPort;
use offcore_port::vhost::VhostPort;
use offcore_port::virtio_user::VirtioUserPort;
use offcore_port::{Port, RxQueue, TxQueue};
use offcore_stats::lcore;
use offcore_vhost::BackendConfig;
use offcore_wire::MacAddr;

/// Packets of a ping-pong, each after a pause in which the worker falls asleep.
const PINGS: u32 = 1000;
/// This pause. The worker polls for 50 us.
const PAUSE: Duration = Duration::from_micros(200);
/// Minimum number of wake-ups by events for these packets. On a busy machine, the worker is not always asleep in time.
const WOKEN: u64 = 300;
/// Number of windows, and their length. The quietest one counts.
const WINDOWS: (usize, Duration) = (8, Duration::from_millis(250));
/// The start of every packet in these tests: addresses and an EtherType for experiments.
const HEADER: [u8; 14] = [2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5];

/// One end of the switch, operated by the test.
struct Side {
    worker: Worker,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    _port: Box<dyn Port>,
}

impl Side {
    fn new(pool: &'static Pool, mut port: Box<dyn Port>) -> Self {
        let mut worker = Worker::new(pool);
        let rx = worker.rx_queue(&mut *port, 0).unwrap();
        let tx = worker.tx_queue(&mut *port, 0).unwrap();
        Self { worker, rx, tx, _port: port }
    }

    /// Sends packet `number` as soon as there is room.
    fn send(&mut self, number: u32) {
        let bytes: Vec<u8> = HEADER.into_iter().chain(number.to_le_bytes()).chain([7; 60]).collect();
        let packet = self.worker.packet(&bytes);
        let mut burst = Burst::new();
        burst.push(packet);
        until("room for a packet", || {
            self.worker.tx(&mut *self.tx, &mut burst);
            burst.is_empty()
        });
    }

    /// Receives packets. Returns the numbers of packets from these tests.
    fn receive(&mut self) -> Vec<u32> {
        let mut burst = Burst::new();
        self.tx.poll(&mut self.worker.ctx());
        self.worker.rx(&mut *self.rx, &mut burst);
        let ours = burst.iter().filter(|packet| packet.bytes().starts_with(&HEADER));
        let numbers = ours.map(|packet| u32::from_le_bytes(packet.bytes()[14..18].try_into().unwrap()));
        let numbers = numbers.collect();
        self.worker.free(&mut burst);
        numbers
    }

    fn expect(&mut self, numbers: std::ops::Range<u32>) {
        let mut received = Vec::new();
        until(&format!("packets {numbers:?}"), || {
            received.append(&mut self.receive());
            received.len() >= numbers.len()
        });
        assert_eq!(received, numbers.collect::<Vec<_>>());
    }
}

/// One test runs at a time, because a worker's thread is identified by its name.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start(idle: Idle, ports: Vec<Box<dyn Port>>, pool: &'static Pool) -> Running {
    let lcores = vec![lcore::available().unwrap()[0]];
    let config = SwitchConfig { lcores, idle, ..SwitchConfig::default() };
    offcore_flow::switch::start(&config, ports, pool).unwrap()
}

/// Returns the nanoseconds that the worker's thread has run so far.
fn ran() -> u64 {
    let name = format!("lcore{}", lcore::available().unwrap()[0]);
    let mut threads = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let task = threads.find(|task| read(task.join("comm")).trim() == name).expect("the worker runs");
    read(task.join("schedstat")).split(' ').next().unwrap().parse().unwrap()
}

/// Returns the share of a core that the worker takes in the quietest window, in percent.
fn core_usage_percent() -> f64 {
    let (windows, length) = WINDOWS;
    let window = |_| {
        let (start, before) = (Instant::now(), ran());
        std::thread::sleep(length);
        100.0 * (ran() - before) as f64 / start.elapsed().as_nanos() as f64
    };
    (0..windows).map(window).fold(f64::INFINITY, f64::min)
}

/// Returns the number of events that have woken the worker, and the number of its sleeps.
fn woken(running: &Running) -> (u64, u64) {
    let report = running.reporter().unwrap().report("test").unwrap();
    (report.workers[0].woken, report.workers[0].sleeps)
}

/// Sends packets one by one from one side to the other, and after a pause as many as fit into a ring.
fn ping(running: &Running, from: &mut Side, to: &mut Side) {
    let (before, _) = woken(running);
    for number in 0..PINGS {
        std::thread::sleep(PAUSE);
        from.send(number);
        to.expect(number..number + 1);
    }
    let (after, sleeps) = woken(running);
    assert!(after - before >= WOKEN, "{} events in {PINGS} packets, {sleeps} sleeps in all", after - before);
    std::thread::sleep(Duration::from_millis(30));
    (0..128).for_each(|number| from.send(number));
    to.expect(0..128);
}

fn vhost(socket: &std::path::Path) -> Box<dyn Port> {
    let port = VhostPort::open("vhost", MacAddr::local(1), BackendConfig::new(socket)).unwrap();
    Box::new(port)
}

fn virtio_user(socket: &std::path::Path, options: &str, pool: &'static Pool) -> VirtioUserPort {
    let text = format!("virtio-user:{}{options}", socket.display());
    let PortSpec::VirtioUser(spec) = text.parse().unwrap() else { panic!("{text}") };
    VirtioUserPort::open(&spec, pool).unwrap()
}

fn front_end(socket: &std::path::Path, options: &str) -> Side {
    let pool = pool(1024);
    let port = virtio_user(socket, options, pool);
    until("a connection", || port.is_connected());
    Side::new(pool, Box::new(port))
}

fn two_guests(options: &str) {
    let _alone = alone();
    let dir = TempDir::new();
    let sockets = ["a", "b"].map(|name| dir.file(name));
    let mut running = start(Idle::Sleep, sockets.iter().map(|socket| vhost(socket)).collect(), pool(2048));
    let [mut a, mut b] = sockets.each_ref().map(|socket| front_end(socket, options));
    // Rings are filled first. Afterwards, no packets are sent.
    until("the first packet", || {
        // This gives both sides buffers for received packets.
        a.receive();
        a.send(0);
        !b.receive().is_empty()
    });
    std::thread::sleep(Duration::from_millis(50));
    while !b.receive().is_empty() {}
    let part = core_usage_percent();
    assert!(part < 5.0, "{part} % of a core while idle, {:?}", woken(&running));
    ping(&running, &mut a, &mut b);
    ping(&running, &mut b, &mut a);
    assert_eq!(running.stop(), 0);
}

/// Checks that the other tests measure the worker.
#[test]
fn polling_switch_keeps_core_busy() {
    let _alone = alone();
    let dir = TempDir::new();
    let mut running = start(Idle::Poll, vec![vhost(&dir.file("a"))], pool(1024));
    let part = core_usage_percent();
    assert!(part > 5.0, "{part} % of a core");
    assert_eq!((running.stop(), woken(&running)), (0, (0, 0)));
}

#[test]
fn idle_guests_with_event_index() {
    two_guests("");
}

#[test]
fn idle_guests_without_event_index() {
    two_guests(",event_idx=off");
}

#[test]
fn idle_virtio_user_port() {
    let _alone = alone();
    for options in ["", ",event_idx=off"] {
        let dir = TempDir::new();
        let [ours, theirs] = ["ours", "theirs"].map(|name| dir.file(name));
        let mut back_end = Side::new(pool(1024), vhost(&theirs));
        let switch_pool = pool(2048);
        let port = virtio_user(&theirs, options, switch_pool);
        let mut running = start(Idle::Sleep, vec![vhost(&ours), Box::new(port)], switch_pool);
        let mut guest = front_end(&ours, options);
        until("the first packet", || {
            back_end.receive();
            back_end.send(0);
            !guest.receive().is_empty()
        });
        std::thread::sleep(Duration::from_millis(50));
        while !guest.receive().is_empty() {}
        let part = core_usage_percent();
        assert!(part < 5.0, "{part} % of a core while idle");
        ping(&running, &mut back_end, &mut guest);
        ping(&running, &mut guest, &mut back_end);
        assert_eq!(running.stop(), 0);
        // Dropped first, so that the other drops do not wait for it.
        drop(back_end);
    }
}

#[test]
fn idle_tap_port() {
    if !root_or_skip("idle_tap_port") {
        return;
    }
    let _alone = alone();
    let thread = std::thread::spawn(|| {
        // SAFETY: unshare(CLONE_NEWNET) only changes the network namespace of the calling thread, which was created for
        // this.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            eprintln!("SKIP: no network namespace: {}", std::io::Error::last_os_error());
            return;
        }
        tap();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn tap() {
    let ip = |args: &str| {
        let run = Command::new("ip").args(args.split(' ')).output().unwrap();
        assert!(run.status.success(), "ip {args}: {}", String::from_utf8_lossy(&run.stderr));
    };
    let dir = TempDir::new();
    let socket = dir.file("guest");
    let switch_pool = pool(2048);
    let PortSpec::Tap(spec) = "tap:idle0".parse().unwrap() else { panic!("no TAP") };
    let tap = TapPort::open(&spec, switch_pool).unwrap();
    // The interface sends nothing by itself: no IPv6, no ARP.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/idle0/disable_ipv6", "1");
    ip("addr add 10.77.0.1/24 dev idle0");
    ip("neigh add 10.77.0.2 lladdr 02:00:00:00:00:22 dev idle0");
    let mut running = start(Idle::Sleep, vec![Box::new(tap), vhost(&socket)], switch_pool);
    let mut guest = front_end(&socket, "");
    let kernel = UdpSocket::bind("10.77.0.1:7000").unwrap();
    let numbers = |guest: &mut Side| -> Vec<u32> {
        let mut burst = Burst::new();
        guest.worker.rx(&mut *guest.rx, &mut burst);
        // Ethernet, IPv4 and UDP headers take 42 bytes. Packets of this test go to port 7001.
        let ours = burst.iter().filter(|packet| packet.len() >= 46 && packet.bytes()[36..38] == [0x1b, 0x59]);
        let numbers = ours.map(|packet| u32::from_le_bytes(packet.bytes()[42..46].try_into().unwrap()));
        let numbers = numbers.collect();
        guest.worker.free(&mut burst);
        numbers
    };
    until("the first packet", || {
        kernel.send_to(&u32::MAX.to_le_bytes(), "10.77.0.2:7001").unwrap();
        !numbers(&mut guest).is_empty()
    });
    std::thread::sleep(Duration::from_millis(50));
    while !numbers(&mut guest).is_empty() {}
    let part = core_usage_percent();
    assert!(part < 5.0, "{part} % of a core while idle, {:?}", woken(&running));
    let (before, _) = woken(&running);
    for number in 0..PINGS {
        std::thread::sleep(PAUSE);
        kernel.send_to(&number.to_le_bytes(), "10.77.0.2:7001").unwrap();
        let mut received = Vec::new();
        until("a datagram", || {
            received = numbers(&mut guest);
            !received.is_empty()
        });
        assert_eq!(received, [number]);
    }
    let (after, sleeps) = woken(&running);
    assert!(after - before >= WOKEN, "{} events in {PINGS} datagrams, {sleeps} sleeps", after - before);
    assert_eq!(running.stop(), 0);
}
