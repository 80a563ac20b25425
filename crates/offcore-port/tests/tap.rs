//! Tests the TAP port against the kernel's IP stack, in separate network namespaces.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use std::net::UdpSocket;

use common::{Worker, frame, in_namespace, ip, pool, until};
use offcore_mem::{Burst, Packet, Pool};
use offcore_port::spec::{PortSpec, TapSpec};
use offcore_port::tap::TapPort;
use offcore_port::{DropReason, Port, PortError, RxQueue, TxQueue};
use offcore_wire::{Ipv4Packet, MacAddr, UdpDatagram, UdpEndpoint, UdpFlow, UdpTemplate, checksum};

/// The station on the port's side of the interface.
const STATION: &str = "02:00:00:00:00:22";

fn spec(text: &str) -> TapSpec {
    let PortSpec::Tap(spec) = text.parse().unwrap() else { panic!("{text}") };
    spec
}

/// A port whose interface has address 10.77.0.1. The kernel has a neighbor entry for the port's side, 10.77.0.2.
struct Tap {
    port: TapPort,
    worker: Worker,
    rx: Vec<Box<dyn RxQueue>>,
    tx: Vec<Box<dyn TxQueue>>,
    chunks: usize,
}

impl Tap {
    fn new(text: &str) -> Self {
        let pool = pool(512);
        let mut worker = Worker::new(pool);
        let mut port = TapPort::open(&spec(text), pool).unwrap_or_else(|e| panic!("{e}"));
        let queues = 0..port.queues();
        let rx = queues.clone().map(|q| worker.rx_queue(&mut port, q).unwrap()).collect();
        let tx = queues.map(|q| worker.tx_queue(&mut port, q).unwrap()).collect();
        let dev = port.interface();
        ip(&format!("addr add 10.77.0.1/24 dev {dev}"));
        ip(&format!("neigh add 10.77.0.2 lladdr {STATION} dev {dev}"));
        let chunks = worker.free_chunks();
        Self { port, worker, rx, tx, chunks }
    }

    /// Returns the number of free packet buffers after the port has returned its spare buffers.
    fn free_chunks(&mut self) -> usize {
        let mut burst = Burst::new();
        for rx in &mut self.rx {
            assert_eq!(rx.drain(&mut self.worker.ctx(), &mut burst), 0);
        }
        assert!(burst.is_empty());
        self.worker.free_chunks()
    }

    /// Receives a burst from every queue; returns the payloads of UDP packets to the port. The kernel also sends other
    /// packets.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut payloads = Vec::new();
        let pool = self.worker.cache.pool();
        for rx in &mut self.rx {
            let mut burst = Burst::new();
            self.worker.rx(&mut **rx, &mut burst);
            payloads.extend(burst.iter().filter_map(|packet| udp_payload(pool, packet)));
            self.worker.free(&mut burst);
        }
        payloads
    }

    fn receive_one(&mut self) -> Vec<u8> {
        let mut payloads = Vec::new();
        until("a packet arrives", || {
            payloads.extend(self.receive());
            !payloads.is_empty()
        });
        assert_eq!(payloads.len(), 1);
        payloads.remove(0)
    }

    fn receive_200(&mut self) -> Vec<Vec<u8>> {
        let mut payloads = Vec::new();
        until("200 packets arrive", || {
            payloads.extend(self.receive());
            payloads.len() >= 200
        });
        payloads
    }

    /// Creates a UDP packet from the port's side to the interface.
    fn packet(&mut self, payload: &[u8], port: u16) -> Packet {
        let end = |mac, ip: [u8; 4], port| UdpEndpoint { mac, ip: ip.into(), port };
        let src = end(STATION.parse().unwrap(), [10, 77, 0, 2], 9);
        let dst = end(self.port.mac(), [10, 77, 0, 1], port);
        let mut frame = vec![0; 42 + payload.len()];
        UdpTemplate::new(&UdpFlow { src, dst }, frame.len()).unwrap().write(&mut frame).unwrap();
        frame[42..].copy_from_slice(payload);
        self.worker.packet(&frame)
    }

    fn send(&mut self, payload: &[u8], port: u16) {
        let mut burst = Burst::from_iter([self.packet(payload, port)]);
        self.worker.tx(&mut *self.tx[0], &mut burst);
        assert!(burst.is_empty());
    }

    fn rx_dropped(&self, reason: DropReason) -> u64 {
        self.rx.iter().map(|rx| rx.counters().dropped(reason)).sum()
    }
}

