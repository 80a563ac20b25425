//! Network devices of DPDK: all devices that the EAL has a driver for.
//!
//! [`Ethdev::open`] finds or creates the device, configures it and starts it. Its queues are [`EthRx`] and [`EthTx`].
//! When the device and all its queues have been dropped, the device is stopped, and removed from the EAL if it was
//! created here.

mod direct;
mod open;
mod queue;

use std::ffi::CString;
use std::sync::Arc;

use offcore_mem::{DeviceMemory, Pool};

use crate::eal::{self, EalError};
use crate::ffi::{self, EthConfig, EthInfo, EthLink, EthStats};
use crate::mempool::{MbufPool, PoolError};

pub use queue::{EthRx, EthTx, Receipt, Sent};

/// Bytes that drivers reserve in front of a received packet (`RTE_PKTMBUF_HEADROOM`).
const HEADROOM: usize = 128;
/// Number of descriptors of a queue if neither the user nor the driver specifies it.
const DESCRIPTORS: u16 = 1024;
/// `RTE_ETH_RX_OFFLOAD_SCATTER`: a packet may take several buffers.
const SCATTER: u64 = 1 << 13;
/// `RTE_ETH_TX_OFFLOAD_MULTI_SEGS`: a packet may have several buffers.
const MULTI_SEGMENTS: u64 = 1 << 15;
/// Length of an Ethernet header and a VLAN tag in bytes.
const ETHERNET: usize = 18;

/// The fields of a packet that determine the device's queue for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rss {
    /// All that the device supports of IP, TCP and UDP.
    #[default]
    Usual,
    /// None: the device's behavior without RSS.
    Off,
    /// These; the device must support all of them. The bits stand for IP (bit 0), TCP (1), UDP (2) and SCTP (3).
    Of(u8),
}

/// The settings of a device.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The device's name in the EAL: a PCI address, or a virtual device such as `net_null0`.
    pub device: String,
    /// Arguments for its driver: `key=value,key=value`.
    pub args: Option<String>,
    pub queues: u16,
    /// MTU in bytes; `None`: the device's present MTU.
    pub mtu: Option<u16>,
    /// Number of descriptors of an RX queue.
    pub rx_desc: Option<u16>,
    /// Number of descriptors of a TX queue.
    pub tx_desc: Option<u16>,
    /// How received packets are distributed among the queues.
    pub rss: Rss,
    /// Whether packets for other addresses are received, too.
    pub promiscuous: bool,
    /// Device memory in which packets are received and from which they are sent, in place of the pool's memory.
    pub memory: Option<DeviceMemory>,
}

/// Why a device cannot be used.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum EthError {
    /// {0}
    Eal(#[from] EalError),
    /// {0}
    Pool(#[from] PoolError),
    /// {0}
    Device(String),
    /// {what}: {source}{said}
    Dpdk { what: String, source: std::io::Error, said: String },
}

/// The state of a device's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub up: bool,
    /// Mbit/s, if the device knows.
    pub mbit: Option<u32>,
    pub full_duplex: bool,
}

/// Packets that a device has dropped since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Received while a queue was full.
    pub missed: u64,
    pub rx_errors: u64,
    /// Received while no packet buffer was free.
    pub no_buffer: u64,
    pub tx_errors: u64,
}

/// A running device.
#[derive(Debug)]
pub struct Ethdev {
    name: String,
    port: u16,
    /// Whether it was created here.
    ours: bool,
    driver: String,
    mac: [u8; 6],
    mtu: u16,
    queues: u16,
    segments: bool,
    pool: &'static MbufPool,
    notes: Vec<String>,
}

impl Ethdev {
    /// Starts the EAL if necessary, finds or creates the device, configures and starts it. Its packets are chunks of
    /// `pool`.
    ///
    /// # Errors The error names the problem, the expectation and the remedy.
    pub fn open(request: &Request, pool: &'static Pool) -> Result<Arc<Self>, EthError> {
        open::check(request)?;
        let first = !eal::is_up();
        let note = eal::start()?;
        let pool = match &request.memory {
            None => MbufPool::of(pool)?,
            Some(memory) => MbufPool::elsewhere(pool, memory)?,
        };
        let (port, ours) = open::find(request)?;
        // From here on, dropping `device` closes it.
        let mut device = Self {
            name: request.device.clone(),
            port,
            ours,
            driver: String::new(),
            mac: [0; 6],
            mtu: 0,
            queues: request.queues,
            segments: false,
            pool,
            notes: Vec::from_iter(first.then_some(note)),
        };
        device.start(request)?;
        Ok(Arc::new(device))
    }

