//! The test worker, and functions that the tests share.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

pub(crate) mod tcp;
pub(crate) mod udp;

use std::time::{Duration, Instant};

use offcore_dma::{Binding, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Hugepages, Packet, Pool, PoolCache};
use offcore_port::{Context, Port, PortError, QueueSetup, RxQueue, TxQueue};
use offcore_stats::StageClock;
use offcore_stats::page::StatsPage;
use offcore_wire::virtio_net::NetHeader;

/// Time after which a test fails if an expected event does not occur.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) type TempDir = offcore_mem::testing::TempDir;

/// A worker that is driven by a test.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) cache: PoolCache,
    pub(crate) stats: StatsPage,
    mover: Mover,
    clock: StageClock,
}

impl Worker {
    pub(crate) fn new(pool: &'static Pool) -> Self {
        Self {
            cache: pool.cache(),
            stats: StatsPage::new(1 << 18).unwrap(),
            mover: Mover::new(),
            clock: StageClock::private(),
        }
    }

    pub(crate) fn rx_queue(
        &mut self,
        port: &mut dyn Port,
        index: u16,
    ) -> Result<Box<dyn RxQueue>, PortError> {
        port.rx_queue(index, self.setup())
    }

    pub(crate) fn tx_queue(
        &mut self,
        port: &mut dyn Port,
        index: u16,
    ) -> Result<Box<dyn TxQueue>, PortError> {
        port.tx_queue(index, self.setup())
    }

    fn setup(&mut self) -> QueueSetup<'_> {
        QueueSetup { mover: &mut self.mover, stats: &self.stats, binding: Binding::core(), port: "port0" }
    }

    pub(crate) fn ctx(&mut self) -> Context<'_> {
        Context { mover: &mut self.mover, cache: &mut self.cache, clock: &mut self.clock, burst: BURST }
    }

    pub(crate) fn rx(&mut self, queue: &mut dyn RxQueue, burst: &mut Burst) {
        queue.rx(&mut self.ctx(), burst);
    }

    pub(crate) fn tx(&mut self, queue: &mut dyn TxQueue, burst: &mut Burst) {
        queue.tx(&mut self.ctx(), burst);
    }

    /// Creates a packet with these bytes.
    pub(crate) fn packet(&mut self, bytes: &[u8]) -> Packet {
        let mut packet = self.cache.take().expect("the pool has a free buffer");
        packet.set_range(self.cache.pool(), HEADROOM, bytes.len());
        packet.bytes_mut().copy_from_slice(bytes);
        packet
    }

    /// Creates a packet with these bytes, in as many buffers as necessary, with this header in front if it requests an
    /// offload.
    pub(crate) fn packet_with(&mut self, header: &NetHeader, bytes: &[u8]) -> Packet {
        let pool = self.cache.pool();
        let mut packet = self.cache.take_chain(HEADROOM, bytes.len()).expect("the pool has free buffers");
        pool.segments_mut(&mut packet).flatten().zip(bytes).for_each(|(to, from)| *to = *from);
        if header.leaves_work() {
            packet.headroom_mut(12).copy_from_slice(&header.to_bytes());
            packet.set_offload(true);
        }
        packet
    }

    pub(crate) fn free(&mut self, burst: &mut Burst) {
        self.cache.free_all(burst.drain(..));
    }

    /// Returns the number of free packet buffers, determined by taking all of them.
    pub(crate) fn free_chunks(&mut self) -> usize {
        let all: Vec<Packet> = std::iter::from_fn(|| self.cache.take()).collect();
        let count = all.len();
        self.cache.free_all(all);
        count
    }
}

/// Returns the packet's header and bytes.
pub(crate) fn frame(pool: &Pool, packet: &Packet) -> (NetHeader, Vec<u8>) {
    let header = match packet.has_offload() {
        true => NetHeader::from_bytes(packet.headroom_bytes(12).first_chunk().unwrap()),
        false => NetHeader::default(),
    };
    assert_eq!(header.leaves_work(), packet.has_offload());
    (header, pool.segments(packet).flatten().copied().collect())
}

/// Creates a pool of `chunks` packet buffers of 2 KiB.
pub(crate) fn pool(chunks: usize) -> &'static Pool {
    Pool::new(chunks, 2048, Hugepages::None).unwrap()
}

/// Calls `step` until it returns `true`.
pub(crate) fn until(what: &str, mut step: impl FnMut() -> bool) {
    let start = Instant::now();
    while !step() {
        assert!(start.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
    }
}

/// Returns whether this process runs as root; if not, prints that the test is skipped.
pub(crate) fn root_or_skip(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIP: {test} needs root");
    }
    root
}

/// Runs `test` in a thread with its own network namespace.
pub(crate) fn in_namespace(name: &str, test: impl FnOnce() + Send + 'static) {
    if !root_or_skip(name) {
        return;
    }
    let thread = std::thread::spawn(move || {
        // SAFETY: unshare(CLONE_NEWNET) only changes the network namespace of the calling thread, which was created for
        // this test.
        let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        if rc != 0 {
            eprintln!("SKIP: no network namespace: {}", std::io::Error::last_os_error());
            return;
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs the command `ip` in the calling thread's namespace; returns its output.
pub(crate) fn ip(args: &str) -> String {
    let run = std::process::Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(run.status.success(), "ip {args}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8_lossy(&run.stdout).into_owned()
}
