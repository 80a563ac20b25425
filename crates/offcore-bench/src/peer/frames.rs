//! The kernel as a source of frames on an interface, faster than any program that sends through a socket; and a plain
//! socket that receives frames.
//!
//! The source is an XDP program that numbers a frame and redirects it to the interface, run in the kernel's "live
//! frames" mode (linux/Documentation/bpf/bpf_prog_run.rst): without a system call, socket buffer or copy per frame. The
//! other end of a veth pair receives the frames in its NAPI loop, on the core of the thread that runs the program. It
//! has a NAPI loop if an XDP program is attached to it, or after `ethtool -K INTERFACE gro on`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use offcore_wire::template::UDP_HEADERS_LEN;

/// Offset of the frame number, little-endian: the position of a probe's sequence number.
pub const SEQUENCE: usize = UDP_HEADERS_LEN + 8;
/// Number of frames that the kernel creates before the interface processes them.
const BATCH: u32 = 64;

/// Commands of bpf(2) and their parameters, from linux/bpf.h.
const MAP_CREATE: libc::c_int = 0;
const PROG_LOAD: libc::c_int = 5;
const PROG_TEST_RUN: libc::c_int = 10;
const MAP_ARRAY: u32 = 2;
const PROG_XDP: u32 = 6;
const LIVE_FRAMES: u32 = 1 << 1;
/// Source register of a 64-bit load whose operand is a map's descriptor.
const PSEUDO_MAP_FD: u8 = 1;
const CALL_MAP_LOOKUP: i32 = 1;
const CALL_REDIRECT: i32 = 23;

/// A source of copies of a frame with consecutive numbers, which leave through an interface.
#[derive(Debug)]
pub struct FrameSource {
    program: OwnedFd,
    /// The map with the next number, which the program uses.
    _counter: OwnedFd,
    frame: Vec<u8>,
    interface: u32,
    sent: u64,
}

impl FrameSource {
    /// Creates a source of `frame`, without FCS, on the interface with this index in the calling thread's network
    /// namespace.
    ///
    /// # Errors
    /// If the frame is too short for a number, or the kernel refuses. CAP_BPF, CAP_NET_ADMIN and Linux 5.18 are
    /// required.
    pub fn new(interface: u32, frame: &[u8]) -> Result<Self> {
        ensure!(frame.len() >= SEQUENCE + 8, "a frame of {} bytes has no room for a number", frame.len());
        let counter = counter().context("making a BPF map")?;
        let program = load(&instructions(counter.as_raw_fd(), interface))
            .context("loading a BPF program (root may, and who has CAP_BPF and CAP_NET_ADMIN)")?;
        Ok(Self { program, _counter: counter, frame: frame.to_vec(), interface, sent: 0 })
    }

    /// Sends `count` frames on this thread, as fast as the kernel can.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn send(&mut self, count: u32) -> Result<()> {
        let mut context =
            XdpMd { end: u32::try_from(self.frame.len())?, interface: self.interface, ..XdpMd::default() };
        let mut attribute = TestRun {
            program: self.program.as_raw_fd().cast_unsigned(),
            data_size: context.end,
            data: self.frame.as_ptr() as u64,
            repeat: count,
            context_size: size_of::<XdpMd>() as u32,
            context: std::ptr::from_mut(&mut context) as u64,
            flags: LIVE_FRAMES,
            batch: BATCH.min(count),
            ..TestRun::default()
        };
        // SAFETY: these are BPF_PROG_TEST_RUN's attributes. The frame and the context outlive the call and have the
        // given lengths. Without result addresses the kernel writes no results.
        unsafe { bpf(PROG_TEST_RUN, &mut attribute) }
            .context("sending live frames (Linux 5.18 or later can)")?;
        self.sent += u64::from(count);
        Ok(())
    }

    /// Returns the number of frames sent so far, which is the number of the next frame.
    pub fn sent(&self) -> u64 {
        self.sent
    }
}

/// The part of `union bpf_attr` that BPF_PROG_TEST_RUN uses.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    program: u32,
    answer: u32,
    data_size: u32,
    data_out_size: u32,
    data: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_size: u32,
    context_out_size: u32,
    context: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch: u32,
    padding: u32,
}

/// `struct xdp_md`.
#[repr(C)]
#[derive(Default)]
struct XdpMd {
    data: u32,
    end: u32,
    meta: u32,
    interface: u32,
    queue: u32,
    egress: u32,
}

