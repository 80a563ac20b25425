//! Options of a simulated device: its generation, its layout, and its faults.

use std::str::FromStr;

use super::{Faults, SimError, Timing};
use crate::config::{self, DeviceCapabilities, DeviceConfig};

/// The generation of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Generation {
    /// Version 0x100 (Sapphire Rapids): 128 descriptors of queue space, no event log.
    #[default]
    Spr,
    /// Version 0x200 (Granite Rapids): 256 descriptors of queue space, an event log, more operations.
    Dsa2,
}

impl Generation {
    /// Returns the capabilities of the generation.
    pub const fn capabilities(self) -> DeviceCapabilities {
        match self {
            Self::Spr => DeviceCapabilities::spr(),
            Self::Dsa2 => DeviceCapabilities::dsa2(),
        }
    }
}

/// The layout of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Profile {
    /// A built-in layout ([`config::built_in`]), or the path of an accel-config JSON file.
    Named(String),
    /// This layout.
    Layout(Box<DeviceConfig>),
}

impl Default for Profile {
    /// `net`: four groups of one dedicated queue and one DSA engine.
    fn default() -> Self {
        Self::Named("net".into())
    }
}

/// Options of a simulated device.
///
/// On a command line: `profile=net,gen=dsa2,seed=7,fault=page:0.001+hw:0.0001`. All keys are optional:
///
/// | Key | Value | Default |
/// |---|---|---|
/// | `profile` | a built-in layout (`net`, `vhost`, …) or a path of an accel-config JSON file | `net` |
/// | `gen` | `spr` or `dsa2` | `spr` |
/// | `seed` | seed of all randomness | 1 |
/// | `fault` | faults to inject: [`Faults`] | none |
/// | `slower` | duration of everything, as a multiple | 1 |
/// | `ops` | OPCAP, hexadecimal: the supported operations | the generation's |
#[derive(Clone, Debug, PartialEq)]
pub struct SimOptions {
    /// The layout of the device.
    pub profile: Profile,
    pub generation: Generation,
    /// Capabilities that replace the generation's, for experiments.
    pub capabilities: Option<DeviceCapabilities>,
    /// Seed of all randomness. In a stepped device, the same seed and submissions give the same trace.
    pub seed: u64,
    pub faults: Faults,
    /// The durations of all steps.
    pub timing: Timing,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            profile: Profile::default(),
            generation: Generation::default(),
            capabilities: None,
            seed: 1,
            faults: Faults::default(),
            timing: Timing::default(),
        }
    }
}

impl SimOptions {
    /// Returns the capabilities of the device.
    pub fn capabilities(&self) -> DeviceCapabilities {
        self.capabilities.clone().unwrap_or_else(|| self.generation.capabilities())
    }
}

impl FromStr for SimOptions {
    type Err = SimError;

    fn from_str(text: &str) -> Result<Self, SimError> {
        let mut options = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let wrong = |expected: &'static str| SimError::Option { found: part.into(), expected };
            match key {
                "profile" if !value.is_empty() => options.profile = Profile::Named(value.into()),
                "gen" => {
                    options.generation = match value {
                        "spr" => Generation::Spr,
                        "dsa2" => Generation::Dsa2,
                        _ => return Err(wrong("gen=spr or gen=dsa2")),
                    }
                }
                "seed" => options.seed = value.parse().map_err(|_| wrong("seed=NUMBER"))?,
                "fault" => options.faults = value.parse()?,
                "slower" => {
                    let factor: f64 = value.parse().map_err(|_| wrong("slower=FACTOR"))?;
                    if !(1e-3..=1e6).contains(&factor) {
                        return Err(wrong("slower= from 0.001 to 1000000"));
                    }
                    options.timing = Timing::default().slower(factor);
                }
                "ops" => {
                    let ops = u64::from_str_radix(value.trim_start_matches("0x"), 16)
                        .map_err(|_| wrong("ops=HEXADECIMAL, such as ops=1003f03ff"))?;
                    let mut capabilities = options.capabilities();
                    capabilities.ops.0 = [ops, 0, 0, 0];
                    options.capabilities = Some(capabilities);
                }
                _ => {
                    return Err(wrong("profile=, gen=, seed=, fault=, slower= or ops=, separated by commas"));
                }
            }
        }
        if let Some(given) = &mut options.capabilities {
            // `gen=` may follow `ops=`.
            *given = DeviceCapabilities { ops: given.ops, ..options.generation.capabilities() };
        }
        Ok(options)
    }
}

