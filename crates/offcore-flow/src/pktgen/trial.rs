//! Trials of a search: a number of packets of one size at one rate, and the result.

use std::time::{Duration, Instant};

use offcore_stats::tsc;

use super::Running;
use super::rate::Rate;
use super::receiver::Received;
use super::report::{Figures, Reporter};
use super::search::Outcome;
use super::sender::Sent;
use super::sizes::Sizes;
use crate::error::SwitchError;

/// Learning frames per direction, from which the device under test learns addresses.
const LEARNING: u64 = 16;
/// Rate of learning frames, in packets per second.
const LEARNING_RATE: f64 = 200.0;
/// How much longer than planned a sender may take and still have kept its rate: a share of the time plus a time.
const SLACK: (f64, Duration) = (0.01, Duration::from_millis(2));
/// A sender that was late by at most this share has nearly kept its rate.
const NEARLY: f64 = 0.25;
/// Interval between checks by the control thread.
const TICK: Duration = Duration::from_millis(1);

/// Parameters of trials.
#[derive(Clone, Debug)]
pub struct TrialPlan {
    pub size: usize,
    /// Time during which packets are sent.
    pub duration: Duration,
    /// Time to wait for missing packets.
    pub wait: Duration,
}

/// A trial and its measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// The result for a search.
    pub outcome: Outcome,
    /// Extra time that sending took, as a share of the time that the rate requires.
    pub late: f64,
    /// Counts, rates and latencies.
    pub figures: Figures,
}

impl AsRef<Outcome> for Trial {
    fn as_ref(&self) -> &Outcome {
        &self.outcome
    }
}

/// Why a trial was not made.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum TrialError {
    /// {0}
    Switch(#[from] SwitchError),
    /// no learning frame of {size} bytes came back in {seconds} s: is something behind the port that sends them on,
    /// and does it take frames of this size?
    NothingCame { size: usize, seconds: f64 },
    /// interrupted
    Interrupted,
    /// a worker ended by itself
    Worker,
}

/// Returns whether to continue. It is called all the time, so that the caller can maintain the ports.
pub type Tick<'a> = dyn FnMut(&mut Running) -> bool + 'a;

impl Running {
    /// Sends a few frames of this size and waits until some have arrived in every direction.
    ///
    /// # Errors
    /// [`TrialError::NothingCame`] if none has arrived after `wait`, which is extended to 1 s if shorter.
    pub fn learn(&mut self, size: usize, wait: Duration, tick: &mut Tick<'_>) -> Result<(), TrialError> {
        let sizes = Sizes::fixed(size)?;
        let before = self.received();
        self.change(|settings| {
            (settings.running, settings.rate) = (false, Rate::Packets(LEARNING_RATE));
            (settings.sizes, settings.count, settings.burst) = (sizes, Some(LEARNING), 1);
        })?;
        self.begin()?;
        let began = Instant::now();
        loop {
            let came = self.received().iter().zip(&before).all(|(now, before)| now != before);
            if came && self.is_done() {
                return Ok(());
            }
            if began.elapsed() > wait.max(Duration::from_secs(1)) {
                // A port that accepts no packets is never done.
                self.pause()?;
                let seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0;
                return if came { Ok(()) } else { Err(TrialError::NothingCame { size, seconds }) };
            }
            self.pass(tick)?;
        }
    }

    /// Measures the highest rate of one direction for packets of this size, in packets per second.
    ///
    /// # Errors
    /// [`TrialError`].
    pub fn sending_rate(&mut self, plan: &TrialPlan, tick: &mut Tick<'_>) -> Result<f64, TrialError> {
        let sizes = Sizes::fixed(plan.size)?;
        self.change(|settings| {
            (settings.running, settings.rate, settings.count) = (false, Rate::Unlimited, None);
            settings.sizes = sizes;
        })?;
        let before = self.counted();
        self.begin()?;
        let began = Instant::now();
        while began.elapsed() < plan.duration {
            self.pass(tick)?;
        }
        self.pause()?;
        let seconds = began.elapsed().as_secs_f64();
        let sent = (self.counted() - before).sent as f64 / self.directions.len() as f64;
        self.settle(plan.wait, tick)?;
        Ok(sent / seconds)
    }

