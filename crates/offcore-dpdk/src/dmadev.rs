//! DMA devices of DPDK as copy engines: `dmadev:NAME`.
//!
//! A device has one channel here, on its virtual channel 0. The functions of a device may not be called from two cores
//! at a time, however many virtual channels it has. A second channel would therefore need a lock, just as sharing the
//! first one does (`offcore_dma::share`).
//!
//! # Accessible memory
//! A device with shared virtual memory (capability SVA: idxd's user queues, `dma_skeleton`) can access all memory of
//! the process. Any other device can access the memory that was mapped for it, which is the packet buffers. Copies from
//! and to other memory, such as a guest's, are not given to such a device: the channel reports them as page faults, and
//! the core performs them. Devices without SVA must use virtual addresses (`--iova-mode=va`, an IOMMU). With physical
//! addresses they are refused.

mod channel;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offcore_dma::channel::{Channel, CopyDevice, EngineError};
use offcore_mem::Pool;

use crate::ethdev::{EthError, c_string};
use crate::ffi::{self, DmaInfo};
use crate::mempool::MbufPool;
use crate::{eal, pci};

pub use channel::DmaChannel;

/// `RTE_DMA_CAPA_MEM_TO_MEM`, `_SVA`, `_OPS_COPY`.
const MEM_TO_MEM: u64 = 1;
const SVA: u64 = 1 << 4;
const OPS_COPY: u64 = 1 << 32;

/// The devices opened so far. The EAL keeps them, stopped, for later users.
static OPENED: Mutex<Vec<Arc<Inner>>> = Mutex::new(Vec::new());

/// A DMA device. Its channel has one user at a time.
#[derive(Debug)]
pub struct DmaDevice {
    name: String,
    inner: Arc<Inner>,
}

/// The state of a device that its channel keeps.
#[derive(Debug)]
struct Inner {
    /// The device's name in DPDK.
    device: String,
    number: i16,
    min_desc: u16,
    max_desc: u16,
    /// The memory ranges that it can access, as address and length; `None`: all memory.
    reach: Option<Vec<(usize, usize)>>,
    /// NUMA node, if it has one.
    node: Option<usize>,
    taken: AtomicBool,
}

impl DmaDevice {
    /// Starts the EAL if necessary, and finds or probes the device `device`: a PCI address or a virtual device,
    /// optionally with arguments after a comma (`dma_skeleton,lcore=1`). A device without shared virtual memory gets
    /// access to `pool`.
    ///
    /// # Errors The error names the problem, the expectation and the remedy.
    pub fn open(device: &str, pool: Option<&'static Pool>) -> Result<Self, EthError> {
        eal::start()?;
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let number = find(device)?;
        let name = format!("dmadev:{device}");
        if let Some(known) = opened.iter().find(|known| known.number == number) {
            return Ok(Self { name, inner: Arc::clone(known) });
        }
        let mut info = DmaInfo::default();
        // SAFETY: the number belongs to a device, and `info` is valid for writes.
        let rc = unsafe { ffi::off_dma_info(number, &mut info) };
        if rc < 0 {
            let what = format!("asking what {device} can do");
            return Err(EthError::Dpdk { what, source: ffi::errno(rc), said: String::new() });
        }
        let lacks = |capability: u64| info.capabilities & capability == 0;
        if lacks(MEM_TO_MEM) || lacks(OPS_COPY) {
            return Err(EthError::Device(format!(
                "{device} does not copy from memory to memory (capabilities {:#x}): use another device",
                info.capabilities
            )));
        }
        let reach = if lacks(SVA) { Some(reach(device, pool)?) } else { None };
        let inner = Arc::new(Inner {
            device: device.split(',').next().unwrap_or(device).into(),
            number,
            min_desc: info.min_desc,
            max_desc: info.max_desc,
            reach,
            node: usize::try_from(info.node).ok(),
            taken: false.into(),
        });
        opened.push(Arc::clone(&inner));
        Ok(Self { name, inner })
    }

    /// NUMA node of the device, if it has one.
    pub fn numa_node(&self) -> Option<usize> {
        self.inner.node
    }

