use std::collections::VecDeque;
use std::net::Ipv4Addr;

use offcore_stats::time::{Micros, Time};
use offcore_wire::TcpFlags;
use proptest::prelude::*;

use super::segment::Reply;
use super::*;

const NOW: Time = Time::from_secs(5_000_000);
const FIN: TcpFlags = TcpFlags(TcpFlags::FIN.0 | TcpFlags::ACK.0);

fn key(port: u16) -> FlowKey {
    FlowKey::v4(Ipv4Addr::new(10, 0, 0, 1), 80, Ipv4Addr::new(10, 0, 0, 2), port)
}

fn entry(port: u16) -> Ended {
    Ended {
        key: key(port),
        snd_nxt: 1000,
        rcv_nxt: 2000,
        ts_recent: 500,
        ts_offset: 77,
        window: 10,
        window_scale: 2,
        timestamps: true,
    }
}

fn segment(seq: u32, flags: TcpFlags, timestamp: Option<u32>) -> Segment {
    Segment { seq, len: 0, flags, timestamp }
}

/// Returns a table with one connection, at index 0.
fn one(entry: Ended) -> TimeWait {
    let mut waiting = TimeWait::new(4);
    assert_eq!(waiting.insert(NOW, entry), Inserted { index: 0, evicted: None });
    waiting
}

fn ack(ts_recent: u32) -> Action {
    Action::Ack(Reply { seq: 1000, ack: 2000, window: 10, timestamps: Some((77, ts_recent)) })
}

/// Returns the action for the first segment in TIME-WAIT.
fn first(entry: Ended, segment: Segment) -> Action {
    one(entry).on_segment(0, NOW, &segment)
}

#[test]
fn time_wait_entry_fits_cache_line() {
    assert_eq!((size_of::<Slot>(), size_of::<Link>()), (64, 8));
}

/// "Acknowledge it, and restart the 2 MSL timeout" (RFC 9293, 3.10.7.4).
#[test]
fn retransmitted_fin_restarts_time_wait() {
    let mut waiting = one(entry(1));
    waiting.insert(NOW, entry(2));
    let later = NOW + Micros::from_secs(59);
    // Twice in a row: every FIN is acknowledged.
    for _ in 0..2 {
        assert_eq!(waiting.on_segment(0, later, &segment(1999, FIN, Some(501))), ack(501));
    }
    let with_data = Segment { len: 99, ..segment(1900, FIN, Some(502)) };
    assert_eq!(waiting.on_segment(0, later, &with_data), ack(502));
    let mut gone = Vec::new();
    assert_eq!(waiting.next_deadline(later), Some(NOW + TIME_WAIT));
    waiting.expire(NOW + TIME_WAIT, 64, |index, key| gone.push((index, *key)));
    assert_eq!(gone, [(1, key(2))]);
    waiting.expire(later + TIME_WAIT - Micros::from_millis(1), 64, |_, _| panic!("too early"));
    assert_eq!(waiting.expire(later + TIME_WAIT, 64, |index, _| assert_eq!(index, 0)), 1);
}

/// "If an incoming segment is not acceptable, an acknowledgment should be sent in reply (unless the RST bit is set)".
#[test]
fn unacceptable_segment_is_acknowledged() {
    for seq in [1999, 2040, 1 << 31] {
        assert_eq!(first(entry(1), segment(seq, TcpFlags::ACK, Some(500))), ack(500), "{seq}");
        assert_eq!(first(entry(1), segment(seq, TcpFlags::RST, None)), Action::Ignore, "{seq}");
    }
    let across = Segment { len: 10, ..segment(1995, TcpFlags::ACK, Some(500)) };
    assert_eq!(first(entry(1), across), Action::Ignore);
    let closed = Ended { window: 0, ..entry(1) };
    let empty = Reply { seq: 1000, ack: 2000, window: 0, timestamps: Some((77, 500)) };
    assert_eq!(first(closed, segment(2001, TcpFlags::ACK, Some(500))), Action::Ack(empty));
    assert_eq!(first(closed, segment(2000, TcpFlags::ACK, Some(500))), Action::Ignore);
}

/// RFC 5961, 7: two hosts that reject each other's ACKs stop exchanging them.
#[test]
fn challenge_acks_are_rate_limited() {
    let mut waiting = one(entry(1));
    let wrong = segment(1, TcpFlags::ACK, Some(500));
    let answers = (0..10_000)
        .filter(|ms| waiting.on_segment(0, NOW + Micros::from_millis(*ms), &wrong) != Action::Ignore);
    assert_eq!(answers.count(), 20);
}

