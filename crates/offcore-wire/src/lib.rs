//! Packet headers as views of bytes, checksums, and the content of generated test traffic.
//!
//! A view is created by `new_checked`, which checks all lengths. After that, its accessors read fixed offsets and
//! cannot fail. The header is stored as a reference to an array of its exact size, so the compiler removes the bounds
//! checks. Views borrow private memory: bytes that another party may still write (guest memory) must be copied before
//! they are parsed.
//!
//! Headers to write are values with fields in host byte order. Their `write` fills an array of the header's exact size
//! and cannot fail, either. Short messages (ARP, ICMP, TCP options) are values in both directions: `parse` or `read`
//! reads all fields.
//!
//! The crate does not allocate memory per packet, contains no `unsafe` code, and does not panic on any input.
//!
//! | module | contents |
//! |---|---|
//! | [`ethernet`] | MAC addresses, the Ethernet II header, 802.1Q tags |
//! | [`arp`] | ARP packets |
//! | [`ip`], [`ipv4`], [`ipv6`] | IP headers, IPv6 extension headers, derived addresses |
//! | [`icmpv4`], [`icmpv6`] | echo, errors, neighbor, router and multicast listener discovery |
//! | [`igmp`] | reports of IPv4 groups |
//! | [`udp`], [`tcp`] | transport headers, TCP options |
//! | [`template`] | the 42 bytes of headers in front of generated UDP packets |
//! | [`traffic`] | headers that a user configures |
//! | [`stamp`] | numbers and times behind any headers, and verifiable content |
//! | [`probe`] | the numbered, verifiable payload of generated packets |
//! | [`checksum`] | the Internet checksum: whole, in parts, updated, completed for virtio |
//! | [`dhcp`] | messages of DHCP clients and servers |
//! | [`dscp`] | setting the DSCP field |
//! | [`gso`] | software segmentation of TCP and UDP packets |
//! | [`virtio_net`] | the header in front of each packet of a virtio-net device |
//! | [`pcap`] | capture files |

#![forbid(unsafe_code)]

pub mod arp;
pub mod checksum;
pub mod dhcp;
pub mod dscp;
mod error;
pub mod ethernet;
mod field;
pub mod gso;
mod icmp;
pub mod icmpv4;
pub mod icmpv6;
pub mod igmp;
pub mod ip;
pub mod ipv4;
pub mod ipv6;
mod pattern;
pub mod pcap;
pub mod probe;
pub mod stamp;
pub mod tcp;
pub mod template;
pub mod traffic;
pub mod udp;
pub mod virtio_net;

pub use arp::{Arp, ArpOperation};
pub use checksum::Sum;
pub use error::{Layer, WireError};
pub use ethernet::{EtherType, EthernetFrame, EthernetFrameMut, MacAddr, VlanTag};
pub use icmpv4::Icmpv4;
pub use icmpv6::{Icmpv6, ListenerQuery, NeighborAdvert, NeighborSolicit, RouterAdvert, RouterSolicit};
pub use igmp::Igmp;
pub use ip::IpProtocol;
pub use ipv4::{Ipv4Header, Ipv4Packet};
pub use ipv6::{Fragment, Ipv6Header, Ipv6Packet};
pub use tcp::{SackBlock, TcpFlags, TcpHeader, TcpOptions, TcpSegment, Timestamps};
pub use template::{TcpTemplate, TcpVarying, UdpEndpoint, UdpFlow, UdpTemplate};
pub use udp::{UdpDatagram, UdpHeader};
