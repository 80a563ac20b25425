//! The driver side, with a test as the device.

use super::*;

fn queue(guest: &Guest) -> driver::RingDriver<char> {
    driver::RingDriver::new(guest.layout.clone(), false)
}

#[test]
fn first_available_descriptor_is_written_last() {
    let guest = guest(3);
    let mut queue = queue(&guest);
    assert_eq!(queue.free(), 3);
    queue.add(0x8000, 10, Direction::Writable, 'a').unwrap();
    queue.add_chain(&[(0x9000, 20), (0xa000, 30)], Direction::Readable, 'b').unwrap();
    assert_eq!((queue.free(), queue.in_flight()), (0, 2));
    assert_eq!(queue.add(0, 1, Direction::Readable, 'c'), Err('c'));
    assert_eq!(guest.read(0).flags, 0, "the device waits here");
    let chain = available(true) | VIRTQ_DESC_F_NEXT;
    assert_eq!(guest.read(1), desc(0x9000, 20, 1, chain));
    assert_eq!(guest.read(2), desc(0xa000, 30, 1, available(true)));
    queue.publish();
    assert_eq!(guest.read(0), desc(0x8000, 10, 0, available(true) | VIRTQ_DESC_F_WRITE));
}

#[test]
fn chains_come_back_in_any_order() {
    let guest = guest(5);
    let mut queue = queue(&guest);
    queue.add_chain(&[(0x8000, 1), (0x9000, 2)], Direction::Writable, 'a').unwrap();
    queue.add(0xa000, 3, Direction::Writable, 'b').unwrap();
    queue.add_chain(&[(0xb000, 4), (0xc000, 5)], Direction::Writable, 'c').unwrap();
    queue.publish();
    assert_eq!(queue.used(), Ok(0), "an available descriptor is not a used one");
    // The last chain is returned first. The device's position advances by two.
    guest.put(0, desc(0, 9, 2, used(true) | VIRTQ_DESC_F_WRITE));
    assert_eq!(queue.used(), Ok(1));
    assert_eq!(queue.pop(), Ok(Some(driver::Used { token: 'c', len: 9 })));
    assert_eq!(queue.pop(), Ok(None));
    guest.put(2, desc(0, 7, 0, used(true)));
    guest.put(4, desc(0, 8, 1, used(true) | VIRTQ_DESC_F_WRITE));
    assert_eq!(queue.used(), Ok(2));
    let popped = [queue.pop(), queue.pop(), queue.pop()].map(|used| used.unwrap().map(|u| (u.token, u.len)));
    assert_eq!(popped, [Some(('a', 0)), Some(('b', 8)), None], "a length without WRITE means nothing");
    assert_eq!((queue.free(), queue.in_flight()), (5, 0));
    // In the next turn, the used descriptors of this turn do not count as used.
    queue.add(0x8000, 1, Direction::Writable, 'd').unwrap();
    queue.publish();
    assert_eq!(guest.read(0).flags, available(false) | VIRTQ_DESC_F_WRITE);
    assert_eq!(queue.used(), Ok(0));
}

#[test]
fn a_hostile_device_is_reported() {
    let fresh = || {
        let guest = guest(4);
        let mut queue = queue(&guest);
        queue.add(0x8000, 1, Direction::Writable, 'a').unwrap();
        queue.add_chain(&[(0x8000, 1), (0x8000, 1)], Direction::Writable, 'b').unwrap();
        queue.publish();
        (guest, queue)
    };
    for id in [2, 3, 4, 255, 32767, 65535] {
        let (guest, mut queue) = fresh();
        guest.put(0, desc(0, 0, id, used(true)));
        assert_eq!(queue.used(), Err(RingError::NotInFlight(id.into())));
        assert_eq!(queue.pop(), Ok(None));
    }
    // A chain that is returned twice is taken only once.
    let (guest, mut queue) = fresh();
    guest.put(0, desc(0, 0, 0, used(true)));
    guest.put(1, desc(0, 0, 0, used(true)));
    assert_eq!(queue.used(), Ok(1));
    assert_eq!(queue.pop().unwrap().unwrap().token, 'a');
    // This holds even if its ID is in use again.
    queue.add(0x8000, 1, Direction::Writable, 'c').unwrap();
    queue.add(0x8000, 1, Direction::Writable, 'd').unwrap();
    guest.put(1, desc(0, 0, 2, used(true)));
    assert_eq!(queue.used(), Ok(1), "a chain of one that was not published, while two descriptors are out");
    assert_eq!(queue.pop().unwrap().unwrap().token, 'd');
    assert_eq!(queue.in_flight(), 2);
    // The device returns more descriptors than it has.
    let (guest, mut queue) = fresh();
    guest.put(0, desc(0, 0, 1, used(true)));
    guest.put(2, desc(0, 0, 1, used(true)));
    assert_eq!(queue.used(), Ok(1));
    assert_eq!(queue.pop().unwrap().unwrap().token, 'b');
    assert_eq!(queue.used(), Err(RingError::NotInFlight(1)));
    // If nothing is in flight, the content of the ring does not matter.
    let guest = super::guest(4);
    let mut queue = driver::RingDriver::<()>::new(guest.layout.clone(), false);
    (0..4).for_each(|index| guest.put(index, desc(0, 0, 0, used(true))));
    assert_eq!(queue.used(), Ok(0));
}

#[test]
fn inflight_chains_are_reclaimed() {
    let guest = guest(4);
    let mut queue = queue(&guest);
    queue.add(0x8000, 1, Direction::Writable, 'a').unwrap();
    queue.add_chain(&[(0x8000, 1), (0x8000, 1)], Direction::Writable, 'b').unwrap();
    queue.publish();
    guest.put(0, desc(0, 0, 1, used(true)));
    assert_eq!(queue.used(), Ok(1));
    assert_eq!(queue.take_in_flight().collect::<String>(), "ab");
    assert_eq!(queue.pop(), Err(RingError::NotInFlight(1)));
}

#[test]
fn new_queue_zeroes_the_ring() {
    let guest = guest(3);
    (0..3).for_each(|index| guest.put(index, desc(1, 2, 3, used(true))));
    guest.driver_event(1, 1);
    guest.device_event(1, 1);
    queue(&guest);
    assert_eq!([0, 1, 2].map(|index| guest.read(index)), [PackedDescriptor::default(); 3]);
    assert_eq!(guest.layout.driver_event().load(Ordering::Relaxed), 0);
    assert_eq!(guest.layout.device_event().load(Ordering::Relaxed), 0);
}
