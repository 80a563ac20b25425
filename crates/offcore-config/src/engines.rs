//! Engines of a file: their channels, and the queues that use them.

use std::collections::{BTreeMap, BTreeSet};

use offcore_dsa::sim::{SimError, SimOptions};
use offcore_flow::dma_map::{Entry, QueueHalf};
use offcore_flow::simulator::Simulator;

use crate::document::{Document, unknown};
use crate::ports::{QueueCopies, check_name};
use crate::sections::{DmaDevice, Engine, HelperThread, SimulatedDevice, WorkQueues};

/// Maximum length of the name of a DMA device in bytes: labels of statistics contain it.
const MAX_DEVICE: usize = 48;
/// Maximum number of a simulated device's work queue.
const MAX_WORK_QUEUE: u32 = 127;

/// The channels of a file's engines, by the engine's name.
#[derive(Debug, Default)]
pub(crate) struct Channels {
    by_engine: BTreeMap<String, Vec<String>>,
    /// Simulated devices, and whether an engine has described them.
    simulators: Vec<(Simulator, bool)>,
    /// Numbers of simulated devices that are given or were chosen.
    numbers: BTreeSet<u32>,
    used: BTreeSet<String>,
}

/// Reads `[engines.NAME]`.
pub(crate) fn read(document: &mut Document<'_>) -> Channels {
    let mut channels = Channels::default();
    let Some((engines, _)) = document.take_table("engines") else { return channels };
    let mut read = Vec::new();
    for (name, value) in engines {
        let path = format!("engines.{}", name.get_ref());
        if let Err(error) = check_name(name.get_ref()) {
            document.add(Some(name.span()), &path, error);
            continue;
        }
        let Some((mut table, at)) = document.table(value, &path) else { continue };
        let kinds = Engine::KINDS;
        let Some(kind) = table.remove("kind") else {
            document.add(
                Some(at),
                &path,
                format!("key 'kind' is missing, expected one of {}", kinds.join(", ")),
            );
            continue;
        };
        let Some(kind_name) = document.text_of(&kind, &format!("{path}.kind")) else { continue };
        if !kinds.contains(&kind_name.as_str()) {
            let text = format!("kind '{kind_name}' is not known, expected one of {}", kinds.join(", "));
            document.add(Some(kind.span()), &format!("{path}.kind"), text);
            continue;
        }
        let engine = document.read_with(table, at.clone(), &path, |table| Engine::of_kind(&kind_name, table));
        read.extend(engine.map(|engine| (name.get_ref().to_string(), engine, at)));
    }
    channels.numbers = read.iter().filter_map(|(_, engine, _)| engine.device_number()).collect();
    for (name, engine, at) in read {
        if let Err(error) = channels.add(&name, engine) {
            document.add(Some(at), &format!("engines.{name}"), error);
        }
    }
    channels
}

/// Returns the half's part of a queue's name.
fn half_name(half: QueueHalf) -> &'static str {
    match half {
        QueueHalf::Rx => "rx",
        QueueHalf::Tx => "tx",
    }
}

/// Checks the name of a work queue, such as `wq0.1` or `wq0.1/direct`.
fn check_work_queue(name: &str) -> Result<(), String> {
    let queue = name.split('/').next().unwrap_or_default();
    let numbers = queue.strip_prefix("wq").and_then(|numbers| numbers.split_once('.'));
    let is_number = |text: &str| text.parse::<u16>().is_ok();
    match numbers.is_some_and(|(device, queue)| is_number(device) && is_number(queue)) {
        true => Ok(()),
        false => Err(format!("work queue '{name}': expected wqN.M, such as wq0.1")),
    }
}

impl Channels {
    /// Returns the simulated devices.
    pub(crate) fn simulators(&self) -> Vec<Simulator> {
        self.simulators.iter().map(|(simulator, _)| simulator.clone()).collect()
    }

    fn add(&mut self, name: &str, engine: Engine) -> Result<(), String> {
        let channels = match engine {
            Engine::Core(HelperThread { lcore }) => vec![format!("core:{lcore}")],
            Engine::Dsa(WorkQueues { work_queues }) if work_queues.is_empty() => vec!["dsa:auto".into()],
            Engine::Dsa(WorkQueues { work_queues }) => {
                work_queues.iter().try_for_each(|queue| check_work_queue(queue))?;
                work_queues.iter().map(|queue| format!("dsa:{queue}")).collect()
            }
            Engine::DmaDev(DmaDevice { device }) if device.is_empty() || device.len() > MAX_DEVICE => {
                return Err(format!("device '{device}': expected a name of 1 to {MAX_DEVICE} bytes"));
            }
            Engine::DmaDev(DmaDevice { device }) => vec![format!("dmadev:{device}")],
            Engine::Simulator(device) => {
                let queues = if device.work_queues.is_empty() { vec![0] } else { device.work_queues.clone() };
                if let Some(queue) = queues.iter().find(|queue| **queue > MAX_WORK_QUEUE) {
                    return Err(format!("work queue {queue}: expected 0 to {MAX_WORK_QUEUE}"));
                }
                let number = self.add_simulator(device)?;
                queues.iter().map(|queue| format!("dsa-sim{number}:wq{number}.{queue}")).collect()
            }
        };
        for channel in &channels {
            offcore_flow::engines::Engines::check_name(channel)?;
        }
        self.by_engine.insert(name.to_owned(), channels);
        Ok(())
    }

