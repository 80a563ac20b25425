//! `offcore tcp` in networks as clouds, switches and routers make them.

mod gateway;
mod groups;
mod mtu;
mod vlan;
