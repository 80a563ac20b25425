//! Tests of statements in the RFCs about losses. Segments have 1000 bytes and are numbered from 0.

use offcore_stats::time::{Micros, Time};

use super::super::*;

const MSS: u64 = 1000;
const MS: Micros = Micros::from_millis(1);
const RTT: Micros = Micros::from_millis(100);

/// A sender and its clock.
struct Scene {
    sender: Recovery,
    now: Time,
}

impl Scene {
    /// Creates a sender with a round-trip time of 100 ms and without timestamps.
    fn new(sack: bool) -> Self {
        let mut sender = Recovery::new(MSS as u32, Algorithm::NewReno, sack, false);
        sender.first_rtt(Time::from_micros(1), RTT);
        Self { sender, now: Time::from_secs(1) }
    }

    /// Sends this many segments of new data, regardless of windows.
    fn send(&mut self, segments: u64) {
        for _ in 0..segments {
            let from = self.sender.planned_to();
            self.sender.plan_new(self.now, MSS);
            self.sender.published(self.now, from..from + MSS, false);
        }
    }

    /// Sends new data as the window allows. Returns the number of segments.
    fn fill(&mut self) -> u64 {
        let segments = self.sender.window(self.now) / MSS;
        self.send(segments);
        segments
    }

    /// Retransmits lost segments. Returns their numbers.
    fn repair(&mut self) -> Vec<u64> {
        let mut all = Vec::new();
        loop {
            while let Some(range) = self.sender.next_lost(MSS as u32) {
                all.push(range.start / MSS);
                self.sender.published(self.now, range, true);
            }
            if !self.sender.has_nothing_new() {
                return all;
            }
        }
    }

    /// Processes an ACK for all segments below `una`, with these segments SACKed.
    fn ack(&mut self, una: u64, sacks: &[(u64, u64)]) -> Acked {
        let sacks: Vec<_> = sacks.iter().map(|(from, to)| (from * MSS, to * MSS)).collect();
        self.sender.ack(self.now, &Ack { una: una * MSS, sacks: &sacks, ..Ack::default() })
    }

    fn dsack(&mut self, una: u64, segments: Range<u64>) -> Acked {
        let dsack = Some((segments.start * MSS, segments.end * MSS));
        self.sender.ack(self.now, &Ack { una: una * MSS, dsack, ..Ack::default() })
    }

    fn wait(&mut self, time: Micros) {
        self.now += time;
    }

    /// Advances the clock to the deadline and runs the timer.
    fn expire(&mut self) -> TimerAction {
        self.now = self.sender.deadline().expect("a deadline").max(self.now);
        self.sender.timer(self.now)
    }
}

// RFC 5681, section 3.2, step 2.
#[test]
fn three_duplicate_acks_trigger_fast_retransmit() {
    let mut scene = Scene::new(false);
    scene.send(10);
    scene.wait(RTT);
    for duplicate in 1..=2 {
        assert_eq!(scene.ack(0, &[]).lost, 0, "{duplicate}");
        assert_eq!(scene.repair(), []);
    }
    assert_eq!(scene.ack(0, &[]).lost, MSS);
    assert_eq!((scene.repair(), scene.sender.ssthresh()), (vec![0], 5 * MSS));
    assert_eq!(scene.sender.state(), State::Recovery);
}

// RFC 3042, section 2.
#[test]
fn limited_transmit_sends_new_segments() {
    let mut scene = Scene::new(false);
    scene.send(10);
    scene.wait(RTT);
    assert_eq!(scene.fill(), 0);
    for _ in 0..2 {
        scene.ack(0, &[]);
        assert_eq!(scene.fill(), 1);
    }
    assert_eq!(scene.sender.cwnd(), 10 * MSS, "the window itself does not change");
}

// RFC 5681, section 2: an ACK with data or another window is not a duplicate.
#[test]
fn window_updates_are_not_duplicate_acks() {
    let mut scene = Scene::new(false);
    scene.send(10);
    for number in 0..10 {
        let (window_changed, has_data) = (number % 2 == 0, number % 2 == 1);
        let ack = Ack { window_changed, has_data, ..Ack::default() };
        assert_eq!(scene.sender.ack(scene.now, &ack).lost, 0);
    }
    assert_eq!(scene.sender.pipe(), 10 * MSS);
}

// RFC 6582, section 3.2, step 3.
#[test]
fn partial_ack_retransmits_next_segment() {
    let mut scene = Scene::new(false);
    scene.send(10);
    scene.wait(RTT);
    assert_eq!([(); 3].map(|()| scene.ack(0, &[]).lost), [0, 0, MSS]);
    assert_eq!(scene.repair(), [0]);
    scene.wait(RTT);
    assert_eq!(scene.ack(4, &[]).lost, MSS);
    assert_eq!((scene.repair(), scene.sender.state()), (vec![4], State::Recovery));
    scene.wait(RTT);
    assert!(scene.ack(10, &[]).recovered);
    assert_eq!((scene.sender.cwnd(), scene.sender.pipe()), (5 * MSS, 0));
}