/// Returns the layout that `options` select, checked against the device's rules.
pub(super) fn layout(options: &SimOptions, name: &str) -> Result<DeviceConfig, SimError> {
    if config::device_number(name).is_none() {
        return Err(SimError::Name(name.into()));
    }
    let device = options.capabilities();
    let mut layout = match &options.profile {
        Profile::Layout(layout) => (**layout).clone(),
        Profile::Named(profile) => match config::built_in(profile, &device) {
            Some(layout) => layout,
            None => fitted(config::profile(profile).map_err(SimError::Config)?, name, &device),
        },
    };
    layout.name = name.into();
    config::check(&layout, &device).map_err(|broken| SimError::Config(config::ConfigError::Rules(broken)))?;
    Ok(layout)
}

/// Returns a file's layout for this device. Settings that the device does not support are removed, as in `configure`.
fn fitted(mut layout: DeviceConfig, name: &str, device: &DeviceCapabilities) -> DeviceConfig {
    layout.name = name.into();
    for note in layout.fit(device) {
        tracing::warn!("{note}");
    }
    layout
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulator_options_are_parsed() {
        let options: SimOptions =
            "profile=vhost,gen=dsa2,seed=7,fault=page:0.5+weak,slower=2,ops=1f".parse().unwrap();
        assert_eq!(options.profile, Profile::Named("vhost".into()));
        assert_eq!((options.generation, options.seed), (Generation::Dsa2, 7));
        assert!(options.faults.page == 0.5 && options.faults.weak_ordering);
        assert_eq!(options.timing, Timing::default().slower(2.0));
        assert_eq!(options.capabilities().ops.0, [0x1f, 0, 0, 0]);
        assert_eq!(options.capabilities().version, 0x200);
        assert_eq!("ops=1f,gen=dsa2".parse::<SimOptions>().unwrap().capabilities().version, 0x200);
        assert_eq!("".parse::<SimOptions>().unwrap(), SimOptions::default());
    }

    #[test]
    fn option_errors_name_expected_values() {
        for text in ["gen=icx", "seed=x", "profile=", "speed=2", "slower=0", "ops=zz", "fault=page"] {
            let error = text.parse::<SimOptions>().unwrap_err().to_string();
            assert!(error.contains("expected"), "{error}");
        }
        let missing = "profile=nothing".parse().unwrap();
        assert!(matches!(layout(&missing, "dsa-sim0"), Err(SimError::Config(_))));
        assert!(matches!(layout(&SimOptions::default(), "dsa-sim"), Err(SimError::Name(_))));
    }

    #[test]
    fn a_file_is_fitted_to_the_device() {
        // accel-config's template for users, which leaves sizes and engines open.
        let template = r#"[ { "dev":"dsa0", "groups":[ { "dev":"group0.0", "grouped_workqueues":[
            { "dev":"wq0.0", "mode":"shared", "group_id":0, "priority":10, "block_on_fault":1,
              "name":"user_default_wq", "ats_disable":0, "prs_disable":1 } ] } ] } ]"#;
        let dir = offcore_mem::testing::TempDir::new();
        let path = dir.set("profile.json", template);
        let options: SimOptions = format!("profile={}", path.display()).parse().unwrap();
        let laid_out = layout(&options, "dsa-sim3").unwrap();
        assert_eq!((laid_out.wq_name(0).as_str(), laid_out.engines_in(0)), ("wq3.0", 4));
        assert!(laid_out.wqs[0].size > 0 && !laid_out.wqs[0].prs_disable);
    }
}
