//! A process of an application. It implements the protocol of the preload library: messages and shared memory.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use offcore_flow::host::serve::Serve;
use offcore_mem::Mapping;
use offcore_session::control::Control;
use offcore_session::message::{
    Accepted, Answer, Call, Hello, KEY, NONE, Question, SessionId, VERSION, Welcome,
};
use offcore_session::slot::{Slot, wish};
use offcore_session::{Memory, Place, Reader, Segments, Writer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, recvmsg, send,
    sendmsg, socket_with, socketpair,
};

use crate::world::World;

/// Returns the events that `poll` reports for a descriptor.
pub(crate) fn bits(fd: impl AsFd) -> PollFlags {
    let wanted = PollFlags::IN | PollFlags::OUT | PollFlags::RDHUP;
    let mut events = [PollFd::from_borrowed_fd(fd.as_fd(), wanted)];
    poll(&mut events, Some(&Timespec::default())).unwrap();
    events[0].revents()
}

pub(crate) fn send_with(to: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

pub(crate) fn receive(from: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((received.bytes, descriptors))
}

/// Connects a socket to `path`.
pub(crate) fn knock(path: &Path) -> OwnedFd {
    try_to_knock(path).unwrap()
}

/// Connects a socket. The kernel may refuse this user.
pub(crate) fn try_to_knock(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Connects a socket as another user. The system call changes the user of one thread only.
pub(crate) fn knock_as(path: &Path, user: u32) -> Result<OwnedFd, Errno> {
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| {
            let user = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            try_to_knock(path)
        });
        connecting.join().unwrap()
    })
}

/// Sends `bytes` as the first message, and returns the stack's answer.
pub(crate) fn greet(
    world: &mut World<Serve>,
    socket: &OwnedFd,
    bytes: &[u8],
) -> Option<(Welcome, Vec<OwnedFd>)> {
    send_with(socket.as_fd(), bytes, &[]);
    hear(world, socket)
}

/// Receives the stack's welcome.
pub(crate) fn hear(world: &mut World<Serve>, socket: &OwnedFd) -> Option<(Welcome, Vec<OwnedFd>)> {
    let mut bytes = [0; Welcome::LEN];
    let (len, descriptors) = receive_message(world, socket, &mut bytes)?;
    Some((Welcome::from_bytes(&bytes[..len]).unwrap(), descriptors))
}

/// Receives a message of the stack; `None` if the socket is closed.
fn receive_message(
    world: &mut World<Serve>,
    socket: &OwnedFd,
    bytes: &mut [u8],
) -> Option<(usize, Vec<OwnedFd>)> {
    // Memory is created in real time, not in the virtual time of the world.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(30) {
        world.turn();
        match receive(socket.as_fd(), bytes) {
            Err(Errno::AGAIN) => sleep(Duration::from_micros(100)),
            Ok((0, _)) | Err(_) => return None,
            Ok(heard) => return Some(heard),
        }
    }
    None
}

/// A process.
pub(crate) struct Process {
    pub(crate) socket: OwnedFd,
    pub(crate) welcome: Welcome,
    control: Mapping,
    pub(crate) event: OwnedFd,
    pub(crate) memory: Arc<Memory>,
}

impl Process {
    /// Attaches a process of a new application.
    pub(crate) fn attach(world: &mut World<Serve>, path: &Path) -> Self {
        Self::join(world, path, [0; KEY])
    }

    /// Attaches a process of the application with `key`.
    pub(crate) fn join(world: &mut World<Serve>, path: &Path, key: [u8; KEY]) -> Self {
        Self::greeted(world, knock(path), key)
    }

    /// Attaches a process of a new application that belongs to another user.
    pub(crate) fn attach_as(world: &mut World<Serve>, path: &Path, user: u32) -> Self {
        Self::greeted(world, knock_as(path, user).unwrap(), [0; KEY])
    }

    fn greeted(world: &mut World<Serve>, socket: OwnedFd, key: [u8; KEY]) -> Self {
        let hello = Hello { version: VERSION, key };
        let (welcome, descriptors) = greet(world, &socket, &hello.to_bytes()).unwrap();
        Self::new(socket, welcome, descriptors)
    }

