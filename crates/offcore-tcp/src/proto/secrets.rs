//! Numbers that nobody else can guess: SYN cookies.
//!
//! They are SipHash-1-3 of what they are about, with one secret key: peers choose addresses and ports, so a hash without a
//! key would let them choose collisions.

use offcore_wire::TcpFlags;
use siphasher::sip::SipHasher13;

use super::addr::FlowKey;
use super::handshake::Offered;
use super::segment::Segment;

/// How long a cookie's clock stands: it is good for one more such time.
const PERIOD: u64 = 64_000_000;
/// Segment sizes that a cookie can tell.
const SIZES: [u16; 8] = [536, 1220, 1300, 1400, 1440, 1460, 4312, 8960];

/// Makes the numbers.
#[derive(Debug)]
pub(super) struct Secrets {
    key: [u8; 16],
}

impl Secrets {
    pub(super) fn new(key: [u8; 16]) -> Self {
        Self { key }
    }

    #[inline]
    fn hash(&self, bytes: &[u8], number: u64) -> u64 {
        let hash = SipHasher13::new_with_key(&self.key).hash(bytes);
        // The number is hashed once more with the first hash as key: no buffer for both.
        SipHasher13::new_with_keys(hash, number).hash(&self.key)
    }

    /// The first sequence number that carries what has to be known of a SYN: 5 bits of clock, 3 of segment size, and 24
    /// that only we can make: one guess in 16 million is right. `offered` is what is left of the SYN's options: without
    /// timestamps there is no place for the others, with them [`stamp`](Self::stamp) has it.
    pub(super) fn cookie(&self, now: u64, key: &FlowKey, irs: u32, offered: &mut Offered) -> u32 {
        let size = SIZES.iter().rposition(|size| *size <= offered.mss).unwrap_or(0);
        offered.mss = SIZES[size];
        if offered.timestamp.is_none() {
            (offered.scale, offered.sack, offered.ecn) = (None, false, false);
        }
        self.cookie_of(now / PERIOD, size as u32, key, irs)
    }

    fn cookie_of(&self, period: u64, size: u32, key: &FlowKey, irs: u32) -> u32 {
        let about = u64::from(irs) << 32 | (period << 3) & 0xffff_ffff | u64::from(size);
        let mac = self.hash(&key.bytes(), about + 1) as u32;
        (period as u32 & 31) << 27 | size << 24 | mac & 0x00ff_ffff
    }

    /// What our timestamps of `value` have to go back by, so that the lowest six bits say what was offered.
    pub(super) fn stamp(value: u32, offered: &Offered) -> u32 {
        let scale = u32::from(offered.scale.unwrap_or(15));
        let bits = scale << 2 | u32::from(offered.sack) << 1 | u32::from(offered.ecn);
        value.wrapping_sub(bits) & 63
    }

    /// What the SYN has offered whose cookie a segment acknowledges; none when it does not.
    pub(super) fn check_cookie(&self, now: u64, key: &FlowKey, segment: &Segment) -> Option<Offered> {
        let cookie = segment.ack.wrapping_sub(1);
        let irs = segment.seq.wrapping_sub(1);
        let size = cookie >> 24 & 7;
        let present = now / PERIOD;
        let period = [Some(present), present.checked_sub(1)].into_iter().flatten();
        period.map(|period| self.cookie_of(period, size, key, irs)).find(|made| *made == cookie)?;
        let stamps = segment.options.timestamps;
        let bits = stamps.map(|stamps| stamps.echo & 63);
        let scale = bits.map(|bits| (bits >> 2) as u8).filter(|scale| *scale < 15);
        Some(Offered {
            mss: SIZES[size as usize],
            scale,
            sack: bits.is_some_and(|bits| bits & 2 != 0),
            timestamp: stamps.map(|stamps| stamps.value),
            ecn: bits.is_some_and(|bits| bits & 1 != 0) && !segment.has(TcpFlags::SYN),
            window: segment.window,
        })
    }
}

#[cfg(test)]
mod tests {
    use offcore_wire::{TcpOptions, Timestamps};
    use proptest::prelude::*;

    use super::*;

    fn key(port: u16) -> FlowKey {
        FlowKey::v4([10, 0, 0, 1].into(), 80, [10, 0, 0, 2].into(), port)
    }

    fn acknowledgement(cookie: u32, irs: u32, echo: Option<u32>) -> Segment {
        Segment {
            src_port: 1,
            dst_port: 80,
            seq: irs.wrapping_add(1),
            ack: cookie.wrapping_add(1),
            flags: TcpFlags::ACK,
            window: 100,
            options: TcpOptions {
                timestamps: echo.map(|echo| Timestamps { value: 7, echo }),
                ..TcpOptions::default()
            },
            payload_at: 54,
            payload_len: 0,
            congestion_experienced: false,
        }
    }

    proptest! {
        #[test]
        fn cookies_come_back(
            now in 0u64..1 << 40, irs: u32, mss in 48u16..9000, value: u32,
            scale in prop::option::of(0u8..15), sack: bool, ecn: bool, with_stamp: bool, late in 0..PERIOD,
        ) {
            let secrets = Secrets::new([7; 16]);
            let timestamp = with_stamp.then_some(7);
            let mut offered = Offered { mss, scale, sack, timestamp, ecn, window: 100 };
            let cookie = secrets.cookie(now, &key(9), irs, &mut offered);
            let echo = value.wrapping_sub(Secrets::stamp(value, &offered));
            let ack = acknowledgement(cookie, irs, with_stamp.then_some(echo));
            prop_assert_eq!(secrets.check_cookie(now + late, &key(9), &ack), Some(offered));
            prop_assert!(offered.mss <= mss.max(536));
        }

        #[test]
        fn other_cookies_do_not(now in 0u64..1 << 40, irs: u32, flip in 0u32..32) {
            let secrets = Secrets::new([7; 16]);
            let mut offered =
                Offered { mss: 1460, scale: None, sack: false, timestamp: None, ecn: false, window: 100 };
            let cookie = secrets.cookie(now, &key(9), irs, &mut offered);
            let right = acknowledgement(cookie, irs, None);
            let is_good = |now, key: &FlowKey, ack: &Segment| secrets.check_cookie(now, key, ack).is_some();
            prop_assert!(is_good(now, &key(9), &right));
            prop_assert!(!is_good(now + 2 * PERIOD, &key(9), &right), "too old");
            prop_assert!(!is_good(now, &key(10), &right), "another flow's");
            prop_assert!(!is_good(now, &key(9), &acknowledgement(cookie ^ 1 << flip, irs, None)));
            prop_assert!(!is_good(now, &key(9), &acknowledgement(cookie, irs ^ 1 << flip, None)));
        }
    }
}
