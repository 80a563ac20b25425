//! The specification of an `impair:` port.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};

use super::PortSpec;
use super::text::Pairs;
use super::values::{Found, Number, Time, scalar, show_time};

/// Number of millionths in a percent.
const PERCENT: u32 = 10_000;
/// Maximum number of decimals of a percentage.
const DECIMALS: usize = 4;
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
    pub line: LineFaults,
    /// The port whose packets are impaired.
    pub port: Box<PortSpec>,
}

/// Faults of a line, in both directions.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LineFaults {
    /// Share of packets that are dropped.
    #[serde(default)]
    pub loss: Share,
    /// Share of packets that are overtaken by the next few.
    #[serde(default)]
    pub reorder: Share,
    /// Share of packets that are duplicated.
    #[serde(default)]
    pub duplicate: Share,
    /// Share of packets in which one bit is flipped.
    #[serde(default)]
    pub corrupt: Share,
    /// The delay of each packet.
    #[serde(default, deserialize_with = "Delay::read")]
    #[schemars(with = "Delay")]
    pub delay: Duration,
    /// Maximum random deviation from the delay, in both directions. Packets may overtake one another then.
    #[serde(default, deserialize_with = "Delay::read")]
    #[schemars(with = "Delay")]
    pub jitter: Duration,
    /// Bits per second, for each queue and direction.
    #[serde(default, deserialize_with = "Rate::optional")]
    #[schemars(with = "Rate")]
    pub rate: Option<u64>,
    /// Seed of the random numbers.
    #[serde(default = "seed", deserialize_with = "Seed::read")]
    #[schemars(with = "Seed")]
    pub seed: u64,
}

type Delay = Time<0, 10_000_000_000>;
type Rate = Number<1_000, 1_000_000_000_000>;
type Seed = Number<0, { u64::MAX }>;

const fn seed() -> u64 {
    SEED
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
                    "'{text}' names no port, expected one after the keys, as in \
                     impair:loss=1%,tap:tap0"
                ));
            }
            keys.push(field);
            at += field.len() + 1;
        };
        let line = Pairs::parse(&keys, &[])?.read()?;
        let port: PortSpec = inner.parse().map_err(|e| format!("the impaired port: {e}"))?;
        Self::new(line, port)
    }

    /// Creates the specification of a port with impairments.
    ///
    /// # Errors
    /// The port has impairments already.
    pub fn new(line: LineFaults, port: PortSpec) -> Result<Self, String> {
        match port {
            PortSpec::Impair(_) => Err(format!(
                "impairments of '{port}': they cannot be nested, expected a port of another kind"
            )),
            port => Ok(Self { line, port: Box::new(port) }),
        }
    }
}

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a percentage from 0% to 100%, such as 1% or 0.05%, in steps of 0.0001%";
        scalar(deserializer, expected, |found| match found {
            Found::Text(text) => Self::parse(text),
            _ => None,
        })
    }
}

impl JsonSchema for Share {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Share".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^[0-9]{1,3}(\\.[0-9]{1,4})?%$" })
    }
}

impl fmt::Display for ImpairSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LineFaults { loss, reorder, duplicate, corrupt, delay, jitter, rate, seed } = self.line;
        f.write_str("impair:")?;
        let shares = [("loss", loss), ("reorder", reorder), ("duplicate", duplicate), ("corrupt", corrupt)];
        for (key, share) in shares {
            if share != Share::default() {
                write!(f, "{key}={share},")?;
            }
        }
        for (key, time) in [("delay", delay), ("jitter", jitter)] {
            if !time.is_zero() {
                write!(f, "{key}={},", show_time(time))?;
            }
        }
        if let Some(rate) = rate {
            write!(f, "rate={rate},")?;
        }
        if seed != SEED {
            write!(f, "seed={seed},")?;
        }
        self.port.fmt(f)
    }
}
