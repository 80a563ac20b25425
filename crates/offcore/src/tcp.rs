//! `offcore tcp`: a TCP/IP host on ports, with a small application.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use offcore_config::ServiceSpec;
use offcore_config::iface::{HostPort, check_addresses};
use offcore_config::names::Names;
use offcore_config::sections::{Section, Tcp};
use offcore_dma::Mode;
use offcore_flow::host::apps::{Hosted, Service};
use offcore_flow::switch::{Hosting, Run};
use offcore_flow::{Idle, SwitchConfig};
use offcore_mem::BURST;
use offcore_port::spec::PortSpec;
use offcore_tcp::proto::Algorithm;
use rustix::process::Pid;

use crate::args::flags::by_flag;
use crate::args::{EngineArgs, PrintArgs, RunArgs, named, within};
use crate::failure::Failure;
use crate::home;
use crate::switch::{Watching, plan, report, run_switch};

/// The flags for applications in other processes. The parser ignores `requires = "serve"` if `--app` is given, because
/// `--app` conflicts with `--serve`.
const SERVE_FLAGS: [&str; 5] = ["serve", "allow_uid", "app_memory", "app_connections", "parent"];

/// The examples of `offcore tcp --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  Measure the cost of a segment, with copies by the core and by an engine. No
  root, hugepages or hardware needed:
    offcore tcp --demo
  It takes about 20 seconds on an idle machine, and shows its progress.
  --quick is shorter and less accurate.

  Run a host with an echo service. The kernel reaches it through the new
  interface tap0; as root:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --app echo
  Then, in another terminal:
    ip addr add 10.0.0.1/24 dev tap0
    ping 10.0.0.2
    nc 10.0.0.2 7

  Run a sink, with copies by a helper thread on lcore 1, IPv4 and IPv6, and a
  gateway:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24,addr=fd00::2/64,gw=10.0.0.1 \\
      --app sink:5001 --dma 'rxq0@core:1;txq0@core:1' --mode offload

  Use two lcores, with a queue for each:
    offcore tcp --port tap:tap0,queues=2,addr=10.0.0.2/24 --lcores 0,1

  Serve the files of a directory by HTTP on port 8080; the worker sleeps while
  it is idle:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --app http:/srv/www:8080 \\
      --idle sleep

  Serve applications in other processes of root and of user 33, which attach to
  a socket:
    offcore tcp --port tap:tap0,addr=10.0.0.2/24 --idle sleep \\
      --serve /run/offcore/stack.sock --allow-uid 33

A port is written as in `offcore switch --help`, plus addr=ADDRESS/LENGTH (once
or more), addr=dhcp, addr=slaac, gw=ADDRESS, route=NETWORK/LENGTH@GATEWAY (once
or more), vlan=NUMBER, mtu=BYTES and mac=ADDRESS. The MTU is that of the port's
interface, limited by mtu=. The host's Ethernet address is the port's by
default, except on a TAP port, whose interface address belongs to the kernel.
rxqN and txqN name the copies of the Nth lcore, counted from 0: from packets to
receive buffers and from send buffers to packets. Each flow belongs to one
lcore. For a port without multi-buffer packets a segment's payload fills one
buffer: more than 1792 bytes need a larger --mbuf-size.";

/// The flags of `offcore tcp`.
#[derive(Args, Debug)]
pub(crate) struct TcpArgs {
    /// A port with its addresses, as KIND:ARGS,addr=10.0.0.2/24[,gw=10.0.0.1]; once for each port
    #[arg(long = "port", value_name = "SPEC", required = true)]
    pub ports: Vec<HostPort>,

    /// Lcores, packet buffers, reports.
    #[command(flatten)]
    pub run: RunArgs,

    /// Copy engines.
    #[command(flatten)]
    pub engines: EngineArgs,

    /// The service: echo, sink, source or http:DIR, optionally with a colon and another port [ports: 7, 9, 19, 80]
    #[arg(long, value_name = "APP", default_value = "echo", conflicts_with_all = SERVE_FLAGS)]
    pub app: ServiceSpec,

    /// Instead of --app: serves applications in other processes, which attach to a socket at this path
    #[arg(long, value_name = "PATH")]
    pub serve: Option<PathBuf>,

