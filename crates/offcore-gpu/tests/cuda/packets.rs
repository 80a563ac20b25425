//! Sends packets through pipelines and checks each one.

mod content;

use std::time::{Duration, Instant};

use offcore_gpu::device::{GpuDevice, Launch, Memory};
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::{Back, Front, PipelineWorker, Setup, Work, pipeline};
use offcore_mem::{Hugepages, Packet, Pool, PoolCache};

use content::{PATTERN, SKIP, expected, packet};

/// Packets per burst in the mixed case, repeated.
const LENGTHS: [usize; 5] = [1, 1024, 7, 257, 64];

/// The work of a pipeline, and its number of packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) launch: Launch,
    pub(crate) memory: Memory,
    pub(crate) kind: Kind,
    pub(crate) split_at: Option<usize>,
    pub(crate) slots: usize,
    pub(crate) burst: usize,
    /// Bursts alternate between these two lengths, below `burst`.
    pub(crate) mixed: bool,
    pub(crate) bursts: usize,
    pub(crate) timeout: Duration,
}

impl Case {
    pub(crate) fn new(launch: Launch, memory: Memory) -> Self {
        let (kind, timeout) = (Kind::Crc32c, Duration::from_secs(10));
        let (slots, burst, bursts) = (4, 64, 20);
        Self { launch, memory, kind, split_at: None, slots, burst, mixed: false, bursts, timeout }
    }

    /// Returns the number of packets of a burst.
    fn len(&self, burst: usize) -> usize {
        if self.mixed { LENGTHS[burst % LENGTHS.len()].min(self.burst) } else { self.burst }
    }

    fn packets(&self) -> usize {
        (0..self.bursts).map(|burst| self.len(burst)).sum()
    }
}

/// Creates a pool for `pipelines` pipelines with bursts of this length.
pub(crate) fn pool(pipelines: usize, burst: usize) -> &'static Pool {
    Pool::new(16 * pipelines * burst.max(128), 2048, Hugepages::None).unwrap()
}

/// A pipeline and its progress.
#[derive(Debug)]
pub(crate) struct Line {
    case: Case,
    pool: &'static Pool,
    cache: PoolCache,
    /// `None` once no more bursts follow.
    front: Option<Front>,
    back: Back,
    /// Numbers of bursts and packets.
    sent: [usize; 2],
    received: usize,
    gathered: Vec<Packet>,
}

impl Line {
    /// Creates a pipeline on this device, or returns the error.
    pub(crate) fn new(device: &mut dyn GpuDevice, pool: &'static Pool, case: Case) -> Result<Self, String> {
        let Case { launch, memory, kind, split_at, slots, burst, timeout, .. } = case;
        let patterns = Patterns::from_list([PATTERN]).unwrap();
        let work =
            Work { kind, swap: true, skip: SKIP as u32, split_at, forced_ns: 0, patterns: Some(&patterns) };
        let worker = PipelineWorker::Device { device, launch, blocks: 2, threads: 64, memory };
        let setup = Setup { burst, slots, worker, work, timeout, pool, hugepages: Hugepages::None };
        let (front, back) = pipeline(setup).map_err(|error| error.to_string())?;
        let (cache, gathered) = (pool.cache(), Vec::new());
        Ok(Self { case, pool, cache, front: Some(front), back, sent: [0, 0], received: 0, gathered })
    }

    /// Submits a burst if possible, and checks a returned one. Returns whether there was one.
    fn turn(&mut self) -> bool {
        self.submit();
        self.look()
    }

    /// Submits a burst. Returns whether it could.
    fn submit(&mut self) -> bool {
        let Self { case, pool, cache, front, sent: [bursts, packets], gathered, .. } = self;
        let Some(front) = front.as_mut().filter(|_| *bursts < case.bursts) else { return false };
        if front.room(1) == 0 {
            return false;
        }
        let next = *packets..*packets + case.len(*bursts);
        gathered.extend(next.clone().map(|number| packet(pool, cache, number, case.split_at)));
        (*bursts, *packets) = (*bursts + 1, next.end);
        assert!(front.submit(gathered) && gathered.is_empty());
        true
    }

