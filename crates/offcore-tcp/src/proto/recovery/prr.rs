//! Proportional rate reduction (RFC 6937, with the bound selection of RFC 9937): the window shrinks to the slow start
//! threshold in proportion to the delivered data.

/// The progress of a recovery in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Prr {
    /// Bytes in flight at its start: RecoverFS.
    flight: u64,
    delivered: u64,
    /// Bytes planned since its start.
    out: u64,
}

impl Prr {
    /// Begins a recovery. `flight` bytes of the data in flight will be delivered in it.
    pub(super) fn new(flight: u64) -> Self {
        Self { flight: flight.max(1), delivered: 0, out: 0 }
    }

    /// Returns the number of bytes that may be sent after an ACK that delivered `delivered` bytes. `safe`: it advanced
    /// without a further loss (RFC 9937, section 6.2). Slow start then fills the window up to the threshold; otherwise,
    /// packets are conserved.
    pub(super) fn on_ack(&mut self, delivered: u64, pipe: u64, ssthresh: u64, mss: u64, safe: bool) -> u64 {
        self.delivered += delivered;
        let mut count = if pipe > ssthresh {
            self.delivered.saturating_mul(ssthresh).div_ceil(self.flight).saturating_sub(self.out)
        } else {
            let limit = self.delivered.saturating_sub(self.out).max(delivered);
            (if safe { limit + mss } else { limit }).min(ssthresh - pipe)
        };
        if self.out == 0 {
            // The fast retransmission is sent immediately.
            count = count.max(mss);
        }
        count
    }

    /// Counts planned bytes.
    pub(super) fn on_send(&mut self, bytes: u64) {
        self.out += bytes;
    }

    /// Subtracts planned bytes that will not be sent.
    pub(super) fn on_unsend(&mut self, bytes: u64) {
        self.out = self.out.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the segments sent after each of `acks` ACKs, which deliver a segment each. The initial pipe is `pipe`.
    fn sent(mut prr: Prr, mut pipe: u64, ssthresh: u64, acks: usize) -> Vec<u64> {
        let mut all = Vec::new();
        for ack in 0..acks {
            // The first ACK's segment is already outside the pipe.
            pipe -= u64::from(ack > 0);
            let count = prr.on_ack(1, pipe, ssthresh, 1, true);
            prr.on_send(count);
            pipe += count;
            all.push(count);
        }
        all
    }

    // RFC 6937, section 4.1, figure 1: 20 segments in flight, the first is lost, Reno halves the window.
    #[test]
    fn prr_sends_on_every_second_ack() {
        let sent = sent(Prr::new(20), 18, 10, 19);
        assert_eq!(sent[..16], [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(sent.iter().sum::<u64>(), 10);
    }

    // RFC 6937, section 4.2, figure 2: 15 of 20 are lost. For each ACK one segment more than delivered is sent.
    #[test]
    fn prr_ssrb_recovers_from_burst_loss() {
        let sent = sent(Prr::new(20), 4, 10, 4);
        assert_eq!(sent, [2, 2, 2, 2], "slow start bound");
    }

    // RFC 9937, section 6.2: packets are conserved while further losses occur.
    #[test]
    fn further_losses_conserve_packets() {
        let mut prr = Prr::new(20);
        prr.on_send(prr.clone().on_ack(1, 4, 10, 1, false));
        prr.delivered = 1;
        assert_eq!(prr.on_ack(1, 4, 10, 1, false), 1);
        prr.on_send(1);
        assert_eq!(prr.on_ack(1, 4, 10, 1, true), 2);
    }

    #[test]
    fn prr_does_not_exceed_ssthresh() {
        let mut prr = Prr::new(20);
        prr.on_send(1);
        assert_eq!(prr.on_ack(9, 8, 10, 1, true), 2);
        assert_eq!(prr.on_ack(9, 10, 10, 1, true), 0);
    }
}
