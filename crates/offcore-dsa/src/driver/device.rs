//! The copy engine `dsa:wqX.Y`, or `dsa-simN:wqX.Y`: an [`offcore_dma::CopyDevice`] over a work queue.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offcore_dma::channel::{Channel, CopyDevice, EngineError};

use super::Roots;
use super::channel::DsaChannel;
use super::discover::WqError;
use super::open::{Options, open};
use super::way::{Share, Source, Way};
use crate::portal::{Portal, SubmitBy};
use crate::sim::SimDevice;
use crate::wq::{WqInfo, WqMode};

/// Maximum number of channels of a shared work queue.
const MAX_SHARED: usize = 64;

/// A work queue as a copy engine. A dedicated queue provides one channel, a shared queue many. The device arbitrates
/// between the workers of a shared queue, without a lock.
pub struct DsaDevice {
    way: Arc<Way>,
    channels: Arc<AtomicUsize>,
    max_channels: usize,
    /// The portal that the constructor opened as a check; the first channel uses it.
    first: Mutex<Option<Portal>>,
    submit_by: SubmitBy,
    warnings: Vec<String>,
}

impl fmt::Debug for DsaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DsaDevice")
            .field("way", &self.way)
            .field("submit_by", &self.submit_by)
            .finish_non_exhaustive()
    }
}

impl DsaDevice {
    /// Opens a work queue of this machine, such as `wq0.1`.
    ///
    /// # Errors
    /// [`WqError`] states why the queue cannot be used, and gives advice.
    pub fn open(roots: &Roots, wq: &str, options: Options) -> Result<Self, WqError> {
        let opened = open(roots, wq, &options)?;
        let way = Way {
            name: format!("dsa:{wq}"),
            info: opened.info,
            options,
            source: Source::Kernel(roots.clone()),
        };
        Ok(Self::new(way, opened.portal, opened.warnings))
    }

    /// Opens a work queue of a simulated device.
    ///
    /// # Errors
    /// [`WqError::Simulator`].
    pub fn simulated(device: &SimDevice, wq: &str, options: Options) -> Result<Self, WqError> {
        let portal = device.open(wq).map_err(WqError::Simulator)?.into();
        let info = device.work_queues().into_iter().find(|info| info.name == wq);
        let info =
            info.ok_or_else(|| WqError::NotThere { wq: wq.into(), there: "no work queue is".into() })?;
        let name = format!("{}:{wq}", device.name());
        let way = Way { name, info, options, source: Source::Simulator(device.clone()) };
        Ok(Self::new(way, portal, Vec::new()))
    }

    fn new(way: Way, portal: Portal, warnings: Vec<String>) -> Self {
        let max_channels = match way.info.mode {
            WqMode::Dedicated => 1,
            WqMode::Shared => MAX_SHARED.min(way.info.threshold as usize).max(1),
        };
        Self {
            way: Arc::new(way),
            channels: Arc::default(),
            max_channels,
            submit_by: portal.kind(),
            first: Mutex::new(Some(portal)),
            warnings,
        }
    }

    /// Returns the properties of the work queue.
    pub fn info(&self) -> &WqInfo {
        &self.way.info
    }

    /// Returns the submission method, which was chosen when the queue was opened.
    pub fn submit_by(&self) -> SubmitBy {
        self.submit_by
    }

    /// Returns problems that do not prevent the use, in words, for example a queue on another NUMA node.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Opens a channel, as [`CopyDevice::open_channel`], but returns the concrete type.
    ///
    /// # Errors
    /// As [`CopyDevice::open_channel`].
    pub fn open_dsa_channel(&self, ring_size: usize) -> Result<DsaChannel, EngineError> {
        let share = self.share()?;
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let portal = match first {
            // The portal may have been open for a long time.
            Some(portal) if portal.is_alive() => portal,
            stale => {
                drop(stale);
                let failed =
                    |e: WqError| EngineError::Thread { device: self.way.name.clone(), reason: e.to_string() };
                self.way.open_again().map_err(failed)?
            }
        };
        DsaChannel::open(Arc::clone(&self.way), share, portal, ring_size)
    }

    fn share(&self) -> Result<Share, EngineError> {
        let info = &self.way.info;
        if self.channels.fetch_add(1, Ordering::Relaxed) >= self.max_channels {
            self.channels.fetch_sub(1, Ordering::Relaxed);
            return Err(EngineError::NoChannel { device: self.way.name.clone(), max: self.max_channels });
        }
        let places = match info.mode {
            WqMode::Dedicated => info.size,
            WqMode::Shared => info.threshold.min(info.size),
        };
        // One entry is reserved for a drain, because a full dedicated queue would drop it.
        Ok(Share { channels: Arc::clone(&self.channels), places: (places as usize).saturating_sub(1).max(1) })
    }
}

impl CopyDevice for DsaDevice {
    fn name(&self) -> &str {
        &self.way.name
    }

    fn max_channels(&self) -> usize {
        self.max_channels
    }

    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError> {
        Ok(Box::new(self.open_dsa_channel(ring_size)?))
    }
}
