//! What is asked of the stack, in the name of an application.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::{Memory, Place};
pub(super) use offcore_tcp::proto::AppId;
use offcore_tcp::proto::{CallError, ConnId, Stack};

use crate::host::Calls;

pub(super) fn add_app(stack: &mut Stack, memory: usize) -> Result<AppId, MemoryError> {
    stack.add_app(memory)
}

pub(super) fn remove_app(stack: &mut Stack, app: AppId) {
    stack.remove_app(app);
}

pub(super) fn memory(stack: &Stack, app: AppId) -> Arc<Memory> {
    Arc::clone(stack.memory(app))
}

pub(super) fn take_slot(stack: &mut Stack, app: AppId) -> Option<Place> {
    stack.take_slot(app)
}

pub(super) fn give_slot(stack: &mut Stack, app: AppId, slot: Place) {
    stack.give_slot(app, slot);
}

pub(super) fn listen(
    calls: &mut Calls<'_>,
    app: AppId,
    address: Option<IpAddr>,
    port: u16,
    backlog: usize,
    share: bool,
) -> Result<u32, CallError> {
    calls.stack.listen(app, address, port, backlog, share)
}

pub(super) fn connect(
    calls: &mut Calls<'_>,
    app: AppId,
    from: Option<SocketAddr>,
    to: SocketAddr,
) -> Result<ConnId, CallError> {
    calls.stack.connect(calls.now, app, from, to, calls.out)
}

pub(super) fn open_datagrams(
    calls: &mut Calls<'_>,
    app: AppId,
    address: Option<IpAddr>,
    port: u16,
) -> Result<ConnId, CallError> {
    calls.stack.open_datagrams(app, address, port)
}
