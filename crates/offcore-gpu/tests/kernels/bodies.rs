//! Tests of finding, sharing and answering bursts.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

use offcore_gpu::kernel;
use offcore_gpu::layout::{Kind, MAX_BURST, PacketDescriptor};

use crate::rig::{COUNTS, KINDS, Rig, STAGINGS, burst, threads};

/// The kernel bodies that serve a burst.
pub(crate) const MODES: [&str; 3] = ["share", "persistent", "graph"];

/// Serves the burst of turn 0, which has been posted, with [`Rig::quit`] after it.
///
/// # Safety
/// Nothing else may use the rig's memory.
pub(crate) unsafe fn by(mode: &str, rig: &Rig, packets: usize, number: u32) {
    let (view, number) = (rig.view(), threads(number));
    // SAFETY: the rig exists, and nothing else uses its memory, as the caller guarantees.
    unsafe {
        match mode {
            "graph" => assert!(kernel::graph_node(&view, number, 0, 1)),
            "persistent" => kernel::persistent(&view, number, 0, threads(1), 0),
            _ => {
                let tally = AtomicU64::new(0);
                let blocks = packets.div_ceil(kernel::SHARE).max(1) as u32;
                for block in 0..blocks {
                    assert!(kernel::share(&view, number, 0, 1, block, blocks, &tally));
                }
            }
        }
    }
}

/// Ends persistent blocks at the end of a test, also on a panic.
pub(crate) struct Quit<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) turn: u64,
    pub(crate) blocks: u32,
}

impl Drop for Quit<'_> {
    fn drop(&mut self) {
        for turn in self.turn..self.turn + u64::from(self.blocks) {
            self.rig.quit(turn);
        }
    }
}

