//! `offcore pktgen`: sends packets, receives them again, and reports losses and latencies.
//!
//! * [`args`]: the flags, [`plan`]: the configuration, which rejects contradictions,
//! * [`commands`]: commands while it runs,
//! * [`interfaces`]: the kernel's counters next to the ports' own,
//! * `run`: a run until its end, [`throughput`]: `--rfc2544`,
//! * [`tables`]: reports as text.

mod args;
mod commands;
mod interfaces;
mod plan;
mod run;
mod tables;
mod throughput;

use offcore_flow::{DmaMap, SwitchError, check_lcores, pktgen};

use crate::args::Lcores;
use crate::bench::check_plot;
use crate::failure::Failure;
use crate::output::say;
use crate::signals::stop_on_signals;
use crate::switch::{claims, ports};

pub(crate) use args::{EXAMPLES, PktgenArgs};
use interfaces::Interfaces;

/// Opens the ports and runs until the end.
pub(crate) fn run(args: &PktgenArgs) -> Result<(), Failure> {
    plan::check(args)?;
    if let Some(Lcores(lcores)) = &args.run.lcores {
        check_lcores(lcores)?;
    }
    check_plot(args.plot.as_deref())?;
    let payload = plan::capture(args)?;
    let interrupted = stop_on_signals().map_err(|error| anyhow::anyhow!("handling signals: {error}"))?;
    args.run.eal.configure(&args.at.ports, &DmaMap::default())?;
    let (pool, line) = args.run.pool.open().map_err(anyhow::Error::new)?;
    say(&line);
    if let Some(path) = &args.pcap {
        claims::check_read(&args.at.ports, path).map_err(SwitchError::from)?;
    }
    let (ports, _) = ports::open(&args.at.ports, pool, None).map_err(SwitchError::from)?;
    let interfaces = Interfaces::open(&args.at.ports, &ports);
    let config = plan::config(args, payload, &ports, interfaces.speed())?;
    let running = pktgen::start(config, ports, pool)?;
    if args.rfc2544 {
        throughput::run(args, running, interfaces, &interrupted)
    } else {
        run::run(args, running, interfaces, &interrupted)
    }
}
