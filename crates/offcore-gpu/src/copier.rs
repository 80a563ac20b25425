//! A CUDA device as a copy engine of the DMA library: `cuda:N`.
//!
//! A channel is a stream of its own, so every worker gets one. The device reaches memory that is registered, which is the
//! packet buffers. Copies from and to other memory, such as a guest's, never get to the driver: the channel reports them as
//! page faults, and the core makes them.
//!
//! A copy is two of the driver's, to memory of the device and back: one from host memory to host memory is made, as CUDA's
//! documentation says, before the call returns, by the caller's lcore. Calls take microseconds of the lcore, whatever the
//! length: what that is worth, `--mode auto` finds out.

mod channel;
mod event;

use std::sync::Arc;

use offcore_dma::channel::{Channel, Device, EngineError};
use offcore_mem::Pool;

use crate::cuda::driver::Context;
use crate::cuda::gpu::{Gpu, yard};
use crate::cuda::memory::Registration;
use crate::device::DeviceError;

pub use channel::CudaChannel;

/// Why nothing can be opened.
const WAITING: &str = "kernels of this process wait for bursts, and nothing can be registered or allocated meanwhile: open \
                       engines before the first burst is submitted";

/// A CUDA device that copies.
#[derive(Debug)]
pub struct CudaCopier {
    name: String,
    inner: Arc<Inner>,
}

/// What channels keep of their device.
#[derive(Debug)]
struct Inner {
    gpu: Arc<Gpu>,
    ranges: Vec<Range>,
}

/// Memory that the device reaches.
#[derive(Debug)]
struct Range {
    base: usize,
    len: usize,
    registration: Registration,
}

impl CudaCopier {
    /// GPU `ordinal` of those that the driver shows, which reaches the packet buffers of `pool`.
    ///
    /// # Errors
    /// No driver, no such GPU, and what the driver refuses; with what to do.
    pub fn open(ordinal: u32, pool: Option<&'static Pool>) -> Result<Self, DeviceError> {
        let mapping = pool.map(Pool::mapping);
        let ranges: Vec<_> = mapping.iter().map(|mapping| (mapping.base().as_ptr(), mapping.len())).collect();
        // SAFETY: a pool is never unmapped.
        unsafe { Self::reaching(ordinal, &ranges) }
    }

    /// GPU `ordinal`, which reaches memory by first byte and length.
    ///
    /// # Errors
    /// As for [`CudaCopier::open`].
    ///
    /// # Safety
    /// The memory stays where it is until the process ends.
    pub unsafe fn reaching(ordinal: u32, memory: &[(*mut u8, usize)]) -> Result<Self, DeviceError> {
        let name = format!("cuda:{ordinal}");
        let refused = |reason| DeviceError::Absent { device: name.clone(), reason };
        let gpu = Gpu::open(ordinal).map_err(refused)?;
        let yard = yard();
        if !yard.is_quiet() {
            return Err(refused(WAITING.into()));
        }
        let register = |&(base, len): &(*mut u8, usize)| {
            // SAFETY: the caller's promise.
            let registration = unsafe { Registration::new(&gpu.context, "the packet buffers", base, len) }
                .map_err(refused)?;
            Ok(Range { base: base.addr(), len, registration })
        };
        let ranges = memory.iter().map(register).collect::<Result<_, _>>()?;
        drop(yard);
        Ok(Self { name, inner: Arc::new(Inner { gpu, ranges }) })
    }

    /// What a person should know of it.
    pub fn note(&self) -> String {
        let title = self.inner.gpu.title();
        format!("{title}: it reaches the packet buffers only; copies from and to guests are made by the core")
    }
}

impl Device for CudaCopier {
    fn name(&self) -> &str {
        &self.name
    }

    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError> {
        let yard = yard();
        if !yard.is_quiet() {
            return Err(EngineError::Thread { device: self.name.clone(), reason: WAITING.into() });
        }
        Ok(Box::new(CudaChannel::open(&self.name, &self.inner, ring_size)?))
    }
}

impl Inner {
    fn context(&self) -> &Arc<Context> {
        &self.gpu.context
    }

    /// Where the device sees the bytes; none where it does not reach all of them.
    #[inline]
    fn address(&self, base: usize, len: u32) -> Option<u64> {
        let range = self.ranges.iter().find(|range| {
            base.checked_sub(range.base).is_some_and(|at| at <= range.len && len as usize <= range.len - at)
        })?;
        Some((range.registration.at().addr() + (base - range.base)) as u64)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // While kernels wait for bursts, unregistering would wait for them.
        yard().drop_when_quiet(Box::new(std::mem::take(&mut self.ranges)));
    }
}
