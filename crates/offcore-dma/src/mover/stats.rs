//! The mover's counters, and its decisions with their reasons.

use offcore_stats::{counters, named};

/// Number of size classes of copies: up to 64 bytes, up to 128, and so on by powers of two up to 64 KiB, and all larger
/// ones.
pub const CLASSES: usize = 12;

counters! {
    /// The mover's own counters.
    pub struct MoverStats {
        /// Copies made by the core as planned.
        core_copies: Copies,
        /// Bytes of copies made by the core.
        core_bytes: Bytes,
        /// Copies that the core made or completed because a channel failed them.
        fallbacks: Copies,
        /// Copies that the core made because no channel of the queue was in service with room for the packet's copies.
        overflow: Copies,
        /// Channel resets because of copies that did not complete in time.
        resets: Events,
        /// Copies held in quarantine until a reset proved that the engine would not execute them.
        quarantined: Copies,
        /// Copies that failed because the memory of the queue's guest was inaccessible.
        faults: Copies,
        /// Number of times that a channel was taken out of service.
        out_of_service: Events,
        /// Channels that are out of service now.
        channels_out: Events gauge,
        /// Bursts sent through an out-of-service channel to test whether it works again.
        probes: Bursts,
        /// Copies made by the core that had to wait in the reorder ring for older copies of an engine.
        held_by_order: Copies,
    }
}

named! {
    /// The way of making a copy.
    #[derive(Default)]
    pub enum Way {
        /// The core copies.
        #[default]
        Core = "core",
        /// A channel of the queue copies.
        Engine = "engine",
    }
}

named! {
    /// The reason for a decision.
    #[derive(Default)]
    #[repr(u8)]
    pub enum Reason {
        /// The initial decision, not changed yet.
        #[default]
        Initial = "initial",
        /// The cost of rounds changed, and then the other way was cheaper.
        Cheaper = "cheaper",
        /// The other way was tried and found cheaper.
        Explored = "explored",
        /// The channels are full, or the queue has used its share of them: the core copies meanwhile.
        Full = "full",
        /// The channels are out of service: the core copies meanwhile.
        OutOfService = "out_of_service",
        /// The queue's memory faulted repeatedly: the core copies for a while.
        Faults = "faults",
        /// Packets took too long through an engine ([`Mover::set_max_latency`](super::Mover::set_max_latency)): the
        /// core copies for a while.
        Latency = "latency",
    }
}

/// The decision of mode `auto` for the copies of one size class of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Decision {
    /// Length in bytes of the longest copy of the class; `u32::MAX` for the last class.
    pub up_to: u32,
    pub way: Way,
    /// The reason for the last change of `way`.
    pub reason: Reason,
    /// TSC ticks of the worker's whole rounds per copy if the core makes all copies; 0 before the first measurement.
    /// The same for every class.
    pub core_ticks: f32,
    /// As `core_ticks`, if an engine makes all copies.
    pub engine_ticks: f32,
    /// Copies made by the core. The copies of a lease are distributed among the classes by the sizes of one burst.
    pub by_core: u64,
    pub by_engine: u64,
    /// Copies made by the core that had to wait for older copies of an engine.
    pub held_by_order: u64,
    pub changes: u64,
}

/// The mover's decisions for a queue, with their reasons. The classes are only updated in mode `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Decisions {
    /// Size classes, from the shortest copies to the longest.
    pub classes: [Decision; CLASSES],
    /// Copies given to engines, in any mode.
    pub by_engine: u64,
    /// Copies that failed because the queue's memory was inaccessible.
    pub faults: u64,
    /// Number of times that the queue was left to the core because of faults.
    pub fault_pauses: u64,
    /// With a latency limit: approximately the longest recent latency through an engine, in TSC ticks.
    pub longest_latency: u64,
    /// With a latency limit: number of timed packets that exceeded it.
    pub late: u64,
    /// Number of times that the queue was left to the core because of the latency limit.
    pub latency_pauses: u64,
}

named! {
    /// Whether a channel is used.
    #[derive(Default)]
    pub enum Service {
        /// The channel is used.
        #[default]
        In = "in",
        /// The channel failed repeatedly and is not used for a while.
        Out = "out",
        /// A burst is in flight through the channel to test whether it works again.
        Probing = "probing",
    }
}

/// The health of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelHealth {
    pub service: Service,
    pub failures: u64,
    pub taken_out: u64,
    /// Number of bursts sent to test whether the channel works again.
    pub probes: u64,
}
