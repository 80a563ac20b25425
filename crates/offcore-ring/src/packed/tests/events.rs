//! Notifications in both directions (section 2.8.10, and 2.8.1 for the wrap counters).

use super::*;

/// The rule of the specification, step by step: a notification is due if the descriptor of the event, in the same turn,
/// is among the `entries` descriptors published from `old` on.
fn expected(old: Position, entries: u32, event: u16, size: u32) -> bool {
    (0..entries).any(|step| {
        old.after(step.min(size), size).after(step.saturating_sub(size), size).encode(size) == event
    })
}

#[test]
fn event_respects_wrap_counter() {
    for size in 1..6u32 {
        for old in (0..2 * size).map(Position) {
            for entries in 0..2 * size {
                let now = old.after(entries.min(size), size).after(entries.saturating_sub(size), size);
                for event in (0..size as u16).flat_map(|index| [index, index | WRAP]) {
                    let found = Event(u32::from(RING_EVENT_FLAGS_DESC) << 16 | u32::from(event))
                        .is_due(now, entries, size);
                    assert_eq!(
                        found,
                        expected(old, entries, event, size),
                        "{old:?}+{entries} of {size}: {event:#x}"
                    );
                }
            }
        }
    }
}

/// Takes and returns `n` chains of one descriptor each, and acts as the driver that makes them available.
fn serve(guest: &Guest, queue: &mut device::PackedDevice, n: u16) {
    for _ in 0..n {
        let base = queue.base() as u16;
        guest.put(base & !WRAP, desc(0x8000, 64, 0, available(base & WRAP != 0)));
        assert_eq!(queue.look(1), Ok(1));
        let (_, chain) = guest.single(queue, 0, Direction::Readable).unwrap();
        queue.consume(1);
        queue.push_used(chain, 0);
        queue.publish();
    }
}

#[test]
fn driver_event_flags_control_notifications() {
    for event_idx in [false, true] {
        let guest = guest(4);
        let mut queue = guest.device(event_idx);
        assert!(!queue.needs_notification(), "nothing was returned");
        guest.driver_event(3, RING_EVENT_FLAGS_ENABLE);
        for _ in 0..9 {
            serve(&guest, &mut queue, 1);
            assert!(queue.needs_notification());
            assert!(!queue.needs_notification(), "nothing new");
        }
        guest.driver_event(0, RING_EVENT_FLAGS_DISABLE);
        for _ in 0..9 {
            serve(&guest, &mut queue, 1);
            assert!(!queue.needs_notification());
        }
        // Without the feature, the descriptor is ignored. The reserved value is always treated as enabled.
        for flags in if event_idx { [3, 3] } else { [RING_EVENT_FLAGS_DESC, 3] } {
            guest.driver_event(3 | WRAP, flags);
            for _ in 0..9 {
                serve(&guest, &mut queue, 1);
                assert!(queue.needs_notification(), "{flags}");
            }
        }
    }
}

#[test]
fn first_notification_is_due() {
    for (flags, due) in
        [(RING_EVENT_FLAGS_ENABLE, true), (RING_EVENT_FLAGS_DISABLE, false), (RING_EVENT_FLAGS_DESC, true)]
    {
        let guest = guest(4);
        let mut queue = guest.device(true);
        guest.driver_event(3 | WRAP, flags);
        serve(&guest, &mut queue, 1);
        assert_eq!(queue.needs_notification(), due);
        serve(&guest, &mut queue, 1);
        assert_eq!(queue.needs_notification(), flags == RING_EVENT_FLAGS_ENABLE);
    }
}

#[test]
fn driver_event_index_respects_wrap() {
    let guest = guest(5);
    let mut queue = guest.device(true);
    serve(&guest, &mut queue, 1);
    assert!(queue.needs_notification(), "the first");
    // Used so far: 1, in turn 1. The event is descriptor 2 of the next turn.
    guest.driver_event(2, RING_EVENT_FLAGS_DESC);
    serve(&guest, &mut queue, 4);
    assert!(!queue.needs_notification(), "descriptor 2 was used, but in this turn");
    serve(&guest, &mut queue, 2);
    assert!(!queue.needs_notification());
    serve(&guest, &mut queue, 1);
    assert!(queue.needs_notification());
    serve(&guest, &mut queue, 1);
    assert!(!queue.needs_notification(), "passed");
    // A whole turn at once passes the descriptor.
    guest.driver_event(3 | WRAP, RING_EVENT_FLAGS_DESC);
    serve(&guest, &mut queue, 5);
    assert!(queue.needs_notification());
    // Two turns or more cannot be distinguished from the ring state, but the descriptor was passed.
    guest.driver_event(4, RING_EVENT_FLAGS_DESC);
    serve(&guest, &mut queue, 13);
    assert!(queue.needs_notification());
    guest.driver_event(5, RING_EVENT_FLAGS_DESC);
    serve(&guest, &mut queue, 1);
    assert!(queue.needs_notification(), "an event at no descriptor is always due");
}

