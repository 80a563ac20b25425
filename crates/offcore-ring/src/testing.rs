//! Helpers shared by tests.

use offcore_mem::GuestMemory;

use crate::device::{Buffer, Chain, DeviceQueue, Direction, Wanted};

/// Returns the chain at the available entry `ahead`, if it is one non-empty buffer in one region and was found by
/// [`DeviceQueue::look`].
pub fn single(
    queue: &mut impl DeviceQueue,
    ahead: u16,
    memory: &GuestMemory,
    direction: Direction,
) -> Option<(Buffer, Chain)> {
    let wanted = Wanted { direction, least: 0, most: u32::MAX };
    let single = queue.singles(ahead, 1, memory, wanted).first()?;
    Some((Buffer { addr: single.addr(), len: single.len() }, Chain::one(single.id())))
}