/// "Ignore the segment text": no data follows a FIN.
#[test]
fn data_in_window_is_ignored() {
    let mut waiting = one(entry(1));
    for len in [0, 20] {
        let inside = Segment { len, ..segment(2000, TcpFlags::ACK, Some(600)) };
        assert_eq!(waiting.on_segment(0, NOW, &inside), Action::Ignore);
    }
    assert_eq!(waiting.get(0).unwrap().ts_recent, 600);
}

/// RFC 7323, 5.3, R1, and 3.2.
#[test]
fn old_or_missing_timestamp_is_rejected() {
    assert_eq!(first(entry(1), segment(1999, FIN, Some(499))), ack(500));
    assert_eq!(first(entry(1), segment(2000, TcpFlags::ACK, Some(499))), ack(500));
    assert_eq!(first(entry(1), segment(1999, FIN, None)), Action::Ignore);
    let without = Ended { timestamps: false, ..entry(1) };
    let plain = Action::Ack(Reply { seq: 1000, ack: 2000, window: 10, timestamps: None });
    assert_eq!(first(without, segment(1999, FIN, Some(1))), plain);
}

/// An off-path sender cannot make the peer's next SYN look old.
#[test]
fn unacceptable_segment_keeps_ts_recent() {
    let mut waiting = one(entry(1));
    waiting.on_segment(0, NOW, &segment(1, TcpFlags::ACK, Some(1 << 30)));
    waiting.on_segment(0, NOW, &segment(1, FIN, Some(1 << 30)));
    assert_eq!(waiting.get(0).unwrap().ts_recent, 500);
}

/// RFC 9293: "enter the CLOSED state", and RFC 5961, 3.2.
#[test]
fn only_exact_rst_removes_entry() {
    let reset = |seq| segment(seq, TcpFlags::RST, None);
    assert_eq!(first(entry(1), reset(2000)), Action::Remove);
    assert_eq!(first(entry(1), reset(2001)), ack(500));
    assert_eq!(first(entry(1), reset(1999)), Action::Ignore);
}

/// RFC 6191, 2, sentence by sentence.
#[test]
fn newer_syn_reopens_connection() {
    let syn = |seq, timestamp| segment(seq, TcpFlags::SYN, timestamp);
    let opens = Action::Reopen(Previous { snd_nxt: 1000 });
    // Timestamps before and now: a greater timestamp, or the same with a greater sequence number.
    assert_eq!(first(entry(1), syn(1, Some(501))), opens);
    assert_eq!(first(entry(1), syn(2000, Some(500))), opens);
    assert_eq!(first(entry(1), syn(1999, Some(500))), Action::Ignore);
    assert_eq!(first(entry(1), syn(2000, Some(499))), Action::Ignore);
    // Timestamps before, but not now: a greater sequence number.
    assert_eq!(first(entry(1), syn(2000, None)), opens);
    assert_eq!(first(entry(1), syn(1999, None)), Action::Ignore);
    // No timestamps before: any timestamp now, or a greater sequence number.
    let without = Ended { timestamps: false, ..entry(1) };
    assert_eq!(first(without, syn(1, Some(1))), opens);
    assert_eq!(first(without, syn(2000, None)), opens);
    assert_eq!(first(without, syn(1999, None)), Action::Ignore);
}

/// RFC 5961, 4: a SYN with other flags gets a challenge ACK.
#[test]
fn syn_with_other_flags_is_challenged() {
    for other in [TcpFlags::ACK, TcpFlags::FIN, FIN] {
        assert_eq!(first(entry(1), segment(2000, TcpFlags::SYN | other, Some(501))), ack(500));
    }
    assert_eq!(first(entry(1), segment(2000, TcpFlags::SYN | TcpFlags::RST, None)), Action::Remove);
}

/// RFC 9293, 3.4.3: the new connection's numbers are beyond the old one's.
#[test]
fn new_isn_exceeds_old_sequence() {
    let previous = Previous { snd_nxt: u32::MAX };
    assert_eq!(previous.isn(u32::MAX - 5), 0x1_0000);
    assert_eq!(previous.isn(5), 0x1_0000);
    assert_eq!(previous.isn(0x1_0001), 0x1_0001);
}

#[test]
fn connect_reuses_ports_after_one_second() {
    let waiting = one(entry(1));
    assert_eq!(waiting.reuse(0, NOW + Micros::new(999_999)), None);
    let previous = Previous { snd_nxt: 1000 };
    assert_eq!(waiting.reuse(0, NOW + Micros::from_secs(1)), Some(previous));
    let without = one(Ended { timestamps: false, ..entry(1) });
    assert_eq!(without.reuse(0, NOW + Micros::from_secs(30)), None);
}

#[test]
fn free_index_is_ignored() {
    let mut waiting = one(entry(1));
    assert!(waiting.remove(0));
    assert!(!waiting.remove(0));
    for index in [0, 1, NOBODY] {
        assert_eq!(waiting.get(index), None);
        assert_eq!(waiting.reuse(index, NOW), None);
        assert_eq!(waiting.on_segment(index, NOW, &segment(1999, FIN, Some(500))), Action::Ignore);
    }
    assert_eq!((waiting.len(), waiting.next_deadline(NOW)), (0, None));
}

