//! Tests of limits per user. The applications of several users belong to this process, so no test needs root.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use offcore_session::Place;
use offcore_session::message::{Answer, Call, Hello, KEY, NONE, Question, VERSION, Welcome};
use offcore_stats::time::Time;
use offcore_tcp::proto::{Config, ConnId, Out, Stack};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with, socketpair,
};

use super::acceptor::Acceptor;
use super::owners::Guest;
use super::processes::Process;
use super::session::DATAGRAM;
use super::*;

const USER: u32 = 54_321;
const OTHER: u32 = 54_322;
/// Memory of an application in bytes.
const MEMORY: usize = 1 << 20;

/// A server and its stack.
struct TestServer {
    serve: Serve,
    stack: Stack,
    out: Out,
    now: Time,
}

/// An application, and the socket of its process.
struct Attached {
    index: usize,
    channel: OwnedFd,
}

impl TestServer {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("offcore-limits-{}-{number}", std::process::id()));
        let config = ServeConfig { path, allow: Vec::new(), memory: MEMORY, connections: 1 << 16 };
        let serve = Serve::open(config, Block::private(&TCP_SERVE)).unwrap();
        let stack = Stack::new(Config { memory: MEMORY, ..Config::default() }).unwrap();
        Self { serve, stack, out: Out::default(), now: Time::from_micros(1) }
    }

    /// Calls the server with its stack.
    fn call<R>(&mut self, f: impl FnOnce(&mut Serve, &mut Calls<'_>) -> R) -> R {
        let Self { serve, stack, out, now } = self;
        f(serve, &mut Calls { stack, out, now: *now })
    }

    /// Handles events of the kernel.
    fn tend(&mut self) {
        self.now += LOOK;
        self.call(|serve, calls| serve.tend(calls));
    }

    /// Handles events of the kernel, and then requests in turns.
    fn round(&mut self) {
        self.tend();
        self.call(|serve, calls| serve.work_some(calls));
    }

    /// Begins to add an application of a user. Returns its key and the socket of its process.
    fn begin(&mut self, user: u32) -> ([u8; KEY], OwnedFd) {
        let theirs = self.add_guest(user);
        let guest = self.serve.admission.guests.back_mut().unwrap();
        let mut key = [1; KEY];
        key[..4].copy_from_slice(&guest.generation.to_ne_bytes());
        guest.waits = Some(key);
        let Helpers { feed, errands, .. } = &mut self.serve.helpers;
        feed.begin(user, key, MEMORY, errands);
        (key, theirs)
    }

    /// Adds a guest of a user. Returns the socket of its process.
    fn add_guest(&mut self, user: u32) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let generation = self.serve.registry.next_generation();
        let guest =
            Guest { generation, user, socket, charge: None, since: Time::ZERO, invited: false, waits: None };
        self.serve.admission.guests.push_back(guest);
        theirs
    }

    /// Adds an application of a user.
    fn attach(&mut self, user: u32) -> Attached {
        let (key, channel) = self.begin(user);
        let is_one =
            |app: &Option<Box<Application>>| app.as_ref().is_some_and(|app| app.identity().key() == key);
        let index = loop {
            self.tend();
            match self.serve.registry.apps.iter().position(is_one) {
                Some(index) => break index,
                None => std::thread::yield_now(),
            }
        };
        wire::receive(channel.as_fd(), &mut [0; 256], &mut Vec::new()).unwrap();
        Attached { index, channel }
    }

    /// Opens a datagram socket. Returns its place and the application's end.
    fn open(&mut self, app: &Attached) -> (Place, OwnedFd) {
        let mut question = Question::new(Call::Bind, NONE, DATAGRAM);
        question.local = Some(SocketAddr::from(([0, 0, 0, 0], 0)));
        app.ask(&question);
        let (answer, mut descriptors) = loop {
            self.round();
            match app.answer() {
                Some(answer) => break answer,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(answer.error, 0);
        (Place::new(answer.session.place).unwrap(), descriptors.pop().unwrap())
    }

    /// Returns the ticks that a user has used.
    fn used_ticks(&mut self, user: u32) -> u64 {
        self.serve.schedule.turns.used_ticks(user)
    }

    /// Returns which of the two users are charged for the work of `f`.
    fn charged(&mut self, f: impl FnOnce(&mut Self)) -> Vec<u32> {
        let before = [USER, OTHER].map(|user| (user, self.used_ticks(user)));
        f(self);
        before
            .into_iter()
            .filter(|(user, used)| self.used_ticks(*user) > *used)
            .map(|(user, _)| user)
            .collect()
    }

    /// Connects as a process of the user that runs the test.
    fn connect_process(&self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(&self.serve.config.path).unwrap()).unwrap();
        socket
    }
}