/// An instruction: operation, registers (source in the high half), offset, immediate.
#[repr(C)]
#[derive(Clone, Copy)]
struct Insn {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// Returns the program: it takes the number from the map, writes it into the frame, and redirects the frame to the
/// interface.
fn instructions(map: i32, interface: u32) -> Vec<Insn> {
    /// From linux/bpf_common.h and linux/bpf.h.
    const LOAD_64: u8 = 0x18;
    const LOAD_WORD: u8 = 0x61;
    const LOAD_DOUBLE: u8 = 0x79;
    const STORE_WORD: u8 = 0x62;
    const STORE_DOUBLE: u8 = 0x7b;
    const ADD: u8 = 0x07;
    const MOVE: u8 = 0xb7;
    const MOVE_REGISTER: u8 = 0xbf;
    const IF_EQUAL: u8 = 0x15;
    const IF_GREATER: u8 = 0x2d;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    const XDP_DROP: i32 = 1;
    const SEQUENCE_AT: i16 = SEQUENCE as i16;
    let insn = |code, to: u8, from: u8, offset, immediate| Insn {
        code,
        registers: from << 4 | to,
        offset,
        immediate,
    };
    vec![
        insn(MOVE_REGISTER, 6, 1, 0, 0), // r6 = context
        insn(STORE_WORD, 10, 0, -4, 0),  // key 0
        insn(MOVE_REGISTER, 2, 10, 0, 0),
        insn(ADD, 2, 0, 0, -4),
        insn(LOAD_64, 1, PSEUDO_MAP_FD, 0, map),
        insn(0, 0, 0, 0, 0), // upper half of the previous instruction
        insn(CALL, 0, 0, 0, CALL_MAP_LOOKUP),
        insn(IF_EQUAL, 0, 0, 14, 0),   // no such entry: drop
        insn(LOAD_DOUBLE, 7, 0, 0, 0), // r7 = the number
        insn(MOVE_REGISTER, 3, 7, 0, 0),
        insn(ADD, 3, 0, 0, 1),
        insn(STORE_DOUBLE, 0, 3, 0, 0), // the next one
        insn(LOAD_WORD, 2, 6, 0, 0),    // r2 = start of the frame
        insn(LOAD_WORD, 3, 6, 4, 0),    // r3 = end of the frame
        insn(MOVE_REGISTER, 4, 2, 0, 0),
        insn(ADD, 4, 0, 0, SEQUENCE as i32 + 8),
        insn(IF_GREATER, 4, 3, 5, 0), // too short: drop
        insn(STORE_DOUBLE, 2, 7, SEQUENCE_AT, 0),
        insn(MOVE, 1, 0, 0, interface.cast_signed()),
        insn(MOVE, 2, 0, 0, 0),
        insn(CALL, 0, 0, 0, CALL_REDIRECT),
        insn(EXIT, 0, 0, 0, 0),
        insn(MOVE, 0, 0, 0, XDP_DROP),
        insn(EXIT, 0, 0, 0, 0),
    ]
}

fn counter() -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attribute {
        kind: u32,
        key_size: u32,
        value_size: u32,
        entries: u32,
        flags: u32,
    }
    let mut attribute = Attribute { kind: MAP_ARRAY, key_size: 4, value_size: 8, entries: 1, flags: 0 };
    // SAFETY: these are BPF_MAP_CREATE's attributes, which contain no addresses.
    let fd = unsafe { bpf(MAP_CREATE, &mut attribute) }?;
    // SAFETY: the kernel has just created this descriptor, and no other object owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn load(instructions: &[Insn]) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct Attribute {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
    }
    let mut attribute = Attribute {
        kind: PROG_XDP,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        ..Attribute::default()
    };
    // SAFETY: these are BPF_PROG_LOAD's attributes. Instructions and licence outlive the call, and the number of
    // instructions is correct.
    let fd = unsafe { bpf(PROG_LOAD, &mut attribute) }?;
    // SAFETY: the kernel has just created this descriptor, and no other object owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls bpf(2) with a command that returns 0 or a new descriptor.
///
/// # Safety
/// `attribute` must be the part of `union bpf_attr` that `command` uses. Addresses in it must refer to live memory of
/// the length given next to them.
unsafe fn bpf<T>(command: libc::c_int, attribute: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel accesses at most the given size of `attribute`. The caller guarantees that the addresses in it
    // refer to live memory of the given lengths.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<T>()) };
    libc::c_int::try_from(answer).ok().filter(|&answer| answer >= 0).ok_or_else(io::Error::last_os_error)
}

/// A socket that receives every frame that arrives at an interface.
#[derive(Debug)]
pub struct FrameSink {
    socket: OwnedFd,
}

/// The socket can also send frames.
impl AsFd for FrameSink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl FrameSink {
    /// Opens a sink on the interface with this index in the calling thread's network namespace.
    ///
    /// # Errors
    /// If the kernel refuses. CAP_NET_RAW is required.
    pub fn new(interface: u32) -> Result<Self> {
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: the call takes only numbers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("opening a packet socket");
        }
        // SAFETY: the kernel has just created this descriptor, and no other object owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the structure consists of numbers, for which zero is a valid value.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = interface.cast_signed();
        // SAFETY: the address outlives the call and has the given length.
        let rc = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                std::ptr::from_ref(&address).cast(),
                size_of::<libc::sockaddr_ll>() as u32,
            )
        };
        if rc < 0 {
            return Err(io::Error::last_os_error()).context("binding a packet socket to an interface");
        }
        Ok(Self { socket })
    }

    /// Returns the next received frame without FCS, or `None` if none has arrived. Frames that the interface sends are
    /// skipped.
    ///
    /// # Errors
    /// Errors of the system call.
    pub fn next<'a>(&mut self, room: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        loop {
            // SAFETY: the structure consists of numbers, for which zero is a valid value.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut len = size_of::<libc::sockaddr_ll>() as u32;
            // SAFETY: both places outlive the call and have the given lengths.
            let got = unsafe {
                libc::recvfrom(
                    self.socket.as_raw_fd(),
                    room.as_mut_ptr().cast(),
                    room.len(),
                    0,
                    std::ptr::from_mut(&mut from).cast(),
                    &mut len,
                )
            };
            match usize::try_from(got) {
                Ok(_) if from.sll_pkttype == libc::PACKET_OUTGOING => {}
                Ok(len) => return Ok(Some(&room[..len.min(room.len())])),
                Err(_) => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    error => return Err(error),
                },
            }
        }
    }
}
