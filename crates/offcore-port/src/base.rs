//! State that all ports have in common.

pub mod address;
pub(crate) mod cell;
pub mod stats;

use offcore_wire::MacAddr;

use crate::{PortError, QueueSetup, RxCounters, TxCounters};

/// A port's name, its address, and which halves of its queue pairs have been taken.
#[derive(Debug)]
pub struct PortBase {
    /// The port as written on the command line.
    pub name: String,
    pub mac: MacAddr,
    pub(crate) rx: Vec<bool>,
    pub(crate) tx: Vec<bool>,
}

impl PortBase {
    /// Creates a port with `queues` queue pairs, none of them taken.
    pub fn new(name: String, mac: MacAddr, queues: u16) -> Self {
        let free = || vec![false; queues.into()];
        Self { name, mac, rx: free(), tx: free() }
    }

    /// Number of queue pairs.
    pub fn queues(&self) -> u16 {
        u16::try_from(self.rx.len()).unwrap_or(u16::MAX)
    }

    /// Takes the receiving half of queue `index`; returns its counters.
    ///
    /// # Errors
    /// [`PortError::Queue`] if the queue does not exist or was taken; [`PortError::Stats`].
    pub fn take_rx(&mut self, index: u16, setup: &QueueSetup<'_>) -> Result<RxCounters, PortError> {
        take(&mut self.rx, index, &self.name)?;
        Ok(RxCounters::new(setup.stats, setup.port, index)?)
    }

    /// Takes the sending half of queue `index`; returns its counters.
    ///
    /// # Errors
    /// As for [`PortBase::take_rx`].
    pub fn take_tx(&mut self, index: u16, setup: &QueueSetup<'_>) -> Result<TxCounters, PortError> {
        take(&mut self.tx, index, &self.name)?;
        Ok(TxCounters::new(setup.stats, setup.port, index)?)
    }
}

fn take(taken: &mut [bool], index: u16, port: &str) -> Result<(), PortError> {
    match taken.get_mut(usize::from(index)) {
        Some(taken @ false) => {
            *taken = true;
            Ok(())
        }
        _ => Err(PortError::Queue { port: port.into(), index }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_half_is_taken_once() {
        let mut base = PortBase::new("p".into(), MacAddr::local(0), 2);
        assert!(take(&mut base.rx, 1, "p").is_ok() && take(&mut base.tx, 1, "p").is_ok());
        assert_eq!(take(&mut base.rx, 1, "p").unwrap_err().to_string(), "port 'p' has no free queue 1");
        assert!(take(&mut base.rx, 2, "p").is_err());
        assert!(take(&mut base.rx, 0, "p").is_ok());
    }
}
