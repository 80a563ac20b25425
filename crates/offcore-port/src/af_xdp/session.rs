//! An interface that was taken over: the program is attached, and a socket is bound to each queue. Dropping the session
//! releases the interface.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use offcore_mem::Pool;
use offcore_wire::ethernet;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::program::{Attachment, Place, Program, describe_attached};
use super::rings::Sizes;
use super::rx::RxHalf;
use super::socket::{Copying, Settings, Socket, Step};
use super::tx::TxHalf;
use super::{MAX_BUFFERS, VLAN_TAG};
use crate::PortError;
use crate::netdev::NetDev;
use crate::spec::{AfXdpSpec, XdpMode};

/// Size of the largest UMEM chunk in bytes: a page.
const LARGEST_CHUNK: usize = 4096;

/// Why an interface cannot be taken over, and what to do about it.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A step that the kernel refused.
    System(String, io::Error),
    /// A reason detected before asking the kernel.
    Reason(String),
}

impl Refusal {
    /// Converts the refusal to an error of port `port`.
    pub(super) fn of(self, port: &str) -> PortError {
        let port = port.to_string();
        match self {
            Self::System(what, source) => PortError::System { port, what, source },
            Self::Reason(reason) => PortError::Other { port, reason },
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(what, source) => write!(f, "{what}: {source}"),
            Self::Reason(reason) => f.write_str(reason),
        }
    }
}

/// An interface whose packets the port receives.
#[derive(Debug)]
pub(super) struct Session {
    /// Dropped first, so that no more packets arrive when the sockets are closed.
    attachment: Attachment,
    _promiscuous: Option<std::os::fd::OwnedFd>,
    pub(super) sockets: Vec<Arc<Socket>>,
    place: Place,
    /// Why the program does not run in the driver.
    note: Option<String>,
    /// Whether packets may have several buffers.
    pub(super) frags: bool,
}

/// The receiving and the sending half of a queue.
pub(super) type Halves = (RxHalf, TxHalf);

impl Session {
    /// Takes the interface over. Waits at most `timeout` for a busy queue.
    pub(super) fn open(
        device: &NetDev,
        spec: &AfXdpSpec,
        pool: &'static Pool,
        timeout: Duration,
    ) -> Result<(Self, Vec<Halves>), Refusal> {
        let (index, name) = (device.index(), device.name());
        let mtu = device.mtu().map_err(|e| Refusal::System(format!("asking for the MTU of '{name}'"), e))?;
        let frags = needs_frags(device.name(), mtu, pool)?;
        let settings = |copying| Settings {
            sizes: sizes(spec),
            copying,
            frags,
            need_wakeup: spec.need_wakeup,
            busy_poll: spec.busy_poll,
            timeout,
        };
        let queues = u32::from(spec.first) + u32::from(spec.queues);
        let load = || Program::load(queues, frags).map_err(|e| refused_program(device.name(), e, mtu, pool));
        let attach = |place| Ok(Attachment::new(load()?, index, place));
        let (place, copying) = match spec.mode {
            XdpMode::Auto => (Place::Driver, Copying::Avoid),
            XdpMode::ZeroCopy => (Place::Driver, Copying::Never),
            XdpMode::Copy => (Place::Driver, Copying::Always),
            XdpMode::Skb => (Place::Generic, Copying::Always),
        };
        let (attachment, place, copying, note) = match attach(place)? {
            Ok(attachment) => (attachment, place, copying, None),
            Err(refused) if spec.mode == XdpMode::Auto && may_be_generic(&refused) => {
                let attachment = attach(Place::Generic)?
                    .map_err(|e| refused_attachment(device, Place::Generic, e, mtu))?;
                (attachment, Place::Generic, Copying::Always, Some(refused.to_string()))
            }
            Err(refused) => return Err(refused_attachment(device, place, refused, mtu)),
        };
        let promiscuous = match spec.promiscuous {
            false => None,
            true => Some(
                set_promiscuous(index)
                    .map_err(|e| Refusal::System(format!("receiving all of '{name}': {PRIVILEGES}"), e))?,
            ),
        };

        let settings = settings(copying);
        let (mut sockets, mut halves): (Vec<Arc<Socket>>, _) = (Vec::new(), Vec::new());
        for queue in u32::from(spec.first)..queues {
            let umem_of = sockets.first().map(|socket| &**socket);
            let (socket, rings) = Socket::open(pool, index, queue, &settings, umem_of)
                .map_err(|(step, error)| refused_socket(device, spec, queue, &settings, pool, step, error))?;
            let (target, busy) = (settings.sizes.fill as usize, spec.busy_poll.is_some());
            let mut rx = RxHalf::new(pool, Arc::clone(&socket), rings.rx, rings.fill, target, busy);
            // A driver may need buffers at once. Buffers that the pool lacks now are supplied later.
            rx.replenish(&mut pool.cache());
            let tx = TxHalf::new(pool, Arc::clone(&socket), rings.tx, rings.completion);
            attachment
                .enter(queue, std::os::fd::AsFd::as_fd(&*socket))
                .map_err(|e| Refusal::System(format!("a socket for queue {queue} of '{name}'"), e))?;
            sockets.push(socket);
            halves.push((rx, tx));
        }
        let session = Self { attachment, _promiscuous: promiscuous, sockets, place, note, frags };
        Ok((session, halves))
    }

