//! Predicts the guides' tables from the machine of each guide: its clock, the cost of its software, and the device's
//! model.
//!
//! The guides do not publish the cost of their software separately. It is therefore derived from a few cells of each
//! table: two cells for the core's copies (a cost per packet and a cost per byte), and one cell for the engine's copies
//! (a cost per packet). The other cells are predicted.

use anyhow::Result;
use offcore_dma::Mode;

use super::{Bound, DeviceRate, DsaGroups, Estimate, Interval, Machine, estimate, row};
use crate::report::row::{ModelColumns, Published, Row};

/// A guide's table.
#[derive(Clone, Copy, Debug)]
pub struct Guide {
    pub name: &'static str,
    pub machine: &'static str,
    pub hz: f64,
    /// Frame length, then million packets per second with core copies and with DSA copies.
    pub cells: &'static [(usize, f64, f64)],
    /// Frame lengths of the cells from which the cost of core copies is derived.
    pub fitted_cpu: [usize; 2],
    /// Frame length of the cell from which the cost of the asynchronous path is derived.
    pub fitted_offload: usize,
    /// Copies per packet.
    pub copies: f64,
    pub groups: DsaGroups,
    /// Capacity of the ports in Gbit/s of frames.
    pub ports_gbps: f64,
}

/// Table 8 of the vhost guide, and the table of the dpdk-dma guide (published in Gbit/s).
pub const GUIDES: [Guide; 2] = [
    Guide {
        name: "vhost guide, Table 8",
        machine: "Xeon 8471N 1.8 GHz, one core, one DSA: one group of 4 DSA engines, two queues of 64",
        hz: 1.8e9,
        cells: &crate::vhost::PUBLISHED,
        fitted_cpu: [64, 1518],
        fitted_offload: 64,
        copies: 2.0,
        groups: DsaGroups { count: 1, queues: 2, engines: 4 },
        ports_gbps: 100.0,
    },
    Guide {
        name: "dpdk-dma guide",
        machine: "Xeon Gold 6438N 2.0 GHz, one core, one DSA: two groups of one DSA engine, 2 x 100 Gbit/s",
        hz: 2.0e9,
        cells: &[
            (64, 35.16, 23.44),
            (128, 29.30, 29.30),
            (256, 21.48, 27.34),
            (512, 9.77, 27.83),
            (1024, 5.37, 24.41),
            (1280, 4.69, 19.53),
        ],
        fitted_cpu: [64, 1280],
        fitted_offload: 256,
        copies: 1.0,
        groups: DsaGroups { count: 2, queues: 1, engines: 1 },
        ports_gbps: 200.0,
    },
];

impl Guide {
    fn cell(&self, frame: usize) -> (f64, f64) {
        let cell = self.cells.iter().find(|cell| cell.0 == frame);
        cell.map_or((f64::NAN, f64::NAN), |&(_, cpu, offload)| (cpu, offload))
    }

    /// Returns the core's cost per packet in nanoseconds if the core copies.
    pub fn cpu_ns(&self, frame: usize) -> f64 {
        let [a, b] = self.fitted_cpu;
        let (at_a, at_b) = (1e3 / self.cell(a).0, 1e3 / self.cell(b).0);
        at_a + (at_b - at_a) * (frame as f64 - a as f64) / (b - a) as f64
    }

    /// Returns the core's cost per packet in nanoseconds if DSA copies.
    pub fn offload_ns(&self) -> f64 {
        1e3 / self.cell(self.fitted_offload).1
    }

    /// Returns the same cost in cycles of the guide's core.
    pub fn offload_cycles(&self) -> f64 {
        self.offload_ns() * self.hz / 1e9
    }

    /// Predicts all cells of the table. The rows include the errors.
    ///
    /// # Errors
    /// If the simulated device fails.
    pub fn rows(&self) -> Result<Vec<Row>> {
        let machine = Machine {
            cores: 1,
            ports: 1,
            port_gbps: f64::INFINITY,
            devices: 1,
            engines: self.groups.engines,
        };
        let mut rows = Vec::new();
        for &(frame, cpu, offload) in self.cells {
            let device = DeviceRate::of(frame, self.groups, super::BATCH)?;
            for (mode, published) in [(Mode::Cpu, cpu), (Mode::Offload, offload)] {
                let (ns, engine, fitted) = match mode {
                    Mode::Cpu => (self.cpu_ns(frame), None, self.fitted_cpu.contains(&frame)),
                    _ => (self.offload_ns(), Some((device, self.copies)), frame == self.fitted_offload),
                };
                let found = self.at_port(frame, estimate(&machine, frame, Interval::exact(ns), engine));
                let model = ModelColumns {
                    published_high: Some(published),
                    source: Some(self.name),
                    role: Some(if fitted { "fitted" } else { "judged" }),
                    software_ns: Some(ns),
                    error: Some(found.mpps.mid / published - 1.0),
                    ..ModelColumns::default()
                };
                let published = Published::new(Some(published), "mpps");
                rows.push(Row { model, published, ..row(self.name, frame, mode, found) });
            }
        }
        Ok(rows)
    }

    /// Limits an estimate to the ports' capacity, which the guides count in bits of frames.
    fn at_port(&self, frame: usize, estimate: Estimate) -> Estimate {
        let port = self.ports_gbps * 1e3 / (frame * 8) as f64;
        match estimate.mpps.mid > port {
            true => Estimate { mpps: estimate.mpps.min(Interval::exact(port)), bound: Bound::PortRate },
            false => Estimate { mpps: estimate.mpps.min(Interval::exact(port)), ..estimate },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn fitted_cells_and_path_cost_are_met() {
        for guide in GUIDES {
            guide.rows().unwrap().iter().for_each(|row| golden::check("predict, guide", row));
            for row in guide.rows().unwrap().iter().filter(|row| row.model.role == Some("fitted")) {
                let error = row.model.error.unwrap();
                assert!(error.abs() < 1e-6, "{} {} {}: {error}", guide.name, row.head.frame, row.head.mode);
            }
        }
        assert!((GUIDES[0].offload_cycles() - 392.0).abs() < 1.0);
    }

    #[test]
    fn offloaded_cells_are_predicted() {
        for row in GUIDES[0].rows().unwrap().iter().filter(|row| row.head.mode == "offload") {
            assert!(row.model.error.unwrap().abs() < 0.05 && row.core.bound == Some("core"), "{row:?}");
        }
        let dpdk = GUIDES[1].rows().unwrap();
        let long: Vec<_> =
            dpdk.iter().filter(|row| row.head.mode == "offload" && row.head.frame >= 1024).collect();
        assert!(
            long.iter()
                .all(|row| row.core.bound == Some("port rate") && row.model.error.unwrap().abs() < 0.01)
        );
    }
}
