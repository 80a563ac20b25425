//! The protocols: pure code over numbers and packet headers.
//!
//! Times are microseconds since the creation of the stack, as `u64`. Stream positions are `u64` offsets of bytes in the
//! stream. Sequence numbers are their representation on the wire and occur only in headers.
mod addr;
mod addresses;
mod ahead;
mod announce;
mod apps;
mod arenas;
mod arp;
mod autoconf;
mod call_error;
mod calls;
mod complaints;
mod config;
mod conns;
mod cookie;
mod counts;
mod demux;
mod dhcp;
mod ending;
mod feed;
mod flows;
pub(crate) mod fragment;
mod groups;
mod handshake;
mod icmp;
mod iface;
mod iface_info;
mod info;
mod input;
mod interfaces;
mod ip;
mod isn;
mod joined;
mod keepalive;
mod lease;
mod listeners;
mod memberships;
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
mod routers;
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
mod windows;

pub use addr::{AppId, ConnId, FlowKey, overlap};
pub use call_error::CallError;
pub use config::{Buffers, Config, Room};
pub use cookie::CookieCounts;
pub use counts::StackCounts;
pub use iface::{IfaceConfig, Origin, Prefix, Route};
pub use iface_info::{AddressInfo, IfaceInfo};
pub use info::{Info, ListenerInfo};
pub(crate) use ip::destination;
pub use ip::sum_end;
pub use joined::MulticastDatagram;
pub use keepalive::KeepAlive;
pub use memberships::Membership;
pub use memory::AppMemory;
pub use options::ConnOptions;
#[cfg(test)]
pub(crate) use packet::Next;
pub use packet::{
    Cause, Control, DropReason, Drops, Event, HEAD, Message, Out, Place, Placed, Plan, RxChecksum, RxSeg,
    Sealed, SealedDatagram, Verdict,
};
pub use recovery::{Algorithm, State as RecoveryState, Stats as RecoveryStats};
pub use sockets::Reuse;
pub use stack::Stack;
pub use steering::{Owner, Share};
