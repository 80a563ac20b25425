//! A driver and a device on two threads, which sleep when they have no work. Everything written before a publication is
//! visible with it, and no notification for a sleeping thread is lost.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_memory;
use offcore_ring::device::{self, DeviceQueue, Direction};
use offcore_ring::testing::single;
use offcore_ring::{Areas, Layout, driver, packed, with_queue};

const CHAINS: u64 = 40_000;
/// If a length was read twice, this would show within some hundred thousand reads.
const LOOKS: u64 = 500_000;
/// Without the barriers, the first notification is lost within a few hundred rounds.
const RACES: u64 = 10_000;
const BUFFERS: u64 = 0x1_0000;
/// Number of buffers, which are contiguous. It is larger than the number of descriptors.
const PLACES: u64 = 512;

/// Replaces an eventfd, which would be used between processes.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self, who: &str) {
        let rung = self.rung.lock().unwrap();
        let wait = self.changed.wait_timeout_while(rung, Duration::from_secs(10), |rung| !*rung);
        let (mut rung, timeout) = wait.unwrap();
        assert!(!timeout.timed_out(), "no progress: {who} was not notified");
        *rung = false;
    }
}

/// Guest memory, shared by both threads.
#[derive(Clone)]
struct Guest {
    memory: Arc<GuestMemory>,
}

impl Guest {
    fn at(&self, address: u64) -> *mut u64 {
        self.memory.regions()[0].mapping().base().as_ptr().wrapping_add(address as usize).cast()
    }
}

fn place(serial: u64) -> u64 {
    BUFFERS + serial % PLACES * 64
}

/// Sends numbers in buffers, and expects them back inverted and in order.
fn drive(guest: &Guest, mut queue: driver::RingDriver<u64>, kick: &Bell, call: &Bell) {
    let (mut sent, mut back) = (0, 0);
    while back < CHAINS {
        while sent < CHAINS && queue.free() > 2 {
            // SAFETY: the address is inside the guest's memory, and no chain in flight uses this place.
            unsafe { guest.at(place(sent)).write_volatile(sent) };
            let (head, tail) = (sent as u32 % 40 + 8, sent as u32 % 16);
            let buffers = [(place(sent), head), (place(sent) + u64::from(head), tail)];
            let buffers = if sent % 3 == 0 { &buffers[..] } else { &buffers[..1] };
            queue.add_chain(buffers, Direction::Writable, sent).unwrap();
            sent += 1;
            if sent % 17 == 0 {
                break;
            }
        }
        queue.publish();
        if queue.needs_kick() {
            kick.ring();
        }
        if queue.used().unwrap() == 0 && (sent == CHAINS || queue.free() <= 2) {
            queue.set_notification(true);
            if queue.used().unwrap() == 0 {
                call.wait("the driver");
            }
            queue.set_notification(false);
        }
        while let Some(used) = queue.pop().unwrap() {
            assert_eq!((used.token, used.len), (back, 8));
            // SAFETY: the address is inside the guest's memory, and the buffer was returned.
            assert_eq!(unsafe { guest.at(place(back)).read_volatile() }, !back);
            back += 1;
        }
    }
}

fn serve(guest: &Guest, queue: &mut impl DeviceQueue, kick: &Bell, call: &Bell) {
    let mut next = 0;
    while next < CHAINS {
        if queue.look(32).unwrap() == 0 {
            queue.set_notification(true);
            if queue.look(32).unwrap() == 0 {
                kick.wait("the device");
            }
            queue.set_notification(false);
            continue;
        }
        let burst = next + 20;
        while next < burst && queue.has(0).unwrap() {
            let mut buffers: Vec<(NonNull<u8>, u32)> = Vec::new();
            let chain =
                queue.walk(0, &guest.memory, Direction::Writable, &mut 4, |b| buffers.push((b.addr, b.len)));
            let at = guest.at(place(next));
            assert_eq!(buffers[0], (NonNull::new(at.cast()).unwrap(), next as u32 % 40 + 8));
            let tail = next.is_multiple_of(3) && next % 16 != 0;
            assert_eq!(buffers.get(1).map(|b| b.1), tail.then_some(next as u32 % 16));
            // SAFETY: the address is inside the guest's memory, and the device owns the buffer until it is returned.
            assert_eq!(unsafe { at.read_volatile() }, next);
            // SAFETY: the address is inside the guest's memory, and the device owns the buffer until it is returned.
            unsafe { at.write_volatile(!next) };
            let chain = chain.unwrap();
            queue.consume(chain.entries);
            queue.push_used(chain, 8);
            next += 1;
        }
        queue.publish();
        if queue.needs_notification() {
            call.ring();
        }
    }
}

/// Guest memory, and both sides of a queue in it.
fn sides(size: u16, packed: bool, event_idx: bool) -> (Guest, driver::RingDriver<u64>, device::RingDevice) {
    let guest = Guest { memory: guest_memory(1 << 20) };
    let areas = Areas { descriptors: 0x1000, driver: 0x4000, device: 0x6000 };
    let layout = Layout::in_memory(&guest.memory, areas, size.into(), packed).unwrap();
    let driver = driver::RingDriver::new(layout.clone(), event_idx);
    let base = if packed { packed::FRESH_BASE } else { 0 };
    let device = device::RingDevice::new(layout, base, event_idx, false).unwrap();
    (guest, driver, device)
}

