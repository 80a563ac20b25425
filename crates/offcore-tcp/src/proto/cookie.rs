//! SYN cookies (RFC 4987, 3.6): the numbers of the SYN-ACK encode the connection's state, and the ACK returns it.
//!
//! The initial sequence number holds, from the highest bit: 29 bits of a MAC over the flow, the client's initial
//! sequence number, the period of 64 s, and all options; and 3 bits, the index of the client's MSS among eight. As on
//! Linux, the six low bits of the timestamp hold the other options if the client sends timestamps: 4 bits window scale
//! (15: none), 1 bit SACK, 1 bit ECN. Without timestamps these options are lost.
//!
//! A cookie is valid in its period and the next: 64 to 128 s. A blind guess is correct with a probability of 2 × 2^-29,
//! one in 268 million, regardless of the guessed bits; this is the same as on Linux. Unlike other initial sequence
//! numbers (RFC 6528), cookies do not grow with time, so they are used only when the backlog is full.

use offcore_stats::time::Time;

use super::addr::FlowKey;
use super::siphash::{FlowMac, Purpose};

/// Duration of a period in microseconds.
const PERIOD_US: u64 = 64_000_000;

/// The MSS values that a cookie can hold, in bytes: the defaults of IPv4 and IPv6, tunnels, Ethernet with IPv6 and with
/// IPv4, and jumbo frames with each. A client's MSS is rounded down.
const MSS: [u16; 8] = [536, 1220, 1300, 1400, 1440, 1460, 8940, 8960];

const MSS_BITS: u32 = 0x7;

/// Low bits of the timestamp that hold options.
const OPTION_BITS: u32 = 0x3f;
const SCALE_BITS: u32 = 0xf;
const NO_SCALE: u32 = 0xf;
const SACK_BIT: u32 = 0x10;
const ECN_BIT: u32 = 0x20;

/// The largest shift of a window (RFC 7323, 2.3).
const MAX_SCALE: u8 = 14;

/// The options of a client's SYN that both sides support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// The client's maximum segment size in bytes.
    pub(super) mss: u16,
    /// Present with timestamps only.
    pub(super) with_timestamps: Option<WithTimestamps>,
}

/// The options that a cookie can hold with timestamps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WithTimestamps {
    /// The shift of the client's window, 0 to 14. `None` if windows are not scaled.
    pub(super) window_scale: Option<u8>,
    /// Selective acknowledgements are permitted.
    pub(super) sack: bool,
    /// ECN was negotiated.
    pub(super) ecn: bool,
}

impl WithTimestamps {
    fn bits(self) -> u32 {
        let scale = self.window_scale.map_or(NO_SCALE, |scale| u32::from(scale.min(MAX_SCALE)));
        scale | (u32::from(self.sack) * SACK_BIT) | (u32::from(self.ecn) * ECN_BIT)
    }

    fn of(bits: u32) -> Self {
        let scale = bits & SCALE_BITS;
        Self {
            window_scale: (scale != NO_SCALE).then_some(scale as u8),
            sack: bits & SACK_BIT != 0,
            ecn: bits & ECN_BIT != 0,
        }
    }
}

/// The numbers of the SYN-ACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cookie {
    /// The initial sequence number.
    pub(super) isn: u32,
    /// With timestamps: the timestamp before the flow's offset is added, which is the clock reduced by less than 64.
    pub(super) timestamp: Option<u32>,
}

/// Creates and verifies cookies.
#[derive(Debug)]
pub(super) struct Cookies {
    mac: FlowMac,
    /// The period of the last cookie.
    last: Option<u64>,
    counts: CookieCounts,
}

/// Counters of SYN cookies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CookieCounts {
    /// SYNs answered with a cookie.
    pub sent: u64,
    /// Connections established by a returned cookie.
    pub taken: u64,
}

impl Cookies {
    /// Creates a generator with this secret.
    pub(super) fn new(secret: &[u8; 16]) -> Self {
        Self { mac: FlowMac::new(secret, Purpose::Cookie), last: None, counts: CookieCounts::default() }
    }

    /// Returns the counters.
    pub(super) fn counts(&self) -> CookieCounts {
        self.counts
    }

    /// Counts a connection established by a valid cookie.
    pub(super) fn count_taken(&mut self) {
        self.counts.taken += 1;
    }

