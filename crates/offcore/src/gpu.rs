//! `offcore gpu`: l2fwd-nv's pipelines. One lcore receives packets and collects them in bursts, a GPU or the CPU
//! processes them, another lcore sends them.
//!
//! * [`args`]: the flags, with l2fwd-nv's letters,
//! * [`report`]: the reports as tables,
//! * [`doctor`]: `offcore gpu doctor`, [`check`]: `offcore gpu check`, [`costs`]: `offcore gpu costs`.

mod args;
mod check;
mod costs;
mod doctor;
mod report;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use offcore_flow::SwitchConfig;
use offcore_flow::pipeline::OnHit;
use offcore_flow::switch::{Run, Working, Workload};
use offcore_gpu::device::Launch;
use offcore_gpu::device::Memory;
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_mem::BURST;
use offcore_port::spec::PortSpec;
use offcore_stats::lcore;

use crate::args::flags::by_flag;
use crate::args::{Lcores, name};
use crate::failure::Failure;
use crate::switch::{Measured, Watching, plan, run_switch};
use args::{DeviceList, OnMatch, WorkKind};

pub(crate) use args::{EXAMPLES, GpuArgs, GpuCommand, PipelineArgs};

/// Runs pipelines until the run ends, or a subcommand.
pub(crate) fn run(args: &GpuArgs) -> Result<(), Failure> {
    match &args.command {
        Some(GpuCommand::Doctor(args)) => doctor::run(args),
        Some(GpuCommand::Check(args)) => check::run(args),
        Some(GpuCommand::Costs(args)) => costs::run(args),
        None => run_pipelines(&args.pipelines),
    }
}

fn run_pipelines(args: &PipelineArgs) -> Result<(), Failure> {
    offcore_gpu::cuda::use_all_queues();
    let (mut config, ports) = plan(args)?;
    if let Run::Pipelines(working) = &mut config.run {
        if matches!(working.workload, Workload::Device(_)) && working.devices.is_empty() {
            working.devices = vec![offcore_gpu::devices::default().map_err(anyhow::Error::new)?];
        }
        if let Some(file) = &args.patterns {
            let patterns = Patterns::read(file).map_err(|error| anyhow::anyhow!("--patterns: {error}"))?;
            working.patterns = Some(Arc::new(patterns));
        }
    }
    let measured = (args.packets > 0).then_some(Measured { packets: args.packets, warm_up: args.warm_up });
    let run = args.run();
    let watching = Watching::new(&ports, &run, args.until_idle, report::tables);
    run_switch(&config, Watching { measured, ..watching })
}

/// Returns the configuration, before devices and files are opened, and the ports with their number of queues.
fn plan(args: &PipelineArgs) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    let mut ports = plan::with_queues(&args.at.ports, args.pipelines, "--pipelines")?;
    let pipelines: usize = ports.iter().map(|port| usize::from(port.queues())).sum();
    let elsewhere = args.steer.as_ref().map(|_| ports.len());
    ports.extend(args.steer.clone());
    plan::check_duplicates(&ports)?;
    if args.until_idle {
        plan::check_ports_end(&ports)?;
    }
    let working = working(args, elsewhere)?;
    check_timeout(&working)?;
    let memory = working.memory;
    let run = Run::Pipelines(working);
    let config =
        SwitchConfig { run, lcores: lcores(args, pipelines)?, burst: BURST, ..SwitchConfig::default() };
    config.check(&ports).map_err(by_flag)?;
    check_ports(memory, &ports)?;
    Ok((config, ports))
}

/// Refuses ports whose packets cannot be in device memory.
fn check_ports(memory: Memory, ports: &[PortSpec]) -> Result<(), String> {
    if memory != Memory::Direct {
        return Ok(());
    }
    match ports.iter().find(|port| !matches!(port, PortSpec::Dpdk(_))) {
        Some(other) => Err(format!(
            "--memory direct has packets in the device's memory, which {other} cannot access: expected only ports \
             dpdk:, of network cards under mlx5_core"
        )),
        None => Ok(()),
    }
}

/// Returns the pipelines' configuration from the flags.
fn working(args: &PipelineArgs, elsewhere: Option<usize>) -> Result<Working, String> {
    let by_device = matches!(args.workload, Workload::Device(_));
    let name = args.workload.name();
    let for_device = [
        ("--device", args.devices.is_some()),
        ("--memory", args.memory.is_some()),
        ("--profile", args.profile),
        ("--blocks", args.blocks.is_some()),
        ("--threads", args.threads.is_some()),
        ("--timeout", args.timeout.is_some()),
    ];
    if let Some((flag, _)) = for_device.into_iter().find(|&(_, given)| given && !by_device) {
        return Err(format!(
            "{flag} is for a device, and --workload {name} uses none: add -w kernel, persistent or graph"
        ));
    }
    if args.blocks.is_some() && args.workload == Workload::Device(Launch::Kernel) {
        return Err(format!("--blocks is for --workload persistent or graph, found {name}: leave it out"));
    }
    if args.workload == Workload::None {
        let nothing = [
            ("--work", args.work != WorkKind::Swap),
            ("--packet-time", args.packet_time > 0),
            ("--no-swap", args.no_swap),
        ];
        if let Some((flag, _)) = nothing.into_iter().find(|&(_, given)| given) {
            return Err(format!(
                "{flag} with --workload none, which does no work: add -w cpu, kernel, persistent or graph"
            ));
        }
    }
    let is_match = args.work == WorkKind::Match;
    match (is_match, &args.patterns) {
        (true, None) => return Err("--work match needs --patterns FILE, with one pattern per line".into()),
        (false, Some(file)) => {
            return Err(format!("--patterns {} is for --work match: add it", file.display()));
        }
        _ => {}
    }
    let swap = !args.no_swap;
    if !swap && args.work == WorkKind::Swap {
        return Err(
            "--no-swap with --work swap: nothing would be done; use -w none, or another --work".into()
        );
    }
    let default = Working::default();
    let (memory, blocks) = for_work(args, &default);
    Ok(Working {
        topology: args.port_topology,
        workload: args.workload,
        devices: args.devices.clone().map_or(Vec::new(), |devices| devices.0),
        memory,
        kind: match args.work {
            WorkKind::Swap => Kind::Nothing,
            WorkKind::Crc32c => Kind::Crc32c,
            WorkKind::Checksum => Kind::Checksum,
            WorkKind::Match => Kind::Match,
        },
        swap,
        skip: args.skip.map_or(default.skip, |bytes| bytes as u32),
        split_at: split_at(args)?,
        forced_ns: args.packet_time as u32,
        patterns: None,
        burst: args.burst,
        burst_timeout: Duration::from_micros(args.burst_timeout as u64),
        slots: args.slots,
        blocks,
        threads: args.threads.map_or(default.threads, |threads| threads as u32),
        timeout: args.timeout.map_or(default.timeout, |ms| Duration::from_millis(ms as u64)),
        on_hit: on_hit(args, is_match)?,
        elsewhere,
        hugepages: args.run.pool.hugepages,
        profile: args.profile,
    })
}

