//! An XDP socket: made, given its rings and the packet pool as its UMEM, and bound to one queue of an interface.
//!
//! The kernel writes to packet buffers until the socket is closed, and the mappings of its rings keep it open. So a half
//! that goes away leaves what it had lent here, unmaps its rings, and whoever is the last closes the socket and then
//! takes the buffers back.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use offcore_mem::{HEADROOM, Hugepages, Mapping, Pool};
use rustix::net::{RecvFlags, SendFlags};

use super::lent::Lent;
use super::rings::{Rings, Sizes};

/// Where the kernel puts a packet in a UMEM chunk (XDP_PACKET_HEADROOM), which is where packets begin here, too.
const PACKET_AT: usize = 256;
const _: () = assert!(HEADROOM == PACKET_AT);

/// Descriptors that one call sends at most, in copy mode (since Linux 6.17; 32 otherwise).
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
const TX_BUDGET: u32 = 256;
/// How long the kernel may look for packets in one call, in microseconds: any number that is not 0 will do.
const BUSY_POLL_TIME: u32 = 20;
/// How long a driver may take to let go of the buffers of a zero-copy socket that was closed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of a page, and of the one chunk of a socket that only asks whether its queue is free.
const PAGE: usize = 4096;
/// Between two attempts to bind to a queue that is busy.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// Who copies packets between the interface and the packet buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copying {
    /// Nobody, if the driver can do that; the kernel otherwise.
    Avoid,
    /// Nobody, or there is no socket.
    Never,
    /// The kernel.
    Always,
}

/// How a port's sockets are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) sizes: Sizes,
    pub(super) copying: Copying,
    /// Packets may have several buffers.
    pub(super) frags: bool,
    pub(super) need_wakeup: bool,
    /// Packets that a call may receive, instead of an interrupt.
    pub(super) busy_poll: Option<u32>,
    /// How long to wait for a queue that is busy: the kernel takes a moment to let go of one whose socket was closed.
    pub(super) timeout: Duration,
}

/// What the kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Make,
    Memory,
    Rings,
    Bind,
    BusyPoll,
}

/// A step that was refused, and why.
pub(super) type Refused = (Step, io::Error);

/// A bound socket.
#[derive(Debug)]
pub(super) struct Socket {
    /// There until it is closed.
    fd: Option<OwnedFd>,
    pool: &'static Pool,
    index: u32,
    queue: u32,
    zero_copy: bool,
    orphans: Mutex<Vec<Lent>>,
}

impl Socket {
    /// A socket bound to `queue` of interface `index`, and its rings. It uses the UMEM of `umem_of`, or, without one,
    /// registers the pool as its own.
    pub(super) fn open(
        pool: &'static Pool,
        index: u32,
        queue: u32,
        settings: &Settings,
        umem_of: Option<&Self>,
    ) -> Result<(Arc<Self>, Rings), Refused> {
        let at = |step| move |error| (step, error);
        let fd = make().map_err(at(Step::Make))?;
        if umem_of.is_none() {
            let len = pool.chunks() * pool.chunk_size();
            register(&fd, pool.memory().0, len, pool.chunk_size()).map_err(at(Step::Memory))?;
        }
        let rings = make_rings(&fd, &settings.sizes).map_err(at(Step::Rings))?;
        bind(&fd, index, queue, settings, umem_of).map_err(at(Step::Bind))?;
        if let Some(budget) = settings.busy_poll {
            poll_busily(&fd, budget).map_err(at(Step::BusyPoll))?;
        }
        // Older kernels do not know it, and need more calls.
        let _ = set(&fd, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, &TX_BUDGET.min(settings.sizes.tx));
        let zero_copy = is_zero_copy(&fd).map_err(at(Step::Bind))?;
        let orphans = Mutex::default();
        Ok((Arc::new(Self { fd: Some(fd), pool, index, queue, zero_copy, orphans }), rings))
    }

    /// Whether the interface uses the packet buffers themselves.
    pub(super) fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// The packets that the kernel has dropped.
    pub(super) fn statistics(&self) -> io::Result<libc::xdp_statistics> {
        // SAFETY: the structure is integers, for which zeros are a value.
        let mut statistics: libc::xdp_statistics = unsafe { std::mem::zeroed() };
        get(self, libc::XDP_STATISTICS, &mut statistics)?;
        Ok(statistics)
    }

    /// Has the kernel send what is in the TX ring.
    #[inline]
    pub(super) fn send(&self) -> rustix::io::Result<()> {
        rustix::net::send(self, &[], SendFlags::DONTWAIT).map(drop)
    }

    /// Has the kernel look for packets, and at the fill ring.
    #[inline]
    pub(super) fn receive(&self) {
        // Whatever it says: the RX ring has packets or has not.
        let _ = rustix::net::recv(self, &mut [0; 0], RecvFlags::DONTWAIT);
    }

