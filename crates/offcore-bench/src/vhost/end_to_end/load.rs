//! The load of an end-to-end measurement: a closed loop with [`WINDOW`] packets in flight.

use std::time::Duration;

use anyhow::{Result, bail};
use offcore_stats::tsc;

use super::back_end::BackEnd;
use super::paired::{Load, Window};
use crate::guests::guest::Seen;
use crate::vhost::round_trips::{RoundTrips, WINDOW};

/// Number of packets that are checked byte by byte before the timed part.
const ALL_CHECKED: u64 = 4096;

impl Load for RoundTrips {
    /// Keeps packets circulating. When it returns, no packet is in flight. Fails also if packets come back out of order
    /// or changed, or stop coming back.
    fn window(&mut self, settle: Duration, length: Duration, _: &mut dyn BackEnd) -> Result<Window> {
        if self.seen().received == 0 {
            self.check_all(true);
            run_round_trips(self, 0, ALL_CHECKED)?;
            self.check_all(false);
        }
        run_round_trips(self, tsc::ticks(settle), 0)?;
        let window = run_round_trips(self, tsc::ticks(length), 0)?;
        self.gather_in(self.timeout(), Self::receive)?;
        Ok(window)
    }

    fn seen(&self) -> Seen {
        self.seen()
    }

    fn lost(&self) -> u64 {
        self.lost()
    }
}

/// Keeps [`WINDOW`] packets in flight for `ticks` and until `packets` packets have come back.
fn run_round_trips(load: &mut RoundTrips, ticks: u64, packets: u64) -> Result<Window> {
    let timeout = tsc::ticks(load.timeout());
    load.send(WINDOW - load.outstanding())?;
    let start = tsc::now();
    let (mut last, mut moved) = (start, start);
    let mut window = Window { received: 0, ticks: 0, busy: 0 };
    while window.ticks <= ticks || window.received < packets {
        let received = load.receive()?;
        if received > 0 {
            load.send(WINDOW - load.outstanding())?;
        }
        let now = tsc::now();
        if received > 0 {
            window.received += received as u64;
            window.busy += now - last;
            moved = now;
        } else if now - moved > timeout {
            let waited = tsc::to_ns(now - moved) / 1e9;
            bail!("no packet has come back for {waited:.1} s; {} are on their way", load.outstanding());
        }
        last = now;
        window.ticks = now - start;
    }
    Ok(window)
}
