//! Ring slots in device memory, which the CPU writes through a mapping, so that a kernel polls local memory and reads
//! descriptors there without crossing the bus.
//!
//! Device memory can be exported as a dma-buf. Drivers since CUDA 13.3 allow the CPU to map it. Earlier ones refuse,
//! and the kernel logs an error each time. The setup tests whether a kernel sees the CPU's writes. Otherwise slots are
//! in the ring's host memory.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys;

use crate::cuda::driver::{CudaError, Stream, call};
use crate::cuda::gpu::{Gpu, WARP, place};
use crate::cuda::memory::Allocation;
use crate::device::DeviceSlots;
use crate::doctor::{MAPS_DMA_BUF, words};
use crate::layout::{AnswerHead, PipelineView, SlotHead};
use crate::ring::store_fence;

/// An allocation of this size is page-aligned.
const PAGE: usize = 2 << 20;
/// CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, since CUDA 12.8: a mapping through PCIe.
const BY_PCIE: u64 = 1;

/// Creates slots in device memory, with a CPU mapping. `view` has device addresses, `answers` is the CPU's address of
/// the answers.
///
/// # Safety
/// `view` must describe a valid ring, and nothing else may use its first answer in the meantime.
pub(super) unsafe fn slots(
    gpu: &Gpu,
    view: &PipelineView,
    answers: *mut u8,
    stream: &Stream,
) -> Result<(Allocation, DeviceSlots), String> {
    if gpu.facts.dma_buf != Some(true) {
        return Err("the driver exports no GPU memory".into());
    }
    if gpu.version < MAPS_DMA_BUF {
        return Err(format!(
            "the driver is for CUDA {}: the CPU may map GPU memory from 13.3 on",
            words(gpu.version)
        ));
    }
    let len = (view.ring.count as usize * view.ring.slot_stride as usize).next_multiple_of(PAGE);
    let memory = Allocation::zeroed(&gpu.context, "slots of a ring", len)?;
    let mapping = Mapped::new(&exported(&memory, len)?, len)?;
    let mut view = *view;
    view.ring.slots = memory.at();
    // SAFETY: `mapping` maps the slots' memory. The ring is valid and its first answer is unused, as the caller
    // guarantees.
    let seen = unsafe { kernel_sees_writes(gpu, &view, &mapping, answers, stream) }?;
    if !seen {
        return Err("kernels do not see what the CPU writes to GPU memory".into());
    }
    Ok((memory, DeviceSlots { base: mapping.base, keep: Box::new(mapping) }))
}

/// Exports device memory as a file descriptor.
fn exported(memory: &Allocation, len: usize) -> Result<OwnedFd, String> {
    let at = memory.at::<u8>().addr();
    // SAFETY: `sysconf` only queries a value.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE);
    if !at.is_multiple_of(page) {
        return Err(format!("GPU memory at {at:#x} does not begin with a page"));
    }
    let export = |flags| {
        let mut file: i32 = -1;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: `Allocation` has made the context current; the range is whole pages of an allocation, and `file` is
        // valid for writes.
        unsafe {
            call!(cuMemGetHandleForAddressRange((&raw mut file).cast(), at as u64, len, kind, flags))?;
            // SAFETY: the call has opened the descriptor, and it has no other owner.
            Ok(OwnedFd::from_raw_fd(file))
        }
    };
    export(BY_PCIE).or_else(|_| export(0)).map_err(|error: CudaError| error.to_string())
}

/// A CPU mapping of device memory.
#[derive(Debug)]
struct Mapped {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range is not bound to a thread.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(file: &OwnedFd, len: usize) -> Result<Self, String> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: this creates a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match NonNull::new(at) {
            Some(base) if at != libc::MAP_FAILED => Ok(Self { base: base.cast(), len }),
            _ => Err(format!(
                "the driver does not let the CPU map GPU memory: {}",
                std::io::Error::last_os_error()
            )),
        }
    }

    /// Writes the head of the first slot in the order of [`crate::ring`].
    fn write_head(&self, head: SlotHead) {
        // SAFETY: the mapping is larger than a head and page-aligned; it has not been shared yet.
        unsafe {
            let at = self.base.cast::<SlotHead>().as_ptr();
            (&raw mut (*at).count).write_volatile(head.count);
            store_fence();
            (&raw mut (*at).lap).write_volatile(head.lap);
        }
        store_fence();
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range was mapped in `new` and is unused, because every user of the address keeps `self` alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Tests whether a kernel sees an empty burst that the CPU has written to the first slot. Leaves slot and answer as
/// they were. The kernel ends even if it does not see the burst.
///
/// # Safety
/// As for [`slots`]; `mapping` maps the slots.
unsafe fn kernel_sees_writes(
    gpu: &Gpu,
    view: &PipelineView,
    mapping: &Mapped,
    answers: *mut u8,
    stream: &Stream,
) -> Result<bool, String> {
    let tally = Allocation::zeroed(&gpu.context, "a self-test", view.ring.count as usize * size_of::<u64>())?;
    let words: *mut u64 = tally.at();
    // The fill of the slots is asynchronous, so wait for it.
    gpu.context.settle().map_err(|error| error.to_string())?;
    mapping.write_head(SlotHead { lap: 1, count: 0 });
    let parameters = &mut [place(view), place(&0u64), place(&words)];
    let done = gpu.context.settle().and_then(|()| {
        // SAFETY: the context is current, and the parameters are the kernel's. It reads the slots, writes the first
        // answer, which is registered, and has ended when the wait returns.
        unsafe { gpu.kernels.burst.launch(stream, [1, 1], WARP, parameters) }?;
        stream.wait()
    });
    done.map_err(|error| error.to_string())?;
    mapping.write_head(SlotHead::default());
    // SAFETY: an answer starts with a head. The kernel has ended, and nothing else uses it.
    unsafe {
        let answer = answers.cast::<AnswerHead>();
        let seen = answer.read_volatile().lap == 1;
        answer.write_volatile(AnswerHead::default());
        Ok(seen)
    }
}
