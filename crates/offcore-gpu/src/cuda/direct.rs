//! Memory of the device that network cards reach (GPUDirect RDMA).
//!
//! It has run on no device: what is said here of the driver and of cards is what their documents say.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUflushGPUDirectRDMAWritesScope as Scope,
    CUflushGPUDirectRDMAWritesTarget as Target, CUpointer_attribute,
};
use offcore_mem::DeviceMemory;

use crate::cuda::driver::{self, CudaError, call};
use crate::cuda::gpu::{Gpu, yard};
use crate::cuda::memory::Allocation;

/// Bytes of a page as network cards see the device's memory.
const PAGE: usize = 64 << 10;
/// From this order of a card's writes on a kernel sees them in the order in which they were made, with those of the CPU
/// (CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER).
const IN_ORDER: i32 = 100;
/// The CPU can wait for a card's writes (CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST).
const BY_HOST: i32 = 1;

/// Memory for `len` bytes of packets, of the device of this name.
///
/// # Errors
/// In words, when there is none, or network cards would not reach it.
pub(super) fn pool(gpu: &Gpu, name: &str, len: usize) -> Result<DeviceMemory, String> {
    if gpu.facts.gpudirect_rdma == Some(false) {
        return Err("network cards do not reach its memory (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED): take another \
                    GPU, or --memory gpu, which copies packets there"
            .into());
    }
    flushes(gpu)?;
    let yard = yard();
    if !yard.is_quiet() {
        return Err(
            "kernels of this process already wait for bursts, and nothing can be allocated meanwhile".into(),
        );
    }
    let len = len.next_multiple_of(PAGE);
    let memory =
        Allocation::new(&gpu.context, "packets that network cards put there (--memory direct)", len + PAGE)?;
    // What is allocated need not begin with a page.
    let base = memory.at::<u8>().addr().next_multiple_of(PAGE);
    let in_words =
        |error: CudaError| format!("copies in memory for network cards cannot be waited for: {error}");
    let mut on = 1u32;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
    let at = memory.at::<u8>().addr() as u64;
    // SAFETY: `Allocation` has made the context current; the attribute is a word, and the address an allocation's.
    unsafe { call!(cuPointerSetAttribute((&raw mut on).cast(), attribute, at)) }.map_err(in_words)?;
    Ok(DeviceMemory::new(name, (base, len), PAGE, false, Arc::new(memory)))
}

/// Whether a network card's writes have to be waited for before a kernel is told of them.
///
/// # Errors
/// In words, when they would have to be and cannot.
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
         cuFlushGPUDirectRDMAWrites): take --memory gpu, which copies packets there"
        .into())
}

/// Waits until kernels see what network cards have written so far. The context is current.
pub(super) fn flush() -> Result<(), CudaError> {
    let (target, scope) = (
        Target::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
    );
    // SAFETY: the caller has made the context current; every driver from CUDA 11.3 on has the function.
    unsafe { call!(cuFlushGPUDirectRDMAWrites(target, scope)) }
}