/// Sends `bursts` to persistent blocks, up to `ahead` in flight, and checks each answer. Blocks finish in any order, so
/// with several blocks bursts in flight must not share packets.
fn persistent(
    rig: &Rig,
    blocks: u32,
    number: u32,
    from_turn: u64,
    bursts: &[Vec<PacketDescriptor>],
    ahead: usize,
) {
    let mut pool = rig.pool.bytes().to_vec();
    let expected: Vec<_> = bursts.iter().map(|packets| rig.expect(&mut pool, packets)).collect();
    let ended = AtomicU32::new(0);
    thread::scope(|scope| {
        let mut quit = Quit { rig, turn: from_turn, blocks };
        for block in 0..blocks {
            let ended = &ended;
            scope.spawn(move || {
                // SAFETY: the rig outlives the scope, and a slot is written only when its last burst has been answered.
                unsafe {
                    kernel::persistent(&rig.view(), threads(number), block, threads(blocks), from_turn)
                };
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        let mut checked = 0;
        for (i, packets) in bursts.iter().enumerate() {
            if i - checked == ahead {
                back(rig, from_turn, checked, bursts, &expected);
                checked += 1;
            }
            rig.post(from_turn + i as u64, packets);
            quit.turn += 1;
        }
        for i in checked..bursts.len() {
            back(rig, from_turn, i, bursts, &expected);
        }
        assert_eq!(ended.load(Ordering::Relaxed), 0, "a block has ended before it was told to");
    });
    assert_eq!(ended.load(Ordering::Relaxed), blocks);
    rig.check_pool(&pool, "persistent");
}

fn back(rig: &Rig, from_turn: u64, i: usize, bursts: &[Vec<PacketDescriptor>], expected: &[Vec<u32>]) {
    let turn = from_turn + i as u64;
    assert!(rig.wait(turn), "no answer to burst {i}");
    rig.check(turn, bursts[i].len(), &expected[i], &format!("burst {i}"));
    rig.clear(turn);
    rig.poison_results(turn);
}

#[test]
fn persistent_blocks_share_turns_until_quit() {
    let cases = [(1, 0), (2, 0), (2, 5), (3, 1_000_001)];
    for (staging, (blocks, from_turn)) in
        STAGINGS.into_iter().flat_map(|staging| cases.map(|case| (staging, case)))
    {
        let mut rig = Rig::new(256, 4, 64, Kind::Crc32c);
        rig.stage(staging);
        // Bursts in flight do not share chunks.
        let of_burst = |i: usize| {
            let all = rig.packets(256, i as u64).into_iter();
            all.filter(|packet| packet.chunk as usize % 4 == i % 4).take(i * 7 % 65).collect()
        };
        let bursts: Vec<_> = (0..50).map(of_burst).collect();
        persistent(&rig, blocks, 32, from_turn, &bursts, 3);
    }
}

#[test]
fn persistent_block_does_every_work() {
    for (staging, kind) in STAGINGS.into_iter().flat_map(|staging| KINDS.map(|kind| (staging, kind))) {
        let mut rig = Rig::new(300, 2, 300, kind);
        rig.stage(staging);
        let bursts: Vec<_> = [300, 1, 0, 257, 33].iter().map(|count| rig.packets(*count, 9)).collect();
        persistent(&rig, 1, 256, 0, &bursts, 2);
    }
}

#[test]
fn idle_persistent_blocks_end_at_quit() {
    let rig = Rig::new(1, 4, 1, Kind::Nothing);
    persistent(&rig, 2, 32, 7, &[], 1);
}

#[test]
fn last_block_of_a_burst_answers() {
    for kind in KINDS {
        for count in COUNTS {
            let mut rig = Rig::new(count + 1, 2, count.max(1), kind);
            let tally = AtomicU64::new(0);
            let blocks = count.div_ceil(kernel::SHARE).max(1) as u32;
            for (turn, backwards, staging) in
                [(0, false, None), (1, true, None), (2, true, Some(0)), (3, false, Some(0))]
            {
                rig.stage(staging);
                let packets = rig.packets(count, turn);
                let (pool, expected) = rig.after(&packets);
                rig.post(turn, &packets);
                for i in 0..blocks {
                    let block = if backwards { blocks - 1 - i } else { i };
                    assert!(!rig.is_answered(turn), "answered before block {block}");
                    let (slot, lap) = rig.place(turn);
                    // SAFETY: the rig is alive, and nothing else uses its memory.
                    let done =
                        unsafe { kernel::share(&rig.view(), threads(256), slot, lap, block, blocks, &tally) };
                    assert!(done);
                }
                let case = format!("{kind:?}, {count} packets, turn {turn}");
                rig.check(turn, count, &expected, &case);
                rig.check_pool(&pool, &case);
                rig.check_staging(&packets, &case);
                assert_eq!(tally.load(Ordering::Relaxed), 0);
            }
        }
    }
}

/// With fewer blocks than shares, and more.
#[test]
fn blocks_share_a_burst_concurrently() {
    for blocks in [1, 2, 3, 4, 7] {
        let mut rig = Rig::new(1000, 2, 1000, Kind::Crc32c);
        let tally = AtomicU64::new(0);
        for turn in 0..10 {
            rig.stage(STAGINGS[turn as usize % STAGINGS.len()]);
            let packets = rig.packets(1000, turn);
            let (pool, expected) = rig.after(&packets);
            rig.post(turn, &packets);
            thread::scope(|scope| {
                for block in 0..blocks {
                    let (rig, tally) = (&rig, &tally);
                    let (slot, lap) = rig.place(turn);
                    // SAFETY: the rig outlives the scope; blocks share a burst by the tally.
                    scope.spawn(move || unsafe {
                        kernel::share(&rig.view(), threads(32), slot, lap, block, blocks, tally)
                    });
                }
            });
            rig.check(turn, 1000, &expected, &format!("{blocks} blocks"));
            rig.check_pool(&pool, &format!("{blocks} blocks"));
            rig.check_staging(&packets, &format!("{blocks} blocks"));
        }
    }
}

/// Like a launch of several bursts: each has as many blocks as the longest needs.
#[test]
fn bursts_of_any_length_run_concurrently() {
    const LENGTHS: [usize; 4] = [0, 1, 700, 257];
    let mut rig = Rig::new(1000, LENGTHS.len(), 1000, Kind::Checksum);
    rig.stage(Some(0));
    let tallies = [const { AtomicU64::new(0) }; LENGTHS.len()];
    // The same slot has another length in every lap.
    for lap in 0..8u64 {
        let turns = lap * 4..lap * 4 + 4;
        // A chunk is in one burst at a time.
        let mut all = rig.packets(LENGTHS.iter().sum(), lap);
        let length = |turn: u64| LENGTHS[(turn + lap) as usize % 4];
        let bursts: Vec<_> = turns.clone().map(|turn| all.split_off(all.len() - length(turn))).collect();
        let mut pool = rig.pool.bytes().to_vec();
        let expected: Vec<_> = bursts.iter().map(|packets| rig.expect(&mut pool, packets)).collect();
        turns.clone().zip(&bursts).for_each(|(turn, packets)| rig.post(turn, packets));
        thread::scope(|scope| {
            for (turn, tally) in turns.clone().zip(&tallies) {
                for block in 0..3 {
                    let rig = &rig;
                    let (slot, lap) = rig.place(turn);
                    // SAFETY: the rig outlives the scope; blocks share a burst by its tally.
                    scope.spawn(move || unsafe {
                        assert!(kernel::share(&rig.view(), threads(32), slot, lap, block, 3, tally));
                    });
                }
            }
        });
        for ((turn, packets), expected) in turns.zip(&bursts).zip(&expected) {
            rig.check(turn, packets.len(), expected, &format!("turn {turn}, {} packets", packets.len()));
        }
        rig.check_pool(&pool, "several bursts");
        assert!(tallies.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }
}

#[test]
fn graph_nodes_serve_their_slots_until_quit() {
    STAGINGS.into_iter().for_each(graph);
}

fn graph(staging: Option<usize>) {
    const NODES: u64 = 8;
    let mut rig = Rig::new(64, NODES as usize, 64, Kind::Match);
    rig.stage(staging);
    // Three launches of a graph; in the third the sixth node gets QUIT.
    let bursts: Vec<_> = (0..NODES * 2 + 5).map(|i| rig.packets(i as usize * 5 % 65, i)).collect();
    let mut pool = rig.pool.bytes().to_vec();
    let expected: Vec<_> = bursts.iter().map(|packets| rig.expect(&mut pool, packets)).collect();
    let served = thread::scope(|scope| {
        let mut quit = Quit { rig: &rig, turn: 0, blocks: 1 };
        let nodes = scope.spawn(|| {
            // SAFETY: the rig outlives the scope, and a slot is written only when its last burst has been answered.
            (0..NODES * 3)
                .take_while(|turn| unsafe {
                    let (slot, lap) = rig.place(*turn);
                    kernel::graph_node(&rig.view(), threads(256), slot, lap)
                })
                .count()
        });
        // One slot at a time, in launch order, so that a node finds its slot empty at first.
        for (turn, packets) in bursts.iter().enumerate() {
            let turn = turn as u64;
            thread::yield_now();
            assert!(!rig.is_answered(turn));
            rig.post(turn, packets);
            quit.turn += 1;
            assert!(rig.wait(turn), "no answer to turn {turn}");
            rig.check(turn, packets.len(), &expected[turn as usize], &format!("turn {turn}"));
        }
        drop(quit);
        nodes.join().expect("nodes")
    });
    assert_eq!(served, bursts.len());
    rig.check_pool(&pool, "graph");
}

#[test]
fn excessive_count_is_answered_as_empty() {
    let full = MAX_BURST as u32;
    for kind in KINDS {
        for (room, count) in [
            (MAX_BURST + 64, full + 1),
            (MAX_BURST + 64, u32::MAX - 1),
            (MAX_BURST + 64, 0x8000_0000),
            // Below the maximum, but more than the ring's slots can hold.
            (39, 40),
            (39, full),
        ] {
            let mut rig = Rig::new(64, 2, room, kind);
            rig.stage(Some(0));
            let mut packets = rig.packets(room.min(64), 1);
            packets.resize(room, PacketDescriptor { chunk: 5, offset: 0, len: 64 });
            let pool = rig.pool.bytes().to_vec();
            rig.poison_results(0);
            let results = rig.answer(0, room).1;
            rig.post_count(0, &packets, count);
            // SAFETY: the rig is alive, and nothing else uses its memory.
            assert!(unsafe { burst(&rig.view(), threads(256), 0, 1) });
            assert!(rig.is_answered(0), "{count} packets are not answered");
            assert_eq!(rig.answer(0, room), (0, results), "{count} packets");
            rig.check_pool(&pool, "too many packets");

            rig.post_count(1, &packets, count);
            let tally = AtomicU64::new(0);
            // SAFETY: the rig is alive, and nothing else uses its memory.
            assert!(unsafe { kernel::share(&rig.view(), threads(32), 1, 1, 0, 1, &tally) });
            assert!(rig.is_answered(1));
            rig.check_pool(&pool, "too many packets, shared");
            rig.check_staging(&[], "too many packets");
        }
    }
}

#[test]
fn other_laps_and_quits_are_skipped() {
    let rig = Rig::new(8, 2, 8, Kind::Crc32c);
    let pool = rig.pool.bytes().to_vec();
    let packets = rig.packets(8, 1);
    rig.post(2, &packets);
    let tally = AtomicU64::new(0);
    for lap in [1, 3] {
        // SAFETY: the rig is alive, and nothing else uses its memory.
        unsafe {
            assert!(!burst(&rig.view(), threads(32), 0, lap));
            assert!(!kernel::share(&rig.view(), threads(32), 0, lap, 0, 1, &tally));
        }
    }
    rig.quit(3);
    // SAFETY: the rig is alive, and nothing else uses its memory.
    assert!(!unsafe { burst(&rig.view(), threads(32), 1, 2) });
    assert!(!rig.is_answered(2) && !rig.is_answered(3));
    rig.check_pool(&pool, "another lap");
}
