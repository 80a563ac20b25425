//! One-time advice if a host's counters show a peer whose settings cannot work.

use std::time::{Duration, Instant};

use offcore_flow::report::{Report, Reporter};

use crate::output::say;

/// Interval between two checks of the counters.
const EVERY: Duration = Duration::from_secs(1);

/// Checks the counters of a host until advice was given.
pub(super) struct Advice {
    /// `None` when no further checks are necessary.
    reporter: Option<Reporter>,
    due: Instant,
}

impl Advice {
    pub(super) fn new(reporter: Reporter) -> Self {
        Self { reporter: Some(reporter), due: Instant::now() }
    }

    /// Gives advice if a check is due `now`.
    pub(super) fn look(&mut self, now: Instant) -> anyhow::Result<()> {
        if now >= self.due {
            self.due = now + EVERY;
            self.tell()?;
        }
        Ok(())
    }

    /// Checks and gives advice, whenever the last check was.
    pub(super) fn tell(&mut self) -> anyhow::Result<()> {
        let Some(reporter) = &mut self.reporter else { return Ok(()) };
        let report = reporter.report("advice")?;
        let text = advice(&report);
        if let Some(text) = &text {
            say(text);
        }
        // A switch has no host and never gets one.
        if text.is_some() || report.tcp.is_empty() {
            self.reporter = None;
        }
        Ok(())
    }
}

/// Returns advice about packets without computed checksums. In this case pings are answered, but TCP does not work.
fn advice(report: &Report) -> Option<String> {
    let drops = report.tcp.iter().flat_map(|host| &host.drops);
    let open: u64 = drops.filter(|(reason, _)| reason == "open_checksum").map(|(_, count)| count).sum();
    (open > 0).then(|| {
        format!(
            "warning: packets are dropped, {open} so far, whose sender left the checksum to its interface, which has not \
             computed it: `ethtool -K INTERFACE tx off` there helps, for instance on the other end of a veth pair"
        )
    })
}

#[cfg(test)]
mod tests {
    use offcore_flow::report::TcpReport;

    use super::*;

    #[test]
    fn partial_checksum_drops_name_their_cause() {
        let host = |reason: &str| TcpReport { drops: vec![(reason.into(), 12)], ..TcpReport::default() };
        let told = |hosts: Vec<TcpReport>| advice(&Report { tcp: hosts, ..Report::default() });
        assert_eq!(told(vec![host("checksum")]), None);
        let text = told(vec![host("checksum"), host("open_checksum")]).unwrap();
        assert!(text.contains(", 12 so far,") && text.contains("ethtool -K INTERFACE tx off"), "{text}");
    }
}
