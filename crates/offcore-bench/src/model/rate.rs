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

/// Groups of a DSA device.
#[derive(Clone, Copy, Debug)]
pub struct DsaGroups {
    pub count: usize,
    /// Queues per group.
    pub queues: usize,
    /// DSA engines per group.
    pub engines: usize,
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
    pub fn of(frame: usize, groups: DsaGroups, batch: usize) -> Result<Self> {
        Self::of_copies((frame - FCS + HEADER) as u32, groups, batch)
    }

    /// Simulates copies of `bytes` bytes. All queues are kept full with batches of `batch` copies; 1 selects one
    /// descriptor per copy.
    ///
    /// # Errors
    /// If the simulated device fails.
    pub fn of_copies(bytes: u32, groups: DsaGroups, batch: usize) -> Result<Self> {
        let timing = Timing::PUBLISHED;
        let DsaGroups { count, queues, engines } = groups;
        let wqs = count * queues;
        let loads: Vec<_> = (0..wqs).map(|wq| Load { batch, ..Load::new(wq, bytes, 4 * BATCH) }).collect();
        let size = 128 / wqs as u32;
        let layout = layout(count, queues, engines, size, WqMode::Dedicated);
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
        let groups = |queues| DsaGroups { count: 1, queues, engines: 4 };
        let short = DeviceRate::of(64, groups(2), BATCH).unwrap();
        let long = DeviceRate::of(1518, groups(2), BATCH).unwrap();
        assert_eq!((short.bound, long.bound), (Bound::Descriptors, Bound::DeviceBandwidth));
        assert!(short.mcopies > long.mcopies);
        let direct = DeviceRate::of(64, groups(1), 1).unwrap();
        let batches = DeviceRate::of(64, groups(1), BATCH).unwrap();
        assert_ne!(direct.mcopies, batches.mcopies, "a descriptor a copy is another load than a batch");
    }
}
