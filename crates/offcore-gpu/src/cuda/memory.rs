//! Memory that a CUDA device sees: the host's, registered, and its own.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use crate::cuda::driver::{Context, CudaError, call};

/// Bytes that are registered by one call at most: a driver's bookkeeping for a call has a limit of its own.
const PIECE: usize = 64 << 30;

/// Memory of the device.
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
    /// `len` bytes, whatever is in them; at least 1.
    ///
    /// # Errors
    /// In words: for `what`, how much there is instead.
    pub(crate) fn new(context: &Arc<Context>, what: &str, len: usize) -> Result<Self, String> {
        let mut at = 0;
        let done = context.enter().and_then(|()| {
            // SAFETY: the context is current; `at` is a place for an address.
            unsafe { call!(cuMemAlloc_v2(&mut at, len.max(1))) }
        });
        match done {
            Ok(()) => Ok(Self { at, len, context: Arc::clone(context) }),
            Err(error) if error.is(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                let (free, total) = context.memory().unwrap_or_default();
                let (wanted, free, total) = (size(len), size(free), size(total));
                Err(format!(
                    "{what} takes {wanted} of its memory, of which {free} are free of {total}: {error}: end what else \
                     uses the GPU (nvidia-smi), or make it smaller"
                ))
            }
            Err(error) => Err(format!("{} of its memory for {what}: {error}", size(len))),
        }
    }

    /// Zeroes.
    pub(crate) fn zeroed(context: &Arc<Context>, what: &str, len: usize) -> Result<Self, String> {
        let made = Self::new(context, what, len)?;
        // SAFETY: `new` has made the context current; the memory is there.
        let done = unsafe { call!(cuMemsetD8_v2(made.at, 0, len)) };
        done.map(|()| made).map_err(|error| format!("{what}: {error}"))
    }

    /// A copy of `values`.
    ///
    /// # Safety
    /// There are `count` values to be read, which are plain numbers.
    pub(crate) unsafe fn copy<T: Copy>(
        context: &Arc<Context>,
        what: &str,
        values: *const T,
        count: usize,
    ) -> Result<Self, String> {
        let len = count * size_of::<T>();
        let made = Self::new(context, what, len)?;
        // SAFETY: `new` has made the context current; the memory is there, and the caller promises the values.
        let done = unsafe { call!(cuMemcpyHtoD_v2(made.at, values.cast(), len)) };
        done.map(|()| made).map_err(|error| format!("copying {what} to it: {error}"))
    }

    /// Where it is, at the device.
    pub(crate) fn at<T>(&self) -> *mut T {
        std::ptr::without_provenance_mut(self.at as usize)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current; nobody uses memory that is dropped.
            let _ = unsafe { call!(cuMemFree_v2(self.at)) };
        }
    }
}

/// What is registered in this process, for all of its devices.
static REGISTERED: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Entry {
    base: usize,
    len: usize,
    /// [`Registration`]s of it.
    shares: usize,
    context: Arc<Context>,
}

fn registered() -> MutexGuard<'static, Vec<Entry>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range of the host's memory that devices see. A range is registered once in a process, for all devices and
/// services, since the driver refuses a second time; it is unregistered when the last share in it is dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    /// Of the whole range, which this is a share in.
    base: usize,
    /// At the device, of what was asked for.
    at: *mut u8,
}

// SAFETY: an address at a device, which means nothing to a thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Has `len` bytes from `base` on seen by the device of `context`.
    ///
    /// # Errors
    /// In words, for `what`.
    ///
    /// # Safety
    /// The memory stays where it is as long as this does.
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
                // SAFETY: the caller's promise.
                unsafe { register(context, base, len) }.map_err(|error| refused(what, len, error))?;
                entries.push(Entry { base: from, len, shares: 0, context: Arc::clone(context) });
                entries.len() - 1
            }
        };
        let entry = &mut entries[index];
        entry.shares += 1;
        let (base, len_of_all) = (entry.base, entry.len);
        drop(entries);
        // Gives the share back if there is an error.
        let mut share = Self { base, at: std::ptr::null_mut() };
        let whole = std::ptr::without_provenance_mut::<u8>(base);
        let at =
            address(context, whole, len_of_all).map_err(|error| format!("{what} at the device: {error}"))?;
        share.at = at.wrapping_add(from - base);
        Ok(share)
    }

    /// Where the device sees it.
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
            // Others wait for it: the range may be registered again only when this is over.
            let Entry { base, len, context, .. } = entries.swap_remove(index);
            unregister(&context, base, len);
        }
    }
}

/// The pieces of a range: where each begins, and its bytes.
fn pieces(len: usize, piece: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(piece).map(move |from| (from, piece.min(len - from)))
}

/// # Safety
/// As for [`Registration::new`].
unsafe fn register(context: &Arc<Context>, base: *mut u8, len: usize) -> Result<(), CudaError> {
    context.enter()?;
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    for (from, bytes) in pieces(len, PIECE) {
        // SAFETY: the context is current; a piece of the memory that the caller has promised.
        let done = unsafe { call!(cuMemHostRegister_v2(base.add(from).cast(), bytes, flags)) };
        if let Err(error) = done {
            unregister(context, base.addr(), from);
            return Err(error);
        }
    }
    Ok(())
}

/// Unregisters the pieces of a range that has been registered.
fn unregister(context: &Arc<Context>, base: usize, len: usize) {
    if context.enter().is_err() {
        return;
    }
    for (from, _) in pieces(len, PIECE) {
        let at = std::ptr::without_provenance_mut::<c_void>(base + from);
        // SAFETY: the context is current, and a piece begins here. A context that is lost refuses it, and takes the
        // registration along when it goes.
        let _ = unsafe { call!(cuMemHostUnregister(at)) };
    }
}

/// Where the device of `context` sees a range that is registered.
fn address(context: &Arc<Context>, base: *mut u8, len: usize) -> Result<*mut u8, String> {
    context.enter().map_err(|error| error.to_string())?;
    let mut first = None;
    for (from, _) in pieces(len, PIECE) {
        let mut at = 0;
        // SAFETY: the context is current, `at` is a place for an address. The driver knows what is registered.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&mut at, base.wrapping_add(from).cast(), 0)) }
            .map_err(|error| error.to_string())?;
        let first = *first.get_or_insert(at);
        if at - first != from as u64 {
            let piece = size(PIECE);
            return Err(format!(
                "it sees pieces of {piece} far from each other ({first:#x} and {at:#x}): take a pool of less than \
                 {piece}"
            ));
        }
    }
    Ok(std::ptr::without_provenance_mut(first.unwrap_or_default() as usize))
}

/// Why memory could not be registered, and what to do.
fn refused(what: &str, len: usize, error: CudaError) -> String {
    let len = size(len);
    if error.is(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
        return format!(
            "registering {what} ({len}): {error}: something else in this process has registered a part of it"
        );
    }
    format!(
        "registering {what} ({len}): {error}: the device reads packets in the host's memory whatever --memory says, so \
         it has to be lockable: raise the limit (ulimit -l) or the memory limit of the container or cgroup, or take a \
         smaller pool (--mbufs); `offcore gpu doctor` says what there is"
    )
}

/// Bytes as people write them: `512 B`, `32 MiB`, `139.8 GiB`.
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
    fn a_refused_registration_says_what_to_raise() {
        let error = CudaError::new("cuMemHostRegister_v2", CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let text = refused("the packet pool", 32 << 20, error);
        for word in ["the packet pool (32 MiB)", "cuMemHostRegister_v2", "ulimit -l", "cgroup", "--memory"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
