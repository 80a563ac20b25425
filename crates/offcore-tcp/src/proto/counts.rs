//! What a stack counts.

use offcore_stats::counters;

use super::packet::Cause;
use super::recovery::Stats as RecoveryStats;

counters! {
    /// What a stack counts, beside [`Drops`](super::packet::Drops). The first six are of now, the others since the stack was made.
    pub struct StackCounts {
        connections,
        half_open,
        time_wait,
        neighbours,
        /// Bytes of FIFO memory in use, and bytes that there are.
        memory_used,
        memory,
        /// Connections that peers have opened, and that applications have asked for.
        accepted,
        opened,
        /// Connections by how they ended: see [`Cause`].
        finished,
        reset,
        refused,
        timed_out,
        unreachable,
        aborted,
        /// Segments retransmitted in fast recovery, after timeouts, and as probes for a lost tail.
        again_fast,
        again_timeout,
        again_probe,
        timeouts,
        /// Reductions of a window that were undone because nothing had been lost.
        spurious,
        /// ACKs that showed reordering, and ACKs with a DSACK.
        reordered,
        duplicates,
        /// SACK blocks outside what is in flight.
        bad_sacks,
        /// Reductions because of marks (ECN).
        marks,
        /// Segments that were not sent, since the station of their next hop was not known.
        no_station,
        /// UDP datagrams taken and sent, and those that could not be sent: no way, or no unicast address.
        datagrams_received,
        datagrams_sent,
        datagrams_refused,
        /// SYN cookies sent, and those that came back.
        cookies_sent,
        cookies_taken,
        /// Connections that left TIME-WAIT early for want of room.
        time_wait_evicted,
        /// Messages from somebody who has an address of ours.
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
