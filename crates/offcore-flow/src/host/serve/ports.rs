//! Which sessions have a port.

use std::collections::BTreeSet;

/// Sessions that are bound, or are listeners or datagram sockets: port, application and number.
#[derive(Debug, Default)]
pub(super) struct Ports(BTreeSet<(u16, usize, u32)>);

impl Ports {
    /// Adds a session; one without a port, which is 0, is not added.
    pub(super) fn add(&mut self, port: u16, app: usize, number: u32) {
        if port != 0 {
            self.0.insert((port, app, number));
        }
    }

    /// Removes one, if it is there.
    pub(super) fn remove(&mut self, port: u16, app: usize, number: u32) {
        self.0.remove(&(port, app, number));
    }

    /// Application and number of those that have a port.
    pub(super) fn at(&self, port: u16) -> impl Iterator<Item = (usize, u32)> {
        let all = (port, 0, 0)..=(port, usize::MAX, u32::MAX);
        self.0.range(all).map(|(_, app, number)| (*app, *number))
    }
}
