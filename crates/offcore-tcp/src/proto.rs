//! The protocols: pure code over numbers and the heads of packets.
//!
//! Times are microseconds since the stack was made, as `u64`. Positions in a stream are `u64` offsets of its first byte;
//! sequence numbers are what they look like on the wire, and only headers have them.
mod addr;
mod ahead;
mod announce;
mod apps;
mod arenas;
mod arp;
mod call_error;
mod calls;
mod complaints;
mod config;
mod conns;
mod cookie;
mod counts;
mod demux;
mod ending;
mod feed;
mod flows;
pub(crate) mod fragment;
mod groups;
mod handshake;
mod icmp;
mod iface;
mod info;
mod input;
mod interfaces;
mod ip;
mod isn;
mod keepalive;
mod listeners;
mod memory;
mod neighbour;
mod net;
mod one_peer;
mod opening;
mod options;
mod output;
mod packet;
mod path_mtu;
mod ports;
mod quoted;
mod reassembly;
mod receive;
mod recovery;
mod run;
mod seal;
mod segment;
mod send;
mod sessions;
mod set_options;
mod shortage;
mod siphash;
mod sockets;
mod stack;
mod steering;
mod tcb;
mod timewait;
mod to_many;
mod udp;
mod undelivered;
mod wheel;

pub use addr::{AppId, ConnId, FlowKey, overlap};
pub use call_error::CallError;
pub use config::{Buffers, Config};
pub use cookie::CookieCounts;
pub use counts::StackCounts;
pub use iface::{IfaceConfig, Prefix, Route};
pub use info::{Info, ListenerInfo};
pub(crate) use ip::destination;
pub use ip::sum_end;
pub use keepalive::KeepAlive;
pub use memory::AppMemory;
pub use options::ConnOptions;
#[cfg(test)]
pub(crate) use packet::Next;
pub use packet::{
    Cause, Control, DropReason, Drops, Event, HEAD, Out, Place, Plan, RxChecksum, RxSeg, Sealed,
    SealedDatagram, Verdict,
};
pub use recovery::{Algorithm, State as RecoveryState, Stats as RecoveryStats};
pub use sessions::Room;
pub use sockets::Reuse;
pub use stack::Stack;
pub use steering::{Owner, Share};