fn udp_payload(pool: &Pool, packet: &Packet) -> Option<Vec<u8>> {
    let (header, mut frame) = frame(pool, packet);
    if header.needs_checksum() {
        checksum::complete(&mut frame, header.csum_start, header.csum_offset).unwrap();
    }
    let ip = Ipv4Packet::new_checked(frame.get(14..)?).ok()?;
    if ip.dst().octets() != [10, 77, 0, 2] || ip.protocol() != offcore_wire::IpProtocol::UDP {
        return None;
    }
    assert_eq!(frame[..6], STATION.parse::<MacAddr>().unwrap().0);
    let udp = UdpDatagram::new_checked(ip.payload()).unwrap();
    assert!(udp.verify_checksum_v4(ip.src(), ip.dst()), "checksums are whole, or were left open");
    Some(udp.payload().to_vec())
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + len) as u8).collect()
}

/// A socket on the kernel's side, and its port.
fn socket() -> (UdpSocket, u16) {
    let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
    socket.set_read_timeout(Some(common::TIMEOUT)).unwrap();
    let port = socket.local_addr().unwrap().port();
    (socket, port)
}

#[test]
fn packets_pass_both_ways() {
    for text in ["tap:oc%d", "tap:oc%d,offloads=off"] {
        in_namespace("packets_pass_both_ways", move || pass_both_ways(text));
    }
}

fn pass_both_ways(text: &str) {
    let mut tap = Tap::new(text);
    assert!(tap.port.interface().starts_with("oc"));
    assert_eq!(tap.port.mtu(), Some(1500));
    assert!(tap.port.mac().is_unicast());
    assert!(tap.port.status().contains("is up"), "{}", tap.port.status());
    let (socket, port) = socket();
    let mut buffer = [0; 2048];
    for len in [0, 1, 17, 18, 19, 500, 1471, 1472] {
        socket.send_to(&payload(len), "10.77.0.2:9").unwrap();
        assert_eq!(tap.receive_one(), payload(len));
        tap.send(&payload(len), port);
        let received = socket.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..received], payload(len));
    }
    assert_eq!((tap.tx[0].counters().packets(), tap.tx[0].counters().dropped_total()), (8, 0));
    assert_eq!(tap.rx[0].counters().dropped_total(), 0);
    assert_eq!(tap.free_chunks(), tap.chunks);
}

#[test]
fn bursts_keep_their_order() {
    in_namespace("bursts_keep_their_order", || {
        let mut tap = Tap::new("tap:oc0");
        let (socket, port) = socket();
        for n in 0..200u32 {
            socket.send_to(&n.to_le_bytes(), "10.77.0.2:9").unwrap();
        }
        let received = tap.receive_200();
        assert!(received.iter().zip(0u32..).all(|(p, n)| p[..] == n.to_le_bytes()));

        let mut burst: Burst = (0..64u32).map(|n| tap.packet(&n.to_le_bytes(), port)).collect();
        tap.worker.tx(&mut *tap.tx[0], &mut burst);
        assert!(burst.is_empty());
        let mut buffer = [0; 64];
        for n in 0..64u32 {
            assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
            assert_eq!(buffer[..4], n.to_le_bytes());
        }
    });
}

