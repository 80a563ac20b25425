//! The kernel's side of a TAP port: making the interface, attaching queues, asking for its state.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use offcore_wire::ethernet::MacAddr;
use offcore_wire::virtio_net;
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A step that the kernel refused, and what to do about it.
pub(super) type Refusal = (String, io::Error);

/// One TAP interface, as far as it can be asked about.
#[derive(Debug)]
pub(super) struct Interface {
    pub(super) name: String,
    /// Any socket of the interface's network namespace; requests go through it.
    control: OwnedFd,
}

/// What a status line says of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Up,
    Down,
    /// It was deleted, moved to another network namespace, or renamed.
    Gone,
}

impl Interface {
    /// Makes (or joins) interface `name`, with `queues` queues, sets its link up, and returns the queues' files. With
    /// `offloads` the kernel may send packets with open checksums, and long ones to be segmented.
    pub(super) fn open(name: &str, queues: u16, offloads: bool) -> Result<(Self, Vec<OwnedFd>), Refusal> {
        let first = open_device()?;
        // A single queue has the interface to itself. An interface that is there already and was made for several
        // queues takes no such request.
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
        for file in &files {
            set_header(file, offloads)
                .map_err(|source| (format!("virtio-net headers on interface '{name}'"), source))?;
        }
        let control =
            rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
                .map_err(|source| ("a socket to set the link up with".to_string(), source.into()))?;
        let interface = Self { name, control };
        interface.set_up().map_err(|source| (format!("setting up link '{}'", interface.name), source))?;
        Ok((interface, files))
    }

    fn set_up(&self) -> io::Result<()> {
        let mut request = self.request();
        self.ask(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: SIOCGIFFLAGS has filled this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        #[allow(clippy::cast_possible_truncation, reason = "IFF_UP is 1")]
        let up = libc::IFF_UP as libc::c_short;
        request.ifr_ifru.ifru_flags = flags | up;
        self.ask(libc::SIOCSIFFLAGS, &mut request)
    }

    /// Whether it is there, and up.
    pub(super) fn link(&self) -> Link {
        let mut request = self.request();
        if self.ask(libc::SIOCGIFFLAGS, &mut request).is_err() {
            return Link::Gone;
        }
        // SAFETY: SIOCGIFFLAGS has filled this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        if i32::from(flags) & libc::IFF_UP != 0 { Link::Up } else { Link::Down }
    }

    /// Longest payload of a frame in bytes.
    pub(super) fn mtu(&self) -> io::Result<usize> {
        let mut request = self.request();
        self.ask(libc::SIOCGIFMTU, &mut request)?;
        // SAFETY: SIOCGIFMTU has filled this member of the union.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        usize::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The interface's Ethernet address.
    pub(super) fn mac(&self) -> io::Result<MacAddr> {
        let mut request = self.request();
        self.ask(libc::SIOCGIFHWADDR, &mut request)?;
        // SAFETY: SIOCGIFHWADDR has filled this member of the union.
        let address = unsafe { request.ifr_ifru.ifru_hwaddr };
        Ok(MacAddr(std::array::from_fn(|i| address.sa_data[i].cast_unsigned())))
    }

    fn request(&self) -> libc::ifreq {
        request(&self.name)
    }

    /// `code` is one of the requests about interfaces, which all take an ifreq.
    fn ask(&self, code: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: the callers above pass SIOC[GS]IF* codes, which take an ifreq.
        unsafe { ioctl(&self.control, code, request) }
    }
}

fn open_device() -> Result<OwnedFd, Refusal> {
    const DEVICE: &str = "/dev/net/tun";
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).map_err(
        |source| {
            let advice = match source {
                rustix::io::Errno::NOENT | rustix::io::Errno::NODEV => {
                    ": the kernel has no TAP (load module 'tun', or give the container this device)"
                }
                rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => ": it needs read and write permission",
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
    let mut request = request(name);
    #[allow(clippy::cast_possible_truncation, reason = "the flags are 16 bits")]
    let flags = flags as libc::c_short;
    request.ifr_ifru.ifru_flags = flags;
    // SAFETY: TUNSETIFF takes an ifreq.
    unsafe { ioctl(file, libc::TUNSETIFF, &mut request) }?;
    let name = request.ifr_name.iter().map(|c| c.cast_unsigned()).take_while(|&c| c != 0).collect();
    String::from_utf8(name).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// What to do when the first queue is refused.
fn advice(name: &str, error: &io::Error) -> String {
    let advice = match error.raw_os_error() {
        Some(libc::EPERM) => ": it needs root or CAP_NET_ADMIN",
        Some(libc::EBUSY) => ": another program has it open, choose another name",
        Some(libc::EINVAL) => ": an interface of that name is no TAP, or is for another number of queues",
        _ => "",
    };
    format!("making interface '{name}'{advice}")
}

fn set_header(file: &OwnedFd, offloads: bool) -> io::Result<()> {
    let mut length = libc::c_int::try_from(virtio_net::HEADER_LEN).map_err(io::Error::other)?;
    // SAFETY: TUNSETVNETHDRSZ takes an int.
    unsafe { ioctl(file, libc::TUNSETVNETHDRSZ, &mut length) }?;
    // Without offloads packets come with their checksums, and no longer than the MTU.
    const ALL: libc::c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let wanted = libc::c_ulong::from(if offloads { ALL } else { 0 });
    // SAFETY: TUNSETOFFLOAD takes a number, not an address.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, wanted) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: an ifreq is integers and arrays of them, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(room)) {
        *to = from.cast_signed();
    }
    request
}

/// An ioctl that reads and writes `argument`.
///
/// # Safety
/// `argument` must be of the type that `code` takes.
unsafe fn ioctl<T>(file: &OwnedFd, code: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: `argument` is live and writable for the call, and as long as the kernel takes it to be.
    match unsafe { libc::ioctl(file.as_raw_fd(), code, std::ptr::from_mut(argument)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
