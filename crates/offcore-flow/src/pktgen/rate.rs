//! Packet rates, and the times at which packets are due.

use std::fmt;
use std::str::FromStr;

use crate::error::{Field, SwitchError};
use std::time::Duration;

use offcore_stats::tsc;

/// Bytes on the wire in addition to the frame: preamble, start delimiter and the gap between frames.
pub const WIRE_OVERHEAD: usize = 20;
/// If nothing could be sent for longer than this, the delay is not made up for.
const BACKLOG: Duration = Duration::from_secs(1);

/// A packet rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// As fast as the port takes packets.
    Unlimited,
    /// Packets per second.
    Packets(f64),
    /// Bits of frames per second, including the FCS.
    Bits(f64),
    /// Percentage of the link speed, including preambles and gaps. [`Rate::on`] converts it to [`Rate::Wire`].
    Percent(f64),
    /// Bits per second on the wire: frames, FCS, preambles and gaps.
    Wire(f64),
}

impl Rate {
    /// Returns the rate on a link of `bits` per second, if its speed is known.
    ///
    /// # Errors
    /// If the rate is a percentage and the link speed is unknown.
    pub fn on(self, bits: Option<f64>) -> Result<Self, SwitchError> {
        match (self, bits) {
            (Self::Percent(percent), Some(bits)) => Ok(Self::Wire(bits * percent / 100.0)),
            (Self::Percent(_), None) => Field::LinkSpeed.refuse(format!(
                "the link's speed is not known, and a rate of {self} needs it: give it, such as 10G"
            )),
            (rate, _) => Ok(rate),
        }
    }

    /// Returns the ticks from a packet of `size` bytes, including the FCS, to the next one; 0 without a limit.
    #[inline]
    fn cost(self, size: usize, hz: f64) -> f64 {
        match self {
            Self::Unlimited | Self::Percent(_) => 0.0,
            Self::Packets(rate) => hz / rate,
            Self::Bits(rate) => size as f64 * 8.0 * hz / rate,
            Self::Wire(rate) => (size + WIRE_OVERHEAD) as f64 * 8.0 * hz / rate,
        }
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "'{text}' is no rate: expected packets per second such as 10k or 1.5M, bits per second \
                 such as 2Gbps, a share of the link such as 50%, or max"
            )
        };
        let text = text.trim();
        if text == "max" {
            return Ok(Self::Unlimited);
        }
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.parse().map_err(|_| expected())?;
            return if percent > 0.0 && percent <= 100.0 {
                Ok(Self::Percent(percent))
            } else {
                Err(expected())
            };
        }
        let lower = text.to_ascii_lowercase();
        let units = [("bps", true), ("bit/s", true), ("pps", false), ("", false)];
        let found = units.iter().find_map(|(unit, bits)| Some((lower.strip_suffix(unit)?, *bits)));
        let (number, bits) = found.ok_or_else(expected)?;
        let most = if bits { 1e13 } else { 1e9 };
        let rate = scaled(number.trim_end()).filter(|rate| *rate >= 1e-3).ok_or_else(expected)?;
        if rate > most {
            return Err(match bits {
                true => format!("'{text}': expected at most 10Tbps"),
                false => format!(
                    "'{text}': expected at most 1G packets per second; bits per second are written as 10Gbps"
                ),
            });
        }
        Ok(if bits { Self::Bits(rate) } else { Self::Packets(rate) })
    }
}

/// Parses a number with an optional suffix k, M, G or T.
fn scaled(text: &str) -> Option<f64> {
    let (number, factor) = match text.chars().last()? {
        'k' => (&text[..text.len() - 1], 1e3),
        'm' => (&text[..text.len() - 1], 1e6),
        'g' => (&text[..text.len() - 1], 1e9),
        't' => (&text[..text.len() - 1], 1e12),
        _ => (text, 1.0),
    };
    number.parse::<f64>().ok().map(|number| number * factor).filter(|number| number.is_finite())
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_units = |f: &mut fmt::Formatter<'_>, number: f64, unit: &str| {
            let (factor, prefix) = match number {
                1e9.. => (1e9, "G"),
                1e6.. => (1e6, "M"),
                1e3.. => (1e3, "k"),
                _ => (1.0, ""),
            };
            write!(f, "{}{prefix}{unit}", number / factor)
        };
        match *self {
            Self::Unlimited => f.write_str("max"),
            Self::Packets(rate) => in_units(f, rate, "pps"),
            Self::Bits(rate) => in_units(f, rate, "bps"),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Wire(rate) => {
                in_units(f, rate, "bps")?;
                f.write_str(" on the wire")
            }
        }
    }
}

/// The times at which packets are due. The loop is open: a packet's time does not depend on whether earlier packets
/// were sent in time.
#[derive(Debug)]
pub(super) struct Schedule {
    rate: Rate,
    hz: f64,
    /// When the next packet is due. `None` before the first one.
    due: Option<u64>,
    /// Fraction of a tick to add to `due`.
    part: f64,
    /// Ticks from the last packet to the next one.
    last_cost: f64,
    backlog: u64,
}

impl Schedule {
    pub(super) fn new(rate: Rate, hz: u64) -> Self {
        let backlog = (BACKLOG.as_secs_f64() * hz as f64) as u64;
        Self { rate, hz: hz as f64, due: None, part: 0.0, last_cost: 0.0, backlog }
    }

