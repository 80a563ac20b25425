//! The baseline: a core that does only the same work.
//!
//! It processes in a loop as many packets as a pipeline would use, in bursts of the same length. It neither receives
//! nor sends packets, so its rate is an upper bound for a core.

use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use offcore_gpu::cpu::CpuWork;
use offcore_mem::{HEADROOM, Packet, Pool};
use offcore_stats::{lcore, tsc};

use super::packets::{Check, patch};
use super::window::{Plan, Seen};

/// Measures `work` on `packets` on `lcore` for `length`. Before that, runs the work once and checks all packets against
/// `check`.
pub(super) fn measure(
    work: &CpuWork,
    check: Check<'_>,
    pool: &'static Pool,
    packets: &mut [Packet],
    plan: Plan,
    lcore: usize,
    length: Duration,
) -> Result<Seen> {
    let on_lcore = || -> Result<Seen> {
        lcore::pin(lcore)?;
        let mut found = vec![0; plan.burst];
        let mut seen = Seen::default();
        let mut scratch = Vec::new();
        for burst in packets.chunks_mut(plan.burst) {
            for (packet, number) in burst.iter_mut().zip(seen.verified..) {
                packet.set_range(pool, HEADROOM, plan.len);
                patch(packet, number);
            }
            work.run(pool, burst, &mut found);
            for ((packet, &result), number) in burst.iter().zip(&found).zip(seen.verified..) {
                check.head(packet, number, Some(result))?;
                check.content(packet, number, &mut scratch)?;
            }
            seen.verified += burst.len() as u64;
        }
        seen.received = seen.verified;
        let (begun, ticks) = (tsc::now(), tsc::ticks(length));
        let mut worked_on = 0;
        while tsc::now() - begun < ticks {
            for burst in packets.chunks_mut(plan.burst) {
                std::hint::black_box(work.run(pool, burst, &mut found));
                seen.bursts += 1;
            }
            worked_on += packets.len() as u64;
        }
        seen.received += worked_on;
        seen.collects = tsc::now() - begun;
        seen.mpps = worked_on as f64 * 1e3 / tsc::to_ns(seen.collects);
        Ok(seen)
    };
    thread::scope(|scope| scope.spawn(on_lcore).join().map_err(|_| anyhow!("a thread has panicked"))?)
}

#[cfg(test)]
mod tests {
    use offcore_gpu::layout::Kind;
    use offcore_gpu::patterns::Patterns;
    use offcore_mem::Hugepages;

    use super::super::packets::{Content, SKIP};
    use super::super::window::Traffic;
    use super::*;

    /// Measures work on eight packets after `spoil` has changed a packet. `swapped` tells the check to expect swapped
    /// addresses.
    fn measured(work: (Kind, bool), swapped: bool, spoil: impl FnOnce(&mut [u8])) -> Result<Seen> {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        let content = Content::new(Patterns::random(1, 500, 8..=32).unwrap());
        let mut cache = pool.cache();
        let mut packets: Vec<_> = (0..8).map(|_| cache.take_sized(HEADROOM, 100).unwrap()).collect();
        packets.iter_mut().for_each(|packet| content.fill(packet.chunk(), packet.bytes_mut()));
        spoil(packets[5].bytes_mut());
        let plan = Plan { burst: 4, len: 100, circulating: 8, traffic: Traffic::Closed };
        let work = CpuWork::new(work.0, work.1, SKIP as u32, 0, None).unwrap();
        let check = Check { content: &content, len: 100, swapped, results: &[] };
        let lcore = lcore::available().unwrap()[0];
        measure(&work, check, pool, &mut packets, plan, lcore, Duration::ZERO)
    }

    #[test]
    fn a_swap_that_is_not_made_is_noticed() {
        assert_eq!(measured((Kind::Nothing, true), true, |_| ()).unwrap().verified, 8);
        for (made, wanted) in [(false, true), (true, false)] {
            let error = measured((Kind::Nothing, made), wanted, |_| ()).unwrap_err().to_string();
            assert!(error.contains("packet 0") && error.contains("addresses wrong"), "{error}");
        }
    }

    #[test]
    fn wrong_byte_and_result_are_noticed() {
        let error = measured((Kind::Nothing, true), true, |bytes| bytes[99] ^= 1).unwrap_err().to_string();
        assert!(error.contains("packet 5") && error.contains("other bytes"), "{error}");
        let error = measured((Kind::Crc32c, false), false, |_| ()).unwrap_err().to_string();
        assert!(error.contains("expected 0x0"), "{error}");
    }
}
