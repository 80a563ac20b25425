//! `offcore tcp` behind clouds' gateways, switches and routers.

mod dhcp;
mod gateway;
mod groups;
mod mtu;
mod slaac;
mod vlan;
