//! Processing of segments for connections in TIME-WAIT.

use offcore_stats::time::Time;
use offcore_wire::TcpFlags;

use super::{ACK_GAP_MS, Ended, Previous, TimeWait, is_before};

/// A received segment.
#[derive(Clone, Copy, Debug)]
pub(in crate::proto) struct Segment {
    /// SEG.SEQ.
    pub(in crate::proto) seq: u32,
    /// Bytes of payload.
    pub(in crate::proto) len: u32,
    /// The control bits.
    pub(in crate::proto) flags: TcpFlags,
    /// TSval, if the segment has one and this stack uses timestamps.
    pub(in crate::proto) timestamp: Option<u32>,
}

/// The required action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) enum Action {
    /// Do nothing.
    Ignore,
    /// Send this ACK.
    Ack(Reply),
    /// The SYN reopens the connection: remove it here, and process the SYN as a listener does, with the initial
    /// sequence number from [`Previous::isn`].
    Reopen(Previous),
    /// The peer has reset the connection: remove it.
    Remove,
}

/// An ACK for a connection in TIME-WAIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) struct Reply {
    /// SEG.SEQ.
    pub(in crate::proto) seq: u32,
    /// SEG.ACK.
    pub(in crate::proto) ack: u32,
    /// The window as sent.
    pub(in crate::proto) window: u16,
    /// With timestamps: the offset to add to the clock for TSval, and TSecr.
    pub(in crate::proto) timestamps: Option<(u32, u32)>,
}

impl TimeWait {
    /// Processes a segment for the connection at an index (RFC 9293, 3.10.7.4; RFC 6191 for a SYN). Without a
    /// connection, the segment is ignored.
    ///
    /// A retransmitted FIN is always acknowledged and restarts the 60 s. Other segments are acknowledged at most every
    /// 500 ms, because two hosts that reject each other's ACKs would otherwise exchange ACKs forever.
    pub(in crate::proto) fn on_segment(&mut self, index: u32, now: Time, segment: &Segment) -> Action {
        let Some(entry) = self.get(index).copied() else { return Action::Ignore };
        let now = now.wrapping_millis();
        if segment.flags.contains(TcpFlags::RST) {
            return self.on_reset(index, now, &entry, segment);
        }
        let opening = TcpFlags::SYN | TcpFlags::ACK | TcpFlags::FIN;
        if segment.flags.0 & opening.0 == TcpFlags::SYN.0 {
            return entry.on_syn(segment);
        }
        if segment.flags.contains(TcpFlags::SYN) {
            return self.challenge(index, now);
        }
        match segment.timestamp {
            // RFC 7323, 3.2: a segment without the option does not belong to this connection.
            None if entry.timestamps => return Action::Ignore,
            Some(timestamp) if entry.timestamps && is_before(timestamp, entry.ts_recent) => {
                return self.challenge(index, now);
            }
            _ => {}
        }
        if entry.is_retransmitted_fin(segment) {
            self.note_timestamp(index, segment);
            self.restart(index, now);
            return Action::Ack(self.slots[index as usize].entry.reply());
        }
        if !entry.accepts(segment) {
            return self.challenge(index, now);
        }
        if segment.seq == entry.rcv_nxt {
            self.note_timestamp(index, segment);
        }
        Action::Ignore
    }

    fn on_reset(&mut self, index: u32, now: u32, entry: &Ended, segment: &Segment) -> Action {
        if !entry.accepts(segment) {
            return Action::Ignore;
        }
        // RFC 5961, 3.2: in the window, but possibly forged.
        if segment.seq == entry.rcv_nxt { Action::Remove } else { self.challenge(index, now) }
    }

    /// Returns an ACK, unless one was sent recently.
    fn challenge(&mut self, index: u32, now: u32) -> Action {
        let slot = &mut self.slots[index as usize];
        if now.wrapping_sub(slot.acked) < ACK_GAP_MS {
            return Action::Ignore;
        }
        slot.acked = now;
        Action::Ack(slot.entry.reply())
    }

    /// RFC 7323, 5.3, R3, for segments that passed the earlier checks. Other segments could make a later SYN look old.
    fn note_timestamp(&mut self, index: u32, segment: &Segment) {
        let entry = &mut self.slots[index as usize].entry;
        if let Some(timestamp) = segment.timestamp.filter(|_| entry.timestamps) {
            entry.ts_recent = timestamp;
        }
    }
}

impl Ended {
    /// RFC 6191, 2: a newer timestamp proves that the SYN is new. Without timestamps, a newer sequence number does.
    fn on_syn(&self, segment: &Segment) -> Action {
        let newer_seq = !is_before(segment.seq, self.rcv_nxt);
        let opens = match segment.timestamp {
            Some(timestamp) if self.timestamps => {
                is_before(self.ts_recent, timestamp) || timestamp == self.ts_recent && newer_seq
            }
            Some(_) => true,
            None => newer_seq,
        };
        if opens { Action::Reopen(self.previous()) } else { Action::Ignore }
    }

    /// Returns whether this is a retransmission of the peer's FIN, which ends where the receive window begins.
    fn is_retransmitted_fin(&self, segment: &Segment) -> bool {
        let end = segment.seq.wrapping_add(segment.len).wrapping_add(1);
        segment.flags.contains(TcpFlags::FIN | TcpFlags::ACK) && end == self.rcv_nxt
    }

    /// The acceptability test of RFC 9293, 3.10.7.4 for a segment without SYN.
    fn accepts(&self, segment: &Segment) -> bool {
        let window = u32::from(self.window) << self.window_scale.min(14);
        let inside = |seq: u32| seq.wrapping_sub(self.rcv_nxt) < window;
        let len = segment.len.saturating_add(u32::from(segment.flags.contains(TcpFlags::FIN)));
        match (len, window) {
            (0, 0) => segment.seq == self.rcv_nxt,
            (0, _) => inside(segment.seq),
            _ => inside(segment.seq) || inside(segment.seq.wrapping_add(len - 1)),
        }
    }

    fn reply(&self) -> Reply {
        Reply {
            seq: self.snd_nxt,
            ack: self.rcv_nxt,
            window: self.window,
            timestamps: self.timestamps.then_some((self.ts_offset, self.ts_recent)),
        }
    }
}
