//! Tests of Offcore's front end with Offcore's back end.

use std::os::fd::AsFd;
use std::time::Duration;

use offcore_mem::{Hugepages, Mapping};
use offcore_ring::Layout;
use offcore_ring::device::{self, DeviceQueue, Direction};
use offcore_ring::driver;
use offcore_ring::testing::single;
use offcore_ring::with_queue;
use offcore_vhost::backend::RingState;
use offcore_vhost::connection::Role;
use offcore_vhost::frontend::FrontEndError;
use offcore_vhost::{Backend, BackendConfig, FrontEnd, FrontEndConfig, MemoryFd, features};

use crate::peer::{Dir, backend, last_error, start, until};

struct Memory {
    mapping: Mapping,
    fd: std::os::fd::OwnedFd,
}

impl Memory {
    fn new() -> Self {
        let (mapping, fd) = Mapping::memfd("packets", 1 << 16, Hugepages::None).unwrap();
        Self { mapping, fd }
    }

    fn region(&self) -> MemoryFd<'_> {
        MemoryFd::new(&self.mapping, self.fd.as_fd())
    }
}

fn config(dir: &Dir) -> FrontEndConfig {
    FrontEndConfig { timeout: Duration::from_secs(5), ..FrontEndConfig::new(dir.file("vhost.sock")) }
}

#[test]
fn virtqueues_start_and_stop() {
    let dir = Dir::new();
    let backend = start(BackendConfig { queue_pairs: 4, ..BackendConfig::new(dir.file("vhost.sock")) });
    let memory = Memory::new();
    let config = FrontEndConfig { queue_pairs: 3, queue_size: 1024, ..config(&dir) };
    let mut front_end = FrontEnd::connect(&config, &[memory.region()]).unwrap();
    assert_eq!(front_end.queues().len(), 6);
    let status = backend.device().status();
    assert_eq!((status.features, status.virtio_status), (Some(front_end.features()), 0xb));
    assert_eq!((status.regions, status.vrings[0].state), (2, RingState::Stopped));
    for _ in 0..3 {
        front_end.start().unwrap();
        front_end.start().unwrap();
        let status = backend.device().status();
        for vring in &status.vrings[..6] {
            assert_eq!(
                (vring.state, vring.size, vring.kicks, vring.calls),
                (RingState::Enabled, 1024, true, true)
            );
        }
        assert_eq!(status.vrings[6].state, RingState::Stopped);
        assert!(backend.cells()[5].wanted().vring.is_some());
        front_end.stop().unwrap();
        front_end.stop().unwrap();
        assert!(backend.cells()[5].wanted().vring.is_none());
    }
    front_end.start().unwrap();
    front_end.set_memory(&[]).unwrap();
    assert_eq!(backend.device().status().regions, 1);
    assert_eq!(backend.device().status().vrings[5].state, RingState::Enabled);
    assert_eq!(backend.device().status().refused, 0);
}

/// A back end gets access to all packet memory. The check uses the user of its process and ignores the owner of the
/// path.
#[test]
fn back_end_of_other_user_is_refused() {
    const OTHER_UID: u32 = 54_321;
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP: back_end_of_other_user_is_refused: needs root, to become another user");
    }
    let (dir, memory) = (Dir::new(), Memory::new());
    let path = dir.file("vhost.sock");
    std::fs::set_permissions(path.parent().unwrap(), std::os::unix::fs::PermissionsExt::from_mode(0o777))
        .unwrap();
    let listener = std::thread::spawn(move || {
        // This affects only file and socket operations of this thread: each thread of a process has separate
        // credentials.
        let user = rustix::process::Uid::from_raw(OTHER_UID);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        std::os::unix::net::UnixListener::bind(path).unwrap()
    });
    let listener = listener.join().unwrap();
    let config = FrontEndConfig { timeout: Duration::from_millis(200), ..config(&dir) };
    let error = FrontEnd::connect(&config, &[memory.region()]).unwrap_err();
    assert!(matches!(error, FrontEndError::WrongUser { found: OTHER_UID, own: 0, .. }), "{error}");
    assert!(error.to_string().contains("peer=54321"), "{error}");
    let let_in = FrontEndConfig { peer: Some(OTHER_UID), ..config };
    let error = FrontEnd::connect(&let_in, &[memory.region()]).unwrap_err();
    assert!(!matches!(error, FrontEndError::WrongUser { .. }), "it was asked, and has not answered: {error}");
    drop(listener);
}

