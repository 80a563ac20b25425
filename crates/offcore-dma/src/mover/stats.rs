//! What the mover counts, and what it has decided and why.

use offcore_stats::{counters, named};

/// Size classes of copies: up to 64 bytes, up to 128, and so on by powers of two up to 64 KiB, and all above.
pub const CLASSES: usize = 12;

counters! {
    /// What the mover itself counts.
    pub struct MoverStats {
        /// Copies made by the core because that was the plan.
        core_copies,
        /// Bytes of those.
        core_bytes,
        /// Copies that the core made or finished because a channel failed them.
        fallbacks,
        /// Copies that the core made because no channel of the queue had room for the packet's, or was in service.
        overflow,
        /// Channel resets because of copies that were not answered in time.
        resets,
        /// Copies held in quarantine until a reset proved them dead.
        quarantined,
        /// Copies that failed because the memory of the queue's guest could not be reached.
        faults,
        /// How often a channel was taken out of service.
        out_of_service,
        channels_out,
        /// Bursts sent through a channel out of service, to see whether it works again.
        probes,
        /// Copies made by the core that had to wait in the reorder ring for older copies of an engine.
        held_by_order,
    }
}

named! {
    /// One of the two who can make a copy.
    #[derive(Default)]
    pub enum Way {
        /// The core copies.
        #[default]
        Core = "core",
        /// One of the queue's channels does.
        Engine = "engine",
    }
}

named! {
    /// Why a decision is as it is.
    #[derive(Default)]
    #[repr(u8)]
    pub enum Reason {
        /// Nothing has changed it yet.
        #[default]
        Initial = "initial",
        /// What rounds cost changed, and then the other way was cheaper.
        Cheaper = "cheaper",
        /// The other way was tried and found cheaper.
        Explored = "explored",
        /// The channels have no room, or the queue has had its share of them: the core copies meanwhile.
        Full = "full",
        /// The channels are out of service: the core copies meanwhile.
        OutOfService = "out_of_service",
        /// The queue's memory kept faulting: the core copies for a while.
        Faults = "faults",
        /// Packets took too long through an engine ([`Mover::set_max_latency`](super::Mover::set_max_latency)): the core
        /// copies for a while.
        Latency = "latency",
    }
}

/// What `auto` has decided for the copies of one size class of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Decision {
    /// Bytes of the longest copy of the class; `u32::MAX` for the last.
    pub up_to: u32,
    pub way: Way,
    /// Why that last changed.
    pub reason: Reason,
    /// TSC ticks of the worker's whole rounds for each copy when the core makes them all; 0 while not measured. The same
    /// for every class.
    pub core_ticks: f32,
    /// The same when an engine makes them all.
    pub engine_ticks: f32,
    /// Copies made by the core. Each lease's are shared out among the classes by the sizes of one burst.
    pub by_core: u64,
    pub by_engine: u64,
    /// Copies made by the core that had to wait for older ones of an engine.
    pub held_by_order: u64,
    pub changes: u64,
}

/// What the mover has decided for one queue, and why. The classes are only kept in mode `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Decisions {
    /// Size classes, from the shortest copies to the longest.
    pub classes: [Decision; CLASSES],
    /// Copies given to engines, in any mode.
    pub by_engine: u64,
    /// Copies that failed because the queue's memory could not be reached.
    pub faults: u64,
    /// How often the queue was left to the core because of that.
    pub fault_pauses: u64,
    /// With a longest time that packets may take: about the longest of late through an engine, in TSC ticks.
    pub longest_latency: u64,
    /// Of the packets whose time was taken, those that took too long.
    pub late: u64,
    /// How often the queue was left to the core because of that.
    pub latency_pauses: u64,
}

named! {
    /// Whether a channel is used.
    #[derive(Default)]
    pub enum Service {
        /// It is.
        #[default]
        In = "in",
        /// It failed repeatedly: nothing is given to it for a while.
        Out = "out",
        /// One burst is on its way through it, to see whether it works again.
        Probing = "probing",
    }
}

/// How a channel does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelHealth {
    pub service: Service,
    pub failures: u64,
    pub taken_out: u64,
    /// Bursts sent to see whether it works again.
    pub probes: u64,
}
