//! Properties of the driver and its devices, as the driver reports them, for the doctor.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use crate::cuda::driver::{self, CudaError, call};
use crate::doctor::{CudaDeviceFacts, CudaFacts};

/// Queries the driver. This also works if it is too old for the kernels.
///
/// # Errors
/// The reason why it cannot be queried.
pub fn facts() -> Result<CudaFacts, String> {
    let driver_version = driver::ready()?;
    let to_text = |error: CudaError| error.to_string();
    let devices = (0..driver::devices().map_err(to_text)?)
        .map(|ordinal| driver::device(ordinal).and_then(facts_of).map_err(to_text))
        .collect::<Result<_, _>>()?;
    Ok(CudaFacts { driver_version, devices })
}

/// Queries a device.
pub(crate) fn facts_of(device: sys::CUdevice) -> Result<CudaDeviceFacts, CudaError> {
    let number = |which| driver::attribute(device, which);
    let known = |which| number(which).ok().map(|value| value != 0);
    let mut memory = 0;
    // SAFETY: the device is the driver's; `memory` is valid for writes.
    unsafe { call!(cuDeviceTotalMem_v2(&mut memory, device)) }?;
    let major = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(CudaDeviceFacts {
        // SAFETY: the buffer has room for `len` bytes including the zero, and the device is the driver's.
        address: short(&text(|at, len| unsafe { call!(cuDeviceGetPCIBusId(at, len, device)) })?),
        // SAFETY: the buffer has room for `len` bytes including the zero, and the device is the driver's.
        name: text(|at, len| unsafe { call!(cuDeviceGetName(at, len, device)) })?,
        memory_bytes: memory as u64,
        compute_capability: (major as u32, minor as u32),
        host_pointers: known(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
            == Some(true),
        dma_buf: known(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
        gpudirect_rdma: known(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        kernel_timeout: known(Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT) == Some(true),
    })
}

/// Returns a zero-terminated text that the driver writes to a buffer of the given size.
fn text(write: impl FnOnce(*mut c_char, i32) -> Result<(), CudaError>) -> Result<String, CudaError> {
    let mut bytes = [0u8; 256];
    write(bytes.as_mut_ptr().cast(), bytes.len() as i32)?;
    let text = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy).unwrap_or_default();
    Ok(text.trim().into())
}

/// Returns a PCI address in lower case with a four-digit domain, because some drivers write eight digits.
fn short(address: &str) -> String {
    let address = address.to_ascii_lowercase();
    match address.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[domain.len() - 4..])
        }
        _ => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_as_in_sysfs() {
        assert_eq!(short("00000000:3B:00.0"), "0000:3b:00.0");
        assert_eq!(short("0000:3B:00.0"), "0000:3b:00.0");
        assert_eq!((short("00010000:3B:00.0").as_str(), short("").as_str()), ("00010000:3b:00.0", ""));
    }

    #[test]
    fn texts_end_at_their_zero() {
        let name = text(|at, len| {
            assert!(len >= 32);
            // SAFETY: there is room for `len` bytes.
            unsafe { at.cast::<[u8; 12]>().write(*b"NVIDIA H200\0") };
            Ok(())
        });
        assert_eq!(name.unwrap(), "NVIDIA H200");
    }
}
