//! Rate of one simulated device under full load with copies of one length.

use offcore_stats::named;

use anyhow::Result;
use offcore_dsa::WqMode;
use offcore_dsa::sim::Timing;

use super::load::{Bench, Load, Outcome, layout};

/// Copies per batch descriptor, equal to the guide's burst.
pub(crate) const BATCH: usize = 32;
/// Bytes of the virtio-net header, which is also copied.
const HEADER: usize = 12;
/// Bytes of a frame that are not copied.
const FCS: usize = 4;
named! {
    /// The bottleneck of a rate.
    #[derive(Default)]
    pub enum Bound {
        /// The cores are busy.
        #[default]
        Core = "core",
        /// The devices have reached their maximum bandwidth.
        DeviceBandwidth = "device bandwidth",
        /// The devices have reached their maximum descriptor rate.
        Descriptors = "descriptors/s",
        /// The ports have reached their maximum rate.
        PortRate = "port rate",
    }
}

/// Rate of one device with copies of one length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRate {
    /// Million copies per second.
    pub mcopies: f64,
    /// The bottleneck.
    pub bound: Bound,
}

impl DeviceRate {
    /// Simulates the copies of a guest's frames: see [`DeviceRate::of_copies`].
    ///
    /// # Errors
    /// As [`DeviceRate::of_copies`].
    pub fn of(frame: usize, device: (usize, usize, usize), batch: usize) -> Result<Self> {
        Self::of_copies((frame - FCS + HEADER) as u32, device, batch)
    }

    /// Simulates copies of `bytes` bytes on `groups` groups of `engines` DSA engines and `queues` queues. All queues
    /// are kept full with batches of `batch` copies; 1 selects one descriptor per copy.
    ///
    /// # Errors
    /// If the simulated device fails.
    pub fn of_copies(
        bytes: u32,
        (groups, queues, engines): (usize, usize, usize),
        batch: usize,
    ) -> Result<Self> {
        let timing = Timing::PUBLISHED;
        let wqs = groups * queues;
        let loads: Vec<_> = (0..wqs).map(|wq| Load { batch, ..Load::new(wq, bytes, 4 * BATCH) }).collect();
        let size = 128 / wqs as u32;
        let layout = layout(groups, queues, engines, size, WqMode::Dedicated);
        let outcomes = Bench::new(layout, timing, &loads)?.run(4096)?;
        let mcopies = outcomes.iter().map(Outcome::rate).sum::<f64>() * 1e3;
        let full = mcopies / 1e3 * f64::from(bytes) > 0.9 * timing.device_bandwidth;
        Ok(Self { mcopies, bound: if full { Bound::DeviceBandwidth } else { Bound::Descriptors } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_copies_are_bound_by_descriptors() {
        let short = DeviceRate::of(64, (1, 2, 4), BATCH).unwrap();
        let long = DeviceRate::of(1518, (1, 2, 4), BATCH).unwrap();
        assert_eq!((short.bound, long.bound), (Bound::Descriptors, Bound::DeviceBandwidth));
        assert!(short.mcopies > long.mcopies);
        let direct = DeviceRate::of(64, (1, 1, 4), 1).unwrap();
        let batches = DeviceRate::of(64, (1, 1, 4), BATCH).unwrap();
        assert_ne!(direct.mcopies, batches.mcopies, "a descriptor a copy is another load than a batch");
    }
}
