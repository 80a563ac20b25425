//! Sealing of plans: when the copies are complete, the packet gets its headers, or is discarded.

use offcore_stats::time::Time;
use offcore_wire::{Sum, TcpFlags, TcpVarying, Timestamps};

use super::packet::{HEAD, Out, Plan, Sealed};
use super::stack::Stack;
use super::tcb::State;

impl Stack {
    /// Writes the current headers of a packet when the copies of `plan` are complete. They are written to the end of
    /// `to`, which precedes the payload. `payload` is the sum of the payload if the port does not complete checksums.
    #[inline]
    pub fn seal(
        &mut self,
        now: Time,
        plan: &Plan,
        payload: Option<Sum>,
        to: &mut [u8; HEAD],
        out: &mut Out,
    ) -> Sealed {
        let Some(conn) = self.conns.get_mut(plan.conn) else { return Sealed::Obsolete };
        conn.planned -= 1;
        conn.tx.unhold(&mut self.arenas[conn.app], plan.pos, plan.len as usize);
        let next = plan.next();
        let tcb = &mut conn.tcb;
        let end = next.range.end + u64::from(next.fin);
        if tcb.state == State::Closed {
            self.free_when_done(plan.conn);
            return Sealed::Obsolete;
        }
        if next.again && end <= tcb.sender.una() {
            tcb.sender.unplanned(&next);
            return Sealed::Obsolete;
        }
        let Some(dst_mac) = self.net.link(now, tcb, out) else {
            // The packet counts as lost and is retransmitted when the neighbour has answered. No other host must
            // receive it.
            tcb.sender.published(now, &next);
            self.counts.no_station += 1;
            self.conns.touch(plan.conn);
            return Sealed::Obsolete;
        };
        let iface = tcb.hop.iface();
        let src_mac = self.net.ifaces[usize::from(iface)].mac;
        let new_data = !next.again && plan.len > 0;
        let mut flags = TcpFlags::ACK | tcb.echo_congestion();
        if plan.len > 0 && tcb.sender.is_last(next.range.end) {
            flags = flags | TcpFlags::PSH;
        }
        if next.fin {
            flags = flags | TcpFlags::FIN;
        }
        if tcb.agreed.ecn && new_data && tcb.sender.recovery.cwr_due() {
            tcb.sender.recovery.cwr_sent();
            flags = flags | TcpFlags::CWR;
        }
        // All segments of a packet segmented by the port would have the same pointer.
        let is_cut = plan.len > u32::from(tcb.sender.mss());
        let urgent = tcb.sender.urgent_pointer(plan.pos).filter(|_| !is_cut);
        if urgent.is_some() {
            flags = flags | TcpFlags::URG;
        }
        let (ack, window) = tcb.receiver.acknowledge();
        let varying = TcpVarying {
            src_mac,
            dst_mac,
            ecn: u8::from(tcb.agreed.ecn && new_data) << 1,
            seq: tcb.sender.seq(plan.pos),
            ack,
            flags,
            window,
            urgent: urgent.unwrap_or(0),
            timestamps: tcb.timestamps(now).unwrap_or(Timestamps { value: 0, echo: 0 }),
            payload_len: plan.len as usize,
            payload,
        };
        tcb.sender.published(now, &next);
        let template = tcb.template();
        let (_, to) = to.split_last_chunk_mut().expect("headers fit what protocols see of a packet");
        template.write(to, &varying);
        let (headers, transport) = (template.header_len(), template.transport());
        let mss = tcb.sender.mss();
        if let Some(deadline) = tcb.sender.deadline() {
            self.conns.timers.set_earlier(plan.conn.index, deadline);
        }
        let segment = if plan.len > u32::from(mss) { mss } else { 0 };
        Sealed::Send { iface, headers: headers as u8, transport: transport as u8, segment }
    }

    /// Gives up a plan because the pool has no buffer. The caller gives up later plans first, so that the data is
    /// planned again without a hole in the stream.
    pub fn give_up(&mut self, plan: &Plan, out: &mut Out) {
        let Some(conn) = self.conns.get_mut(plan.conn) else { return self.give_up_datagram(plan, out) };
        conn.planned -= 1;
        conn.tx.unhold(&mut self.arenas[conn.app], plan.pos, plan.len as usize);
        conn.tcb.sender.unplanned(&plan.next());
        if conn.tcb.state == State::Closed {
            return self.free_when_done(plan.conn);
        }
        self.conns.touch(plan.conn);
    }
}
