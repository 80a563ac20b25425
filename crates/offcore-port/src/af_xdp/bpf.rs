//! The part of the bpf(2) system call that a redirect program needs: linux/bpf.h.

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
/// BPF_XDP, the attach type.
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

/// Calls bpf(2) with a command that returns 0 or a new descriptor.
///
/// # Safety
/// `attribute` must be the part of `union bpf_attr` that `command` takes. Pointers in it must refer to live memory of
/// the length that the attribute specifies.
unsafe fn bpf<T>(command: libc::c_int, attribute: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel accesses at most `size_of::<T>()` bytes of `attribute`; the caller guarantees that `command`
    // takes this attribute and that its pointers are valid.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<T>()) };
    match libc::c_int::try_from(answer) {
        Ok(answer) if answer >= 0 => Ok(answer),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Like [`bpf`], for commands that return a descriptor.
///
/// # Safety
/// As for [`bpf`]; in addition, `command` must return a descriptor.
unsafe fn bpf_fd<T>(command: libc::c_int, attribute: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees that `attribute` fits `command` and that its pointers are valid.
    let fd = unsafe { bpf(command, attribute) }?;
    // SAFETY: the kernel has just created this descriptor, and it has no other owner.
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

/// Creates a map from queue indices below `entries` to XDP sockets.
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
    // SAFETY: these are the attributes of BPF_MAP_CREATE, which contain no pointers.
    unsafe { bpf_fd(MAP_CREATE, &mut attribute) }
}

/// Enters a socket into the map under a queue's index.
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
    // SAFETY: these are the attributes of BPF_MAP_UPDATE_ELEM; key and value have 4 bytes like those of the map, and
    // are live for the call.
    unsafe { bpf(MAP_UPDATE_ELEM, &mut attribute) }.map(drop)
}

/// Loads an XDP program. `frags`: it may process packets of several buffers.
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
    // SAFETY: these are the attributes of BPF_PROG_LOAD; there are `count` instructions, and the license is
    // zero-terminated.
    unsafe { bpf_fd(PROG_LOAD, &mut attribute) }
}

/// Attaches `program` to interface `index`; `flags` are defined in linux/if_link.h. The program stays attached while
/// the returned link has a descriptor, so it is detached when the process ends, however it ends.
pub(super) fn attach(program: BorrowedFd<'_>, index: u32, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attribute {
        program: u32,
        interface: u32,
        attach: u32,
        flags: u32,
    }
    let mut attribute = Attribute { program: raw(program), interface: index, attach: ATTACH_XDP, flags };
    // SAFETY: these are the attributes of BPF_LINK_CREATE, which contain no pointers.
    unsafe { bpf_fd(LINK_CREATE, &mut attribute) }
}

/// The attributes of commands that take an object's id.
#[repr(C)]
struct ById {
    id: u32,
    next: u32,
    flags: u32,
}

/// Reads the beginning of an object's information.
///
/// # Safety
/// `T` must match the beginning of the information for the descriptor's kind of object, and all its bit patterns must
/// be valid.
unsafe fn information<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    #[repr(C)]
    struct Attribute {
        fd: u32,
        len: u32,
        info: u64,
    }
    let len = u32::try_from(size_of::<T>()).map_err(io::Error::other)?;
    let mut attribute = Attribute { fd: raw(fd), len, info: std::ptr::from_mut(info) as u64 };
    // SAFETY: these are the attributes of BPF_OBJ_GET_INFO_BY_FD; the kernel writes at most `len` bytes to `info`.
    unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attribute) }.map(drop)
}

/// Returns the name of program `id`, if it has one and the process may read it.
pub(super) fn program_name(id: u32) -> Option<String> {
    /// `struct bpf_prog_info`, up to its name.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        before: [u64; 8],
        name: [u8; NAME],
    }
    // SAFETY: BPF_PROG_GET_FD_BY_ID takes an id.
    let fd = unsafe { bpf_fd(PROG_GET_FD_BY_ID, &mut ById { id, next: 0, flags: 0 }) }.ok()?;
    let mut info = Info::default();
    // SAFETY: `Info` matches a program's information and consists of integers.
    unsafe { information(fd.as_fd(), &mut info) }.ok()?;
    let name = text(&info.name);
    (!name.is_empty()).then_some(name)
}

/// The beginning of `struct bpf_link_info` for an XDP link.
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

/// Returns the index of the interface to which `link`, created by [`attach`], attaches its program; `None` once it is
/// detached.
pub(super) fn attached_to(link: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut info = LinkInfo::default();
    // SAFETY: `LinkInfo` matches a link's information and consists of integers.
    unsafe { information(link, &mut info) }?;
    Ok(Some(info.interface).filter(|&interface| interface != 0))
}

/// Returns the id of the link that attaches program `id` to an interface, if there is one. A process or a file in a bpf
/// file system holds such a link.
pub(super) fn link_of(id: u32) -> Option<u32> {
    let mut step = ById { id: 0, next: 0, flags: 0 };
    // SAFETY: BPF_LINK_GET_NEXT_ID takes an id and writes the next one in use.
    while unsafe { bpf(LINK_GET_NEXT_ID, &mut step) }.is_ok() {
        step.id = step.next;
        // SAFETY: BPF_LINK_GET_FD_BY_ID takes an id.
        let fd = unsafe { bpf_fd(LINK_GET_FD_BY_ID, &mut ById { id: step.id, next: 0, flags: 0 }) };
        let Ok(fd) = fd else { continue };
        let mut info = LinkInfo::default();
        // SAFETY: `LinkInfo` matches a link's information and consists of integers.
        if unsafe { information(fd.as_fd(), &mut info) }.is_ok()
            && info.kind == LINK_XDP
            && info.program == id
        {
            return Some(info.id);
        }
    }
    None
}