    /// A message for the user about the device.
    pub fn note(&self) -> Option<String> {
        self.inner.reach.as_ref().map(|_| {
            format!(
                "{}: the device reaches the packet buffers only; copies from and to guests are made by the core",
                self.name
            )
        })
    }
}

/// Maps the packet buffers for a device without shared virtual memory; returns the ranges that it can access.
fn reach(device: &str, pool: Option<&'static Pool>) -> Result<Vec<(usize, usize)>, EthError> {
    if !eal::iova_is_va() {
        return Err(EthError::Device(format!(
            "{device} takes physical addresses here (--iova-mode=pa), expected virtual ones: turn the IOMMU on, bind the \
             device to vfio-pci and leave --iova-mode out"
        )));
    }
    let Some(pool) = pool else { return Ok(Vec::new()) };
    MbufPool::of(pool)?;
    let (base, len) = pool.memory();
    // SAFETY: the EAL is running; the memory was registered and is never unmapped.
    let rc = unsafe { ffi::off_memory_map_vfio(base.as_ptr(), len) };
    if rc < 0 && rc != -libc::EEXIST && rc != -libc::ENOTSUP {
        let what = format!(
            "mapping {len} bytes of packet buffers for {device}: raise the limit of locked memory (ulimit -l unlimited)"
        );
        return Err(EthError::Dpdk { what, source: ffi::errno(rc), said: String::new() });
    }
    Ok(if rc == -libc::ENOTSUP { Vec::new() } else { vec![(base.as_ptr().addr(), len)] })
}

/// Returns the number of the device, which is probed if the EAL does not have it.
fn find(device: &str) -> Result<i16, EthError> {
    let (name, args) = device.split_once(',').map_or((device, None), |(name, args)| (name, Some(args)));
    let address = pci::address(name);
    let name = address.as_deref().unwrap_or(name);
    let c_name = c_string(name)?;
    let _alone = eal::one_at_a_time();
    // SAFETY: the EAL is running, and the name is a C string.
    let number = || i16::try_from(unsafe { ffi::off_dma_find(c_name.as_ptr()) }).ok().filter(|&n| n >= 0);
    if let Some(number) = number() {
        return Ok(number);
    }
    if let Some(address) = &address {
        pci::check(Path::new("/sys"), address).map_err(|text| {
            EthError::Device(format!(
                "{text}; a DSA device also needs vfio_pci.disable_denylist=1 (`offcore dsa doctor` says more)"
            ))
        })?;
    }
    let devargs = args.map_or_else(|| name.to_owned(), |args| format!("{name},{args}"));
    let devargs = c_string(&devargs)?;
    eal::forget();
    // SAFETY: the EAL is running, and `devargs` is a C string.
    let rc = unsafe { ffi::off_probe(devargs.as_ptr()) };
    let said = eal::said();
    let said = if said.is_empty() { String::new() } else { format!("; DPDK says: {}", said.join("; ")) };
    const ADVICE: &str =
        "expected the PCI address of a DMA device that is bound to vfio-pci, or dma_skeleton";
    match (rc, number()) {
        (0.., Some(number)) => Ok(number),
        (0.., None) => Err(EthError::Device(format!("{name} is no DMA device of DPDK: {ADVICE}{said}"))),
        (rc, _) => {
            let what = format!("the EAL does not find or start {name}: {ADVICE}");
            Err(EthError::Dpdk { what, source: ffi::errno(rc), said })
        }
    }
}

impl CopyDevice for DmaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn max_channels(&self) -> usize {
        1
    }

    fn open_channel(&self, ring_size: usize) -> Result<Box<dyn Channel>, EngineError> {
        if self.inner.taken.swap(true, Ordering::AcqRel) {
            return Err(EngineError::NoChannel { device: self.name.clone(), max: 1 });
        }
        let opened = DmaChannel::open(&self.name, Arc::clone(&self.inner), ring_size);
        if opened.is_err() {
            self.inner.taken.store(false, Ordering::Release);
        }
        Ok(Box::new(opened?))
    }
}
