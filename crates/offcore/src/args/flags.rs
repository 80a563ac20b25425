//! Maps configuration fields to flags: libraries report fields, users know flags.

use offcore_flow::SwitchError;
use offcore_flow::switch::Field;
use offcore_port::PortError;
use offcore_stats::lcore::LcoreError;

use crate::failure::Failure;

const fn flag(field: Field) -> &'static str {
    match field {
        Field::Addresses => "addr= of --port",
        Field::Batch => "--dma-batch",
        Field::Bidirectional => "--bidirectional",
        Field::Burst => "--burst",
        Field::Devices => "--device",
        Field::Dma => "--dma",
        Field::Elsewhere => "--steer",
        Field::EthPeers => "--eth-peer",
        Field::Flows => "--flows",
        Field::Frame => "--txpkts",
        Field::Lcores => "--lcores",
        Field::LinkSpeed => "--link",
        Field::Memory => "--memory",
        Field::Mirrors => "--mirror",
        Field::OnHit => "--on-match",
        Field::Pool => "--mbufs and --mbuf-size",
        Field::PortMask => "--portmask",
        Field::Ports => "--port",
        Field::RingSize => "--ring-size",
        Field::Receiver => "-c",
        Field::Segment => "-m",
        Field::Serve => "--serve",
        Field::Service => "--app",
        Field::Simulators => "--dsa-sim",
        Field::Sizes => "--size",
        Field::SplitAt => "--split",
        Field::Vlans => "--vlan",
        Field::Stations => "--fdb",
    }
}

pub(crate) fn by_flag(error: SwitchError) -> String {
    match error {
        SwitchError::Config { field, text } => format!("{}: {text}", flag(field)),
        SwitchError::Port(PortError::Syntax { .. }) => format!("--port: {error}"),
        SwitchError::Lcore(LcoreError::Unavailable { .. }) => format!("--lcores: {error}"),
        SwitchError::Channel(_) => format!("--dma: {error}"),
        SwitchError::Device(_) => format!("--device: {error}"),
        error => error.to_string(),
    }
}

/// Requests that cannot be fulfilled are usage errors. Whether another process serves at a path does not depend on
/// flags.
impl From<SwitchError> for Failure {
    fn from(error: SwitchError) -> Self {
        let usage = match &error {
            SwitchError::Config { field, .. } => !matches!(field, Field::Serve),
            SwitchError::Port(PortError::Syntax { .. }) => true,
            _ => false,
        };
        let text = by_flag(error);
        if usage { Self::Usage(text) } else { Self::Failed(anyhow::anyhow!(text)) }
    }
}