// RFC 6582, section 4.1: duplicate ACKs of data sent before a timeout are not a loss.
#[test]
fn duplicate_acks_after_rto_are_ignored() {
    let mut scene = Scene::new(false);
    scene.send(10);
    assert_eq!(scene.expire(), TimerAction::Retransmit);
    assert_eq!(scene.repair(), [0]);
    scene.wait(RTT);
    scene.ack(10, &[]);
    scene.send(3);
    for _ in 0..4 {
        assert_eq!(scene.ack(10, &[]).lost, 0);
    }
    assert_eq!(scene.sender.state(), State::Open);
}

// RFC 6298, section 5.4 to 5.6; RFC 5681, section 3.1.
#[test]
fn rto_resets_cwnd_to_one_segment() {
    let mut scene = Scene::new(false);
    scene.send(10);
    let rto = scene.sender.rto();
    assert_eq!(scene.sender.deadline(), Some(scene.now + rto));
    assert_eq!(scene.expire(), TimerAction::Retransmit);
    assert_eq!((scene.sender.cwnd(), scene.sender.ssthresh()), (MSS, 5 * MSS));
    assert_eq!((scene.sender.pipe(), scene.sender.rto()), (0, 2 * rto));
    assert_eq!(scene.repair(), [0]);
    assert_eq!(scene.expire(), TimerAction::Retransmit);
    assert_eq!((scene.sender.ssthresh(), scene.sender.backoffs()), (5 * MSS, 2));
    assert_eq!(scene.repair(), [0]);
    scene.wait(RTT);
    scene.ack(1, &[]);
    assert_eq!((scene.sender.backoffs(), scene.repair()), (0, vec![1, 2]));
    assert_eq!(scene.sender.rto(), 4 * rto, "no sample of what was sent twice (Karn)");
}

// RFC 6298, section 5.3, with the published edge for "sent".
#[test]
fn rto_timer_starts_when_published() {
    let mut scene = Scene::new(true);
    scene.sender.plan_new(scene.now, MSS);
    assert_eq!((scene.sender.pipe(), scene.sender.deadline()), (MSS, None));
    scene.wait(50 * MS);
    scene.sender.published(scene.now, 0..MSS, false);
    assert_eq!(scene.sender.rtt.at, scene.now + scene.sender.rto());
    // A retransmission that is still being copied does not time out again.
    scene.now = scene.sender.rtt.at;
    scene.sender.probe.at = Time::NEVER;
    assert_eq!(scene.sender.timer(scene.now), TimerAction::Retransmit);
    let range = scene.sender.next_lost(MSS as u32).unwrap();
    assert_eq!((scene.expire(), scene.sender.backoffs()), (TimerAction::None, 1));
    scene.sender.published(scene.now, range, true);
    assert_eq!(scene.sender.deadline(), Some(scene.now + scene.sender.rto()));
}

// RFC 8985, section 6.2, step 5, and the third SACKed segment of step 4.
#[test]
fn three_sacked_segments_mark_loss() {
    let mut scene = Scene::new(true);
    scene.send(10);
    scene.wait(RTT);
    assert_eq!(scene.ack(0, &[(1, 2)]).lost, 0);
    assert_eq!(scene.ack(0, &[(1, 3)]).lost, 0);
    assert_eq!(scene.ack(0, &[(1, 4)]).lost, MSS);
    assert_eq!(scene.repair(), [0]);
}

// RFC 8985, section 6.2, step 5: one SACKed segment suffices after a quarter of the round trip.
#[test]
fn rack_reordering_window_is_quarter_rtt() {
    let mut scene = Scene::new(true);
    scene.send(3);
    scene.wait(RTT);
    assert_eq!(scene.ack(0, &[(2, 3)]).lost, 0);
    assert_eq!(scene.sender.deadline(), Some(scene.now + RTT / 4));
    assert_eq!(scene.expire(), TimerAction::Reorder);
    assert_eq!((scene.repair(), scene.sender.pipe()), (vec![0], MSS), "two are lost, PRR begins with one");
    scene.wait(RTT);
    scene.ack(1, &[(2, 3)]);
    assert_eq!(scene.repair(), [1]);
}

