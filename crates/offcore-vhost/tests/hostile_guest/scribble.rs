//! A guest that writes to its rings, tables and buffers at random while the worker reads them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_stats::SplitMix;
use offcore_vhost::features::{
    VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1, VIRTIO_NET_F_MRG_RXBUF,
};

use crate::arena::{Arena, BUFFERS, END, RX, SEAM, START, TX, desc};
use crate::rig::{ENGINES, Memories, Rig, Setup};

const SIZE: u16 = 64;
/// Duration for each engine, extended if the machine is busy. With OFFCORE_FULL=1, one minute for all engines together.
const SOME_TIME: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(15);
const AT_MOST: Duration = Duration::from_secs(45);

/// In most cases, writes data that a driver might write, at the wrong time. Sometimes, writes arbitrary data.
fn scribble(arena: &Arena, seed: u64, stop: &AtomicBool) {
    let mut random = SplitMix::new(seed);
    while !stop.load(Ordering::Relaxed) {
        let queue = random.below(2) as usize;
        let ring = [RX, TX][queue];
        match random.below(64) {
            0..24 => {
                let table = if random.below(4) == 0 { BUFFERS + random.below(16) * 8 } else { ring.desc };
                let addr = match random.below(64) {
                    0 => SEAM - random.below(64),
                    1 => END - random.below(2048),
                    2 => random.below(u64::MAX),
                    3..8 => START + random.below(0x1_0000),
                    _ => BUFFERS + random.below(0x4_0000),
                };
                let (addr, len, flags) = match random.below(16) {
                    0 => (
                        BUFFERS + random.below(16) * 8,
                        16 + random.below(8) as u32 * 16,
                        VIRTQ_DESC_F_INDIRECT,
                    ),
                    1..4 => {
                        (addr, random.below(1600) as u32, [VIRTQ_DESC_F_WRITE, 0][queue] | VIRTQ_DESC_F_NEXT)
                    }
                    4 if random.below(64) == 0 => {
                        (addr, random.below(1 << 32) as u32, random.below(8) as u16)
                    }
                    _ => (addr, 14 + random.below(1600) as u32, [VIRTQ_DESC_F_WRITE, 0][queue]),
                };
                let wild = u64::from(random.below(64) == 0);
                let next = random.below(u64::from(SIZE) + wild) as u16;
                arena.descriptor(table, random.below(SIZE.into()) as u16, desc(addr, len, flags, next));
            }
            24..40 => {
                // In most cases, not more than the ring has room for.
                let room = u16::from(random.below(64) == 0) * SIZE + SIZE;
                let waiting = arena.read_u16(ring.avail + 2).wrapping_sub(arena.used_idx(ring));
                if waiting < room {
                    arena.offer(ring, SIZE, random.below(SIZE.into()) as u16);
                }
            }
            40..56 => {
                // Overwrites the virtio-net header of a buffer, or other data at this address.
                arena.write(BUFFERS + random.below(END - BUFFERS), &random.below(256).to_le_bytes());
            }
            56 => arena.write(START + random.below(0x1_0000), &random.next().to_le_bytes()),
            57 if random.below(16) == 0 => arena.write_u16(ring.avail + 2, random.below(1 << 16) as u16),
            _ => arena
                .write_u16(ring.avail + 4 + random.below(SIZE.into()) * 2, random.below(SIZE.into()) as u16),
        }
    }
}

#[test]
fn concurrent_guest_writes_are_harmless() {
    let some_time = if std::env::var_os("OFFCORE_FULL").is_some() { LONG } else { SOME_TIME };
    let mut memories = Memories::new();
    for (i, engine) in ENGINES.into_iter().enumerate() {
        let mut features = VIRTIO_F_VERSION_1 | VIRTIO_F_INDIRECT_DESC;
        features |= if i % 2 == 0 { VIRTIO_NET_F_MRG_RXBUF } else { VIRTIO_F_EVENT_IDX };
        let setup = Setup { engine, features, size: SIZE, seed: i as u64 };
        memories.arena.clear();
        let mut rig = Rig::new(memories, setup, 0);
        let stop = Arc::new(AtomicBool::new(false));
        let guest = std::thread::spawn({
            let (arena, stop) = (Arc::clone(&rig.arena), Arc::clone(&stop));
            move || scribble(&arena, 7 + i as u64, &stop)
        });
        let (mut broken, began) = (0, Instant::now());
        for turn in 0u32.. {
            rig.turn(&[60, 1500, 200, 700]);
            rig.stepper.step();
            for (queue, ring) in [RX, TX].into_iter().enumerate() {
                let report = rig.cells[queue].report();
                // Restarts the queue, as a front end does after a reset of the guest's driver. This also happens from
                // time to time without a reason.
                if report.broken.is_some() || turn % 1000 == 999 {
                    broken += usize::from(report.broken.is_some());
                    let index = rig.arena.read_u16(ring.avail + 2);
                    rig.arena.write_u16(ring.used + 2, index);
                    rig.start(queue, index, true);
                }
            }
            let least =
                rig.dequeued.packets.min(rig.enqueued).min(broken * 10).min(rig.neighbour.received as usize);
            if turn % 64 == 0 && began.elapsed() > some_time && least > 100 {
                break;
            }
            assert!(
                began.elapsed() < AT_MOST,
                "{engine:?}: {:?}, {} given, {broken} broken",
                rig.dequeued,
                rig.enqueued
            );
        }
        stop.store(true, Ordering::Relaxed);
        guest.join().unwrap();
        memories = rig.finish();
    }
}
