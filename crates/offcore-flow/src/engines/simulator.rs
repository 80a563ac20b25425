//! Parameters `N:KEY=VALUE,…` of a simulated DSA device for channels `dsa-simN:wqN.M`.

use std::str::FromStr;

use offcore_dsa::sim::SimOptions;

/// A requested simulated device.
#[derive(Clone, Debug)]
pub struct Simulator {
    /// N of `dsa-simN`.
    pub number: u32,
    /// The lcore on which the device runs. By default, an lcore without a worker is chosen.
    pub lcore: Option<usize>,
    /// Options of the simulation.
    pub options: SimOptions,
    /// The options as written, `KEY=VALUE,…`.
    pub text: String,
}

impl Simulator {
    /// Returns the device's name in channel names.
    pub fn name(&self) -> String {
        format!("dsa-sim{}", self.number)
    }
}

impl FromStr for Simulator {
    type Err = String;

    /// Parses `lcore=N` here. The simulator parses all other options.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected N[:KEY=VALUE,…] such as 0:profile=vhost,gen=spr,lcore=1";
        let (number, rest) = text.split_once(':').unwrap_or((text, ""));
        let number = number.parse().map_err(|_| format!("'{number}' is no device number: {expected}"))?;
        let mut lcore = None;
        let mut options = Vec::new();
        for part in rest.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            match part.strip_prefix("lcore=") {
                Some(found) => {
                    let parsed = found.parse().map_err(|_| format!("lcore={found}: expected a number"))?;
                    lcore = Some(parsed);
                }
                None => options.push(part),
            }
        }
        let text = options.join(",");
        let options = text.parse::<SimOptions>().map_err(|error| error.to_string())?;
        Ok(Self { number, lcore, options, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulator_spec_is_parsed() {
        let plain: Simulator = "3".parse().unwrap();
        assert_eq!((plain.number, plain.lcore, plain.name().as_str()), (3, None, "dsa-sim3"));
        let placed: Simulator = "0:profile=vhost,lcore=1,seed=7".parse().unwrap();
        assert_eq!((placed.number, placed.lcore), (0, Some(1)));
    }

    #[test]
    fn spec_errors_are_reported() {
        for (text, word) in
            [("x:seed=1", "device number"), ("0:lcore=a", "lcore=a"), ("0:colour=red", "colour")]
        {
            let error = text.parse::<Simulator>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
