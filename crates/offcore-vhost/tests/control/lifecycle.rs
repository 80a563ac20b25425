//! Connections and disconnections, and the callbacks for applications.

use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offcore_dma::Binding;
use offcore_vhost::backend::{RingState, StartError, VhostDeviceError};
use offcore_vhost::connection::{Role, SocketError};
use offcore_vhost::message::Request;
use offcore_vhost::{Backend, BackendConfig, DeviceEvents, VhostDevice, VringCell};

use crate::peer::*;

/// Records all callbacks, and calls all functions of the device in each of them.
#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<String>>>);

impl Diary {
    fn note(&self, device: &VhostDevice, entry: String) {
        for queue in 0..device.cells().len() as u16 {
            device.register_async(queue, Binding::core()).unwrap();
            device.clear_queue(queue).unwrap();
            assert_eq!(device.in_flight(queue), Ok(0));
            device.unregister_async(queue).unwrap();
        }
        let status = device.status();
        let entry = format!("{entry} {:?}", status.vrings[0].state);
        self.0.lock().unwrap().push(entry);
    }

    fn says(&self, expected: &[&str]) {
        until(&format!("{expected:?}, but {:?}", self.0.lock().unwrap()), || {
            *self.0.lock().unwrap() == expected
        });
    }
}

impl DeviceEvents for Diary {
    fn new_device(&mut self, device: &VhostDevice) {
        self.note(device, "new".into());
    }

    fn destroy_device(&mut self, device: &VhostDevice) {
        self.note(device, "destroy".into());
    }

    fn vring_state_changed(&mut self, device: &VhostDevice, queue: u16, enabled: bool) {
        self.note(device, format!("{queue} {enabled}"));
    }
}

fn start(dir: &Dir, queue_pairs: u16) -> (Backend, Diary) {
    let diary = Diary::default();
    let config = BackendConfig { queue_pairs, ..BackendConfig::new(dir.file("vhost.sock")) };
    (Backend::start(config, Box::new(diary.clone())).unwrap(), diary)
}

#[test]
fn device_events_arrive_in_order() {
    let dir = Dir::new();
    let (backend, diary) = start(&dir, 2);
    let guest = Guest::new();
    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
    // The second pair is ready first. This is not reported before the device exists.
    peer.start_ring(3);
    peer.enable(3, true);
    peer.start_ring(0);
    peer.enable(0, true);
    diary.says(&[]);
    peer.start_ring(1);
    diary.says(&[]);
    peer.enable(1, true);
    let mut expected = vec!["new Enabled", "0 true Enabled", "1 true Enabled", "3 true Enabled"];
    diary.says(&expected);
    peer.enable(3, false);
    expected.push("3 false Enabled");
    diary.says(&expected);
    peer.enable(0, false);
    expected.push("0 false Disabled");
    diary.says(&expected);
    peer.enable(0, true);
    expected.push("0 true Enabled");
    diary.says(&expected);
    assert_eq!(peer.base(1), 0);
    expected.extend(["0 false Enabled", "1 false Enabled", "destroy Enabled"]);
    diary.says(&expected);
    drop(peer);
    until("torn down", || !backend.device().status().connected);
    diary.says(&expected);
}

#[test]
fn front_end_may_disconnect_and_reconnect() {
    let dir = Dir::new();
    let (backend, diary) = start(&dir, 1);
    let guest = Guest::new();
    let cell: Arc<VringCell> = Arc::clone(&backend.cells()[0]);
    let mut expected = Vec::new();
    for round in 1..=3 {
        let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
        peer.start_pair();
        assert!(cell.wanted().vring.is_some());
        drop(peer);
        expected.extend(["new Enabled", "0 true Enabled", "1 true Enabled"]);
        expected.extend(["0 false Enabled", "1 false Enabled", "destroy Enabled"]);
        until("stopped", || cell.wanted().vring.is_none());
        diary.says(&expected);
        until("seen", || !backend.device().status().connected);
        let status = backend.device().status();
        assert_eq!((status.connects, status.features, status.regions), (round, None, 0));
        assert_eq!(status.vrings[0].state, RingState::Stopped);
    }
}

#[test]
fn second_front_end_waits() {
    let dir = Dir::new();
    let (backend, _) = start(&dir, 1);
    let first = Peer::negotiated(&dir.file("vhost.sock"));
    let mut second = Peer::connect(&dir.file("vhost.sock"));
    second.send(Request::GetQueueNum);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(backend.device().status().connects, 1);
    drop(first);
    assert!(second.reply(offcore_vhost::message::Code::GET_QUEUE_NUM).is_ok());
    assert_eq!(backend.device().status().connects, 2);
}

