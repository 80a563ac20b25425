//! The peer `dpdk-lib`: DPDK's librte_vhost as a vhost-user back end that the benchmark calls burst by burst.
//!
//! The thread that opens [`DpdkLib`] is the data thread. It runs dequeue, MAC rewriting and enqueue as separate calls,
//! so that each can be timed. EAL starts with the first `open` of a process and then keeps running. Its control threads
//! serve the sockets, so that the front end may be a thread of the same process.
//!
//! ```no_run
//! # use offcore_bench::peer::dpdk_lib::*;
//! # fn main() -> anyhow::Result<()> {
//! let mbufs = 16_384;
//! let dpdk = DpdkLib::open(&DpdkConfig { pages: Pages::Ordinary, lcore: 0, mbufs })?;
//! let port = dpdk.register("/tmp/v.sock".as_ref(), &Offer::default())?;
//! // … a front end connects …
//! dpdk.wait_ready(&port, 1, std::time::Duration::from_secs(10))?;
//! let mut burst = dpdk.burst();
//! dpdk.dequeue(&port, 0, &mut burst, 32)?;
//! burst.rewrite_mac(&[2, 0, 0, 0, 0, 1], &[2, 0, 0, 0, 0, 2]);
//! let accepted = dpdk.enqueue(&port, 0, &mut burst)?;
//! # let _ = accepted;
//! # Ok(())
//! # }
//! ```

mod ffi;
mod packets;

use std::ffi::CString;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_vhost::features::{
    VIRTIO_F_RING_PACKED, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MRG_RXBUF,
};

use super::about;
pub use packets::Burst;
use packets::Pool;

/// Minimum pool size: the number of buffers that a ring, a burst and the data thread's cache can hold.
const MIN_MBUFS: u32 = 1024;

/// The page type of the peer's packet pool. For a fair comparison, both sides should use the same page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Hugepages, the largest free size first.
    Huge,
    /// Ordinary pages, which need no privileges.
    Ordinary,
}

/// Configuration of the peer.
#[derive(Clone, Debug)]
pub struct DpdkConfig {
    /// Page type of the packet pool. The first `open` of a process fixes it.
    pub pages: Pages,
    /// CPU of the data thread. EAL keeps its control threads off this CPU if the process may use another one. The
    /// caller has to pin the data thread.
    pub lcore: usize,
    /// Number of packet buffers in the pool, at least 1024. Each has 2048 bytes and 128 bytes of headroom.
    pub mbufs: u32,
}

/// Features that a socket may offer. All other features have librte_vhost's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// `VIRTIO_F_RING_PACKED`. Without it the ring is split.
    pub packed: bool,
    /// `VIRTIO_NET_F_MRG_RXBUF`.
    pub mergeable: bool,
    /// `VIRTIO_NET_F_HOST_TSO4` and `VIRTIO_NET_F_HOST_TSO6`, like net_vhost's argument `tso`.
    pub tso: bool,
}

impl Default for Offer {
    /// The defaults of net_vhost: split ring, mergeable buffers, no TSO from the guest.
    fn default() -> Self {
        Self { packed: false, mergeable: true, tso: false }
    }
}

/// librte_vhost, ready for calls from this thread. A process can have only one instance at a time.
#[derive(Debug)]
pub struct DpdkLib {
    pool: Arc<Pool>,
    page_size: u64,
    /// Also keeps this object on its thread, so that the data calls of the ports have a single user.
    _thread: DataThread,
}

/// A listening vhost-user socket. Dropping it disconnects the front end and removes the socket.
#[derive(Debug)]
pub struct Port {
    index: u32,
    path: PathBuf,
}

impl DpdkLib {
    /// Starts EAL on the first call, makes the calling thread the data thread and creates the packet pool.
    ///
    /// # Errors
    /// If the configuration exceeds the means of this machine or process: too few hugepages or mbufs, a CPU that the
    /// process may not use, another page type than EAL was started with, a second `DpdkLib`.
    pub fn open(config: &DpdkConfig) -> Result<Self> {
        if config.mbufs < MIN_MBUFS {
            bail!(
                "{} mbufs: at least {MIN_MBUFS} needed, for the rings and the thread's cache",
                config.mbufs
            );
        }
        check_library(&about::loaded(std::process::id())?)?;
        let thread = DataThread::claim(config)?;
        let pool = Pool::new(config.mbufs)?;
        let page_size = pool.page_size()?;
        Ok(Self { pool: Arc::new(pool), page_size, _thread: thread })
    }

