//! Options of connections and listeners, and segments with options that are sent before a connection exists.

use offcore_stats::time::Time;
use offcore_wire::{IpProtocol, Sum};

use super::addr::{ConnId, FlowKey};
use super::call_error::CallError;
use super::ip::Envelope;
use super::options::ConnOptions;
use super::output::{self, Fields, TxChecksum};
use super::packet::Out;
use super::receive::AckNeed;
use super::recovery::Algorithm;
use super::stack::Stack;

impl Stack {
    /// Sets the options of a connection.
    ///
    /// # Errors
    /// [`CallError::Gone`].
    pub fn set_options(&mut self, conn: ConnId, options: ConnOptions) -> Result<(), CallError> {
        let tcb = &mut self.conns.get_mut(conn).ok_or(CallError::Gone)?.tcb;
        let algorithm = |options: &ConnOptions| options.algorithm.unwrap_or(self.config.algorithm);
        if algorithm(&options) != algorithm(tcb.headers.options()) {
            tcb.sender.recovery.set_algorithm(algorithm(&options));
        }
        if options.pacing_rate != tcb.headers.options().pacing_rate {
            tcb.sender.recovery.set_max_pacing_rate(options.pacing_rate.unwrap_or(u64::MAX));
        }
        tcb.headers.set_options(options);
        Ok(())
    }

    /// Returns the congestion control algorithm of connections without this option.
    pub fn algorithm(&self) -> Algorithm {
        self.config.algorithm
    }

    /// Sets the options of a listener's future connections.
    pub fn set_listener_options(&mut self, listener: u32, options: ConnOptions) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.options = options;
        }
    }

    /// Sends a delayed acknowledgement now (`TCP_QUICKACK`).
    pub fn acknowledge_now(&mut self, now: Time, conn: ConnId, out: &mut Out) {
        let Some(this) = self.conns.get_mut(conn) else { return };
        if let AckNeed::By(_) = this.tcb.receiver.ack.need() {
            this.tcb.receiver.ack.request();
            self.conns.touch(conn);
            self.settle(now, out);
        }
    }

    /// Sends a segment without payload for a connection or a handshake, with its options.
    pub(super) fn send_with(
        &mut self,
        now: Time,
        key: FlowKey,
        options: ConnOptions,
        fields: &Fields,
        out: &mut Out,
    ) {
        let Some(way) = self.net.way(key.remote().ip()) else { return };
        let envelope = Envelope::new(key.local().ip(), key.remote().ip(), IpProtocol::TCP);
        let hops = options.hops.unwrap_or(envelope.hops);
        let flow_label = self.origins.flow_label(&key);
        let envelope = Envelope { ecn: options.services(), hops, flow_label, ..envelope };
        self.net.send(now, way, envelope, out, |bytes, envelope| {
            output::write(bytes, envelope, fields, 0, TxChecksum::Payload(Sum::ZERO)).0
        });
    }

    /// Returns whether a half-open connection waits for data (`TCP_DEFER_ACCEPT`).
    pub(super) fn defers(&mut self, index: u32) -> bool {
        let half = self.halves.get_mut(index);
        let Some(half) = half.filter(|half| half.tries < half.both.options.defer) else { return false };
        half.deferred = true;
        true
    }
}
