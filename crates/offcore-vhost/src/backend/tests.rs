//! Tests of the back end with workers that answer late, break, or do not answer. Real workers use the same calls.

mod peer;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use offcore_dma::Binding;
use offcore_dma::mover::MoverError;
use offcore_mem::{GuestMemory, Hugepages, Mapping};
use offcore_ring::RingError;

use super::*;
use crate::PassedFd;
use crate::cell::{Report, VringConfig, Wanted};
use crate::connection::{Connection, connect};
use crate::message::{MemoryRegion, Reply, Request, VringAddr, VringFd, VringState};

use peer::Peer;

const TIMEOUT: Duration = Duration::from_secs(10);

fn until(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("offcore-backend-{}-{name}.sock", std::process::id()))
}

fn backend(name: &str, timeout: Duration, events: impl DeviceEvents + 'static) -> Backend {
    let config = BackendConfig { timeout, ..BackendConfig::new(path(name)) };
    Backend::start(config, Box::new(events)).unwrap()
}

/// The worker of one virtqueue on a separate thread. It makes no copies.
struct Worker {
    cell: Arc<VringCell>,
    control: Arc<WorkerControl>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct WorkerControl {
    /// If set, the worker picks up no changes.
    hold: AtomicBool,
    end: AtomicBool,
    active: AtomicBool,
    /// The current position.
    base: AtomicU32,
    /// Number of rings that the worker has started at their base.
    begun: AtomicUsize,
}

impl Worker {
    fn new(cell: &Arc<VringCell>) -> Self {
        let control = Arc::new(WorkerControl::default());
        let (cell, state) = (Arc::clone(cell), Arc::clone(&control));
        let (mut applied, mut wanted) = cell.attach().expect("no other worker");
        let worker = Arc::clone(&cell);
        let thread = std::thread::spawn(move || {
            let report = || Report { base: state.base.load(Ordering::Relaxed), ..Report::default() };
            let mut start = None;
            let mut apply = |applied: u32, wanted: &Wanted| {
                let before = std::mem::replace(&mut start, wanted.vring.as_ref().map(|vring| vring.start));
                if let Some(vring) = wanted.vring.as_ref().filter(|_| start != before) {
                    state.base.store(vring.base, Ordering::Relaxed);
                    state.begun.fetch_add(1, Ordering::Relaxed);
                }
                state.active.store(wanted.vring.is_some(), Ordering::Relaxed);
                cell.acknowledge(applied, report());
            };
            apply(applied, &wanted);
            while !state.end.load(Ordering::Relaxed) {
                if cell.generation() == applied || state.hold.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                    continue;
                }
                // The previous configuration is held up to this point.
                (applied, wanted) = cell.latest_publication();
                apply(applied, &wanted);
            }
            cell.detach(wanted.vring.as_ref(), report());
        });
        Self { cell: worker, control, thread: Some(thread) }
    }

    fn hold(&self, hold: bool) {
        self.control.hold.store(hold, Ordering::Relaxed);
    }

    fn advance_to(&self, base: u32) {
        until("the ring runs", || self.control.active.load(Ordering::Relaxed));
        self.control.base.store(base, Ordering::Relaxed);
    }

    fn break_down(&self, error: RingError) {
        let base = self.control.base.load(Ordering::Relaxed);
        self.cell.report_broken(Report { base, broken: Some(error), refused: None });
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.control.end.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Returns a back end, the worker of virtqueue `index`, and a front end that has started this virtqueue.
fn started(name: &str, index: u8) -> (Backend, Worker, Peer) {
    let backend = backend(name, TIMEOUT, ());
    let worker = Worker::new(&backend.cells()[usize::from(index)]);
    let mut peer = Peer::new(&backend);
    peer.start(index);
    (backend, worker, peer)
}

fn memory_of(cell: &VringCell) -> Weak<GuestMemory> {
    Arc::downgrade(&cell.wanted().vring.unwrap().memory)
}

#[test]
fn worker_never_closes_an_eventfd() {
    let (backend, worker, mut peer) = started("last", 0);
    worker.advance_to(0);
    let mut set = || {
        let call = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        peer.done(Request::SetVringCall(VringFd { index: 0, fd: Some(call.as_fd()) }));
    };
    set();
    let call = || Arc::downgrade(&backend.cells()[0].wanted().vring.unwrap().call.clone().unwrap());
    let old = call();
    worker.hold(true);
    std::thread::scope(|scope| {
        scope.spawn(&mut set);
        until("another one is wanted", || !Weak::ptr_eq(&call(), &old));
        assert!(old.strong_count() >= 2, "the worker's, and one that is dropped later");
        worker.hold(false);
    });
    set();
    assert_eq!(old.strong_count(), 0);
}

#[test]
fn set_mem_table_waits_for_worker() {
    let (backend, worker, mut peer) = started("late", 0);
    worker.advance_to(41);
    let old = memory_of(&backend.cells()[0]);
    worker.hold(true);
    let answered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(matches!(peer.other_table(), Some(Reply::Value(0))));
            answered.store(true, Ordering::Relaxed);
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!answered.load(Ordering::Relaxed), "the worker still has the old memory");
        assert!(old.upgrade().is_some());
        worker.hold(false);
    });
    until("the old memory is gone", || old.upgrade().is_none());
    assert_eq!(worker.control.begun.load(Ordering::Relaxed), 1, "the ring continues where it was");
    let (vring, generation) =
        (|| backend.cells()[0].wanted().vring.unwrap(), backend.cells()[0].generation());
    let before = vring();
    assert!(matches!(peer.table(), Some(Reply::Value(0))));
    assert!(
        Arc::ptr_eq(&before, &vring()) && backend.cells()[0].generation() == generation,
        "nothing has changed"
    );
}

