//! `dpdk:` as it is written.

use std::fmt;

use super::{Options, first, inner, unless};

/// `dpdk:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkSpec {
    /// The device as the EAL names it: `0000:43:00.0`, `net_null0`.
    pub device: String,
    /// Queue pairs.
    pub queues: u16,
    /// Arguments of the device, passed on as they are, without the brackets.
    pub args: Option<String>,
}

impl DpdkSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (device, options) =
            first(fields, "the device's name, as in dpdk:0000:43:00.0 or dpdk:net_null0")?;
        let options = Options::parse(options, &["queues", "args"])?;
        let args = match options.find("args") {
            None => None,
            Some(Some(text)) if !inner(text).is_empty() => Some(inner(text).to_string()),
            Some(_) => return Err("'args' has no value, expected args=[KEY=VALUE,...]".into()),
        };
        Ok(Self { device: device.into(), queues: options.queues()?, args })
    }
}

impl fmt::Display for DpdkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dpdk:{}", self.device)?;
        unless(f, "queues", self.queues, 1)?;
        match &self.args {
            None => Ok(()),
            Some(args) => write!(f, ",args=[{args}]"),
        }
    }
}