#[test]
fn device_requests_kick_for_next_chain() {
    let event = |guest: &Guest| {
        let event = guest.layout.device_event().load(Ordering::Relaxed);
        (event as u16, (event >> 16) as u16)
    };
    let guest = guest(4);
    let mut queue = guest.device(true);
    queue.set_notification(true);
    assert_eq!(event(&guest), (WRAP, RING_EVENT_FLAGS_DESC));
    queue.set_notification(false);
    assert_eq!(event(&guest).1, RING_EVENT_FLAGS_DISABLE);
    serve(&guest, &mut queue, 3);
    guest.put(3, desc(0x8000, 64, 0, available(true)));
    guest.put(0, desc(0x8000, 64, 0, available(false)));
    assert_eq!(queue.look(4), Ok(2));
    queue.set_notification(true);
    assert_eq!(event(&guest), (1, RING_EVENT_FLAGS_DESC), "3 and 0 are known, the first of another turn");

    let mut plain = guest.device(false);
    plain.set_notification(true);
    assert_eq!(event(&guest).1, RING_EVENT_FLAGS_ENABLE);
    plain.set_notification(false);
    assert_eq!(event(&guest).1, RING_EVENT_FLAGS_DISABLE);
}

#[test]
fn device_event_flags_control_kicks() {
    let add = |queue: &mut driver::RingDriver<u16>, n| {
        for i in 0..n {
            queue.add(0x8000, 64, Direction::Readable, i).unwrap();
        }
        queue.publish();
    };
    for event_idx in [false, true] {
        let guest = guest(16);
        let mut queue = driver::RingDriver::new(guest.layout.clone(), event_idx);
        assert!(!queue.needs_kick(), "nothing was added");
        add(&mut queue, 1);
        assert!(queue.needs_kick(), "the structure is zero: enabled");
        assert!(!queue.needs_kick(), "nothing new");
        guest.device_event(0, RING_EVENT_FLAGS_DISABLE);
        add(&mut queue, 1);
        assert!(!queue.needs_kick());
        // Available so far: 2. The device waits for 4.
        guest.device_event(4 | WRAP, RING_EVENT_FLAGS_DESC);
        add(&mut queue, 2);
        assert_eq!(queue.needs_kick(), !event_idx);
        add(&mut queue, 2);
        assert!(queue.needs_kick());
        guest.device_event(8, RING_EVENT_FLAGS_DESC);
        add(&mut queue, 4);
        assert_eq!(queue.needs_kick(), !event_idx, "descriptor 8 of the next turn");
    }
}

#[test]
fn driver_requests_interrupt_for_next_used() {
    let event = |guest: &Guest| {
        let event = guest.layout.driver_event().load(Ordering::Relaxed);
        (event as u16, (event >> 16) as u16)
    };
    let guest = guest(3);
    let mut queue = driver::RingDriver::new(guest.layout.clone(), true);
    queue.set_notification(true);
    assert_eq!(event(&guest), (WRAP, RING_EVENT_FLAGS_DESC));
    queue.add_chain(&[(0x8000, 1), (0x8000, 2)], Direction::Readable, ()).unwrap();
    queue.publish();
    guest.put(0, desc(0, 0, 0, used(true)));
    assert_eq!(queue.used(), Ok(1));
    queue.set_notification(true);
    assert_eq!(event(&guest), (2 | WRAP, RING_EVENT_FLAGS_DESC), "the chain had two descriptors");
    queue.set_notification(false);
    assert_eq!(event(&guest).1, RING_EVENT_FLAGS_DISABLE);
    let mut plain = driver::RingDriver::<()>::new(guest.layout.clone(), false);
    plain.set_notification(true);
    assert_eq!(event(&guest).1, RING_EVENT_FLAGS_ENABLE);
}
