//! `offcore dsa perf`: activity of work queues, from sysfs.
//!
//! sysfs only shows the number of descriptors that a queue currently holds, which is sampled. It does not show
//! throughput. The kernel's perf events count it if they are available.

use std::path::Path;
use std::thread;
use std::time::Duration;

use offcore_dsa::config::status;
use offcore_dsa::config::sysfs::{self, SysfsDevice};
use serde_json::{Value, json};

use super::PerfArgs;
use crate::args::Format;
use crate::failure::Failure;
use crate::output::table::columns;
use crate::output::{say, write};

pub(super) const EXAMPLES: &str = "\
Examples:
    offcore dsa perf
    offcore dsa perf dsa0 --interval 0.5 -n 10 --format json

Occupancy is sampled about 50 times per interval. The mean and the maximum are
shown. If the kernel has perf events for the device, they count its throughput,
such as writes of the engines:
  perf stat -a -e dsa0/event_category=0x1,event=0x8/ sleep 1";

/// Samples of a queue's occupancy in an interval.
const SAMPLES: u32 = 50;
/// Minimum interval between samples, because reading a queue's occupancy is a read over PCI Express.
const SHORTEST: Duration = Duration::from_millis(1);

pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds >= 0.01 && *seconds <= 3600.0);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected seconds from 0.01 to 3600".into())
}

/// Monitors until the end of the run.
pub(super) fn run(args: &PerfArgs) -> Result<(), Failure> {
    let name = args.device.as_deref();
    let mut before = args.roots.devices(name)?;
    if args.format == Format::Table {
        say(&events(Path::new("/sys/bus/event_source/devices"), &before));
    }
    let pause = (args.interval / SAMPLES).max(SHORTEST);
    let samples = (args.interval.as_nanos() / pause.as_nanos()).max(1);
    for _ in 0..args.count.unwrap_or(u64::MAX) {
        let mut watched = Watched::default();
        for _ in 0..samples {
            thread::sleep(pause);
            watched.sample(&args.roots.devices(name)?);
        }
        let after = args.roots.devices(name)?;
        let rows = rows(&before, &after, &watched);
        if !write(&text(&rows, args.format)?)? {
            break;
        }
        before = after;
    }
    Ok(())
}