    /// Attaches an application whose only process is the returned child, which has connected the socket.
    pub(crate) fn attach_as_child(world: &mut World<Serve>, path: &Path) -> (Self, Child) {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (own, address) = (socket.try_clone().unwrap(), SocketAddrUnix::new(path).unwrap());
        let mut command = Command::new("sleep");
        command.arg("1000");
        // SAFETY: between fork and exec, the child makes one system call and allocates nothing.
        let child = unsafe { command.pre_exec(move || Ok(connect(&own, &address)?)) }.spawn().unwrap();
        (Self::greeted(world, socket, [0; KEY]), child)
    }

    /// Attaches a forked child, with a socket requested over this process's socket.
    pub(crate) fn fork(&self, world: &mut World<Serve>) -> Option<Self> {
        let socket = self.socket_of_child(world)?;
        let hello = Hello { version: VERSION, key: self.welcome.key };
        let (welcome, descriptors) = greet(world, &socket, &hello.to_bytes())?;
        Some(Self::new(socket, welcome, descriptors))
    }

    /// Requests the socket on which a child sends its hello.
    pub(crate) fn socket_of_child(&self, world: &mut World<Serve>) -> Option<OwnedFd> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let question = Question::new(Call::Fork, NONE, 0).to_bytes();
        send_with(self.socket.as_fd(), &question, &[theirs.as_fd()]);
        drop(theirs);
        self.look();
        let (len, mut descriptors) = receive_message(world, &ours, &mut [0; Answer::LEN])?;
        assert_eq!((len, descriptors.len()), (Answer::LEN, 1));
        descriptors.pop()
    }

    pub(crate) fn new(socket: OwnedFd, welcome: Welcome, descriptors: Vec<OwnedFd>) -> Self {
        assert_eq!((welcome.error, descriptors.len() as u32), (0, 3 + welcome.segments));
        let mut descriptors = descriptors.into_iter();
        let control = Mapping::shared(descriptors.next().unwrap().as_fd(), 0, size_of::<Control>()).unwrap();
        let (_processes, event) = (descriptors.next().unwrap(), descriptors.next().unwrap());
        let segments: Vec<OwnedFd> = descriptors.collect();
        let len = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_size as usize;
        let memory = Memory::attach(segments.iter().map(|fd| (fd.as_fd(), len(fd)))).unwrap();
        Self { socket, welcome, control, event, memory: Arc::new(memory) }
    }

    pub(crate) fn control(&self) -> &Control {
        // SAFETY: the mapping lives as long as `self` and has the length of a `Control`, all of whose bytes are
        // atomics.
        unsafe { self.control.base().cast().as_ref() }
    }

    /// Notifies the stack of a message or a closed descriptor.
    pub(crate) fn look(&self) {
        self.control().look();
        if self.control().ring() {
            rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Sends a request and returns the answer.
    pub(crate) fn ask(
        &self,
        world: &mut World<Serve>,
        question: &Question,
        descriptors: &[BorrowedFd<'_>],
    ) -> (Answer, Vec<OwnedFd>) {
        send_with(self.socket.as_fd(), &question.to_bytes(), descriptors);
        self.look();
        self.hear(world)
    }

    /// Receives the answer to a request.
    pub(crate) fn hear(&self, world: &mut World<Serve>) -> (Answer, Vec<OwnedFd>) {
        let mut bytes = [0; Answer::LEN];
        // Descriptors that are closed before the answer are closed in real time, not in the virtual time of the world.
        let (len, descriptors) = loop {
            world.turn();
            match receive(self.socket.as_fd(), &mut bytes) {
                Err(Errno::AGAIN) => sleep(Duration::from_micros(10)),
                heard => break heard.unwrap(),
            }
        };
        let answer = Answer::from_bytes(&bytes[..len]).unwrap();
        assert_eq!(answer.descriptors as usize, descriptors.len());
        (answer, descriptors)
    }

    /// Requests a new session.
    pub(crate) fn open(&self, world: &mut World<Serve>, question: &Question) -> Result<End, u32> {
        let (answer, descriptors) = self.ask(world, question, &[]);
        match answer.error {
            0 => Ok(self.end(answer.session, descriptors.into_iter().next().unwrap())),
            error => Err(error),
        }
    }

    pub(crate) fn end(&self, session: SessionId, fd: OwnedFd) -> End {
        let place = Place::new(session.place).unwrap();
        let reader = Reader::new(Arc::clone(&self.memory), place).unwrap();
        let writer = Writer::new(Arc::clone(&self.memory), place).unwrap();
        let end = End { session, place, fd, reader, writer, memory: Arc::clone(&self.memory) };
        // Without this flag the session ends with a reset.
        end.slot().wishes.told.store(wish::ACCEPTED, Ordering::Relaxed);
        assert_eq!(end.slot().identity.generation.load(Ordering::Relaxed), session.generation);
        end
    }

    /// Listens on `port` of all addresses.
    pub(crate) fn listen(&self, world: &mut World<Serve>, port: u16, backlog: u32) -> End {
        self.open(world, &listen(port, backlog)).unwrap()
    }

    /// Takes the next connection of a listener.
    pub(crate) fn accept(&self, listener: &End) -> Option<End> {
        let mut bytes = [0; Accepted::LEN];
        let (len, descriptors) = receive(listener.fd.as_fd(), &mut bytes).ok()?;
        let accepted = Accepted::from_bytes(&bytes[..len])?;
        Some(self.end(accepted.session, descriptors.into_iter().next()?))
    }

    /// Marks a session.
    pub(crate) fn mark(&self, end: &End) {
        self.control().mark(end.number());
        if self.control().ring() {
            rustix::io::write(&self.event, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Stores `head` as the position up to which a session was read, valid or not.
    pub(crate) fn spoil_head(&self, end: &End, head: u64) {
        // The receive half of a slot is at offset 64, and the application's cache line follows 64 bytes later.
        let address = std::ptr::from_ref(end.slot()).cast::<AtomicU64>();
        // SAFETY: the aligned address is within the slot's 512 bytes, which consist of atomics only.
        unsafe { &*address.add(128 / 8) }.store(head, Ordering::Release);
    }

    /// Writes as many bytes as there is room for. Closes the gate if that is not all of them.
    pub(crate) fn write(&self, end: &mut End, bytes: &[u8]) -> usize {
        let written = end.writer.write(bytes);
        if written < bytes.len() {
            self.close_gate(end);
        }
        self.mark(end);
        written
    }

    /// Closes the gate of a session to wait for room. The stack opens the gate when there is room.
    pub(crate) fn close_gate(&self, end: &End) {
        for _ in 0..self.welcome.gate {
            end.slot().wishes.gates.fetch_add(1, Ordering::Relaxed);
            send(&end.fd, &[0], SendFlags::DONTWAIT).unwrap();
        }
        end.slot().wake.want_room();
    }

    /// Reads up to `most` bytes, and takes the token after the last one.
    pub(crate) fn read(&self, end: &mut End, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; end.reader.available().min(most)];
        end.reader.read(&mut bytes);
        if end.reader.available() == 0 {
            let _ = recv(&end.fd, &mut [0; 1], RecvFlags::DONTWAIT);
            end.slot().wake.taken();
        }
        self.mark(end);
        bytes
    }
}

/// A session.
pub(crate) struct End {
    pub(crate) session: SessionId,
    pub(crate) place: Place,
    pub(crate) fd: OwnedFd,
    pub(crate) reader: Reader,
    pub(crate) writer: Writer,
    pub(crate) memory: Arc<Memory>,
}

impl End {
    pub(crate) fn slot(&self) -> &Slot {
        self.memory.slot(self.place).unwrap()
    }

    pub(crate) fn number(&self) -> u32 {
        self.slot().identity.number.load(Ordering::Relaxed)
    }

    pub(crate) fn bits(&self) -> PollFlags {
        bits(&self.fd)
    }

    pub(crate) fn error(&self) -> u32 {
        self.slot().identity.error.load(Ordering::Relaxed)
    }
}

pub(crate) fn listen(port: u16, backlog: u32) -> Question {
    let mut question = Question::new(Call::Listen, NONE, backlog);
    question.local = Some(SocketAddr::from(([0, 0, 0, 0], port)));
    question
}

pub(crate) fn connect_to(remote: SocketAddr) -> Question {
    let mut question = Question::new(Call::Connect, NONE, 0);
    question.remote = Some(remote);
    question
}

pub(crate) fn bind(kind: u32, local: SocketAddr) -> Question {
    let mut question = Question::new(Call::Bind, NONE, kind);
    question.local = Some(local);
    question
}