    /// Returns the cookie for a SYN with sequence number `client_isn`. `clock` is the timestamp clock without the
    /// flow's offset. Returns `None` if the MSS is below 536, which no cookie can hold. Such a SYN waits for room in
    /// the backlog.
    pub(super) fn encode(
        &mut self,
        flow: &FlowKey,
        client_isn: u32,
        offer: Offer,
        clock: u32,
        now: Time,
    ) -> Option<Cookie> {
        let mss = MSS.iter().rposition(|mss| *mss <= offer.mss)? as u32;
        let options = offer.with_timestamps.map(WithTimestamps::bits);
        let period = now.as_micros() / PERIOD_US;
        self.last = Some(period);
        self.counts.sent += 1;
        let timestamp = options.map(|bits| {
            let timestamp = clock & !OPTION_BITS | bits;
            // A timestamp ahead of the clock would make the next one look old (RFC 7323, 5.3).
            if bits > clock & OPTION_BITS { timestamp.wrapping_sub(OPTION_BITS + 1) } else { timestamp }
        });
        Some(Cookie { isn: self.isn(flow, client_isn, period, mss, options), timestamp })
    }

    /// Returns whether a valid cookie may still be returned.
    pub(super) fn are_outstanding(&self, now: Time) -> bool {
        self.last.is_some_and(|last| now.as_micros() / PERIOD_US <= last + 1)
    }

    /// Returns the options of this ACK's client, if the ACK answers a cookie of this period or the one before.
    ///
    /// `isn` is SEG.ACK - 1, `client_isn` is SEG.SEQ - 1, `echo` is TSecr without the flow's offset. If no cookie was
    /// sent recently, every number is invalid.
    pub(super) fn check(
        &self,
        flow: &FlowKey,
        isn: u32,
        client_isn: u32,
        echo: Option<u32>,
        now: Time,
    ) -> Option<Offer> {
        let now = now.as_micros() / PERIOD_US;
        let last = self.last?;
        let options = echo.map(|echo| echo & OPTION_BITS);
        let mss = isn & MSS_BITS;
        let made = |period: u64| self.isn(flow, client_isn, period, mss, options) == isn;
        let periods = [Some(now), now.checked_sub(1)];
        // A number of a period after the last cookie can only be a guess.
        let right = periods.into_iter().flatten().any(|period| period <= last && made(period));
        right.then(|| Offer { mss: MSS[mss as usize], with_timestamps: options.map(WithTimestamps::of) })
    }