/// Returns the location of packets during processing, and the number of blocks. A GPU that reads payloads uses its own
/// memory, so that they cross the bus once, and 32 blocks, as for the figures in docs/gpu.md that compare with a core.
/// Fewer blocks and host memory have not been measured in that comparison. The host device's blocks are threads, so a
/// small number is best.
fn for_work(args: &PipelineArgs, default: &Working) -> (Memory, u32) {
    let is_host = |devices: &DeviceList| devices.0.iter().any(|device| device == offcore_gpu::host::HOST);
    let on_gpu = matches!(args.workload, Workload::Device(_)) && !args.devices.as_ref().is_some_and(is_host);
    let by_work = match args.work != WorkKind::Swap && on_gpu {
        true => (Memory::Gpu, 32),
        false => (default.memory, default.blocks),
    };
    (args.memory.unwrap_or(by_work.0), args.blocks.map_or(by_work.1, |blocks| blocks as u32))
}

/// Refuses a forced time that makes a burst take longer than the device's timeout.
fn check_timeout(working: &Working) -> Result<(), String> {
    let Working { threads, timeout, burst, forced_ns, .. } = working;
    let forced = burst.div_ceil(*threads as usize) as u32 * Duration::from_nanos((*forced_ns).into());
    if matches!(working.workload, Workload::Device(_)) && forced >= *timeout {
        return Err(format!(
            "--packet-time {forced_ns}: {threads} threads take {} ms for a burst of {burst} packets, longer than --timeout \
             {} ms: raise that, or use smaller bursts",
            forced.as_millis(),
            timeout.as_millis()
        ));
    }
    Ok(())
}

fn split_at(args: &PipelineArgs) -> Result<Option<usize>, String> {
    if args.split_at.is_none() && !args.split {
        return match args.skip {
            Some(_) if args.work == WorkKind::Swap => Err(
                "--skip is for --work crc32c, checksum or match, which read payload: add one, or leave --skip out".into(),
            ),
            _ => Ok(None),
        };
    }
    if args.skip.is_some() {
        return Err("--skip and --split: the payload begins where packets are split; leave --skip out".into());
    }
    Ok(Some(args.split_at.unwrap_or(args::SPLIT_AT)))
}

/// Returns the action for packets with a match.
fn on_hit(args: &PipelineArgs, is_match: bool) -> Result<OnHit, String> {
    if let (Some(_), false) = (args.on_match, is_match) {
        return Err("--on-match is for --work match: add it, and --patterns FILE".into());
    }
    if args.mark.is_some() && args.on_match != Some(OnMatch::Mark) {
        return Err("--mark is for --on-match mark: add it".into());
    }
    match (args.on_match, &args.steer) {
        (None | Some(OnMatch::Steer), Some(_)) if is_match => Ok(OnHit::Steer),
        (None, Some(_)) => Err("--steer is for --work match: add it, and --patterns FILE".into()),
        (Some(OnMatch::Steer), None) => {
            Err("--on-match steer needs --steer SPEC: the port that matching packets are sent to".into())
        }
        (Some(other), Some(_)) => Err(format!("--steer is for --on-match steer, found {}", name(&other))),
        (Some(OnMatch::Drop), None) => Ok(OnHit::Drop),
        (Some(OnMatch::Only), None) => Ok(OnHit::Only),
        (Some(OnMatch::Mark), None) => Ok(OnHit::Mark(args.mark.unwrap_or(args::DSCP) as u8)),
        (None | Some(OnMatch::Pass), None) => Ok(OnHit::Pass),
    }
}

/// Returns two lcores per pipeline if enough are available. Otherwise pipelines share them.
fn lcores(args: &PipelineArgs, pipelines: usize) -> Result<Vec<usize>, String> {
    if let Some(Lcores(given)) = &args.run.lcores {
        return Ok(given.clone());
    }
    let mut available = lcore::available().map_err(|error| format!("--lcores: {error}"))?;
    let wanted = 2 * pipelines.max(1);
    // The launching thread gets its own core if enough are available.
    let keeps = usize::from(matches!(args.workload, Workload::Device(Launch::Kernel | Launch::Graph)));
    available.truncate(wanted.min(available.len().saturating_sub(keeps).max(2)));
    if available.len() > 1 {
        available.truncate(available.len() / 2 * 2);
    }
    Ok(available)
}