// RFC 8985, section 6.2, step 3 and 4: after reordering, three SACKed segments are no longer a loss.
#[test]
fn reordering_disables_dupthresh() {
    let mut scene = Scene::new(true);
    scene.send(4);
    scene.wait(RTT);
    scene.ack(0, &[(1, 2)]);
    scene.ack(2, &[]);
    assert!(scene.sender.stats().reordered > 0);
    scene.send(4);
    scene.wait(RTT);
    scene.ack(4, &[]);
    assert_eq!(scene.ack(4, &[(5, 8)]).lost, 0);
    assert_eq!(scene.ack(8, &[]).newly_acked, 4 * MSS);
    assert_eq!(scene.sender.stats().fast, 0);
}

// RFC 8985, section 6.2, step 4: a DSACK widens the window by a quarter, once per round trip.
#[test]
fn dsack_widens_reordering_window() {
    let mut scene = Scene::new(true);
    scene.send(4);
    scene.wait(RTT);
    scene.ack(0, &[(1, 2)]);
    scene.ack(2, &[]);
    scene.dsack(2, 0..1);
    scene.dsack(2, 1..2);
    scene.wait(Micros::new(1));
    scene.ack(4, &[]);
    scene.send(2);
    scene.wait(RTT);
    scene.ack(4, &[(5, 6)]);
    assert_eq!(scene.sender.deadline(), Some(scene.now + RTT / 2));
}

// RFC 8985, section 7.2 and 7.3.
#[test]
fn tlp_is_due_after_two_rtts() {
    let mut scene = Scene::new(true);
    scene.send(4);
    assert_eq!(scene.sender.deadline(), Some(scene.now + 2 * RTT + 2 * MS));
    assert_eq!(scene.expire(), TimerAction::Probe);
    assert_eq!(scene.sender.next_probe(), Some(3 * MSS..4 * MSS));
    scene.sender.published(scene.now, 3 * MSS..4 * MSS, true);
    assert_eq!(scene.sender.deadline(), Some(scene.now + scene.sender.rto()), "one probe only");
    assert_eq!((scene.sender.stats().probes, scene.sender.pipe()), (1, 4 * MSS));
    // One segment in flight may wait for a delayed ACK. The timeout is sooner, and the probe is sent first.
    let mut scene = Scene::new(true);
    scene.send(1);
    assert_eq!(scene.expire(), TimerAction::Probe);
    assert_eq!(scene.sender.backoffs(), 0);
}

// RFC 8985, section 7.3: new data is the better probe, and the window does not prevent it.
#[test]
fn tlp_prefers_new_data() {
    let mut scene = Scene::new(true);
    scene.send(10);
    assert_eq!(scene.expire(), TimerAction::Probe);
    assert_eq!(scene.fill(), 1);
    assert_eq!((scene.fill(), scene.sender.next_probe()), (0, None));
    scene.wait(RTT);
    scene.ack(11, &[]);
    assert_eq!(scene.sender.cwnd(), 21 * MSS, "nothing was lost");
}

// RFC 8985, section 7.4.2.
#[test]
fn tlp_repair_reduces_cwnd() {
    let cwnd = |twice: bool| {
        let mut scene = Scene::new(true);
        scene.send(10);
        scene.expire();
        let range = scene.sender.next_probe().unwrap();
        scene.sender.published(scene.now, range, true);
        scene.wait(RTT);
        scene.ack(10, &[]);
        if twice {
            scene.dsack(10, 9..10);
        }
        scene.send(1);
        scene.wait(RTT);
        scene.ack(11, &[]);
        scene.sender.cwnd()
    };
    assert!(cwnd(false) < 15 * MSS && cwnd(true) >= 20 * MSS, "{} {}", cwnd(false), cwnd(true));
}

// RFC 8985, section 3.1: a lost retransmission is detected when a later one arrives.
#[test]
fn rack_detects_lost_retransmission() {
    let mut scene = Scene::new(true);
    scene.send(10);
    scene.wait(RTT);
    scene.ack(0, &[(3, 10)]);
    assert_eq!(scene.repair(), [0, 1, 2]);
    scene.wait(RTT);
    // For segments sent at the same time, RACK compares their ends.
    scene.ack(0, &[(1, 10)]);
    assert_eq!(scene.repair(), [0]);
    scene.wait(RTT);
    assert!(scene.ack(10, &[]).recovered);
}

// RFC 3522, section 3.2; RFC 4015, section 3.2.
#[test]
fn eifel_undoes_spurious_rto() {
    let mut scene = Scene::new(true);
    scene.sender.timestamps = true;
    scene.send(10);
    let sent = scene.now;
    assert_eq!(scene.expire(), TimerAction::Probe);
    scene.fill();
    assert_eq!(scene.expire(), TimerAction::Retransmit);
    assert_eq!(scene.repair(), [0]);
    scene.wait(50 * MS);
    let ack = Ack { una: MSS, rtt_sample: Some(scene.now - sent), ..Ack::default() };
    assert!(scene.sender.ack(scene.now, &ack).spurious);
    assert_eq!((scene.sender.state(), scene.repair()), (State::Open, vec![]));
    assert!(scene.sender.cwnd() >= 10 * MSS && scene.sender.ssthresh() > 1 << 30);
    assert_eq!(scene.sender.stats().spurious, 1);
}

