//! Sessions between the TCP/IP stack and applications: FIFOs in shared memory.
//!
//! * [`arena`]: the stack's allocator of blocks, slots and tables over one application's memory,
//! * [`memory`]: the segments that a party has mapped, and what addresses them,
//! * [`layout`]: where a position of a stream is,
//! * [`slot`]: the 512 shared bytes of a session: indices, limit, where the blocks are,
//! * [`fifo`]: the stack's side of a direction,
//! * [`app`]: the application's side,
//! * [`datagram`]: datagrams instead of a stream.
//!
//! Stack and application share memory by fixed offsets, without pointers. Each index of the other side is read once and
//! checked. An application that stores nonsense spoils its own bytes and indices: the stack gets a [`Misuse`] and resets
//! the session. Allocator, tables and positions by which the stack decides are its private memory.
//!
//! A session is used in both directions like this:
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

pub mod app;
pub mod arena;
pub mod datagram;
pub mod fifo;
pub mod layout;
pub mod memory;
pub mod slot;
mod sync;
mod table;

pub use app::{Reader, Span, Spans, Writer};
pub use arena::{Arena, Free};
pub use fifo::{Fifo, Misuse, Rx, Tx};
pub use layout::CAPACITY;
pub use memory::{Block, Memory, Place};
