//! Measures the cost of the conversion between mbufs and packet handles, in cycles of the time stamp counter.

use std::ffi::c_uint;

use offcore_mem::{Burst, Hugepages, Pool};
use offcore_stats::tsc;

use crate::convert::{self, NO_MBUFS};
use crate::ethdev::{EthError, Ethdev, Request};
use crate::ffi::{self, Mbuf};
use crate::mempool::{ActiveCache, MbufPool};

/// Number of packets of a burst.
const BURST: usize = 32;
/// Number of bursts between two readings of the clock.
const BURSTS: usize = 1024;

/// TSC cycles per packet. Each value is the median over the measured rounds.
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// Only the two conversion loops: mbufs to handles and handles to mbufs.
    pub loops: f64,
    /// Receiving from net_null and sending to it, through the port's queues.
    pub port: f64,
    /// The same with only DPDK's calls, on the same mempool.
    pub bare: f64,
}

impl Conversion {
    /// Returns the cost of the port's path beyond DPDK's calls: the cost of the conversion in its context.
    pub fn added(&self) -> f64 {
        self.port - self.bare
    }
}

/// Measures `rounds` rounds of 32768 packets each, alternating between the three kinds, on a separate net_null device.
///
/// # Errors
/// As [`Ethdev::open`].
pub fn measure_conversion(rounds: usize) -> Result<Conversion, EthError> {
    let no_memory = |error: offcore_mem::pool::PoolError| EthError::Device(error.to_string());
    let pool = Pool::new(4096, 2048, Hugepages::Auto).map_err(no_memory)?;
    let request = Request { device: "net_null9".into(), queues: 1, ..Request::default() };
    let device = Ethdev::open(&request, pool)?;
    let mbufs = MbufPool::of(pool)?;
    let (mut loops, mut port, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds.max(1) {
        loops.push(convert_only(mbufs)?);
        port.push(by_port(&device));
        bare.push(by_calls(&device, mbufs));
    }
    Ok(Conversion { loops: median(loops), port: median(port), bare: median(bare) })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn per_packet(ticks: u64) -> f64 {
    ticks as f64 / (BURST * BURSTS) as f64
}

/// Runs the loops on a few bursts of mbufs, as a driver could return them.
fn convert_only(mbufs: &'static MbufPool) -> Result<f64, EthError> {
    const SETS: usize = 8;
    let mut cache = mbufs.pool().cache();
    let mut taken = [std::ptr::null_mut::<Mbuf>(); BURST * SETS];
    {
        let _lent = ActiveCache::new(&mut cache);
        // SAFETY: the mempool is valid, and there is room for that number of mbufs.
        let rc = unsafe { ffi::off_pool_alloc(mbufs.mempool(), taken.as_mut_ptr(), taken.len() as c_uint) };
        if rc < 0 {
            return Err(EthError::Device("no packet buffers to measure with".into()));
        }
    }
    let (mut burst, mut list) = (Burst::new(), NO_MBUFS);
    let before = tsc::now();
    for round in 0..BURSTS {
        let set = &taken[round % SETS * BURST..][..BURST];
        // SAFETY: the mbufs were allocated here, as if received; the handles that the last round made of them are gone.
        unsafe { convert::receive(mbufs, set, &mut burst) };
        convert::transmit(mbufs, &burst, &mut list);
        std::hint::black_box(&mut list);
        std::hint::black_box(&mut burst).clear();
    }
    let ticks = tsc::now() - before;
    // SAFETY: as above; the handles are freed below.
    unsafe {
        for set in taken.chunks(BURST) {
            convert::receive(mbufs, set, &mut burst);
            cache.free_all(burst.drain(..));
        }
    }
    Ok(per_packet(ticks))
}

fn by_port(device: &std::sync::Arc<Ethdev>) -> f64 {
    let mut cache = device.pool().cache();
    let (mut rx, mut tx) = (device.rx(0), device.tx(0));
    let mut burst = Burst::new();
    let before = tsc::now();
    for _ in 0..BURSTS {
        rx.rx(&mut cache, &mut burst, BURST);
        tx.tx(&mut cache, &mut burst);
    }
    let ticks = tsc::now() - before;
    cache.free_all(burst.drain(..));
    per_packet(ticks)
}

fn by_calls(device: &Ethdev, pool: &'static MbufPool) -> f64 {
    let mut cache = pool.pool().cache();
    let mut mbufs = [std::ptr::null_mut::<Mbuf>(); BURST];
    let before = tsc::now();
    for _ in 0..BURSTS {
        let _lent = ActiveCache::new(&mut cache);
        // SAFETY: the device is running, and its only queue is not used elsewhere; the sent mbufs were received.
        // net_null accepts all packets.
        unsafe {
            let count = ffi::off_eth_rx(device.port(), 0, mbufs.as_mut_ptr(), BURST as u16);
            ffi::off_eth_tx(device.port(), 0, mbufs.as_mut_ptr(), count);
        }
    }
    per_packet(tsc::now() - before)
}
