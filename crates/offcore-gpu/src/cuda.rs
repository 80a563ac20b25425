//! The devices `cuda:N`: NVIDIA GPUs, through the CUDA driver API. Building neither requires nor links CUDA: the
//! driver's library is loaded when a device is opened.
//!
//! * `library`: the driver's library; `driver`: its errors, and wrappers of its objects,
//! * `memory`: registered host memory and device memory,
//! * `gpu`: an open GPU, the quiesce lock and the SM reservations that services share,
//! * `service`: setting up a service; `halves`: its launcher and its watch,
//! * `thread`: the thread that launches kernels for bursts, and graphs,
//! * `direct`: device memory that network cards access,
//! * `graph`: graphs of kernels; `slots`: ring slots in device memory,
//! * `tables`: patterns in device memory; `quits`: a ring on which kernels end immediately,
//! * `facts`: the driver's reports for the doctor; `costs`: the cost of reads and launches.

mod costs;
mod direct;
pub(crate) mod driver;
mod facts;
pub(crate) mod gpu;
mod graph;
mod halves;
mod library;
pub(crate) mod memory;
mod quits;
mod service;
mod slots;
mod tables;
mod thread;

use std::sync::Arc;

use offcore_mem::DeviceMemory;

use crate::cuda::gpu::Gpu;
use crate::device::{DeviceError, GpuDevice, Service, Started};

pub use costs::{Costs, KernelCosts};
pub use facts::facts;
pub use gpu::use_all_queues;

/// Returns the names of the devices that the driver shows, `cuda:0` and so on. The list has at least one name.
///
/// # Errors
/// No driver or no device, with advice.
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
    /// Memory that network cards receive into.
    direct: Option<DeviceMemory>,
    /// The services' notes, without duplicates.
    notes: Vec<String>,
}

impl CudaDevice {
    /// Opens GPU `ordinal` of the visible devices. Compiles and tests its kernels.
    ///
    /// # Errors
    /// No driver, no such GPU, a GPU that is too old, or an error of the driver, with advice.
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        let name = format!("cuda:{ordinal}");
        match Gpu::open(ordinal) {
            Ok(gpu) => Ok(Self { name, gpu, direct: None, notes: Vec::new() }),
            Err(reason) => Err(DeviceError::Absent { device: name, reason }),
        }
    }

    /// Measures the cost of its reads of host memory and of launches. This takes a fraction of a second.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn costs(&self) -> Result<Costs, DeviceError> {
        costs::measure(&self.gpu).map_err(|reason| DeviceError::Absent { device: self.name.clone(), reason })
    }
}

impl GpuDevice for CudaDevice {
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
        // SAFETY: the memory in `service` stays valid until the service has ended, as the caller guarantees.
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
