//! `offcore run`: runs a configuration file. `offcore check` only reads it.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use offcore_config::sections::Pool;
use offcore_config::{Plan, System};
use offcore_flow::Forward;
use offcore_flow::host::apps::{Hosted, Service};
use offcore_flow::switch::{Hosting, Run};

use crate::args::eal::EalArgs;
use crate::args::{Format, Lcores, PoolArgs, RunArgs, duration, interval};
use crate::epping::Streamed;
use crate::failure::Failure;
use crate::output::write;
use crate::switch::{Watching, plan, report, run_switch};
use crate::{copy, gpu, home, switch};

/// The examples of `offcore run --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Check a configuration, then run it:
    offcore check examples/run/copy.toml
    offcore run examples/run/copy.toml

  The same with a report per second, and a stop after a minute:
    offcore run examples/run/copy.toml --stats-interval 1 --duration 60

A file has version = 1, [process], [engines.NAME], [copies], one of [switch],
[copy], [gpu], [tcp] and [epping], and [[port]] for each port. Most keys
correspond to flags of the command of that name. `offcore schema` prints the
JSON Schema; examples/run has a file for each system.

Ctrl-C, SIGTERM or SIGHUP stops the run: packets in flight are completed, and a
final report follows.";

#[derive(Args, Debug)]
pub(crate) struct RunFileArgs {
    /// The configuration file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Seconds between two reports; 0: only the final report [default: 1 on a terminal, else 0]
    #[arg(long, value_name = "SECONDS", value_parser = interval)]
    pub stats_interval: Option<Duration>,

    /// Reports as tables, or as JSON with one object per line
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,

    /// Stop after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub duration: Option<Duration>,

    /// Stop after a second without packets; requires ports with a finite number of packets, such as pcap or gen:count=N
    #[arg(long)]
    pub until_idle: bool,
}

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// The configuration file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

/// Runs a configuration until it is stopped.
pub(crate) fn run(args: &RunFileArgs) -> Result<(), Failure> {
    let plan = read(&args.file)?;
    if args.until_idle {
        if let Run::Forward { mode: Forward::Txonly { .. } | Forward::Flowgen { .. }, .. } = plan.config.run {
            return Err("--until-idle: this forwarding mode never stops sending".to_owned().into());
        }
        plan::check_ports_end(&plan.ports)?;
    }
    prepare(&plan)?;
    let usual = if std::io::stdout().is_terminal() { Duration::from_secs(1) } else { Duration::ZERO };
    let Pool { buffers, buffer, pages } = plan.pool;
    let run = RunArgs {
        lcores: Some(Lcores(plan.config.lcores.clone())),
        pool: PoolArgs {
            mbufs: buffers.unwrap_or(Pool::BUFFERS),
            mbuf_size: buffer.unwrap_or(Pool::BUFFER),
            hugepages: pages.unwrap_or_default(),
        },
        eal: EalArgs { eal: plan.eal.clone() },
        stats_interval: args.stats_interval.unwrap_or(usual),
        format: args.format,
        duration: args.duration,
    };
    let tables = match plan.system {
        System::Switch | System::Tcp | System::Epping(_) => report::tables,
        System::Copy => copy::tables,
        System::Gpu => gpu::tables,
    };
    run_switch(&plan.config, Watching::new(&plan.ports, &run, args.until_idle, tables))?;
    match (&plan.system, &plan.config.run) {
        (System::Epping(tally), Run::Host(Hosting { app: Hosted::Epping(epping), .. })) => {
            let simulated = !plan.config.simulators.is_empty();
            let stream = Streamed { to: epping.to, chunk: epping.chunk, verify: epping.verify, simulated };
            stream.conclude(tally, args.format)
        }
        _ => Ok(()),
    }
}

/// Prints all problems of a file, or that it has none.
pub(crate) fn check(args: &CheckArgs) -> Result<(), Failure> {
    let plan = read(&args.file)?;
    let (file, ports) = (args.file.display(), plan.ports.len());
    let counted = if ports == 1 { "1 port".into() } else { format!("{ports} ports") };
    write(&format!("{file}: instance '{}' with {counted}, no problems\n", plan.name))?;
    Ok(())
}

