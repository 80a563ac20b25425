//! Streams between two stacks over various links: every byte must arrive, once, in order.

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{Algorithm, Cause, Config, KeepAlive, Out};

use crate::frame;
use crate::world::{Impairment, World};

const SECOND: Micros = Micros::from_secs(1);

pub(crate) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut chance = SplitMix::new(seed);
    (0..len).map(|_| chance.below(256) as u8).collect()
}

/// Sends `len` bytes in both directions, closes both ends, and compares the data.
fn exchange(world: &mut World, to: &str, len: usize) {
    world.hosts[1].listen(7, 16);
    world.run(2 * SECOND);
    let here = world.hosts[0].connect(world.now, to);
    let (up, down) = (content(1, len), content(2, len));
    let now = world.now;
    world.hosts[0].send(now, here, &up);
    assert!(
        world.run_until(100 * SECOND, |hosts| !hosts[1].accepted.is_empty()),
        "{:?}",
        world.hosts[0].sessions[&here].closed
    );
    let there = world.hosts[1].accepted[0];
    let now = world.now;
    world.hosts[0].close_after(now, here);
    world.hosts[1].send(now, there, &down);
    world.hosts[1].close_after(now, there);
    let done = world.run_until(3600 * SECOND, |hosts| {
        hosts[0].sessions[&here].end_of_stream && hosts[1].sessions[&there].end_of_stream
    });
    let (here, there) = (&world.hosts[0].sessions[&here], &world.hosts[1].sessions[&there]);
    let state = (here.received.len(), here.closed, there.received.len(), there.closed);
    assert!(done, "{state:?} of {len} at {} s", world.now.as_secs());
    assert!(there.received == up, "the first stream arrives as it was sent");
    assert!(here.received == down, "the second stream arrives as it was sent");
}

fn lossy() -> Impairment {
    Impairment { loss: 30, reorder: 50, duplicate: 20, corrupt: 10 }
}

#[test]
fn both_ways_over_ipv4() {
    exchange(&mut World::new(1, 1500, Config::default()), "10.0.0.2:7", 300_000);
}

#[test]
fn both_ways_over_ipv6() {
    exchange(&mut World::new(1, 1500, Config::default()), "[2001:db8::2]:7", 300_000);
}

#[test]
fn jumbo_frames() {
    exchange(&mut World::new(1, 9000, Config::default()), "10.0.0.2:7", 1_000_000);
}

#[test]
fn smallest_mtu() {
    exchange(&mut World::new(1, 576, Config::default()), "10.0.0.2:7", 100_000);
}

#[test]
fn stream_without_data_closes() {
    exchange(&mut World::new(1, 1500, Config::default()), "10.0.0.2:7", 0);
}

#[test]
fn lossy_links() {
    for seed in 0..8 {
        let algorithm = Algorithm::ALL[seed as usize % 3];
        let mut world = World::new(seed, 1500, Config { algorithm, ..Config::default() });
        world.impairment = lossy();
        exchange(&mut world, "10.0.0.2:7", 200_000);
    }
}

#[test]
fn slow_copies() {
    for seed in 0..4 {
        let mut world = World::new(seed, 1500, Config::default());
        world.hosts.iter_mut().for_each(|host| host.latency = 20);
        world.impairment = if seed % 2 == 0 { Impairment::default() } else { lossy() };
        exchange(&mut world, "10.0.0.2:7", 200_000);
    }
}

#[test]
fn forced_segment_size_disables_offload() {
    let mut world = World::new(1, 1500, Config { largest_segment: 1000, ..Config::default() });
    assert_eq!(world.hosts[0].stack.set_segment_offload(0, 65_000), 0);
}

/// Returns a world whose ports have segmentation offload for up to `longest` bytes.
fn cutting(seed: u64, mtu: u16, longest: u32) -> World {
    let mut world = World::new(seed, mtu, Config::default());
    for host in &mut world.hosts {
        assert_eq!(host.stack.set_segment_offload(0, longest), longest);
    }
    world
}

