//! Sessions between the TCP/IP stack and applications: FIFOs in shared memory.
//!
//! * [`arena`]: the stack's allocator of blocks, slots and tables in one application's memory,
//! * [`place`]: addresses in this memory, and [`memory`]: the segments that the stack has mapped,
//! * [`layout`]: the location of a stream's positions,
//! * [`slot`]: the 512 shared bytes of a session: indices, limit, location of blocks,
//! * [`wake`]: wake-ups between both sides: the words, and the order of accesses,
//! * [`control`]: state that an application's processes and the stack share in addition to sessions,
//! * [`message`]: requests and answers on a socket,
//! * [`fifo`]: the stack's side of a direction,
//! * [`app`]: the application's side,
//! * [`datagram`]: datagrams instead of a stream.
//!
//! Stack and application share memory by fixed offsets, without pointers. Each index of the other side is read once and
//! checked. An application that stores nonsense only damages its own bytes and indices: the stack gets a [`Misuse`] and
//! resets the session. The stack's allocator, tables and positions are in private memory.
//!
//! Both directions of a session are used like this:
//!
//! ```
//! use std::sync::Arc;
//! use offcore_session::{Arena, Fifo, Reader, Rx, Tx, Writer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut arena = Arena::new(1 << 20)?;
//! let slot = arena.take_slot().ok_or("no slot")?;
//! let (mut rx, mut tx) = (Fifo::<Rx>::new(slot), Fifo::<Tx>::new(slot));
//! // The application needs the segments and the slot's place.
//! let memory = Arc::clone(arena.memory());
//! let mut reader = Reader::new(Arc::clone(&memory), slot).ok_or("no slot")?;
//! let mut writer = Writer::new(memory, slot).ok_or("no slot")?;
//!
//! // Receive: the stack makes blocks exist, fills them, and commits.
//! assert!(rx.cover(&mut arena, 0, 5));
//! for (address, len) in rx.pieces(&arena, 0, 5) {
//!     // SAFETY: the piece is covered, and not yet committed.
//!     unsafe { address.as_ptr().copy_from_nonoverlapping(b"hello".as_ptr(), len) };
//! }
//! rx.commit(&arena, 5);
//! let mut bytes = [0; 16];
//! assert_eq!(reader.read(&mut bytes), 5);
//! assert_eq!(&bytes[..5], b"hello");
//! assert_eq!(rx.consumed(&mut arena)?, 5);
//! assert!(rx.shrink(&mut arena), "an idle direction has no blocks");
//!
//! // Transmit: the stack grants blocks, the application writes, the stack sends and frees.
//! assert!(tx.grant(&mut arena, 4096));
//! assert_eq!(writer.write(b"good day"), 8);
//! assert_eq!(tx.written(&arena)?, 8);
//! let (address, len) = tx.pieces(&arena, 0, 8).next().ok_or("no piece")?;
//! assert_eq!(len, 8);
//! // SAFETY: one byte of a block that the FIFO has.
//! assert_eq!(unsafe { address.read_volatile() }, b'g');
//! tx.acked(&mut arena, 8);
//! assert!(tx.shrink(&mut arena));
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    not(feature = "stack"),
    no_std,
    allow(dead_code, reason = "the stack's half of what both sides share")
)]

pub mod app;
#[cfg(feature = "stack")]
pub mod arena;
pub mod control;
mod copy;
pub mod datagram;
#[cfg(feature = "stack")]
pub mod fifo;
pub mod layout;
#[cfg(feature = "stack")]
pub mod memory;
pub mod message;
pub mod place;
#[cfg(feature = "stack")]
pub mod shared;
pub mod slot;
mod sync;
#[cfg(feature = "stack")]
mod table;
pub mod undelivered;
pub mod wake;

pub use app::{Span, Spans};
#[cfg(feature = "stack")]
pub use arena::{Arena, Budget, Charge, Free, Segment, Wanted};
#[cfg(feature = "stack")]
pub use fifo::{Asked, Fifo, Misuse, Rx, Tx};
pub use layout::CAPACITY;
#[cfg(feature = "stack")]
pub use memory::Memory;
pub use place::{Block, Place, Segments};

/// Reads received data of a session, over segments that are mapped as [`Memory`].
#[cfg(feature = "stack")]
pub type Reader = app::Reader<std::sync::Arc<Memory>>;
/// Writes data to be sent on a session, over segments that are mapped as [`Memory`].
#[cfg(feature = "stack")]
pub type Writer = app::Writer<std::sync::Arc<Memory>>;
/// A datagram socket, over segments that are mapped as [`Memory`].
#[cfg(feature = "stack")]
pub type Datagrams = datagram::Datagrams<std::sync::Arc<Memory>>;
