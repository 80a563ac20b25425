//! The back ends over veth: our port and worker, and dpdk-testpmd, both on the same core.

use anyhow::{Context, Result, bail};
use offcore_dma::{Binding, Mode, Mover};
use offcore_flow::Forward;
use offcore_flow::forward::{Addresses, Source};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_port::af_packet::AfPacketPort;
use offcore_port::af_xdp::AfXdpPort;
use offcore_port::spec::PortSpec;
use offcore_port::{Port, QueueSetup};
use offcore_stats::page::StatsPage;

use super::{Cell, Direction, PortKind};
use crate::BURST;
use crate::guests::guest::{PEER_MAC, PORT_MAC};
use crate::peer::netns::Netns;
use crate::peer::testpmd::{Testpmd, TestpmdConfig};
use crate::vhost::end_to_end::back_end::BackEnd;
use crate::vhost::end_to_end::back_end::{BUFFERS, Ours};

impl Direction {
    /// Returns the forwarding mode, which is the same for testpmd.
    const fn forward(self, frame: usize) -> Forward {
        match self {
            Self::Txonly => Forward::Txonly { frame },
            Self::Rxonly => Forward::Rxonly,
            Self::Forward => Forward::Macswap,
        }
    }
}

/// Creates a paused back end with our port on `interface` of the namespace `netns` and its worker on lcore `core`.
pub(super) fn ours(
    cell: Cell,
    interface: &str,
    netns: &Netns,
    core: usize,
    pool: &'static Pool,
) -> Result<Ours> {
    let page = StatsPage::new(1 << 16)?;
    let mut mover = Mover::new();
    let (port, rx, tx) = netns.within(|| {
        let mut port = open(cell.port, interface, pool)?;
        let rx = port.rx_queue(0, setup(&mut mover, &page))?;
        let tx = port.tx_queue(0, setup(&mut mover, &page))?;
        Ok((port, rx, tx))
    })?;
    let addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };
    let forward = cell.direction.forward(cell.frame);
    let source = Source::of(forward, &addresses).map_err(anyhow::Error::msg)?;
    let rules = Rules::new(forward, addresses, 0).with_source(source);
    let worker = Worker::new(vec![Box::new(Forwarding::new(rx, tx, rules))], mover, pool.cache());
    Ours::over(worker, core, vec![port])
}

fn open(kind: PortKind, interface: &str, pool: &'static Pool) -> Result<Box<dyn Port>> {
    let text = match kind {
        PortKind::AfXdp => format!("af_xdp:{interface}"),
        PortKind::AfPacket => format!("af_packet:{interface},qdisc_bypass"),
    };
    Ok(match text.parse()? {
        PortSpec::AfXdp(spec) => Box::new(AfXdpPort::open(&spec, pool)?),
        PortSpec::AfPacket(spec) => Box::new(AfPacketPort::open(&spec, pool)?),
        other => bail!("{other} is no port that goes over veth"),
    })
}

/// Returns the set-up of queues. If anything is copied, the core copies.
fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::new(Mode::Cpu, Vec::new()), port: "port0" }
}

/// dpdk-testpmd with one port on an interface.
#[derive(Debug)]
pub(super) struct Theirs {
    testpmd: Testpmd,
    count_cycles: bool,
}

impl Theirs {
    /// Starts a paused testpmd on lcore `core`.
    pub(super) fn start(cell: Cell, interface: &str, netns: &Netns, core: usize) -> Result<Self> {
        let vdev = match cell.port {
            PortKind::AfXdp => format!("net_af_xdp0,iface={interface},start_queue=0,queue_count=1"),
            // Rings with as many slots as ours, each for a frame and its header.
            PortKind::AfPacket => format!(
                "net_af_packet0,iface={interface},qpairs=1,blocksz=65536,framesz=2048,framecnt=1024,qdisc_bypass=1"
            ),
        };
        let config = TestpmdConfig {
            core,
            vdevs: vec![vdev],
            burst: u16::try_from(BURST)?,
            mbufs: BUFFERS,
            netns: Some(netns.name().into()),
            ..TestpmdConfig::default()
        };
        let mut testpmd = Testpmd::start(&config)?;
        testpmd.set_forward(match cell.direction {
            Direction::Forward => "macswap",
            other => other.name(),
        })?;
        if cell.direction == Direction::Txonly {
            testpmd.set_tx_length(u16::try_from(cell.frame_len())?)?;
        }
        testpmd.wait_link_up(0).context("its port")?;
        Ok(Self { testpmd, count_cycles: false })
    }
}

impl BackEnd for Theirs {
    fn resume(&mut self) -> Result<()> {
        self.testpmd.start_forwarding()
    }

    fn pause(&mut self) -> Result<Option<f64>> {
        let stats = self.testpmd.stop_forwarding()?;
        Ok(stats.cycles.filter(|_| self.count_cycles).map(|cycles| cycles.per_packet))
    }

    fn count_cycles(&mut self, on: bool) -> Result<()> {
        self.count_cycles = on;
        self.testpmd.record_core_cycles(on)
    }

    fn moved(&mut self) -> Result<u64> {
        Ok(self.testpmd.port_stats(0)?.rx_packets)
    }
}