    fn start(&mut self, request: &Request) -> Result<(), EthError> {
        let info = self.info()?;
        let end = info.driver.iter().position(|&byte| byte == 0).unwrap_or(info.driver.len());
        self.driver = String::from_utf8_lossy(&info.driver[..end]).into_owned();
        self.mac = info.mac;
        let mtu = open::mtu(request, &info)?;
        let config = self.config(request, &info, mtu)?;
        let mut step = std::ptr::null();
        eal::forget();
        // SAFETY: the port belongs to the device, the configuration lives as long as the call, and the packet buffers
        // live as long as the process.
        let rc = unsafe { ffi::off_eth_start(self.port, &config, &mut step) };
        if rc < 0 {
            // SAFETY: a string constant of the shim, which is set before the step that failed.
            let step = if step.is_null() { c"" } else { unsafe { std::ffi::CStr::from_ptr(step) } };
            let said = open::said();
            // Drivers with their own buffers compare their size with the mbufs' size, whose 128 bytes of headroom are
            // not for data.
            let remedy = if said.contains("mbuf") { "; use a larger --mbuf-size" } else { "" };
            let what = format!("{} ({}){remedy}", step.to_string_lossy(), self.driver);
            return Err(EthError::Dpdk { what, source: ffi::errno(rc), said });
        }
        self.mtu = mtu;
        self.segments = config.tx_offloads & MULTI_SEGMENTS != 0;
        Ok(())
    }

    fn config(&mut self, request: &Request, info: &EthInfo, mtu: u16) -> Result<EthConfig, EthError> {
        open::check_queues(request, info)?;
        let pool = self.pool.pool();
        let longest = usize::from(mtu) + usize::from(info.overhead);
        let room = pool.chunk_size() - HEADROOM;
        let mut rx_offloads = 0;
        if longest > room && request.memory.is_some() {
            return Err(EthError::Device(format!(
                "packets of up to {longest} bytes (MTU {mtu}) do not fit a packet buffer, which has room for {room}, and in a \
                 device's memory a packet has one: use a larger --mbuf-size, or a smaller mtu=N"
            )));
        }
        if longest > room {
            if info.rx_offloads & SCATTER == 0 {
                return Err(EthError::Device(format!(
                    "packets of up to {longest} bytes (MTU {mtu}) do not fit a packet buffer, which has room for {room}, and \
                     {} puts a packet into one only: use a larger --mbuf-size, or a smaller mtu=N",
                    self.driver
                )));
            }
            rx_offloads |= SCATTER;
        }
        let rx_desc = open::descriptors(request.rx_desc, info.rx_desc_default);
        let held = usize::from(rx_desc) * usize::from(request.queues);
        if held > pool.chunks() / 2 {
            return Err(EthError::Device(format!(
                "{} queues of {rx_desc} descriptors hold {held} packet buffers, expected at most half of the pool's {}: \
                 use more --mbufs, or a smaller rx_desc=N",
                request.queues,
                pool.chunks()
            )));
        }
        let rss = self.rss(request, info)?;
        let own = (pool.memory().0.as_ptr(), pool.memory().1);
        let memory = self.pool.memory();
        let (base, len) = memory.map_or(own, |memory| (memory.base(), memory.len()));
        Ok(EthConfig {
            queues: request.queues,
            rx_desc,
            tx_desc: open::descriptors(request.tx_desc, info.tx_desc_default),
            mtu,
            rx_offloads,
            tx_offloads: info.tx_offloads & MULTI_SEGMENTS,
            rss,
            promiscuous: request.promiscuous.into(),
            pool: self.pool.mempool(),
            base,
            len,
            unmapped: memory.is_some_and(|memory| !memory.is_mapped()).into(),
        })
    }

