//! Information about a stack and its connections.

use std::net::{IpAddr, SocketAddr};

use offcore_session::Arena;
use offcore_session::layout::{LARGE, SMALL};
use offcore_stats::time::Micros;

use super::addr::{AppId, ConnId};
use super::cookie::CookieCounts;
use super::counts::StackCounts;
use super::listeners::Listener;
use super::memory;
use super::packet::Drops;
use super::recovery::{State as RecoveryState, Stats as RecoveryStats};
use super::stack::Stack;

/// Maximum number of connections that one call of [`Stack::counts`] reads.
const LOOKED_AT: u32 = 256;

/// The endpoints and the state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// The application that owns it.
    pub app: AppId,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub state: &'static str,
    /// Bytes that the application has not read.
    pub unread: u64,
    /// Bytes that the application has written and the peer has not acknowledged, and how many of them have been sent.
    pub unacknowledged: u64,
    pub outstanding: u64,
    /// Bytes received, and bytes that the peer has acknowledged.
    pub received: u64,
    pub acknowledged: u64,
    /// Congestion window in bytes.
    pub cwnd: u64,
    /// Smoothed round-trip time.
    pub srtt: Micros,
    pub recovery: RecoveryInfo,
    pub stats: RecoveryStats,
    /// Maximum payload bytes of our segments, and the estimate for the peer's segments.
    pub mss: u16,
    pub peer_mss: u16,
}

/// The state of a connection's loss recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveryInfo {
    pub state: RecoveryState,
    /// Slow start threshold in bytes.
    pub ssthresh: u64,
    /// Bytes in flight.
    pub pipe: u64,
    /// Variation of the round-trip time, and the minimum,.
    pub rttvar: Micros,
    pub min_rtt: Option<Micros>,
    /// Retransmission timeout.
    pub rto: Micros,
}

/// The state of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerInfo {
    /// The application that owns it.
    pub app: AppId,
    /// The local address, or `None` for all addresses.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// The number of connections that are not accepted yet, including those reset in the meantime, and its limit.
    pub waiting: usize,
    pub backlog: usize,
}

impl Stack {
    /// Returns the counters of dropped packets.
    pub fn drops(&self) -> &Drops {
        &self.drops
    }

    /// Returns the counters. Each call collects the causes of retransmissions from some connections only, so that no
    /// call takes long. With many connections, the newest causes appear a few calls later.
    pub fn counts(&mut self) -> StackCounts {
        for _ in 0..LOOKED_AT.min(self.conns.len() as u32) {
            if let Some(conn) = self.conns.next_to_count() {
                self.counts.recovered(conn.tcb.sender.recovery.take_unreported());
            }
        }
        let cookies = self.cookies();
        let (time_wait, time_wait_evicted) = self.time_wait();
        StackCounts {
            connections: self.conns.len() as u64,
            half_open: self.halves.len() as u64,
            time_wait: time_wait as u64,
            neighbours: self.neighbours() as u64,
            memory_used: self.memory_used() as u64,
            memory: self.arenas.iter().map(|app| app.arena.len_and_limit().0 as u64).sum(),
            cookies_sent: cookies.sent,
            cookies_taken: cookies.taken,
            time_wait_evicted,
            address_conflicts: self.net.conflicts,
            ..self.counts
        }
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Returns the number of known flows: connections, half-open connections, and those in TIME-WAIT.
    pub fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Returns the number of SYN cookies sent and returned.
    pub fn cookies(&self) -> CookieCounts {
        self.cookies.counts()
    }

    /// Returns the number of neighbours, including unresolved ones.
    pub fn neighbours(&self) -> usize {
        self.net.neighbours.len()
    }

    /// Returns the number of connections in TIME-WAIT, and how many have left it early because it was full.
    pub fn time_wait(&self) -> (usize, u64) {
        (self.time_wait.len(), self.time_wait.evicted())
    }

    /// Returns the bytes of FIFO memory in use by all applications.
    pub fn memory_used(&self) -> usize {
        self.arenas.iter().map(|app| used(&app.arena)).sum()
    }

    /// Returns the bytes of FIFO memory in use by one application.
    ///
    /// # Panics
    /// Panics if the application is unknown.
    pub fn memory_used_by(&self, app: AppId) -> usize {
        used(&self.arenas[app])
    }

    /// Returns whether at most an eighth of an application's memory is free. New connections would soon find none.
    ///
    /// # Panics
    /// Panics if the application is unknown.
    pub fn is_memory_scarce(&self, app: AppId) -> bool {
        memory::is_scarce(&self.arenas[app])
    }

    /// Returns the endpoints and the state of a connection.
    pub fn info(&self, conn: ConnId) -> Option<Info> {
        let conn = self.conns.get(conn)?;
        let tcb = &conn.tcb;
        let recovery = &tcb.sender.recovery;
        Some(Info {
            app: conn.app,
            local: tcb.key.local(),
            remote: tcb.key.remote(),
            state: tcb.state.name(),
            unread: tcb.receiver.unread(),
            unacknowledged: tcb.sender.unacknowledged(),
            outstanding: tcb.sender.published_to().saturating_sub(tcb.sender.una()),
            received: tcb.receiver.data_end(),
            acknowledged: tcb.sender.acknowledged(),
            cwnd: recovery.cwnd(),
            srtt: recovery.srtt(),
            recovery: RecoveryInfo {
                state: recovery.state(),
                ssthresh: recovery.ssthresh(),
                pipe: recovery.pipe(),
                rttvar: recovery.rttvar(),
                min_rtt: recovery.min_rtt(),
                rto: recovery.rto(),
            },
            stats: recovery.stats(),
            mss: tcb.sender.mss(),
            peer_mss: tcb.receiver.ack.peer_mss(),
        })
    }

    /// Returns the state of a listener.
    pub fn listener_info(&self, listener: u32) -> Option<ListenerInfo> {
        let &Listener { app, address, port, backlog, ref accept, .. } = self.listeners.get(listener)?;
        Some(ListenerInfo { app, address, port, waiting: accept.len(), backlog })
    }

    /// Returns all connections.
    pub fn all(&self) -> impl Iterator<Item = ConnId> {
        self.conns.iter().map(|(id, _)| id)
    }
}

fn used(arena: &Arena) -> usize {
    let free = arena.free();
    // Another application of the user may use memory of the budget between the two calls.
    arena.len_and_limit().0.saturating_sub(free.large * LARGE + free.small * SMALL)
}
