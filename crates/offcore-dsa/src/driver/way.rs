//! The information for reopening a work queue, and the shares that its channels have of the queue's entries.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Roots;
use super::discover::WqError;
use super::open::{Options, open};
use crate::portal::Portal;
use crate::sim::SimDevice;
use crate::wq::WqInfo;

/// A work queue's properties and the method for opening it.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) name: String,
    pub(super) info: WqInfo,
    pub(super) options: Options,
    pub(super) source: Source,
}

#[derive(Debug)]
pub(super) enum Source {
    Kernel(Roots),
    Simulator(SimDevice),
}

impl Way {
    pub(super) fn open_again(&self) -> Result<Portal, WqError> {
        match &self.source {
            Source::Kernel(roots) => {
                let opened = open(roots, &self.info.name, &self.options)?;
                if opened.info != self.info {
                    // The shares and limits of the channels depend on the earlier properties.
                    return Err(WqError::Attribute {
                        path: roots.sysfs.join(&self.info.name).display().to_string(),
                        found: "other properties than when it was first opened".into(),
                        expected: "the same ones: configure it back, or start again",
                    });
                }
                Ok(opened.portal)
            }
            Source::Simulator(device) => Ok(device.open(&self.info.name).map_err(WqError::Simulator)?.into()),
        }
    }
}

/// A channel's share of a work queue's entries.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) channels: Arc<AtomicUsize>,
    pub(super) places: usize,
}

impl Share {
    /// Returns the number of entries that the channel may use at present: all usable entries divided by the open
    /// channels.
    #[inline(always)]
    pub(super) fn places(&self) -> usize {
        match self.channels.load(Ordering::Relaxed) {
            0 | 1 => self.places,
            n => (self.places / n).max(1),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.channels.fetch_sub(1, Ordering::Relaxed);
    }
}
