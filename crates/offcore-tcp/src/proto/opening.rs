//! Connections that are not established: active opens, passive opens, and connections in TIME-WAIT.

mod cookies;

use offcore_stats::time::Time;
use offcore_wire::{TcpFlags, TcpOptions, Timestamps};

use super::addr::{AppId, ConnId, FlowKey};
use super::arenas::App;
use super::config::Buffers;
use super::conns::Conn;
use super::flows::Entry;
use super::handshake::{
    self, Both, Half, LocalParameters, PeerSynOptions, SYN_DOUBLINGS, SYN_RETRIES, SYN_TIMEOUT,
    SYN_TIMEOUT_MAX,
};
use super::headers::Headers;
use super::options::ConnOptions;
use super::output::{self, Fields};
use super::packet::{Cause, DropReason, Event, Out, Verdict};
use super::receive::AckNeed;
use super::segment::Segment;
use super::stack::Stack;
use super::tcb::{State, SynTimer, Tcb};
use super::timewait::{self, Action, Ended, Inserted};
use super::windows;

/// Number of SYNs after which an unresolved next hop is given up.
const HOP_TRIES: u8 = 2;

impl Stack {
    /// Processes a segment for a connection in SYN-SENT (RFC 9293, 3.10.7.3).
    #[cold]
    pub(super) fn syn_sent_segment(
        &mut self,
        now: Time,
        id: ConnId,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let Some(conn) = self.conns.get_mut(id) else { return Err(DropReason::NoConnection) };
        let (key, way, iss) = (conn.tcb.key, conn.tcb.hop.route(), conn.tcb.sender.seq(0).wrapping_sub(1));
        let acknowledges = segment.has(TcpFlags::ACK);
        if acknowledges && segment.ack != iss.wrapping_add(1) {
            self.refuse(now, key, segment, out);
            return Err(DropReason::Acknowledgement);
        }
        if segment.has(TcpFlags::RST) {
            if acknowledges {
                self.over(id, Cause::Refused, out);
                return Ok(Verdict::Consumed);
            }
            return Err(DropReason::OutOfWindow);
        }
        if !segment.has(TcpFlags::SYN) {
            return Err(DropReason::OutOfWindow);
        }
        let both = Both {
            key,
            way,
            mtu: self.net.ifaces[usize::from(way.iface)].mtu,
            iss,
            irs: segment.seq,
            offered: PeerSynOptions::of(segment, key.remote().ip()),
            timestamp_offset: self.origins.timestamp_offset(&key),
            options: *conn.tcb.headers.options(),
        };
        let asked = conn.tcb.asking.take();
        let wishes = LocalParameters::of(&self.config, conn.buffers);
        let window = conn.tcb.receiver.syn_window();
        let mut tcb = handshake::connection(now, &both, &wishes, window);
        self.net.fit(now, &mut tcb);
        tcb.headers = Headers::new(both.options, self.origins.flow_label(&key));
        tcb.touched = conn.tcb.touched;
        if conn.tcb.close_timer.is_orphan() {
            tcb.close_timer.orphan();
        }
        tcb.sender.nagle.no_delay = conn.tcb.sender.nagle.no_delay;
        tcb.liveness = std::mem::take(&mut conn.tcb.liveness);
        tcb.liveness.hear(now);
        match asked {
            Some(asked) if asked.tries == 1 => tcb.sender.recovery.first_rtt(now, now - asked.since),
            _ => {
                tcb.sender.recovery.handshake_lost();
                if let Some(sample) = tcb.echoed(now, segment).filter(|_| acknowledges) {
                    tcb.sender.recovery.first_rtt(now, sample);
                }
            }
        }
        if acknowledges {
            tcb.receiver.ack.request();
            out.events.push(Event::Connected(id));
        } else {
            // Simultaneous open (RFC 9293, 3.5, figure 7): the SYN is answered, and acknowledged later.
            tcb.state = State::SynReceived;
            let retries = asked.map_or(SYN_RETRIES, |asked| asked.retries);
            tcb.asking = Some(SynTimer { due: now + SYN_TIMEOUT, tries: 1, retries, since: now });
            let fields = Half::new(now, both, 0, window).answer(now, &wishes);
            self.send_with(now, key, both.options, &fields, out);
        }
        let Some(conn) = self.conns.get_mut(id) else { return Err(DropReason::NoConnection) };
        conn.tcb = tcb;
        // Data that was written in advance.
        if conn.written(&mut self.arenas[conn.app], &self.config).is_err() {
            self.abort(now, id, out);
        }
        Ok(Verdict::Consumed)
    }