#[test]
fn queues_share_the_traffic() {
    in_namespace("queues_share_the_traffic", || {
        let mut tap = Tap::new("tap:oc0,queues=4");
        assert_eq!(tap.port.queues(), 4);
        for n in 0..200u32 {
            // A new socket creates a new flow.
            let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
            socket.send_to(&n.to_le_bytes(), "10.77.0.2:9").unwrap();
        }
        let mut received = tap.receive_200();
        received.sort_by_key(|p| u32::from_le_bytes(p[..].try_into().unwrap()));
        assert!(received.iter().zip(0u32..).all(|(p, n)| p[..] == n.to_le_bytes()));
        let used = tap.rx.iter().filter(|rx| rx.counters().packets() > 0).count();
        assert!(used > 1, "the kernel spreads flows over the queues");

        let (socket, port) = socket();
        for queue in 0..4 {
            let mut burst = Burst::from_iter([tap.packet(&payload(30), port)]);
            tap.worker.tx(&mut *tap.tx[queue], &mut burst);
            assert_eq!(socket.recv(&mut [0; 64]).unwrap(), 30);
        }
    });
}

#[test]
fn down_link_drops_until_up() {
    in_namespace("down_link_drops_until_up", || {
        let mut tap = Tap::new("tap:oc0");
        ip("link set oc0 down");
        for _ in 0..3 {
            tap.send(&payload(30), 9);
        }
        assert_eq!(tap.tx[0].counters().dropped(DropReason::Down), 3);
        assert!(tap.port.status().contains("is down"), "{}", tap.port.status());
        tap.receive();
        ip("link set oc0 up");
        tap.send(&payload(30), 9);
        assert_eq!(tap.tx[0].counters().packets(), 1);
        assert_eq!(tap.free_chunks(), tap.chunks);
    });
}

#[test]
fn deleted_interface_is_reported() {
    in_namespace("deleted_interface_is_reported", || {
        let mut tap = Tap::new("tap:oc0");
        ip("link del oc0");
        assert!(tap.receive().is_empty());
        let mut burst: Burst = (0..5).map(|_| tap.packet(&payload(30), 9)).collect();
        tap.worker.tx(&mut *tap.tx[0], &mut burst);
        assert!(burst.is_empty());
        assert_eq!(tap.tx[0].counters().dropped(DropReason::Down), 5);
        assert!(tap.port.status().contains("was deleted"), "{}", tap.port.status());
        assert_eq!(tap.free_chunks(), tap.chunks);
    });
}

#[test]
fn packets_beyond_the_buffer_are_counted() {
    in_namespace("packets_beyond_the_buffer_are_counted", || {
        let mut tap = Tap::new("tap:oc0,offloads=off");
        // A privileged user may change the MTU after the port was opened.
        ip("link set oc0 mtu 3000");
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        for len in [1749, 1750, 2900] {
            socket.send_to(&payload(len), "10.77.0.2:9").unwrap();
        }
        // 1750 + 42 bytes would just fit, but cannot be distinguished from a longer packet that was truncated.
        assert_eq!(tap.receive_one(), payload(1749));
        until("two packets are dropped", || {
            tap.receive().is_empty() && tap.rx_dropped(DropReason::TooBig) == 2
        });
        assert_eq!(tap.free_chunks(), tap.chunks);
    });
}

#[test]
fn a_dry_pool_leaves_packets_waiting() {
    in_namespace("a_dry_pool_leaves_packets_waiting", || {
        let mut tap = Tap::new("tap:oc0");
        // The kernel sends packets when the link comes up.
        until("the interface is quiet", || {
            let packets = tap.rx[0].counters().packets();
            std::thread::sleep(std::time::Duration::from_millis(50));
            tap.receive();
            tap.rx[0].counters().packets() == packets
        });
        let hoard: Vec<Packet> = std::iter::from_fn(|| tap.worker.cache.take()).collect();
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        socket.send_to(&payload(30), "10.77.0.2:9").unwrap();
        for _ in 0..10 {
            assert!(tap.receive().is_empty());
        }
        tap.worker.cache.free_all(hoard);
        assert_eq!(tap.receive_one(), payload(30));
        assert_eq!(tap.rx[0].counters().dropped_total(), 0);
    });
}

