//! Options of datagram sockets that the stack applies.

use std::sync::atomic::Ordering;

use offcore_session::datagram;
use offcore_session::slot::Slot;
use offcore_tcp::proto::ConnId;

use crate::host::Calls;

/// Applies the options of a slot to the stack's socket.
pub(super) fn apply(slot: &Slot, conn: ConnId, calls: &mut Calls<'_>) {
    let bits = slot.wishes.keep_idle.load(Ordering::Relaxed);
    let is_set = |bit| bits & bit != 0;
    let [v4, v6] = [datagram::HEARS_ERRORS, datagram::HEARS_ERRORS_6].map(is_set);
    calls.stack.set_recverr(conn, v4, v6);
    let [v4, v6] = [datagram::TAKES_ALL_GROUPS, datagram::TAKES_ALL_GROUPS_6].map(is_set);
    calls.stack.receive_all_groups(conn, v4, v6);
}