#[test]
fn new_eventfds_do_not_stop_a_ring() {
    let (backend, worker, mut peer) = started("change", 1);
    let wanted = || backend.cells()[1].wanted().vring.unwrap();
    let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let event = || VringFd { index: 1, fd: Some(fd.as_fd()) };
    worker.advance_to(7);
    assert!(wanted().call.is_none() && wanted().kick.is_none() && wanted().enabled);
    for request in [
        Request::SetVringCall(event()),
        Request::SetVringKick(event()),
        Request::SetVringEnable(VringState { index: 1, num: 0 }),
    ] {
        peer.done(request);
    }
    assert!(wanted().call.is_some() && wanted().kick.is_some() && !wanted().enabled);
    peer.done(Request::SetVringKick(VringFd { index: 1, fd: None }));
    assert!(wanted().kick.is_none());
    assert_eq!(worker.control.begun.load(Ordering::Relaxed), 1, "it went on");
    worker.advance_to(65535);
    assert!(matches!(peer.other_table(), Some(Reply::Value(0))));
    assert_eq!(worker.control.begun.load(Ordering::Relaxed), 1, "also in other memory");
    worker.advance_to(3);
    assert!(matches!(peer.base(1), Some(Reply::Vring(VringState { index: 1, num: 3 }))));
    assert!(!worker.control.active.load(Ordering::Relaxed), "the worker has let go");
    peer.start(1);
    assert_eq!(wanted().base, 0, "as SET_VRING_BASE says");
}

/// The front end may free the old eventfd as soon as it receives the answer.
#[test]
fn set_vring_call_waits_for_worker() {
    let backend = backend("exchange", TIMEOUT, ());
    let worker = Worker::new(&backend.cells()[0]);
    let mut peer = Peer::new(&backend);
    let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let event = || VringFd { index: 0, fd: Some(fd.as_fd()) };
    peer.done(Request::SetVringCall(event()));
    peer.start(0);
    until("the ring runs", || worker.control.active.load(Ordering::Relaxed));
    let old = Arc::downgrade(backend.cells()[0].wanted().vring.unwrap().call.as_ref().unwrap());
    worker.hold(true);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| peer.done(Request::SetVringCall(event())));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!asked.is_finished() && old.upgrade().is_some());
        worker.hold(false);
    });
    until("the old one is closed", || old.upgrade().is_none());
}

#[test]
fn region_changes_keep_the_ring_running() {
    let (backend, worker, mut peer) = started("regions", 0);
    worker.advance_to(5);
    let vring = || backend.cells()[0].wanted().vring.unwrap();
    let byte =
        |vring: &VringConfig, guest| vring.memory.translate(guest, 1, &mut offcore_mem::RegionCache::empty());
    let before = byte(&vring(), 0);
    let (_mapping, fd) = Mapping::memfd("more", 1 << 16, Hugepages::None).unwrap();
    for round in 0..100 {
        let region = MemoryRegion { guest: 1 << 32, size: 1 << 16, user: 1 << 50, mmap_offset: 0 };
        peer.done(Request::AddMemReg(region, fd.as_fd()));
        assert_eq!(byte(&vring(), 0), before, "neither moved nor mapped again");
        assert!(byte(&vring(), 1 << 32).is_some());
        worker.advance_to(6 + round);
        peer.done(Request::RemMemReg(region, None));
        assert_eq!(byte(&vring(), 0), before);
        assert!(byte(&vring(), 1 << 32).is_none());
    }
    assert_eq!(worker.control.begun.load(Ordering::Relaxed), 1, "it went on");
    assert!(matches!(peer.base(0), Some(Reply::Vring(VringState { index: 0, num: 105 }))));
}