    /// Adds the device of an engine, unless another engine has the same one. Returns its number.
    fn add_simulator(&mut self, device: SimulatedDevice) -> Result<u32, String> {
        let SimulatedDevice { device, lcore, profile, generation, seed, fault, work_queues: _ } = device;
        let keys = [
            ("profile", profile),
            ("gen", generation),
            ("seed", seed.map(|seed| seed.to_string())),
            ("fault", fault),
        ];
        let given: Vec<String> =
            keys.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?))).collect();
        let is_described = !given.is_empty() || lcore.is_some();
        if let Some(part) = given.iter().find(|part| part.contains(',')) {
            return Err(format!("{part}: expected no ','"));
        }
        let text = given.join(",");
        let options: SimOptions = text.parse().map_err(|error: SimError| error.to_string())?;
        let number =
            device.unwrap_or_else(|| (0..).find(|number| !self.numbers.contains(number)).unwrap_or(u32::MAX));
        self.numbers.insert(number);
        let simulator = Simulator { number, lcore, options, text };
        match self.simulators.iter_mut().find(|(other, _)| other.number == number) {
            Some((_, true)) if is_described => {
                Err(format!("device {number} is described by two engines: give its keys in one of them"))
            }
            Some(other) => {
                if is_described {
                    *other = (simulator, true);
                }
                Ok(number)
            }
            None => {
                self.simulators.push((simulator, is_described));
                Ok(number)
            }
        }
    }

    /// Returns the mapping of a port's queues. `port` is `None` for the copies of a host.
    pub(crate) fn map(
        &mut self,
        document: &mut Document<'_>,
        path: &str,
        copies: &QueueCopies,
        port: Option<usize>,
        queues: u16,
    ) -> Vec<Entry> {
        let mut entries = Vec::new();
        let mut names: Vec<(&str, &Vec<String>)> =
            copies.queues.iter().map(|(key, names)| (key.as_str(), names)).collect();
        for (key, names) in &names {
            for name in *names {
                if self.by_engine.contains_key(name) {
                    self.used.insert(name.clone());
                    continue;
                }
                let known = self.by_engine.keys().map(String::as_str);
                let text = match self.by_engine.is_empty() {
                    true => format!("engine '{name}' is not defined: add [engines.{name}]"),
                    false => format!("engine '{name}': {}", unknown("engine", name, known)),
                };
                document.add_about(&format!("{path}.{key}"), text);
            }
        }
        // An entry for a single queue replaces the entry for all queues.
        names.sort_by_key(|(key, _)| key.contains('q'));
        for (key, engines) in names {
            let (half, rest) = key.split_at(2);
            let half = if half == "rx" { QueueHalf::Rx } else { QueueHalf::Tx };
            let numbers = match rest.strip_prefix('q').and_then(|number| number.parse::<u16>().ok()) {
                Some(number) if number < queues => number..number + 1,
                Some(_) => {
                    let last = queues.saturating_sub(1);
                    let text = format!("the port has no such queue: its queues are 0 to {last}");
                    document.add_about(&format!("{path}.{key}"), text);
                    continue;
                }
                None => 0..queues,
            };
            let channels: Vec<String> =
                engines.iter().filter_map(|name| self.by_engine.get(name)).flatten().cloned().collect();
            if let Some(twice) =
                channels.iter().enumerate().find(|(at, channel)| channels[..*at].contains(channel))
            {
                let text = format!("channel {} occurs twice: name each engine once", twice.1);
                document.add_about(&format!("{path}.{key}"), text);
            }
            for queue in numbers {
                entries.retain(|entry: &Entry| (entry.half, entry.queue) != (half, queue));
                let name = format!("{}q{queue}", half_name(half));
                let weight = copies.weights.get(&name).copied().unwrap_or(1);
                entries.push(Entry { port, half, queue, weight, channels: channels.clone() });
            }
        }
        for key in copies.weights.keys() {
            let has_queue = |entry: &Entry| format!("{}q{}", half_name(entry.half), entry.queue) == *key;
            if !entries.iter().any(has_queue) {
                document.add_about(
                    &format!("{path}.weights"),
                    format!("{key}: no engine is assigned to this queue"),
                );
            }
        }
        entries
    }

    /// Adds a problem for each engine that no queue names.
    pub(crate) fn check_used(&self, document: &mut Document<'_>) {
        for name in self.by_engine.keys().filter(|name| !self.used.contains(*name)) {
            let text = "no queue uses this engine: name it in copies of a port, or remove it";
            document.add_about(&format!("engines.{name}"), text);
        }
    }
}
