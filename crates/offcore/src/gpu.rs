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

use std::time::Duration;

use offcore_config::names::Names;
use offcore_config::sections::{Gpu, Section, Work};
use offcore_dma::Mode;
use offcore_flow::SwitchConfig;
use offcore_flow::switch::{Run, Workload};
use offcore_mem::BURST;
use offcore_port::spec::PortSpec;

use crate::args::Lcores;
use crate::args::flags::by_flag;
use crate::failure::Failure;
use crate::switch::{Measured, Watching, plan, run_switch};

pub(crate) use args::{EXAMPLES, GpuArgs, GpuCommand, PipelineArgs};
pub(crate) use report::tables;

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
    let (mut config, ports) = plan(args)?;
    if args.print.print(&args.run(), &Section::Gpu(Box::new(section(args))), &config, &ports)? {
        return Ok(());
    }
    offcore_gpu::cuda::use_all_queues();
    if let Run::Pipelines(working) = &mut config.run {
        if matches!(working.workload, Workload::Device(_)) && working.devices.is_empty() {
            working.devices = vec![offcore_gpu::devices::default().map_err(anyhow::Error::new)?];
        }
        let patterns = section(args).read_patterns(Names::Flags);
        working.patterns = patterns.map_err(|refusal| anyhow::anyhow!(refusal.text))?;
    }
    let measured = (args.packets > 0).then_some(Measured { packets: args.packets, warm_up: args.warm_up });
    let run = args.run();
    let watching = Watching::new(&ports, &run, args.until_idle, tables);
    run_switch(&config, Watching { measured, ..watching })
}

/// Returns the configuration, before devices and files are opened, and the ports with their number of queues.
pub(crate) fn plan(args: &PipelineArgs) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    let mut ports = plan::with_queues(&args.at.ports, args.pipelines, "--pipelines")?;
    let pipelines: usize = ports.iter().map(|port| usize::from(port.queues())).sum();
    let elsewhere = args.steer.as_ref().map(|_| ports.len());
    ports.extend(args.steer.clone());
    plan::check_duplicates(&ports)?;
    if args.until_idle {
        plan::check_ports_end(&ports)?;
    }
    let pages = args.run.pool.hugepages;
    let working = section(args).working(Names::Flags, elsewhere, pages).map_err(|refusal| refusal.text)?;
    let memory = working.memory;
    let run = Run::Pipelines(working);
    let dma = plan::dma_map(None, &ports)?;
    let mode = if dma.entries.is_empty() { Mode::Cpu } else { Mode::Offload };
    let lcores = match &args.run.lcores {
        Some(Lcores(given)) => given.clone(),
        None => section(args).lcores(pipelines).map_err(|error| format!("--lcores: {error}"))?,
    };
    let config = SwitchConfig { run, mode, dma, lcores, burst: BURST, ..SwitchConfig::default() };
    config.check(&ports).map_err(by_flag)?;
    Gpu::check_ports(Names::Flags, memory, &ports).map_err(|refusal| refusal.text)?;
    Ok((config, ports))
}

/// Returns the section of a configuration file with these flags.
pub(crate) fn section(args: &PipelineArgs) -> Gpu {
    Gpu {
        workload: Some(args.workload),
        devices: args.devices.clone().map_or(Vec::new(), |devices| devices.0),
        memory: args.memory,
        work: Work {
            kind: Some(args.work),
            swap: args.no_swap.then_some(false),
            patterns: args.patterns.clone(),
            on_match: args.on_match,
            mark: args.mark.map(|dscp| dscp as u8),
            steer: args.steer.as_ref().map(ToString::to_string),
            skip: args.skip.map(|bytes| bytes as u32),
            split_at: args.split_at.or(args.split.then_some(args::SPLIT_AT)),
            packet_time: (args.packet_time > 0).then(|| Duration::from_nanos(args.packet_time as u64)),
        },
        topology: Some(args.port_topology),
        burst: Some(args.burst),
        burst_timeout: Some(Duration::from_micros(args.burst_timeout as u64)),
        slots: Some(args.slots),
        blocks: args.blocks.map(|blocks| blocks as u32),
        threads: args.threads.map(|threads| threads as u32),
        timeout: args.timeout.map(|ms| Duration::from_millis(ms as u64)),
        profile: args.profile,
    }
}