    /// Admits processes of the user with this number, in addition to the stack's user and root; once or more
    #[arg(long, value_name = "UID", requires = "serve", value_parser = uid)]
    pub allow_uid: Vec<u32>,

    /// Maximum memory in MiB for the data of one application's connections [default: 256]
    #[arg(long, value_name = "MIB", requires = "serve", value_parser = within(4..=65_536))]
    pub app_memory: Option<usize>,

    /// Maximum number of connections, datagram sockets and listeners of an application; a listener counts twice
    /// [default: 65536]
    #[arg(long, value_name = "N", requires = "serve", value_parser = within(1..=1_048_576))]
    pub app_connections: Option<usize>,

    /// Ends when this parent process has ended and no application is left, and removes the socket's directory. Set by
    /// `offcore exec`
    #[arg(long, hide = true, value_name = "PID", requires = "serve", value_parser = clap::value_parser!(i32).range(1..))]
    pub parent: Option<i32>,

    /// The copy mode; auto chooses by measurements [default: offload if a queue is mapped, else cpu]
    #[arg(long, value_name = "MODE", value_parser = named::<Mode>())]
    pub mode: Option<Mode>,

    /// Adds a table of up to 1000 connections to reports
    #[arg(long)]
    pub connections: bool,

    /// Congestion control of connections, unless an application sets another one (TCP_CONGESTION)
    #[arg(long, value_name = "NAME", default_value = "cubic", value_parser = named::<Algorithm>())]
    pub congestion: Algorithm,

    /// Behaviour of an idle worker: poll, or sleep until an event
    #[arg(long, value_name = "WHAT", default_value = "poll", value_parser = named::<Idle>())]
    pub idle: Idle,

    #[command(flatten)]
    pub print: PrintArgs,
}

/// Parses a user ID.
fn uid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| {
        format!("expected a user's number, such as 33: `id -u {text}` prints the number of a name")
    })
}

/// Runs the host until it is stopped.
///
/// # Errors
/// [`Failure::Usage`] for flags that contradict each other, [`Failure::Failed`] for other errors.
pub(crate) fn run(args: &TcpArgs) -> Result<(), Failure> {
    let (config, ports) = plan(args)?;
    if args.print.print(&args.run, &Section::Tcp(Box::new(section(args))), &config, &ports)? {
        return Ok(());
    }
    if let Some(path) = &args.serve {
        home::make_way(path)?;
    }
    // Files that are sent need descriptors, and so does each session of another process.
    if args.serve.is_some() || matches!(args.app.service, Service::Http(_)) {
        crate::switch::ports::raise_fd_limit();
    }
    let watching = Watching::new(&ports, &args.run, false, report::tables);
    let result = run_switch(&config, Watching { parent: args.parent.and_then(Pid::from_raw), ..watching });
    if let (Some(_), Some(directory)) = (args.parent, args.serve.as_deref().and_then(Path::parent)) {
        let _ = fs::remove_dir(directory);
    }
    result
}

pub(crate) fn plan(args: &TcpArgs) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    let app = section(args).app(Names::Flags).map_err(|refusal| refusal.text)?;
    let (mut config, ports) = host(&args.ports, app, &args.run, &args.engines, args.mode)?;
    if let Run::Host(hosting) = &mut config.run {
        hosting.connections = args.connections;
        hosting.congestion = args.congestion;
    }
    Ok((SwitchConfig { idle: args.idle, ..config }, ports))
}

/// Returns the section of a configuration file with these flags.
pub(crate) fn section(args: &TcpArgs) -> Tcp {
    Tcp {
        service: args.serve.is_none().then(|| args.app.clone()),
        serve: args.serve.clone(),
        allow: args.allow_uid.clone(),
        memory_per_application: args.app_memory.map(|mib| mib << 20),
        connections_per_application: args.app_connections,
        congestion: Some(args.congestion),
        report_connections: args.connections,
        ..Tcp::default()
    }
}

