//! Families of counters. A family is declared once, in a `static`. The declaration determines the layout of the blocks
//! on the [statistics page](crate::page), and the name, unit, kind and help of each counter.

use crate::named;

named! {
    /// The unit of a counter's value.
    pub enum Unit {
        Packets = "packets",
        Bytes = "bytes",
        /// Copies of memory.
        Copies = "copies",
        /// Ticks of the time stamp counter.
        Ticks = "ticks",
        /// Bursts of packets.
        Bursts = "bursts",
        Connections = "connections",
        /// Other counts.
        Events = "events",
        /// A number that stands for a state. The counter's help lists the states.
        State = "state",
    }
}

named! {
    /// How a value changes.
    pub enum Kind {
        /// A total since the creation of the block.
        Counter = "counter",
        /// A current value, which may decrease.
        Gauge = "gauge",
    }
}

named! {
    /// The key of a label. Labels tell the blocks of a family apart.
    pub enum Label {
        /// The name of a port, ring, mirror or pipeline.
        Port = "port",
        /// The number of a queue.
        Queue = "queue",
        /// The core of a worker.
        Lcore = "lcore",
        /// The name of a channel of an engine.
        Channel = "channel",
        /// How workers share a channel.
        Sharing = "sharing",
        /// A size class of copies: the bytes of its longest copy, or `max`.
        Class = "class",
    }
}

/// The declaration of a counter. [`counters!`](crate::counters) and [`named!`](crate::named!) create it, with the doc
/// comment as help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    pub name: &'static str,
    pub unit: Unit,
    pub kind: Kind,
    pub help: &'static str,
}

impl Description {
    /// Creates a description.
    ///
    /// # Panics
    /// If the help is empty, or a text contains a tab or the end of a line.
    pub const fn new(name: &'static str, unit: Unit, kind: Kind, help: &'static str) -> Self {
        let help = help.trim_ascii();
        assert!(is_field(name) && is_field(help), "a counter needs a name and a help of one line");
        Self { name, unit, kind, help }
    }
}

/// The declaration of a family of counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    pub help: &'static str,
    /// The counters, in the order of their values in a block.
    pub parts: &'static [&'static [Description]],
}

impl Family {
    /// Maximum number of counters.
    pub const MAX_COUNTERS: usize = 256;

    /// Creates a family with the counters of `parts`, in order.
    ///
    /// # Panics
    /// If it has more counters than [`Family::MAX_COUNTERS`], or a text is empty or contains a tab or the end of a
    /// line.
    pub const fn new(
        name: &'static str,
        help: &'static str,
        parts: &'static [&'static [Description]],
    ) -> Self {
        assert!(is_field(name) && is_field(help), "a family needs a name and a help of one line");
        let family = Self { name, help, parts };
        assert!(family.size() <= Self::MAX_COUNTERS, "a family has too many counters");
        family
    }

    /// Returns the number of counters.
    pub const fn size(&self) -> usize {
        let (mut counters, mut part) = (0, 0);
        while part < self.parts.len() {
            counters += self.parts[part].len();
            part += 1;
        }
        counters
    }

    /// Returns the counters in the order of their values.
    pub fn counters(&self) -> impl Iterator<Item = &'static Description> + use<> {
        self.parts.iter().copied().flatten()
    }
}

/// Whether `text` can be a field of a schema on the page.
const fn is_field(text: &str) -> bool {
    let (bytes, mut i) = (text.as_bytes(), 0);
    while i < bytes.len() {
        if bytes[i] == b'\t' || bytes[i] == b'\n' {
            return false;
        }
        i += 1;
    }
    !bytes.is_empty()
}
