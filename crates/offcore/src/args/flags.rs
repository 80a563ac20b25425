//! Maps configuration fields to flags: libraries report fields, users know flags.

use offcore_config::names::Names;
use offcore_flow::SwitchError;
use offcore_flow::switch::Field;
use offcore_port::PortError;
use offcore_stats::lcore::LcoreError;

use crate::failure::Failure;

/// Fields of the packet generator are not in configuration files.
fn flag(field: Field) -> &'static str {
    match field {
        Field::Bidirectional => "--bidirectional",
        Field::Flows => "--flows",
        Field::LinkSpeed => "--link",
        Field::Sizes => "--size",
        field => Names::Flags.of(field.into()),
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
