//! What one simulated device does with copies of one length, kept full.

use offcore_stats::named;

use anyhow::Result;
use offcore_dsa::WqMode;
use offcore_dsa::sim::Timing;

use super::load::{Bench, Load, Outcome, layout};

/// Copies in a batch descriptor, and the guide's burst.
pub(crate) const BATCH: usize = 32;
/// Bytes of the virtio-net header, which is copied along.
const HEADER: usize = 12;
/// Bytes of a frame that nobody copies.
const FCS: usize = 4;
named! {
    /// What keeps a rate from being higher.
    #[derive(Default)]
    pub enum Bound {
        /// The cores are busy.
        #[default]
        Core = "core",
        /// The devices move all the bytes that they can.
        DeviceBandwidth = "device bandwidth",
        /// The devices take all the descriptors that they can.
        Descriptors = "descriptors/s",
        /// The ports carry all that they can.
        PortRate = "port rate",
    }
}

/// What one device does with copies of one length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRate {
    /// Million copies a second.
    pub mcopies: f64,
    /// By what that is limited.
    pub bound: Bound,
}

impl DeviceRate {
    /// What the simulator says about the copies of a guest's frames: see [`DeviceRate::of_copies`].
    ///
    /// # Errors
    /// As there.
    pub fn of(frame: usize, device: (usize, usize, usize), batch: usize) -> Result<Self> {
        Self::of_copies((frame - FCS + HEADER) as u32, device, batch)
    }

    /// Asks the simulator about copies of `bytes` bytes: `groups` groups of `engines` DSA engines and `queues` queues, all
    /// kept full with batches of `batch` copies; 1 for a descriptor a copy.
    ///
    /// # Errors
    /// When the simulated device does not do what is asked of it.
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
    fn short_copies_fill_the_front() {
        let short = DeviceRate::of(64, (1, 2, 4), BATCH).unwrap();
        let long = DeviceRate::of(1518, (1, 2, 4), BATCH).unwrap();
        assert_eq!((short.bound, long.bound), (Bound::Descriptors, Bound::DeviceBandwidth));
        assert!(short.mcopies > long.mcopies);
        let direct = DeviceRate::of(64, (1, 1, 4), 1).unwrap();
        let batches = DeviceRate::of(64, (1, 1, 4), BATCH).unwrap();
        assert_ne!(direct.mcopies, batches.mcopies, "a descriptor a copy is another load than a batch");
    }
}
