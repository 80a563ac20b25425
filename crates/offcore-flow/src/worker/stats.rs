//! A worker's counters of copies on the statistics page: of the mover, of mode `auto`, and of channels.

use offcore_dma::Mover;
use offcore_dma::channel::{Channel, ChannelStats};
use offcore_dma::mover::{CLASSES, Decision, MoverStats, Way};
use offcore_stats::page::{Block, PageError, StatsPage};
use offcore_stats::{Family, Label, counters};

counters! {
    /// Counters of a channel in addition to its own.
    pub(crate) struct ChannelGauges {
        /// Copies in flight.
        in_flight: Copies gauge,
    }
}

counters! {
    /// Counters of a size class of copies in mode `auto`. Counters of copies and changes are sums over all queues of
    /// the worker. The others describe the queue with the most copies in the class.
    pub struct ClassCounts {
        /// Copies made by the core.
        by_core: Copies,
        /// Copies made by an engine.
        by_engine: Copies,
        /// Copies of the core that waited for older copies of an engine.
        held: Copies,
        /// Changes of the choice.
        changes: Events,
        /// The choice: 0 none so far, 1 the core, 2 an engine.
        way: State gauge,
        /// The number of the reason for the choice.
        reason: State gauge,
        /// Cost of a copy by the core.
        core_ticks: Ticks gauge,
        /// Cost of a copy by an engine.
        engine_ticks: Ticks gauge,
    }
}

/// The counters of a channel of one worker.
pub(crate) static CHANNEL: Family = Family::new(
    "channel",
    "Copies of a worker through a channel of an engine.",
    &[&ChannelStats::COUNTERS, &ChannelGauges::COUNTERS],
);
/// The counters of one worker's mover.
pub(crate) static MOVER: Family = Family::new("mover", "Copies of a worker.", &[&MoverStats::COUNTERS]);
/// The counters of a size class of copies in mode `auto`.
pub static AUTO: Family =
    Family::new("auto", "Decisions of mode auto for the copies of a size class.", &[&ClassCounts::COUNTERS]);

/// The label of each size class: the bytes of its longest copy.
const CLASS_NAMES: [&str; CLASSES] =
    ["64", "128", "256", "512", "1024", "2048", "4096", "8192", "16384", "32768", "65536", "max"];

/// The blocks for the counters of a worker's mover.
#[derive(Debug)]
pub struct MoverBlocks {
    mover: Block,
    classes: [Block; CLASSES],
}

impl MoverBlocks {
    /// Creates the blocks of the worker on `lcore`.
    ///
    /// # Errors
    /// If the page is full.
    pub fn on(page: &StatsPage, lcore: usize) -> Result<Self, PageError> {
        let class = |class| page.block(&AUTO, &[(Label::Lcore, &lcore), (Label::Class, &class)]);
        let mover = page.block(&MOVER, &[(Label::Lcore, &lcore)])?;
        let classes = CLASS_NAMES.map(class).into_iter().collect::<Result<Vec<_>, _>>()?;
        let classes = std::array::from_fn(|index| classes[index].clone());
        Ok(Self { mover, classes })
    }

    /// Creates blocks that are not on a statistics page.
    pub(super) fn private() -> Self {
        Self { mover: Block::private(&MOVER), classes: CLASS_NAMES.map(|_| Block::private(&AUTO)) }
    }

    /// Stores the mover's counters.
    pub(super) fn publish(&self, mover: &Mover) {
        self.mover.set(mover.stats().values());
        for (block, decisions) in self.classes.iter().zip(decisions(mover)) {
            block.set(decisions.values());
        }
    }
}

/// Stores the counters of a channel in `block`.
pub(super) fn publish_channel(block: &Block, channel: &dyn Channel) {
    let gauges = ChannelGauges { in_flight: channel.in_flight() as u64 };
    block.set(channel.stats().values().into_iter().chain(gauges.values()));
}

/// Returns the counters of every size class.
fn decisions(mover: &Mover) -> [ClassCounts; CLASSES] {
    let mut classes = [(0, Decision::default()); CLASSES];
    for queue in mover.queues() {
        for ((most, sum), one) in classes.iter_mut().zip(mover.decisions(queue).classes) {
            let copies = one.by_core + one.by_engine;
            let shown = if copies > *most { one } else { *sum };
            *sum = Decision {
                by_core: sum.by_core + one.by_core,
                by_engine: sum.by_engine + one.by_engine,
                held_by_order: sum.held_by_order + one.held_by_order,
                changes: sum.changes + one.changes,
                ..shown
            };
            *most = copies.max(*most);
        }
    }
    classes.map(|(copies, of)| {
        let way = match of.way {
            _ if copies == 0 => 0,
            Way::Core => 1,
            Way::Engine => 2,
        };
        ClassCounts {
            by_core: of.by_core,
            by_engine: of.by_engine,
            held: of.held_by_order,
            changes: of.changes,
            way,
            reason: of.reason as u64,
            core_ticks: of.core_ticks.round() as u64,
            engine_ticks: of.engine_ticks.round() as u64,
        }
    })
}
