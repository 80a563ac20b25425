//! Slots of a ring in the device's own memory, which the CPU writes through a mapping: a kernel that waits for a burst
//! then polls memory of its own, and finds descriptors there, without a read over the bus.
//!
//! Memory of the device can be exported as a dma-buf, and newer drivers let the CPU map that. Whether one does, and
//! whether a kernel sees what the CPU has written there, is tried out. Where it does not, bursts are in the ring's
//! memory.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys;

use crate::cuda::driver::{CudaError, Stream, call};
use crate::cuda::gpu::{Gpu, WARP, place};
use crate::cuda::memory::Allocation;
use crate::device::DeviceSlots;
use crate::layout::{AnswerHead, PipelineView, SlotHead};
use crate::ring::store_fence;

/// Allocations of so many bytes begin on pages of their own.
const PAGE: usize = 2 << 20;
/// The CUDA version from which on a driver knows that a mapping is to be by way of PCIe.
const BY_PCIE: u32 = 12_080;

/// Slots at the device, and where the CPU writes them. `view` is as the device sees it, with the answers at `answers`
/// for the CPU. Nothing has been launched on the stream yet.
///
/// # Errors
/// Why there are none, in words.
///
/// # Safety
/// The ring is as `view` says, and nobody else uses its first answer meanwhile.
pub(super) unsafe fn slots(
    gpu: &Gpu,
    view: &PipelineView,
    answers: *mut u8,
    stream: &Stream,
) -> Result<(Allocation, DeviceSlots), String> {
    if gpu.facts.dma_buf != Some(true) {
        return Err("the driver exports no GPU memory".into());
    }
    let len = (view.ring.count as usize * view.ring.slot_stride as usize).next_multiple_of(PAGE);
    let memory = Allocation::zeroed(&gpu.context, "slots of a ring", len)?;
    let mapping = Mapped::new(&exported(gpu, &memory, len)?, len)?;
    let mut view = *view;
    view.ring.slots = memory.at();
    // SAFETY: `mapping` is of the slots' memory; the rest is the caller's promise.
    let seen = unsafe { is_seen(gpu, &view, &mapping, answers, stream) }?;
    if !seen {
        return Err("kernels do not see what the CPU writes to GPU memory".into());
    }
    Ok((memory, DeviceSlots { base: mapping.base, keep: Box::new(mapping) }))
}

/// Memory of the device as a file.
fn exported(gpu: &Gpu, memory: &Allocation, len: usize) -> Result<OwnedFd, String> {
    let at = memory.at::<u8>().addr();
    // SAFETY: only asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE);
    if !at.is_multiple_of(page) {
        return Err(format!("GPU memory at {at:#x} does not begin with a page"));
    }
    let export = |flags| {
        let mut file: i32 = -1;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: `Allocation` has made the context current; the range is an allocation, whole pages of it, and
        // `file` is a place for the number of a file.
        unsafe {
            call!(cuMemGetHandleForAddressRange((&raw mut file).cast(), at as u64, len, kind, flags))?;
            // SAFETY: opened by the call, for whoever made it.
            Ok(OwnedFd::from_raw_fd(file))
        }
    };
    let by_pcie = sys::CUmemRangeFlags::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64;
    let done = if gpu.version < BY_PCIE { export(0) } else { export(by_pcie).or_else(|_| export(0)) };
    done.map_err(|error: CudaError| error.to_string())
}

/// Memory of the device, mapped.
#[derive(Debug)]
struct Mapped {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(file: &OwnedFd, len: usize) -> Result<Self, String> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let at = unsafe { libc::mmap(null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match NonNull::new(at) {
            Some(base) if at != libc::MAP_FAILED => Ok(Self { base: base.cast(), len }),
            _ => Err(format!("the driver lets nobody map GPU memory: {}", std::io::Error::last_os_error())),
        }
    }

    /// Writes the head of the first slot, as [`crate::ring`] does.
    fn write_head(&self, head: SlotHead) {
        // SAFETY: the mapping is larger than a head and aligned to a page; nobody else has it yet.
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
        // SAFETY: mapped in `new`, and used by nobody any more: who was given the address has kept `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Whether a kernel answers a burst without packets that the CPU has written to the first slot. Leaves slot and
/// answer as they were. A kernel that does not see the burst ends, too.
///
/// # Safety
/// As for [`slots`], and `mapping` is of the slots.
unsafe fn is_seen(
    gpu: &Gpu,
    view: &PipelineView,
    mapping: &Mapped,
    answers: *mut u8,
    stream: &Stream,
) -> Result<bool, String> {
    let tally = Allocation::zeroed(&gpu.context, "a try", view.ring.count as usize * 2 * size_of::<u32>())?;
    let words: *mut u32 = tally.at();
    // The slots have been set to 0 by then: that is not waited for otherwise.
    gpu.context.settle().map_err(|error| error.to_string())?;
    mapping.write_head(SlotHead { lap: 1, count: 0 });
    let parameters = &mut [place(view), place(&0u64), place(&words)];
    let done = gpu.context.settle().and_then(|()| {
        // SAFETY: the context is current; the kernel's parameters. It reads the slots' memory, writes the first
        // answer, which is registered, and is waited for.
        unsafe { gpu.kernels.burst.launch(stream, ([1, 1], WARP), parameters) }?;
        stream.wait()
    });
    done.map_err(|error| error.to_string())?;
    mapping.write_head(SlotHead::default());
    // SAFETY: a head is at the beginning of an answer; the kernel has ended, and nobody else uses it.
    unsafe {
        let answer = answers.cast::<AnswerHead>();
        let seen = answer.read_volatile().lap == 1;
        answer.write_volatile(AnswerHead::default());
        Ok(seen)
    }
}
