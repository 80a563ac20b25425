//! Plans the packets to send. Users take turns. During a user's turn, its connections and sockets take turns.

use offcore_stats::time::Time;

use super::Stack;
use crate::proto::addr::UserIndex;
use crate::proto::packet::Out;
use crate::proto::tcb::State;
use crate::proto::users::{Budget, VISIT};

/// Maximum number of bytes of one connection that are planned in a row.
const QUANTUM: u32 = 64 << 10;
/// Maximum work per call. Copies of more data would delay the answers to packets that arrive in the meantime.
const MAX_WORK: i64 = 512 << 10;

impl Stack {
    /// Plans at most `packets` packets, except on interfaces that are [held](Self::hold).
    pub fn tx(&mut self, now: Time, packets: usize, out: &mut Out) {
        if !self.has_ready() {
            return;
        }
        let mut left = Budget { packets, work: MAX_WORK };
        let ifaces = self.net.turns();
        for user in self.arenas.users.turns() {
            if left.is_empty() {
                return;
            }
            if !self.is_ready(user) {
                continue;
            }
            let Some(work) = self.arenas.users.begin_sending(user, left.work) else { continue };
            let mut budget = Budget { packets: left.packets, work };
            let before = out.plans.len();
            self.send_for_user(user, ifaces.clone(), now, &mut budget, out);
            // The first user of a call must not be the first one again.
            let is_cut = budget.packets == 0 && budget.work > 0 && left.packets < packets;
            let has_sent = out.plans.len() > before;
            self.arenas.users.end_sending(user, work, budget.work, has_sent, is_cut);
            left = Budget { packets: budget.packets, work: left.work - (work - budget.work) };
        }
    }

    /// Returns whether a connection or socket of a user may have something to send.
    fn is_ready(&self, user: UserIndex) -> bool {
        self.udp.ready.count(user) > 0 || self.net.ifaces.iter().any(|iface| iface.ready.count(user) > 0)
    }

    /// Plans packets of a user.
    #[inline]
    fn send_for_user(
        &mut self,
        user: UserIndex,
        ifaces: impl Iterator<Item = usize>,
        now: Time,
        budget: &mut Budget,
        out: &mut Out,
    ) {
        if self.udp.ready.count(user) > 0 {
            let streams = self.net.ifaces.iter().any(|iface| !iface.held && iface.ready.count(user) > 0);
            let all = *budget;
            if streams {
                *budget = Budget { packets: self.udp.half(all.packets), work: all.work / 2 };
            }
            let part = *budget;
            self.plan_datagrams(now, user, budget, out);
            *budget = Budget {
                packets: all.packets - (part.packets - budget.packets),
                work: all.work - (part.work - budget.work),
            };
        }
        for iface in ifaces {
            if !budget.is_empty() && !self.net.ifaces[iface].held {
                self.send_on_interface(iface, user, now, budget, out);
            }
        }
    }

    /// Plans packets of a user's connections on one interface.
    #[inline]
    fn send_on_interface(
        &mut self,
        iface: usize,
        user: UserIndex,
        now: Time,
        budget: &mut Budget,
        out: &mut Out,
    ) {
        let Self { net, conns, arenas, config, .. } = self;
        let at_most = net.ifaces[iface].segment_offload.min(QUANTUM);
        for _ in 0..net.ifaces[iface].ready.count(user) {
            if budget.is_empty() {
                break;
            }
            let Some(index) = net.ifaces[iface].ready.pop(user) else { break };
            budget.work -= VISIT;
            // The number of an ended connection may now belong to a connection of another user.
            let Some((id, conn)) = conns.at(index).filter(|(_, conn)| conn.user == user) else { continue };
            let mut quantum = QUANTUM;
            conn.tcb.ready = false;
            if conn.tcb.state == State::Closed {
                continue;
            }
            // A segment sent before the next hop is resolved again would be lost (RFC 1122, 2.3.2.2).
            if conn.tcb.hop.was_resolved() && net.link(now, &mut conn.tcb, out).is_none() {
                conn.tcb.hop.forget_mac();
                // Without a route the segment counts as lost.
                if net.has_route(&mut conn.tcb) {
                    conns.ask_hop(index, net.neighbours.seen());
                    continue;
                }
            }
            // Short segments must not use up all packets.
            let most = budget.packets.min(budget.packets_of_work());
            let mut left = most;
            while left > 0 {
                let Some(next) = conn.tcb.sender.plan(now, at_most) else { break };
                let len = (next.range.end - next.range.start) as u32;
                conn.plan(id, next, out);
                left -= 1;
                quantum = quantum.saturating_sub(len.max(1));
                if quantum == 0 {
                    break;
                }
            }
            let (bytes, planned) = (QUANTUM - quantum, most - left);
            budget.packets -= planned;
            // Without segmentation by the port, each packet is one segment.
            let segments = match at_most {
                0 => planned as u64,
                _ => bytes.div_ceil(conn.tcb.sender.mss().into()).into(),
            };
            budget.take_work(bytes.into(), planned, segments);
            conn.sent(arenas, id, config, out);
            if budget.is_empty() || quantum == 0 || left == 0 {
                conn.tcb.ready = true;
                net.ifaces[iface].ready.push(user, index);
            }
            if let Some(deadline) = conn.tcb.deadline() {
                conns.timers.set(index, deadline);
            }
        }
    }

    /// Returns whether a connection or socket may have something to send.
    pub fn has_ready(&self) -> bool {
        self.net.ifaces.iter().any(|iface| !iface.ready.is_empty()) || !self.udp.ready.is_empty()
    }
}