#[test]
fn tso_segments_match_mtu() {
    for (to, mtu, longest) in
        [("10.0.0.2:7", 1500, 65_000), ("[2001:db8::2]:7", 1500, 65_000), ("10.0.0.2:7", 9000, 20_000)]
    {
        let mut world = cutting(1, mtu, longest);
        exchange(&mut world, to, 1_000_000);
        let most = world.trace.iter().map(|(_, _, frame)| frame.len()).max().unwrap();
        assert_eq!(most, usize::from(mtu) + 14, "{to}: segments are as long as they may be, and no longer");
    }
}

#[test]
fn tso_over_lossy_links() {
    for seed in 0..8 {
        let mut world = cutting(seed, 1500, [3000, 16_000, 65_000][seed as usize % 3]);
        world.impairment = lossy();
        world.hosts.iter_mut().for_each(|host| host.latency = if seed % 2 == 0 { 0 } else { 20 });
        exchange(&mut world, "10.0.0.2:7", 400_000);
    }
}

#[test]
fn packet_buffers_run_out() {
    for seed in 0..4 {
        let mut world = World::new(seed, 1500, Config::default());
        world.hosts.iter_mut().for_each(|host| host.starved = 50);
        exchange(&mut world, "10.0.0.2:7", 20_000);
    }
}

/// Returns all frames of an exchange of two streams.
fn trace(seed: u64, impairment: Impairment, shuffled: bool) -> Vec<(Time, usize, Vec<u8>)> {
    let mut world = World::new(seed, 1500, Config::default());
    world.impairment = impairment;
    world.hosts.iter_mut().for_each(|host| host.shuffled = shuffled);
    exchange(&mut world, "10.0.0.2:7", 200_000);
    world.trace
}

#[test]
fn offloaded_copies_keep_packet_trace() {
    for seed in 0..4 {
        let impairment = if seed == 0 { Impairment::default() } else { lossy() };
        let (plain, offloaded) = (trace(seed, impairment, false), trace(seed, impairment, true));
        let first = plain.iter().zip(&offloaded).position(|(a, b)| a != b);
        assert_eq!((first, plain.len()), (None, offloaded.len()), "seed {seed}");
    }
}

/// Counter-check: data that is reported before its copy is complete makes the comparison fail.
#[test]
#[should_panic(expected = "the first stream arrives as it was sent")]
fn missing_copy_is_detected() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].without_copies = true;
    world.hosts[1].latency = 20;
    exchange(&mut world, "10.0.0.2:7", 200_000);
}

#[test]
fn syn_without_listener_is_refused() {
    let mut world = World::new(1, 1500, Config::default());
    let conn = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:9");
    world.run(SECOND);
    assert_eq!(world.hosts[0].sessions[&conn].closed, Some(Cause::Refused));
}

#[test]
fn unanswered_connect_times_out() {
    let mut world = World::new(1, 1500, Config::default());
    // The peer's MAC address is known, but all IPv4 packets are lost.
    world.swallows = |frame| frame.get(12..14) == Some(&[0x08, 0x00][..]);
    let conn = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:9");
    world.run(20 * SECOND);
    assert_eq!(world.hosts[0].sessions[&conn].closed, None);
    world.run(300 * SECOND);
    assert_eq!(world.hosts[0].sessions[&conn].closed, Some(Cause::TimedOut));
}

#[test]
fn silent_next_hop_is_unreachable() {
    let mut world = World::new(1, 1500, Config::default());
    let conn = world.hosts[0].connect(Time::from_micros(1), "10.0.0.3:9");
    world.run(2 * SECOND);
    assert_eq!(world.hosts[0].sessions[&conn].closed, None);
    world.run(5 * SECOND);
    assert_eq!(world.hosts[0].sessions[&conn].closed, Some(Cause::Unreachable));
}

/// Returns the time in microseconds that 16 MB take over a link with a round-trip time of 40 ms, with the given maximum
/// buffer size.
fn long_way(largest_buffer: u32) -> Micros {
    let mut world = World::new(1, 1500, Config { largest_buffer, ..Config::default() });
    world.delay = Micros::from_millis(20);
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    let bytes = content(4, 16 << 20);
    world.run(SECOND);
    let (there, began) = (world.hosts[1].accepted[0], world.now);
    world.hosts[0].send(began, here, &bytes);
    let all = |hosts: &mut [crate::host::Host; 2]| hosts[1].sessions[&there].received.len() == bytes.len();
    assert!(world.run_until(600 * SECOND, all));
    assert!(world.hosts[1].sessions[&there].received == bytes);
    world.now - began
}

