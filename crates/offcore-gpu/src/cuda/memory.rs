//! Memory that a CUDA device accesses: registered host memory, and its own.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use crate::cuda::driver::{Context, CudaError, call};

/// Maximum size of one registration call: the driver's bookkeeping per call is limited.
const PIECE: usize = 64 << 30;

/// An allocation of device memory.
pub(crate) struct Allocation {
    at: sys::CUdeviceptr,
    len: usize,
    context: Arc<Context>,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({:#x}+{:#x})", self.at, self.len)
    }
}

impl Allocation {
    /// Allocates `len` bytes, at least 1, uninitialised.
    pub(crate) fn new(context: &Arc<Context>, what: &str, len: usize) -> Result<Self, String> {
        let mut at = 0;
        let done = context.enter().and_then(|()| {
            // SAFETY: the context is current; `at` is valid for writes.
            unsafe { call!(cuMemAlloc_v2(&mut at, len.max(1))) }
        });
        match done {
            Ok(()) => Ok(Self { at, len, context: Arc::clone(context) }),
            Err(error) if error.is(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                let (free, total) = context.memory().unwrap_or_default();
                let (wanted, free, total) = (size(len), size(free), size(total));
                Err(format!(
                    "{what} takes {wanted} of its memory, of which {free} are free of {total}: {error}: end other processes on the GPU \
                     (nvidia-smi), or make it smaller"
                ))
            }
            Err(error) => Err(format!("{} of its memory for {what}: {error}", size(len))),
        }
    }

    /// Allocates zeroed memory.
    pub(crate) fn zeroed(context: &Arc<Context>, what: &str, len: usize) -> Result<Self, String> {
        let made = Self::new(context, what, len)?;
        // SAFETY: `new` has made the context current; the memory is valid.
        let done = unsafe { call!(cuMemsetD8_v2(made.at, 0, len)) };
        done.map(|()| made).map_err(|error| format!("{what}: {error}"))
    }

    /// Allocates a copy of `values`.
    ///
    /// # Safety
    /// `values` is valid for reads of `count` plain numbers.
    pub(crate) unsafe fn copy<T: Copy>(
        context: &Arc<Context>,
        what: &str,
        values: *const T,
        count: usize,
    ) -> Result<Self, String> {
        let len = count * size_of::<T>();
        let made = Self::new(context, what, len)?;
        // SAFETY: `new` has made the context current, the memory is valid, and `values` is valid for reads of `count`
        // numbers, as the caller guarantees.
        let done = unsafe { call!(cuMemcpyHtoD_v2(made.at, values.cast(), len)) };
        done.map(|()| made).map_err(|error| format!("copying {what} to it: {error}"))
    }

    /// Returns the device address.
    pub(crate) fn at<T>(&self) -> *mut T {
        std::ptr::without_provenance_mut(self.at as usize)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current; dropped memory is not in use.
            let _ = unsafe { call!(cuMemFree_v2(self.at)) };
        }
    }
}

/// The registered ranges of this process, for all devices.
static REGISTERED: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Entry {
    base: usize,
    len: usize,
    /// Number of [`Registration`]s of it.
    shares: usize,
    context: Arc<Context>,
}

fn registered() -> MutexGuard<'static, Vec<Entry>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A share of a registered range of host memory. A range is registered once per process, for all devices and services,
/// because the driver refuses a second registration. It is unregistered with the last share.
#[derive(Debug)]
pub(crate) struct Registration {
    /// Base of the whole range.
    base: usize,
    /// Device address of the requested part.
    at: *mut u8,
}

// SAFETY: a device address is not bound to a thread.
unsafe impl Send for Registration {}
// SAFETY: a device address is not bound to a thread.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `len` bytes at `base` for the device of `context`.
    ///
    /// # Safety
    /// The memory must stay mapped as long as the registration exists.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        what: &str,
        base: *mut u8,
        len: usize,
    ) -> Result<Self, String> {
        let (from, to) = (base.addr(), base.addr() + len);
        let mut entries = registered();
        let known = entries.iter().position(|entry| entry.base <= from && to <= entry.base + entry.len);
        let index = match known {
            Some(index) => index,
            None => {
                // SAFETY: the memory stays mapped as long as the registration exists, as the caller guarantees.
                unsafe { register(context, base, len) }.map_err(|error| refused(what, len, error))?;
                entries.push(Entry { base: from, len, shares: 0, context: Arc::clone(context) });
                entries.len() - 1
            }
        };
        let entry = &mut entries[index];
        entry.shares += 1;
        let (base, len_of_all) = (entry.base, entry.len);
        drop(entries);
        // Releases the share on error.
        let mut share = Self { base, at: std::ptr::null_mut() };
        let whole = std::ptr::without_provenance_mut::<u8>(base);
        let at =
            address(context, whole, len_of_all).map_err(|error| format!("{what} at the device: {error}"))?;
        share.at = at.wrapping_add(from - base);
        Ok(share)
    }

    /// Returns the device address.
    pub(crate) fn at(&self) -> *mut u8 {
        self.at
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut entries = registered();
        let Some(index) = entries.iter().position(|entry| entry.base == self.base) else { return };
        entries[index].shares -= 1;
        if entries[index].shares == 0 {
            // Under the lock: the range can be registered again only after this.
            let Entry { base, len, context, .. } = entries.swap_remove(index);
            unregister(&context, base, len);
        }
    }
}

