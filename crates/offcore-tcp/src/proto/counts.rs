//! Counters of a stack.

use offcore_stats::counters;

use super::packet::Cause;
use super::recovery::Stats as RecoveryStats;

counters! {
    /// Counters of a stack, in addition to [`Drops`](super::packet::Drops). Connections are counted by their end: see
    /// [`Cause`].
    pub struct StackCounts {
        /// Present connections.
        connections: Connections gauge,
        /// Present connections that are being opened.
        half_open: Connections gauge,
        /// Present connections in TIME-WAIT.
        time_wait: Connections gauge,
        /// Known neighbours.
        neighbours: Events gauge,
        /// Bytes of FIFO memory in use.
        memory_used: Bytes gauge,
        /// Bytes of FIFO memory in total.
        memory: Bytes gauge,
        /// Connections opened by peers.
        accepted: Connections,
        /// Connections opened by applications.
        opened: Connections,
        /// Connections that both sides have closed.
        finished: Connections,
        /// Connections that the peer has reset.
        reset: Connections,
        /// Connections that the peer has refused.
        refused: Connections,
        /// Connections that ended because the peer did not answer in time.
        timed_out: Connections,
        /// Connections that ended because the peer could not be reached.
        unreachable: Connections,
        /// Connections that this side has reset.
        aborted: Connections,
        /// Segments retransmitted in fast recovery.
        again_fast: Packets,
        /// Segments retransmitted after timeouts.
        again_timeout: Packets,
        /// Segments retransmitted as tail loss probes.
        again_probe: Packets,
        /// Retransmission timeouts.
        timeouts: Events,
        /// Window reductions that were undone because they were spurious.
        spurious: Events,
        /// ACKs that indicated reordering.
        reordered: Packets,
        /// ACKs with a DSACK.
        duplicates: Packets,
        /// SACK blocks outside the data in flight.
        bad_sacks: Events,
        /// Reductions caused by ECN marks.
        marks: Events,
        /// Segments that were not sent because their next hop was not resolved.
        no_station: Packets,
        /// UDP datagrams received.
        datagrams_received: Packets,
        /// UDP datagrams sent.
        datagrams_sent: Packets,
        /// UDP datagrams refused because of their destination.
        datagrams_refused: Packets,
        /// SYN cookies sent.
        cookies_sent: Packets,
        /// SYN cookies that a peer has returned.
        cookies_taken: Packets,
        /// Connections that left TIME-WAIT early because it was full.
        time_wait_evicted: Connections,
        /// Messages from other hosts that use our addresses.
        address_conflicts: Packets,
    }
}

impl StackCounts {
    pub(super) fn ended(&mut self, cause: Cause) {
        *match cause {
            Cause::Finished => &mut self.finished,
            Cause::Reset => &mut self.reset,
            Cause::Refused => &mut self.refused,
            Cause::TimedOut => &mut self.timed_out,
            Cause::Unreachable => &mut self.unreachable,
            Cause::Aborted => &mut self.aborted,
        } += 1;
    }

    pub(super) fn recovered(&mut self, new: RecoveryStats) {
        let RecoveryStats { fast, timeout, probes, spurious, reordered, timeouts, .. } = new;
        self.again_fast += u64::from(fast);
        self.again_timeout += u64::from(timeout);
        self.again_probe += u64::from(probes);
        self.timeouts += u64::from(timeouts);
        self.spurious += u64::from(spurious);
        self.reordered += u64::from(reordered);
        self.duplicates += u64::from(new.duplicates);
        self.bad_sacks += u64::from(new.bad_sacks);
        self.marks += u64::from(new.marks);
    }
}