    /// Creates a schedule that uses the TSC.
    pub(super) fn by_tsc(rate: Rate) -> Self {
        Self::new(rate, tsc::hz())
    }

    /// Returns the time of the next packet if it is due, and the number of packets given up as too late before it.
    #[inline]
    pub(super) fn due(&mut self, now: u64) -> Option<(u64, u64)> {
        if self.rate == Rate::Unlimited {
            return Some((now, 0));
        }
        let due = *self.due.get_or_insert(now);
        let behind = now.checked_sub(due)?;
        if behind <= self.backlog {
            return Some((due, 0));
        }
        (self.due, self.part) = (Some(now), 0.0);
        let given_up = if self.last_cost > 0.0 { (behind as f64 / self.last_cost) as u64 } else { 0 };
        Some((now, given_up))
    }

    /// Returns the time of the next packet, now or later. `None` before the first packet and without a rate.
    pub(super) fn next(&self) -> Option<u64> {
        self.due
    }

    /// Records that a packet of `size` bytes, including the FCS, is sent.
    #[inline]
    pub(super) fn spend(&mut self, size: usize) {
        let Some(due) = &mut self.due else { return };
        self.last_cost = self.rate.cost(size, self.hz);
        self.part += self.last_cost;
        let whole = self.part.floor();
        *due += whole as u64;
        self.part -= whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_parse_and_display() {
        for (text, rate, shown) in [
            ("10k", Rate::Packets(1e4), "10kpps"),
            ("1.5M", Rate::Packets(1.5e6), "1.5Mpps"),
            ("1mpps", Rate::Packets(1e6), "1Mpps"),
            ("7", Rate::Packets(7.0), "7pps"),
            ("2Gbps", Rate::Bits(2e9), "2Gbps"),
            ("2G bps", Rate::Bits(2e9), "2Gbps"),
            ("100Mbit/s", Rate::Bits(1e8), "100Mbps"),
            ("max", Rate::Unlimited, "max"),
            ("50%", Rate::Percent(50.0), "50%"),
        ] {
            let found: Rate = text.parse().unwrap();
            assert_eq!((found, found.to_string().as_str()), (rate, shown), "{text}");
        }
        assert!("10G".parse::<Rate>().unwrap_err().contains("written as 10Gbps"));
        assert!("1e99bps".parse::<Rate>().unwrap_err().contains("at most 10Tbps"));
        for bad in ["", "k", "-1", "0", "nan", "inf", "1x", "0%", "101%"] {
            assert!(bad.parse::<Rate>().unwrap_err().contains("max"), "{bad}");
        }
        assert_eq!(Rate::Percent(50.0).on(Some(1e10)).unwrap(), Rate::Wire(5e9));
        assert!(Rate::Percent(50.0).on(None).unwrap_err().to_string().contains("50%"));
        assert_eq!(Rate::Packets(1.0).on(None).unwrap(), Rate::Packets(1.0));
    }

    /// Returns the number of packets due in the first `ticks`, with a check every `step` ticks.
    fn due_in(rate: Rate, hz: u64, size: usize, ticks: u64, step: usize) -> u64 {
        let mut schedule = Schedule::new(rate, hz);
        let mut packets = 0;
        for now in (1000..=1000 + ticks).step_by(step) {
            while schedule.due(now).is_some() {
                schedule.spend(size);
                packets += 1;
            }
        }
        packets
    }

    #[test]
    fn rate_is_kept() {
        const HZ: u64 = 2_000_000_000;
        for step in [100, 7777, 1_000_000] {
            let (ticks, end) = (HZ / 10, HZ / 10 / step as u64 * step as u64);
            let expected = |rate: f64| 1 + (end as f64 * rate / HZ as f64) as u64;
            assert_eq!(due_in(Rate::Packets(1e4), HZ, 64, ticks, step), expected(1e4));
            assert_eq!(due_in(Rate::Packets(333_333.0), HZ, 64, ticks, step), expected(333_333.0));
            assert_eq!(due_in(Rate::Bits(5.12e6), HZ, 64, ticks, step), expected(1e4));
            assert_eq!(due_in(Rate::Wire(6.72e6), HZ, 64, ticks, step), expected(1e4));
        }
    }

    #[test]
    fn late_poll_returns_each_due_time() {
        let mut schedule = Schedule::new(Rate::Packets(1000.0), 1_000_000);
        assert_eq!(schedule.due(500), Some((500, 0)));
        schedule.spend(64);
        assert_eq!(schedule.due(1499), None);
        for due in [1500, 2500, 3500] {
            assert_eq!(schedule.due(3600), Some((due, 0)));
            schedule.spend(64);
        }
        assert_eq!(schedule.due(3600), None);
    }

    #[test]
    fn long_stall_is_not_caught_up() {
        let mut schedule = Schedule::new(Rate::Packets(1000.0), 1_000_000);
        schedule.due(0);
        schedule.spend(64);
        assert_eq!(schedule.due(900_000), Some((1000, 0)));
        let late = schedule.due(2_001_000);
        assert_eq!(late, Some((2_001_000, 2000)));
    }
}