/// Returns the offset and length of each piece of a range.
fn pieces(len: usize, piece: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(piece).map(move |from| (from, piece.min(len - from)))
}

/// # Safety
/// As for [`Registration::new`].
unsafe fn register(context: &Arc<Context>, base: *mut u8, len: usize) -> Result<(), CudaError> {
    context.enter()?;
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    for (from, bytes) in pieces(len, PIECE) {
        // SAFETY: the context is current, and the piece is part of the caller's mapped memory.
        let done = unsafe { call!(cuMemHostRegister_v2(base.add(from).cast(), bytes, flags)) };
        if let Err(error) = done {
            unregister(context, base.addr(), from);
            return Err(error);
        }
    }
    Ok(())
}

/// Unregisters a range piece by piece.
fn unregister(context: &Arc<Context>, base: usize, len: usize) {
    if context.enter().is_err() {
        return;
    }
    for (from, _) in pieces(len, PIECE) {
        let at = std::ptr::without_provenance_mut::<c_void>(base + from);
        // SAFETY: the context is current, and a piece starts here. A lost context refuses the call, and drops the
        // registration when it is destroyed.
        let _ = unsafe { call!(cuMemHostUnregister(at)) };
    }
}

/// Returns the device address of a registered range.
fn address(context: &Arc<Context>, base: *mut u8, len: usize) -> Result<*mut u8, String> {
    context.enter().map_err(|error| error.to_string())?;
    let mut first = None;
    for (from, _) in pieces(len, PIECE) {
        let mut at = 0;
        // SAFETY: the context is current; `at` is valid for writes. The driver checks that the range is registered.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&mut at, base.wrapping_add(from).cast(), 0)) }
            .map_err(|error| error.to_string())?;
        let first = *first.get_or_insert(at);
        if at - first != from as u64 {
            let piece = size(PIECE);
            return Err(format!(
                "it does not map pieces of {piece} contiguously ({first:#x} and {at:#x}): use a pool of less than \
                 {piece}"
            ));
        }
    }
    Ok(std::ptr::without_provenance_mut(first.unwrap_or_default() as usize))
}

/// Returns the error text of a failed registration, with advice.
fn refused(what: &str, len: usize, error: CudaError) -> String {
    let len = size(len);
    if error.is(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
        return format!(
            "registering {what} ({len}): {error}: something else in this process has registered a part of it"
        );
    }
    format!(
        "registering {what} ({len}): {error}: the device reads packets in host memory whatever memory is chosen, so the \
         pool must be lockable: raise the limit (ulimit -l) or the memory limit of the container or cgroup, or use a \
         smaller pool; see `offcore gpu doctor`"
    )
}

/// Formats a size: `512 B`, `32 MiB`, `139.8 GiB`.
pub(crate) fn size(bytes: usize) -> String {
    let mut unit = 0;
    while unit < 4 && bytes >> (10 * (unit + 1)) > 0 {
        unit += 1;
    }
    let name = ["B", "KiB", "MiB", "GiB", "TiB"][unit];
    let whole = bytes >> (10 * unit);
    if whole << (10 * unit) == bytes {
        return format!("{whole} {name}");
    }
    format!("{:.1} {name}", bytes as f64 / (1u64 << (10 * unit)) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        let texts = [0, 512, 1024, 1536, 32 << 20, 150_108_848_128, 1 << 50].map(size);
        assert_eq!(texts, ["0 B", "512 B", "1 KiB", "1.5 KiB", "32 MiB", "139.8 GiB", "1024 TiB"]);
    }

    #[test]
    fn pieces_cover_a_range_without_overlap() {
        assert_eq!(pieces(10, 4).collect::<Vec<_>>(), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(pieces(8, 4).collect::<Vec<_>>(), [(0, 4), (4, 4)]);
        assert_eq!(pieces(0, 4).count(), 0);
    }

    #[test]
    fn refused_registration_names_the_limits() {
        let error = CudaError::new("cuMemHostRegister_v2", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let text = refused("the packet pool", 32 << 20, error);
        for word in
            ["the packet pool (32 MiB)", "cuMemHostRegister_v2", "ulimit -l", "cgroup", "smaller pool"]
        {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
