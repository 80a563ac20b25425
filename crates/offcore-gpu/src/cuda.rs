//! The devices `cuda:N`: NVIDIA GPUs, by the CUDA driver. No CUDA is needed to build, and none is linked: the driver's
//! library is loaded when a device is asked for.
//!
//! * `driver`: the library, its errors, and what it gives out,
//! * `memory`: the host's memory as devices see it, and their own,
//! * `gpu`: a GPU that is open, and what the services of a process must not do to each other,
//! * `service`: what is made ready for bursts to go to it, `halves`: who launches kernels for them, and who watches,
//! * `thread`: the thread that launches a kernel for each burst, or for several that have come,
//! * `direct`: memory of theirs that network cards reach,
//! * `graph`: graphs of kernels, `slots`: bursts in the device's own memory,
//! * `facts`: what the doctor is told.

mod direct;
pub(crate) mod driver;
mod facts;
pub(crate) mod gpu;
mod graph;
mod halves;
pub(crate) mod memory;
mod service;
mod slots;
mod thread;

use std::sync::Arc;

use offcore_mem::DeviceMemory;

use crate::cuda::gpu::Gpu;
use crate::device::{Device, DeviceError, Service, Started};

pub use facts::facts;

/// The names of the devices that the driver shows: `cuda:0` and so on. There is at least one.
///
/// # Errors
/// No driver or no device, with what to do.
pub fn list() -> Result<Vec<String>, DeviceError> {
    let absent = |reason| DeviceError::Absent { device: "cuda".into(), reason };
    driver::ready().map_err(absent)?;
    match driver::devices().map_err(|error| absent(error.to_string()))? {
        0 => Err(absent("the driver shows no GPU: see nvidia-smi -L and CUDA_VISIBLE_DEVICES".into())),
        count => Ok((0..count).map(|ordinal| format!("cuda:{ordinal}")).collect()),
    }
}

/// A GPU.
#[derive(Debug)]
pub struct CudaDevice {
    name: String,
    gpu: Arc<Gpu>,
    /// What network cards put packets into.
    direct: Option<DeviceMemory>,
    /// Of the services, each once.
    notes: Vec<String>,
}

impl CudaDevice {
    /// GPU `ordinal` of those that the driver shows. Its kernels are compiled and tried out.
    ///
    /// # Errors
    /// No driver, no such GPU, one of them too old, and what the driver refuses; with what to do.
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        let name = format!("cuda:{ordinal}");
        match Gpu::open(ordinal) {
            Ok(gpu) => Ok(Self { name, gpu, direct: None, notes: Vec::new() }),
            Err(reason) => Err(DeviceError::Absent { device: name, reason }),
        }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn pool(&mut self, len: usize) -> Result<DeviceMemory, DeviceError> {
        let memory = direct::pool(&self.gpu, &self.name, len)
            .map_err(|reason| DeviceError::Start { device: self.name.clone(), reason })?;
        self.direct = Some(memory.clone());
        self.notes.push(
            "network cards put packets into its memory and fetch them there (GPUDirect RDMA): this has never run on a GPU \
             or with a network card"
                .into(),
        );
        Ok(memory)
    }

    unsafe fn start(&mut self, service: Service) -> Result<Started, DeviceError> {
        service.check(&self.name)?;
        let direct = service.direct(&self.name, self.direct.as_ref())?;
        // SAFETY: the caller's promise.
        let started = unsafe { service::start(&self.gpu, &service, direct) };
        let (started, note) =
            started.map_err(|reason| DeviceError::Start { device: self.name.clone(), reason })?;
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
        Ok(started)
    }

    fn notes(&self) -> Vec<String> {
        let title = self.gpu.title();
        if self.notes.is_empty() {
            return vec![title];
        }
        self.notes.iter().map(|note| format!("{title}: {note}")).collect()
    }

    fn profile(&mut self, begin: bool) -> Result<(), DeviceError> {
        self.gpu.context.profile(begin).map_err(|error| {
            let reason = format!("its profiler: {error}");
            DeviceError::Absent { device: self.name.clone(), reason }
        })
    }
}
