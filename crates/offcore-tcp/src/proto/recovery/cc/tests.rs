//! Tests of the parts common to NewReno and CUBIC, and of NewReno.

use offcore_stats::time::{Micros, Time};

use super::*;

const MSS: u32 = 1460;

fn congestion(algorithm: Algorithm) -> Congestion {
    Congestion::new(MSS, algorithm)
}

// RFC 6928, section 2.
#[test]
fn initial_window_is_ten_segments() {
    assert_eq!(initial(1460), 14_600);
    assert_eq!(initial(536), 5360);
    assert_eq!(initial(1480), 14_600);
    assert_eq!(initial(8960), 17_920);
}

// RFC 5681, section 3.1; RFC 3465, section 2.2 and 2.3.
#[test]
fn slow_start_counts_acked_bytes() {
    let mut cc = congestion(Algorithm::NewReno);
    cc.on_ack(Time::ZERO, u64::from(MSS), Micros::ZERO, &Progress::default());
    assert_eq!(cc.cwnd, 11 * MSS);
    cc.on_ack(Time::ZERO, 2 * u64::from(MSS), Micros::ZERO, &Progress::default());
    assert_eq!(cc.cwnd, 13 * MSS);
    cc.on_ack(Time::ZERO, 13 * u64::from(MSS), Micros::ZERO, &Progress::default());
    assert_eq!(cc.cwnd, 26 * MSS, "of a whole vector");
    cc.on_ack(Time::ZERO, 26 * u64::from(MSS), Micros::ZERO, &Progress::default());
    assert_eq!(cc.cwnd, 52 * MSS, "after a timeout, too");
    cc.on_ack(Time::ZERO, 100, Micros::ZERO, &Progress::default());
    assert_eq!(cc.cwnd, 52 * MSS + 100, "bytes, not ACKs (ACK division)");
}

// RFC 5681, section 3.1.
#[test]
fn congestion_avoidance_adds_one_segment() {
    let mut cc = congestion(Algorithm::NewReno);
    cc.ssthresh = cc.cwnd;
    for acks in 1..=10 {
        assert_eq!(cc.cwnd, 10 * MSS, "{acks}");
        cc.on_ack(Time::ZERO, u64::from(MSS), Micros::ZERO, &Progress::default());
    }
    assert_eq!(cc.cwnd, 11 * MSS);
}

// RFC 5681, equation 4.
#[test]
fn loss_halves_flight_size() {
    let mut cc = congestion(Algorithm::NewReno);
    cc.on_loss(u64::from(8 * MSS));
    assert_eq!(cc.ssthresh, 4 * MSS);
    cc.on_loss(u64::from(100 * MSS));
    assert_eq!(cc.ssthresh, 5 * MSS, "never more than half the window");
    cc.on_loss(u64::from(MSS));
    assert_eq!(cc.ssthresh, 2 * MSS, "never less than two segments");
    let mut cc = congestion(Algorithm::Cubic);
    cc.on_loss(u64::from(10 * MSS));
    assert_eq!(cc.ssthresh, 7 * MSS);
}

// RFC 2861, section 3.2; RFC 5681, section 4.1.
#[test]
fn idle_time_decays_cwnd() {
    let mut cc = congestion(Algorithm::Cubic);
    cc.cwnd = 100 * MSS;
    let (rto, ages) = (Micros::from_millis(200), Micros::new(1 << 60));
    assert_eq!(cc.after_idle(rto - Micros::new(1), rto), 100 * MSS);
    assert_eq!(cc.after_idle(rto, rto), 50 * MSS);
    assert_eq!(cc.after_idle(ages, rto), 10 * MSS);
    cc.ssthresh = 20 * MSS;
    cc.restart(Time::from_millis(500), Micros::from_millis(500), rto);
    assert_eq!((cc.cwnd, cc.ssthresh), (25 * MSS, 75 * MSS));
    cc.cwnd = 3 * MSS;
    assert_eq!(cc.after_idle(ages, rto), 3 * MSS, "never more than before");
}

#[test]
fn cwnd_holds_one_segment() {
    let mut cc = congestion(Algorithm::NewReno);
    cc.on_timeout();
    cc.set_mss(9000);
    assert_eq!(cc.cwnd, 9000);
}
