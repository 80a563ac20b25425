//! Copy modes of queues.

use super::ChannelId;

/// The copy mode of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The core copies.
    #[default]
    Cpu,
    /// The queue's channels copy. The core copies only if all channels are full, out of service, or too small for a
    /// packet.
    Offload,
    /// Core or channels, whichever costs the core less in periodic trials.
    Auto,
}

impl std::str::FromStr for Mode {
    type Err = String;

    /// Parses `cpu`, `offload` or `auto`. `sw` and `hw` are the names of the first two in DPDK's dma application.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" | "sw" => Ok(Self::Cpu),
            "offload" | "hw" => Ok(Self::Offload),
            "auto" => Ok(Self::Auto),
            _ => Err(format!("mode '{text}': expected cpu, offload or auto")),
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Offload => "offload",
            Self::Auto => "auto",
        })
    }
}

/// The copy mode of a queue, and its channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Core, engine, or the cheaper of the two.
    pub mode: Mode,
    /// Channels of the worker's mover. Several channels share the queue's load.
    pub channels: Vec<ChannelId>,
    /// Weight of the queue on channels that other queues also need: its share is its weight divided by the sum of
    /// weights. 0 counts as 1.
    pub weight: u16,
}

impl Binding {
    /// Returns a binding with this mode and these channels, with weight 1.
    pub const fn new(mode: Mode, channels: Vec<ChannelId>) -> Self {
        Self { mode, channels, weight: 1 }
    }

    /// Returns a binding with which the core makes all copies.
    pub const fn core() -> Self {
        Self::new(Mode::Cpu, Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_parsed() {
        for mode in [Mode::Cpu, Mode::Offload, Mode::Auto] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        // DPDK's names.
        assert_eq!(("sw".parse(), "hw".parse()), (Ok(Mode::Cpu), Ok(Mode::Offload)));
        let error = "automatic".parse::<Mode>().unwrap_err();
        assert!(["automatic", "cpu", "offload", "auto"].iter().all(|word| error.contains(word)), "{error}");
    }
}
