//! The timing model of the device: a set of parameters, fitted to published figures.
//!
//! The path of a descriptor, with the duration of each step:
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
//! A batch descriptor is fetched first: `read_ns` for each [`Timing::LIST_CHUNK`] descriptors of its list. Its members
//! then follow the path of other descriptors, without the portal. The batch's own record is written `record_ns` after
//! the last record of its members. A page fault that the device blocks on, or that software resolves, takes
//! `page_fault_ns`.
//!
//! # Sources of the values
//!
//! Three figures determine the model (`offcore bench model` compares it with the other published figures):
//!
//! * A move of one byte takes 1400 cycles (DarkStream, Xeon 8558). These are TSC cycles at 2.1 GHz: the same source
//!   reports 75 thousand cycles for 1 MiB, which is 29.4 GB/s at this frequency, but 56 GB/s at the core's highest
//!   clock. So portal, front, read and record take 667 ns together.
//! * One device moves about 30 GB/s (VPP guide), and so does a single busy DSA engine.
//! * DTO's 1.19 µs for 8 to 12 KiB determines DTO's own share, which is not a parameter of the device.
//!
//! Only the sum of the four latencies is published. Two other figures separate them. Four cores that use ENQCMD with
//! one descriptor in flight each saturate a shared queue (dsa-perf-micros), so the portal's round trip is about four
//! times the front's occupancy. Two channels of one device complete 29.3 million copies of 124 bytes per second
//! (dpdk-dma guide), so the front takes at most 68 ns. Eight descriptors in progress keep the front busy; with more,
//! the knee of a shared queue of 64 entries (DarkStream) would be further from 64.
//!
//! The duration of a page fault is the middle of the range that DTO's documentation gives for a copy with a fault.

/// The device's parameters, in nanoseconds and in bytes per nanosecond (GB/s).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Time from the core's store to the work queue, one way.
    pub portal_ns: f64,
    /// Time for which any descriptor occupies a DSA engine's front; the next descriptor waits that long.
    pub occupancy_ns: f64,
    /// Address translation and memory latency, before the first byte moves or before a batch's list is read.
    pub read_ns: f64,
    /// Time from the last byte moved until the core sees the completion record.
    pub record_ns: f64,
    /// Bandwidth of a single busy DSA engine, in bytes per nanosecond.
    pub engine_bandwidth: f64,
    /// Total bandwidth of the device's DSA engines, in bytes per nanosecond.
    pub device_bandwidth: f64,
    /// Number of descriptors that a DSA engine has in progress at a time.
    pub in_progress: u32,
    /// Time to resolve a page fault: the request, the operating system's handler, and the answer.
    pub page_fault_ns: f64,
}

impl Timing {
    /// Number of descriptors of a batch's list that the device reads at once.
    pub const LIST_CHUNK: u32 = 32;

    /// The parameters that follow from the published figures.
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

    /// Returns the time from the core's store until the core sees the record, without the time for moving bytes.
    pub const fn fixed_ns(&self) -> f64 {
        self.portal_ns + self.occupancy_ns + self.read_ns + self.record_ns
    }

    /// Returns the time from the core's store until the core sees the record, for a descriptor alone on the device.
    pub fn alone_ns(&self, bytes: u64) -> f64 {
        self.fixed_ns() + self.transfer_ns(bytes, 1)
    }

    /// Returns the time for moving `bytes` while `active` DSA engines of the device, including this one, are moving
    /// data.
    pub fn transfer_ns(&self, bytes: u64, active: u32) -> f64 {
        bytes as f64 / self.bandwidth(active)
    }

    /// Returns the bandwidth of each of `active` DSA engines that are moving data, in bytes per nanosecond.
    pub fn bandwidth(&self, active: u32) -> f64 {
        self.engine_bandwidth.min(self.device_bandwidth / f64::from(active.max(1)))
    }

    /// Returns the number of copies of `bytes` that `engines` busy DSA engines complete per nanosecond.
    pub fn rate(&self, bytes: u64, engines: u32) -> f64 {
        f64::from(engines) / self.occupancy_ns.max(self.transfer_ns(bytes, engines))
    }

    /// Returns a device for which everything takes `factor` times as long.
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
        // The front limits short copies, the data path limits long ones.
        assert!((timing.rate(64, 2) - 2.0 / 68.0).abs() < 1e-9);
        assert!((timing.rate(4096, 4) * 4096.0 - 30.0).abs() < 1e-9);
        let slow = timing.slower(2.0);
        assert!((slow.alone_ns(4096) - 2.0 * timing.alone_ns(4096)).abs() < 1e-9);
    }
}
