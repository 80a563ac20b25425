//! The baseline: a core that does the same work and nothing else.
//!
//! It goes over as many packets as a pipeline would use, in bursts as long, one after the other and over again. Nobody
//! gives it packets, and it gives them to nobody: a pipeline that does more than it has to be better by all that.

use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use offcore_gpu::cpu::CpuWork;
use offcore_mem::{HEADROOM, Packet, Pool};
use offcore_stats::{lcore, tsc};

use super::window::{Plan, Seen};

/// Measures `work` on `packets`, whose `results` are known by chunk, on `lcore`, for `length`.
///
/// # Errors
/// When the lcore is not to be had, or a result is wrong.
pub(super) fn measure(
    (work, results): (&CpuWork, &[u32]),
    (pool, packets): (&'static Pool, &mut [Packet]),
    plan: Plan,
    (lcore, length): (usize, Duration),
) -> Result<Seen> {
    let on_lcore = || -> Result<Seen> {
        lcore::pin(lcore)?;
        let mut found = vec![0; plan.burst];
        let mut seen = Seen::default();
        for burst in packets.chunks_mut(plan.burst) {
            burst.iter_mut().for_each(|packet| packet.set_range(pool, HEADROOM, plan.len));
            work.run(pool, burst, &mut found);
            for (packet, found) in burst.iter().zip(&found) {
                let expected = results.get(packet.chunk() as usize).copied().unwrap_or_default();
                ensure!(*found == expected, "a result is {found:#x}, expected {expected:#x}");
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