impl Attached {
    fn ask(&self, question: &Question) {
        wire::send(self.channel.as_fd(), &question.to_bytes(), &[]).unwrap();
    }

    fn answer(&self) -> Option<(Answer, Vec<OwnedFd>)> {
        let (mut bytes, mut descriptors) = ([0; Answer::LEN], Vec::new());
        wire::receive(self.channel.as_fd(), &mut bytes, &mut descriptors).ok().filter(|read| read.len > 0)?;
        Some((Answer::from_bytes(&bytes)?, descriptors))
    }
}

#[test]
fn kernel_events_are_charged() {
    let mut server = TestServer::new();
    let [app, _other] = [USER, OTHER].map(|user| server.attach(user));
    app.ask(&Question::new(Call::Segments, NONE, 0));
    assert_eq!(server.charged(TestServer::tend), [USER]);
    assert!(app.answer().is_none(), "the request waits for the user's turn");
    assert_eq!(server.charged(TestServer::round), [USER]);
    assert!(app.answer().is_some());
}

#[test]
fn connecting_processes_are_charged() {
    let mut server = TestServer::new();
    let user = server.serve.admission.user;
    let mut is_charged = |f: &dyn Fn(&mut TestServer)| {
        let before = server.used_ticks(user);
        f(&mut server);
        server.tend();
        server.used_ticks(user) > before
    };
    let socket = std::cell::OnceCell::new();
    assert!(is_charged(&|server| socket.set(server.connect_process()).unwrap()), "for its connection");
    assert!(!is_charged(&|_| ()));
    let message = |_: &mut TestServer| {
        send(socket.get().unwrap(), b"nonsense", SendFlags::empty()).unwrap();
    };
    assert!(is_charged(&message), "for its first message");
}

#[test]
fn answers_of_threads_are_charged() {
    let mut server = TestServer::new();
    let _other = server.attach(OTHER);
    let (_, _channel) = server.begin(USER);
    let created = |server: &mut TestServer| {
        while server.serve.registry.apps.iter().flatten().count() < 2 {
            server.call(|serve, calls| serve.take_created_memory(calls));
            std::thread::yield_now();
        }
    };
    assert_eq!(server.charged(created), [USER], "for creating an application");
    if !server.serve.helpers.peers.are_known() {
        return println!("SKIP: answers_of_threads_are_charged: no CONFIG_UNIX_DIAG");
    }
    let socket = server.connect_process();
    let answered = |server: &mut TestServer| {
        let Helpers { peers, errands, .. } = &mut server.serve.helpers;
        assert!(peers.ask(USER, Key::new(Source::End, 0, 0, 0), socket.as_fd(), errands));
        while server.used_ticks(USER) == 0 || server.serve.helpers.errands.has_some(USER) {
            std::thread::yield_now();
        }
        server.call(|serve, calls| serve.handle_peer_answers(calls));
    };
    assert_eq!(server.charged(answered), [USER], "for an answer about a session");
}

/// A slice ends after its first unit of work: a process, an application, or a group of eight events of a user.
#[test]
fn events_wait_for_next_slice() {
    let mut server = TestServer::new();
    let app = server.attach(USER);
    let events: Vec<_> =
        (0..20).map(|_| eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()).collect();
    let key = Key::new(Source::Event, app.index, 0, 0);
    for event in &events {
        server.serve.polling.watch.add(USER, event.as_fd(), key, EventFlags::IN).unwrap();
    }
    let _processes: Vec<_> = (0..3).map(|_| server.connect_process()).collect();
    let _applications: Vec<_> = (0..3).map(|_| server.begin(USER)).collect();
    // This runs after the user's thread has created the memory.
    let (done, is_done) = channel();
    server.serve.helpers.errands.run_unawaited(USER, move || done.send(()).unwrap());
    is_done.recv().unwrap();
    server.serve.schedule.turns.end_slices_at_once([OTHER, OTHER + 1]);
    let handled = [(); 4].map(|()| {
        server.tend();
        let user = server.serve.admission.user;
        let accepted = server.serve.admission.guests.iter().filter(|guest| guest.user == user).count();
        let counts = server.serve.counts();
        (counts.woken, accepted, counts.applications)
    });
    assert_eq!(handled, [(8, 1, 2), (16, 2, 3), (20, 3, 4), (20, 3, 4)]);
}

