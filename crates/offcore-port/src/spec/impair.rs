//! The specification of an `impair:` port.

use std::fmt;
use std::time::Duration;

use super::{Options, PortSpec, parse_number};

/// The option keys, in the order in which they are printed.
const KEYS: [&str; 8] = ["loss", "reorder", "duplicate", "corrupt", "delay", "jitter", "rate", "seed"];
/// Number of millionths in a percent.
const PERCENT: u32 = 10_000;
/// Maximum number of decimals of a percentage.
const DECIMALS: usize = 4;
/// Maximum delay and jitter.
const LONGEST: Duration = Duration::from_secs(10);
/// The default seed.
const SEED: u64 = 1;

/// A share of the packets, in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(pub u32);

impl Share {
    /// Converts the share to a probability.
    pub fn probability(self) -> f64 {
        f64::from(self.0) / f64::from(100 * PERCENT)
    }

    /// Parses a percentage such as `1%` or `0.05%`.
    fn parse(text: &str) -> Option<Self> {
        let number = text.strip_suffix('%')?;
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(part) || whole.len() > 3 || part.len() > DECIMALS {
            return None;
        }
        let whole: u32 = whole.parse().ok()?;
        let part: u32 = format!("{part:0<DECIMALS$}").parse().ok()?;
        Some(Self(whole * PERCENT + part)).filter(|share| share.0 <= 100 * PERCENT)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / PERCENT, self.0 % PERCENT);
        match part {
            0 => write!(f, "{whole}%"),
            _ => write!(f, "{whole}.{}%", format!("{part:0DECIMALS$}").trim_end_matches('0')),
        }
    }
}

/// `impair:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImpairSpec {
    /// Share of packets that are dropped.
    pub loss: Share,
    /// Share of packets that are overtaken by the next few.
    pub reorder: Share,
    /// Share of packets that are duplicated.
    pub duplicate: Share,
    /// Share of packets in which one bit is flipped.
    pub corrupt: Share,
    /// The delay of each packet.
    pub delay: Duration,
    /// Maximum random deviation from the delay, in both directions. Packets may overtake one another then.
    pub jitter: Duration,
    /// Bits per second, for each queue and direction.
    pub rate: Option<u64>,
    pub seed: u64,
    /// The port whose packets are impaired.
    pub port: Box<PortSpec>,
}

impl ImpairSpec {
    /// Parses `text`, the part behind `impair:`. The keys end before the first field that begins with a port's kind.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut keys = Vec::new();
        let mut at = 0;
        let inner = loop {
            let rest = text.get(at..).unwrap_or_default();
            let field = rest.split(',').next().unwrap_or_default();
            if field.split_once(':').is_some_and(|(kind, _)| !kind.contains('=')) {
                break rest;
            }
            if at > text.len() || text.is_empty() {
                return Err(format!(
                    "'{text}' names no port, expected one behind the keys, as in \
                     impair:loss=1%,tap:tap0"
                ));
            }
            keys.push(field);
            at += field.len() + 1;
        };
        let options = Options::parse(&keys, &KEYS)?;
        let port: PortSpec = inner.parse().map_err(|e| format!("what it impairs: {e}"))?;
        if matches!(port, PortSpec::Impair(_)) {
            return Err(format!("it impairs '{inner}', expected a port of another kind"));
        }
        Ok(Self {
            loss: share(&options, "loss")?,
            reorder: share(&options, "reorder")?,
            duplicate: share(&options, "duplicate")?,
            corrupt: share(&options, "corrupt")?,
            delay: time(&options, "delay")?,
            jitter: time(&options, "jitter")?,
            rate: options.optional_number("rate", 1_000..=1_000_000_000_000)?,
            seed: options.number("seed", SEED, 0..=u64::MAX)?,
            port: Box::new(port),
        })
    }
}

fn share(options: &Options<'_>, key: &str) -> Result<Share, String> {
    let Some(value) = options.find(key) else { return Ok(Share::default()) };
    let found = value.unwrap_or_default();
    Share::parse(found).ok_or_else(|| {
        format!(
            "{key}={found}: expected a percentage from 0% to 100%, such as 1% or 0.05%, in steps of 0.0001%"
        )
    })
}

fn time(options: &Options<'_>, key: &str) -> Result<Duration, String> {
    let Some(value) = options.find(key) else { return Ok(Duration::ZERO) };
    let found = value.unwrap_or_default();
    let units = [("us", 1), ("ms", 1_000), ("s", 1_000_000)];
    let micros = units.into_iter().find_map(|(unit, micros)| {
        let digits = found.strip_suffix(unit).filter(|number| number.bytes().all(|b| b.is_ascii_digit()))?;
        parse_number(digits)?.checked_mul(micros)
    });
    micros.map(Duration::from_micros).filter(|time| *time <= LONGEST).ok_or_else(|| {
        format!("{key}={found}: expected a time from 0us to {}s, such as 200us, 5ms or 1s", LONGEST.as_secs())
    })
}

impl fmt::Display for ImpairSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("impair:")?;
        let shares = [self.loss, self.reorder, self.duplicate, self.corrupt];
        for (key, share) in KEYS.into_iter().zip(shares) {
            if share != Share::default() {
                write!(f, "{key}={share},")?;
            }
        }
        for (key, time) in [("delay", self.delay), ("jitter", self.jitter)] {
            match time.as_micros() {
                0 => {}
                micros if micros % 1_000 == 0 => write!(f, "{key}={}ms,", micros / 1_000)?,
                micros => write!(f, "{key}={micros}us,")?,
            }
        }
        if let Some(rate) = self.rate {
            write!(f, "rate={rate},")?;
        }
        if self.seed != SEED {
            write!(f, "seed={},", self.seed)?;
        }
        self.port.fmt(f)
    }
}
