//! Frames of 9000 bytes and more over every kind of port, checked byte by byte at the receiver.
//!
//! Each entry of [`PAIRS`] has two connected ports on one line, one for each of two processes. Every pair runs the same
//! tests.

use peers::{
    Need, NetVhost, Netns, Offcore, TempDir, Testpmd, TestpmdConfig, VirtioUser, exclusive, require,
};

use crate::switch::{self, Copies, Generated, Report};

/// A frame with 9000 bytes of payload, including FCS.
const JUMBO: u32 = 9018;
/// Number of frames in each direction.
const PACKETS: u64 = 20_000;
/// Frames per second. At higher rates, frames are dropped if a process has to wait for a core.
const RATE: u64 = 10_000;

/// Two connected ports. `S` stands for a socket of the test. The first port is opened first.
struct Pair {
    name: &'static str,
    ports: [&'static str; 2],
    /// The longest frame that passes, including FCS.
    longest: u32,
}

/// All pairs that support jumbo frames.
const PAIRS: &[Pair] = &[
    Pair { name: "split rings", ports: ["vhost:S", "virtio-user:S,queue_size=4096"], longest: 65_553 },
    Pair {
        name: "packed rings",
        ports: ["vhost:S", "virtio-user:S,queue_size=4096,packed"],
        longest: 65_553,
    },
    Pair {
        name: "split rings, one chain a frame",
        ports: ["vhost:S", "virtio-user:S,queue_size=4096,mrg=off,mtu=9000"],
        longest: 9026,
    },
    Pair {
        name: "packed rings, one chain a frame",
        ports: ["vhost:S", "virtio-user:S,queue_size=4096,packed,mrg=off,mtu=9000"],
        longest: 9026,
    },
    Pair {
        name: "the back end connects",
        ports: ["virtio-user:S,server,queue_size=4096,offloads=off", "vhost:S,client"],
        longest: 65_553,
    },
];

impl Pair {
    fn ports(&self, dir: &TempDir) -> [String; 2] {
        let socket = dir.file("s").display().to_string();
        self.ports.map(|port| port.replace('S', &socket))
    }
}

/// Starts a switch between these ports on an lcore.
fn switch_of<const N: usize>(lcore: usize, ports: [&str; N]) -> Offcore {
    switch::start_on(lcore, &ports, Copies::Core, 1, &["--mbufs", "65536"])
}

fn generator(size: u32) -> String {
    format!("gen:size={size},count={PACKETS},rate={RATE}")
}

/// Asserts that the other end received all frames that a generator sent, except for frames that were dropped before the
/// ports were connected, and for `dropped` frames that were dropped for lack of room.
fn assert_arrived(what: &str, sent: &Generated, found: &Generated, dropped: u64, reports: &[&Report]) {
    let text = || reports.iter().map(|report| report.to_string()).collect::<String>();
    assert_eq!(sent.sent, PACKETS, "{what}: {}", text());
    assert_eq!(found.received + dropped, PACKETS, "{what}, {dropped} dropped: {}", text());
    assert_eq!((found.verified, found.wrong), (found.received, 0), "{what}: {}", text());
    assert!(found.received > PACKETS / 2, "{what}: {}", text());
}

/// Frames of `size` bytes go in both directions between two processes, over `pair`.
fn both_ways(pair: &Pair, size: u32) {
    let dir = TempDir::new().unwrap();
    let [first, second] = pair.ports(&dir);
    let generator = generator(size);
    let mut first = switch_of(0, [&first, &generator]);
    switch::wait_for_report(&mut first);
    let mut second = switch_of(1, [&second, &generator]);
    for side in [&mut first, &mut second] {
        switch::wait_for_packets(side, 1, "rx", PACKETS);
    }
    let early = [&first, &second].map(|side| switch::latest(side).dropped("port0 tx down"));
    switch::wait_for_packets(&mut second, 1, "tx", PACKETS - early[0]);
    switch::wait_for_packets(&mut first, 1, "tx", PACKETS - early[1]);
    let (first, second) = (switch::stop(first), switch::stop(second));
    for (from, to) in [(&first, &second), (&second, &first)] {
        from.assert_only_drops(&["port0 tx down"]);
        let early = from.dropped("port0 tx down");
        assert_arrived(pair.name, &from.generator(1), &to.generator(1), early, &[from, to]);
        let bytes = (PACKETS - early) * u64::from(size - 4);
        assert_eq!((from.bytes(0, "tx"), to.bytes(0, "rx")), (bytes, bytes), "{}: {from} {to}", pair.name);
    }
}

#[test]
fn frames_of_9000_bytes_both_ways() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    for pair in PAIRS {
        both_ways(pair, JUMBO);
    }
}

