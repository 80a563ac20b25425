//! Extends the windows of users whose rate is limited. Their connections take turns.

use super::Stack;
use crate::proto::addr::ConnId;
use crate::proto::conns::Conn;
use crate::proto::users::{CHUNK, Users};

/// Maximum number of connections of a user that extend their windows in one turn.
const RESUMED: usize = 64;

/// Charges a user for the data that a connection has received since its window was last extended.
#[inline]
pub(super) fn charge_received(users: &mut Users, id: ConnId, conn: &mut Conn) {
    let receiver = &mut conn.tcb.receiver;
    let (bytes, packets) = (receiver.next() - conn.funded, receiver.ack.take_packets());
    if users.charge_received(conn.user, bytes, packets) {
        extend_or_wait(users, id, conn);
    } else {
        receiver.remove_share();
    }
}

/// Extends the window of a connection that needs it, or lets it wait.
#[cold]
fn extend_or_wait(users: &mut Users, id: ConnId, conn: &mut Conn) {
    if !conn.tcb.receiver.hold_share(CHUNK) {
        return;
    }
    if users.may_extend_or_wait(conn.user, id) {
        users.charge_window(conn.user, conn.tcb.receiver.extend_share(CHUNK));
    } else {
        conn.tcb.receiver.wait_for_share(true);
    }
}

impl Stack {
    /// Extends the windows of connections that wait for it.
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
                receiver.wait_for_share(false);
                if users.is_limited(user) {
                    users.charge_window(user, receiver.extend_share(CHUNK));
                } else {
                    receiver.remove_share();
                }
                receiver.update_window();
                conns.touch(id);
            }
        }
    }
}
