//! The throughput search (RFC 2544, 26.1): finds the highest rate at which at most a given share of frames is lost.
//!
//! It is a binary search for several losses at once. A trial for one loss also counts for the others.

use offcore_stats::named;

/// Parameters of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchOptions {
    /// Accepted losses, as shares of packets from 0 to 1.
    pub losses: Vec<f64>,
    /// The highest rate to try, in packets per second.
    pub max_rate: f64,
    /// Resolution of the result, as a share of the highest rate.
    pub resolution: f64,
}

/// Result of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Requested packets per second.
    pub rate: f64,
    pub sent: u64,
    /// Packets received, without duplicates.
    pub received: u64,
    /// Whether the sender kept the rate.
    pub offered: bool,
}

impl Outcome {
    /// Returns the share of lost packets.
    pub fn loss(&self) -> f64 {
        match self.sent {
            0 => 1.0,
            sent => sent.saturating_sub(self.received) as f64 / sent as f64,
        }
    }

    fn passes(&self, loss: f64) -> bool {
        self.offered && self.loss() <= loss
    }
}

named! {
    /// The reason why a throughput is not higher.
    pub enum Limit {
        /// A higher rate loses too many packets.
        Loss = "loss",
        /// The highest rate to try passes.
        MaxRate = "max_rate",
        /// A higher rate could not be sent.
        Sender = "sender",
    }
}

/// The throughput at one loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput<T> {
    /// The accepted share of lost packets.
    pub loss: f64,
    /// The trial with the highest rate that passed. `None` if even the lowest rate lost too many packets.
    pub best: Option<T>,
    /// The reason why it is not higher.
    pub limit: Limit,
    /// Number of trials so far, including trials for other losses.
    pub trials: usize,
}

/// Returns the approximate number of trials in a search.
pub fn expected_trials(options: &SearchOptions) -> usize {
    1 + (1.0 / options.resolution).log2().ceil() as usize
}

/// Runs a search. `trial` sends at a rate and returns the result.
///
/// # Errors
/// The error of the first trial that fails.
pub fn search<T: Copy + AsRef<Outcome>, E>(
    options: &SearchOptions,
    mut trial: impl FnMut(f64) -> Result<T, E>,
) -> Result<Vec<Throughput<T>>, E> {
    let mut trials: Vec<T> = Vec::new();
    let mut found = Vec::new();
    for &loss in &options.losses {
        loop {
            let (best, worst) = bracket(&trials, loss);
            let low = best.map_or(0.0, |best| best.as_ref().rate);
            let next = match worst {
                None if low >= options.max_rate => None,
                None => Some(options.max_rate),
                Some(worst) => {
                    let high = worst.as_ref().rate;
                    (high - low > options.resolution * options.max_rate).then_some((low + high) / 2.0)
                }
            };
            if let Some(rate) = next {
                trials.push(trial(rate)?);
                continue;
            }
            let limit = match worst {
                None => Limit::MaxRate,
                Some(worst) if worst.as_ref().offered => Limit::Loss,
                Some(_) => Limit::Sender,
            };
            found.push(Throughput { loss, best, limit, trials: trials.len() });
            break;
        }
    }
    Ok(found)
}

/// Returns the passing trial with the highest rate below all failing ones, and the failing trial with the lowest rate.
fn bracket<T: Copy + AsRef<Outcome>>(trials: &[T], loss: f64) -> (Option<T>, Option<T>) {
    let by_rate = |a: &T, b: &T| a.as_ref().rate.total_cmp(&b.as_ref().rate);
    let failed = trials.iter().copied().filter(|trial| !trial.as_ref().passes(loss)).min_by(by_rate);
    let below = |trial: &T| failed.is_none_or(|failed| trial.as_ref().rate < failed.as_ref().rate);
    let passed = trials.iter().copied().filter(|trial| trial.as_ref().passes(loss) && below(trial));
    (passed.max_by(by_rate), failed)
}

impl AsRef<Self> for Outcome {
    fn as_ref(&self) -> &Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// A device that forwards `capacity` packets per second, and a sender that reaches `sender` packets per second.
    fn device(rate: f64, capacity: f64, sender: f64) -> Outcome {
        let sent = 1_000_000;
        let received = (sent as f64 * (capacity / rate).min(1.0)).floor() as u64;
        Outcome { rate, sent, received, offered: rate <= sender }
    }

    fn options(losses: &[f64]) -> SearchOptions {
        SearchOptions { losses: losses.into(), max_rate: 10e6, resolution: 0.001 }
    }

    #[test]
    fn search_finds_device_throughput() {
        for capacity in [20e3, 1e6, 3_333_333.0, 7.7e6, 9.999e6] {
            let mut trials = 0;
            let found = search(&options(&[0.0]), |rate| {
                trials += 1;
                Ok::<_, Infallible>(device(rate, capacity, f64::MAX))
            });
            let [found] = found.unwrap()[..] else { panic!("one loss was asked for") };
            let best = found.best.unwrap();
            assert!(best.rate <= capacity && best.rate > capacity - 10e6 * 0.001, "{capacity}: {best:?}");
            assert_eq!((found.limit, found.trials), (Limit::Loss, trials));
            assert!(trials <= expected_trials(&options(&[0.0])), "{trials}");
        }
    }

    #[test]
    fn loss_targets_share_trials() {
        let losses = [0.0, 0.0001, 0.01, 0.5];
        let mut trials = 0;
        let found = search(&options(&losses), |rate| {
            trials += 1;
            Ok::<_, Infallible>(device(rate, 1e6, f64::MAX))
        })
        .unwrap();
        let rates: Vec<_> = found.iter().map(|found| found.best.unwrap().rate).collect();
        for (loss, rate) in losses.into_iter().zip(&rates) {
            let limit = 1e6 / (1.0 - loss);
            assert!(*rate <= limit && *rate > limit - 10e3, "{loss}: {rate}");
        }
        assert!(rates.is_sorted());
        assert!(trials < 2 * expected_trials(&options(&losses)), "{trials}");
    }

    #[test]
    fn limiting_cause_is_reported() {
        let run = |capacity, sender| {
            let found = search(&options(&[0.0]), |rate| Ok::<_, Infallible>(device(rate, capacity, sender)));
            found.unwrap()[0]
        };
        let all = run(20e6, f64::MAX);
        assert_eq!((all.limit, all.best.unwrap().rate, all.trials), (Limit::MaxRate, 10e6, 1));
        let slow = run(20e6, 4e6);
        assert_eq!(slow.limit, Limit::Sender);
        assert!(slow.best.unwrap().rate > 3.98e6);
        let dead = run(0.0, f64::MAX);
        assert_eq!((dead.limit, dead.best), (Limit::Loss, None));
    }

    #[test]
    fn unlucky_trial_lowers_the_result() {
        let mut first = true;
        let found = search(&options(&[0.0]), |rate| {
            let unlucky = rate < 2e6 && std::mem::take(&mut first);
            Ok::<_, Infallible>(device(rate, if unlucky { 0.0 } else { 1.9e6 }, f64::MAX))
        });
        let best = found.unwrap()[0].best.unwrap();
        assert!(best.rate < 1.25e6 && best.rate > 1.2e6, "{best:?}");
    }

    #[test]
    fn failed_trial_ends_search() {
        assert_eq!(search::<Outcome, _>(&options(&[0.0]), |_| Err("gone")), Err("gone"));
    }
}