    /// Runs a [`trial`](Self::trial), and repeats it up to twice if the sender nearly kept its rate: the delay was then
    /// more likely caused by the operating system than by its port.
    ///
    /// # Errors
    /// [`TrialError`].
    pub fn patient_trial(
        &mut self,
        reporter: &mut Reporter,
        plan: &TrialPlan,
        rate: f64,
        tick: &mut Tick<'_>,
    ) -> Result<Trial, TrialError> {
        let mut trial = self.trial(reporter, plan, rate, tick)?;
        for _ in 0..2 {
            if trial.outcome.offered || trial.late > NEARLY {
                break;
            }
            trial = self.trial(reporter, plan, rate, tick)?;
        }
        Ok(trial)
    }

    /// Sends packets at `rate` packets per second in each direction.
    ///
    /// # Errors
    /// [`TrialError`].
    pub fn trial(
        &mut self,
        reporter: &mut Reporter,
        plan: &TrialPlan,
        rate: f64,
        tick: &mut Tick<'_>,
    ) -> Result<Trial, TrialError> {
        let sizes = Sizes::fixed(plan.size)?;
        let count = ((rate * plan.duration.as_secs_f64()).round() as u64).max(1);
        self.change(|settings| {
            (settings.running, settings.rate) = (false, Rate::Packets(rate));
            (settings.sizes, settings.count) = (sizes, Some(count));
        })?;
        reporter.clear(self);
        let before = self.counted();
        self.begin()?;
        let planned = Duration::from_secs_f64(count as f64 / rate);
        let enough = planned.mul_f64(2.0) + Duration::from_secs(1);
        let began = Instant::now();
        while !self.is_done() && began.elapsed() < enough {
            self.pass(tick)?;
        }
        let done = self.is_done();
        let (took, gap) = if done { (self.took(), self.gap()) } else { (began.elapsed(), Duration::ZERO) };
        if !done {
            self.pause()?;
        }
        self.settle_from(before.sent, before.unique(), plan.wait, tick)?;
        let figures = reporter.last(self, took, gap).all;
        let offered =
            done && took <= planned.mul_f64(1.0 + SLACK.0) + SLACK.1 && figures.counts.given_up == 0;
        let (sent, received) = (figures.counts.sent + figures.counts.tx_dropped, figures.counts.unique());
        let late = (took.as_secs_f64() / planned.as_secs_f64() - 1.0).max(0.0);
        Ok(Trial { outcome: Outcome { rate, sent, received, offered }, late, figures })
    }

    /// Returns the time that the slowest sender took from the last start until everything was sent.
    pub fn took(&self) -> Duration {
        self.longest(Sent::Took)
    }

    /// Returns the gap after the last packet, which a rate includes.
    pub fn gap(&self) -> Duration {
        self.longest(Sent::Gap)
    }

    fn longest(&self, what: Sent) -> Duration {
        let ticks =
            self.directions.iter().map(|direction| direction.sent.counter(what as usize).value()).max();
        Duration::from_secs_f64(tsc::to_ns(ticks.unwrap_or(0)) / 1e9)
    }

    /// Waits until all sent packets have arrived, but at most for `wait`.
    ///
    /// # Errors
    /// [`TrialError`].
    pub fn settle(&mut self, wait: Duration, tick: &mut Tick<'_>) -> Result<(), TrialError> {
        self.settle_from(0, 0, wait, tick)
    }

    fn settle_from(
        &mut self,
        sent: u64,
        unique: u64,
        wait: Duration,
        tick: &mut Tick<'_>,
    ) -> Result<(), TrialError> {
        let began = Instant::now();
        loop {
            let now = self.counted();
            let due = (now.sent - sent).saturating_sub(now.unique().saturating_sub(unique));
            if due == 0 || began.elapsed() >= wait {
                return Ok(());
            }
            self.pass(tick)?;
        }
    }

    /// Returns the number of packets received so far in each direction.
    fn received(&self) -> Vec<u64> {
        self.directions.iter().map(|direction| Received::read(&direction.received).received).collect()
    }

    fn pass(&mut self, tick: &mut Tick<'_>) -> Result<(), TrialError> {
        if !tick(self) {
            self.pause()?;
            return Err(TrialError::Interrupted);
        }
        if !self.is_running() {
            return Err(TrialError::Worker);
        }
        std::thread::sleep(TICK);
        Ok(())
    }
}