#[test]
fn eight_queue_pairs_run() {
    eight_queue_pairs(0, "split");
}

/// Starts and stops eight queue pairs with `feature`, and checks each of them.
pub(crate) fn eight_queue_pairs(feature: u64, format: &str) {
    let dir = Dir::new();
    let backend = start(BackendConfig { queue_pairs: 8, ..BackendConfig::new(dir.file("vhost.sock")) });
    let memory = Memory::new();
    let config = FrontEndConfig { queue_pairs: 8, features: config(&dir).features | feature, ..config(&dir) };
    let mut front_end = FrontEnd::connect(&config, &[memory.region()]).unwrap();
    assert_eq!(
        front_end.features() & (features::VIRTIO_NET_F_MQ | feature),
        features::VIRTIO_NET_F_MQ | feature
    );
    assert_eq!(front_end.queues().len(), 16);
    for _ in 0..2 {
        front_end.start().unwrap();
        let line = backend.device().status().to_string();
        let expected = format!("connected, 16 of 16 virtqueues enabled, {format} rings");
        assert!(line.starts_with(&expected) && line.contains("virtio status 0xf"), "{line}");
        // Every virtqueue has separate descriptors.
        for (i, (cell, queue)) in backend.cells().iter().zip(front_end.queues()).enumerate() {
            let vring = cell.wanted().vring.unwrap();
            assert_eq!(vring.layout.size(), 256);
            let (kick, call) = (vring.kick.as_ref().unwrap(), vring.call.as_ref().unwrap());
            for (from, to, number) in [(queue.kick(), kick.as_fd(), i), (call.as_fd(), queue.call(), i + 100)]
            {
                rustix::io::write(from, &(1 + number as u64).to_ne_bytes()).unwrap();
                let mut count = [0; 8];
                rustix::io::read(to, &mut count).unwrap();
                assert_eq!(u64::from_ne_bytes(count), 1 + number as u64);
            }
        }
        front_end.stop().unwrap();
    }
    assert_eq!(status_of(&backend), (16, 0));
}

/// Number of stopped virtqueues, and of refused messages.
fn status_of(backend: &Backend) -> (usize, u64) {
    let status = backend.device().status();
    (status.vrings.iter().filter(|vring| vring.state == RingState::Stopped).count(), status.refused)
}

#[test]
fn back_end_may_refuse_the_mtu() {
    let dir = Dir::new();
    let backend = start(BackendConfig { max_mtu: 1500, ..BackendConfig::new(dir.file("vhost.sock")) });
    let connect = |mtu| FrontEnd::connect(&FrontEndConfig { mtu, ..config(&dir) }, &[]);
    let mut front_end = connect(Some(1500)).unwrap();
    assert_ne!(front_end.features() & features::VIRTIO_NET_F_MTU, 0);
    assert_eq!(backend.device().status().mtu, Some(1500));
    front_end.reset(&[]).unwrap();
    assert_eq!(backend.device().status().mtu, Some(1500), "told again");
    drop(front_end);
    assert_eq!(connect(None).unwrap().features() & features::VIRTIO_NET_F_MTU, 0);
    assert_eq!(backend.device().status().mtu, None);
    let error = connect(Some(1501)).unwrap_err();
    assert!(error.to_string().starts_with("NET_SET_MTU: refused by the back end"), "{error}");
    assert!(last_error(&backend.device().status()).contains("1501 bytes, expected 68 to 1500"));
}