/// QEMU replaces a region by a longer one by removing it first.
#[test]
fn ring_stops_while_memory_is_removed() {
    let backend = backend("removed", TIMEOUT, ());
    let workers: Vec<Worker> = backend.cells().iter().map(Worker::new).collect();
    let mut peer = Peer::new(&backend);
    (0..2).for_each(|index| peer.start(index));
    workers.iter().for_each(|worker| worker.advance_to(77));
    let region = peer.region;
    let old = memory_of(&backend.cells()[0]);
    let fd = peer.fd.try_clone().unwrap();
    peer.done(Request::RemMemReg(region, Some(fd.as_fd())));
    assert!(backend.cells().iter().all(|cell| cell.wanted().vring.is_none()));
    assert!(workers.iter().all(|worker| !worker.control.active.load(Ordering::Relaxed)));
    assert!(old.upgrade().is_none(), "nothing is mapped any more");
    assert_eq!(backend.device().status().regions, 0);
    // Neither memory at other addresses nor a kick starts the ring.
    let elsewhere = MemoryRegion { user: 1 << 20, guest: 1 << 40, ..region };
    peer.done(Request::AddMemReg(elsewhere, fd.as_fd()));
    peer.done(Request::SetVringKick(VringFd { index: 0, fd: None }));
    assert!(backend.cells()[0].wanted().vring.is_none());
    // In two pieces. The second ring is in the second piece.
    let half = |at: u64, size| MemoryRegion { guest: at, size, user: region.user + at, mmap_offset: at };
    peer.done(Request::AddMemReg(half(0, 0x1_0000), fd.as_fd()));
    assert_eq!(backend.cells()[0].wanted().vring.unwrap().base, 77, "it continues where it was");
    assert!(backend.cells()[1].wanted().vring.is_none());
    let rest = half(0x1_0000, region.size - 0x1_0000);
    peer.done(Request::AddMemReg(rest, fd.as_fd()));
    assert_eq!(backend.cells()[1].wanted().vring.unwrap().base, 77);
    assert!(matches!(peer.base(1), Some(Reply::Vring(VringState { index: 1, num: 77 }))));
}

#[test]
fn reset_device_waits_for_workers() {
    let backend = backend("reset", TIMEOUT, ());
    let workers: Vec<Worker> = backend.cells().iter().map(Worker::new).collect();
    for request in [Request::ResetDevice, Request::SetStatus(0)] {
        let mut peer = Peer::new(&backend);
        (0..2).for_each(|index| peer.start(index));
        peer.done(Request::SetStatus(0xf));
        workers.iter().for_each(|worker| {
            worker.advance_to(9);
            worker.hold(true);
        });
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| peer.done(request));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!asked.is_finished(), "the workers still have the rings");
            workers.iter().for_each(|worker| worker.hold(false));
        });
        assert!(workers.iter().all(|worker| !worker.control.active.load(Ordering::Relaxed)));
        let status = backend.device().status();
        assert_eq!((status.features, status.virtio_status, status.vrings[0].size), (None, 0, 0));
        assert_eq!(
            (status.regions, status.connected),
            (1, true),
            "QEMU continues from the regions that it has described"
        );
        // QEMU 7 requests the base only now, and continues there when the guest continues.
        assert!(matches!(peer.base(0), Some(Reply::Vring(VringState { index: 0, num: 9 }))));
        // A complete restart over the same connection.
        peer.done(Request::SetFeatures(features::VIRTIO_F_VERSION_1));
        (0..2).for_each(|index| peer.start(index));
        assert!(backend.cells().iter().all(|cell| cell.wanted().vring.unwrap().base == 0));
    }
}

#[test]
fn ring_unseen_by_worker_keeps_base() {
    let (_backend, worker, mut peer) = started("unseen", 0);
    worker.advance_to(9);
    assert!(matches!(peer.base(0), Some(Reply::Vring(VringState { index: 0, num: 9 }))));
    worker.hold(true);
    peer.start(0);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(matches!(peer.base(0), Some(Reply::Vring(VringState { index: 0, num: 0 })))));
        std::thread::sleep(Duration::from_millis(50));
        worker.hold(false);
    });
}

#[test]
fn next_worker_resumes_at_base() {
    let (backend, worker, mut peer) = started("detach", 0);
    worker.advance_to(12);
    drop(worker);
    let worker = Worker::new(&backend.cells()[0]);
    assert_eq!(backend.cells()[0].wanted().vring.unwrap().base, 12);
    drop(worker);
    assert!(matches!(peer.base(0), Some(Reply::Vring(VringState { index: 0, num: 12 }))));
}

