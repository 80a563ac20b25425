//! Defects of l2fwd-nv's kernels that must not occur here: each test is named for one.

use std::thread;

use offcore_gpu::kernel;
use offcore_gpu::layout::{Kind, MAX_BURST, PacketDescriptor};

use crate::bodies::{MODES, Quit, by};
use crate::rig::{Rig, burst, threads};

/// Returns packets whose first twelve bytes are asymmetric, so that a missing swap is detected.
fn full_packets(rig: &Rig, count: usize) -> Vec<PacketDescriptor> {
    let mut packets = rig.packets(count, 11);
    for packet in &mut packets {
        (packet.offset, packet.len) = (packet.offset % 1000, 64 + packet.offset % 500);
    }
    packets
}

/// l2fwd-nv: one block of 256 threads, so packets from the 257th on are sent unswapped.
#[test]
fn pitfall_1_last_packet_of_a_large_burst() {
    for count in [257, 1024, 1025, MAX_BURST] {
        for mode in MODES {
            let rig = Rig::new(count, 2, count, Kind::Nothing);
            let packets = full_packets(&rig, count);
            let (pool, expected) = rig.after(&packets);
            assert_ne!(pool, rig.pool.bytes());
            rig.post(0, &packets);
            rig.quit(1);
            // SAFETY: the rig is alive, and nothing else uses its memory.
            unsafe { by(mode, &rig, count, 256) };
            let case = format!("{mode}, {count} packets");
            rig.check(0, count, &expected, &case);
            rig.check_pool(&pool, &case);
        }
    }
}

/// l2fwd-nv: the persistent kernel reads slot 0's packets for every slot, and the sender clears them, so that packets
/// of all slots are sent unswapped until slot 0 is filled again.
#[test]
fn pitfall_2_current_slot_is_used() {
    let rig = Rig::new(64, 8, 16, Kind::Checksum);
    thread::scope(|scope| {
        let mut quit = Quit { rig: &rig, turn: 0, blocks: 1 };
        scope.spawn(|| {
            // SAFETY: the rig outlives the scope, and a slot is written only when its last burst has been answered.
            unsafe { kernel::persistent(&rig.view(), threads(32), 0, threads(1), 0) }
        });
        let all = full_packets(&rig, 64);
        for turn in 0..200u64 {
            // Different packets each turn. None of them were in the previous turn.
            let packets: Vec<_> = (0..9).map(|i| all[(turn as usize * 9 + i) % 64]).collect();
            let (pool, expected) = rig.after(&packets);
            rig.post(turn, &packets);
            quit.turn += 1;
            assert!(rig.wait(turn), "no answer to turn {turn}");
            rig.check(turn, 9, &expected, &format!("turn {turn}"));
            rig.check_pool(&pool, &format!("turn {turn}"));
            rig.clear(turn);
        }
    });
}

/// A device only writes answers, because they may be behind a bus.
#[test]
fn pitfall_7_device_never_reads_an_answer() {
    let rig = Rig::new(64, 2, 64, Kind::Crc32c);
    for turn in 0..6 {
        let packets = full_packets(&rig, 64);
        let (pool, expected) = rig.after(&packets);
        rig.poison_results(turn);
        rig.post(turn, &packets);
        let (slot, lap) = rig.place(turn);
        // SAFETY: the rig exists, and this is its only user.
        assert!(unsafe { burst(&rig.view(), threads(32), slot, lap) });
        rig.check(turn, 64, &expected, "behind a scribble");
        rig.check_pool(&pool, "behind a scribble");
    }
}

/// l2fwd-nv: receives until there are `burst - 4` packets, so bursts of up to 4 never complete.
#[test]
fn pitfall_3_bursts_of_1_to_4_are_processed() {
    for count in 1..=4 {
        for number in [1, 32, 256] {
            let rig = Rig::new(8, 2, 4, Kind::Crc32c);
            let packets = full_packets(&rig, count);
            let (pool, expected) = rig.after(&packets);
            rig.post(0, &packets);
            rig.quit(1);
            // SAFETY: the rig is alive, and nothing else uses its memory.
            unsafe { kernel::persistent(&rig.view(), threads(number), 0, threads(1), 0) };
            let case = format!("{count} packets, {number} threads");
            rig.check(0, count, &expected, &case);
            rig.check_pool(&pool, &case);
        }
    }
}