#[test]
fn client_waits_for_its_server() {
    let dir = Dir::new();
    let config = BackendConfig { role: Role::Client, ..BackendConfig::new(dir.file("vhost.sock")) };
    let backend = Backend::start(config, Box::new(())).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!backend.device().status().connected);
    let guest = Guest::new();
    for round in 1..=3 {
        let listener = UnixListener::bind(dir.file("vhost.sock")).unwrap();
        let mut peer = Peer::over(listener.accept().unwrap().0.into());
        assert_eq!(peer.ask(Request::GetQueueNum), 1);
        peer.send(Request::SetProtocolFeatures(9));
        assert_eq!(peer.ask(Request::SetFeatures(FEATURES)), 0);
        assert_eq!(peer.ask(guest.table()), 0);
        peer.start_pair();
        assert_eq!(backend.device().status().connects, round);
        std::fs::remove_file(dir.file("vhost.sock")).unwrap();
    }
}

#[test]
fn stopped_client_does_not_reconnect() {
    let dir = Dir::new();
    let listener = UnixListener::bind(dir.file("vhost.sock")).unwrap();
    let config = BackendConfig { role: Role::Client, ..BackendConfig::new(dir.file("vhost.sock")) };
    let backend = Backend::start(config, Box::new(())).unwrap();
    let mut peer = Peer::over(listener.accept().unwrap().0.into());
    assert_eq!(peer.ask(Request::GetQueueNum), 1);
    backend.stop();
    peer.closed();
    // A front end that accepted such a connection would write to a closed socket.
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn back_end_stops_at_once() {
    let dir = Dir::new();
    for cut in [0, 3, 14] {
        let (backend, diary) = start(&dir, 1);
        let guest = Guest::new();
        let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
        peer.start_pair();
        // The connection is in the middle of a message.
        peer.raw(&bytes_of(Request::SetFeatures(FEATURES))[..cut], &[]);
        let begun = Instant::now();
        backend.stop();
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert_eq!(diary.0.lock().unwrap().last().unwrap(), "destroy Enabled");
        peer.closed();
        assert!(!dir.file("vhost.sock").exists());
    }
}

#[test]
fn callback_may_stop_the_back_end() {
    #[derive(Default)]
    struct Stopper(Arc<Mutex<Option<Backend>>>);
    impl DeviceEvents for Stopper {
        fn new_device(&mut self, _: &VhostDevice) {
            let backend = self.0.lock().unwrap().take();
            backend.unwrap().stop();
        }
    }
    let dir = Dir::new();
    let stopper = Stopper::default();
    let slot = Arc::clone(&stopper.0);
    let backend = Backend::start(BackendConfig::new(dir.file("vhost.sock")), Box::new(stopper)).unwrap();
    *slot.lock().unwrap() = Some(backend);
    let guest = Guest::new();
    let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
    peer.start_pair();
    peer.closed();
    until("the socket is removed", || !dir.file("vhost.sock").exists());
}

#[test]
fn start_errors_name_the_cause() {
    let dir = Dir::new();
    let start = |config| Backend::start(config, Box::new(()));
    let (_backend, _) = self::start(&dir, 1);
    let config = || BackendConfig::new(dir.file("vhost.sock"));
    let in_use = start(config()).unwrap_err();
    assert!(matches!(in_use, StartError::Socket(SocketError::InUse { .. })), "{in_use}");
    for queue_pairs in [0, 129] {
        let error = start(BackendConfig { queue_pairs, ..config() }).unwrap_err();
        assert_eq!(error.to_string(), format!("{queue_pairs} queue pairs: expected 1 to 128"));
    }
    let error = start(BackendConfig { features: 1 << 36 | 1 << 15, ..config() }).unwrap_err();
    assert!(error.to_string().contains("0x1000000000 of them"), "{error}");
    // The first one still works: the check whether it is running does not count as a front end.
    assert_serves(&_backend);
}

#[test]
fn invalid_device_calls_are_refused() {
    let dir = Dir::new();
    let config = BackendConfig { asynchronous: false, ..BackendConfig::new(dir.file("vhost.sock")) };
    let backend = Backend::start(config, Box::new(())).unwrap();
    let device = backend.device();
    assert_eq!(device.clear_queue(2), Err(VhostDeviceError::NoQueue { queue: 2, vrings: 2 }));
    assert!(device.in_flight(u16::MAX).is_err());
    assert!(matches!(device.register_async(0, Binding::core()), Err(VhostDeviceError::Synchronous { .. })));
    assert_eq!(device.unregister_async(0), Ok(()));
}
