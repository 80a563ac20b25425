//! Frames arrive as they were sent: compared byte by byte in a capture, and a million packets checked by their
//! receiver.

use std::path::Path;

use peers::{Need, TempDir, exclusive, one_core};

use super::{NEEDS, Net, TIMEOUT, stop};
use crate::copy::{read_capture, write_capture};
use crate::switch::{self, wait_for_status};

/// Returns frames of many lengths, all different.
fn frames() -> Vec<Vec<u8>> {
    let lengths = (60..=1514).step_by(13).chain([1514, 60, 14, 42]);
    let frame = |(n, len): (usize, usize)| {
        let mut frame: Vec<u8> = (0..len).map(|at| (at * 7 + n * 31) as u8).collect();
        // The destination address is unused, and the EtherType is IEEE 802 Local Experimental, which no stack answers.
        frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
        frame
    };
    lengths.enumerate().map(frame).collect()
}

/// Returns the frames in a capture file that [`frames`] has generated.
fn captured(path: &Path) -> Vec<Vec<u8>> {
    let mut frames = read_capture(path);
    frames.retain(|frame| frame.get(12..14) == Some(&[0x88, 0xb5]));
    frames
}

#[test]
fn tcpdump_sees_sent_bytes() {
    let Some(core) = one_core(&[&NEEDS[..], &[Need::Tcpdump]].concat()) else { return };
    for mode in ["", ",mode=skb"] {
        let (net, dir) = (Net::new(core.number(), 1, 1500), TempDir::new().unwrap());
        let sent = frames();
        write_capture(&dir.file("in"), &sent);
        let seen = dir.file("seen");
        let count = sent.len().to_string();
        let more = ["-c", &count, "ether", "proto", "0x88b5"];
        let mut tcpdump = switch::tcpdump(&net.client, "vc", &seen, &more);

        // The switch sends the file to the client's stack, and writes that stack's packets to another file.
        let files = format!("pcap:{},{}", dir.file("in").display(), dir.file("out").display());
        let mut offcore = net.start_with(&[&files, &format!("af_xdp:p0{mode}")], &[]);
        switch::wait_for_packets(&mut offcore, 1, "tx", sent.len() as u64);
        tcpdump.wait_for_exit(TIMEOUT).unwrap();
        let report = stop(offcore, &net);
        let seen = captured(&seen);
        // Short frames are padded to the minimum frame length.
        let padded = |mut frame: Vec<u8>| {
            frame.resize(frame.len().max(60), 0);
            frame
        };
        let sent: Vec<_> = sent.into_iter().map(padded).collect();
        assert_eq!(seen.len(), sent.len(), "{report}");
        assert!(seen == sent, "frames were changed on their way");
        report.assert_only_drops(&[]);
    }
}

/// Minimum number of packets in each direction.
const PACKETS: u64 = 500_000;

#[test]
fn million_packets_between_our_ports() {
    let Some(_cores) = exclusive(&[&NEEDS[..], &[Need::Cores(2)]].concat()) else { return };
    let net = Net::new(0, 1, 1500);
    // The sender's rate is low enough for the receiver on a busy machine.
    let rate = PACKETS / 10;
    let here =
        |port: &str, size| [format!("af_xdp:{port}"), format!("gen:size={size},count={PACKETS},rate={rate}")];
    let start = |netns, ports: [String; 2], lcore, state| {
        let mut offcore = switch::start_in(netns, lcore, &ports, &[]);
        wait_for_status(&mut offcore, 0, state);
        offcore
    };
    for (netns, interface) in [(&net.switch, "p0"), (&net.client, "vc")] {
        // Otherwise the stacks send their own packets, too.
        netns.run("sysctl", &["-q", "net.ipv6.conf.all.disable_ipv6=1"]).unwrap();
        netns.ip(&["address", "flush", "dev", interface]).unwrap();
    }
    // Both switches run before the first packet can be sent.
    net.client.ip(&["link", "set", "vc", "down"]).unwrap();
    let mut left = start(&net.switch, here("p0", 64), "0", "interface p0 has no carrier");
    let mut right = start(&net.client, here("vc", 1518), "1", "interface vc is down");
    net.client.ip(&["link", "set", "vc", "up"]).unwrap();
    for offcore in [&mut left, &mut right] {
        switch::wait_for(offcore, "packets made", PACKETS, |report| report.generator(1).sent);
    }
    // The last packets are still in flight, and the kernel's drop counters are read only periodically.
    for offcore in [&mut left, &mut right] {
        (0..3).for_each(|_| drop(offcore.wait_for("a report", |line| line.json.is_some()).unwrap()));
    }
    let (left, right) = (switch::stop(left), switch::stop(right));
    for (from, to) in [(&left, &right), (&right, &left)] {
        let (sent, found) = (from.packets(0, "tx"), to.generator(1));
        let dropped = to.dropped("port0 rx full") + to.dropped("port0 rx no_buffer");
        assert_eq!((found.received + dropped, found.wrong), (sent, 0), "{from} {to}");
        assert!(found.received > 0 && found.verified == found.received, "{from} {to}");
        let not_sent = from.dropped("port0 tx down") + from.dropped("port0 tx failed");
        assert_eq!(sent + not_sent, PACKETS, "{from} {to}");
    }
    net.assert_no_programs();
}

#[test]
fn jumbo_frames_take_several_buffers() {
    let Some(core) = one_core(&NEEDS) else { return };
    for mode in [",mode=copy", ",mode=skb"] {
        let net = Net::new(core.number(), 1, 9000);
        let offcore = net.start(mode, &[]);
        net.ping_until_answered();
        for size in [56, 1750, 1751, 3600, 8972] {
            assert!((0..4).any(|_| net.ping(size)), "{size} bytes{mode}: {}", offcore.tail());
        }
        net.streams();
        let report = stop(offcore, &net);
        assert!(report.bytes(0, "rx") > 2000 * report.packets(0, "rx"), "no jumbo frames: {report}");
    }
}

#[test]
fn large_buffers_hold_whole_frames() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 1, 3000);
    let offcore = net.start("", &["--mbuf-size", "4096"]);
    net.ping_until_answered();
    assert!((0..4).any(|_| net.ping(2972)), "{}", offcore.tail());
    stop(offcore, &net);
}