    /// Returns the page size of the packet pool in bytes.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Listens on `path` as a vhost-user server. The maximum is 8 ports at a time.
    ///
    /// # Errors
    /// If `path` exists or is too long for a socket, or if the number of ports is exceeded.
    pub fn register(&self, path: &Path, offer: &Offer) -> Result<Port> {
        let optional = [
            (offer.packed, VIRTIO_F_RING_PACKED),
            (offer.mergeable, VIRTIO_NET_F_MRG_RXBUF),
            (offer.tso, VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_HOST_TSO6),
        ];
        let disabled = optional.iter().filter(|(offered, _)| !offered).fold(0, |all, (_, bits)| all | bits);
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: EAL is running and `name` is a NUL-terminated string.
        let rc = unsafe { ffi::peer_register(name.as_ptr(), disabled) };
        let index =
            count(rc).with_context(|| format!("listening on {} (it must not exist yet)", path.display()))?;
        Ok(Port { index: u32::try_from(index)?, path: path.to_owned() })
    }

    /// Waits until a front end has started the device and enabled its first `pairs` queue pairs (at most 32).
    ///
    /// # Errors
    /// If that does not happen within `timeout`.
    pub fn wait_ready(&self, port: &Port, pairs: u8, timeout: Duration) -> Result<()> {
        let ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: the port is registered, and the caller is the data thread, because `DpdkLib` cannot leave it.
        let rc = unsafe { ffi::peer_wait_ready(port.index, pairs.into(), ms) };
        count(rc).map(|_| ()).with_context(|| {
            format!("waiting {timeout:?} for a front end with {pairs} queue pairs on {}", port.path.display())
        })
    }

    /// Touches every page of the memory that the connected front end shares, because librte_vhost maps it without
    /// populating the pages.
    ///
    /// # Errors
    /// If no front end is connected.
    pub fn touch(&self, port: &Port) -> Result<()> {
        // SAFETY: the port is registered, and the caller is the data thread, because `DpdkLib` cannot leave it.
        let rc = unsafe { ffi::peer_touch(port.index) };
        count(rc).map(|_| ()).with_context(|| no_front_end(port))
    }

    /// Returns the virtio feature bits that the connected front end has acknowledged.
    ///
    /// # Errors
    /// If no front end is connected.
    pub fn features(&self, port: &Port) -> Result<u64> {
        let mut features = 0;
        // SAFETY: the port is registered, the caller is the data thread, and `features` is a valid place for the
        // result.
        let rc = unsafe { ffi::peer_features(port.index, &raw mut features) };
        count(rc).with_context(|| no_front_end(port))?;
        Ok(features)
    }

    /// Returns an empty burst for this peer's packets.
    pub fn burst(&self) -> Burst {
        Burst::new(Arc::clone(&self.pool))
    }

    /// Timed call: moves up to `max` packets from the guest's transmit queue of queue pair `pair` to the end of
    /// `burst`, limited by its free room. Returns their number.
    ///
    /// # Errors
    /// If no front end is connected.
    #[inline]
    pub fn dequeue(&self, port: &Port, pair: u8, burst: &mut Burst, max: usize) -> Result<usize> {
        counted(burst.dequeue(port.index, pair, max), port)
    }

    /// Timed call: copies all packets of `burst` to the guest's receive queue of queue pair `pair` and returns all
    /// buffers to the pool. Returns the number of copied packets. Packets without a receive buffer are dropped.
    ///
    /// # Errors
    /// If no front end is connected. The packets are dropped in this case, too.
    #[inline]
    pub fn enqueue(&self, port: &Port, pair: u8, burst: &mut Burst) -> Result<usize> {
        counted(burst.enqueue(port.index, pair), port)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: the port is registered, and `self` is the last object that could use it. The only possible error is a
        // socket that has already been removed, which is harmless.
        unsafe { ffi::peer_unregister(self.index) };
    }
}

/// Checks that the loaded library is the build for which the shim was compiled. The shim contains inlined code from
/// that build's headers, so with another library the measurement would mix two builds.
fn check_library(loaded: &Path) -> Result<()> {
    let built_for = Path::new(env!("OFFCORE_DPDK_LIBDIR"));
    let same = |a: &Path, b: &Path| a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    ensure!(
        loaded.parent().is_some_and(|dir| same(dir, built_for)),
        "{} was loaded, and this program was built for the one in {}: is LD_LIBRARY_PATH set?",
        loaded.display(),
        built_for.display()
    );
    Ok(())
}

/// State of EAL in this process. EAL can start only once.
struct Eal {
    state: EalState,
    /// Whether a data thread exists.
    in_use: bool,
}

enum EalState {
    Down,
    Up { pages: Pages },
    Failed,
}

static EAL: Mutex<Eal> = Mutex::new(Eal { state: EalState::Down, in_use: false });

