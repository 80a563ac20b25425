//! Connections that have ended: kept for a minute, so that their last segments find somebody who knows (RFC 9293, 3.6.1).

use std::collections::VecDeque;

use offcore_wire::{TcpFlags, Timestamps};

use super::addr::FlowKey;
use super::segment::Segment;

/// How long a name is kept: twice the longest time that a segment lives, as Linux has it.
const KEPT: u64 = 60_000_000;

/// What is known of a connection that has ended.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub key: FlowKey,
    pub snd_nxt: u32,
    pub rcv_nxt: u32,
    pub ts_recent: Option<u32>,
    /// What our timestamps are ahead of the clock, in milliseconds.
    pub ts_offset: u32,
}

/// An acknowledgement to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub seq: u32,
    pub ack: u32,
    pub timestamps: Option<Timestamps>,
}

/// What is done about a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Ignore,
    Acknowledge(Answer),
    /// The peer has forgotten the connection.
    Remove,
    /// It asks for a new connection.
    Reopen,
}

/// Connections that have ended, by number.
#[derive(Debug)]
pub(super) struct TimeWait {
    slots: Vec<Option<Ended>>,
    free: Vec<u32>,
    /// In the order in which they end: all are kept equally long. An entry may have been taken out meanwhile; the number
    /// tells.
    order: VecDeque<(u64, u32, FlowKey)>,
    limit: usize,
    /// Names that were forgotten early, for want of room.
    pub evicted: u64,
}

impl TimeWait {
    /// With room for `limit` connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), order: VecDeque::new(), limit, evicted: 0 }
    }

    pub(super) fn get(&self, index: u32) -> Option<&Ended> {
        self.slots.get(index as usize)?.as_ref()
    }

    /// Keeps one; its number, and which one has given way for it.
    pub(super) fn insert(&mut self, now: u64, ended: Ended) -> (u32, Option<(u32, FlowKey)>) {
        let mut gone = None;
        if self.slots.len() - self.free.len() >= self.limit {
            gone = self.take_first(u64::MAX);
            self.evicted += 1;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.order.push_back((now + KEPT, index, ended.key));
        self.slots[index as usize] = Some(ended);
        (index, gone)
    }

    /// Forgets one.
    pub(super) fn remove(&mut self, index: u32) {
        if self.slots.get_mut(index as usize).and_then(Option::take).is_some() {
            self.free.push(index);
        }
    }

    /// Takes out the oldest one, when its time is over at `now`.
    fn take_first(&mut self, now: u64) -> Option<(u32, FlowKey)> {
        while let Some((due, index, key)) = self.order.front().copied() {
            let there = self.get(index).is_some_and(|ended| ended.key == key);
            if there && due > now {
                return None;
            }
            self.order.pop_front();
            if there {
                self.remove(index);
                return Some((index, key));
            }
        }
        None
    }

    /// Forgets those whose time is over, `at_most` of them, and calls `gone` for each.
    pub(super) fn expire(&mut self, now: u64, at_most: usize, mut gone: impl FnMut(u32, &FlowKey)) {
        for _ in 0..at_most {
            let Some((index, key)) = self.take_first(now) else { return };
            gone(index, &key);
        }
    }

    /// When the oldest one's time is over.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.order.front().map(|(due, ..)| *due)
    }

    /// A segment of one of them has come (RFC 9293, 3.10.7.4).
    pub(super) fn on_segment(&self, now: u64, index: u32, segment: &Segment) -> Action {
        let Some(ended) = self.get(index) else { return Action::Ignore };
        let stamps = segment.options.timestamps;
        let newer = |than: u32, value: u32| value.wrapping_sub(than).cast_signed() > 0;
        if segment.has(TcpFlags::RST) {
            // A reset that is not exactly right may be anybody's (RFC 1337, RFC 5961).
            return if segment.seq == ended.rcv_nxt { Action::Remove } else { Action::Ignore };
        }
        if segment.has(TcpFlags::SYN) && !segment.has(TcpFlags::ACK) {
            // RFC 6191, 2: a newer timestamp, or else a newer sequence number, is of a new connection.
            let new = match (ended.ts_recent, stamps) {
                (Some(recent), Some(stamps)) if stamps.value != recent => newer(recent, stamps.value),
                _ => newer(ended.rcv_nxt, segment.seq),
            };
            if new {
                return Action::Reopen;
            }
        }
        // What takes no sequence number may be an answer to ours: answering it would never end.
        if segment.seq_len() == 0 {
            return Action::Ignore;
        }
        let value = ended.ts_offset.wrapping_add((now / 1000) as u32);
        let timestamps = ended.ts_recent.map(|echo| Timestamps { value, echo });
        Action::Acknowledge(Answer { seq: ended.snd_nxt, ack: ended.rcv_nxt, timestamps })
    }
}

