//! `offcore tcp` behind the gateways, switches and routers of cloud networks.

mod conflicts;
mod dhcp;
mod gateway;
mod groups;
mod mtu;
mod slaac;
mod vlan;
