//! An XDP socket: creates it, sets up its rings and the packet pool as its UMEM, and binds it to one queue of an
//! interface.
//!
//! The kernel writes to packet buffers until the socket is closed, and the mappings of its rings keep it open. Each
//! half therefore leaves its lent buffers here when it is dropped, and unmaps its rings. The last owner closes the
//! socket and then takes the buffers back.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use offcore_mem::{HEADROOM, Hugepages, Mapping, Pool};
use rustix::net::{RecvFlags, SendFlags};

use super::lent::Lent;
use super::rings::{Rings, Sizes};

/// Offset at which the kernel puts a packet in a UMEM chunk (XDP_PACKET_HEADROOM). It equals the pool's headroom.
const PACKET_AT: usize = 256;
const _: () = assert!(HEADROOM == PACKET_AT);

/// Maximum number of descriptors that one call sends in copy mode (since Linux 6.17; 32 before).
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
const TX_BUDGET: u32 = 256;
/// Maximum time that the kernel polls for packets in one call, in microseconds. Any value other than 0 enables it.
const BUSY_POLL_TIME: u32 = 20;
/// Maximum time to wait for a driver to release the buffers of a closed zero-copy socket.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);
/// Length of a page, and of the single chunk of a socket that only checks whether a queue is free.
const PAGE: usize = 4096;
/// Interval between two attempts to bind to a busy queue.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);

/// Whether packets are copied between the interface and the packet buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copying {
    /// Zero-copy if the driver supports it, otherwise the kernel copies.
    Avoid,
    /// Zero-copy; otherwise opening the socket fails.
    Never,
    /// The kernel copies.
    Always,
}

/// The settings of a port's sockets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) sizes: Sizes,
    pub(super) copying: Copying,
    /// Whether packets may have several buffers.
    pub(super) frags: bool,
    pub(super) need_wakeup: bool,
    /// Number of packets that a call may receive in place of interrupts.
    pub(super) busy_poll: Option<u32>,
    /// How long to wait for a busy queue: the kernel needs a moment to release a queue whose socket was closed.
    pub(super) timeout: Duration,
}

/// The step that the kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Make,
    Memory,
    Rings,
    Bind,
    BusyPoll,
}

/// A refused step and its error.
pub(super) type Refused = (Step, io::Error);

/// A bound socket.
#[derive(Debug)]
pub(super) struct Socket {
    /// `None` once the socket is closed.
    fd: Option<OwnedFd>,
    pool: &'static Pool,
    index: u32,
    queue: u32,
    zero_copy: bool,
    orphans: Mutex<Vec<Lent>>,
}

impl Socket {
    /// Opens a socket bound to `queue` of interface `index`, with its rings. It uses the UMEM of `umem_of`, or
    /// registers the pool as its own UMEM.
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
            enable_busy_poll(&fd, budget).map_err(at(Step::BusyPoll))?;
        }
        // Older kernels do not support this option, and need more calls.
        let _ = set(&fd, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, &TX_BUDGET.min(settings.sizes.tx));
        let zero_copy = is_zero_copy(&fd).map_err(at(Step::Bind))?;
        let orphans = Mutex::default();
        Ok((Arc::new(Self { fd: Some(fd), pool, index, queue, zero_copy, orphans }), rings))
    }

    /// Whether the socket is in zero-copy mode.
    pub(super) fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    /// Returns the kernel's counters of dropped packets.
    pub(super) fn statistics(&self) -> io::Result<libc::xdp_statistics> {
        // SAFETY: the structure consists of integers, for which zeros are a valid value.
        let mut statistics: libc::xdp_statistics = unsafe { std::mem::zeroed() };
        get(self, libc::XDP_STATISTICS, &mut statistics)?;
        Ok(statistics)
    }

    /// Makes the kernel send the packets in the TX ring.
    #[inline]
    pub(super) fn send(&self) -> rustix::io::Result<()> {
        rustix::net::send(self, &[], SendFlags::DONTWAIT).map(drop)
    }

    /// Makes the kernel receive packets and process the fill ring.
    #[inline]
    pub(super) fn receive(&self) {
        // The result does not matter: the RX ring shows whether there are packets.
        let _ = rustix::net::recv(self, &mut [0; 0], RecvFlags::DONTWAIT);
    }

    /// Keeps buffers that the kernel still has until the socket is closed. Then they are returned to the pool.
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
        // This returns when the kernel does not write to the buffers any more. It has already copied packets sent in
        // copy mode.
        drop(self.fd.take());
        let orphans = std::mem::take(self.orphans.get_mut().unwrap_or_else(PoisonError::into_inner));
        // A zero-copy driver releases its buffers later.
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

/// Waits until the queue is free, which is when another socket can be bound to it, or until the interface is gone, in
/// which case the driver has released its buffers, too. Returns whether the buffers were released.
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
    // SAFETY: socket(2) takes three integers.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Registers the first `len` bytes of `memory` as the socket's UMEM, with one chunk per packet buffer.
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
    // SAFETY: the structure consists of integers, for which zeros are a valid value.
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
    // Sockets that share a UMEM inherit the first socket's flags and must not set them.
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
        // SAFETY: the address is a sockaddr_xdp of the given length.
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

/// Enables busy polling: the worker's system calls replace interrupts.
fn enable_busy_poll(fd: &OwnedFd, budget: u32) -> io::Result<()> {
    set(fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, &1u32)?;
    set(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL, &BUSY_POLL_TIME)?;
    set(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, &budget)
}

fn is_zero_copy(fd: &OwnedFd) -> io::Result<bool> {
    let mut options = libc::xdp_options { flags: 0 };
    get(fd, libc::XDP_OPTIONS, &mut options)?;
    Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
}

/// Calls setsockopt(2). The options used here accept any value of their type.
pub(super) fn set<T>(fd: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
    // SAFETY: the value is live for the call and has the given length.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Calls getsockopt(2) for an XDP option. `T` is the option's structure, which consists of integers.
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
