//! A guest whose memory file is truncated while packets flow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offcore_ring::RingError;
use offcore_vhost::features::{VIRTIO_F_VERSION_1, VIRTIO_NET_F_MRG_RXBUF};

use crate::arena::{BUFFERS, RX, SEAM, TX, desc};
use crate::rig::{ENGINES, Engine, Memories, Rig, Setup};

const SIZE: u16 = 64;

fn rig(engine: Engine) -> Rig {
    let setup = Setup { engine, features: VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF, size: SIZE, seed: 1 };
    Rig::new(Memories::new(), setup, 0)
}

/// Makes every chain available again. Half of the buffers are in each region.
fn offer_all(rig: &Rig) {
    for head in 0..SIZE {
        let buffers = if head % 2 == 0 { BUFFERS } else { SEAM };
        let buffer = buffers + u64::from(head) * 1024;
        rig.arena.descriptor(RX.desc, head, desc(buffer, 512, offcore_ring::split::VIRTQ_DESC_F_WRITE, 0));
        rig.arena.descriptor(TX.desc, head, desc(buffer + 512, 400, 0, 0));
        rig.arena.offer(RX, SIZE, head);
        rig.arena.offer(TX, SIZE, head);
    }
}

/// The buffers of the second region vanish, or all rings and buffers do.
#[test]
fn memory_vanishes_under_copies() {
    for (engine, with_rings) in ENGINES.into_iter().flat_map(|engine| [(engine, false), (engine, true)]) {
        let mut rig = rig(engine);
        offer_all(&rig);
        rig.turn(&[100; 8]);
        if with_rings {
            rig.arena.truncate(0);
        }
        rig.arena.truncate(1);
        offer_some_more(&mut rig);
        assert!(rig.arena.memory.vanished(), "{engine:?}: the guest is to be dropped");
        if !with_rings {
            let vanished: Vec<_> = rig.arena.memory.regions().iter().map(|r| r.vanished()).collect();
            assert_eq!(vanished, [false, true]);
            assert!(rig.dequeued.packets > 0 && rig.enqueued > 0);
        }
        let before = rig.neighbour.received;
        // The front end's connection is closed, so the virtqueues stop.
        rig.finish();
        assert!(before > 0, "the neighbour's packets go on");
    }
}

fn offer_some_more(rig: &mut Rig) {
    for _ in 0..50 {
        rig.turn(&[100; 8]);
        rig.stepper.step();
    }
    // A ring whose indices have vanished may have reported another error first.
    let broken = rig.cells.each_ref().map(|cell| cell.report().broken);
    assert!(broken.iter().all(Option::is_some), "nothing more is taken: {broken:?}");
    assert!(broken.contains(&Some(RingError::Vanished)), "{broken:?}");
}

#[test]
fn memory_that_vanishes_at_any_moment() {
    // The fault can also occur on the engine's own thread.
    for engine in [Engine::Core, Engine::Faulty] {
        let mut rig = rig(engine);
        offer_all(&rig);
        let (arena, go) = (Arc::clone(&rig.arena), Arc::new(AtomicBool::new(false)));
        let truncate = std::thread::spawn({
            let go = Arc::clone(&go);
            move || {
                while !go.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                arena.truncate(1);
                arena.truncate(0);
            }
        });
        for round in 0..2000 {
            if round == 100 {
                go.store(true, Ordering::Relaxed);
            }
            rig.turn(&[300; 4]);
        }
        truncate.join().unwrap();
        offer_some_more(&mut rig);
        assert!(rig.arena.memory.vanished());
        rig.finish();
    }
}

#[test]
fn helper_thread_survives_sigbus() {
    let mut rig = rig(Engine::Helper);
    offer_all(&rig);
    rig.turn(&[100; 8]);
    rig.arena.truncate(1);
    let stepper = &mut rig.stepper;
    let copied = std::thread::scope(|scope| scope.spawn(|| stepper.step()).join().unwrap());
    assert!(copied > 0);
    assert!(rig.arena.memory.vanished());
    rig.finish();
}
