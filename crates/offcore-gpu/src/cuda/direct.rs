//! Device memory that network cards access (GPUDirect RDMA).
//!
//! It has not been tested on a device. Its assumptions about driver and cards are from their documentation.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUflushGPUDirectRDMAWritesScope as Scope,
    CUflushGPUDirectRDMAWritesTarget as Target, CUpointer_attribute,
};
use offcore_mem::DeviceMemory;

use crate::cuda::driver::{self, CudaError, call};
use crate::cuda::gpu::{Gpu, quiesce_lock};
use crate::cuda::memory::Allocation;

/// Page size for network cards.
const PAGE: usize = 64 << 10;
/// With this ordering or a higher one, a kernel sees a card's writes in order with writes of the CPU
/// (CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER).
const IN_ORDER: i32 = 100;
/// The CPU can flush a card's writes (CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST).
const BY_HOST: i32 = 1;

/// Allocates device memory for `len` bytes of packets. `name` is the device's name.
pub(super) fn pool(gpu: &Gpu, name: &str, len: usize) -> Result<DeviceMemory, String> {
    if gpu.facts.gpudirect_rdma == Some(false) {
        return Err("network cards do not reach its memory (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED): use another \
                    GPU, or memory gpu, which copies packets there"
            .into());
    }
    flushes(gpu)?;
    let quiesce = quiesce_lock();
    if !quiesce.is_quiescent() {
        return Err(
            "kernels of this process already wait for bursts, and no memory can be allocated meanwhile"
                .into(),
        );
    }
    let len = len.next_multiple_of(PAGE);
    let memory = Allocation::new(&gpu.context, "packets that network cards put there", len + PAGE)?;
    // An allocation need not be page-aligned.
    let base = memory.at::<u8>().addr().next_multiple_of(PAGE);
    let to_text =
        |error: CudaError| format!("copies in memory for network cards cannot be made synchronous: {error}");
    let mut on = 1u32;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
    let at = memory.at::<u8>().addr() as u64;
    // SAFETY: `Allocation` has made the context current. The attribute is one word, and the address belongs to an
    // allocation.
    unsafe { call!(cuPointerSetAttribute((&raw mut on).cast(), attribute, at)) }.map_err(to_text)?;
    // SAFETY: the range is inside the new allocation, which is one page longer.
    Ok(unsafe { DeviceMemory::new(name, base, len, PAGE, false, Arc::new(memory)) })
}

/// Returns whether a network card's writes must be flushed before the device gets the burst.
pub(super) fn flushes(gpu: &Gpu) -> Result<bool, String> {
    let device = driver::device(gpu.ordinal).map_err(|error| error.to_string())?;
    let known = |which| driver::attribute(device, which).unwrap_or_default();
    if known(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) >= IN_ORDER {
        return Ok(false);
    }
    if known(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & BY_HOST != 0 {
        return Ok(true);
    }
    Err("nothing says when kernels see what a network card has written (neither an order of such writes nor \
         cuFlushGPUDirectRDMAWrites): use memory gpu, which copies packets there"
        .into())
}

/// Waits until kernels see everything that network cards have written so far. The context is current.
pub(super) fn flush() -> Result<(), CudaError> {
    let (target, scope) = (
        Target::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
    );
    // SAFETY: the context is current, as the caller guarantees, and every driver since CUDA 11.3 has the function.
    unsafe { call!(cuFlushGPUDirectRDMAWrites(target, scope)) }
}
