//! Tests ports on veth pairs, in separate network namespaces.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Worker, frame, in_namespace, ip, pool, until};
use offcore_mem::{Burst, Pool};
use offcore_port::af_packet::AfPacketPort;
use offcore_port::af_xdp::AfXdpPort;
use offcore_port::spec::PortSpec;
use offcore_port::{DropReason, Port, RxQueue, TxQueue};
use offcore_wire::virtio_net::NetHeader;

/// The EtherType of the test's frames.
const KIND: [u8; 2] = [0x88, 0xb5];

/// A port and the worker with all of its queues.
struct End {
    rx: Vec<Box<dyn RxQueue>>,
    tx: Vec<Box<dyn TxQueue>>,
    port: Box<dyn Port>,
    worker: Worker,
    pool: &'static Pool,
}

impl End {
    /// Opens a port without taking its RX queues.
    fn open_to_send(text: &str) -> Self {
        let pool = pool(1024);
        let mut worker = Worker::new(pool);
        let mut port: Box<dyn Port> = match text.parse().unwrap() {
            PortSpec::AfPacket(spec) => {
                Box::new(AfPacketPort::open(&spec, pool).unwrap_or_else(|e| panic!("{e}")))
            }
            PortSpec::AfXdp(spec) => Box::new(AfXdpPort::open(&spec, pool).unwrap_or_else(|e| panic!("{e}"))),
            other => panic!("{other}"),
        };
        let queues = 0..port.queues();
        let tx = queues.map(|q| worker.tx_queue(&mut *port, q).unwrap()).collect();
        Self { rx: Vec::new(), tx, port, worker, pool }
    }

    fn open(text: &str) -> Self {
        let mut end = Self::open_to_send(text);
        (0..end.port.queues()).for_each(|_| end.receive_from_one_more());
        end
    }

    fn receive_from_one_more(&mut self) {
        let index = self.rx.len() as u16;
        self.rx.push(self.worker.rx_queue(&mut *self.port, index).unwrap());
    }

    fn send(&mut self, frame: &[u8]) {
        let mut burst = Burst::from_iter([self.worker.packet_with(&NetHeader::default(), frame)]);
        self.worker.tx(&mut *self.tx[0], &mut burst);
        self.tx[0].poll(&mut self.worker.ctx());
        assert!(burst.is_empty());
    }

    /// Receives a burst from every queue; returns the test's frames. The kernel also sends other frames.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        for rx in &mut self.rx {
            let mut burst = Burst::new();
            self.worker.rx(&mut **rx, &mut burst);
            frames
                .extend(burst.iter().map(|packet| frame(self.pool, packet).1).filter(|f| f[12..14] == KIND));
            self.worker.free(&mut burst);
        }
        frames
    }

    fn wait_for_link(&mut self) {
        until("the link is up", || {
            self.port.tend();
            self.port.status().contains("is up")
        });
    }
}

/// Returns a frame of `len` bytes that contains a number.
fn numbered(number: u64, len: usize) -> Vec<u8> {
    let mut frame = vec![number as u8; len];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8]);
    frame[12..14].copy_from_slice(&KIND);
    frame[14..22].copy_from_slice(&number.to_be_bytes());
    frame
}

fn number_of(frame: &[u8]) -> u64 {
    u64::from_be_bytes(*frame[14..].first_chunk().unwrap())
}

fn veth() {
    ip("link add v0 index 70 type veth peer name v1 index 71");
    ip("link set v0 up");
    ip("link set v1 up");
}

#[test]
fn link_flap_preserves_long_packets() {
    in_namespace("out_of_step", || {
        veth();
        let (mut a, mut b) = (End::open("af_packet:v0"), End::open("af_packet:v1"));
        // The slots were sized for the previous MTU.
        ip("link set v0 mtu 9000");
        ip("link set v1 mtu 9000");
        b.wait_for_link();
        b.send(&numbered(1, 5000));
        ip("link set v0 down");
        ip("link set v0 up");
        b.wait_for_link();
        b.send(&numbered(2, 6000));
        let mut frames = Vec::new();
        until("both packets arrive", || {
            frames.extend(a.receive());
            frames.len() + a.rx[0].counters().dropped_total() as usize >= 2
        });
        let lens: Vec<usize> = frames.iter().map(Vec::len).collect();
        assert_eq!(lens, [5000, 6000]);
        assert_eq!(frames, [numbered(1, 5000), numbered(2, 6000)]);
    });
}

#[test]
fn runts_are_counted() {
    in_namespace("runts", || {
        veth();
        for kind in ["af_packet", "af_xdp"] {
            let mut a = End::open("af_packet:v0");
            let mut b =
                End::open(&format!("{kind}:v1{}", if kind == "af_xdp" { ",ring_size=64" } else { "" }));
            a.wait_for_link();
            b.wait_for_link();
            for number in 0..3 {
                b.send(&[2; 13]);
                b.send(&[]);
                b.send(&numbered(number, 60));
            }
            let mut frames = Vec::new();
            until("the frames arrive", || {
                frames.extend(a.receive());
                frames.len() >= 3
            });
            let counters = b.tx[0].counters();
            let counted = (counters.packets(), counters.bytes(), counters.dropped(DropReason::Malformed));
            assert_eq!(counted, (3, 180, 6), "{kind}");
        }
    });
}