#[test]
fn buffers_grow_with_bdp() {
    let (fixed, grown) = (long_way(256 << 10), long_way(16_000_000));
    assert!(fixed > 2 * SECOND, "a window of 256 KiB a round trip: {fixed:?}");
    assert!(grown < fixed / 2, "{grown:?} instead of {fixed:?}");
}

// RFC 9293, 3.8.4: a silent peer is probed. The connection is aborted only if the peer does not answer.
#[test]
fn keepalive_aborts_only_dead_peers() {
    for is_open in [true, false] {
        keep_alive(is_open);
    }
}

/// Enables keep-alive on an open connection, or while the connection is being opened.
fn keep_alive(is_open: bool) {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    if is_open {
        world.run(SECOND);
    }
    let wanted = KeepAlive { idle: 10 * SECOND, interval: SECOND, probes: 3 };
    let now = world.now;
    world.hosts[0].stack.set_keepalive(now, here, Some(wanted), &mut Out::default()).unwrap();
    if !is_open {
        world.run(SECOND);
    }
    world.trace.clear();
    world.run(95 * SECOND);
    let segments = |host| world.trace.iter().filter(|(_, by, frame)| *by == host && frame[23] == 6).count();
    assert_eq!((segments(0), segments(1)), (9, 9), "each probe has its answer");
    assert_eq!(world.hosts[0].sessions[&here].closed, None);
    world.swallows = |_| true;
    world.run(6 * SECOND);
    assert_eq!(world.hosts[0].sessions[&here].closed, None);
    world.run(10 * SECOND);
    assert_eq!(world.hosts[0].sessions[&here].closed, Some(Cause::TimedOut));
}

// RFC 2923, 2.1: no router reports that packets are too long.
#[test]
fn pmtu_black_hole_is_detected() {
    for to in ["10.0.0.2:7", "[2001:db8::2]:7"] {
        let mut world = World::new(1, 1500, Config::default());
        world.swallows = |frame| frame.len() > 14 + 1400;
        exchange(&mut world, to, 50_000);
    }
}

#[test]
fn a_slow_reader_stops_the_sender() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    let bytes = content(3, 2_000_000);
    world.run(SECOND);
    let there = world.hosts[1].accepted[0];
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 0;
    let now = world.now;
    world.hosts[0].send(now, here, &bytes);
    world.run(60 * SECOND);
    let waiting = world.hosts[1].sessions[&there].reader.available();
    assert!((60_000..=300_000).contains(&waiting), "{waiting} bytes wait: as much as the window promises");
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = usize::MAX;
    let now = world.now;
    world.hosts[1].read(now, there);
    let all = |hosts: &mut [crate::host::Host; 2]| hosts[1].sessions[&there].received.len() == bytes.len();
    assert!(world.run_until(600 * SECOND, all));
    assert!(world.hosts[1].sessions[&there].received == bytes);
}

#[test]
fn close_with_unread_data_resets() {
    // RFC 9293, 3.6.1: "the TCP implementation ... SHOULD send a RST to show that data was lost".
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    world.run(SECOND);
    let there = world.hosts[1].accepted[0];
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 0;
    let now = world.now;
    world.hosts[0].send(now, here, b"nobody reads this");
    world.run(SECOND);
    let now = world.now;
    world.hosts[1].release(now, there);
    world.run(SECOND);
    assert_eq!(world.hosts[0].sessions[&here].closed, Some(Cause::Reset));
}

#[test]
fn close_event_follows_all_data() {
    // An application that closes the connection on this event must not lose data that is still being copied.
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    world.run(SECOND);
    let (there, now, bytes) = (world.hosts[1].accepted[0], world.now, content(6, 10_000));
    world.hosts[0].close_after(now, here);
    world.run(SECOND);
    world.hosts[0].latency = 200;
    let now = world.now;
    world.hosts[1].send(now, there, &bytes);
    world.hosts[1].close_after(now, there);
    let ends = |hosts: &mut [crate::host::Host; 2]| hosts[0].sessions[&here].closed.is_some();
    assert!(world.run_until(600 * SECOND, ends));
    let session = &world.hosts[0].sessions[&here];
    assert_eq!((session.closed, session.end_of_stream), (Some(Cause::Finished), true));
    assert!(session.received == bytes, "{} bytes", session.received.len());
}

