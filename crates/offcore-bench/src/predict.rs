//! `offcore predict`: predicts the benefit of DSA for this machine from core costs measured here and a model of the
//! device.
//!
//! A rate is the minimum of three rates: of the cores, of the devices' copies, and of the ports. The device's rate is
//! taken from the stepped simulator on its virtual clock. All figures that involve an engine are model results.

mod guides;
mod measure;

use offcore_dma::Mode;

use crate::model::TOLERANCE;
pub(crate) use crate::model::rate::BATCH;
pub use crate::model::rate::{Bound, DeviceRate, DsaGroups};
use crate::report::row::Row;
use crate::report::sample::Spread;

pub use guides::{GUIDES, Guide};
pub use measure::{Options, run};

/// Speed of `auto` relative to the better of the two other modes, with a helper core as the engine, in full runs of
/// `bench vhost` with hot and remote data: minimum and median.
const AUTO: [f64; 2] = [0.89, 0.95];

/// Resources of a forwarding machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    pub cores: usize,
    /// Number of receiving ports. Each port sends as much as it receives.
    pub ports: usize,
    /// Gbit/s of a port, including preamble and gap.
    pub port_gbps: f64,
    /// Number of DSA devices.
    pub devices: usize,
    /// DSA engines per device, in one group.
    pub engines: usize,
}

/// A figure with its uncertainty.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Interval {
    /// Lower limit.
    pub low: f64,
    /// Most likely value.
    pub mid: f64,
    /// Upper limit.
    pub high: f64,
}

impl Interval {
    /// Returns an interval without uncertainty.
    pub const fn exact(mid: f64) -> Self {
        Self { low: mid, mid, high: mid }
    }

    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let (a, b) = (f(self.low), f(self.high));
        Self { low: a.min(b), mid: f(self.mid), high: a.max(b) }
    }

    fn min(self, other: Self) -> Self {
        Self { low: self.low.min(other.low), mid: self.mid.min(other.mid), high: self.high.min(other.high) }
    }

    fn max(self, other: Self) -> Self {
        Self { low: self.low.max(other.low), mid: self.mid.max(other.mid), high: self.high.max(other.high) }
    }
}

/// A rate in million packets per second, and its bottleneck.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    pub mpps: Interval,
    /// Bottleneck of the most likely value.
    pub bound: Bound,
}

/// Predicts the rate of `machine` in a mode in which a packet of `frame` bytes costs the core `core_ns`.
///
/// `device` is required if an engine copies. It includes the number of copies per packet.
pub fn estimate(
    machine: &Machine,
    frame: usize,
    core_ns: Interval,
    device: Option<(DeviceRate, f64)>,
) -> Estimate {
    let core = core_ns.map(|ns| machine.cores as f64 * 1e3 / ns);
    let port = machine.ports as f64 * machine.port_gbps * 1e3 / ((frame + 20) * 8) as f64;
    let mut limits = vec![(core, Bound::Core), (Interval::exact(port), Bound::PortRate)];
    if let Some((rate, copies)) = device {
        let mid = machine.devices as f64 * rate.mcopies / copies;
        let mpps = Interval { low: mid * (1.0 - TOLERANCE), mid, high: mid * (1.0 + TOLERANCE) };
        limits.push((mpps, rate.bound));
    }
    let lowest = limits.iter().copied().min_by(|a, b| a.0.mid.total_cmp(&b.0.mid)).unwrap_or(limits[0]);
    let mpps = limits.iter().fold(lowest.0, |all, (limit, _)| all.min(*limit));
    Estimate { mpps, bound: lowest.1 }
}

/// Predicts the rate of `auto` from the other two modes: the better mode at each size, minus the cost of finding it.
pub fn auto(cpu: Estimate, offload: Estimate) -> Estimate {
    let better = if cpu.mpps.mid >= offload.mpps.mid { cpu } else { offload };
    let mut mpps = cpu.mpps.max(offload.mpps);
    let [least, middle] = AUTO;
    mpps.low *= least;
    // If a port or a device is the bottleneck, the core has spare time to find the better mode.
    if better.bound == Bound::Core {
        mpps.mid *= middle;
    }
    Estimate { mpps, bound: better.bound }
}

/// Returns the row of a prediction.
fn row(case: &str, frame: usize, mode: Mode, estimate: Estimate) -> Row {
    let Interval { low, mid, high } = estimate.mpps;
    let mut row = Row::new("predict", case, "model");
    (row.head.frame, row.head.ring, row.head.burst) = (frame, "split", BATCH);
    (row.head.mode, row.head.temperature) = (mode.to_string(), String::new());
    row.head.engine = if mode == Mode::Cpu { "cpu" } else { "dsa-sim" }.into();
    row.figures.simulated = mode != Mode::Cpu;
    row.set_spread("model", "mpps", Spread { runs: 1, min: low, median: mid, max: high });
    row.set_mpps(mid);
    row.core.bound = Some(estimate.bound.name());
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    const MACHINE: Machine = Machine { cores: 1, ports: 1, port_gbps: 100.0, devices: 1, engines: 4 };

    #[test]
    fn rows_have_an_estimate() {
        golden::check("predict", &row("forward", 64, Mode::Auto, Estimate::default()));
    }

    #[test]
    fn the_smallest_rate_is_the_bound() {
        let device = |mcopies, bound| Some((DeviceRate { mcopies, bound }, 2.0));
        let cheap = Interval { low: 40.0, mid: 50.0, high: 60.0 };
        let core = estimate(&MACHINE, 256, cheap, None);
        assert_eq!((core.mpps.mid, core.bound), (20.0, Bound::Core));
        assert!(core.mpps.low < 17.0 && core.mpps.high > 24.9);
        let port = estimate(&MACHINE, 1518, cheap, None);
        assert_eq!(port.bound, Bound::PortRate);
        assert!((port.mpps.mid - 8.127).abs() < 0.001);
        let engine = estimate(&MACHINE, 1024, cheap, device(10.0, Bound::Descriptors));
        assert_eq!((engine.mpps.mid, engine.bound), (5.0, Bound::Descriptors));
        assert!((engine.mpps.low - 4.25).abs() < 1e-9 && (engine.mpps.high - 5.75).abs() < 1e-9);
        let two = Machine { devices: 2, cores: 2, ..MACHINE };
        let engine = estimate(&two, 256, cheap, device(10.0, Bound::DeviceBandwidth));
        assert_eq!((engine.mpps.mid, engine.bound), (10.0, Bound::DeviceBandwidth));
        assert_eq!((auto(core, engine).mpps.mid, auto(core, engine).bound), (19.0, Bound::Core));
        assert_eq!(auto(port, port).mpps.mid, port.mpps.mid);
    }
}