/// Until a socket has joined the group, it would receive the packets of all queues.
#[test]
fn opening_under_traffic_receives_once() {
    in_namespace("twice", || {
        veth();
        let sent = Arc::new(AtomicU64::new(0));
        for _ in 0..3 {
            let stop = Arc::new(AtomicBool::new(false));
            let before = sent.load(Ordering::Relaxed);
            let sender = std::thread::spawn({
                let (sent, stop) = (Arc::clone(&sent), Arc::clone(&stop));
                move || {
                    let mut b = End::open("af_packet:v1");
                    b.wait_for_link();
                    while !stop.load(Ordering::Relaxed) {
                        b.send(&numbered(sent.fetch_add(1, Ordering::Relaxed), 60));
                    }
                }
            });
            until("packets are sent", || sent.load(Ordering::Relaxed) > before);
            let mut a = End::open_to_send("af_packet:v0,queues=8,fanout=lb,slots=4096");
            let mut numbers = Vec::new();
            for _ in 0..8 {
                a.receive_from_one_more();
                until("the queues are emptied", || {
                    let frames = a.receive();
                    numbers.extend(frames.iter().map(|frame| number_of(frame)));
                    frames.len() < 64
                });
            }
            stop.store(true, Ordering::Relaxed);
            sender.join().unwrap();
            until("the rest is received", || {
                let frames = a.receive();
                numbers.extend(frames.iter().map(|frame| number_of(frame)));
                frames.is_empty()
            });
            let mut seen = HashSet::new();
            assert!(!numbers.is_empty());
            let twice = numbers.iter().filter(|&&number| !seen.insert(number)).count();
            assert_eq!(twice, 0, "of {} packets", numbers.len());
        }
    });
}

#[test]
fn losses_survive_a_new_interface() {
    in_namespace("lost_before", || {
        veth();
        let (mut a, mut b) = (End::open("af_packet:v0,slots=64"), End::open("af_packet:v1"));
        b.wait_for_link();
        (0..300).for_each(|number| b.send(&numbered(number, 60)));
        ip("link del v0");
        let mut received = a.receive().len();
        a.port.tend();
        veth();
        until("the new interface is in use", || {
            a.port.tend();
            received += a.receive().len();
            a.port.status().contains("is up")
        });
        until("the rest is received", || {
            let packets = a.receive().len();
            received += packets;
            packets == 0
        });
        // The kernel may have sent other packets, and some of these may have been lost.
        let lost = a.rx[0].counters().dropped(DropReason::Full) as usize;
        assert!(received >= 32 && received + lost >= 300, "{received} received, {lost} lost");
    });
}

#[test]
fn renamed_interface_is_released() {
    in_namespace("renamed", || {
        veth();
        for kind in ["af_packet:v0", "af_xdp:v0,ring_size=64"] {
            let (mut a, mut b) = (End::open(kind), End::open("af_packet:v1"));
            let is_promiscuous = |name: &str| !ip(&format!("-d link show {name}")).contains("promiscuity 0");
            a.wait_for_link();
            assert!(is_promiscuous("v0"), "{kind}");
            ip("link set v0 down");
            ip("link set v0 name other");
            ip("link set other up");
            b.wait_for_link();
            until(&format!("{kind}: the interface is let go"), || {
                a.port.tend();
                a.receive();
                a.send(&numbered(1, 60));
                !is_promiscuous("other")
            });
            b.send(&numbered(2, 60));
            assert_eq!(a.receive(), [[0; 0]; 0], "{kind}");
            ip("link set other down");
            ip("link set other name v0");
            ip("link set v0 up");
            a.wait_for_link();
            b.wait_for_link();
            until(&format!("{kind}: a frame arrives"), || {
                a.port.tend();
                b.send(&numbered(3, 60));
                !a.receive().is_empty()
            });
        }
    });
}

#[test]
fn reused_ifindex_is_detected() {
    in_namespace("same_number", || {
        veth();
        for kind in ["af_packet:v0", "af_xdp:v0,ring_size=64"] {
            let mut a = End::open(kind);
            a.wait_for_link();
            ip("link del v0");
            veth();
            let mut b = End::open("af_packet:v1");
            b.wait_for_link();
            let mut arrived = 0;
            until(&format!("{kind}: a frame arrives"), || {
                a.port.tend();
                b.send(&numbered(1, 60));
                arrived += a.receive().len();
                arrived > 0
            });
            let got = a.tx[0].counters().packets();
            until(&format!("{kind}: a frame is sent"), || {
                a.send(&numbered(2, 60));
                a.tx[0].counters().packets() > got && !b.receive().is_empty()
            });
        }
    });
}
