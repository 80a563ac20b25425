//! Devices by the names that the command line uses: `host`, `cuda:N`.

use crate::device::{Device, DeviceError};
use crate::host::HostDevice;

/// The device that is meant when none is named: the first GPU.
///
/// # Errors
/// When there is none.
pub fn default() -> Result<String, DeviceError> {
    let reason = "no GPU was found; --device host takes threads that stand in for one".into();
    Err(DeviceError::Absent { device: "cuda:0".into(), reason })
}

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
