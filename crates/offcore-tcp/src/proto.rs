//! The protocols: pure code over numbers and the heads of packets.
//!
//! Times are microseconds since the stack was made, as `u64`. Positions in a stream are `u64` offsets of its first byte;
//! sequence numbers are what they look like on the wire, and only headers have them.

pub mod recovery;
