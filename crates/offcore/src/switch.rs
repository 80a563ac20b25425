//! `offcore switch`: opens the ports, monitors the running switch, and stops it cleanly.

mod advice;
pub(crate) mod claims;
pub(crate) mod plan;
pub(crate) mod ports;
pub(crate) mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::bail;
use offcore_config::sections::Section;
use offcore_flow::report::{QueueReport, Report, Reporter};
use offcore_flow::switch::{Devices, HostIface, Run, start_with};
use offcore_flow::{Running, SwitchConfig, SwitchError, check_lcores};
use offcore_port::Port;
use offcore_port::spec::PortSpec;
use offcore_port::stats::PortNames;
use offcore_stats::lcore;
use offcore_stats::pace::Pace;
use rustix::process::{Pid, getppid};

use crate::args::{Format, RunArgs, SwitchArgs};
use crate::failure::Failure;
use crate::output::{say, write};
use crate::service::Notifier;
use crate::signals::stop_on_signals;
use advice::Advice;
use ports::Observed;
use report::{Line, Measurement, StoppedBy};

/// Interval at which the control thread checks signals, links and the clock.
const TICK: Duration = Duration::from_millis(20);
/// The interval while packets are measured.
const MEASURING_TICK: Duration = Duration::from_millis(1);

/// Runs the switch until it is stopped.
pub(crate) fn run(args: &SwitchArgs) -> Result<(), Failure> {
    let config = plan::config(args)?;
    let ports = plan::ports(args);
    if args.print.print(&args.run, &Section::Switch(plan::section(args)), &config, &ports)? {
        return Ok(());
    }
    run_switch(&config, Watching::new(&ports, &args.run, args.until_idle, report::tables))
}

/// Parameters of a run in addition to the switch's configuration: its ports, and how it is monitored.
pub(crate) struct Watching<'a> {
    /// The ports as written on the command line. Ports of mirrors follow the others.
    pub ports: &'a [PortSpec],
    /// The flags for packet buffers, DPDK, reports, and the end of the run.
    pub run: &'a RunArgs,
    /// Whether to stop when no packets move.
    pub until_idle: bool,
    /// The amount to measure, if a measurement is requested.
    pub measured: Option<Measured>,
    /// The run ends when this process has ended and no application is served any more.
    pub parent: Option<Pid>,
    /// Formats reports as tables.
    pub tables: fn(&Line<'_>) -> String,
}

impl<'a> Watching<'a> {
    /// Creates the parameters of a run without a measurement and without a parent.
    pub(crate) fn new(
        ports: &'a [PortSpec],
        run: &'a RunArgs,
        until_idle: bool,
        tables: fn(&Line<'_>) -> String,
    ) -> Self {
        Self { ports, run, until_idle, measured: None, parent: None, tables }
    }
}

/// The packets to measure before a switch with pipelines stops. Only packets that pipelines accept count, not packets
/// that were dropped because a pipeline was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Measured {
    pub packets: u64,
    /// Number of packets before the measurement.
    pub warm_up: u64,
}

/// Opens the ports, and runs a switch until it is stopped.
pub(crate) fn run_switch(config: &SwitchConfig, watching: Watching<'_>) -> Result<(), Failure> {
    let interrupted = stop_on_signals().map_err(|error| anyhow::anyhow!("handling signals: {error}"))?;
    check_lcores(&config.lcores)?;
    watching.run.eal.configure(watching.ports, &config.dma)?;
    let (pool, line) = watching.run.pool.open().map_err(anyhow::Error::new)?;
    say(&line);
    // Devices are opened before the ports, whose packets may be in a device's memory.
    let devices = Devices::open(config, pool).map_err(SwitchError::from)?;
    let opened = ports::open(watching.ports, pool, devices.memory());
    let (ports, observed) = opened.map_err(SwitchError::from)?;
    let ifaces = match &config.run {
        Run::Host(hosting) => hosting.ifaces.clone(),
        _ => Vec::new(),
    };
    advice::warn_kernel_addresses(watching.ports, &ifaces, &config.names);
    let running = start_with(config, ports, pool, devices)?;
    running.notes().iter().for_each(|note| say(note));
    if config.rt_priority.is_some() && lcore::available().is_ok_and(|all| all.len() <= config.lcores.len()) {
        say(
            "warning: every lcore has a real-time worker: only the kernel's throttling leaves time for the rest",
        );
    }
    let last = running.reporter().map_err(anyhow::Error::new)?;
    let statuses = watching.ports.iter().map(|_| StatusReporter::default()).collect();
    let advice = Advice::new(running.reporter().map_err(anyhow::Error::new)?);
    let addresses_due =
        ifaces.iter().any(HostIface::is_configured).then(|| Instant::now() + advice::ADDRESS_TIMEOUT);
    let mut watch = Watch {
        watching,
        running,
        observed,
        interrupted,
        statuses,
        last,
        advice,
        ifaces,
        addresses_due,
        measurement: None,
    };
    let mut notifier = Notifier::ready();
    let stopped_by = watch.until_stopped(&mut notifier)?;
    notifier.stopping();
    watch.finish(stopped_by)
}

