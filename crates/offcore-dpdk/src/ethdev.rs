//! Network devices of DPDK: any that the EAL has a driver for.
//!
//! [`Ethdev::open`] finds or makes the device, configures it and starts it. Its queues are [`EthRx`] and [`EthTx`]; when
//! the last of them is gone and the device itself, it is stopped, and the EAL forgets it if it was made here.

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

/// Bytes that drivers leave free in front of a received packet (`RTE_PKTMBUF_HEADROOM`).
const HEADROOM: usize = 128;
/// Descriptors of a queue where neither the user nor the driver says.
const DESCRIPTORS: u16 = 1024;
/// `RTE_ETH_RX_OFFLOAD_SCATTER`: a packet may take several buffers.
const SCATTER: u64 = 1 << 13;
/// `RTE_ETH_TX_OFFLOAD_MULTI_SEGS`: a packet may have several buffers.
const MULTI_SEGMENTS: u64 = 1 << 15;
/// Bytes of an Ethernet header and a VLAN tag.
const ETHERNET: usize = 18;

/// Which parts of a packet say which queue of a device it goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rss {
    /// All that the device can of IP, TCP and UDP.
    #[default]
    Usual,
    /// None: what the device does without.
    Off,
    /// These, all of which the device must know: bit 0 stands for IP, 1 for TCP, 2 for UDP, 3 for SCTP.
    Of(u8),
}

/// What is wanted of a device.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// As the EAL names it: a PCI address, or a virtual device such as `net_null0`.
    pub device: String,
    /// Arguments for its driver: `key=value,key=value`.
    pub args: Option<String>,
    pub queues: u16,
    /// MTU in bytes; `None`: as the device has it.
    pub mtu: Option<u16>,
    /// Descriptors of an RX queue.
    pub rx_desc: Option<u16>,
    /// Descriptors of a TX queue.
    pub tx_desc: Option<u16>,
    /// How packets are spread over queues.
    pub rss: Rss,
    /// Whether packets for other addresses are received, too.
    pub promiscuous: bool,
    /// Memory of a device that packets are received into and sent from, in place of the pool's.
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

/// What a device has dropped since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Received while a queue was full.
    pub missed: u64,
    pub rx_errors: u64,
    /// Received while no packet buffer was free.
    pub no_buffer: u64,
    pub tx_errors: u64,
}

/// A device that is running.
#[derive(Debug)]
pub struct Ethdev {
    name: String,
    port: u16,
    /// Whether it was made here.
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
    /// Starts the EAL if need be, finds or makes the device, configures and starts it. Its packets will be chunks of
    /// `pool`.
    ///
    /// # Errors
    /// What was found, what was expected, what to do.
    pub fn open(request: &Request, pool: &'static Pool) -> Result<Arc<Self>, EthError> {
        open::check(request)?;
        let first = !eal::is_up();
        let note = eal::start()?;
        let pool = match &request.memory {
            None => MbufPool::of(pool)?,
            Some(memory) => MbufPool::elsewhere(pool, memory)?,
        };
        let (port, ours) = open::find(request)?;
        // From here on it is closed when it is dropped.
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
        // SAFETY: the port is the device's, the configuration lives as long as the call, and the packet buffers as long
        // as the process.
        let rc = unsafe { ffi::off_eth_start(self.port, &config, &mut step) };
        if rc < 0 {
            // SAFETY: a string constant of the shim's, set before whatever failed.
            let step = if step.is_null() { c"" } else { unsafe { std::ffi::CStr::from_ptr(step) } };
            let said = open::said();
            // Drivers with buffers of their own compare them with ours: 128 bytes of headroom are not for data.
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

    /// The hash functions to be switched on.
    fn rss(&mut self, request: &Request, info: &EthInfo) -> Result<u64, EthError> {
        // SAFETY: asks for a value.
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
        // SAFETY: all-zero bytes are valid for these fields, which are numbers.
        let mut info: EthInfo = unsafe { std::mem::zeroed() };
        // SAFETY: the port is the device's, and `info` has room for the answer.
        let rc = unsafe { ffi::off_eth_info(self.port, &mut info) };
        if rc < 0 {
            let what = "asking what the device can do".to_owned();
            return Err(EthError::Dpdk { what, source: ffi::errno(rc), said: open::said() });
        }
        Ok(info)
    }

    /// The packet buffers.
    pub(crate) fn pool(&self) -> &'static Pool {
        self.pool.pool()
    }

    /// The number that DPDK has for it.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// As the EAL names it.
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

    /// Bytes of the longest packet that it sends, tagged.
    pub fn longest(&self) -> usize {
        usize::from(self.mtu) + ETHERNET
    }

    /// Queue pairs.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Whether it sends packets of several buffers.
    pub fn takes_segments(&self) -> bool {
        self.segments
    }

    /// What a person should know.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The link's state.
    pub fn link(&self) -> Link {
        let mut link = EthLink::default();
        // SAFETY: the port is the device's.
        let known = unsafe { ffi::off_eth_link(self.port, &mut link) } == 0;
        Link {
            up: known && link.up != 0,
            mbit: Some(link.mbit).filter(|&mbit| known && mbit != 0 && mbit != u32::MAX),
            full_duplex: link.full_duplex != 0,
        }
    }

    /// What the device has dropped.
    pub fn losses(&self) -> Losses {
        let mut stats = EthStats::default();
        // SAFETY: the port is the device's. A driver that cannot say leaves zeros.
        unsafe { ffi::off_eth_stats(self.port, &mut stats) };
        Losses {
            missed: stats.missed,
            rx_errors: stats.rx_errors,
            no_buffer: stats.no_mbuf,
            tx_errors: stats.tx_errors,
        }
    }

    /// The receiving half of queue `queue`, to be taken once.
    ///
    /// # Panics
    /// When there are fewer queues.
    pub fn rx(self: &Arc<Self>, queue: u16) -> EthRx {
        assert!(queue < self.queues, "queue {queue} of {}", self.queues);
        EthRx::new(Arc::clone(self), queue)
    }

    /// The sending half of queue `queue`, to be taken once.
    ///
    /// # Panics
    /// When there are fewer queues.
    pub fn tx(self: &Arc<Self>, queue: u16) -> EthTx {
        assert!(queue < self.queues, "queue {queue} of {}", self.queues);
        EthTx::new(Arc::clone(self), queue)
    }
}

impl Drop for Ethdev {
    fn drop(&mut self) {
        let _alone = eal::one_at_a_time();
        // SAFETY: the port is the device's, and nobody has one of its queues.
        unsafe { ffi::off_eth_close(self.port, self.ours.into()) };
        self.pool.settle();
    }
}

/// Text as C has it.
pub(crate) fn c_string(text: &str) -> Result<CString, EthError> {
    CString::new(text).map_err(|_| EthError::Device(format!("'{text}' has a zero byte in it")))
}