/// Returns the configuration of a host with an application.
pub(crate) fn host(
    ports: &[HostPort],
    app: Hosted,
    run: &RunArgs,
    engines: &EngineArgs,
    mode: Option<Mode>,
) -> Result<(SwitchConfig, Vec<PortSpec>), String> {
    check_addresses(ports)?;
    let ifaces = ports.iter().map(|port| port.iface.clone()).collect();
    let ports: Vec<PortSpec> = ports.iter().map(|port| port.spec.clone()).collect();
    plan::check_duplicates(&ports)?;
    let dma = plan::dma_map(engines.dma.clone(), &ports)?;
    plan::check_mode(mode, &dma)?;
    if let Some(port) = dma.entries.iter().find_map(|entry| entry.port.filter(|port| *port > 0)) {
        return Err(format!(
            "--dma, or dmas=[...] on --port: found a queue of port {port}, expected rxqN or txqN without a port, which \
             stands for the copies of the host's Nth lcore on all ports"
        ));
    }
    let mapped = !dma.entries.is_empty();
    let lcores = match &run.lcores {
        Some(_) => plan::lcores(run.lcores.as_ref(), &engines.dsa_sims, &dma)?,
        None => plan::lcores(None, &engines.dsa_sims, &dma)?.into_iter().take(1).collect(),
    };
    let config = SwitchConfig {
        run: Run::Host(Hosting { ifaces, app, congestion: Algorithm::default(), connections: false }),
        mode: mode.unwrap_or(if mapped { Mode::Offload } else { Mode::Cpu }),
        lcores,
        simulators: engines.dsa_sims.clone(),
        dma,
        burst: BURST,
        ..SwitchConfig::default()
    };
    config.check(&ports).map_err(by_flag)?;
    Ok((config, ports))
}

#[cfg(test)]
mod tests {
    use offcore_flow::host::serve::ServeConfig;

    use super::*;
    use crate::cli::Command;
    use crate::cli::lines::command;

    fn planned(flags: &str) -> Result<SwitchConfig, String> {
        let line = format!("offcore tcp --port tap:tap0,addr=10.0.0.2/24 {flags}");
        match command(&line) {
            Ok(Command::Tcp(args)) => plan(&args).map(|(config, _)| config),
            Ok(_) => Err("another command".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn congestion_control_has_its_name() {
        for (flags, expected) in [("", Algorithm::Cubic), ("--congestion bbr", Algorithm::Bbr)] {
            let Run::Host(hosting) = planned(flags).unwrap().run else { panic!("{flags}") };
            assert_eq!(hosting.congestion, expected);
        }
        assert!(planned("--congestion vegas").unwrap_err().contains("[possible values: cubic, reno, bbr]"));
    }

    #[test]
    fn serve_flag_replaces_the_application() {
        let config =
            planned("--serve /run/s --allow-uid 33 --allow-uid 34 --app-memory 64 --app-connections 100")
                .unwrap();
        let Run::Host(Hosting { app: Hosted::Others(serve), .. }) = config.run else { panic!("{config:?}") };
        let expected =
            ServeConfig { path: "/run/s".into(), allow: vec![33, 34], memory: 64 << 20, connections: 100 };
        assert_eq!(serve, expected);
        for (flags, expected) in [
            ("--serve /run/s --app sink", "cannot be used with"),
            ("--allow-uid 33", "--serve"),
            ("--serve /run/s --allow-uid www-data", "expected a user's number, such as 33: `id -u www-data`"),
            ("--app-memory 64", "--serve"),
            ("--serve /run/s --app-memory 1", "expected a number from 4 to 65536"),
            ("--app-connections 9", "--serve"),
            ("--app echo --allow-uid 33", "'--app <APP>' cannot be used with"),
            ("--app echo --app-memory 64", "'--app <APP>' cannot be used with"),
            ("--app echo --app-connections 9", "'--app <APP>' cannot be used with"),
            (
                "--port tap:tap1,addr=10.0.0.2/16",
                "--port tap:tap0 and --port tap:tap1: both have addr=10.0.0.2",
            ),
            ("--mode offload", "--mode offload needs --dma"),
            ("--port tap:b,addr=10.0.1.2/24 --dma 1.txq0@core:1", "found a queue of port 1"),
            ("--port vhost:/s,addr=10.0.1.2/24,dmas=[txq0@core:1]", "found a queue of port 1"),
            ("--mode auto --serve /run/s", "--mode auto needs --dma"),
            ("--serve /run/s --app-connections 0", "expected a number from 1 to 1048576"),
            ("--serve /run/s --lcores 0,1", "served by one lcore"),
        ] {
            let error = planned(flags).unwrap_err();
            assert!(error.contains(expected), "{flags}: {error}");
        }
    }
}