#[test]
fn unresponsive_worker_closes_the_connection() {
    let backend = backend("stuck", Duration::from_millis(100), ());
    let worker = Worker::new(&backend.cells()[0]);
    // A worker holds this configuration while it works.
    let mut peer = Peer::new(&backend);
    peer.start(0);
    worker.advance_to(1);
    let held: Arc<VringConfig> = backend.cells()[0].wanted().vring.unwrap();
    let old = memory_of(&backend.cells()[0]);
    worker.hold(true);
    assert!(matches!(peer.other_table(), Some(Reply::Value(1))));
    until("the connection is closed", || !peer.connection.is_alive());
    until("seen", || !backend.device().status().connected);
    let status = backend.device().status();
    assert!(matches!(status.last_error.as_deref(), Some(ControlError::WorkerTimeout(_))), "{status:?}");
    assert!(old.upgrade().is_some());

    // The base is not known, so the request cannot be answered.
    let mut second = Peer::new(&backend);
    second.start(0);
    assert!(second.base(0).is_none());

    worker.hold(false);
    until("the worker has let go", || !worker.control.active.load(Ordering::Relaxed));
    drop(held);
    until("the old memory is gone", || old.upgrade().is_none());
    let mut third = Peer::new(&backend);
    third.start(0);
    assert!(matches!(third.base(0), Some(Reply::Vring(VringState { index: 0, num: 0 }))));
}

