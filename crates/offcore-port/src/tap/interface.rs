//! The kernel side of a TAP port: creates the interface and attaches queues.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use offcore_wire::virtio_net::{self, Offloads};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::netdev::{NetDev, interface_request, ioctl, netlink};
use crate::spec::TapSpec;

/// Flags of TUNSETOFFLOAD that the libc crate lacks: UDP segmentation over IPv4 and IPv6 (Linux 6.2).
const TUN_F_USO4: libc::c_uint = 0x20;
const TUN_F_USO6: libc::c_uint = 0x40;

/// A step that the kernel refused, with advice, and the error.
pub(super) type Refusal = (String, io::Error);

/// An interface and its queues.
pub(super) struct Interface {
    pub(super) netdev: NetDev,
    /// The files of its queues.
    pub(super) files: Vec<OwnedFd>,
    /// Offloads that both sides may use.
    pub(super) offloads: Offloads,
}

/// Creates or joins interface `name` with the queues, address and MTU of `spec`, and sets it up. With `offloads`, the
/// kernel may send packets with partial checksums, and unsegmented packets.
pub(super) fn open(name: &str, spec: &TapSpec, offloads: bool) -> Result<Interface, Refusal> {
    let queues = spec.queues;
    // The kernel would attach this program's queues to a multi-queue interface that another program uses, and change
    // the header length of that program's queues.
    let held = NetDev::open(name).and_then(|device| netlink::tap_queues(device.index()));
    if let Ok(Some(1..)) = held {
        return Err((advice(name, &Errno::BUSY.into()), Errno::BUSY.into()));
    }
    let first = open_device()?;
    // With one queue, the interface is opened for exclusive use. An existing multi-queue interface refuses that
    // request.
    let name = match attach(&first, name, queues > 1) {
        Err(refused) if queues == 1 && refused.raw_os_error() == Some(libc::EINVAL) => {
            attach(&first, name, true)
        }
        result => result,
    }
    .map_err(|source| (advice(name, &source), source))?;
    let mut files = vec![first];
    for queue in 1..queues {
        let file = open_device()?;
        attach(&file, &name, true)
            .map_err(|source| (format!("attaching queue {queue} of interface '{name}'"), source))?;
        files.push(file);
    }
    let mut agreed = Offloads::default();
    for file in &files {
        agreed = set_header(file, offloads)
            .map_err(|source| (format!("virtio-net headers on interface '{name}'"), source))?;
    }
    let netdev =
        NetDev::open(&name).map_err(|source| (format!("asking about interface '{name}'"), source))?;
    let privileged = |what: String, source: io::Error| {
        let advice =
            if source.raw_os_error() == Some(libc::EPERM) { ": it needs root or CAP_NET_ADMIN" } else { "" };
        (format!("{what} of interface '{name}'{advice}"), source)
    };
    if let Some(mac) = spec.mac {
        netdev.set_mac(mac).map_err(|source| privileged(format!("setting the address {mac}"), source))?;
    }
    if let Some(mtu) = spec.mtu {
        netdev.set_mtu(mtu).map_err(|source| privileged(format!("setting the MTU {mtu}"), source))?;
    }
    netdev.set_up().map_err(|source| {
        let advice = match source.raw_os_error() {
            Some(libc::EPERM) => {
                format!(": it is down, and only root may change that: `ip link set {name} up`")
            }
            _ => String::new(),
        };
        (format!("setting up link '{name}'{advice}"), source)
    })?;
    Ok(Interface { netdev, files, offloads: agreed })
}

fn open_device() -> Result<OwnedFd, Refusal> {
    const DEVICE: &str = "/dev/net/tun";
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).map_err(
        |source| {
            let advice = match source {
                Errno::NOENT | Errno::NODEV => {
                    ": the kernel has no TAP (load module 'tun', or give the container this device)"
                }
                Errno::ACCESS | Errno::PERM => ": it needs read and write permission",
                _ => "",
            };
            (format!("opening {DEVICE}{advice}"), source.into())
        },
    )
}

/// Makes `file` a queue of interface `name`; returns the name that the kernel chose (`tap%d` becomes `tap0`).
fn attach(file: &OwnedFd, name: &str, multi_queue: bool) -> io::Result<String> {
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if multi_queue {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    let mut request = interface_request(name);
    #[allow(clippy::cast_possible_truncation, reason = "the flags are 16 bits")]
    let flags = flags as libc::c_short;
    request.ifr_ifru.ifru_flags = flags;
    // SAFETY: TUNSETIFF takes an `ifreq`.
    unsafe { ioctl(file, libc::TUNSETIFF, &mut request) }?;
    let name = request.ifr_name.iter().map(|c| c.cast_unsigned()).take_while(|&c| c != 0).collect();
    String::from_utf8(name).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Returns advice for the case that the kernel refuses the first queue.
fn advice(name: &str, error: &io::Error) -> String {
    let advice = match error.raw_os_error() {
        Some(libc::EPERM) => ": it needs root or CAP_NET_ADMIN",
        Some(libc::EBUSY) => ": another program has it open, choose another name",
        Some(libc::EINVAL) => {
            ": an interface of that name is not a TAP, or has another number of queues: choose another name"
        }
        _ => "",
    };
    format!("making interface '{name}'{advice}")
}

fn set_header(file: &OwnedFd, offloads: bool) -> io::Result<Offloads> {
    let mut length = libc::c_int::try_from(virtio_net::HEADER_LEN).map_err(io::Error::other)?;
    // SAFETY: TUNSETVNETHDRSZ takes an `int`.
    unsafe { ioctl(file, libc::TUNSETVNETHDRSZ, &mut length) }?;
    // Without offloads, received packets have complete checksums and are not longer than the MTU.
    if !offloads {
        return set_offloads(file, 0).map(|()| Offloads::default());
    }
    const TCP: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    // Kernels before 6.2 lack UDP segmentation offload.
    match set_offloads(file, TCP | TUN_F_USO4 | TUN_F_USO6) {
        Ok(()) => Ok(Offloads::ALL),
        Err(_) => set_offloads(file, TCP).map(|()| Offloads { uso: false, ..Offloads::ALL }),
    }
}

fn set_offloads(file: &OwnedFd, wanted: libc::c_uint) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes a number, not an address.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(wanted)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
