//! Facts from the CUDA driver and the kernels' PTX, and the compatibility of their versions.

use serde::Serialize;

/// Facts from the CUDA driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CudaFacts {
    /// The driver's CUDA version as returned by cuDriverGetVersion: 1000 × major + 10 × minor.
    pub driver_version: u32,
    pub devices: Vec<CudaDeviceFacts>,
}

impl CudaFacts {
    /// Returns the device at a PCI address.
    pub fn device(&self, address: &str) -> Option<&CudaDeviceFacts> {
        self.devices.iter().find(|device| device.address.eq_ignore_ascii_case(address))
    }
}

/// A device as the CUDA driver reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CudaDeviceFacts {
    /// Its PCI address in lower case with a four-digit domain: `0000:3b:00.0`.
    pub address: String,
    pub name: String,
    pub memory_bytes: u64,
    pub compute_capability: (u32, u32),
    /// CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
    pub host_pointers: bool,
    /// CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, or `None` if the driver does not know the attribute.
    pub dma_buf: Option<bool>,
    /// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, or `None` if the driver does not know the attribute.
    pub gpudirect_rdma: Option<bool>,
    /// CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT: it has a display, and kernels that run for seconds are killed.
    pub kernel_timeout: bool,
}

/// Requirements from the first directives of a PTX file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Ptx {
    /// `.version`: the version of the PTX language.
    pub version: (u32, u32),
    /// `.target`: the minimum compute capability, `(9, 0)` for sm_90.
    pub target: (u32, u32),
}

impl Ptx {
    /// Reads `.version` and `.target`; `None` if one is missing.
    pub fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            text.lines().find_map(|line| {
                let mut words = line.split_whitespace();
                (words.next() == Some(name)).then(|| words.next()).flatten()
            })
        };
        let (major, minor) = value(".version")?.split_once('.')?;
        // Formats: sm_90, sm_90a, `sm_80, texmode_independent`.
        let target = value(".target")?.strip_prefix("sm_")?;
        let digits: String = target.chars().take_while(char::is_ascii_digit).collect();
        let sm: u32 = digits.parse().ok()?;
        Some(Self { version: (major.parse().ok()?, minor.parse().ok()?), target: (sm / 10, sm % 10) })
    }

    /// Returns the first CUDA version whose driver reads it, in the format of cuDriverGetVersion, or `None` for an
    /// unknown PTX version.
    pub fn needs_cuda(&self) -> Option<u32> {
        match self.version {
            (major @ (9..), minor) => {
                major.checked_add(4)?.checked_mul(1000)?.checked_add(minor.checked_mul(10)?)
            }
            (8, minor @ 6..=8) => Some(12_010 + 10 * minor),
            (8, minor @ 0..=5) => Some(12_000 + 10 * minor),
            _ => None,
        }
    }
}

/// The first CUDA version whose driver allows the CPU to map a dma-buf of GPU memory.
pub(crate) const MAPS_DMA_BUF: u32 = 13_030;

/// Formats a CUDA version.
pub(crate) fn words(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_header_is_parsed() {
        let text =
            "//\n// Generated\n\n.version 8.8\n.target sm_70\n.address_size 64\n.visible .entry x()\n{}\n";
        let ptx = Ptx::parse(text).unwrap();
        assert_eq!((ptx.version, ptx.target, ptx.needs_cuda()), ((8, 8), (7, 0), Some(12_090)));
        assert_eq!(Ptx::parse(".version 9.5\n.target sm_100a, debug").unwrap().target, (10, 0));
        for bad in ["", ".version", ".version 8\n.target sm_70", ".version 8.8", ".version 8.8\n.target sm_x"]
        {
            assert_eq!(Ptx::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn ptx_and_cuda_versions_match() {
        let needs = |major, minor| Ptx { version: (major, minor), target: (7, 0) }.needs_cuda();
        assert_eq!(needs(9, 5), Some(13_050));
        assert_eq!((needs(8, 5), needs(8, 6), needs(8, 0)), (Some(12_050), Some(12_070), Some(12_000)));
        assert_eq!((needs(7, 8), needs(u32::MAX, u32::MAX)), (None, None));
        assert_eq!(words(12_090), "12.9");
    }
}
