//! The bpf(2) system call, as far as a redirect program needs it: linux/bpf.h.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Commands.
const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
const PROG_GET_FD_BY_ID: libc::c_int = 13;
const OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const LINK_CREATE: libc::c_int = 28;
const LINK_GET_FD_BY_ID: libc::c_int = 30;
const LINK_GET_NEXT_ID: libc::c_int = 31;

/// BPF_MAP_TYPE_XSKMAP.
const XSKMAP: u32 = 17;
/// BPF_PROG_TYPE_XDP.
const PROG_XDP: u32 = 6;
/// BPF_XDP, a place to attach to.
const ATTACH_XDP: u32 = 37;
/// BPF_LINK_TYPE_XDP.
const LINK_XDP: u32 = 6;
/// BPF_F_XDP_HAS_FRAGS.
const HAS_FRAGS: u32 = 1 << 5;
/// BPF_OBJ_NAME_LEN.
const NAME: usize = 16;

/// One instruction, `struct bpf_insn`: operation, registers (source in the high half), offset, immediate.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Insn {
    pub(super) code: u8,
    pub(super) registers: u8,
    pub(super) offset: i16,
    pub(super) immediate: i32,
}

/// A call whose answer is 0 or a new descriptor.
///
/// # Safety
/// `attribute` must be the part of `union bpf_attr` that `command` takes, and addresses in it must be of memory that is
/// live and as long as it says.
unsafe fn bpf<T>(command: libc::c_int, attribute: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads and writes at most the size given here; the rest is the caller's promise.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<T>()) };
    match libc::c_int::try_from(answer) {
        Ok(answer) if answer >= 0 => Ok(answer),
        _ => Err(io::Error::last_os_error()),
    }
}

/// As [`bpf`], for commands whose answer is a descriptor.
///
/// # Safety
/// As for [`bpf`], and `command` must answer with a descriptor.
unsafe fn bpf_fd<T>(command: libc::c_int, attribute: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise.
    let fd = unsafe { bpf(command, attribute) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn raw(fd: impl AsFd) -> u32 {
    fd.as_fd().as_raw_fd().cast_unsigned()
}

fn name(text: &str) -> [u8; NAME] {
    let mut name = [0; NAME];
    for (to, from) in name[..NAME - 1].iter_mut().zip(text.bytes()) {
        *to = from;
    }
    name
}

fn text(name: &[u8]) -> String {
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}

/// A map from queue numbers to XDP sockets, for numbers below `entries`.
pub(super) fn socket_map(entries: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attribute {
        kind: u32,
        key_size: u32,
        value_size: u32,
        entries: u32,
        flags: u32,
        inner_map: u32,
        numa_node: u32,
        name: [u8; NAME],
    }
    let mut attribute = Attribute {
        kind: XSKMAP,
        key_size: 4,
        value_size: 4,
        entries,
        flags: 0,
        inner_map: 0,
        numa_node: 0,
        name: name("offcore_sockets"),
    };
    // SAFETY: BPF_MAP_CREATE's attributes; they hold no addresses.
    unsafe { bpf_fd(MAP_CREATE, &mut attribute) }
}

/// Enters a socket under a queue's number.
pub(super) fn enter(map: BorrowedFd<'_>, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Attribute {
        map: u32,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let (key, value) = (queue, raw(socket));
    let mut attribute = Attribute {
        map: raw(map),
        padding: 0,
        key: std::ptr::from_ref(&key) as u64,
        value: std::ptr::from_ref(&value) as u64,
        flags: 0,
    };
    // SAFETY: BPF_MAP_UPDATE_ELEM's attributes; key and value are of 4 bytes, as the map's are, and live for the call.
    unsafe { bpf(MAP_UPDATE_ELEM, &mut attribute) }.map(drop)
}

/// Loads a program of kind XDP; `frags`: it may see packets of several buffers.
pub(super) fn load(instructions: &[Insn], frags: bool, called: &str) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attribute {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; NAME],
        interface: u32,
        attach: u32,
    }
    let license = c"Dual MIT/GPL";
    let mut attribute = Attribute {
        kind: PROG_XDP,
        count: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        instructions: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: if frags { HAS_FRAGS } else { 0 },
        name: name(called),
        interface: 0,
        attach: ATTACH_XDP,
    };
    // SAFETY: BPF_PROG_LOAD's attributes: the instructions are `count` of them, the license ends with a zero.
    unsafe { bpf_fd(PROG_LOAD, &mut attribute) }
}