#[test]
fn open_errors_name_the_cause() {
    in_namespace("open_errors_name_the_cause", || {
        let pool = pool(64);
        let error = |text: &str| -> String {
            let error: PortError = TapPort::open(&spec(text), pool).unwrap_err();
            let source = std::error::Error::source(&error).map(|e| format!(" [{e}]")).unwrap_or_default();
            format!("{error}{source}")
        };
        let open = |text: &str| TapPort::open(&spec(text), pool);
        let _held = open("tap:oc0,offloads=off").unwrap();
        let _several = open("tap:oc4,queues=2,offloads=off").unwrap();
        for held in ["tap:oc0", "tap:oc4", "tap:oc4,queues=2"] {
            assert!(error(held).contains("another program has it open"), "{}", error(held));
        }
        assert!(error("tap:lo").contains("not a TAP, or has another number of queues"));
        ip("tuntap add oc1 mode tap");
        assert!(error("tap:oc1,queues=2").contains("another number of queues"));
        open("tap:oc1,offloads=off").unwrap();
        ip("tuntap add oc2 mode tap multi_queue");
        open("tap:oc2,offloads=off").unwrap();
        ip("link set oc1 mtu 50000");
        let message = error("tap:oc1,offloads=off");
        assert!(
            message.contains("50018 bytes on 1 queues need 24 spare") && message.contains("MTU of 50000"),
            "{message}"
        );
        // Offloads are not offered if the pool has no room for long packets.
        let port = open("tap:oc2").unwrap();
        assert!(port.status().contains("offloads off (they need more packet buffers"), "{}", port.status());

        // The system call is used directly, because the libc function would change the user of every thread.
        // SAFETY: setresuid changes only the credentials of this thread, which ends here.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        assert_eq!(rc, 0);
        assert!(error("tap:oc3").contains("it needs root or CAP_NET_ADMIN"));
    });
}

#[test]
fn interface_keeps_address_and_mtu() {
    in_namespace("interface_keeps_address_and_mtu", || {
        let text = "tap:oc0,offloads=off,mac=02:00:00:00:77:01,mtu=1600";
        let mut tap = Tap::new(text);
        let expected = "MTU 1600, address 02:00:00:00:77:01";
        assert!(tap.port.status().contains(expected), "{}", tap.port.status());
        assert_eq!(tap.port.mac(), MacAddr([2, 0, 0, 0, 0x77, 1]));
        ip("link del oc0");
        until("a queue notices", || {
            tap.receive();
            tap.port.status().contains("was deleted")
        });
        tap.port.tend();
        assert!(tap.port.status().contains(expected), "{}", tap.port.status());
        // A new process gets the same interface.
        drop(tap);
        assert!(Tap::new(text).port.status().contains(expected));
    });
}

#[test]
fn deleted_interface_is_recreated() {
    in_namespace("deleted_interface_is_recreated", || {
        let mut tap = Tap::new("tap:tap0,queues=2");
        ip("link del tap0");
        // A queue detects the deletion.
        until("a queue notices", || {
            tap.receive();
            tap.port.status().contains("was deleted")
        });
        tap.port.tend();
        assert!(tap.port.status().contains("is up") && tap.port.status().contains("re-created 1 times"));
        ip("addr add 10.77.0.1/24 dev tap0");
        ip(&format!("neigh add 10.77.0.2 lladdr {STATION} dev tap0"));
        let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
        socket.send_to(b"there again", "10.77.0.2:9").unwrap();
        assert_eq!(tap.receive_one(), b"there again");
        let port = socket.local_addr().unwrap().port();
        tap.send(b"and back", port);
        let mut buffer = [0; 64];
        let (len, _) = socket.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], b"and back");
        // The interface is not created again.
        tap.port.tend();
        assert!(tap.port.status().contains("re-created 1 times"), "{}", tap.port.status());
    });
}
