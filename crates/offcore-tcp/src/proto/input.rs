//! Processing of segments of synchronized connections (RFC 9293, 3.10.7.4).

use offcore_stats::time::{Micros, Time};
use offcore_wire::TcpFlags;

use super::addr::ConnId;
use super::config::Config;
use super::conns::Conn;
use super::memory;
use super::net::{NO_STATION, Net};
use super::output;
use super::packet::{Cause, DropReason, Event, Out, Place, Verdict};
use super::run::Again;
use super::segment::{Segment, range};
use super::send::{Report, UnacceptableAck};
use super::tcb::{State, Tcb};

/// The context in which a segment is processed.
#[derive(Debug)]
pub(super) struct Input<'a> {
    pub now: Time,
    pub id: ConnId,
    pub net: &'a mut Net,
    pub arena: &'a mut offcore_session::Arena,
    pub config: &'a Config,
    pub out: &'a mut Out,
}

/// The state of the connection after a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The connection stays open.
    Open,
    /// Both streams have ended, and the peer may not know it yet: TIME-WAIT.
    TimeWait,
    /// The connection has ended.
    Over(Cause),
}

impl Input<'_> {
    /// Processes a segment.
    ///
    /// # Errors
    /// Returns the reason if the segment is dropped.
    #[inline]
    pub(super) fn segment(
        &mut self,
        conn: &mut Conn,
        segment: &Segment,
    ) -> Result<(Verdict, Outcome), DropReason> {
        if segment.has(TcpFlags::SYN) && Self::is_answer(&conn.tcb, segment) {
            let outcome = self.acknowledgement(conn, segment, 0)?;
            return Ok((Verdict::Consumed, outcome));
        }
        let start = conn.tcb.receiver.position(segment.seq);
        let overtaken = self.check_timestamps(&mut conn.tcb, segment)?;
        // A SYN may be a blind attack, whether it is in the window or not (RFC 5961, 4.2).
        if segment.has(TcpFlags::SYN) && !segment.has(TcpFlags::RST) {
            self.challenge(&mut conn.tcb);
            return Err(DropReason::OutOfWindow);
        }
        let acceptable = conn.tcb.receiver.is_acceptable(start, segment.seq_len());
        if segment.has(TcpFlags::RST) {
            return self.reset(conn, start, acceptable);
        }
        // A zero window still accepts acknowledgements (RFC 9293, 3.10.7.4).
        let next = conn.tcb.receiver.next();
        if !acceptable && start != Some(next) {
            self.unacceptable(&mut conn.tcb, segment, start);
            return Err(DropReason::OutOfWindow);
        }
        if !segment.has(TcpFlags::ACK) {
            return Err(DropReason::Malformed);
        }
        let start = start.unwrap_or(next);
        let outcome = self.acknowledgement(conn, segment, start)?;
        if conn.tcb.agreed.ecn {
            let receiver = &mut conn.tcb.receiver;
            receiver.echo_congestion &= !segment.has(TcpFlags::CWR);
            receiver.echo_congestion |= segment.congestion_experienced;
        }
        if let Some(timestamps) = segment.options.timestamps.filter(|_| !overtaken) {
            conn.tcb.receiver.take_timestamp(self.now, Some(start), timestamps);
        }
        if outcome != Outcome::Open || segment.payload_len == 0 && !segment.has(TcpFlags::FIN) {
            if outcome == Outcome::TimeWait && segment.seq_len() > 0 {
                conn.tcb.receiver.ack.request();
            }
            return Ok((Verdict::Consumed, outcome));
        }
        if !acceptable {
            conn.tcb.receiver.ack.request();
            return Err(DropReason::OutOfWindow);
        }
        if segment.has(TcpFlags::URG)
            && let Some(position) = conn.tcb.receiver.urge(start, segment.urgent)
        {
            conn.rx.mark_urgent(self.arena, position);
        }
        self.text(conn, segment.payload_at, segment.payload_len, start, segment.has(TcpFlags::FIN))
    }

    /// Processes an in-order segment whose other fields repeat the previous segment, if no data is missing, no sent
    /// data is in flight, and the window is open. Returns `None` if the segment must be processed in full.
    #[inline]
    pub(super) fn follow(&mut self, conn: &mut Conn, again: &Again) -> Option<Result<Verdict, DropReason>> {
        let tcb = &mut conn.tcb;
        let start = tcb.receiver.in_order_position(again.seq)?;
        let timed = tcb.agreed.timestamps.is_some();
        if tcb.state != State::Established
            || tcb.close_timer.is_orphan()
            || timed != again.timestamps.is_some()
        {
            return None;
        }
        let old = again.timestamps.is_some_and(|timestamps| tcb.receiver.is_old(self.now, timestamps));
        if old || !tcb.sender.repeats_last_ack(again.ack, start) {
            return None;
        }
        if let Some(timestamps) = again.timestamps {
            tcb.receiver.take_timestamp(self.now, Some(start), timestamps);
            tcb.measure_arrival(self.now, again.timestamps, again.payload_len);
        }
        let taken = self.text(conn, again.payload_at, again.payload_len, start, false);
        Some(taken.map(|(verdict, _)| verdict))
    }

    /// Returns whether a segment is the answer to our SYN in a simultaneous open (RFC 9293, 3.5, figure 7). Its own SYN
    /// has been processed already. Its sender is established and may not send anything else.
    #[cold]
    fn is_answer(tcb: &Tcb, segment: &Segment) -> bool {
        let again = tcb.receiver.next() == 0 && segment.seq.wrapping_add(1) == tcb.receiver.seq(0);
        let answers = segment.has(TcpFlags::ACK) && segment.ack == tcb.sender.seq(0);
        tcb.state == State::SynReceived && again && answers && !segment.has(TcpFlags::RST | TcpFlags::FIN)
    }

    /// PAWS (RFC 7323, 5.3 R1). Returns whether the segment is accepted with an old timestamp. A segment without a
    /// timestamp is accepted, contrary to 3.2 and as on Linux, because some middleboxes remove the option.
    #[inline]
    fn check_timestamps(&mut self, tcb: &mut Tcb, segment: &Segment) -> Result<bool, DropReason> {
        if tcb.agreed.timestamps.is_none() || segment.has(TcpFlags::RST) {
            return Ok(false);
        }
        match segment.options.timestamps {
            Some(timestamps) if tcb.receiver.is_old(self.now, timestamps) => {
                if Self::is_reordered_ack(tcb, segment, timestamps.value) {
                    return Ok(true);
                }
                self.unacceptable(tcb, segment, tcb.receiver.position(segment.seq));
                Err(DropReason::Paws)
            }
            _ => Ok(false),
        }
    }

    /// Returns whether an old segment is a reordered duplicate acknowledgement. Linux uses its SACK blocks (RFC 7323,
    /// 5.2).
    #[cold]
    fn is_reordered_ack(tcb: &Tcb, segment: &Segment, timestamp: u32) -> bool {
        let repeats = segment.seq_len() == 0
            && segment.has(TcpFlags::ACK)
            && segment.seq == tcb.receiver.seq(tcb.receiver.next())
            && segment.ack == tcb.sender.seq(tcb.sender.una())
            && tcb.sender.has_window(u32::from(segment.window) << tcb.sender.scale);
        let late = tcb.receiver.recent().unwrap_or(0).wrapping_sub(timestamp);
        repeats && Micros::from_millis(late.into()) <= tcb.sender.recovery.rto()
    }

    /// Answers a segment outside the window. A segment with data or a FIN may be a retransmission or a window probe,
    /// and is always answered.
    #[cold]
    fn unacceptable(&mut self, tcb: &mut Tcb, segment: &Segment, start: Option<u64>) {
        if segment.seq_len() > 0 {
            tcb.receiver.ack.request();
            // Only data before the expected position is a duplicate. Data beyond the window has not been received.
            let end = start.map(|start| start + u64::from(segment.seq_len()));
            if let Some((start, end)) = start.zip(end).filter(|(_, end)| *end <= tcb.receiver.next()) {
                tcb.receiver.note_duplicate(start..end);
            }
        } else {
            self.challenge(tcb);
        }
    }

    /// Sends a challenge ACK, unless one was sent recently.
    #[cold]
    fn challenge(&mut self, tcb: &mut Tcb) {
        if tcb.challenges.allows(self.now) {
            self.net.acknowledge(self.now, tcb, self.out);
        }
    }

    /// RFC 5961, 3.2: only the exact sequence number resets the connection.
    #[cold]
    fn reset(
        &mut self,
        conn: &mut Conn,
        start: Option<u64>,
        acceptable: bool,
    ) -> Result<(Verdict, Outcome), DropReason> {
        if start == Some(conn.tcb.receiver.next()) {
            let cause = if conn.tcb.state == State::SynReceived { Cause::Refused } else { Cause::Reset };
            return Ok((Verdict::Consumed, Outcome::Over(cause)));
        }
        if acceptable {
            self.challenge(&mut conn.tcb);
        }
        Err(DropReason::OutOfWindow)
    }

    /// Processes the acknowledgement and the window (RFC 9293, 3.10.7.4, fifth check).
    #[inline]
    fn acknowledgement(
        &mut self,
        conn: &mut Conn,
        segment: &Segment,
        start: u64,
    ) -> Result<Outcome, DropReason> {
        let tcb = &mut conn.tcb;
        let first = tcb.sender.seq(0);
        let una = tcb.sender.una();
        let mut sacks = arrayvec::ArrayVec::<(u64, u64), 4>::new();
        let mut duplicate = None;
        if tcb.agreed.sack {
            let reported = segment.options.sack.iter();
            let ranges = reported.filter_map(|block| range(block.start, block.end, first, una));
            sacks.extend(ranges.map(|range| (range.start, range.end)));
            // A block below the acknowledgement, or inside the next block, reports a duplicate (RFC 2883, 4).
            let ack = super::segment::position(segment.ack, first, una).unwrap_or(0);
            let inside = sacks.len() > 1 && sacks[1].0 <= sacks[0].0 && sacks[0].1 <= sacks[1].1;
            if sacks.first().is_some_and(|block| block.1 <= ack || inside) {
                duplicate = sacks.pop_at(0);
            }
        }
        let report = Report {
            ack: segment.ack,
            // The window of a SYN is not scaled (RFC 7323, 2.2).
            window: u32::from(segment.window)
                << if segment.has(TcpFlags::SYN) { 0 } else { tcb.sender.scale },
            at: start,
            sacks: &sacks,
            duplicate,
            rtt: tcb.echoed(self.now, segment),
            congestion: tcb.agreed.ecn && segment.has(TcpFlags::ECE),
            has_data: segment.payload_len > 0,
        };
        tcb.measure_arrival(self.now, segment.options.timestamps, segment.payload_len);
        let acked = match tcb.sender.report(self.now, &report) {
            Ok(acked) => acked,
            Err(UnacceptableAck::Unsent | UnacceptableAck::Ancient) => {
                self.challenge(tcb);
                return Err(DropReason::Acknowledgement);
            }
        };
        if tcb.asking.is_some() {
            // The answer to our SYN has arrived. The application may have ended its stream in the meantime.
            tcb.asking = None;
            if tcb.state == State::SynReceived {
                tcb.state = State::Established;
                self.out.events.push(Event::Connected(self.id));
            }
        }
        if acked.newly_acked == 0 {
            return Ok(Outcome::Open);
        }
        self.net.neighbours.confirm(self.now, tcb.hop.neighbour());
        if tcb.close_timer.is_orphan() {
            tcb.close_timer.extend(self.now);
        }
        tcb.validate_path_mtu(self.now, acked.newly_acked);
        conn.acknowledged(self.arena, self.id, self.config, self.out);
        Ok(Self::fin_acknowledged(&mut conn.tcb, self.now))
    }

    /// Checks whether our FIN has been acknowledged.
    #[inline]
    fn fin_acknowledged(tcb: &mut Tcb, now: Time) -> Outcome {
        if !tcb.sender.fin_acknowledged() {
            return Outcome::Open;
        }
        match tcb.state {
            State::FinWait1 => {
                tcb.state = State::FinWait2;
                tcb.close_timer.await_fin(now, tcb.headers.options());
                Outcome::Open
            }
            State::Closing => Outcome::TimeWait,
            State::LastAck => Outcome::Over(Cause::Finished),
            _ => Outcome::Open,
        }
    }

    /// Processes the segment's text and FIN (seventh and eighth check). The text begins at offset `payload_at` of the
    /// frame.
    #[inline]
    fn text(
        &mut self,
        conn: &mut Conn,
        payload_at: usize,
        payload_len: u32,
        start: u64,
        fin: bool,
    ) -> Result<(Verdict, Outcome), DropReason> {
        let tcb = &mut conn.tcb;
        if !matches!(tcb.state, State::Established | State::FinWait1 | State::FinWait2) {
            // The peer's stream has ended already, so this is a retransmission.
            tcb.receiver.ack.request();
            return Err(DropReason::OutOfWindow);
        }
        if tcb.close_timer.is_orphan() && payload_len > 0 {
            // The data will not be read, so the peer gets a reset (RFC 9293, 3.6.1).
            self.net.abort(self.now, tcb, self.out);
            return Ok((Verdict::Consumed, Outcome::Over(Cause::Aborted)));
        }
        let all = start..start + u64::from(payload_len);
        let (arena, fifo, promised) = (&mut *self.arena, &mut conn.rx, conn.promised);
        let next = tcb.receiver.next();
        let text = tcb.receiver.text(self.now, all, fin, |range| {
            let (start, len) = (range.start, (range.end - range.start) as usize);
            // Data that the application can read next is accepted while a block is free, because reading it frees
            // memory. Data behind holes may occupy a block per byte. Unless it was promised, it needs plentiful memory.
            let takes =
                start == next || fifo.lacks(range.end) <= promised || memory::allows_speculative_use(arena);
            takes && fifo.cover_reserved(arena, start, len)
        })?;
        let outcome = if tcb.receiver.end().is_some() { Self::fin_received(tcb) } else { Outcome::Open };
        // The transition to TIME-WAIT acknowledges the FIN.
        if tcb.receiver.needs_immediate_ack() && outcome != Outcome::TimeWait {
            self.net.acknowledge(self.now, tcb, self.out);
        }
        let verdict = if text.range.is_empty() {
            Verdict::Consumed
        } else {
            tcb.delivery.place();
            fifo.hold(text.range.start, (text.range.end - text.range.start) as usize);
            self.out.places.push(Place {
                conn: self.id,
                pos: text.range.start,
                skip: (payload_at as u64 + (text.range.start - start)) as u32,
                len: (text.range.end - text.range.start) as u32,
                commit_to: text.commit_to,
            });
            Verdict::Place
        };
        conn.settle(self.id, self.out);
        Ok((verdict, outcome))
    }

    /// Updates the state after all of the peer's stream including its FIN has arrived.
    fn fin_received(tcb: &mut Tcb) -> Outcome {
        match tcb.state {
            State::Established => tcb.state = State::CloseWait,
            State::FinWait1 if tcb.sender.fin_acknowledged() => return Outcome::TimeWait,
            State::FinWait1 => tcb.state = State::Closing,
            State::FinWait2 => return Outcome::TimeWait,
            _ => {}
        }
        Outcome::Open
    }
}