/// The last reported status of a port, and the rate limit for reports: the other end may change the state all the time.
#[derive(Debug)]
pub(crate) struct StatusReporter {
    status: String,
    lines: Pace,
    has_failed: bool,
}

impl Default for StatusReporter {
    fn default() -> Self {
        Self { status: String::new(), has_failed: false, lines: Pace::new(Duration::from_secs(10), 32) }
    }
}

/// Prints changes of ports with a link, and ports that have failed.
pub(crate) fn report_changes(
    ports: &[Box<dyn Port>],
    names: &PortNames,
    said: &mut [StatusReporter],
    has_link: impl Fn(usize) -> bool,
) {
    for (index, (port, said)) in ports.iter().zip(said).enumerate() {
        if !said.has_failed
            && let Some(why) = port.failure()
        {
            say(&format!("{} {}: {why}", names.of(index), port.name()));
            said.has_failed = true;
        }
        if !has_link(index) {
            continue;
        }
        let status = port.status();
        if status != said.status && said.lines.allows(Instant::now()) {
            say(&format!("{} {}: {status}", names.of(index), port.name()));
            said.status = status;
        }
    }
}

/// Checks that a run has ended normally.
pub(crate) fn ended(stopped_by: StoppedBy, unfinished: usize, ports: &[Box<dyn Port>]) -> anyhow::Result<()> {
    if stopped_by == StoppedBy::Worker {
        bail!("a worker ended by itself; its messages are above");
    }
    if unfinished > 0 {
        bail!("{unfinished} packets in flight were never completed");
    }
    match ports.iter().find_map(|port| Some((port.name(), port.failure()?))) {
        None => Ok(()),
        Some((port, why)) => bail!("port '{port}': {why}"),
    }
}

/// A running switch and its state.
struct Watch<'a> {
    watching: Watching<'a>,
    running: Running,
    observed: Observed,
    interrupted: Arc<AtomicBool>,
    /// The last reported status of each port.
    statuses: Vec<StatusReporter>,
    /// The reporter for the final report. It has not reported before, so its rates are for the time from the first
    /// packet to the last.
    last: Reporter,
    advice: Advice,
    /// The interfaces of a host.
    ifaces: Vec<HostIface>,
    /// When addresses that the network has not assigned are reported; `None` afterwards.
    addresses_due: Option<Instant>,
    /// The finished measurement.
    measurement: Option<Measurement>,
}