// Other connections hold all the memory. A connection that waits for memory has no data in flight, so no
// acknowledgement wakes it up.
#[test]
fn waiting_connection_gets_memory() {
    let mut world = World::new(1, 1500, Config { memory: 1 << 20, ..Config::default() });
    world.hosts[1].listen(7, 64);
    world.run(2 * SECOND);
    let now = world.now;
    let others = [(); 30].map(|()| world.hosts[0].connect(now, "10.0.0.2:7"));
    let here = world.hosts[0].connect(now, "[2001:db8::2]:7");
    world.run(SECOND);
    // The bytes of the other connections do not arrive, so they keep all the memory.
    world.swallows = |frame| frame[12..14] == [8, 0];
    for conn in others {
        let now = world.now;
        world.hosts[0].send(now, conn, &content(7, 1 << 20));
    }
    world.run(SECOND);
    let (now, bytes) = (world.now, content(8, 100_000));
    world.hosts[0].send(now, here, &bytes);
    let all = |hosts: &mut [crate::host::Host; 2]| {
        hosts[1].sessions.values().any(|session| session.received.len() == bytes.len())
    };
    assert!(world.run_until(60 * SECOND, all));
}

#[test]
fn missing_buffer_is_not_a_loss() {
    // There is neither a timeout nor a retransmission. The packet was never sent, and is sent as soon as there are
    // buffers.
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    world.run(SECOND);
    world.hosts[0].starved = 30;
    let (there, now, bytes) = (world.hosts[1].accepted[0], world.now, content(9, 1_000_000));
    world.hosts[0].send(now, here, &bytes);
    let all = |hosts: &mut [crate::host::Host; 2]| hosts[1].sessions[&there].received.len() == bytes.len();
    assert!(world.run_until(600 * SECOND, all));
    let stats = world.hosts[0].stack.info(here).unwrap().stats;
    assert_eq!((stats.fast, stats.timeout, stats.timeouts), (0, 0, 0), "{stats:?}");
}

#[test]
fn teardown_releases_all_resources() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 64);
    let before = world.hosts.each_ref().map(|host| host.stack.memory_used());
    for _ in 0..20 {
        let here = world.hosts[0].connect(world.now, "10.0.0.2:7");
        let now = world.now;
        world.hosts[0].send(now, here, &content(4, 10_000));
        world.run(SECOND);
        let there = world.hosts[1].accepted.pop().unwrap();
        assert_eq!(world.hosts[1].sessions[&there].received.len(), 10_000);
        let now = world.now;
        world.hosts[0].release(now, here);
        world.hosts[1].release(now, there);
    }
    world.run(120 * SECOND);
    for (host, before) in world.hosts.iter().zip(before) {
        assert_eq!((host.stack.connections(), host.stack.flows()), (0, 0));
        assert_eq!(host.stack.memory_used(), before);
    }
}

/// Returns the data frames of host 0 in the trace, over IPv4.
fn data_frames(world: &World) -> Vec<Vec<u8>> {
    let sent = world.trace.iter().filter(|(_, host, frame)| *host == 0 && frame.len() > 200);
    sent.map(|(_, _, frame)| frame.clone()).collect()
}

/// Moves a frame's segment by `by` bytes in the stream.
fn shifted(mut frame: Vec<u8>, by: u32) -> Vec<u8> {
    let seq = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]).wrapping_add(by);
    frame[38..42].copy_from_slice(&seq.to_be_bytes());
    frame::mend(&mut frame);
    frame
}

#[test]
fn data_beyond_window_is_not_dsacked() {
    // RFC 2883, 4: a DSACK block reports data that was received twice. Data that was never accepted is not reported.
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    let now = world.now;
    world.hosts[0].send(now, here, &content(5, 20_000));
    world.run(SECOND);
    let frame = data_frames(&world).pop().unwrap();
    let now = world.now;
    let mut answer = |by: u32| {
        world.hosts[1].receive(now, &mut [shifted(frame.clone(), by)]);
        let answers = std::mem::take(&mut world.hosts[1].frames);
        assert_eq!(answers.len(), 1);
        answers[0].len()
    };
    assert_eq!(answer(0), 78, "a duplicate is acknowledged with a block");
    assert_eq!(answer(1 << 20), 66, "without one");
}