/// A child process may run as any user: the user of its application is charged.
#[test]
fn invited_children_are_charged() {
    let mut server = TestServer::new();
    let [app, _other] = [USER, OTHER].map(|user| server.attach(user));
    let (key, own) = (server.serve.app(app.index).unwrap().identity().key(), server.serve.admission.user);
    let socket = server.add_guest(USER);
    let guest = server.serve.admission.guests.back_mut().unwrap();
    guest.invited = true;
    set_socket_passcred(&guest.socket, true).unwrap();
    guest.charge = server.serve.descriptors.take(USER, 1).ok();
    server.serve.admission.talking.push((USER, Key::new(Source::Guest, 0, 0, guest.generation)));
    send(&socket, &Hello { version: VERSION, key }.to_bytes(), SendFlags::empty()).unwrap();
    let before = server.used_ticks(own);
    assert_eq!(server.charged(TestServer::tend), [USER]);
    assert_eq!(server.used_ticks(own), before);
    let mut welcome = [0; Welcome::LEN];
    wire::receive(socket.as_fd(), &mut welcome, &mut Vec::new()).unwrap();
    assert_eq!(Welcome::from_bytes(&welcome).map(|welcome| (welcome.error, welcome.key)), Some((0, key)));
}

/// The first messages of guests that had to wait because their users had too many errands. A slice is one message.
#[test]
fn first_messages_wait_for_next_slice() {
    let mut server = TestServer::new();
    let users = [USER, USER, USER, OTHER, OTHER];
    let _sockets = users.map(|user| {
        let socket = server.add_guest(user);
        send(&socket, b"nonsense", SendFlags::empty()).unwrap();
        let generation = server.serve.admission.guests.back().unwrap().generation;
        server.serve.admission.talking.push((user, Key::new(Source::Guest, 0, 0, generation)));
        socket
    });
    server.serve.schedule.turns.end_slices_at_once([OTHER + 1, OTHER + 2]);
    let left = [(); 3].map(|()| {
        server.tend();
        let guests = &server.serve.admission.guests;
        let left = [USER, OTHER].map(|user| guests.iter().filter(|guest| guest.user == user).count());
        assert!(server.serve.polling.look || left == [0, 0], "the next round reads the other messages");
        left
    });
    assert_eq!(left, [[2, 1], [1, 0], [0, 0]]);
}

/// Results of acceptor threads. A slice is one result, and the applications of a user take turns.
#[test]
fn accept_results_wait_for_next_slice() {
    let mut server = TestServer::new();
    let apps = [USER, OTHER, OTHER].map(|user| server.attach(user).index);
    for app in apps {
        server.serve.start_acceptor(app).unwrap();
        server.serve.app(app).unwrap().acceptor_mut().unwrap().set_results(3);
        server.serve.queue_accept_results(app);
    }
    server.serve.schedule.turns.end_slices_at_once([OTHER + 1, OTHER + 2]);
    let left = [(); 5].map(|()| {
        server.tend();
        apps.map(|app| server.serve.app(app).unwrap().acceptor_mut().unwrap().count_results())
    });
    assert_eq!(left, [[2, 2, 3], [1, 2, 2], [0, 1, 2], [0, 1, 1], [0, 0, 1]]);
    assert!(server.serve.polling.look, "the next round takes the last result");
}

#[test]
fn ending_acceptors_are_limited() {
    let mut server = TestServer::new();
    let [app, other] = [USER, OTHER].map(|user| server.attach(user).index);
    for _ in 0..64 {
        let charge = server.serve.descriptors.take(USER, 3).unwrap();
        let acceptor = Acceptor::new(USER, charge, server.serve.acceptors.cpus).unwrap();
        server.serve.acceptors.ending.push(acceptor);
    }
    assert_eq!(server.serve.start_acceptor(app), Err(Errno::AGAIN));
    assert_eq!(server.serve.start_acceptor(other), Ok(()), "another user has a separate limit");
    while server.serve.acceptors.ending.len() == 64 {
        server.tend();
        std::thread::yield_now();
    }
    assert_eq!(server.serve.start_acceptor(app), Ok(()));
}