impl Watch<'_> {
    fn until_stopped(&mut self, notifier: &mut Notifier) -> anyhow::Result<StoppedBy> {
        let started = Instant::now();
        let interval = Some(self.watching.run.stats_interval).filter(|interval| !interval.is_zero());
        let mut reporter = self.running.reporter()?;
        let mut next = interval.map(|interval| started + interval);
        let mut idle = match self.watching.until_idle {
            true => Some(Idle::new(self.running.reporter()?, plan::idle_timeout(self.watching.ports))),
            false => None,
        };
        let mut measuring = match self.watching.measured {
            Some(measured) => Some(Measuring::new(self.running.reporter()?, measured)),
            None => None,
        };
        loop {
            let now = Instant::now();
            self.running.tend();
            notifier.alive(now);
            self.last.look()?;
            let names = self.running.names();
            report_changes(self.running.ports(), names, &mut self.statuses, |port| {
                self.observed.has_link(port)
            });
            self.advice.look(now)?;
            self.report_missing_addresses(now)?;
            if self.interrupted.load(Ordering::Relaxed) {
                return Ok(StoppedBy::Signal);
            }
            if !self.running.is_running() {
                return Ok(StoppedBy::Worker);
            }
            if self.is_left()? {
                return Ok(StoppedBy::Parent);
            }
            if self.watching.run.duration.is_some_and(|duration| now - started >= duration) {
                return Ok(StoppedBy::Duration);
            }
            let waits = || self.running.ports().iter().any(|port| port.is_waiting());
            if let Some(idle) = &mut idle
                && idle.is_over(now)?
                && !waits()
            {
                return Ok(StoppedBy::Idle);
            }
            if let Some(measuring) = &mut measuring {
                self.measurement = measuring.measurement(now)?;
                if self.measurement.is_some() {
                    return Ok(StoppedBy::Packets);
                }
            }
            if let (Some(interval), Some(at)) = (interval, &mut next)
                && now >= *at
            {
                // Missed reports are skipped.
                while *at <= now {
                    *at += interval;
                }
                let report = reporter.report("interval")?;
                if !self.print(&report, None)? {
                    return Ok(StoppedBy::Output);
                }
            }
            let until_next = next.map_or(TICK, |at| at.saturating_duration_since(now));
            std::thread::sleep(until_next.min(if measuring.is_some() { MEASURING_TICK } else { TICK }));
        }
    }

    /// Reports once the interfaces to which the network has assigned no address within [`advice::ADDRESS_TIMEOUT`].
    fn report_missing_addresses(&mut self, now: Instant) -> anyhow::Result<()> {
        if self.addresses_due.is_some_and(|due| now >= due) {
            self.addresses_due = None;
            let report = self.running.reporter()?.report("interval")?;
            advice::missing_addresses(self.watching.ports, &self.ifaces, &report)
                .iter()
                .for_each(|text| say(text));
        }
        Ok(())
    }

    /// Returns whether the parent has ended and no application is served any more.
    fn is_left(&self) -> anyhow::Result<bool> {
        if self.watching.parent.is_none_or(|parent| getppid() == Some(parent)) {
            return Ok(false);
        }
        let report = self.running.reporter()?.report("interval")?;
        Ok(report.tcp.iter().all(|host| host.serve.is_none_or(|serve| serve.applications == 0)))
    }

    fn finish(mut self, stopped_by: StoppedBy) -> Result<(), Failure> {
        let unfinished = self.running.stop();
        self.last.look().map_err(anyhow::Error::new)?;
        self.advice.tell()?;
        if stopped_by != StoppedBy::Output {
            let report = self.last.report("final").map_err(anyhow::Error::new)?;
            self.print(&report, Some((stopped_by, unfinished)))?;
        }
        Ok(ended(stopped_by, unfinished, self.running.ports())?)
    }

    /// Writes a report to stdout. Returns `false` if the reader has closed it.
    fn print(&self, report: &Report, ended: Option<(StoppedBy, usize)>) -> anyhow::Result<bool> {
        let ports = self.observed.lines(self.running.ports(), self.running.names());
        let mut line = Line::interval(report, &ports);
        if let Some((stopped_by, unfinished)) = ended {
            (line.stopped_by, line.unfinished) = (Some(stopped_by), Some(unfinished));
            line.measured = self.measurement;
        }
        let text = match self.watching.run.format {
            Format::Table => (self.watching.tables)(&line),
            Format::Json => serde_json::to_string(&line)? + "\n",
        };
        write(&text)
    }
}

/// Measures the time of received packets.
struct Measuring {
    reporter: Reporter,
    measured: Measured,
    /// The last time at which nothing had been received yet.
    waiting: Instant,
    /// The end of the warm-up: time, and packets and bytes received until then.
    begun: Option<(Instant, u64, u64)>,
}

impl Measuring {
    fn new(reporter: Reporter, measured: Measured) -> Self {
        Self { reporter, measured, waiting: Instant::now(), begun: None }
    }

    /// Returns the measurement if enough packets have been received.
    fn measurement(&mut self, now: Instant) -> anyhow::Result<Option<Measurement>> {
        let report = self.reporter.report("measuring")?;
        // Packets for which a pipeline had no room were received, but do not count as throughput.
        let taken_in = |queue: &&QueueReport| queue.half == "tx" && queue.port.starts_with("pipeline");
        let (packets, bytes) = report
            .queues
            .iter()
            .filter(taken_in)
            .fold((0, 0), |(packets, bytes), queue| (packets + queue.packets, bytes + queue.bytes));
        if self.begun.is_none() {
            match self.measured.warm_up {
                // Without a warm-up all packets count, from the time when the first may have arrived.
                0 if packets > 0 => self.begun = Some((self.waiting, 0, 0)),
                0 => self.waiting = now,
                warm_up if packets >= warm_up => self.begun = Some((now, packets, bytes)),
                _ => {}
            }
        }
        let Some((since, packets_before, bytes_before)) = self.begun else { return Ok(None) };
        let (packets, bytes) = (packets - packets_before, bytes - bytes_before);
        if packets < self.measured.packets {
            return Ok(None);
        }
        Ok(Some(Measurement::new(packets, bytes, now - since)))
    }
}

/// Detects that no packets move.
struct Idle {
    reporter: Reporter,
    timeout: Duration,
    moved: u64,
    since: Instant,
}

impl Idle {
    fn new(reporter: Reporter, timeout: Duration) -> Self {
        Self { reporter, timeout, moved: 0, since: Instant::now() }
    }

    fn is_over(&mut self, now: Instant) -> anyhow::Result<bool> {
        let report = self.reporter.report("idle")?;
        let drops = |drops: &[(String, u64)]| drops.iter().map(|(_, n)| n).sum::<u64>();
        let moved = report.queues.iter().map(|queue| queue.packets + drops(&queue.drops)).sum();
        if moved != self.moved || report.channels.iter().any(|channel| channel.in_flight > 0) {
            (self.moved, self.since) = (moved, now);
        }
        Ok(now - self.since >= self.timeout)
    }
}
