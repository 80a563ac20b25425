//! For tests: what they would otherwise write down each for itself.

use offcore_mem::GuestMemory;

use crate::device::{Buffer, Chain, DeviceQueue, Direction, Wanted};

/// The chain that begins at the available entry `ahead`, if it is one buffer in one region, which is not empty, and has
/// been found by [`DeviceQueue::look`].
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