// RFC 3522, section 3.2: the echo of the retransmission proves nothing.
#[test]
fn eifel_keeps_genuine_rto() {
    let mut scene = Scene::new(true);
    scene.sender.timestamps = true;
    scene.send(10);
    scene.expire();
    scene.fill();
    assert_eq!(scene.expire(), TimerAction::Retransmit);
    assert_eq!(scene.repair(), [0]);
    scene.wait(RTT);
    let ack = Ack { una: MSS, rtt_sample: Some(RTT), ..Ack::default() };
    assert!(!scene.sender.ack(scene.now, &ack).spurious);
    assert_eq!(scene.repair(), [1, 2]);
}

// RFC 3708, section 2; RFC 4015, section 3.2.
#[test]
fn dsack_of_all_undoes_reduction() {
    let mut scene = Scene::new(true);
    scene.send(10);
    scene.wait(RTT);
    scene.ack(0, &[(2, 10)]);
    assert_eq!(scene.repair(), [0, 1]);
    scene.wait(10 * MS);
    scene.ack(10, &[]);
    assert_eq!(scene.sender.cwnd(), 5 * MSS);
    assert!(!scene.dsack(10, 0..1).spurious);
    assert!(scene.dsack(10, 1..2).spurious);
    assert_eq!(scene.sender.cwnd(), 10 * MSS);
}

// RFC 2018, section 8.
#[test]
fn reneged_data_is_retransmitted() {
    let mut scene = Scene::new(true);
    scene.send(10);
    scene.wait(RTT);
    scene.ack(0, &[(5, 10)]);
    scene.repair();
    scene.wait(RTT);
    scene.ack(5, &[]);
    assert_eq!(scene.sender.pipe(), 0, "SACKed data is not sent before a timeout");
    assert_eq!(scene.expire(), TimerAction::Retransmit);
    assert_eq!(scene.repair(), [5]);
    scene.wait(RTT);
    scene.ack(6, &[]);
    assert_eq!(scene.repair(), [6, 7]);
}

// RFC 3168, section 6.1.2.
#[test]
fn ece_reduces_cwnd_once_per_window() {
    let mut scene = Scene::new(true);
    scene.send(10);
    scene.wait(RTT);
    let marked = |una: u64| Ack { una: una * MSS, ece: true, ..Ack::default() };
    for una in 1..=5 {
        scene.sender.ack(scene.now, &marked(una));
        assert_eq!(scene.sender.cwnd(), 5 * MSS, "{una}");
    }
    assert!(scene.sender.cwr_due());
    scene.sender.cwr_sent();
    scene.ack(10, &[]);
    scene.send(5);
    scene.wait(RTT);
    scene.sender.ack(scene.now, &marked(11));
    assert!(scene.sender.cwr_due());
    assert_eq!((scene.sender.stats().marks, scene.sender.stats().fast), (2, 0));
}

// RFC 7661, section 4.2: an unused window does not grow.
#[test]
fn unused_cwnd_does_not_grow() {
    let mut scene = Scene::new(true);
    for round in 1..20 {
        scene.send(2);
        scene.wait(RTT);
        scene.ack(2 * round, &[]);
    }
    assert_eq!(scene.sender.cwnd(), 10 * MSS);
}

// RFC 5681, section 4.1.
#[test]
fn idle_restart_resets_cwnd() {
    let mut scene = Scene::new(true);
    let mut una = 0;
    for _ in 0..3 {
        una += scene.fill();
        scene.wait(RTT);
        scene.ack(una, &[]);
    }
    assert_eq!(scene.sender.window(scene.now), 80 * MSS, "it doubles each round trip");
    scene.wait(60_000 * MS);
    assert_eq!(scene.sender.window(scene.now), 10 * MSS);
    assert_eq!((scene.fill(), scene.sender.cwnd()), (10, 10 * MSS));
}

// RFC 6937, section 4.
#[test]
fn prr_sends_in_proportion_to_delivery() {
    let mut scene = Scene::new(true);
    scene.send(10);
    scene.wait(RTT);
    let mut sent = Vec::new();
    for sacked in 2..=10 {
        scene.ack(0, &[(1, sacked)]);
        sent.push(scene.repair().len() as u64 + scene.fill());
    }
    assert_eq!(sent[..2], [1, 1], "limited transmit");
    // Half of the data delivered since the loss, including the retransmission, in whole segments.
    assert_eq!(sent[2..], [1, 0, 0, 1, 0, 0, 1]);
    assert_eq!((scene.sender.pipe(), scene.sender.ssthresh()), (5 * MSS, 5 * MSS));
}
