//! A run: periodic reports, commands, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::Context;
use offcore_flow::pktgen::Running;
use offcore_flow::pktgen::report::Reporter;
use offcore_port::stats::PortNames;

use super::args::PktgenArgs;
use super::commands::{self, Command, HELP, ParsedCommand};
use super::interfaces::Interfaces;
use super::tables::{self, Line};
use crate::args::Format;
use crate::failure::Failure;
use crate::output::{say, write};
use crate::switch::report::StoppedBy;
use crate::switch::{StatusReporter, ended, report_changes};

/// Interval at which the control thread checks commands, signals, links and the clock.
const TICK: Duration = Duration::from_millis(5);

/// Runs until the end and reports.
pub(super) fn run(
    args: &PktgenArgs,
    mut running: Running,
    mut interfaces: Interfaces,
    interrupted: &Arc<AtomicBool>,
) -> Result<(), Failure> {
    let commands = match args.no_interactive {
        true => None,
        false => Some(commands::read().context("reading commands")?),
    };
    interfaces.begin(&running);
    let reporter = Reporter::new(&running);
    if !args.no_start {
        running.begin()?;
    }
    let began = (!args.no_start).then(Instant::now);
    let statuses = running.ports().iter().map(|_| StatusReporter::default()).collect();
    let mut watch = Watch {
        args,
        running,
        interfaces,
        reporter,
        commands,
        began,
        active: Duration::ZERO,
        skipped: Duration::ZERO,
        gap: Duration::ZERO,
        statuses,
        speed: None,
    };
    watch.speed = args.link.or(watch.interfaces.speed());
    let stopped_by = watch.until_stopped(interrupted)?;
    watch.finish(stopped_by)
}

/// A running generator and its state.
struct Watch<'a> {
    args: &'a PktgenArgs,
    running: Running,
    interfaces: Interfaces,
    reporter: Reporter,
    commands: Option<Receiver<ParsedCommand>>,
    /// Start time of sending, while packets are sent.
    began: Option<Instant>,
    /// Duration of sending before that.
    active: Duration,
    /// Time since the start of sending that does not count, because the counters were cleared later.
    skipped: Duration,
    /// Time from the end of sending to the due time of the next packet.
    gap: Duration,
    /// The last reported status of each port.
    statuses: Vec<StatusReporter>,
    /// The link speed in bit/s, for rates that are shares of it.
    speed: Option<f64>,
}