#[test]
fn the_longest_frames_both_ways() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    for pair in PAIRS.iter().take(if switch::full() { usize::MAX } else { 2 }) {
        both_ways(pair, pair.longest);
    }
}

/// Two generators, each on one end of a pair. A switch connects the other ends, with forwarding mode `forward`.
fn through_a_switch(pairs: [&Pair; 2], forward: &str) {
    let (dirs, generator) = ([TempDir::new().unwrap(), TempDir::new().unwrap()], generator(JUMBO));
    let [[a, a_end], [b, b_end]] = [pairs[0].ports(&dirs[0]), pairs[1].ports(&dirs[1])];
    let more = ["--mbufs", "65536", "--forward", forward];
    let mut middle = switch::start_on(0, &[&a, &b], Copies::Core, 1, &more);
    switch::wait_for_report(&mut middle);
    let mut ends = switch_of(1, [&a_end, &generator, &b_end, &generator]);
    let mut done = |port| switch::wait_for_packets(&mut ends, port, "rx", PACKETS);
    done(1);
    done(3);
    // Packets in flight arrive unless they were dropped.
    let lost = |ends: &Report, middle: &Report, from: usize, to: usize| {
        ends.dropped(&format!("port{from} tx down"))
            + ["full", "down"]
                .map(|why| middle.dropped(&format!("port{} tx {why}", to / 2)))
                .iter()
                .sum::<u64>()
    };
    for (from, to) in [(0, 2), (2, 0)] {
        let what = format!("frames at port {to}");
        switch::wait_for(&mut ends, &what, PACKETS, |report| {
            report.packets(to + 1, "tx") + lost(report, &switch::latest(&middle), from, to)
        });
    }
    let (ends, middle) = (switch::stop(ends), switch::stop(middle));
    for (from, to) in [(0, 2), (2, 0)] {
        let (sent, found) = (ends.generator(from + 1), ends.generator(to + 1));
        assert_arrived(forward, &sent, &found, lost(&ends, &middle, from, to), &[&ends, &middle]);
    }
}

/// From guest to guest in one copy, and through packet buffers.
#[test]
fn frames_of_9000_bytes_through_a_switch() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let [split, packed, split_chains, packed_chains, connecting] = PAIRS else {
        panic!("a pair has no test here")
    };
    through_a_switch([split, packed], "io");
    through_a_switch([packed_chains, split_chains], "mac");
    // The switch uses virtio-user ports.
    through_a_switch([connecting, connecting], "macswap");
}

/// `txonly` and `flowgen` also generate frames of several buffers.
#[test]
fn jumbo_frames_in_forwarding_modes() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    for mode in ["txonly", "flowgen"] {
        let dir = TempDir::new().unwrap();
        let [first, second] = PAIRS[1].ports(&dir);
        let more = ["--forward", mode, "--txpkts", "9018"];
        let first = switch::start_on(0, &[&first], Copies::Core, 1, &more);
        let mut second = switch::start_on(1, &[&second], Copies::Core, 1, &["--forward", "rxonly"]);
        switch::wait_for_packets(&mut second, 0, "rx", PACKETS);
        let (second, first) = (switch::stop(second), switch::stop(first));
        let packets = second.packets(0, "rx");
        assert_eq!(second.bytes(0, "rx"), packets * 9014, "{second}");
        assert!(first.packets(0, "tx") >= packets, "{first}");
    }
}

/// Two generators that are directly connected.
#[test]
fn every_length_between_generators() {
    let Some(_cores) = exclusive(&[]) else { return };
    for size in [1797, 3589, 9018, 9220, 65_553] {
        let generator = format!("gen:size={size},count={PACKETS}");
        let mut offcore = switch::start(&[&generator, &generator], Copies::Core, 1, &[]);
        for port in [0, 1] {
            switch::wait_for_packets(&mut offcore, port, "tx", PACKETS);
        }
        let report = switch::stop(offcore);
        report.assert_only_drops(&[]);
        for (from, to) in [(0, 1), (1, 0)] {
            assert_arrived("gen", &report.generator(from), &report.generator(to), 0, &[&report]);
        }
    }
}

mod captures;
mod kernel;
mod testpmd;
