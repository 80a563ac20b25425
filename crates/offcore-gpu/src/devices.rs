//! Opens devices by name: `host`, `cuda:N`.

use crate::cuda::{self, Costs, CudaDevice};
use crate::device::{DeviceError, GpuDevice};
use crate::host::{HOST, HostDevice};

/// Opens the device of this name: `host`, `cuda:N`, `N` for short, or `cuda` for the first GPU.
///
/// # Errors
/// The device does not exist, or cannot be used.
pub fn open(name: &str) -> Result<Box<dyn GpuDevice>, DeviceError> {
    if name == HOST {
        return Ok(Box::new(HostDevice::new()?));
    }
    Ok(Box::new(CudaDevice::open(ordinal(name)?).map_err(with_stand_in)?))
}

/// Measures the cost of reads and launches of the GPU of this name.
///
/// # Errors
/// The GPU does not exist, or cannot be measured.
pub fn costs(name: &str) -> Result<Costs, DeviceError> {
    if name == HOST {
        let reason =
            "threads in a GPU's place neither read across a bus nor are launched: expected cuda:N".into();
        return Err(DeviceError::Absent { device: name.into(), reason });
    }
    CudaDevice::open(ordinal(name)?)?.costs()
}

/// Adds the host device to the advice of an error.
fn with_stand_in(error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Absent { device, reason } => {
            let reason = format!("{reason}; or use the device host, threads that stand in for a GPU");
            DeviceError::Absent { device, reason }
        }
        other => other,
    }
}

/// Returns the name of the default device: the first GPU.
///
/// # Errors
/// No GPU exists, with advice.
pub fn default() -> Result<String, DeviceError> {
    let first = cuda::list().map(|names| names.into_iter().next());
    match first {
        Ok(name) => Ok(name.unwrap_or_else(|| "cuda:0".into())),
        Err(DeviceError::Absent { reason, .. } | DeviceError::Start { reason, .. }) => {
            Err(with_stand_in(DeviceError::Absent { device: "no device".into(), reason }))
        }
    }
}

/// Returns the number in a GPU's name.
fn ordinal(name: &str) -> Result<u32, DeviceError> {
    let number = match name {
        "cuda" => "0",
        _ => name.strip_prefix("cuda:").unwrap_or(name),
    };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse().ok().filter(|_| is_number).ok_or_else(|| {
        let reason = "expected cuda:N (GPU N) or host (threads that stand in for a GPU)".into();
        DeviceError::Absent { device: name.into(), reason }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_named_by_number() {
        for (name, wanted) in [("cuda", 0), ("cuda:0", 0), ("cuda:15", 15), ("3", 3)] {
            assert_eq!(ordinal(name).unwrap(), wanted, "{name}");
        }
        for name in ["", "cuda:", "cuda:x", "cuda:-1", "+1", "cuda:99999999999", "gpu0", "hosts", "CUDA:0"] {
            let text = open(name).unwrap_err().to_string();
            assert!(text.contains("expected cuda:N (GPU N) or host"), "{name}: {text}");
        }
    }

    /// Only without a driver, because the errors are different with one.
    #[test]
    fn missing_driver_is_named_in_errors() {
        let Err(text) = cuda::facts() else { return };
        let error = default().unwrap_err().to_string();
        assert!(error.contains("the device host") && error.contains(&text), "{error}");
        let error = open("cuda:0").unwrap_err().to_string();
        assert!(error.starts_with("cuda:0: ") && error.contains(&text), "{error}");
    }
}