    /// Returns the hash functions to enable.
    fn rss(&mut self, request: &Request, info: &EthInfo) -> Result<u64, EthError> {
        // SAFETY: the function only returns a value.
        let mask = |kinds: u8| unsafe { ffi::off_eth_rss(kinds.into()) };
        match request.rss {
            Rss::Off => Ok(0),
            Rss::Usual if request.queues == 1 => Ok(0),
            Rss::Usual => {
                let rss = mask(0b111) & info.rss;
                if rss == 0 {
                    self.notes.push(format!(
                        "warning: {} has no receive side scaling: which of its {} queues a packet goes to is its own \
                         affair",
                        self.driver, request.queues
                    ));
                }
                Ok(rss)
            }
            Rss::Of(kinds) => match mask(kinds) & info.rss {
                0 => Err(EthError::Device(format!(
                    "{} has none of the hash functions that rss= asks for: use others, or rss=off",
                    self.driver
                ))),
                rss => Ok(rss),
            },
        }
    }

    fn info(&self) -> Result<EthInfo, EthError> {
        // SAFETY: zeros are valid for these fields, which are numbers.
        let mut info: EthInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the port belongs to the device, and `info` is valid for writes.
        let rc = unsafe { ffi::off_eth_info(self.port, &mut info) };
        if rc < 0 {
            let what = "asking what the device can do".to_owned();
            return Err(EthError::Dpdk { what, source: ffi::errno(rc), said: open::said() });
        }
        Ok(info)
    }

    /// Returns the pool of the packet buffers.
    pub(crate) fn pool(&self) -> &'static Pool {
        self.pool.pool()
    }

    /// Returns DPDK's number of the port.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Returns the device's name in the EAL.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The driver's name.
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The Ethernet address.
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// MTU in bytes.
    pub fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Returns the length of the longest packet that it sends, including a VLAN tag, in bytes.
    pub fn longest(&self) -> usize {
        usize::from(self.mtu) + ETHERNET
    }

    /// Number of queue pairs.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Returns whether it sends packets of several buffers.
    pub fn takes_segments(&self) -> bool {
        self.segments
    }

    /// Messages for the user about the device.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the link's state.
    pub fn link(&self) -> Link {
        let mut link = EthLink::default();
        // SAFETY: the port belongs to the device.
        let known = unsafe { ffi::off_eth_link(self.port, &mut link) } == 0;
        Link {
            up: known && link.up != 0,
            mbit: Some(link.mbit).filter(|&mbit| known && mbit != 0 && mbit != u32::MAX),
            full_duplex: link.full_duplex != 0,
        }
    }

    /// Returns the numbers of packets that the device has dropped.
    pub fn losses(&self) -> Losses {
        let mut stats = EthStats::default();
        // SAFETY: the port belongs to the device. A driver without counters leaves zeros.
        unsafe { ffi::off_eth_stats(self.port, &mut stats) };
        Losses {
            missed: stats.missed,
            rx_errors: stats.rx_errors,
            no_buffer: stats.no_mbuf,
            tx_errors: stats.tx_errors,
        }
    }

    /// Takes the receiving half of queue `queue`. It must be taken only once.
    ///
    /// # Panics
    /// If the device has fewer queues.
    pub fn rx(self: &Arc<Self>, queue: u16) -> EthRx {
        assert!(queue < self.queues, "queue {queue} of {}", self.queues);
        EthRx::new(Arc::clone(self), queue)
    }

    /// Takes the sending half of queue `queue`. It must be taken only once.
    ///
    /// # Panics
    /// If the device has fewer queues.
    pub fn tx(self: &Arc<Self>, queue: u16) -> EthTx {
        assert!(queue < self.queues, "queue {queue} of {}", self.queues);
        EthTx::new(Arc::clone(self), queue)
    }
}

impl Drop for Ethdev {
    fn drop(&mut self) {
        let _alone = eal::one_at_a_time();
        // SAFETY: the port belongs to the device, and all its queues have been dropped.
        unsafe { ffi::off_eth_close(self.port, self.ours.into()) };
        self.pool.settle();
    }
}

/// Converts text to a C string.
pub(crate) fn c_string(text: &str) -> Result<CString, EthError> {
    CString::new(text).map_err(|_| EthError::Device(format!("'{text}' has a zero byte in it")))
}