impl Watch<'_> {
    fn until_stopped(&mut self, interrupted: &Arc<AtomicBool>) -> Result<StoppedBy, Failure> {
        let interval = Some(self.args.run.stats_interval).filter(|interval| !interval.is_zero());
        let mut next = interval.map(|interval| Instant::now() + interval);
        loop {
            self.running.tend();
            self.reporter.look(&self.running);
            report_changes(self.running.ports(), &PortNames::default(), &mut self.statuses, |_| true);
            if interrupted.load(Ordering::Relaxed) {
                return Ok(StoppedBy::Signal);
            }
            if !self.running.is_running() {
                return Ok(StoppedBy::Worker);
            }
            if let Some(stopped_by) = self.run_command()? {
                return Ok(stopped_by);
            }
            if self.began.is_some() && self.running.is_done() {
                self.sent_all()?;
                if !self.args.no_start {
                    return Ok(StoppedBy::Count);
                }
            }
            if self.args.run.duration.is_some_and(|duration| self.active() >= duration) {
                return Ok(StoppedBy::Duration);
            }
            let now = Instant::now();
            if let (Some(interval), Some(at)) = (interval, &mut next)
                && now >= *at
            {
                // Missed reports are skipped.
                while *at <= now {
                    *at += interval;
                }
                if !self.report("interval")? {
                    return Ok(StoppedBy::Output);
                }
            }
            let until_next = next.map_or(TICK, |at| at.saturating_duration_since(now));
            std::thread::sleep(until_next.min(TICK));
        }
    }

    /// Returns how long packets have been sent.
    fn active(&self) -> Duration {
        let sending = self.began.map_or(Duration::ZERO, |began| began.elapsed());
        self.active + sending.saturating_sub(self.skipped)
    }

    /// Handles the end of sending after all packets were sent.
    fn sent_all(&mut self) -> Result<(), Failure> {
        self.active += self.running.took().saturating_sub(self.skipped);
        (self.began, self.gap) = (None, self.running.gap());
        Ok(self.running.pause()?)
    }

    /// Waits for packets that were sent but have not arrived.
    fn settle(&mut self) {
        let (began, wait) = (Instant::now(), self.args.wait);
        let settled = self.running.settle(wait, &mut |running: &mut Running| {
            running.tend();
            self.reporter.look(running);
            // A second signal ends the process.
            began.elapsed() < wait
        });
        if let Err(error) = settled {
            tracing::debug!(%error, "some sent packets have not arrived");
        }
    }

    /// Pauses sending.
    fn pause(&mut self) -> Result<(), Failure> {
        self.active = self.active();
        self.began = None;
        Ok(self.running.pause()?)
    }

    /// Executes pending commands. Returns the reason to stop, if any.
    fn run_command(&mut self) -> Result<Option<StoppedBy>, Failure> {
        loop {
            let Some(commands) = &self.commands else { return Ok(None) };
            match commands.try_recv() {
                Err(TryRecvError::Empty) => return Ok(None),
                Ok(ParsedCommand::End) | Err(TryRecvError::Disconnected) => {
                    self.commands = None;
                    // No further command can start sending.
                    if self.began.is_none() {
                        return Ok(Some(StoppedBy::Command));
                    }
                }
                Ok(ParsedCommand::Line(Err(text))) => say(&format!("error: {text}")),
                Ok(ParsedCommand::Line(Ok(Command::Quit))) => return Ok(Some(StoppedBy::Command)),
                Ok(ParsedCommand::Line(Ok(Command::Stats))) => {
                    if !self.report("stats")? {
                        return Ok(Some(StoppedBy::Output));
                    }
                }
                Ok(ParsedCommand::Line(Ok(command))) => match self.follow(command) {
                    Err(Failure::Usage(text)) => say(&format!("error: {text}")),
                    other => other?,
                },
            }
        }
    }

    /// Executes a command.
    ///
    /// # Errors
    /// [`Failure::Usage`] if it is invalid. Nothing has changed then.
    fn follow(&mut self, command: Command) -> Result<(), Failure> {
        let running = &mut self.running;
        let changed = match command {
            Command::Start if self.began.is_some() => Ok(()),
            Command::Start => {
                self.began = Some(Instant::now());
                (self.skipped, self.gap) = (Duration::ZERO, Duration::ZERO);
                running.begin()
            }
            Command::Stop => return self.pause(),
            Command::Clear => {
                // Packets in flight would count as lost and as received.
                if self.began.is_none() {
                    self.settle();
                }
                let running = &mut self.running;
                self.reporter.clear(running);
                self.interfaces.begin(running);
                self.skipped = self.began.map_or(Duration::ZERO, |began| began.elapsed());
                (self.active, self.gap) = (Duration::ZERO, Duration::ZERO);
                Ok(())
            }
            Command::Burst(burst) => running.change(|settings| settings.burst = burst),
            Command::Count(count) => running.change(|settings| settings.count = Some(count)),
            Command::Flows(flows) => running.change(|settings| settings.flows = flows),
            Command::Rate(rate) => match rate.on(self.speed) {
                Ok(rate) => running.change(|settings| settings.rate = rate),
                Err(error) => Err(error),
            },
            Command::Sizes(sizes) => running.change(|settings| settings.sizes = sizes),
            Command::Help => {
                say(HELP);
                Ok(())
            }
            Command::Quit | Command::Stats => Ok(()),
        };
        Ok(changed?)
    }

    /// Prints a report. Returns `false` if the reader has closed the output.
    fn report(&mut self, kind: &'static str) -> anyhow::Result<bool> {
        let report = self.reporter.interval(&self.running, kind);
        let interfaces = self.interfaces.compare(&self.running);
        self.print(&Line { report: &report, interfaces: &interfaces, stopped_by: None, unfinished: None })
    }

    fn finish(mut self, stopped_by: StoppedBy) -> Result<(), Failure> {
        if stopped_by != StoppedBy::Worker {
            self.pause()?;
            self.settle();
        }
        let report = self.reporter.last(&self.running, self.active, self.gap);
        let interfaces = self.interfaces.compare(&self.running);
        let unfinished = self.running.stop();
        if stopped_by != StoppedBy::Output {
            let (stopped_by, unfinished) = (Some(stopped_by), Some(unfinished));
            self.print(&Line { report: &report, interfaces: &interfaces, stopped_by, unfinished })?;
        }
        Ok(ended(stopped_by, unfinished, self.running.ports())?)
    }

    fn print(&self, line: &Line<'_>) -> anyhow::Result<bool> {
        let text = match self.args.run.format {
            Format::Table => tables::report(line, self.args),
            Format::Json => serde_json::to_string(line)? + "\n",
        };
        write(&text)
    }
}
