//! Which halves of a port's queues have been given out.

use crate::PortError;

/// Each half of each queue pair can be taken once.
#[derive(Debug)]
pub struct Slots {
    rx: Vec<bool>,
    tx: Vec<bool>,
}

impl Slots {
    /// `queues` pairs, none taken.
    pub fn new(queues: u16) -> Self {
        let free = || vec![false; queues.into()];
        Self { rx: free(), tx: free() }
    }

    /// Number of queue pairs.
    pub fn queues(&self) -> u16 {
        u16::try_from(self.rx.len()).unwrap_or(u16::MAX)
    }

    /// Takes the receiving half of queue `index` of `port`.
    ///
    /// # Errors
    /// [`PortError::Queue`] when there is none, or it was taken.
    pub fn take_rx(&mut self, index: u16, port: &str) -> Result<(), PortError> {
        Self::take(&mut self.rx, index, port)
    }

    /// Takes the sending half of queue `index` of `port`.
    ///
    /// # Errors
    /// As for [`Slots::take_rx`].
    pub fn take_tx(&mut self, index: u16, port: &str) -> Result<(), PortError> {
        Self::take(&mut self.tx, index, port)
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_is_given_out_once() {
        let mut slots = Slots::new(2);
        assert!(slots.take_rx(1, "p").is_ok() && slots.take_tx(1, "p").is_ok());
        assert_eq!(slots.take_rx(1, "p").unwrap_err().to_string(), "port 'p' has no free queue 1");
        assert!(slots.take_rx(2, "p").is_err());
        assert!(slots.take_rx(0, "p").is_ok());
    }
}