    /// Returns whether the interface delivers no more packets.
    pub(super) fn has_ended(&self) -> bool {
        self.attachment.has_ended()
    }
}

impl fmt::Display for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let zero_copy = self.sockets.iter().filter(|socket| socket.is_zero_copy()).count();
        f.write_str(match (zero_copy, self.place) {
            (0, Place::Driver) => "copy mode, program in the driver",
            (0, Place::Generic) => "copy mode, generic program",
            (all, _) if all == self.sockets.len() => "zero-copy",
            _ => "zero-copy on some queues",
        })?;
        match &self.note {
            None => Ok(()),
            Some(note) => write!(f, " (the driver refused it: {note})"),
        }
    }
}

/// Returns the sizes of a queue's rings. The kernel gets twice as many buffers as packets can wait in the RX ring, so
/// that some are free for new packets.
fn sizes(spec: &AfXdpSpec) -> Sizes {
    let size = spec.ring_size;
    Sizes { rx: size, fill: 2 * size, tx: size, completion: size }
}

/// Returns the number of packet buffers that a port keeps for itself.
pub(super) fn buffers(spec: &AfXdpSpec) -> usize {
    usize::from(spec.queues) * sizes(spec).fill as usize
}

/// Returns the length of the longest frame of an interface with this MTU, in bytes.
pub(super) fn longest_frame(mtu: usize) -> usize {
    mtu + ethernet::HEADER_LEN + VLAN_TAG
}

/// Returns whether frames for this MTU need several packet buffers.
fn needs_frags(interface: &str, mtu: usize, pool: &Pool) -> Result<bool, Refusal> {
    let (longest, room) = (longest_frame(mtu), pool.data_room());
    if longest > room * MAX_BUFFERS {
        return Err(Refusal::Reason(format!(
            "MTU {mtu} means frames of {longest} bytes, expected at most {MAX_BUFFERS} packet buffers of {room}: {}",
            remedy(interface, mtu, pool, MAX_BUFFERS)
        )));
    }
    Ok(longest > room)
}

/// Tells the user how frames for `mtu` can be made to fit into `buffers` buffers.
fn remedy(interface: &str, mtu: usize, pool: &Pool, buffers: usize) -> String {
    let room = |chunk| chunk - (pool.chunk_size() - pool.data_room());
    let most = buffers * pool.data_room() - longest_frame(0);
    let lower = format!("lower the MTU to {most} (ip link set {interface} mtu N)");
    if longest_frame(mtu) <= buffers * room(LARGEST_CHUNK) {
        format!("--mbuf-size {LARGEST_CHUNK}, or {lower}")
    } else {
        lower
    }
}

const PRIVILEGES: &str = "it needs root, or CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF";

/// Returns whether the generic program may be used after a driver's refusal. It may not if another program is attached
/// or privileges are missing.
fn may_be_generic(refused: &io::Error) -> bool {
    let not = [libc::EBUSY, libc::EEXIST, libc::EPERM, libc::EACCES, libc::ENODEV];
    !refused.raw_os_error().is_some_and(|code| not.contains(&code))
}

fn refused_program(interface: &str, error: io::Error, mtu: usize, pool: &Pool) -> Refusal {
    let advice = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => format!(": {PRIVILEGES}"),
        Some(libc::ENOSYS) => ": this kernel has no bpf(2)".into(),
        Some(libc::EINVAL) if longest_frame(mtu) > pool.data_room() => format!(
            ": this kernel has no XDP for frames of several packet buffers, which MTU {mtu} needs: {}",
            remedy(interface, mtu, pool, 1)
        ),
        _ => String::new(),
    };
    Refusal::System(format!("loading the XDP program{advice}"), error)
}

