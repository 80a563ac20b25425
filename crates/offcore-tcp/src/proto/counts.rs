//! Counters of a stack.

use offcore_stats::counters;

use super::packet::Cause;
use super::recovery::Stats as RecoveryStats;

counters! {
    /// Counters of a stack, in addition to [`Drops`](super::packet::Drops). The first six are current values, the
    /// others are totals since its creation.
    pub struct StackCounts {
        connections,
        half_open,
        time_wait,
        neighbours,
        /// Bytes of FIFO memory in use, and in total.
        memory_used,
        memory,
        /// Connections opened by peers, and by applications.
        accepted,
        opened,
        /// Connections by their end: see [`Cause`].
        finished,
        reset,
        refused,
        timed_out,
        unreachable,
        aborted,
        /// Segments retransmitted in fast recovery, after timeouts, and as tail loss probes.
        again_fast,
        again_timeout,
        again_probe,
        timeouts,
        /// Window reductions that were undone because they were spurious.
        spurious,
        /// ACKs that indicated reordering, and ACKs with a DSACK.
        reordered,
        duplicates,
        /// SACK blocks outside the data in flight.
        bad_sacks,
        /// Reductions caused by ECN marks.
        marks,
        /// Segments that were not sent because their next hop was not resolved.
        no_station,
        /// UDP datagrams received and sent, and those refused because of their destination.
        datagrams_received,
        datagrams_sent,
        datagrams_refused,
        /// SYN cookies sent and returned.
        cookies_sent,
        cookies_taken,
        /// Connections that left TIME-WAIT early because it was full.
        time_wait_evicted,
        /// Messages from other hosts that use our addresses.
        address_conflicts,
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
