//! Devices by the names that the command line uses: `host`, `cuda:N`.

use crate::device::{Device, DeviceError};
use crate::host::HostDevice;

/// Opens the device of this name.
///
/// # Errors
/// In words, when there is none, or it cannot be used.
pub fn open(name: &str) -> Result<Box<dyn Device>, DeviceError> {
    match name {
        "host" => Ok(Box::new(HostDevice::new()?)),
        _ => {
            let reason = "expected cuda:N (GPU N) or host (threads that stand in for a GPU)".into();
            Err(DeviceError::Absent { device: name.into(), reason })
        }
    }
}