/// Buffers that one side adds to a ring are found by the other side: addresses, sizes and features match.
#[test]
fn both_sides_see_the_same_ring() {
    let dir = Dir::new();
    let backend = backend(&dir);
    let memory = Memory::new();
    let mut front_end = FrontEnd::connect(&config(&dir), &[memory.region()]).unwrap();
    let event_idx = front_end.features() & features::VIRTIO_F_EVENT_IDX != 0;
    let Layout::Split(layout) = front_end.queues()[1].layout() else {
        panic!("no packed ring was asked for")
    };
    let mut queue = driver::RingDriver::new(layout, event_idx);
    front_end.start().unwrap();
    let vring = backend.cells()[1].wanted().vring.unwrap();
    assert_eq!(vring.features, front_end.features());
    let mut device = device::RingDevice::new(vring.layout.clone(), vring.base, event_idx, true).unwrap();
    assert_eq!(with_queue!(&mut device, queue => queue.look(1)), Ok(0));
    let address = memory.region().address + 4096;
    memory.mapping.write_at(4096, b"hello");
    queue.add(address, 5, Direction::Readable, 'x').unwrap();
    queue.publish();
    assert_eq!(with_queue!(&mut device, queue => queue.look(1)), Ok(1));
    let single = with_queue!(&mut device, queue => single(queue, 0, &vring.memory, Direction::Readable));
    let (buffer, _) = single.unwrap();
    // SAFETY: the buffer is inside the memory table that `vring` keeps mapped.
    let seen: Vec<u8> = (0..5).map(|i| unsafe { buffer.addr.as_ptr().add(i).read_volatile() }).collect();
    assert_eq!(seen, b"hello");
}

#[test]
fn a_front_end_can_be_the_server() {
    let dir = Dir::new();
    let client = BackendConfig { role: Role::Client, ..BackendConfig::new(dir.file("vhost.sock")) };
    let backend = Backend::start(client, Box::new(())).unwrap();
    let memory = Memory::new();
    let config = FrontEndConfig { role: Role::Server, ..config(&dir) };
    for round in 1..=2 {
        let mut front_end = FrontEnd::connect(&config, &[memory.region()]).unwrap();
        front_end.start().unwrap();
        assert_eq!(backend.device().status().connects, round);
        assert_eq!(backend.device().status().vrings[1].state, RingState::Enabled);
        drop(front_end);
        assert!(!dir.file("vhost.sock").exists());
    }
}

#[test]
fn front_end_detects_back_end_restart() {
    let dir = Dir::new();
    let start = || backend(&dir);
    let memory = Memory::new();
    let mut backend = start();
    for _ in 0..3 {
        let mut front_end = FrontEnd::connect(&config(&dir), &[memory.region()]).unwrap();
        front_end.start().unwrap();
        assert!(front_end.is_alive());
        backend.stop();
        until("the end is seen", || !front_end.is_alive());
        assert!(matches!(front_end.stop(), Err(FrontEndError::Connection(_))));
        backend = start();
    }
}

#[test]
fn connect_errors_name_the_cause() {
    let dir = Dir::new();
    let short = FrontEndConfig { timeout: Duration::from_millis(50), ..config(&dir) };
    let connect = |config: &FrontEndConfig| FrontEnd::connect(config, &[]).unwrap_err();
    assert!(matches!(connect(&short), FrontEndError::NoBackEnd { .. }));
    let server = FrontEndConfig { role: Role::Server, ..short.clone() };
    assert!(matches!(connect(&server), FrontEndError::AcceptTimedOut { .. }));
    assert!(matches!(connect(&FrontEndConfig { queue_size: 100, ..short.clone() }), FrontEndError::Ring(_)));
    assert!(matches!(
        connect(&FrontEndConfig { queue_pairs: 0, ..short.clone() }),
        FrontEndError::Pairs { .. }
    ));

    let backend = backend(&dir);
    let error = connect(&FrontEndConfig { queue_pairs: 2, ..short.clone() });
    assert!(error.to_string().contains("does not offer NET_MQ (feature 22)"), "{error}");
    let memory = Memory::new();
    let error = FrontEnd::connect(&short, &[memory.region(); 64]).unwrap_err();
    assert!(matches!(error, FrontEndError::Regions { found: 64, max: 63 }), "{error}");
    // An invalid table is refused, and the front end is notified.
    let error = FrontEnd::connect(&short, &[memory.region(), memory.region()]).unwrap_err();
    assert!(error.to_string().starts_with("SET_MEM_TABLE: refused by the back end"), "{error}");
    assert!(last_error(&backend.device().status()).contains("overlap"));
}