impl Net {
    /// Sends an acknowledgement of all received data. It may overtake data that is being copied, so its sequence number
    /// is the published edge. While the port is held, the acknowledgement stays due.
    pub(super) fn acknowledge(&mut self, now: Time, tcb: &mut Tcb, out: &mut Out) {
        if self.ifaces[usize::from(tcb.hop.iface())].held {
            return tcb.receiver.ack.request();
        }
        let seq = tcb.sender.published_seq();
        self.bare(now, tcb, seq, TcpFlags::ACK, out);
    }

    /// Sends a segment without data. It carries SACK blocks.
    pub(super) fn bare(&mut self, now: Time, tcb: &mut Tcb, seq: u32, flags: TcpFlags, out: &mut Out) {
        let fields = tcb.fields(now, seq, flags, true);
        // Without a route it counts as lost.
        if !self.has_route(tcb) {
            return;
        }
        let envelope = tcb.headers.envelope(&tcb.key, NO_STATION, NO_STATION);
        self.send(now, tcb.hop.route(), envelope, out, |bytes, envelope| {
            let whole = output::TxChecksum::Payload(offcore_wire::Sum::ZERO);
            output::write(bytes, envelope, &fields, 0, whole).0
        });
    }

    /// Sends a reset to the peer.
    #[cold]
    pub(super) fn abort(&mut self, now: Time, tcb: &mut Tcb, out: &mut Out) {
        if tcb.is_synchronized() {
            let seq = tcb.sender.published_seq();
            self.bare(now, tcb, seq, TcpFlags::RST, out);
        }
    }
}
