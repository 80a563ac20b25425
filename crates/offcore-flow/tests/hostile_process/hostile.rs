//! A hostile process of an application: messages and descriptors of any kind, and any bytes in the shared memory.

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use offcore_flow::host::serve::Serve;
use offcore_mem::Mapping;
use offcore_session::message::{Answer, Hello, KEY, Question, VERSION};
use offcore_session::slot::SLOT;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, getpeername, send, sendmsg, socket_with, socketpair,
};
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process, waitpid};

use crate::process::{End, Process, bind, greet, receive};
use crate::script::Script;
use crate::setup::world;
use crate::world::{Client, World};

/// Maximum number of steps of a script.
const STEPS: usize = 100;
/// Maximum number of descriptors that a process keeps.
const KEPT: usize = 64;

/// The results of scripts: answers, created sessions, and processes that the stack ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) answers: u64,
    pub(crate) sessions: u64,
    pub(crate) ended: u64,
}

/// A stack, and an honest application with a connection.
struct Bystander {
    world: World<Serve>,
    path: PathBuf,
    process: Process,
    _listener: End,
    end: End,
    client: Client,
}

impl Bystander {
    fn new() -> Self {
        let (mut world, path) = world();
        let process = Process::attach(&mut world, &path);
        let listener = process.listen(&mut world, 80, 16);
        let client = world.connect(80);
        world.run(0.1);
        let end = process.accept(&listener).unwrap();
        Self { world, path, process, _listener: listener, end, client }
    }

    /// Transfers a message and an answer.
    fn check(&mut self) {
        let Self { world, process, end, client, .. } = self;
        assert_eq!(world.write(client, b"ping"), 4);
        world.run_until(10, |_| end.reader.available() >= 4).expect("the message");
        assert_eq!(process.read(end, 100), b"ping");
        assert_eq!(process.write(end, b"pong"), 4);
        let mut answer = Vec::new();
        world.run_until(10, |world| {
            answer.extend(world.read(client, 100));
            answer.len() >= 4
        });
        assert_eq!(answer, b"pong");
    }

    /// Waits until all other applications are gone. Threads free their memory in real time, not in the virtual time of
    /// the world.
    fn wait_until_alone(&mut self) {
        let start = Instant::now();
        while self.world.app.counts().applications > 1 || self.world.app.counts().sessions > 2 {
            self.world.run(0.1);
            sleep(Duration::from_micros(100));
            let counts = self.world.app.counts();
            assert!(start.elapsed() < Duration::from_secs(60), "an application remains: {counts:?}");
        }
    }
}

/// A child process that connects a socket. The stack takes the child for the process at the other end.
struct Child(Pid);

impl Child {
    fn connect(socket: &OwnedFd, path: &Path) -> Self {
        let address = SocketAddrUnix::new(path).unwrap();
        let parent = getpid();
        // SAFETY: the child only makes system calls, which need no state of other threads.
        let child = match unsafe { libc::fork() } {
            0 => {
                // It keeps no other descriptors, and ends with its parent.
                // SAFETY: system calls on descriptors of the child, which owns a copy of each.
                let (alone, stdin) = unsafe {
                    libc::dup2(socket.as_fd().as_raw_fd(), 0);
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    (libc::close_range(1, u32::MAX, 0) == 0, BorrowedFd::borrow_raw(0))
                };
                if !alone || getppid() != Some(parent) || connect(stdin, &address).is_err() {
                    // SAFETY: `_exit` ends the child immediately and runs no destructors.
                    unsafe { libc::_exit(1) };
                }
                loop {
                    // SAFETY: `pause` only waits for a signal.
                    unsafe { libc::pause() };
                }
            }
            pid => Self(Pid::from_raw(pid).filter(|_| pid > 0).expect("a child")),
        };
        let start = Instant::now();
        while getpeername(socket).is_err() {
            assert!(start.elapsed() < Duration::from_secs(60), "the child does not connect");
            sleep(Duration::from_micros(50));
        }
        child
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        kill_process(self.0, Signal::KILL).unwrap();
        waitpid(Some(self.0), WaitOptions::empty()).unwrap();
    }
}

