//! `--eal`: arguments for DPDK.

use clap::Args;
use offcore_flow::DmaMap;
use offcore_port::spec::PortSpec;

/// The error of a build without DPDK support.
#[cfg(not(feature = "dpdk"))]
pub(crate) const WITHOUT: &str = "this offcore was built without DPDK: install libdpdk-dev 22.11 or later and pkg-config, \
                                  then cargo build --release --features dpdk";

/// The EAL of a command whose ports or channels may be DPDK's.
#[derive(Args, Clone, Debug)]
pub(crate) struct EalArgs {
    /// Arguments for DPDK's EAL in its own syntax, such as '-m 512 --vdev net_null0'; only with dpdk: ports and dmadev:
    /// channels. [default: hugepages if there are some, no PCI device but those asked for, virtual addresses]
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, help_heading = super::PORTS)]
    pub eal: Option<String>,
}

impl EalArgs {
    /// Passes them to the EAL. The EAL starts with its first device, which is a port or a channel.
    pub(crate) fn configure(&self, ports: &[PortSpec], dma: &DmaMap) -> Result<(), String> {
        let Some(text) = &self.eal else { return Ok(()) };
        configure(text)?;
        let channels = dma.entries.iter().flat_map(|entry| &entry.channels);
        let is_used = ports.iter().any(|port| matches!(port.bare(), PortSpec::Dpdk(_)))
            || channels.into_iter().any(|channel| channel.starts_with("dmadev:"));
        if is_used {
            Ok(())
        } else {
            Err("--eal: no port is dpdk:, and no channel dmadev:, so it starts nothing".into())
        }
    }
}

#[cfg(feature = "dpdk")]
fn configure(text: &str) -> Result<(), String> {
    offcore_dpdk::eal::configure(text).map_err(|error| error.to_string())
}

#[cfg(not(feature = "dpdk"))]
fn configure(_: &str) -> Result<(), String> {
    Err(format!("--eal: {WITHOUT}"))
}
