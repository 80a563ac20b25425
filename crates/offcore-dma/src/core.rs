//! A core as a copy engine: `core:N` is a helper thread on lcore N. Without a thread, the owner of the core calls the
//! loop body.
//!
//! ```text
//! channel  --- ring of descriptors, published by submit --->  engine
//! (a worker) <--- the ring's released cursor = copies done ---  (one thread)
//! ```
//! A descriptor is a [`Copy`], so the engine copies directly from the ring's slots. Copies are made in the order of
//! submission, so the cursor with which the engine releases slots is the completion record of all of them, in a single
//! cache line. Tokens stay with the submitter.
//!
//! A dropped channel is withdrawn from the engine first, so that none of its operations is made later.

mod channel;
mod engine;
#[cfg(test)]
mod tests;

pub use channel::CoreChannel;
pub use engine::Stepper;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use offcore_stats::{lcore, tsc};

use crate::channel::{Channel, CopyDevice, EngineError};
use engine::HelperShared;

/// Maximum number of channels of an engine, which polls each in turn.
pub const MAX_CHANNELS: usize = 64;
/// The largest ring size.
pub const MAX_RING: usize = 1 << 15;

/// For helper threads that nap: time of spinning without work before the first nap, and duration of a nap.
const TIMEOUT: Duration = Duration::from_millis(10);
const NAP: Duration = Duration::from_micros(250);

/// The device: provides channels to one copying core.
#[derive(Debug)]
pub struct CoreDevice {
    engine: Engine,
}

impl CoreDevice {
    /// Starts a helper thread that copies on lcore `lcore` and spins there until this device and all its channels have
    /// been dropped.
    ///
    /// # Errors
    /// [`EngineError::Thread`] if the thread cannot be started or pinned.
    pub fn start(lcore: usize) -> Result<Self, EngineError> {
        Self::start_with(lcore, false)
    }

    /// As [`CoreDevice::start`]. With `naps`, the thread stops spinning after 10 ms without work and then polls every
    /// quarter of a millisecond. The first copy after such a pause is delayed by up to that time.
    ///
    /// # Errors
    /// As for [`CoreDevice::start`].
    pub fn start_with(lcore: usize, naps: bool) -> Result<Self, EngineError> {
        let name = format!("core:{lcore}");
        let refused = |reason: String| EngineError::Thread { device: format!("core:{lcore}"), reason };
        let shared = Arc::new(HelperShared::new(name.clone()));
        let stop = Arc::new(AtomicBool::new(false));
        let (report, pinned) = mpsc::sync_channel(1);
        let (mut stepper, stopped) = (Stepper::new(Arc::clone(&shared)), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                let outcome = lcore::pin(lcore).map_err(|e| e.to_string());
                let failed = outcome.is_err();
                // Sending cannot fail, because the receiver waits for this message.
                let _ = report.send(outcome);
                let (timeout, mut busy) = (tsc::ticks(TIMEOUT), tsc::now());
                while !failed && !stopped.load(Ordering::Relaxed) {
                    if stepper.step() > 0 {
                        busy = if naps { tsc::now() } else { busy };
                    } else if naps && tsc::now().wrapping_sub(busy) > timeout {
                        std::thread::sleep(NAP);
                    } else {
                        std::hint::spin_loop();
                    }
                }
            })
            .map_err(|e| refused(e.to_string()))?;
        let helper = Helper { stop, thread: Some(thread) };
        match pinned.recv() {
            Ok(Ok(())) => Ok(Self { engine: Engine { shared, _helper: Some(Arc::new(helper)) } }),
            Ok(Err(reason)) => Err(refused(reason)),
            Err(mpsc::RecvError) => Err(refused("its thread ended before it was pinned".into())),
        }
    }

    /// Creates a device without a thread: [`Stepper::step`] makes the copies. After the stepper is dropped, no copies
    /// are made any more.
    pub fn stepped() -> (Self, Stepper) {
        let shared = Arc::new(HelperShared::new("core:stepped".into()));
        let stepper = Stepper::new(Arc::clone(&shared));
        (Self { engine: Engine { shared, _helper: None } }, stepper)
    }
}

impl CopyDevice for CoreDevice {
    fn name(&self) -> &str {
        &self.engine.shared.name
    }

    fn max_channels(&self) -> usize {
        MAX_CHANNELS
    }

    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError> {
        Ok(Box::new(CoreChannel::open(&self.engine, ring_size)?))
    }
}

/// Keeps an engine running; held by the device and by each of its channels.
#[derive(Clone, Debug)]
struct Engine {
    shared: Arc<HelperShared>,
    /// Never read. It keeps the thread alive until the last channel is dropped.
    _helper: Option<Arc<Helper>>,
}

/// The helper thread. Dropping the last reference stops and joins it.
#[derive(Debug)]
struct Helper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The panic of the loop has already been printed, so the result needs no handling.
            let _ = thread.join();
        }
    }
}