impl Eal {
    fn start(&mut self, config: &DpdkConfig) -> Result<()> {
        match self.state {
            EalState::Down => {}
            EalState::Up { pages } if pages == config.pages => return Ok(()),
            EalState::Up { pages } => bail!(
                "EAL runs on {pages:?} pages and starts only once in a process: {:?} pages need another process",
                config.pages
            ),
            EalState::Failed => bail!("EAL failed to start earlier, and starts only once in a process"),
        }
        let memory_mib = memory_mib(config.mbufs);
        let free = free_hugepage_mib();
        if config.pages == Pages::Huge && free < memory_mib {
            bail!(
                "{memory_mib} MiB of free hugepages needed for {} mbufs, {free} MiB found: reserve more \
                 (sysctl -w vm.nr_hugepages=N), or use ordinary pages",
                config.mbufs
            );
        }
        offcore_dpdk::eal::claim("the peer dpdk-lib")?;
        let prefix = CString::new(format!("offcore-peer-{}", std::process::id()))?;
        // SAFETY: the lock on `EAL` makes this the only thread that starts it, and `state` shows that it has not been
        // started before.
        let rc = unsafe {
            ffi::peer_eal_init(
                (config.pages == Pages::Huge).into(),
                u32::try_from(config.lcore)?,
                u32::try_from(memory_mib)?,
                prefix.as_ptr(),
            )
        };
        if rc == -NO_SUCH_CPU {
            bail!("lcore {}: this process may not run on that CPU", config.lcore);
        }
        self.state = if rc < 0 { EalState::Failed } else { EalState::Up { pages: config.pages } };
        count(rc).map(|_| ()).with_context(|| {
            format!(
                "starting EAL with {memory_mib} MiB of {:?} pages on lcore {}",
                config.pages, config.lcore
            )
        })
    }
}

/// The calling thread's registration with EAL.
#[derive(Debug)]
struct DataThread {
    /// Whether EAL assigned an lcore ID to the thread, which must be released.
    registered: bool,
    /// The registration belongs to the thread, so this object must not leave it.
    _stays: PhantomData<*const ()>,
}

impl DataThread {
    fn claim(config: &DpdkConfig) -> Result<Self> {
        let mut eal = lock_eal();
        if eal.in_use {
            bail!("a DpdkLib is open in this process already: drop it first");
        }
        eal.start(config)?;
        // SAFETY: EAL is running.
        let registered =
            count(unsafe { ffi::peer_attach() }).context("registering the data thread with EAL")?;
        eal.in_use = true;
        Ok(Self { registered: registered == 1, _stays: PhantomData })
    }
}

impl Drop for DataThread {
    fn drop(&mut self) {
        if self.registered {
            // SAFETY: this is the thread that `claim` registered, because `DataThread` cannot leave it.
            unsafe { ffi::peer_detach() };
        }
        lock_eal().in_use = false;
    }
}

fn lock_eal() -> MutexGuard<'static, Eal> {
    EAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Linux's ENXIO. The shim returns it if the process may not use the CPU.
const NO_SUCH_CPU: i32 = 6;

/// Returns the MiB of memory with which EAL is started: the size of the pool, and 64 MiB for other purposes.
pub(crate) fn memory_mib(mbufs: u32) -> u64 {
    // 64 bytes of mempool header, 128 of mbuf, 2176 of data, and padding.
    const BYTES_PER_MBUF: u64 = 2560;
    (u64::from(mbufs) * BYTES_PER_MBUF).div_ceil(1 << 20) + 64
}

/// Returns the MiB in free hugepages of all sizes.
fn free_hugepage_mib() -> u64 {
    let Ok(sizes) = std::fs::read_dir("/sys/kernel/mm/hugepages") else { return 0 };
    let kib = sizes.flatten().filter_map(|size| {
        let name = size.file_name();
        let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let free: u64 =
            std::fs::read_to_string(size.path().join("free_hugepages")).ok()?.trim().parse().ok()?;
        Some(kib * free)
    });
    kib.sum::<u64>() / 1024
}

/// Converts a return value of the shim to a count or an error.
fn count(rc: i32) -> Result<usize> {
    usize::try_from(rc).map_err(|_| errno(rc))
}

/// Converts the return value of a data call, whose only error is a missing front end.
#[inline]
fn counted(rc: i32, port: &Port) -> Result<usize> {
    usize::try_from(rc).map_err(|_| no_front_end_error(rc, port))
}

#[cold]
fn no_front_end_error(rc: i32, port: &Port) -> anyhow::Error {
    errno(rc).context(no_front_end(port))
}

fn no_front_end(port: &Port) -> String {
    format!("no front end is connected to {}", port.path.display())
}

/// Returns the error for a negative errno value.
fn errno(rc: i32) -> anyhow::Error {
    std::io::Error::from_raw_os_error(-rc).into()
}

/// Converts a number of packets to C's type. It never exceeds the size of a pool.
fn c_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
