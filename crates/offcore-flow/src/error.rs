//! Errors in configurations, by field, and errors when a switch starts.

use offcore_gpu::device::DeviceError;
use offcore_port::PortError;
use offcore_stats::lcore::{self, LcoreError};
use offcore_stats::page::PageError;

/// A field of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Addresses,
    Batch,
    Bidirectional,
    Burst,
    Devices,
    Dma,
    Elsewhere,
    EthPeers,
    Flows,
    Frame,
    Lcores,
    LinkSpeed,
    Memory,
    Mirrors,
    OnHit,
    Pool,
    PortMask,
    Ports,
    RingSize,
    /// The service for applications in other processes.
    Serve,
    Service,
    /// The peer to connect to.
    Receiver,
    /// Bytes of payload in a packet.
    Segment,
    Simulators,
    Sizes,
    SplitAt,
    Vlans,
    /// Addresses of ports.
    Stations,
}

impl Field {
    /// Returns an error about this field. `text` names the found and the expected value.
    pub(crate) fn refuse<T>(self, text: impl Into<String>) -> Result<T, SwitchError> {
        Err(SwitchError::Config { field: self, text: text.into() })
    }

    /// Refuses the first port number in `found` that is not below `ports`.
    pub(crate) fn check_ports(
        self,
        ports: usize,
        mut found: impl Iterator<Item = usize>,
    ) -> Result<(), SwitchError> {
        match found.find(|&port| port >= ports) {
            Some(port) => self.refuse(format!("port {port}: {}", counted(ports))),
            None => Ok(()),
        }
    }
}

/// Returns the number of ports in words.
pub(crate) fn counted(ports: usize) -> String {
    match ports {
        1 => "there is one port, number 0".into(),
        _ => format!("there are {ports} ports, counted from 0"),
    }
}

/// A configuration error of a switch.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum SwitchError {
    /// {field:?}: {text}
    Config {
        field: Field,
        /// The found and the expected value.
        text: String,
    },
    /// {0}
    Channel(String),
    /// {0}
    Port(#[from] PortError),
    /// {0}
    Stats(#[from] PageError),
    /// {0}
    Device(#[from] DeviceError),
    /// {0}
    Lcore(#[from] LcoreError),
    /// starting the worker of lcore {lcore}: {source}
    Thread { lcore: usize, source: std::io::Error },
}

/// Refuses lcores on which workers cannot run.
///
/// # Errors
/// [`SwitchError::Lcore`].
pub fn check_lcores(lcores: &[usize]) -> Result<(), SwitchError> {
    let available = lcore::available()?;
    match lcores.iter().find(|lcore| !available.contains(lcore)) {
        Some(&found) => Err(LcoreError::Unavailable { found, available }.into()),
        None => Ok(()),
    }
}

/// Returns the error for packets of `found` bytes, which take more packet buffers than one packet may.
pub(crate) fn too_long<T>(found: usize, most: usize) -> Result<T, SwitchError> {
    Field::Pool.refuse(format!(
        "too small for packets of {found} bytes, expected at most {most}: a quarter of the packet buffers"
    ))
}
