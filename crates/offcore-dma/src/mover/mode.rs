//! Who copies for a queue.

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
