//! The far end of the streams, the kernel's TCP, and the counters of a window.

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use offcore_stats::{lcore, tsc};

use super::Window;
use super::hosts::Near;
use super::stream::{Phase, bound_waits, read, write};
use crate::machine::CoreTime;
use crate::peer::netns::Netns;
use crate::tcp::link::{STALLED, Side};

/// The far end of the streams.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct Far<'a> {
    pub(in crate::tcp) netns: &'a Netns,
    /// Role of the near end.
    pub(in crate::tcp) side: Side,
    pub(in crate::tcp) near_lcore: usize,
    pub(in crate::tcp) lcore: usize,
    /// Warm-up time of a connection.
    pub(in crate::tcp) settle: Duration,
    /// Time between windows, until the packets of the last connection have left the path.
    pub(in crate::tcp) drain: Duration,
}

impl Far<'_> {
    /// Connects to `near` and returns the result of a window of length `length`.
    pub(in crate::tcp) fn window(self, near: &mut dyn Near, length: Duration) -> Result<Window> {
        let (phase, moved) = (Phase::new(self.drain), AtomicU64::new(0));
        let (address, near_moved) = (near.address(), near.moved());
        // The reading end is counted.
        let counted = if self.side == Side::Send { &moved } else { &*near_moved };
        let far = || {
            lcore::pin(self.lcore)?;
            let stream = TcpStream::connect_timeout(&address, STALLED)
                .with_context(|| format!("connecting to {address}"))?;
            bound_waits(&stream)?;
            match self.side {
                Side::Send => read(&stream, &moved, &phase)?,
                Side::Receive => write(&stream, &moved, &phase)?,
            }
            let _ = stream.shutdown(Shutdown::Both);
            Ok(())
        };
        thread::scope(|scope| {
            let near_end = scope.spawn(|| near.serve(self.near_lcore, &phase));
            let far_end = scope.spawn(|| self.netns.within(far));
            let window = self.watch(counted, &phase, length);
            phase.end();
            let far_end = far_end.join().map_err(|_| anyhow!("the far end has panicked"))?;
            let busy =
                near_end.join().map_err(|_| anyhow!("the near end has panicked"))?.context("near end")?;
            far_end.context("far end")?;
            let window = window?;
            Ok(Window { busy: busy.unwrap_or(window.busy), ..window })
        })
    }

    /// Waits for the first bytes and for the run-in time. Returns the data moved and the core times afterwards.
    fn watch(self, counted: &AtomicU64, phase: &Phase, length: Duration) -> Result<Window> {
        let read = || counted.load(Ordering::Relaxed);
        let wait_for_more = |than: u64| {
            let since = Instant::now();
            while read() == than {
                ensure!(since.elapsed() < STALLED, "nothing has moved for {STALLED:?}");
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        wait_for_more(read())?;
        thread::sleep(self.settle);
        let times = || Ok::<_, anyhow::Error>([CoreTime::of(self.near_lcore)?, CoreTime::of(self.lcore)?]);
        phase.count();
        let (ticks, bytes, before) = (tsc::now(), read(), times()?);
        thread::sleep(length);
        // Extends the window until data has moved, because other programs may use the cores.
        wait_for_more(bytes)?;
        let (ticks, bytes, after) = (tsc::now() - ticks, read() - bytes, times()?);
        let share = |core: usize| {
            let of =
                |time: fn(&CoreTime) -> u64| time(&after[core]).saturating_sub(time(&before[core])) as f64;
            of(|time| time.busy) / of(|time| time.all).max(1.0)
        };
        Ok(Window { bytes, ticks, busy: share(0), far_busy: share(1) })
    }
}