/// Prints the JSON Schema of files.
pub(crate) fn schema() -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(&offcore_config::schema()).map_err(anyhow::Error::new)?;
    write(&(text + "\n"))?;
    Ok(())
}

fn read(file: &std::path::Path) -> Result<Plan, Failure> {
    offcore_config::read(file).map_err(|problems| Failure::File(problems.to_string()))
}

/// Does what the system needs before it starts.
fn prepare(plan: &Plan) -> Result<(), Failure> {
    match &plan.config.run {
        Run::Pipelines(_) => offcore_gpu::cuda::use_all_queues(),
        Run::Host(Hosting { app: Hosted::Others(serve), .. }) => {
            home::make_way(&serve.path)?;
            switch::ports::raise_fd_limit();
        }
        Run::Host(Hosting { app: Hosted::Service(Service::Http(_), _), .. }) => {
            switch::ports::raise_fd_limit()
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use offcore_config::sections::Section;
    use offcore_flow::SwitchConfig;
    use offcore_flow::dma_map::QueueHalf;
    use offcore_port::spec::PortSpec;

    use super::*;
    use crate::args::{RunArgs, file};
    use crate::cli::lines::{command, examples};
    use crate::cli::{Command, SWITCH_EXAMPLES};
    use crate::{epping, tcp};

    /// A configuration from flags, and the file for it.
    struct Planned {
        config: SwitchConfig,
        ports: Vec<PortSpec>,
        file: String,
    }

    impl Planned {
        fn new(run: &RunArgs, section: &Section, plan: (SwitchConfig, Vec<PortSpec>)) -> Self {
            let (config, ports) = plan;
            let file = file(run, section, &config, &ports).unwrap_or_else(|error| panic!("{error}"));
            Self { config, ports, file }
        }
    }

    fn planned(line: &str) -> Option<Planned> {
        Some(match command(line).unwrap_or_else(|error| panic!("{line}: {error}")) {
            Command::Switch(args) => {
                let section = Section::Switch(plan::section(&args));
                Planned::new(&args.run, &section, (plan::config(&args).unwrap(), plan::ports(&args)))
            }
            Command::Copy(args) => {
                // A file has only the ports that take part.
                let section = Section::Copy(copy::section(&args));
                args.portmask
                    .is_none()
                    .then(|| Planned::new(&args.run, &section, copy::plan(&args).unwrap()))?
            }
            Command::Gpu(args) if args.command.is_none() => {
                let args = &args.pipelines;
                let section = Section::Gpu(Box::new(gpu::section(args)));
                Planned::new(&args.run(), &section, gpu::plan(args).unwrap())
            }
            Command::Tcp(args) => {
                let section = Section::Tcp(Box::new(tcp::section(&args)));
                Planned::new(&args.run, &section, tcp::plan(&args).unwrap())
            }
            Command::Epping(args) => {
                let section = Section::Epping(epping::section(&args).unwrap());
                let (config, ports, _) = epping::plan(&args).unwrap();
                Planned::new(&args.run, &section, (config, ports))
            }
            _ => return None,
        })
    }

    #[test]
    fn printed_files_equal_their_flags() {
        let switch = "offcore switch --port";
        let more = [
            format!("{switch} gen: {switch} impair:loss=1%,rate=1M,tap:t --burst 7 --work-ns 5 --idle sleep")
                .replacen(" offcore switch", "", 1),
            format!("{switch} vhost:/a,queues=2,group=0,mode=0660 --port vhost:/b --dsa-sim 0:profile=vhost,seed=7 --dma \
                     1.txq0*3@dsa-sim0:wq0.1+core:1;rxq1@dsa-sim0:wq0.0 --mode auto --max-latency 20"),
            format!("{switch} gen: --port gen: --forward l2 --vlan 0=trunk:5,7-9,native=3 --fdb \
                     1=02:00:00:00:00:01,locked --ageing 5 --mirror 1:rx=pcap:-,m --mirror 0=pcap:-,m"),
            format!("{switch} dpdk:net_null0,rss=[ip,tcp],args=[a=1,b=2] --forward txonly --txpkts 128 --eth-peer \
                     0,02:00:00:00:00:09"),
            format!("{switch} pcap:1,2,loop --forward copy --no-mac-updating"),
            format!("{switch} tap:[a] --port tap:10 --port tap:on --port dpdk:5,rss=off --port gen:verify=off"),
            format!("{switch} vhost:/a,queues=2 --dma txq0@dmadev:{0}1;txq1@dmadev:{0}2", "a".repeat(36)),
            "offcore tcp --port virtio-user:/s,addr=10.7.0.1/24,addr=fd00::2/64,gw=fd00::1,vlan=7,mtu=1400 --port \
             tap:t,addr=10.0.0.2/24,route=10.1.0.0/16@10.0.0.254 --app http:/srv --lcores 0,1 --congestion bbr \
             --dma txq1*2@core:0 --connections"
                .into(),
            "offcore gpu --port gen: -w graph -g host --work match --patterns /no/file --on-match mark --mark 8 \
             --skip 9 -t 100"
                .into(),
        ];
        let examples = [
            examples(SWITCH_EXAMPLES, 9),
            examples(copy::EXAMPLES, 6),
            examples(gpu::EXAMPLES, 8),
            examples(tcp::EXAMPLES, 6),
            examples(epping::EXAMPLES, 3),
        ];
        let mut compared = 0;
        for line in examples.concat().into_iter().chain(more) {
            let Some(Planned { config, ports, file }) = planned(&line) else { continue };
            let read = match offcore_config::parse(&file, "printed.toml") {
                Ok(read) => read,
                // The files of patterns in examples do not exist, and flags choose a GPU silently.
                Err(problems)
                    if problems.list.iter().all(|problem| {
                        let text = format!("{} {}", problem.key, problem.text);
                        text.contains("gpu.work.patterns") || text.contains("gpu.devices")
                    }) =>
                {
                    continue;
                }
                Err(problems) => panic!("{line}\n{file}\n{problems}"),
            };
            let shown = |ports: &[PortSpec]| ports.iter().map(ToString::to_string).collect::<Vec<_>>();
            let without_dmas: Vec<PortSpec> = ports.into_iter().map(without_dmas).collect();
            assert_eq!(shown(&read.ports), shown(&without_dmas), "{line}\n{file}");
            assert_eq!(
                described(&read.config, &read.ports),
                described(&config, &read.ports),
                "{line}\n{file}"
            );
            compared += 1;
        }
        assert!(compared > 25, "{compared} command lines were compared");
    }

    /// The file names engines instead of channels.
    fn without_dmas(mut spec: PortSpec) -> PortSpec {
        if let PortSpec::Vhost(vhost) = &mut spec {
            vhost.dmas = None;
        }
        spec
    }

    /// Describes a configuration, with the channels of every queue of these ports.
    fn described(config: &SwitchConfig, ports: &[PortSpec]) -> String {
        let mut channels = Vec::new();
        for (index, port) in ports.iter().enumerate() {
            let makes_copies = port.offloads() || !matches!(config.run, Run::Forward { .. } | Run::Bridge(_));
            let queues = match config.run {
                Run::Host(_) => config.lcores.len() as u16,
                _ => port.queues(),
            };
            for queue in (0..queues).filter(|_| makes_copies) {
                for half in [QueueHalf::Rx, QueueHalf::Tx] {
                    let (found, weight) =
                        (config.dma.channels(index, half, queue), config.dma.weight(index, half, queue));
                    channels.push(format!("{index} {half:?} {queue}: {found:?} * {weight}"));
                }
            }
        }
        let simulators: Vec<_> =
            config.simulators.iter().map(|device| (device.number, &device.text)).collect();
        let simulators = format!("{simulators:?}");
        let rest = SwitchConfig {
            dma: Default::default(),
            simulators: Vec::new(),
            names: Default::default(),
            ..config.clone()
        };
        format!("{rest:#?} {simulators} {channels:#?}")
    }

    #[test]
    fn help_examples_are_accepted() {
        for line in examples(EXAMPLES, 3) {
            assert!(matches!(command(&line), Ok(Command::Run(_) | Command::Check(_))), "{line}");
        }
    }
}