fn both(size: u16, packed: bool, event_idx: bool) {
    let (guest, driver, mut device) = sides(size, packed, event_idx);
    let (kick, call) = (Bell::default(), Bell::default());
    std::thread::scope(|scope| {
        scope.spawn(|| drive(&guest, driver, &kick, &call));
        with_queue!(&mut device, queue => serve(&guest, queue, &kick, &call));
    });
}

/// Lets both threads continue at almost the same time; this one is `late` by a number of steps.
fn meet(arrived: &AtomicU64, times: &mut u64, late: u64) {
    *times += 1;
    arrived.fetch_add(1, Ordering::AcqRel);
    let deadline = Instant::now() + Duration::from_secs(10);
    for spin in 0u64.. {
        if arrived.load(Ordering::Acquire) >= *times * 2 {
            break;
        }
        if spin % 1000 == 999 {
            std::thread::yield_now();
            assert!(Instant::now() < deadline, "no progress: the other side does not come");
        }
    }
    (0..late).for_each(|_| std::hint::spin_loop());
}

/// Repeatedly, one side publishes a chain while the other enables notifications and checks one last time. Either it
/// finds the chain, or it is notified. This is the purpose of the full barriers.
fn race(packed: bool, event_idx: bool) {
    let (guest, mut driver, mut device) = sides(7 + u16::from(!packed), packed, event_idx);
    let (arrived, kicked, called) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut times = 0;
            for round in 0..RACES {
                driver.set_notification(false);
                driver.add(BUFFERS, 64, Direction::Readable, round).unwrap();
                meet(&arrived, &mut times, round % 5);
                driver.publish();
                kicked.store(driver.needs_kick(), Ordering::Relaxed);
                meet(&arrived, &mut times, 0);
                meet(&arrived, &mut times, round % 7);
                driver.set_notification(true);
                let found = driver.used().unwrap() == 1;
                meet(&arrived, &mut times, 0);
                assert!(found || called.load(Ordering::Relaxed), "round {round}: the driver sleeps for ever");
                assert_eq!(driver.used(), Ok(1));
                assert_eq!(driver.pop().unwrap().unwrap().token, round);
            }
        });
        let mut times = 0;
        with_queue!(&mut device, queue => for round in 0..RACES {
            queue.set_notification(false);
            meet(&arrived, &mut times, round % 7);
            queue.set_notification(true);
            let found = queue.look(1).unwrap() == 1;
            meet(&arrived, &mut times, 0);
            assert!(found || kicked.load(Ordering::Relaxed), "round {round}: the device sleeps for ever");
            assert_eq!(queue.look(1), Ok(1));
            let (_, chain) = single(queue, 0, &guest.memory, Direction::Readable).unwrap();
            queue.consume(1);
            queue.push_used(chain, 0);
            meet(&arrived, &mut times, round % 5);
            queue.publish();
            called.store(queue.needs_notification(), Ordering::Relaxed);
            meet(&arrived, &mut times, 0);
        });
    });
}

#[test]
fn no_notification_is_missed() {
    for packed in [true, false] {
        [true, false].into_iter().for_each(|event_idx| race(packed, event_idx));
    }
}

#[test]
fn sides_on_two_threads_lose_nothing() {
    for event_idx in [true, false] {
        [256, 7, 100].into_iter().for_each(|size| both(size, true, event_idx));
        [256, 8].into_iter().for_each(|size| both(size, false, event_idx));
    }
}

/// Stops a thread when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// CVE-2020-14375: the returned length is the checked length, even if a driver keeps changing it.
#[test]
#[cfg_attr(tsan, ignore = "the guest races on purpose")]
fn returned_length_is_checked_length() {
    const LEN: u32 = 100;
    let areas = Areas { descriptors: 0x1000, driver: 0x3000, device: 0x4000 };
    for is_packed in [false, true] {
        let guest = Guest { memory: guest_memory(0x2_0000) };
        let layout = Layout::in_memory(&guest.memory, areas, 64, is_packed).unwrap();
        let mut driver = driver::RingDriver::new(layout.clone(), false);
        let buffers = [(BUFFERS, LEN), (BUFFERS + 0x1000, LEN)];
        driver.add_chain(&buffers, Direction::Readable, 0u64).unwrap();
        driver.publish();
        // The length of the first descriptor. The rest of the word is not changed.
        let word = guest.at(areas.descriptors + 8) as usize;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let length = std::ptr::with_exposed_provenance_mut::<u32>(word);
                while !stop.load(Ordering::Relaxed) {
                    for len in [u32::MAX >> 1, LEN] {
                        // SAFETY: the address is inside the guest's memory, which lives as long as this thread.
                        unsafe { length.write_volatile(len) };
                    }
                }
            });
            // Stops the other thread even if an assertion fails.
            let ends = Ends(&stop);
            let base = if is_packed { packed::FRESH_BASE } else { 0 };
            let (mut good, mut bad) = (0, 0);
            let start = Instant::now();
            while (good < LOOKS || bad < LOOKS) && start.elapsed() < Duration::from_secs(20) {
                let mut device = device::RingDevice::new(layout.clone(), base, false, true).unwrap();
                let mut found = Vec::new();
                let chain = with_queue!(&mut device, queue => {
                    queue.look(1).unwrap();
                    queue.walk(0, &guest.memory, Direction::Readable, &mut 4, |b| found.push(b.len))
                });
                match chain {
                    Ok(_) => {
                        assert_eq!(found, [LEN, LEN], "packed: {is_packed}");
                        good += 1;
                    }
                    Err(_) => bad += 1,
                }
            }
            drop(ends);
            assert!(good > 0 && bad > 0, "{good} good, {bad} bad");
        });
    }
}