    /// Sends our SYN, or our SYN-ACK in a simultaneous open, and retransmits it when its timer expires.
    #[cold]
    pub(super) fn send_own_syn(&mut self, now: Time, id: ConnId, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let user_timeout = conn.tcb.liveness.user_timeout();
        let Some(asking) = &mut conn.tcb.asking else { return };
        let user_timeout_deadline = asking.since.saturating_add(user_timeout);
        if asking.tries > asking.retries || asking.tries > 0 && user_timeout_deadline <= now {
            return self.over(id, Cause::TimedOut, out);
        }
        // As on Linux, the next hop has three seconds to answer.
        let (tries, hop) = (asking.tries, conn.tcb.hop.neighbour());
        if tries == HOP_TRIES && self.net.station(now, hop, out).is_none() {
            return self.over(id, Cause::Unreachable, out);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(asking) = &mut conn.tcb.asking else { return };
        let wait = (SYN_TIMEOUT << asking.tries.min(SYN_DOUBLINGS)).min(SYN_TIMEOUT_MAX);
        asking.due = (now + wait).min(user_timeout_deadline);
        let again = asking.tries > 0;
        asking.tries += 1;
        let deadline = conn.tcb.deadline();
        let key = conn.tcb.key;
        let is_limited = self.arenas.is_limited(conn.app);
        let app = self.arenas.app(conn.app);
        let wishes = LocalParameters::of(&self.config, conn.buffers);
        let window = windows::of_syn(wishes, &app.arena, 0, is_limited);
        let window = conn.tcb.receiver.announce_syn(window);
        conn.fund(&mut app.arena, None);
        let wanted = *conn.tcb.headers.options();
        let mtu = wanted.mtu(self.net.ifaces[usize::from(conn.tcb.hop.iface())].mtu, key.remote().ip());
        let value = self.origins.timestamp_offset(&key).wrapping_add(now.wrapping_millis());
        let Tcb { agreed, receiver, .. } = &conn.tcb;
        let answers = conn.tcb.state != State::SynSent;
        let (flags, options) = if answers {
            let echo = receiver.recent().unwrap_or(0);
            let timestamps = agreed.timestamps.map(|_| Timestamps { value, echo });
            let scale = receiver.scale > 0;
            (
                TcpFlags::ACK | if agreed.ecn { TcpFlags::ECE } else { TcpFlags(0) },
                handshake::offer(mtu, key.remote().ip(), timestamps, agreed.sack, scale),
            )
        } else {
            // An unanswered SYN may have met a host that rejects ECN's bits (RFC 3168, 6.1.1.1).
            let ecn = self.config.ecn && !again;
            (
                if ecn { TcpFlags::ECE | TcpFlags::CWR } else { TcpFlags(0) },
                handshake::offer(mtu, key.remote().ip(), Some(Timestamps { value, echo: 0 }), true, true),
            )
        };
        let fields = Fields {
            src_port: key.local_port(),
            dst_port: key.remote_port(),
            seq: conn.tcb.sender.seq(0).wrapping_sub(1),
            ack: if answers { receiver.seq(0) } else { 0 },
            flags: TcpFlags::SYN | flags,
            window,
            options,
        };
        if let Some(deadline) = deadline {
            self.conns.timers.set(id.index, deadline);
        }
        self.send_with(now, key, wanted, &fields, out);
    }

    /// Processes a segment without a connection: it is for a listener, or refused (RFC 9293, 3.10.7.1 and 3.10.7.2).
    #[cold]
    pub(super) fn stray_segment(
        &mut self,
        now: Time,
        key: FlowKey,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let listener = self.listener_of(&key);
        if listener.is_none() {
            self.refuse(now, key, segment, out);
        }
        let listener = listener.filter(|_| !segment.has(TcpFlags::RST)).ok_or(DropReason::NoConnection)?;
        if segment.has(TcpFlags::ACK) {
            return self.cookie_segment(now, listener, key, segment, out);
        }
        if !segment.has(TcpFlags::SYN) {
            return Err(DropReason::NoConnection);
        }
        let half = self.half_of(now, listener, key, segment).ok_or(DropReason::NoConnection)?;
        self.half_open(now, half, None, out)
    }

    /// Returns the listener that accepts connections of a flow.
    fn listener_of(&self, key: &FlowKey) -> Option<u32> {
        let choose = |count| self.flows.spread(key, count);
        self.listeners.find(key.local().ip(), key.local_port(), choose)
    }

    /// Answers a segment without a connection with a reset.
    pub(super) fn refuse(&mut self, now: Time, key: FlowKey, segment: &Segment, out: &mut Out) {
        if let Some(fields) = output::reset_for(segment) {
            self.send_fields(now, key, &fields, out);
        }
    }

    /// Sends a segment without payload that belongs to no connection.
    pub(super) fn send_fields(&mut self, now: Time, key: FlowKey, fields: &Fields, out: &mut Out) {
        self.send_with(now, key, ConnOptions::default(), fields, out);
    }

    /// Returns the half-open connection that a SYN requests.
    fn half_of(&self, now: Time, listener: u32, key: FlowKey, segment: &Segment) -> Option<Half> {
        let way = self.net.way(key.remote().ip())?;
        let at = self.listeners.get(listener)?;
        let wishes = LocalParameters::of(&self.config, at.buffers);
        let both = Both {
            key,
            way,
            mtu: self.net.ifaces[usize::from(way.iface)].mtu,
            iss: self.origins.isn(&key, now),
            irs: segment.seq,
            offered: PeerSynOptions::of(segment, key.remote().ip()),
            timestamp_offset: self.origins.timestamp_offset(&key),
            options: at.options,
        };
        let is_limited = self.arenas.is_limited(at.app);
        let window = windows::of_syn(wishes, &self.arenas[at.app], at.half_open, is_limited);
        Some(Half::new(now, both, listener, window))
    }

    /// Answers a SYN. `ended` is the connection in TIME-WAIT that still has its flow.
    fn half_open(
        &mut self,
        now: Time,
        half: Half,
        ended: Option<u32>,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let key = half.both.key;
        let listener = self.listeners.get(half.listener).ok_or(DropReason::NoConnection)?;
        if listener.accept.len() >= listener.backlog {
            return Err(DropReason::Backlog);
        }
        if !self.arenas.connection_requested(listener.app) {
            return Err(DropReason::UserShare);
        }
        let full = !self.listeners.may_half_open(half.listener);
        if let Some(index) = ended {
            // A cookie is not necessarily beyond the old sequence numbers. Timestamps must then distinguish old and new
            // segments.
            if full && half.both.offered.timestamp.is_none() {
                return Err(DropReason::Backlog);
            }
            self.forget_time_wait(key, index);
        }
        if full {
            return self.answer_by_cookie(now, &half, out);
        }
        self.listeners.enter_half(half.listener);
        let fields = half.answer(now, &self.local_parameters_of(&half));
        let wanted = half.both.options;
        let index = self.halves.insert(half);
        if self.flows.enter(&key, Entry::Half(index)).is_err() {
            self.drop_half(index);
            return Err(DropReason::Backlog);
        }
        self.send_with(now, key, wanted, &fields, out);
        Ok(Verdict::Consumed)
    }

    /// Removes a half-open connection.
    pub(super) fn drop_half(&mut self, index: u32) -> Option<Half> {
        let half = self.halves.remove(index)?;
        self.flows.leave(&half.both.key, Entry::Half(index));
        self.listeners.leave_half(half.listener);
        Some(half)
    }

    /// Removes the `count` half-open connections of a listener that no longer exists.
    pub(super) fn drop_halves(&mut self, listener: u32, count: usize) {
        for index in self.halves.of_listener(listener).take(count).collect::<Vec<u32>>() {
            self.drop_half(index);
        }
    }

    /// Handles a SYN-ACK that was not acknowledged in time.
    #[cold]
    pub(super) fn half_timer(&mut self, now: Time, index: u32, out: &mut Out) {
        let Some(half) = self.halves.back_off(now, index).cloned() else {
            self.drop_half(index);
            return;
        };
        let both = half.both;
        let fields = half.answer(now, &self.local_parameters_of(&half));
        // With TCP_DEFER_ACCEPT the peer already has the SYN-ACK. It is sent again only after the timeout.
        let silent = half.deferred && half.tries < both.options.defer;
        if !silent {
            self.send_with(now, both.key, both.options, &fields, out);
        }
    }

    /// Processes a segment for a half-open connection (RFC 9293, 3.10.7.4 in SYN-RECEIVED).
    #[cold]
    pub(super) fn half_segment(
        &mut self,
        now: Time,
        index: u32,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let Some(half) = self.halves.get(index).cloned() else { return Err(DropReason::NoConnection) };
        let Both { key, iss, irs, options, .. } = half.both;
        let next = irs.wrapping_add(1);
        let away = segment.seq.wrapping_sub(next);
        let window = u32::from(half.window);
        if segment.has(TcpFlags::RST) {
            if segment.seq == next {
                self.drop_half(index);
                return Ok(Verdict::Consumed);
            }
            if away < window {
                self.challenge_half(now, index, out);
            }
            return Err(DropReason::OutOfWindow);
        }
        if segment.has(TcpFlags::SYN) {
            // A retransmitted SYN shows that our SYN-ACK was lost. A different SYN of a restarted peer gets the same
            // answer, which the peer resets if the SYN was genuine (RFC 9293, 3.10.7.4, RFC 5961, 4.2).
            let fields = half.answer(now, &self.local_parameters_of(&half));
            self.send_with(now, key, options, &fields, out);
            if let Some(half) = self.halves.get_mut(index) {
                half.repeated = true;
            }
            return Ok(Verdict::Consumed);
        }
        if half.is_old(segment) {
            self.challenge_half(now, index, out);
            return Err(DropReason::Paws);
        }
        if away > window || !segment.has(TcpFlags::ACK) {
            return Err(DropReason::OutOfWindow);
        }
        if segment.ack != iss.wrapping_add(1) {
            self.refuse(now, key, segment, out);
            return Err(DropReason::Acknowledgement);
        }
        if segment.seq_len() == 0 && self.defers(index) {
            return Ok(Verdict::Consumed);
        }
        let listener = self.listeners.get_mut(half.listener).ok_or(DropReason::NoConnection)?;
        if listener.accept.len() >= listener.backlog {
            // The peer repeats its ACK when our SYN-ACK is retransmitted.
            return Err(DropReason::Backlog);
        }
        // Without memory, the connection stays half open and the SYN-ACK is retransmitted.
        let id = self.establish(now, &half, segment, Some(Entry::Half(index)), out)?;
        self.drop_half(index);
        self.conn_segment(now, id.index, segment, out)
    }

    /// Answers a possibly forged segment with a challenge ACK, unless one was sent recently (RFC 5961, 3.2 and 7).
    #[cold]
    fn challenge_half(&mut self, now: Time, index: u32, out: &mut Out) {
        let Some(half) = self.halves.get_mut(index) else { return };
        if !half.challenges.allows(now) {
            return;
        }
        let half = half.clone();
        let (both, fields) = (half.both, half.acknowledgement(now, &self.local_parameters_of(&half)));
        self.send_with(now, both.key, both.options, &fields, out);
    }

    /// Completes a listener's handshake with `segment`. `entry` is the flow's previous entry.
    fn establish(
        &mut self,
        now: Time,
        half: &Half,
        segment: &Segment,
        entry: Option<Entry>,
        out: &mut Out,
    ) -> Result<ConnId, DropReason> {
        let mut tcb = handshake::connection(now, &half.both, &self.local_parameters_of(half), half.window);
        self.net.fit(now, &mut tcb);
        tcb.headers = Headers::new(half.both.options, self.origins.flow_label(&half.both.key));
        // A cookie has no record of retransmissions.
        if half.tries > 0 && half.due > Time::ZERO {
            tcb.sender.recovery.handshake_lost();
        }
        let own = (half.tries == 0 && !half.repeated).then(|| now - half.since);
        if let Some(sample) = own.or_else(|| tcb.echoed(now, segment)) {
            tcb.sender.recovery.first_rtt(now, sample);
        }
        let app = self.listeners.get(half.listener).ok_or(DropReason::NoConnection)?.app;
        let id = self.add(app, tcb, Some(half.listener), entry).ok_or(DropReason::NoSpace)?;
        if let Some(conn) = self.conns.get_mut(id) {
            let App { arena, shortage, .. } = self.arenas.app(app);
            conn.fund(arena, shortage.turn());
        }
        if let Some(listener) = self.listeners.get_mut(half.listener) {
            self.counts.accepted += 1;
            listener.accept.push_back(id);
            out.events.push(Event::Incoming { listener: half.listener });
        }
        Ok(id)
    }

    /// Assigns a number, memory and a flow to a connection of `app`. `entry` is the flow's previous entry.
    pub(super) fn add(
        &mut self,
        app: AppId,
        tcb: Tcb,
        listener: Option<u32>,
        entry: Option<Entry>,
    ) -> Option<ConnId> {
        let key = tcb.key;
        if !self.arenas.may_enter(app) {
            return None;
        }
        let App { arena, user, .. } = self.arenas.app(app);
        let mut conn = Conn::new(tcb, app, *user, arena)?;
        conn.listener = listener;
        let listener = listener.and_then(|listener| self.listeners.get(listener));
        conn.buffers = listener.map_or_else(Buffers::default, |listener| listener.buffers);
        conn.begin(arena, &self.config);
        let id = match self.conns.insert(conn) {
            Ok(id) => id,
            Err(conn) => {
                conn.free_memory(arena);
                return None;
            }
        };
        let new = Entry::Conn(id.index);
        let entered = match entry {
            Some(entry) => self.flows.change(&key, entry, new),
            None => self.flows.enter(&key, new).is_ok(),
        };
        if !entered {
            if let Some(conn) = self.conns.remove(id) {
                conn.free_memory(arena);
            }
            return None;
        }
        self.enter_conn(id);
        Some(id)
    }

    /// Enters TIME-WAIT after both streams have ended: the flow is kept for a minute to match old segments.
    pub(super) fn enter_time_wait(&mut self, now: Time, id: ConnId, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let tcb = &mut conn.tcb;
        let seq = tcb.sender.published_seq();
        // Acknowledges only if due. A superfluous ACK would reach a closed connection, whose reset would end TIME-WAIT.
        if tcb.receiver.ack.need() != AckNeed::No {
            self.net.bare(now, tcb, seq, TcpFlags::ACK, out);
        }
        let (rcv_nxt, window) = tcb.receiver.acknowledge();
        let ended = Ended {
            key: tcb.key,
            snd_nxt: seq,
            rcv_nxt,
            ts_recent: tcb.receiver.recent().unwrap_or(0),
            ts_offset: tcb.agreed.timestamps.unwrap_or(0),
            window,
            window_scale: tcb.receiver.scale,
            timestamps: tcb.agreed.timestamps.is_some(),
        };
        let key = ended.key;
        let Inserted { index, evicted } = self.time_wait.insert(now, ended);
        if let Some((evicted, key)) = evicted {
            self.flows.leave(&key, Entry::TimeWait(evicted));
        }
        if !self.flows.change(&key, Entry::Conn(id.index), Entry::TimeWait(index)) {
            self.time_wait.remove(index);
        }
        self.over(id, Cause::Finished, out);
    }

    /// Processes a segment of a connection in TIME-WAIT (RFC 9293, 3.10.7.4 in TIME-WAIT; RFC 6191).
    #[cold]
    pub(super) fn time_wait_segment(
        &mut self,
        now: Time,
        key: FlowKey,
        index: u32,
        segment: &Segment,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        let arrived = timewait::Segment {
            seq: segment.seq,
            len: segment.payload_len,
            flags: segment.flags,
            timestamp: segment.options.timestamps.map(|timestamps| timestamps.value),
        };
        match self.time_wait.on_segment(index, now, &arrived) {
            Action::Ignore => Err(DropReason::OutOfWindow),
            Action::Ack(reply) => {
                let timestamps = reply.timestamps.map(|(offset, echo)| {
                    let value = offset.wrapping_add(now.wrapping_millis());
                    Timestamps { value, echo }
                });
                let fields = Fields {
                    src_port: key.local_port(),
                    dst_port: key.remote_port(),
                    seq: reply.seq,
                    ack: reply.ack,
                    flags: TcpFlags::ACK,
                    window: reply.window,
                    options: TcpOptions { timestamps, ..TcpOptions::default() },
                };
                self.send_fields(now, key, &fields, out);
                Ok(Verdict::Consumed)
            }
            Action::Remove => {
                self.forget_time_wait(key, index);
                Ok(Verdict::Consumed)
            }
            Action::Reopen(previous) => {
                // Without a listener the SYN is refused, and TIME-WAIT continues.
                let Some(listener) = self.listener_of(&key) else {
                    self.refuse(now, key, segment, out);
                    return Err(DropReason::NoConnection);
                };
                let half = self.half_of(now, listener, key, segment);
                let mut half = half.ok_or(DropReason::NoConnection)?;
                half.both.iss = previous.isn(half.both.iss);
                self.half_open(now, half, Some(index), out)
            }
        }
    }

    pub(super) fn forget_time_wait(&mut self, key: FlowKey, index: u32) {
        self.time_wait.remove(index);
        self.flows.leave(&key, Entry::TimeWait(index));
    }
}