    /// Keeps buffers that the kernel still has until the socket is closed, and takes them back then.
    pub(super) fn leave(&self, lent: Lent) {
        self.orphans.lock().unwrap_or_else(PoisonError::into_inner).push(lent);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("the socket is closed when it is dropped").as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Returns when the kernel does not write to the buffers any more. Packets that were sent in copy mode it has
        // copied.
        drop(self.fd.take());
        let orphans = std::mem::take(self.orphans.get_mut().unwrap_or_else(PoisonError::into_inner));
        // A driver that has the buffers themselves is told later.
        if self.zero_copy && !is_released(self.index, self.queue) {
            let buffers: usize = orphans.iter().map(Lent::count).sum();
            let queue = self.queue;
            tracing::warn!(
                queue,
                buffers,
                "packet buffers were not given back by the driver, and stay out of use"
            );
            return;
        }
        let mut cache = self.pool.cache();
        for lent in orphans {
            lent.reclaim_all(&mut cache);
        }
    }
}

/// Waits until nobody has the queue any more, which is when a throwaway socket can be bound to it, or until the
/// interface is gone, which takes the buffers from the driver, too.
fn is_released(index: u32, queue: u32) -> bool {
    let sizes = Sizes { rx: 2, fill: 2, tx: 2, completion: 2 };
    let settings = Settings {
        sizes,
        copying: Copying::Always,
        frags: false,
        need_wakeup: false,
        busy_poll: None,
        timeout: RELEASE_TIMEOUT,
    };
    let attempt = || {
        let (memory, _fd) =
            Mapping::memfd("offcore-probe", PAGE, Hugepages::None).map_err(io::Error::other)?;
        let fd = make()?;
        register(&fd, memory.base(), PAGE, PAGE)?;
        let _rings = make_rings(&fd, &sizes)?;
        bind(&fd, index, queue, &settings, None)
    };
    match attempt() {
        Ok(()) => true,
        Err(error) => error.raw_os_error() == Some(libc::ENODEV),
    }
}

fn make() -> io::Result<OwnedFd> {
    // SAFETY: socket(2) takes three numbers.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the first `len` bytes of `memory` the socket's UMEM, one chunk for each packet buffer.
fn register(fd: &OwnedFd, memory: NonNull<u8>, len: usize, chunk: usize) -> io::Result<()> {
    let registration = libc::xdp_umem_reg {
        addr: memory.as_ptr() as u64,
        len: len as u64,
        chunk_size: u32::try_from(chunk).map_err(io::Error::other)?,
        headroom: 0,
        flags: 0,
        tx_metadata_len: 0,
    };
    set(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, &registration)
}

fn make_rings(fd: &OwnedFd, sizes: &Sizes) -> io::Result<Rings> {
    for (which, size) in [
        (libc::XDP_UMEM_FILL_RING, sizes.fill),
        (libc::XDP_UMEM_COMPLETION_RING, sizes.completion),
        (libc::XDP_RX_RING, sizes.rx),
        (libc::XDP_TX_RING, sizes.tx),
    ] {
        set(fd, libc::SOL_XDP, which, &size)?;
    }
    // SAFETY: the structure is integers, for which zeros are a value.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
    get(fd, libc::XDP_MMAP_OFFSETS, &mut offsets)?;
    Rings::map(fd.as_fd(), sizes, &offsets)
}

fn bind(
    fd: &OwnedFd,
    index: u32,
    queue: u32,
    settings: &Settings,
    umem_of: Option<&Socket>,
) -> io::Result<()> {
    let flag = |set, flag| if set { flag } else { 0 };
    let copying = match settings.copying {
        Copying::Avoid => 0,
        Copying::Never => libc::XDP_ZEROCOPY,
        Copying::Always => libc::XDP_COPY,
    };
    // Sockets that share a UMEM are as the first one is, and may not say so.
    let (flags, umem_fd) = match umem_of {
        Some(socket) => (libc::XDP_SHARED_UMEM, socket.as_fd().as_raw_fd().cast_unsigned()),
        None => {
            let wakeup = flag(settings.need_wakeup, libc::XDP_USE_NEED_WAKEUP);
            (copying | wakeup | flag(settings.frags, libc::XDP_USE_SG), 0)
        }
    };
    let address = libc::sockaddr_xdp {
        #[allow(clippy::cast_possible_truncation, reason = "AF_XDP is 44")]
        #[allow(clippy::cast_sign_loss, reason = "AF_XDP is 44")]
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: index,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: umem_fd,
    };
    let len = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    let start = Instant::now();
    loop {
        // SAFETY: the address is a sockaddr_xdp of the length given.
        match unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), len) } {
            0 => return Ok(()),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EBUSY) && start.elapsed() < settings.timeout => {
                    std::thread::sleep(BETWEEN_ATTEMPTS);
                }
                error => return Err(error),
            },
        }
    }
}

/// Lets calls of ours do what interrupts do otherwise.
fn poll_busily(fd: &OwnedFd, budget: u32) -> io::Result<()> {
    set(fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, &1u32)?;
    set(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL, &BUSY_POLL_TIME)?;
    set(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, &budget)
}

fn is_zero_copy(fd: &OwnedFd) -> io::Result<bool> {
    let mut options = libc::xdp_options { flags: 0 };
    get(fd, libc::XDP_OPTIONS, &mut options)?;
    Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

/// setsockopt(2). The options used here take any value of their type.
pub(super) fn set<T>(fd: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: the value is live for the call and as long as given.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// getsockopt(2) of an XDP option, whose structure `T` is: integers.
fn get<T>(fd: &impl AsFd, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut len = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to the value, which is live for the call.
    match unsafe {
        libc::getsockopt(fd, libc::SOL_XDP, option, std::ptr::from_mut(value).cast(), &raw mut len)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
