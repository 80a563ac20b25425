//! Extends the windows of users whose rate is limited. Their connections take turns.

use super::Stack;
use crate::proto::addr::ConnId;
use crate::proto::conns::Conn;
use crate::proto::users::{CHUNK, Users};

/// Maximum number of connections of a user that extend their windows in one turn.
const RESUMED: usize = 64;

/// Charges the user of a connection for the `packets` packets that have arrived since the last call.
#[inline]
pub(super) fn charge_received(users: &mut Users, id: ConnId, conn: &mut Conn, packets: u32) {
    let bytes = conn.tcb.receiver.next() - conn.funded;
    if users.charge_received(conn.user, bytes, packets) {
        extend_or_wait(users, id, conn, bytes);
    } else if conn.tcb.receiver.remove_window_limit() {
        conn.tcb.receiver.update_window();
    }
}

/// Extends the window of a connection that has received `bytes` bytes. If that is not possible now, and the window is
/// nearly used up, the connection waits.
#[cold]
fn extend_or_wait(users: &mut Users, id: ConnId, conn: &mut Conn, bytes: u64) {
    let receiver = &mut conn.tcb.receiver;
    let is_used_up = receiver.limit_window();
    // A probe of a closed window must get it extended, too.
    if bytes == 0 && !is_used_up || receiver.end().is_some() || receiver.waits_for_window() {
        return;
    }
    if users.may_extend(conn.user) {
        // The right edge moves by twice the received bytes, so the window grows by them, as in slow start.
        users.charge_window(conn.user, receiver.raise_window_limit(2 * bytes, CHUNK));
        receiver.update_window();
    } else if is_used_up {
        receiver.wait_for_window(true);
        users.wait(conn.user, id);
    }
}

impl Stack {
    /// Extends the windows of waiting connections.
    #[inline]
    pub(super) fn extend_windows(&mut self) {
        if self.arenas.users.has_limits() {
            self.extend_limited_windows();
        }
    }

    #[cold]
    fn extend_limited_windows(&mut self) {
        let Self { arenas, conns, .. } = self;
        let users = &mut arenas.users;
        for user in users.turns() {
            for _ in 0..RESUMED {
                let Some(id) = users.next_waiting(user) else { break };
                let Some(conn) = conns.get_mut(id) else { continue };
                let receiver = &mut conn.tcb.receiver;
                receiver.wait_for_window(false);
                if users.is_limited(user) {
                    let chunk = CHUNK.max(2 * u64::from(receiver.ack.peer_mss()));
                    users.charge_window(user, receiver.raise_window_limit(0, chunk));
                } else {
                    receiver.remove_window_limit();
                }
                receiver.update_window();
                conns.touch(id);
            }
        }
    }
}
