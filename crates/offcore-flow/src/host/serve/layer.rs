//! What is asked of the stack, in the name of an application.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_session::{Memory, Place};
use offcore_tcp::proto::{CallError, ConnId, Stack};

use crate::host::Calls;

/// An application, as the stack names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AppId;

pub(super) fn add_app(_: &mut Stack, _memory: usize) -> Result<AppId, MemoryError> {
    Ok(AppId)
}

pub(super) fn remove_app(_: &mut Stack, _: AppId) {}

pub(super) fn memory(stack: &Stack, _: AppId) -> Arc<Memory> {
    Arc::clone(stack.memory())
}

pub(super) fn take_slot(stack: &mut Stack, _: AppId) -> Option<Place> {
    stack.take_slot()
}

pub(super) fn give_slot(stack: &mut Stack, _: AppId, slot: Place) {
    stack.give_slot(slot);
}

pub(super) fn listen(
    calls: &mut Calls<'_>,
    _: AppId,
    address: Option<IpAddr>,
    port: u16,
    backlog: usize,
    _share: bool,
) -> Result<u32, CallError> {
    calls.stack.listen(address, port, backlog)
}

pub(super) fn connect(
    calls: &mut Calls<'_>,
    _: AppId,
    _from: Option<SocketAddr>,
    to: SocketAddr,
) -> Result<ConnId, CallError> {
    calls.stack.connect(calls.now, to, calls.out)
}

pub(super) fn open_datagrams(
    calls: &mut Calls<'_>,
    _: AppId,
    address: Option<IpAddr>,
    port: u16,
) -> Result<ConnId, CallError> {
    calls.stack.open_datagrams(address, port)
}
