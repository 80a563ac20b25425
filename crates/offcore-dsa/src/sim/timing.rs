//! How long the device takes: one set of parameters, fitted on published figures.
//!
//! A descriptor's way, and what each step takes:
//!
//! ```text
//! portal_ns      from the core's store to the work queue (ENQCMD's answer takes the same way back)
//!   | waits in the work queue until the group's arbiter gives it to a DSA engine with a free place (`in_progress`);
//!   | the queue's entry is free from then on
//! occupancy_ns   the DSA engine's front, one descriptor at a time
//! read_ns        translation, and the first bytes of the source: passes for many descriptors at once
//! bytes          the DSA engine's data path, one descriptor at a time, first come first served, at `engine_bandwidth`;
//!                all DSA engines that are moving data share `device_bandwidth` evenly
//! record_ns      last bytes and completion record written, and seen by the core: passes for many at once
//! ```
//! A batch descriptor is fetched first: `read_ns` for each [`Timing::LIST_CHUNK`] descriptors of its list; its members
//! then go the way of other descriptors without the portal, and its own record follows the last of theirs by
//! `record_ns`. A page fault that the device blocks on, or that software resolves, takes `page_fault_ns`.
//!
//! # Where the values come from
//!
//! Three figures fix the model (`offcore bench model` judges it on the others):
//!
//! * a move of one byte takes 1400 cycles (DarkStream, Xeon 8558). The cycles are those of the TSC, 2.1 GHz there: 75
//!   thousand cycles for 1 MiB, of the same source, are 29.4 GB/s with it, and 56 GB/s with the core's highest clock. So
//!   portal, front, read and record are 667 ns together.
//! * about 30 GB/s from one device (VPP guide), and from one DSA engine when it is alone.
//! * DTO's 1.19 µs for 8 to 12 KiB fixes DTO's own share, which is no parameter of the device.
//!
//! Only their sum is published for the four latencies. They are told apart by two other figures: four cores with ENQCMD,
//! one in flight each, fill a shared queue (dsa-perf-micros), so that the portal's round trip is about four times the
//! front's occupancy; and 29.3 million copies a second of 124 bytes go through two channels of one device (dpdk-dma
//! guide), so that the front takes 68 ns at most. Eight descriptors in progress are what keeps the
//! front busy; with more, the knee of a shared queue of 64 entries (DarkStream) would be further from 64.
//!
//! The time of a page fault is the middle of what DTO's documentation gives for a copy that meets one.

/// The device's parameters; nanoseconds, and bytes a nanosecond (GB/s).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// From the core's store to the work queue, one way.
    pub portal_ns: f64,
    /// What a descriptor, however short, takes of a DSA engine's front; the next one waits that long.
    pub occupancy_ns: f64,
    /// Address translation and the latency of reading memory: before the first byte moves, or for a batch's list.
    pub read_ns: f64,
    /// From the last byte moved to the completion record being seen.
    pub record_ns: f64,
    /// What one DSA engine moves when it is alone, in bytes a nanosecond.
    pub engine_bandwidth: f64,
    /// What the DSA engines of a device move together, in bytes a nanosecond.
    pub device_bandwidth: f64,
    /// Descriptors that a DSA engine has in progress at a time.
    pub in_progress: u32,
    /// Resolving a page fault: the request, the operating system's handler, and the answer.
    pub page_fault_ns: f64,
}

impl Timing {
    /// Descriptors of a batch's list that the device reads at once.
    pub const LIST_CHUNK: u32 = 32;

    /// The published figures' device.
    pub const PUBLISHED: Self = Self {
        portal_ns: 136.0,
        occupancy_ns: 68.0,
        read_ns: 200.0,
        record_ns: 263.0,
        engine_bandwidth: 30.0,
        device_bandwidth: 30.0,
        in_progress: 8,
        page_fault_ns: 70_000.0,
    };

    /// What a descriptor takes beside moving its bytes, from the core's store until the core sees the record.
    pub const fn fixed_ns(&self) -> f64 {
        self.portal_ns + self.occupancy_ns + self.read_ns + self.record_ns
    }

    /// From the core's store until the core sees the record, of a descriptor that is alone on the device.
    pub fn alone_ns(&self, bytes: u64) -> f64 {
        self.fixed_ns() + self.transfer_ns(bytes, 1)
    }

    /// Moving `bytes` while `active` DSA engines of the device, this one among them, are moving data.
    pub fn transfer_ns(&self, bytes: u64, active: u32) -> f64 {
        bytes as f64 / self.bandwidth(active)
    }

    /// Bytes a nanosecond of each of `active` DSA engines that are moving data.
    pub fn bandwidth(&self, active: u32) -> f64 {
        self.engine_bandwidth.min(self.device_bandwidth / f64::from(active.max(1)))
    }

    /// Copies of `bytes` that `engines` busy DSA engines complete in a nanosecond.
    pub fn rate(&self, bytes: u64, engines: u32) -> f64 {
        f64::from(engines) / self.occupancy_ns.max(self.transfer_ns(bytes, engines))
    }

    /// A device that takes `factor` times as long for everything.
    #[must_use]
    pub fn slower(self, factor: f64) -> Self {
        Self {
            portal_ns: self.portal_ns * factor,
            occupancy_ns: self.occupancy_ns * factor,
            read_ns: self.read_ns * factor,
            record_ns: self.record_ns * factor,
            engine_bandwidth: self.engine_bandwidth / factor,
            device_bandwidth: self.device_bandwidth / factor,
            in_progress: self.in_progress,
            page_fault_ns: self.page_fault_ns * factor,
        }
    }
}

impl Default for Timing {
    fn default() -> Self {
        Self::PUBLISHED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fitted_figures_are_met() {
        let timing = Timing::PUBLISHED;
        assert!((timing.alone_ns(1) * 2.1 - 1400.0).abs() < 1.0, "{}", timing.alone_ns(1));
        assert_eq!((timing.bandwidth(1), timing.bandwidth(2), timing.bandwidth(4)), (30.0, 15.0, 7.5));
        // The front limits short copies, the data path long ones.
        assert!((timing.rate(64, 2) - 2.0 / 68.0).abs() < 1e-9);
        assert!((timing.rate(4096, 4) * 4096.0 - 30.0).abs() < 1e-9);
        let slow = timing.slower(2.0);
        assert!((slow.alone_ns(4096) - 2.0 * timing.alone_ns(4096)).abs() < 1e-9);
    }
}