#[cfg(test)]
mod tests {
    use offcore_wire::TcpOptions;

    use super::*;

    fn ended(port: u16) -> Ended {
        let key = FlowKey::v4([10, 0, 0, 1].into(), 80, [10, 0, 0, 2].into(), port);
        Ended { key, snd_nxt: 500, rcv_nxt: 1000, ts_recent: Some(77), ts_offset: 5 }
    }

    fn segment(flags: TcpFlags, seq: u32, value: Option<u32>) -> Segment {
        let timestamps = value.map(|value| Timestamps { value, echo: 0 });
        Segment {
            src_port: 1,
            dst_port: 80,
            seq,
            ack: 500,
            flags,
            window: 0,
            options: TcpOptions { timestamps, ..TcpOptions::default() },
            payload_at: 54,
            payload_len: 0,
            congestion_experienced: false,
        }
    }

    #[test]
    fn a_repeated_fin_is_acknowledged() {
        // RFC 9293, 3.10.7.4: "the only thing that can arrive in this state is a retransmission of the remote FIN.
        // Acknowledge it".
        let mut kept = TimeWait::new(8);
        let (index, _) = kept.insert(0, ended(9));
        let fin = segment(TcpFlags::FIN | TcpFlags::ACK, 999, Some(80));
        let timestamps = Some(Timestamps { value: 7, echo: 77 });
        let answer = Answer { seq: 500, ack: 1000, timestamps };
        assert_eq!(kept.on_segment(2000, index, &fin), Action::Acknowledge(answer));
        assert_eq!(kept.on_segment(2000, index, &segment(TcpFlags::ACK, 1000, Some(80))), Action::Ignore);
    }

    #[test]
    fn a_newer_syn_reopens() {
        // RFC 6191, 2; asterinas #1531: a name that is kept must not refuse new connections.
        let mut kept = TimeWait::new(8);
        let (index, _) = kept.insert(0, ended(9));
        let syn = |seq, value| kept.on_segment(1, index, &segment(TcpFlags::SYN, seq, value));
        assert_eq!(syn(5, Some(78)), Action::Reopen);
        assert_eq!(syn(1001, Some(77)), Action::Reopen);
        assert_eq!(syn(1001, None), Action::Reopen);
        assert!(matches!(syn(999, Some(77)), Action::Acknowledge(_)));
        assert!(matches!(syn(2000, Some(76)), Action::Acknowledge(_)));
    }

    #[test]
    fn only_the_right_reset_removes() {
        let mut kept = TimeWait::new(8);
        let (index, _) = kept.insert(0, ended(9));
        let reset = |seq| kept.on_segment(1, index, &segment(TcpFlags::RST, seq, None));
        assert_eq!((reset(999), reset(1000)), (Action::Ignore, Action::Remove));
    }

    #[test]
    fn all_go_after_a_minute() {
        let mut kept = TimeWait::new(8);
        for port in 0..4 {
            kept.insert(u64::from(port) * 1000, ended(port));
        }
        kept.remove(1);
        let mut gone = Vec::new();
        kept.expire(KEPT + 2000, 8, |index, _| gone.push(index));
        assert_eq!(gone, [0, 2]);
        assert_eq!(kept.next_deadline(), Some(KEPT + 3000));
    }

    #[test]
    fn the_oldest_gives_way() {
        let mut kept = TimeWait::new(2);
        kept.insert(0, ended(1));
        kept.insert(1, ended(2));
        let (index, gone) = kept.insert(2, ended(3));
        assert_eq!((index, gone), (0, Some((0, ended(1).key))));
        assert_eq!(kept.evicted, 1);
        assert_eq!(kept.get(0).unwrap().key, ended(3).key);
    }
}
