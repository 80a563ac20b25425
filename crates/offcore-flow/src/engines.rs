//! Devices by the names that the command line uses.

use std::collections::BTreeMap;
use std::sync::Arc;

use offcore_dma::core::CoreDevice;
use offcore_dma::cpu::CpuDevice;
use offcore_dma::{Channel, Device};

/// Operations that a channel holds.
pub const CHANNEL_RING: usize = 1024;

/// The devices opened so far: each is opened once, and gives every worker that asks a channel of its own.
#[derive(Debug, Default)]
pub struct Engines {
    devices: BTreeMap<String, Arc<dyn Device>>,
}

impl Engines {
    /// A new channel of the device called `name`.
    ///
    /// # Errors
    /// In words, when there is no such device or it has no channel left.
    pub fn open_channel(&mut self, name: &str) -> Result<Box<dyn Channel>, String> {
        let device = match self.devices.get(name) {
            Some(device) => Arc::clone(device),
            None => {
                let device = open(name)?;
                self.devices.insert(name.into(), Arc::clone(&device));
                device
            }
        };
        device.open_channel(CHANNEL_RING).map_err(|error| error.to_string())
    }

    /// The lcores that helper threads run on.
    pub fn helper_lcores(&self) -> Vec<usize> {
        self.devices.keys().filter_map(|name| name.strip_prefix("core:")?.parse().ok()).collect()
    }
}

fn open(name: &str) -> Result<Arc<dyn Device>, String> {
    if name == "cpu" {
        return Ok(Arc::new(CpuDevice));
    }
    let expected = "expected cpu or core:N (a helper thread on lcore N)";
    let lcore = name.strip_prefix("core:").ok_or_else(|| format!("channel '{name}': {expected}"))?;
    let lcore = lcore.parse().map_err(|_| format!("channel '{name}': '{lcore}' is no lcore; {expected}"))?;
    let device = CoreDevice::start(lcore).map_err(|error| error.to_string())?;
    Ok(Arc::new(device))
}