/// A process that maps all memory it gets, and keeps descriptors.
struct Hostile {
    _child: Child,
    socket: OwnedFd,
    /// Control pages, pages of processes, then the segments.
    memory: Vec<Mapping>,
    event: OwnedFd,
    key: [u8; KEY],
    kept: Vec<OwnedFd>,
    /// Places of sessions.
    slots: Vec<u32>,
    ended: bool,
}

impl Hostile {
    fn attach(world: &mut World<Serve>, path: &Path, key: [u8; KEY]) -> Option<Self> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let _child = Child::connect(&socket, path);
        let (welcome, descriptors) = greet(world, &socket, &Hello { version: VERSION, key }.to_bytes())?;
        if welcome.error != 0 {
            return None;
        }
        let mut descriptors = descriptors;
        let event = descriptors.remove(2);
        let map = |fd: &OwnedFd| {
            let len = rustix::fs::fstat(fd).unwrap().st_size as usize;
            Mapping::shared(fd.as_fd(), 0, len)
        };
        // The pages of processes can only be mapped for reading, so their shared mapping fails.
        let memory = descriptors.iter().filter_map(|fd| map(fd).ok()).collect();
        let (kept, slots) = (Vec::new(), Vec::new());
        Some(Self { _child, socket, memory, event, key: welcome.key, kept, slots, ended: false })
    }

    /// Sends a message with descriptors. The stack may have closed the socket.
    fn send(&mut self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let parts = [std::io::IoSlice::new(bytes)];
        self.ended |= sendmsg(&self.socket, &parts, &mut control, flags).is_err();
    }

    /// Receives answers. Returns the number of answers, and the number of those with a session.
    fn receive(&mut self) -> (u64, u64) {
        let (mut answers, mut sessions) = (0, 0);
        let mut bytes = [0; Answer::LEN];
        loop {
            match receive(self.socket.as_fd(), &mut bytes) {
                Ok((len, descriptors)) if len > 0 => {
                    let answer = Answer::from_bytes(&bytes[..len]).expect("an answer");
                    answers += 1;
                    if answer.session.place != 0 {
                        sessions += 1;
                        self.slots.push(answer.session.place);
                    }
                    self.kept.extend(descriptors);
                    self.kept.truncate(KEPT);
                }
                Ok(_) => {
                    self.ended = true;
                    return (answers, sessions);
                }
                Err(_) => return (answers, sessions),
            }
        }
    }

    /// Sends a message: a request with random values, often about known sessions, or random bytes.
    fn ask(&mut self, script: &mut Script<'_>) {
        let mut bytes = [0; Question::LEN];
        // Mostly Bind, Connect and Listen.
        bytes[0] = [2, 2, 3, 3, 4, 4, 1, 5, 6, 7, 8, 9, 10][script.below(13)];
        let number = if script.u8() < 128 { u32::from(script.u8() % 8) } else { u32::MAX };
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        let value = [1, 1, 2, 2, 16, u32::MAX, 1 << 31 | 2, u32::from(script.u16())][script.below(8)];
        bytes[8..12].copy_from_slice(&value.to_le_bytes());
        for at in [12, 32] {
            if script.u8() < 128 {
                let port = [80u16, 81, 9000, script.u16()][script.below(4)];
                bytes[at] = [4, 4, 4, 6][script.below(4)];
                bytes[at + 2..at + 4].copy_from_slice(&port.to_le_bytes());
                let host = [[10, 0, 0, 1], [10, 0, 0, 2], [0; 4], [224, 0, 0, 5], script.bytes()];
                bytes[at + 4..at + 8].copy_from_slice(&host[script.below(5)]);
            }
        }
        if script.u8() > 250 {
            let at = script.below(bytes.len());
            bytes[at] = script.u8();
        }
        let len = if script.u8() < 254 { bytes.len() } else { script.below(bytes.len()) };
        let mut descriptors = Vec::new();
        for _ in 0..(script.u8() % 8).saturating_sub(4) {
            descriptors.push(self.descriptor(script));
        }
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.send(&bytes[..len], &borrowed);
    }

    /// Returns a descriptor of a random kind.
    fn descriptor(&self, script: &mut Script<'_>) -> OwnedFd {
        match script.u8() % 5 {
            0 => eventfd(0, EventfdFlags::empty()).unwrap(),
            1 => memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap(),
            2 => TcpListener::bind("127.0.0.1:0").unwrap().into(),
            3 if !self.kept.is_empty() => rustix::io::dup(&self.kept[script.below(self.kept.len())]).unwrap(),
            _ => {
                socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap().0
            }
        }
    }

    /// Stores a number in a slot, or anywhere in the shared memory.
    fn store(&self, script: &mut Script<'_>) {
        let value = match script.u8() % 4 {
            0 => u64::from(script.u8()),
            1 => u64::MAX - u64::from(script.u8()),
            2 => 1 << (script.u8() % 64),
            _ => u64::from_le_bytes(script.bytes()),
        };
        let (memory, offset) = match self.slots.len() {
            slots if slots > 0 && script.u8() < 200 => {
                let place = self.slots[script.below(slots)] as usize;
                (self.memory.last(), place * SLOT + script.below(SLOT / 8) * 8)
            }
            _ => {
                let memory = &self.memory[script.below(self.memory.len())];
                (Some(memory), script.below((memory.len() / 8).min(1 << 16)) * 8)
            }
        };
        if let Some(memory) = memory.filter(|memory| offset + 8 <= memory.len()) {
            memory.write_at(offset, &value.to_le_bytes());
        }
    }

    /// Wakes the stack.
    fn wake(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

thread_local! {
    static BYSTANDER: RefCell<Option<Bystander>> = const { RefCell::new(None) };
}

/// Plays a script and adds its results. An honest application keeps its connection during the script, and afterwards
/// the hostile one is completely removed.
pub(crate) fn play(bytes: &[u8], outcome: &mut Outcome) {
    // After a failed script, the next one gets a new stack.
    let mut bystander = BYSTANDER.take().unwrap_or_else(Bystander::new);
    play_beside(&mut bystander, Script(bytes), outcome);
    BYSTANDER.set(Some(bystander));
}

fn play_beside(bystander: &mut Bystander, mut script: Script<'_>, outcome: &mut Outcome) {
    let Bystander { world, path, .. } = &mut *bystander;
    let mut first = Hostile::attach(world, path, [0; KEY]).expect("an application may attach");
    // A session whose memory the script corrupts.
    first.send(&bind(2, "10.0.0.1:0".parse().unwrap()).to_bytes(), &[]);
    first.wake();
    world.run(0.02);
    let mut processes = vec![first];
    for _ in 0..STEPS {
        if script.0.is_empty() || processes.is_empty() {
            break;
        }
        let at = script.below(processes.len());
        let process = &mut processes[at];
        match script.u8() {
            0..100 => {
                process.ask(&mut script);
                process.wake();
                world.turn();
            }
            100..180 => process.store(&mut script),
            180..200 => {
                process.wake();
                world.turn();
            }
            200..215 => world.run(0.05),
            215..225 if !process.kept.is_empty() => {
                let at = script.below(process.kept.len());
                drop(process.kept.swap_remove(at));
            }
            225..235 if !process.kept.is_empty() => {
                let fd = &process.kept[script.below(process.kept.len())];
                let bytes = vec![script.u8(); script.below(2000)];
                let _ = send(fd, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
            235 => {
                let bytes: Vec<u8> = (0..script.u8()).map(|_| script.u8()).collect();
                process.send(&bytes, &[]);
                process.wake();
            }
            240..245 => {
                let key = process.key;
                processes.extend(Hostile::attach(world, path, key));
            }
            245..248 => drop(processes.swap_remove(at)),
            _ => {}
        }
        for process in &mut processes {
            let (answers, sessions) = process.receive();
            outcome.answers += answers;
            outcome.sessions += sessions;
        }
    }
    outcome.ended += processes.iter().filter(|process| process.ended).count() as u64;
    bystander.check();
    drop(processes);
    bystander.wait_until_alone();
    bystander.check();
    bystander.world.events.clear();
}