/// The front end has filled its error eventfd, and has made it blocking after passing it.
#[test]
fn full_error_eventfd_does_not_block() {
    let backend = backend("full", TIMEOUT, ());
    let [first, second] = [0, 1].map(|index| Worker::new(&backend.cells()[index]));
    let mut peer = Peer::new(&backend);
    let err = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    peer.done(Request::SetVringErr(VringFd { index: 0, fd: Some(err.as_fd()) }));
    (0..2).for_each(|index| peer.start(index));
    rustix::fs::fcntl_setfl(&err, rustix::fs::OFlags::empty()).unwrap();
    rustix::io::write(&err, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    first.advance_to(5);
    second.advance_to(6);
    first.break_down(RingError::Descriptor { found: 999, size: 256 });
    until("seen", || backend.device().status().last_error.is_some());
    assert!(peer.table().is_some(), "the control thread continues");
}

#[test]
fn broken_virtqueue_stays_down() {
    let backend = backend("broken", TIMEOUT, ());
    let [first, second] = [0, 1].map(|index| Worker::new(&backend.cells()[index]));
    let mut peer = Peer::new(&backend);
    let err = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    peer.done(Request::SetVringErr(VringFd { index: 0, fd: Some(err.as_fd()) }));
    (0..2).for_each(|index| peer.start(index));
    first.advance_to(5);
    second.advance_to(6);
    let error = RingError::Descriptor { found: 999, size: 256 };
    first.break_down(error);
    let mut count = [0; 8];
    until("the error eventfd is written", || rustix::io::read(&err, &mut [0; 8]).is_ok());
    until("seen", || backend.device().status().last_error.is_some());
    let status = backend.device().status();
    assert_eq!(
        status.last_error.unwrap().to_string(),
        "virtqueue 0 is broken until the guest resets it: descriptor 999 of a table of 256"
    );
    assert_eq!((status.vrings[0].broken, status.vrings[1].broken), (Some(error), None));
    assert!(peer.connection.is_alive());

    // A change must not restart it. The other virtqueue is not affected.
    assert!(matches!(peer.other_table(), Some(Reply::Value(0))));
    assert!(backend.cells()[0].wanted().vring.is_none());
    assert_eq!(second.control.begun.load(Ordering::Relaxed), 1);
    assert_eq!(backend.device().status().vrings[0].broken, Some(error));
    assert!(rustix::io::read(&err, &mut count).is_err(), "told once");

    assert!(matches!(peer.base(0), Some(Reply::Vring(VringState { index: 0, num: 5 }))));
    peer.start(0);
    assert!(backend.cells()[0].wanted().vring.is_some());
    assert_eq!(backend.device().status().vrings[0].broken, None);
}

/// An error found by a worker is logged by the control thread.
#[test]
fn control_thread_reports_refused_binding() {
    let backend = backend("refused", TIMEOUT, ());
    let worker = Worker::new(&backend.cells()[0]);
    let mut peer = Peer::new(&backend);
    peer.start(0);
    worker.advance_to(0);
    worker.cell.wait(TIMEOUT).unwrap();
    let refused = Some(MoverError::NoChannel(7));
    worker.cell.report_broken(Report { base: 0, broken: None, refused });
    until("seen", || backend.device().status().last_error.is_some());
    assert_eq!(
        backend.device().status().last_error.unwrap().to_string(),
        "virtqueue 0 is copied by the core, because its channel cannot be used: channel 7 is not this worker's"
    );
}

/// Calls every function of the device in every callback.
struct Busy {
    destroyed: Arc<Mutex<Vec<(bool, bool)>>>,
    controls: Vec<Arc<WorkerControl>>,
}

fn exercise(device: &VhostDevice) {
    for queue in 0..2 {
        device.register_async(queue, Binding::core()).unwrap();
        device.clear_queue(queue).unwrap();
        device.in_flight(queue).unwrap();
        device.unregister_async(queue).unwrap();
        let _ = device.status();
    }
}

impl DeviceEvents for Busy {
    fn new_device(&mut self, device: &VhostDevice) {
        exercise(device);
    }

    fn destroy_device(&mut self, device: &VhostDevice) {
        let active = |i: usize| self.controls[i].active.load(Ordering::Relaxed);
        self.destroyed.lock().unwrap().push((active(0), active(1)));
        exercise(device);
    }

    fn vring_state_changed(&mut self, device: &VhostDevice, _: u16, _: bool) {
        exercise(device);
    }
}

#[test]
fn callbacks_and_calls_do_not_deadlock() {
    let destroyed = Arc::new(Mutex::new(Vec::new()));
    // The cells are created with the back end, which is given the callbacks. This slot connects them.
    let slot: Arc<Mutex<Option<Busy>>> = Arc::default();
    struct Late(Arc<Mutex<Option<Busy>>>);
    impl DeviceEvents for Late {
        fn new_device(&mut self, device: &VhostDevice) {
            self.0.lock().unwrap().as_mut().unwrap().new_device(device);
        }
        fn destroy_device(&mut self, device: &VhostDevice) {
            self.0.lock().unwrap().as_mut().unwrap().destroy_device(device);
        }
        fn vring_state_changed(&mut self, device: &VhostDevice, queue: u16, enabled: bool) {
            self.0.lock().unwrap().as_mut().unwrap().vring_state_changed(device, queue, enabled);
        }
    }
    let backend = backend("busy", TIMEOUT, Late(Arc::clone(&slot)));
    let workers: Vec<Worker> = backend.cells().iter().map(Worker::new).collect();
    let controls = workers.iter().map(|worker| Arc::clone(&worker.control)).collect();
    *slot.lock().unwrap() = Some(Busy { destroyed: Arc::clone(&destroyed), controls });
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    exercise(backend.device());
                }
            });
        }
        for _ in 0..20 {
            let mut peer = Peer::new(&backend);
            (0..2).for_each(|index| peer.start(index));
            assert!(matches!(peer.table(), Some(Reply::Value(0))));
            assert!(peer.base(0).is_some());
        }
        until("all are gone", || !backend.device().status().connected);
        end.store(true, Ordering::Relaxed);
    });
    // The front end stopped the first virtqueue, which ended the device while the second one was still running.
    let destroyed = destroyed.lock().unwrap();
    assert_eq!(destroyed.len(), 20);
    assert!(destroyed.iter().all(|(first, _)| !first), "{destroyed:?}");
}

#[test]
fn disconnect_stops_workers_first() {
    struct Told(Arc<Mutex<Vec<bool>>>);
    impl DeviceEvents for Told {
        fn destroy_device(&mut self, device: &VhostDevice) {
            let stopped = device.cells().iter().all(|cell| cell.wanted().vring.is_none());
            let waited = device.cells().iter().all(|cell| cell.report().base == 9);
            self.0.lock().unwrap().push(stopped && waited);
        }
    }
    let told = Arc::new(Mutex::new(Vec::new()));
    let backend = backend("disconnect", TIMEOUT, Told(Arc::clone(&told)));
    let workers: Vec<Worker> = backend.cells().iter().map(Worker::new).collect();
    let mut peer = Peer::new(&backend);
    (0..2).for_each(|index| peer.start(index));
    workers.iter().for_each(|worker| {
        worker.advance_to(9);
        worker.hold(true);
    });
    drop(peer);
    std::thread::sleep(Duration::from_millis(100));
    assert!(told.lock().unwrap().is_empty(), "the workers have not let go yet");
    workers.iter().for_each(|worker| worker.hold(false));
    until("told", || !told.lock().unwrap().is_empty());
    assert_eq!(*told.lock().unwrap(), [true]);
}
