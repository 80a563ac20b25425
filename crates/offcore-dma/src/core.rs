//! A core as a copy engine: `core:N`, a helper thread on lcore N, or a loop body for whoever owns the core.
//!
//! ```text
//! channel  --- ring of descriptors, published by submit --->  engine
//! (a worker) <--- the ring's released cursor = copies done ---  (one thread)
//! ```
//! A descriptor is a [`Copy`], so that the engine copies straight from the ring's slots. Copies are made in the order
//! in which they were submitted, so the cursor with which the engine gives slots back is the completion record of all
//! of them: one cache line. Tokens stay with the submitter.
//!
//! A channel that is dropped is taken away from the engine first, so that none of its operations is made later.

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

use crate::channel::{Channel, Device, EngineError};
use engine::Shared;

/// Channels that one engine serves at most: it looks at each in turn.
pub const MAX_CHANNELS: usize = 64;
/// The largest ring.
pub const MAX_RING: usize = 1 << 15;

/// How long a helper thread that naps spins in vain first, and how long it naps.
const TIMEOUT: Duration = Duration::from_millis(10);
const NAP: Duration = Duration::from_micros(250);

/// The device: gives out channels to one copying core.
#[derive(Debug)]
pub struct CoreDevice {
    engine: Engine,
}

impl CoreDevice {
    /// Starts a helper thread that copies on lcore `lcore` and spins there until this device and all its channels have
    /// been dropped.
    ///
    /// # Errors
    /// [`EngineError::Thread`] when the thread cannot be started or pinned.
    pub fn start(lcore: usize) -> Result<Self, EngineError> {
        Self::start_with(lcore, false)
    }

    /// As [`CoreDevice::start`]; with `naps` the thread does not spin on when nothing has come for 10 ms, but looks
    /// every quarter of a millisecond. What comes first after such a pause waits as long.
    ///
    /// # Errors
    /// As for [`CoreDevice::start`].
    pub fn start_with(lcore: usize, naps: bool) -> Result<Self, EngineError> {
        let name = format!("core:{lcore}");
        let refused = |reason: String| EngineError::Thread { device: format!("core:{lcore}"), reason };
        let shared = Arc::new(Shared::new(name.clone()));
        let stop = Arc::new(AtomicBool::new(false));
        let (report, pinned) = mpsc::sync_channel(1);
        let (mut stepper, stopped) = (Stepper::new(Arc::clone(&shared)), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                let outcome = lcore::pin(lcore).map_err(|e| e.to_string());
                let failed = outcome.is_err();
                // The receiver waits for this message, so it is there.
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

    /// A device without a thread: copies are made by whoever calls [`Stepper::step`]. Once the stepper is dropped,
    /// nothing is copied any more.
    pub fn stepped() -> (Self, Stepper) {
        let shared = Arc::new(Shared::new("core:stepped".into()));
        let stepper = Stepper::new(Arc::clone(&shared));
        (Self { engine: Engine { shared, _helper: None } }, stepper)
    }
}

impl Device for CoreDevice {
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

/// What keeps an engine running, held by the device and by each of its channels.
#[derive(Clone, Debug)]
struct Engine {
    shared: Arc<Shared>,
    /// Only held, so that the thread outlives every channel.
    _helper: Option<Arc<Helper>>,
}

/// The helper thread; stopped and joined when the last one who needs it is gone.
#[derive(Debug)]
struct Helper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the loop has been printed; there is nothing left to do about it.
            let _ = thread.join();
        }
    }
}