    fn isn(&self, flow: &FlowKey, client_isn: u32, period: u64, mss: u32, options: Option<u32>) -> u32 {
        let options = options.map_or(0, |bits| bits | (OPTION_BITS + 1));
        // 32 bits, 3, 7, and the rest of 128.
        let more = u128::from(client_isn)
            | u128::from(mss) << 32
            | u128::from(options) << 35
            | u128::from(period) << 42;
        self.mac.mac(flow, more) as u32 & !MSS_BITS | mss
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use offcore_stats::random::SplitMix;
    use proptest::prelude::*;

    use super::*;
    use offcore_stats::time::Micros;

    const NOW: Time = Time::from_secs(1000);
    const PERIOD: Micros = Micros::new(PERIOD_US);

    fn flow(port: u16) -> FlowKey {
        FlowKey::v4(Ipv4Addr::new(10, 0, 0, 1), 80, Ipv4Addr::new(10, 0, 0, 2), port)
    }

    fn offer() -> Offer {
        let options = WithTimestamps { window_scale: Some(7), sack: true, ecn: false };
        Offer { mss: 1460, with_timestamps: Some(options) }
    }

    fn made() -> (Cookies, Cookie) {
        let mut cookies = Cookies::new(&[5; 16]);
        let cookie = cookies.encode(&flow(1), 99, offer(), 12_345, NOW).unwrap();
        (cookies, cookie)
    }

    prop_compose! {
        fn offers()(
            mss in 536u16..,
            on in any::<bool>(),
            window_scale in proptest::option::of(0u8..=14),
            sack in any::<bool>(),
            ecn in any::<bool>(),
        ) -> Offer {
            Offer { mss, with_timestamps: on.then_some(WithTimestamps { window_scale, sack, ecn }) }
        }
    }

    proptest! {
        #[test]
        fn syn_cookie_restores_options(
            offer in offers(),
            (client_isn, clock) in any::<(u32, u32)>(),
            (now, late) in (0u64..1 << 50, 0u64..=PERIOD_US),
        ) {
            let (now, late) = (Time::from_micros(now), Micros::new(late));
            let mut cookies = Cookies::new(&[5; 16]);
            let cookie = cookies.encode(&flow(1), client_isn, offer, clock, now).unwrap();
            let behind = cookie.timestamp.map_or(0, |timestamp| clock.wrapping_sub(timestamp));
            prop_assert!(behind < 64, "{behind}");
            let found = cookies.check(&flow(1), cookie.isn, client_isn, cookie.timestamp, now + late).unwrap();
            prop_assert_eq!(found.with_timestamps, offer.with_timestamps);
            prop_assert!(found.mss <= offer.mss);
            prop_assert!(MSS.iter().all(|mss| *mss <= found.mss || *mss > offer.mss));
        }
    }

    #[test]
    fn cookie_of_other_flow_is_rejected() {
        let (cookies, Cookie { isn, timestamp }) = made();
        assert_eq!(cookies.check(&flow(1), isn, 99, timestamp, NOW), Some(offer()));
        assert_eq!(cookies.check(&flow(2), isn, 99, timestamp, NOW), None);
        assert_eq!(cookies.check(&flow(1), isn, 98, timestamp, NOW), None);
        assert_eq!(cookies.check(&flow(1), isn, 99, None, NOW), None);
        let mut other = Cookies::new(&[6; 16]);
        other.encode(&flow(1), 99, offer(), 12_345, NOW).unwrap();
        assert_eq!(other.check(&flow(1), isn, 99, timestamp, NOW), None);
    }

    #[test]
    fn cookie_expires_after_next_period() {
        let (cookies, Cookie { isn, timestamp }) = made();
        let end = Time::from_micros(NOW.as_micros().next_multiple_of(PERIOD_US)) + PERIOD;
        assert_eq!(cookies.check(&flow(1), isn, 99, timestamp, end - Micros::new(1)), Some(offer()));
        assert_eq!(cookies.check(&flow(1), isn, 99, timestamp, end), None);
        assert!(cookies.are_outstanding(end - Micros::new(1)) && !cookies.are_outstanding(end));
        assert_eq!(cookies.check(&flow(1), isn, 99, timestamp, NOW - PERIOD), None);
    }

    #[test]
    fn every_cookie_bit_is_checked() {
        let (cookies, Cookie { isn, timestamp }) = made();
        for bit in 0..32 {
            assert_eq!(cookies.check(&flow(1), isn ^ 1 << bit, 99, timestamp, NOW), None);
            assert_eq!(cookies.check(&flow(1), isn, 99 ^ 1 << bit, timestamp, NOW), None);
        }
        for bit in 0..6 {
            let echo = timestamp.map(|timestamp| timestamp ^ 1 << bit);
            assert_eq!(cookies.check(&flow(1), isn, 99, echo, NOW), None);
        }
    }

    #[test]
    fn random_cookies_are_rejected() {
        let (cookies, Cookie { timestamp, .. }) = made();
        let mut random = SplitMix::new(11);
        let hit = |random: &mut SplitMix| {
            cookies.check(&flow(1), random.next() as u32, 99, timestamp, NOW).is_some()
        };
        // 2^20 guesses of 2^-28 each: one hit in 256 such tests, and none with this seed.
        assert_eq!((0..1 << 20).filter(|_| hit(&mut random)).count(), 0);
    }

    #[test]
    fn unsent_cookies_are_rejected() {
        let (made, Cookie { isn, timestamp }) = made();
        let never = Cookies { mac: made.mac.clone(), last: None, counts: made.counts };
        assert_eq!(never.check(&flow(1), isn, 99, timestamp, NOW), None);
        let long_ago = Cookies {
            mac: made.mac.clone(),
            last: Some(NOW.as_micros() / PERIOD_US - 2),
            counts: made.counts,
        };
        assert_eq!(long_ago.check(&flow(1), isn, 99, timestamp, NOW), None);
    }

    #[test]
    fn small_mss_gets_no_cookie() {
        let mut cookies = Cookies::new(&[5; 16]);
        let tiny = Offer { mss: 535, ..offer() };
        assert_eq!(cookies.encode(&flow(1), 99, tiny, 0, NOW), None);
        let wide = WithTimestamps { window_scale: Some(200), sack: false, ecn: true };
        let wide = Offer { mss: 536, with_timestamps: Some(wide) };
        let Cookie { isn, timestamp } = cookies.encode(&flow(1), 99, wide, 0, NOW).unwrap();
        let found = cookies.check(&flow(1), isn, 99, timestamp, NOW).unwrap().with_timestamps.unwrap();
        assert_eq!(found.window_scale, Some(14));
    }
}