#[test]
fn relayed_bytes_are_charged() {
    let mut server = TestServer::new();
    let [app, _other] = [USER, OTHER].map(|user| server.attach(user));
    let (place, end) = server.open(&app);
    let identity = &server.serve.app(app.index).unwrap().slot(place).unwrap().identity;
    identity.ports.store(9 << 16, Ordering::Relaxed);
    identity.remote[0].store(u32::from_ne_bytes([10, 0, 0, 2]), Ordering::Relaxed);
    server.round();
    assert_eq!(send(&end, b"raw", SendFlags::empty()), Ok(3));
    assert_eq!(server.charged(TestServer::tend), [USER], "for the event");
    assert_eq!(server.serve.counts().relayed, 0, "the bytes wait for the user's turn");
    let turn = |server: &mut TestServer| {
        server.call(|serve, calls| serve.work_some(calls));
    };
    assert_eq!(server.charged(turn), [USER]);
    assert_eq!((server.serve.counts().relayed, server.serve.counts().unsent), (3, 0));
}

#[test]
fn announcements_beside_other_users_are_limited() {
    let mut server = TestServer::new();
    let app = server.attach(USER);
    let _ends: Vec<_> = (0..40).map(|_| server.open(&app)).collect();
    let conns: Vec<ConnId> = server.serve.index.by_conn.keys().copied().collect();
    let queue = |server: &mut TestServer| conns.iter().for_each(|conn| server.serve.readable(*conn));
    let announce = |server: &mut TestServer| {
        server.serve.schedule.behind = false;
        assert_eq!(server.charged(|server| server.serve.announce()), [USER]);
        let left = server.serve.index.announced.len();
        assert_eq!(server.serve.schedule.behind, left > 0);
        left
    };
    queue(&mut server);
    assert_eq!(announce(&mut server), 0, "without other users");
    // Another user stays active until the end of the test.
    server.serve.schedule.turns.add(OTHER, 1, u64::MAX);
    queue(&mut server);
    assert_eq!([(); 3].map(|()| announce(&mut server)), [24, 8, 0]);
}

#[test]
fn users_pay_for_scans_in_turn() {
    let mut server = TestServer::new();
    let _apps = [USER, OTHER].map(|user| server.attach(user));
    let scans: Vec<_> =
        (0..4).map(|_| server.charged(|server| server.serve.scan_for_marks(Time::from_micros(1)))).collect();
    assert!(scans.iter().all(|users| users.len() == 1), "{scans:?}");
    assert!(scans[0] != scans[1] && scans[..2] == scans[2..], "{scans:?}");
}

#[test]
fn ports_of_a_user_are_limited() {
    const PORTS: u32 = 14_115;
    let mut server = TestServer::new();
    let apps = [USER, USER, OTHER].map(|user| server.attach(user).index);
    let may_bind = |server: &TestServer| apps.map(|app| server.serve.may_bind(app, 0).err());
    for number in 0..PORTS {
        assert!(number % 1000 != 0 || may_bind(&server) == [None; 3]);
        let PortTable { used, bound } = &mut server.serve.ports;
        let ports = if number % 3 == 0 { used } else { bound };
        ports.add(2000 + number as u16, apps[number as usize % 2], number);
        assert!(number + 2 != PORTS || may_bind(&server) == [None; 3]);
    }
    let full = Some(Errno::NOBUFS);
    assert_eq!(may_bind(&server), [full, full, None], "another user has a separate limit");
    server.serve.ports.used.remove(2000, apps[0], 0);
    assert_eq!(may_bind(&server), [None; 3]);
}

#[test]
fn processes_of_an_application_are_limited() {
    let mut server = TestServer::new();
    let index = server.attach(USER).index;
    let application = server.serve.app(index).unwrap();
    let process = |generation| Process {
        generation,
        pid: 0,
        channel: None,
        charge: None,
        postponed: None,
        is_queued: false,
        pidfd: None,
    };
    let more = (100..).map_while(|generation| application.add_process(process(generation))).count();
    assert_eq!((more, application.processes().len()), (1022, 1023));
}