/// Attaches `program` to interface `index`; `flags` are those of linux/if_link.h. It stays as long as the link that is
/// returned has a descriptor, so it goes with the process, however that ends.
pub(super) fn attach(program: BorrowedFd<'_>, index: u32, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attribute {
        program: u32,
        interface: u32,
        attach: u32,
        flags: u32,
    }
    let mut attribute = Attribute { program: raw(program), interface: index, attach: ATTACH_XDP, flags };
    // SAFETY: BPF_LINK_CREATE's attributes; they hold no addresses.
    unsafe { bpf_fd(LINK_CREATE, &mut attribute) }
}

/// The attributes of the commands that go by an object's number.
#[repr(C)]
struct ById {
    id: u32,
    next: u32,
    flags: u32,
}

/// Fills the beginning of an object's information.
///
/// # Safety
/// `T` must be the beginning of the information on an object of the descriptor's kind, and any bytes must be a value of it.
unsafe fn information<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    #[repr(C)]
    struct Attribute {
        fd: u32,
        len: u32,
        info: u64,
    }
    let len = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    let mut attribute = Attribute { fd: raw(fd), len, info: std::ptr::from_mut(info) as u64 };
    // SAFETY: BPF_OBJ_GET_INFO_BY_FD's attributes; the kernel writes at most `len` bytes to `info`.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attribute) }.map(drop)
}

/// The name of the program of number `id`, if it has one and may be asked.
pub(super) fn program_name(id: u32) -> Option<String> {
    /// `struct bpf_prog_info`, up to its name.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        before: [u64; 8],
        name: [u8; NAME],
    }
    // SAFETY: BPF_PROG_GET_FD_BY_ID takes a number.
    let fd = unsafe { bpf_fd(PROG_GET_FD_BY_ID, &mut ById { id, next: 0, flags: 0 }) }.ok()?;
    let mut info = Info::default();
    // SAFETY: a program's information; it is integers.
    unsafe { information(fd.as_fd(), &mut info) }.ok()?;
    let name = text(&info.name);
    (!name.is_empty()).then_some(name)
}

/// `struct bpf_link_info` of an XDP link, its beginning.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    interface: u32,
    rest: [u32; 3],
}

/// The number of the interface that a program is attached to by `link`, which is one of [`attach`]; `None` once it is
/// attached to none any more.
pub(super) fn attached_to(link: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut info = LinkInfo::default();
    // SAFETY: a link's information; it is integers.
    unsafe { information(link, &mut info) }?;
    Ok(Some(info.interface).filter(|&interface| interface != 0))
}

/// The number of the link by which program `id` is attached to an interface, if it is by one: then some process, or a
/// file in a bpf file system, holds it.
pub(super) fn link_of(id: u32) -> Option<u32> {
    let mut step = ById { id: 0, next: 0, flags: 0 };
    // SAFETY: BPF_LINK_GET_NEXT_ID takes a number and answers with the next one in use.
    while unsafe { bpf(LINK_GET_NEXT_ID, &mut step) }.is_ok() {
        step.id = step.next;
        // SAFETY: BPF_LINK_GET_FD_BY_ID takes a number.
        let fd = unsafe { bpf_fd(LINK_GET_FD_BY_ID, &mut ById { id: step.id, next: 0, flags: 0 }) };
        let Ok(fd) = fd else { continue };
        let mut info = LinkInfo::default();
        // SAFETY: a link's information; it is integers.
        if unsafe { information(fd.as_fd(), &mut info) }.is_ok()
            && info.kind == LINK_XDP
            && info.program == id
        {
            return Some(info.id);
        }
    }
    None
}