/// Describes whether perf can count events that sysfs does not show.
fn events(root: &Path, devices: &[SysfsDevice]) -> String {
    let lines = devices.iter().map(|device| {
        let name = &device.config.name;
        match root.join(name).is_dir() {
            true => format!(
                "{name}: perf counts events of this device, such as writes of its engines: perf stat -a -e \
                 {name}/event_category=0x1,event=0x8/"
            ),
            false => format!(
                "{name}: the kernel has no perf events for this device (CONFIG_INTEL_IDXD_PERFMON): its throughput \
                 cannot be counted"
            ),
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[derive(Debug, Default)]
struct Watched {
    /// For each queue: name, number of samples, their sum, and the maximum.
    queues: Vec<(String, u64, u64, u32)>,
}

impl Watched {
    fn sample(&mut self, devices: &[SysfsDevice]) {
        for device in devices {
            for (number, _) in device.config.used_wqs() {
                let Some(occupancy) = device.wqs[number].occupancy else { continue };
                let name = device.config.wq_name(number);
                let found = self.queues.iter().position(|queue| queue.0 == name);
                let index = found.unwrap_or_else(|| {
                    self.queues.push((name, 0, 0, 0));
                    self.queues.len() - 1
                });
                let queue = &mut self.queues[index];
                queue.1 += 1;
                queue.2 += u64::from(occupancy);
                queue.3 = queue.3.max(occupancy);
            }
        }
    }

    /// Returns the mean and maximum, or `None` for a queue whose device does not report its occupancy.
    fn occupancy(&self, name: &str) -> Option<(f64, u32)> {
        let queue = self.queues.iter().find(|queue| queue.0 == name)?;
        Some((queue.2 as f64 / queue.1 as f64, queue.3))
    }
}

fn rows(before: &[SysfsDevice], after: &[SysfsDevice], watched: &Watched) -> Vec<Value> {
    let mut rows = Vec::new();
    for device in after {
        let earlier = before.iter().find(|earlier| earlier.config.name == device.config.name);
        let error = |device: &SysfsDevice| device.errors.clone().unwrap_or_default();
        for (number, wq) in device.config.used_wqs() {
            let name = device.config.wq_name(number);
            let state = &device.wqs[number];
            let faults = |state: &sysfs::WqState| {
                let sum = |count: fn(&sysfs::OpenFile) -> u64| state.files.iter().map(count).sum::<u64>();
                (sum(|file| file.cr_faults), sum(|file| file.cr_fault_failures))
            };
            let now = faults(state);
            let was = earlier.and_then(|earlier| earlier.wqs.get(number)).map_or(now, faults);
            let occupancy = watched.occupancy(&name);
            rows.push(json!({
                "queue": name,
                "state": state.state,
                "device_state": device.state,
                "size": wq.size,
                "occupancy_mean": occupancy.map(|(mean, _)| mean),
                "occupancy_max": occupancy.map(|(_, max)| max),
                "clients": state.clients,
                "enqcmds_retries": state.enqcmds_retries,
                // The counters of a program vanish when it ends.
                "cr_faults": now.0.saturating_sub(was.0),
                "cr_fault_failures": now.1.saturating_sub(was.1),
                "cmd_status": device.cmd_status,
                "errors": error(device),
                "new_error": earlier.is_some_and(|earlier| error(earlier) != error(device)),
            }));
        }
    }
    rows
}

fn text(rows: &[Value], format: Format) -> anyhow::Result<String> {
    if format == Format::Json {
        let lines: Result<Vec<String>, _> = rows.iter().map(serde_json::to_string).collect();
        return Ok(lines?.into_iter().map(|line| line + "\n").collect());
    }
    let shown = |value: &Value| if value.is_null() { "-".into() } else { value.to_string() };
    let cells = rows.iter().map(|row| {
        let command = row["cmd_status"].as_u64().unwrap_or(0) as u32;
        [
            row["queue"].as_str().unwrap_or_default().into(),
            row["state"].as_str().unwrap_or_default().into(),
            shown(&row["size"]),
            row["occupancy_mean"].as_f64().map_or("-".into(), |mean| format!("{mean:.1}")),
            shown(&row["occupancy_max"]),
            shown(&row["clients"]),
            shown(&row["cr_faults"]),
            shown(&row["cr_fault_failures"]),
            match (row["new_error"] == true, command) {
                (true, _) => format!("new: {}", row["errors"].as_str().unwrap_or_default()),
                (_, 0) => "-".into(),
                (_, command) => status::text(command),
            },
        ]
    });
    if rows.is_empty() {
        return Ok("  no work queue has a size\n".into());
    }
    Ok(columns("<queue|<state|size|occupied|at most|clients|CR faults|failed|<last error", cells))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsa::fixtures::Tree;

    const WQ: &str = "sys/bus/dsa/devices/dsa0/wq0.1";

    #[test]
    fn interval_has_samples_and_changes() {
        let tree = Tree::healthy();
        let look = || sysfs::devices(&tree.roots()).unwrap();
        tree.set(&format!("{WQ}/dsa!wq0.1/file0/cr_faults"), 5);
        let before = look();
        let mut watched = Watched::default();
        for occupancy in [0, 10, 50] {
            tree.set(&format!("{WQ}/occupancy"), occupancy);
            watched.sample(&look());
        }
        tree.set(&format!("{WQ}/dsa!wq0.1/file0/cr_faults"), 12);
        tree.set("sys/bus/dsa/devices/dsa0/errors", "0x1 0x0 0x0 0x0");
        let rows = rows(&before, &look(), &watched);
        assert_eq!((rows.len(), &rows[1]["queue"]), (2, &json!("wq0.1")));
        assert_eq!((&rows[1]["occupancy_mean"], &rows[1]["occupancy_max"]), (&json!(20.0), &json!(50)));
        assert_eq!((&rows[1]["cr_faults"], &rows[1]["new_error"]), (&json!(7), &json!(true)));
        assert_eq!(rows[0]["occupancy_max"], json!(0));
        let table = text(&rows, Format::Table).unwrap();
        assert!(table.contains("20.0") && table.contains("new: 0x1"), "{table}");
        assert_eq!(text(&rows, Format::Json).unwrap().lines().count(), 2);
    }

    #[test]
    fn missing_values_are_shown_as_dash() {
        let tree = Tree::healthy();
        tree.remove(&format!("{WQ}/occupancy"));
        tree.set("sys/bus/dsa/devices/dsa0/cmd_status", "0x80200000");
        let devices = sysfs::devices(&tree.roots()).unwrap();
        let mut watched = Watched::default();
        watched.sample(&devices);
        let table = text(&rows(&devices, &devices, &watched), Format::Table).unwrap();
        let line = table.lines().find(|line| line.contains("wq0.1")).unwrap();
        assert!(line.contains(" -  ") && line.contains("driver_name"), "{table}");
        assert!(events(&tree.file("sys/bus/event_source/devices"), &devices).contains("perf stat"));
        assert!(events(&tree.file("nowhere"), &devices).contains("PERFMON"));
    }
}
