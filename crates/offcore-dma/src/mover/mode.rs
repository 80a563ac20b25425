//! Who copies for a queue.

use super::ChannelId;

/// Who copies for a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The core.
    #[default]
    Cpu,
    /// The queue's channels; the core only when all of them are full or out of service, or too small for a packet.
    Offload,
    /// Whoever costs the core less, as tried now and then.
    Auto,
}

impl std::str::FromStr for Mode {
    type Err = String;

    /// `cpu`, `offload` or `auto`; `sw` and `hw` are what DPDK's dma application calls the first two.
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

/// Who makes a queue's copies, and through which channels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Core, engine, or whichever is cheaper.
    pub mode: Mode,
    /// Channels of the worker's mover; several share the queue's load.
    pub channels: Vec<ChannelId>,
    /// Its part of a channel that other queues need, too, is its weight by the sum of theirs; 0 counts as 1.
    pub weight: u16,
}

impl Binding {
    /// `mode`, and channels used with weight 1.
    pub const fn new(mode: Mode, channels: Vec<ChannelId>) -> Self {
        Self { mode, channels, weight: 1 }
    }

    /// The core makes the copies.
    pub const fn core() -> Self {
        Self::new(Mode::Cpu, Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_reads_what_it_prints() {
        for mode in [Mode::Cpu, Mode::Offload, Mode::Auto] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
    }

    #[test]
    fn the_words_of_dpdk_are_understood() {
        assert_eq!(("sw".parse(), "hw".parse()), (Ok(Mode::Cpu), Ok(Mode::Offload)));
    }

    #[test]
    fn an_unknown_mode_is_told_all_three() {
        let error = "automatic".parse::<Mode>().unwrap_err();
        for word in ["automatic", "cpu", "offload", "auto"] {
            assert!(error.contains(word), "{error}");
        }
    }
}
