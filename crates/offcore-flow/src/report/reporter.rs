//! The reporter: reads the statistics page and the state of a host.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use offcore_port::stats::PortNames;
use offcore_stats::page::{PageError, Reader, Snapshot};
use offcore_stats::tsc;

use super::decode::{self, Seen};
use super::{ConnectionReport, IfaceReport, Report};
use crate::host::watched::{HostState, MOST};

/// Creates reports from a statistics page.
#[derive(Debug)]
pub struct Reporter {
    reader: Reader,
    started: Instant,
    /// Last check before any packet was counted.
    last_idle: Instant,
    /// Number of packets, and the time of the check that saw it change.
    last_traffic: (u64, Instant),
    last: Option<(Instant, Vec<Snapshot>)>,
    names: PortNames,
    host: Arc<HostState>,
}

impl Reporter {
    /// Creates a reporter for `reader`'s page, whose ports have these names, and a host's state.
    pub fn new(reader: Reader, names: PortNames, host: Arc<HostState>) -> Self {
        let started = Instant::now();
        Self { reader, started, last_idle: started, last_traffic: (0, started), last: None, names, host }
    }

    /// Checks whether packets arrive or leave. Call it regularly: the rates of the first report cover only the
    /// time with traffic.
    ///
    /// # Errors
    /// If the page is damaged.
    pub fn look(&mut self) -> Result<(), PageError> {
        let now = Instant::now();
        let snapshot = self.reader.read()?;
        match snapshot.iter().map(decode::packets).sum::<u64>() {
            0 => self.last_idle = now,
            packets if packets != self.last_traffic.0 => self.last_traffic = (packets, now),
            _ => {}
        }
        Ok(())
    }

    /// Returns the current counters. Rates cover the time since the last report. In the first report, they cover the
    /// time in which [packets moved](Self::look), or the whole time if none did.
    ///
    /// # Errors
    /// If the page is damaged.
    pub fn report(&mut self, kind: &'static str) -> Result<Report, PageError> {
        let now = Instant::now();
        let snapshot = self.reader.read()?;
        let elapsed = match &self.last {
            Some((at, _)) => now - *at,
            None if self.last_traffic.0 > 0 => self.last_traffic.1.saturating_duration_since(self.last_idle),
            None => now - self.last_idle,
        };
        let before = self.last.as_ref().map_or(&[][..], |(_, blocks)| blocks);
        let mut report = Report {
            report: kind,
            seconds: (now - self.started).as_secs_f64(),
            over_seconds: elapsed.as_secs_f64(),
            tsc_hz: tsc::hz(),
            ..Report::default()
        };
        for block in &snapshot {
            let previous = before.iter().find(|other| other.is_same(block));
            decode::add(&mut report, &Seen { block, previous, elapsed, names: &self.names });
        }
        let interfaces = self.host.interfaces.lock().unwrap_or_else(PoisonError::into_inner);
        let interfaces = interfaces.iter().enumerate();
        report.interfaces =
            interfaces.map(|(number, info)| IfaceReport::new(self.names.of(number), info)).collect();
        report.connections = self.host.connections.as_ref().map(|workers| {
            let mut all = Vec::new();
            for connections in workers {
                let connections = connections.lock().unwrap_or_else(PoisonError::into_inner);
                all.extend(connections.iter().map(ConnectionReport::from));
            }
            all.truncate(MOST);
            all
        });
        self.last = Some((now, snapshot));
        Ok(report)
    }
}
