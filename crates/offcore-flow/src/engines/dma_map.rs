//! The channel mapping: `[PORT.]txqN[*WEIGHT]@CH[+CH…];…`, and the vhost guide's `dmas=[txq0@…;rxq0@…]`.

use std::str::FromStr;

/// One half of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueHalf {
    /// Packets that the port receives: dequeue on a vhost port.
    Rx,
    /// Packets that the port sends: enqueue on a vhost port.
    Tx,
}

/// One entry: the channels of one queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The port. `None` stands for every port that makes copies.
    pub port: Option<usize>,
    pub half: QueueHalf,
    pub queue: u16,
    /// The queue's share of a channel that several queues use is its weight divided by the sum of all weights.
    pub weight: u16,
    /// Channel names such as `core:1`.
    pub channels: Vec<String>,
}

/// The whole mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DmaMap {
    pub entries: Vec<Entry>,
}

impl DmaMap {
    /// Returns the channels of a queue. The list is empty if the mapping does not name the queue.
    pub fn channels(&self, port: usize, half: QueueHalf, queue: u16) -> &[String] {
        self.entry(port, half, queue).map_or(&[], |e| &e.channels)
    }

    /// Returns the weight of a queue, which is 1 by default.
    pub fn weight(&self, port: usize, half: QueueHalf, queue: u16) -> u16 {
        self.entry(port, half, queue).map_or(1, |e| e.weight)
    }

    fn entry(&self, port: usize, half: QueueHalf, queue: u16) -> Option<&Entry> {
        let fits = |e: &&Entry| e.port.is_none_or(|p| p == port) && e.half == half && e.queue == queue;
        // An entry for this port has precedence over an entry for every port.
        self.entries.iter().filter(fits).max_by_key(|e| e.port.is_some())
    }

    /// Adds the `dmas=[…]` of a port.
    ///
    /// # Errors
    /// The same as for parsing.
    pub fn add_for_port(&mut self, port: usize, dmas: &str) -> Result<(), String> {
        let inner = dmas.trim().trim_start_matches('[').trim_end_matches(']');
        for mut entry in inner.parse::<Self>()?.entries {
            entry.port = Some(port);
            self.push(entry)?;
        }
        Ok(())
    }

    fn push(&mut self, entry: Entry) -> Result<(), String> {
        let same = |e: &Entry| (e.port, e.half, e.queue) == (entry.port, entry.half, entry.queue);
        if self.entries.iter().any(same) {
            let half = if entry.half == QueueHalf::Rx { "rxq" } else { "txq" };
            return Err(format!(
                "{half}{} is mapped twice: give all its channels in one entry, with +",
                entry.queue
            ));
        }
        self.entries.push(entry);
        Ok(())
    }
}

impl FromStr for DmaMap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut map = Self::default();
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            map.push(entry(part)?)?;
        }
        if map.entries.is_empty() {
            return Err(format!(
                "'{text}': expected [PORT.]txqN[*WEIGHT]@CHANNEL[+CHANNEL], such as txq0@core:1;rxq0@core:1"
            ));
        }
        Ok(map)
    }
}

fn entry(text: &str) -> Result<Entry, String> {
    let bad = |what: &str| {
        format!("'{text}': {what}; expected [PORT.]txqN[*WEIGHT]@CHANNEL[+CHANNEL], such as txq0@core:1")
    };
    let (place, channels) = text.split_once('@').ok_or_else(|| bad("no '@'"))?;
    let (port, queue) = match place.split_once('.') {
        Some((port, queue)) => (Some(port.parse().map_err(|_| bad("the port is no number"))?), queue),
        None => (None, place),
    };
    let (half, number) = if let Some(number) = queue.strip_prefix("txq") {
        (QueueHalf::Tx, number)
    } else if let Some(number) = queue.strip_prefix("rxq") {
        (QueueHalf::Rx, number)
    } else {
        return Err(bad("neither txq nor rxq"));
    };
    let (number, weight) = match number.split_once('*') {
        Some((number, weight)) => (number, weight.parse().ok().filter(|&weight| weight > 0)),
        None => (number, Some(1)),
    };
    let queue = number.parse().map_err(|_| bad("the queue is no number"))?;
    let weight = weight.ok_or_else(|| bad("the weight is no number from 1 to 65535"))?;
    let channels: Vec<String> = channels.split('+').map(|c| canonical(c.trim())).collect();
    if channels.iter().any(String::is_empty) {
        return Err(bad("an empty channel"));
    }
    Ok(Entry { port, half, queue, weight, channels })
}

/// Returns a unique name for each device: `core:01` becomes `core:1`, and the guide's `wq0.0` becomes `dsa:wq0.0`.
fn canonical(channel: &str) -> String {
    let lcore = channel.strip_prefix("core:").and_then(|lcore| lcore.parse::<usize>().ok());
    match lcore {
        Some(lcore) => format!("core:{lcore}"),
        None if channel.starts_with("wq") => format!("dsa:{channel}"),
        None => channel.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings() {
        let mut map: DmaMap = "txq0@core:01;rxq0@core:1+core:2; 1.txq0@cpu".parse().unwrap();
        assert_eq!(map.channels(0, QueueHalf::Tx, 0), ["core:1"]);
        let weighted: DmaMap = "0.txq0*3@wq0.0;txq0@wq0.0".parse().unwrap();
        assert_eq!((weighted.weight(0, QueueHalf::Tx, 0), weighted.weight(1, QueueHalf::Tx, 0)), (3, 1));
        assert_eq!(map.channels(0, QueueHalf::Rx, 0), ["core:1", "core:2"]);
        assert_eq!(map.channels(1, QueueHalf::Tx, 0), ["cpu"]);
        assert!(map.channels(0, QueueHalf::Tx, 1).is_empty());
        map.add_for_port(2, "[txq0@core:3;rxq1@wq0.1+dsa-sim0:wq0.1]").unwrap();
        assert_eq!(map.channels(2, QueueHalf::Tx, 0), ["core:3"]);
        assert_eq!(map.channels(2, QueueHalf::Rx, 1), ["dsa:wq0.1", "dsa-sim0:wq0.1"]);
    }

    #[test]
    fn spec_errors_are_reported() {
        for (text, word) in [
            ("", "expected"),
            ("txq0", "no '@'"),
            ("q0@core:1", "neither"),
            ("txqx@core:1", "no number"),
            ("txq0*0@core:1", "weight"),
            ("a.txq0@core:1", "port"),
            ("txq0@", "empty"),
            ("txq0@core:1+", "empty"),
            ("txq0@core:1;txq0@core:2", "twice"),
        ] {
            let error = text.parse::<DmaMap>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
