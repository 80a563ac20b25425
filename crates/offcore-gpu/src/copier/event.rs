//! Events: a place in a stream that has been reached or not.

use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use crate::cuda::driver::{Context, CudaError, Stream, call};

/// An event. It says nothing of time.
pub(super) struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's functions may be called by any thread, and take care of each other.
unsafe impl Send for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:p})", self.raw)
    }
}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; `raw` is a place for an event.
        unsafe { call!(cuEventCreate(&mut raw, flags)) }?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// It is reached when the stream has done what it has been given so far. The context is current.
    #[inline]
    pub(super) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: event and stream are there, and of one context.
        unsafe { call!(cuEventRecord(self.raw, stream.raw())) }
    }

    /// Whether it has been reached. The context is current.
    ///
    /// # Errors
    /// The context is lost: nothing runs in it any more, and nothing ever will.
    #[inline]
    pub(super) fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is there.
        match unsafe { call!(cuEventQuery(self.raw)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current, and the event used no more.
            let _ = unsafe { call!(cuEventDestroy_v2(self.raw)) };
        }
    }
}
