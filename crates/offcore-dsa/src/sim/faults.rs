//! Faults of a simulated device, random or deliberate.

use std::str::FromStr;

use super::SimError;

/// Faults to inject. The text form consists of parts joined by `+`, such as
/// `page:0.001+hw:0.0001+late:0.01:200+halt:5000+weak`.
///
/// | Part | Effect |
/// |---|---|
/// | `page:P` | a page fault, with probability P per descriptor: partial completion at a random byte |
/// | `hw:P` | a hardware error (status 0x20) |
/// | `drop:P` | the submission is lost: no data, no record |
/// | `late:P[:US]` | the completion, data and record, is US microseconds late (1000) |
/// | `lost:P` | the data is written, the record is never written |
/// | `retry:P[:N]` | a shared queue answers Retry, N times in a row (64) |
/// | `halt:N` | the device halts after N descriptors, once |
/// | `weak` | a record that is zeroed and then submitted without a fence is zeroed after its completion |
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    pub page: f64,
    pub hardware: f64,
    /// Probability that a submission is lost.
    pub drop: f64,
    pub late: f64,
    pub late_ns: u64,
    /// Probability that a completion record is not written.
    pub lost: f64,
    /// Probability that a sequence of Retry answers begins.
    pub retry: f64,
    pub retry_storm: u32,
    /// Number of descriptors, counted from setting the faults, after which the device halts; 0 for never.
    pub halt_after: u64,
    /// Whether the CPU's stores may pass later submissions.
    pub weak_ordering: bool,
}

impl Default for Faults {
    /// Returns no faults.
    fn default() -> Self {
        Self {
            page: 0.0,
            hardware: 0.0,
            drop: 0.0,
            late: 0.0,
            late_ns: 1_000_000,
            lost: 0.0,
            retry: 0.0,
            retry_storm: 64,
            halt_after: 0,
            weak_ordering: false,
        }
    }
}

impl FromStr for Faults {
    type Err = SimError;

    fn from_str(text: &str) -> Result<Self, SimError> {
        let mut faults = Self::default();
        for part in text.split('+').filter(|part| !part.is_empty() && *part != "none") {
            let wrong = |expected: &'static str| SimError::Option { found: part.into(), expected };
            let mut words = part.split(':');
            let name = words.next().unwrap_or_default();
            let (value, extra) = (words.next(), words.next());
            if words.next().is_some() {
                return Err(wrong("NAME:VALUE or NAME:VALUE:VALUE"));
            }
            let probability = || {
                let p = value.and_then(|value| value.parse::<f64>().ok());
                p.filter(|p| (0.0..=1.0).contains(p))
                    .ok_or(wrong("a probability from 0 to 1 after the colon"))
            };
            let number = |text: Option<&str>, default: u64| match text {
                None => Ok(default),
                Some(text) => text.parse::<u64>().map_err(|_| wrong("a number after the colon")),
            };
            let takes_two = matches!(name, "late" | "retry");
            if (extra.is_some() && !takes_two) || (name == "weak" && value.is_some()) {
                return Err(wrong("fewer values"));
            }
            match name {
                "page" => faults.page = probability()?,
                "hw" => faults.hardware = probability()?,
                "drop" => faults.drop = probability()?,
                "late" => {
                    faults.late = probability()?;
                    faults.late_ns = number(extra, 1000)?.saturating_mul(1000);
                }
                "lost" => faults.lost = probability()?,
                "retry" => {
                    faults.retry = probability()?;
                    let storm = number(extra, 64)?;
                    faults.retry_storm = u32::try_from(storm).map_err(|_| wrong("a smaller number"))?;
                }
                "halt" => {
                    faults.halt_after = number(value, 0)?;
                    if faults.halt_after == 0 {
                        return Err(wrong("halt:N with N from 1"));
                    }
                }
                "weak" => faults.weak_ordering = true,
                _ => return Err(wrong("page:P, hw:P, drop:P, late:P, lost:P, retry:P, halt:N or weak")),
            }
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_list_is_parsed() {
        let text = "page:0.001+hw:0.0001+drop:0.5+late:0.01:200+retry:0.1:8+halt:5000+weak";
        let faults: Faults = text.parse().unwrap();
        assert_eq!((faults.page, faults.hardware, faults.drop), (0.001, 0.0001, 0.5));
        assert_eq!((faults.late, faults.late_ns), (0.01, 200_000));
        assert_eq!((faults.retry, faults.retry_storm), (0.1, 8));
        assert_eq!((faults.halt_after, faults.weak_ordering), (5000, true));
        assert_eq!("none".parse::<Faults>().unwrap(), Faults::default());
    }

    #[test]
    fn a_wrong_fault_list_is_refused() {
        for text in
            ["page", "page:2", "page:-1", "page:x", "page:0.1:5", "halt:0", "weak:1", "fire:1", "late:1:2:3"]
        {
            let error = text.parse::<Faults>().unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