#[test]
fn processes_that_wait_for_memory_are_limited() {
    let mut server = TestServer::new();
    let user = server.serve.admission.user;
    for _ in 0..256 {
        drop(server.add_guest(user));
        server.serve.admission.guests.back_mut().unwrap().waits = Some([7; KEY]);
    }
    let refused = |server: &mut TestServer| {
        let socket = server.connect_process();
        let hello = Hello { version: VERSION, key: [7; KEY] };
        send(&socket, &hello.to_bytes(), SendFlags::empty()).unwrap();
        (0..2).for_each(|_| server.tend());
        let mut bytes = [0; Welcome::LEN];
        wire::receive(socket.as_fd(), &mut bytes, &mut Vec::new()).map(|_| {
            let error = Welcome::from_bytes(&bytes).unwrap().error;
            Errno::from_raw_os_error(error as i32)
        })
    };
    assert_eq!(refused(&mut server), Ok(Errno::AGAIN), "the process must try again");
    server.serve.admission.guests.pop_front();
    assert_eq!(refused(&mut server), Err(Errno::AGAIN), "no answer yet");
    assert_eq!(server.serve.admission.guests.len(), 256);
}

/// Each answer contains descriptors. The socket of a process that reads no answers is closed.
#[test]
fn unread_answers_are_limited() {
    let mut server = TestServer::new();
    let app = Attached { index: 0, channel: server.connect_process() };
    let hello = Hello { version: VERSION, key: [0; KEY] };
    send(&app.channel, &hello.to_bytes(), SendFlags::empty()).unwrap();
    let mut welcome = [0; Welcome::LEN];
    while wire::receive(app.channel.as_fd(), &mut welcome, &mut Vec::new()).is_err() {
        server.tend();
        std::thread::yield_now();
    }
    for _ in 0..64 {
        // Fails once the socket is closed.
        let question = Question::new(Call::Segments, NONE, 0);
        let _ = wire::send(app.channel.as_fd(), &question.to_bytes(), &[]);
        server.round();
    }
    let answers = std::iter::from_fn(|| app.answer()).count();
    assert!((1..16).contains(&answers), "{answers}");
    let is_closed = |server: &TestServer| {
        server.serve.registry.apps.iter().flatten().all(|app| app.processes().channels().count() == 0)
    };
    assert!(is_closed(&server));
}

/// The kernel cannot refuse connections of the stack's own user.
#[test]
fn waiting_files_of_a_user_are_limited() {
    let mut server = TestServer::new();
    let user = server.serve.admission.user;
    let app = server.attach(user);
    while server.serve.helpers.errands.has_some(user) {
        std::thread::yield_now();
    }
    let count = |server: &TestServer| server.serve.helpers.errands.count(user);
    let (go, wait) = channel::<()>();
    server.serve.helpers.errands.run(user, move || wait.recv().unwrap());
    (1..255).for_each(|_| server.serve.helpers.errands.close(user, ()));
    let mut sockets = vec![server.connect_process()];
    server.tend();
    assert_eq!((server.serve.admission.guests.len(), count(&server)), (1, 255));
    server.serve.helpers.errands.close(user, ());
    app.ask(&Question::new(Call::Segments, NONE, 0));
    while count(&server) < 512 && sockets.len() < 300 {
        sockets.push(server.connect_process());
        server.round();
        assert_eq!(server.serve.admission.refused.is_some(), count(&server) >= 384);
    }
    assert_eq!((sockets.len(), count(&server)), (1 + 256, 512), "one file for each refused process");
    for _ in 0..3 {
        sockets.push(server.connect_process());
        server.round();
    }
    assert_eq!((server.serve.admission.guests.len(), count(&server)), (1, 512), "other processes wait");
    assert!(app.answer().is_none(), "no message is read");
    go.send(()).unwrap();
    // Processes that are accepted while files still wait would be refused.
    while server.serve.helpers.errands.has_some(user) {
        std::thread::yield_now();
    }
    while server.serve.admission.guests.len() < 4 {
        server.round();
    }
    while app.answer().is_none() {
        server.round();
    }
}
