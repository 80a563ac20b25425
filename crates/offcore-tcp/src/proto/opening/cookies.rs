//! Handshakes with SYN cookies.

use offcore_stats::time::Time;
use offcore_wire::TcpFlags;

use crate::proto::addr::FlowKey;
use crate::proto::handshake::{Both, Half, PeerSynOptions};
use crate::proto::packet::{DropReason, Out, Verdict};
use crate::proto::segment::Segment;
use crate::proto::stack::Stack;

impl Stack {
    /// Answers a SYN with a SYN cookie, which encodes the state, because too many connections are half open.
    pub(super) fn answer_by_cookie(
        &mut self,
        now: Time,
        half: &Half,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        // The cookie does not encode the window.
        let mut half = Half { window: self.local_parameters_of(half).syn_window(), ..half.clone() };
        let Both { key, iss, irs, offered, timestamp_offset, .. } = &mut half.both;
        let clock = now.wrapping_millis();
        // Without a cookie the SYN is dropped, and the peer repeats it.
        let cookie = self.cookies.encode(key, *irs, offered.for_cookie(), clock, now);
        let cookie = cookie.ok_or(DropReason::Backlog)?;
        *iss = cookie.isn;
        match cookie.timestamp {
            Some(value) => *timestamp_offset = timestamp_offset.wrapping_sub(clock.wrapping_sub(value)),
            // Without timestamps the cookie cannot hold these options.
            None => (offered.scale, offered.sack, offered.ecn) = (None, false, false),
        }
        let fields = half.answer(now, &self.local_parameters_of(&half));
        self.send_with(now, half.both.key, half.both.options, &fields, out);
        Ok(Verdict::Consumed)
    }

    /// Handles an acknowledgement at a listener, which may return a cookie.
    pub(super) fn cookie_segment(
        &mut self,
        now: Time,
        listener: u32,
        key: FlowKey,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let (iss, irs) = (segment.ack.wrapping_sub(1), segment.seq.wrapping_sub(1));
        let timestamp_offset = self.origins.timestamp_offset(&key);
        let echo = segment.options.timestamps.map(|stamps| stamps.echo.wrapping_sub(timestamp_offset));
        let offer = self.cookies.check(&key, iss, irs, echo, now);
        // A SYN-ACK does not return a cookie.
        let Some(offer) = offer.filter(|_| !segment.has(TcpFlags::SYN)) else {
            // Only the first segment of a stream returns a cookie. If this is a later segment, the peer retransmits the
            // first one, unless a reset ends the connection.
            if self.cookies.are_outstanding(now) && segment.seq_len() > 0 && !segment.has(TcpFlags::SYN) {
                return Err(DropReason::Backlog);
            }
            self.refuse(now, key, segment, out);
            return Err(DropReason::NoConnection);
        };
        if self.listeners.get_mut(listener).is_none_or(|this| this.accept.len() >= this.backlog) {
            return Err(DropReason::Backlog);
        }
        let way = self.net.way(key.remote().ip()).ok_or(DropReason::NoConnection)?;
        let offered = PeerSynOptions::of_cookie(offer, segment);
        let mtu = self.net.ifaces[usize::from(way.iface)].mtu;
        let options = self.listeners.get(listener).map(|listener| listener.options).unwrap_or_default();
        let both = Both { key, way, mtu, iss, irs, offered, timestamp_offset, options };
        let mut half = Half { due: Time::ZERO, tries: 1, ..Half::new(now, both, listener, 0) };
        half.window = self.local_parameters_of(&half).syn_window();
        let id = self.establish(now, &half, segment, None, out)?;
        self.cookies.count_taken();
        self.conn_segment(now, id.index, segment, out)
    }
}