fn refused_attachment(device: &NetDev, place: Place, error: io::Error, mtu: usize) -> Refusal {
    let name = device.name();
    let what = match (error.raw_os_error(), place) {
        (Some(libc::EBUSY | libc::EEXIST), _) => describe_attached(name, device.index()),
        (Some(libc::EPERM | libc::EACCES), _) => format!("attaching to interface '{name}': {PRIVILEGES}"),
        (Some(libc::EOPNOTSUPP), Place::Driver) => {
            format!("the driver of interface '{name}' runs no XDP program: mode=skb, or mode=auto")
        }
        (_, Place::Driver) => format!(
            "the driver of interface '{name}' takes no XDP program as things are (MTU {mtu}, number of queues, \
             offloads): change these, or mode=skb"
        ),
        (_, Place::Generic) => format!("attaching to interface '{name}'"),
    };
    Refusal::System(what, error)
}

fn refused_socket(
    device: &NetDev,
    spec: &AfXdpSpec,
    queue: u32,
    settings: &Settings,
    pool: &Pool,
    step: Step,
    error: io::Error,
) -> Refusal {
    let (name, code) = (device.name(), error.raw_os_error());
    let what = match (step, code) {
        (_, Some(libc::EPERM | libc::EACCES)) if step != Step::Memory => {
            format!("an XDP socket on interface '{name}': {PRIVILEGES}")
        }
        (Step::Make, Some(libc::EAFNOSUPPORT)) => {
            "this kernel has no XDP sockets (CONFIG_XDP_SOCKETS)".into()
        }
        (Step::Make, _) => "making an XDP socket".into(),
        (Step::Memory, Some(libc::ENOBUFS | libc::EPERM | libc::ENOMEM)) => format!(
            "locking {} MiB of packet buffers: ulimit -l unlimited (RLIMIT_MEMLOCK), CAP_IPC_LOCK, or fewer --mbufs",
            (pool.chunks() * pool.chunk_size()) >> 20
        ),
        (Step::Memory, Some(libc::EINVAL)) if pool.chunk_size() > LARGEST_CHUNK => format!(
            "packet buffers of {} bytes: XDP sockets take at most {LARGEST_CHUNK} (longer frames come in several): \
             --mbuf-size {LARGEST_CHUNK}",
            pool.chunk_size()
        ),
        (Step::Memory, _) => "registering the packet buffers".into(),
        (Step::Rings, _) => format!("rings of {} packets: a smaller ring_size", spec.ring_size),
        (Step::Bind, Some(libc::EBUSY)) => {
            format!(
                "queue {queue} of interface '{name}' is another XDP socket's: end its process, or first=N"
            )
        }
        (Step::Bind, Some(libc::EINVAL)) if !has_queue(device, queue) => {
            let channels = device.channels().unwrap_or_default();
            let has = channels.combined + channels.rx.max(channels.tx);
            format!(
                "interface '{name}' has {has} queues, numbered from 0, and no queue {queue}: ethtool -L {name} makes more, or \
                 use fewer (queues=N)"
            )
        }
        (Step::Bind, Some(libc::EOPNOTSUPP)) if settings.copying == Copying::Never => {
            format!("the driver of interface '{name}' has no zero-copy: mode=copy, or mode=auto")
        }
        (Step::Bind, Some(libc::EINVAL | libc::EOPNOTSUPP)) if settings.frags => {
            let mtu = device.mtu().unwrap_or_default();
            format!(
                "this kernel has no XDP sockets for frames of several packet buffers, which MTU {mtu} needs: {}",
                remedy(device.name(), mtu, pool, 1)
            )
        }
        (Step::Bind, _) => format!("binding to queue {queue} of interface '{name}'"),
        (Step::BusyPoll, _) => "busy_poll: this kernel has no preferred busy polling (Linux 5.11)".into(),
    };
    Refusal::System(what, error)
}

/// Returns whether the interface has this queue, according to its driver.
fn has_queue(device: &NetDev, queue: u32) -> bool {
    match device.channels() {
        None => queue == 0,
        Some(channels) => queue < channels.combined + channels.rx.max(channels.tx),
    }
}

/// Makes the interface receive packets for all addresses while the returned descriptor is open.
fn set_promiscuous(index: u32) -> io::Result<std::os::fd::OwnedFd> {
    // Without a protocol, the socket itself receives no packets.
    let socket =
        rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let request = libc::packet_mreq {
        mr_ifindex: index.cast_signed(),
        #[allow(clippy::cast_possible_truncation, reason = "PACKET_MR_PROMISC is 1")]
        #[allow(clippy::cast_sign_loss, reason = "PACKET_MR_PROMISC is 1")]
        mr_type: libc::PACKET_MR_PROMISC as u16,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    super::socket::set(&socket, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)?;
    Ok(socket)
}