    /// Checks a burst. Returns whether there was one.
    fn look(&mut self) -> bool {
        let Self { case, pool, cache, back, received, .. } = self;
        let Some(done) = back.done() else { return false };
        let nonzero = done.results[..done.packets.len()].iter().filter(|result| **result != 0).count();
        assert_eq!(done.hits as usize, nonzero);
        for (packet, result) in done.packets.drain(..).zip(done.results) {
            let found: Vec<u8> = pool.segments(&packet).flatten().copied().collect();
            let right = expected(*received, case.kind, case.split_at.unwrap_or(SKIP));
            assert_eq!((found, *result), right, "{case:?}: packet {received}");
            *received += 1;
            cache.free(packet);
        }
        back.retire();
        true
    }

    /// Runs until all packets are back.
    pub(crate) fn run_to_the_end(&mut self) {
        self.run_until(self.case.packets());
    }

    /// Submits as many bursts as fit.
    pub(crate) fn fill(&mut self) {
        while self.submit() {}
    }

    /// Submits as many bursts as fit, then closes the submitting end.
    pub(crate) fn fill_and_stop(&mut self) {
        self.fill();
        self.case.bursts = self.sent[0];
        self.front = None;
    }

    /// Runs until this many packets are back.
    pub(crate) fn run_until(&mut self, packets: usize) {
        let mut moved = Instant::now();
        while self.received < packets {
            if self.turn() {
                moved = Instant::now();
            }
            assert!(moved.elapsed() < Duration::from_secs(10), "nothing has come back for 10 s");
            std::thread::yield_now();
        }
    }

    /// Returns the failure of its device, if any.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.back.failure()
    }

    fn is_done(&self) -> bool {
        self.received == self.case.packets()
    }

    /// Ends the pipeline. Returns the failure of its device, if any.
    pub(crate) fn end(self) -> Option<String> {
        let Self { front, mut back, .. } = self;
        drop(front);
        assert!(back.done().is_none() && !back.is_waiting());
        back.failure().map(str::to_owned)
    }
}

/// Runs pipelines concurrently until all of their packets are back, then ends them in turn. Returns the failure of
/// each. Afterwards the devices may be closed, and all packet buffers are free.
pub(crate) fn run(mut lines: Vec<Line>) -> Vec<Option<String>> {
    let mut moved = Instant::now();
    while lines.iter().any(|line| !line.is_done()) {
        // Not `any`, which stops at the first match: each line must get its turn.
        let back =
            lines.iter_mut().filter(|line| !line.is_done()).map(Line::turn).filter(|back| *back).count();
        if back > 0 {
            moved = Instant::now();
        } else {
            assert!(moved.elapsed() < Duration::from_secs(10), "nothing has come back for 10 s");
            std::thread::yield_now();
        }
    }
    let pools: Vec<&Pool> = lines.iter().map(|line| line.pool).collect();
    let failures: Vec<_> = lines.into_iter().map(Line::end).collect();
    for pool in pools {
        let mut cache = pool.cache();
        let all: Vec<Packet> = std::iter::from_fn(|| cache.take()).collect();
        assert_eq!(all.len(), pool.chunks(), "packet buffers that are free");
        cache.free_all(all);
    }
    failures
}

/// Runs one pipeline. Returns its failure, or the error of its setup.
pub(crate) fn run_one(device: &mut dyn GpuDevice, case: Case) -> Result<Option<String>, String> {
    let line = Line::new(device, pool(1, case.burst), case)?;
    Ok(run(vec![line]).remove(0))
}

/// Returns every combination of launch type and memory.
pub(crate) fn ways() -> impl Iterator<Item = Case> {
    Launch::ALL.into_iter().flat_map(|launch| Memory::ALL.map(|memory| Case::new(launch, memory)))
}