#[derive(Clone, Debug)]
enum Op {
    Insert,
    Remove(usize),
    Fin(usize),
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Insert),
        1 => any::<usize>().prop_map(Op::Remove),
        1 => any::<usize>().prop_map(Op::Fin),
        2 => (0u64..40_000).prop_map(|ms| Op::Pass(ms * 1000)),
    ]
}

proptest! {
    #[test]
    fn other_segments_keep_time_wait(
        (seq, len, flags) in any::<(u32, u32, u8)>(),
        near in -3i32..50,
        timestamp in proptest::option::of(any::<u32>()),
        (window, window_scale, timestamps, is_near) in any::<(u16, u8, bool, bool)>(),
    ) {
        let entry = Ended { window, window_scale, timestamps, ..entry(1) };
        let seq = if is_near { entry.rcv_nxt.wrapping_add_signed(near) } else { seq };
        let flags = TcpFlags(flags);
        match first(entry, Segment { seq, len, flags, timestamp }) {
            Action::Remove => prop_assert!(flags.contains(TcpFlags::RST) && seq == entry.rcv_nxt),
            Action::Reopen(_) => prop_assert_eq!(flags.0 & 0x17, TcpFlags::SYN.0),
            Action::Ack(reply) => prop_assert_eq!((reply.seq, reply.ack), (entry.snd_nxt, entry.rcv_nxt)),
            Action::Ignore => {}
        }
    }

    #[test]
    fn queue_matches_list_model(ops in proptest::collection::vec(op(), 0..200)) {
        // Milliseconds wrap during the test.
        let mut now = Time::from_millis((1 << 32) - 100_000);
        let mut waiting = TimeWait::new(8);
        let mut model: VecDeque<(Time, u32, FlowKey)> = VecDeque::new();
        let (mut port, mut evicted) = (0, 0);
        for op in ops {
            match op {
                Op::Insert => {
                    port += 1;
                    let full = (model.len() == 8).then(|| model.pop_front().unwrap());
                    let inserted = waiting.insert(now, entry(port));
                    prop_assert_eq!(inserted.evicted, full.map(|(_, index, key)| (index, key)));
                    evicted += u64::from(full.is_some());
                    model.push_back((now, inserted.index, key(port)));
                }
                Op::Remove(at) if !model.is_empty() => {
                    let (_, index, _) = model.remove(at % model.len()).unwrap();
                    prop_assert!(waiting.remove(index));
                }
                Op::Fin(at) if !model.is_empty() => {
                    let (_, index, key) = model.remove(at % model.len()).unwrap();
                    let action = waiting.on_segment(index, now, &segment(1999, FIN, Some(500)));
                    prop_assert_eq!(action, ack(500));
                    model.push_back((now, index, key));
                }
                Op::Pass(time) => {
                    now += Micros::new(time);
                    let mut gone = Vec::new();
                    waiting.expire(now, 3, |index, key| gone.push((index, *key)));
                    for (index, key) in gone.iter().copied() {
                        let (since, ..) = *model.front().unwrap();
                        prop_assert_eq!(model.pop_front(), Some((since, index, key)));
                        prop_assert!(since + TIME_WAIT <= now);
                    }
                    let left = model.front().is_some_and(|(since, ..)| *since + TIME_WAIT <= now);
                    prop_assert_eq!(left, left && gone.len() == 3);
                }
                Op::Remove(_) | Op::Fin(_) => {}
            }
            let next = model.front().map(|(since, ..)| (*since + TIME_WAIT).max(now));
            prop_assert_eq!(waiting.next_deadline(now), next);
            prop_assert_eq!((waiting.len(), waiting.evicted()), (model.len(), evicted));
            for (_, index, key) in &model {
                prop_assert_eq!(waiting.get(*index).map(|entry| entry.key), Some(*key));
            }
        }
    }
}

/// Numbers up to 2^31 ahead are later, for any number.
#[test]
fn sequence_comparison_wraps() {
    const HALF: u32 = 1 << 31;
    for number in [0, 1, HALF - 1, HALF, HALF + 1, u32::MAX - 1, u32::MAX] {
        assert!(!is_before(number, number));
        for ahead in (0..32).flat_map(|bit| [1_u32 << bit, (1 << bit) - 1, (1 << bit) + 1]) {
            let other = number.wrapping_add(ahead);
            assert_eq!(is_before(number, other), (1..=HALF).contains(&ahead), "{number} and {ahead} more");
            assert_eq!(is_before(other, number), ahead >= HALF, "{number} and {ahead} more");
        }
    }
}
