//! The XDP program that redirects an interface's packets to XDP sockets, and its attachment.
//!
//! It has a few instructions: they look up the packet's queue in a map of sockets and redirect the packet to the
//! socket. If the map has no socket for the queue, the packet is passed to the kernel's network stack, as without the
//! program.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::netdev::netlink::{Attributes, Netlink, number, route};

use super::bpf::{self, Insn};

/// The program's name in listings (`ip link`, `bpftool prog`).
const NAME: &str = "offcore_af_xdp";

/// XDP_PASS: the action for a packet whose queue has no socket.
const PASS: i32 = 2;
/// BPF_FUNC_redirect_map.
const REDIRECT_MAP: i32 = 51;
/// Offset of `rx_queue_index` in `struct xdp_md`.
const RX_QUEUE_INDEX: i16 = 16;

/// IFLA_XDP, and the attributes in it that contain program ids.
const IFLA_XDP: u16 = 43;
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const IFLA_XDP_HW_PROG_ID: u16 = 7;

/// Where the kernel runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the interface's driver.
    Driver,
    /// Behind the driver, when the packet is already in a socket buffer (`generic`).
    Generic,
}

impl Place {
    /// XDP_FLAGS_DRV_MODE and XDP_FLAGS_SKB_MODE of linux/if_link.h.
    fn flags(self) -> u32 {
        match self {
            Self::Driver => 1 << 2,
            Self::Generic => 1 << 1,
        }
    }
}

/// The loaded program.
#[derive(Debug)]
pub(super) struct Program {
    map: OwnedFd,
    fd: OwnedFd,
}

impl Program {
    /// Loads the program for queues below `queues`, without any sockets yet. `frags`: packets may have several buffers.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN; EINVAL if the kernel does not support packets of several buffers.
    pub(super) fn load(queues: u32, frags: bool) -> io::Result<Self> {
        let map = bpf::socket_map(queues)?;
        let fd = bpf::load(&instructions(map.as_raw_fd()), frags, NAME)?;
        Ok(Self { map, fd })
    }
}

/// The program, attached to an interface until this is dropped or the process ends, however it ends.
#[derive(Debug)]
pub(super) struct Attachment {
    link: OwnedFd,
    map: OwnedFd,
}

impl Attachment {
    /// Attaches `program` to interface `index`.
    ///
    /// # Errors
    /// EBUSY or EEXIST if another program is attached; EOPNOTSUPP if the driver does not support XDP.
    pub(super) fn new(program: Program, index: u32, place: Place) -> io::Result<Self> {
        let link = bpf::attach(program.fd.as_fd(), index, place.flags())?;
        Ok(Self { link, map: program.map })
    }

    /// Returns whether the attachment was ended from outside: the interface was deleted, even if another one has its
    /// name and index now, or the link was detached.
    pub(super) fn has_ended(&self) -> bool {
        matches!(bpf::attached_to(self.link.as_fd()), Ok(None))
    }

    /// Redirects the packets of `queue` to `socket`.
    pub(super) fn enter(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        bpf::enter(self.map.as_fd(), queue, socket)
    }
}

/// Returns the program, which looks up its sockets in `map`.
fn instructions(map: RawFd) -> [Insn; 6] {
    let insn = |code, destination: u8, source: u8, offset, immediate| Insn {
        code,
        registers: source << 4 | destination,
        offset,
        immediate,
    };
    [
        // r2 = context->rx_queue_index (BPF_LDX | BPF_MEM | BPF_W)
        insn(0x61, 2, 1, RX_QUEUE_INDEX, 0),
        // r1 = map (BPF_LD | BPF_IMM | BPF_DW with BPF_PSEUDO_MAP_FD), an instruction of two words
        insn(0x18, 1, 1, 0, map),
        insn(0, 0, 0, 0, 0),
        // r3 = XDP_PASS (BPF_ALU64 | BPF_MOV | BPF_K)
        insn(0xb7, 3, 0, 0, PASS),
        // r0 = bpf_redirect_map(r1, r2, r3) (BPF_JMP | BPF_CALL)
        insn(0x85, 0, 0, 0, REDIRECT_MAP),
        // return r0 (BPF_JMP | BPF_EXIT)
        insn(0x95, 0, 0, 0, 0),
    ]
}

/// Describes the program attached to interface `name`, and how to remove it.
pub(super) fn describe_attached(name: &str, index: u32) -> String {
    let Some(id) = attached(index) else {
        return format!("interface '{name}' is busy: another program was being attached, try again");
    };
    let called = bpf::program_name(id).map_or(String::new(), |name| format!(" '{name}'"));
    match bpf::link_of(id) {
        Some(link) => format!(
            "interface '{name}' has XDP program {id}{called} attached by link {link}: end the process that holds it \
             (bpftool link show id {link})"
        ),
        None => {
            format!(
                "interface '{name}' has XDP program {id}{called} attached: ip link set dev {name} xdp off"
            )
        }
    }
}

/// Returns the id of the program that is attached to interface `index`.
pub(super) fn attached(index: u32) -> Option<u32> {
    let answer = Netlink::route().ok()?.ask(route::GETLINK, &route::link_request(index)).ok()?;
    let (_, attributes) = answer.parts(route::IFINFOMSG)?;
    let xdp = Attributes(attributes.find(IFLA_XDP)?);
    let kinds = [IFLA_XDP_PROG_ID, IFLA_XDP_DRV_PROG_ID, IFLA_XDP_SKB_PROG_ID, IFLA_XDP_HW_PROG_ID];
    let id = kinds.into_iter().find_map(|kind| number(xdp.find(kind)?).filter(|&id| id != 0))?;
    u32::try_from(id).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_matches_assembler() {
        let bytes: Vec<u8> = instructions(7)
            .iter()
            .flat_map(|insn| {
                let [a, b] = insn.offset.to_le_bytes();
                let [c, d, e, f] = insn.immediate.to_le_bytes();
                [insn.code, insn.registers, a, b, c, d, e, f]
            })
            .collect();
        let expected: [[u8; 8]; 6] = [
            [0x61, 0x12, 0x10, 0, 0, 0, 0, 0],
            [0x18, 0x11, 0, 0, 7, 0, 0, 0],
            [0; 8],
            [0xb7, 0x03, 0, 0, 2, 0, 0, 0],
            [0x85, 0, 0, 0, 51, 0, 0, 0],
            [0x95, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(bytes, expected.concat());
    }
}
