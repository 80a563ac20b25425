//! librte_vhost as a lane of the core-cost measurement: the same guest, rings and buffers as ours, behind a vhost-user
//! socket in this process.

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_stats::tsc;
use offcore_vhost::features::{NET_MRG_RXBUF, RING_INDIRECT_DESC};
use offcore_vhost::{FrontEnd, FrontEndConfig, MemoryFd};

use super::dpdk_lib::{Burst, DpdkLib, Offer, Port};
use crate::core_cost::{BURST, RING};
use crate::guest::{Guest, PEER_MAC, PORT_MAC, Seen, memory_len};
use crate::lockstep::OtherCore;
use crate::temperature::Temperature;

/// The peer's lane.
#[derive(Debug)]
pub struct PeerLane {
    // Dropped first: the front end goes before the port that it is connected to.
    _front_end: FrontEnd,
    port: Port,
    burst: Burst,
    guest: Arc<Mutex<Guest>>,
    dpdk: Rc<DpdkLib>,
    temperature: Temperature,
}

impl PeerLane {
    /// A lane for frames of `frame` bytes, FCS included.
    ///
    /// # Errors
    /// When memory is short or the front end cannot connect.
    pub fn new(
        dpdk: &Rc<DpdkLib>,
        temperature: Temperature,
        frame: usize,
        hugepages: Hugepages,
    ) -> Result<Self> {
        let (mapping, fd) = Mapping::memfd("bench-guest", memory_len(temperature), hugepages)?;
        let (address, len) = (mapping.base().as_ptr() as u64, mapping.len() as u64);
        let region = GuestRegion::new(address, address, len, mapping, 0)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        let path =
            std::env::temp_dir().join(format!("offcore-bench-{}-{address:x}.sock", std::process::id()));
        let port = dpdk.register(&path, &Offer::default())?;
        let config = FrontEndConfig {
            queue_size: RING,
            features: NET_MRG_RXBUF | RING_INDIRECT_DESC,
            ..FrontEndConfig::new(&path)
        };
        let shared = MemoryFd::new(memory.regions()[0].mapping(), std::os::fd::AsFd::as_fd(&fd));
        let mut front_end = FrontEnd::connect(&config, &[shared]).context("connecting to librte_vhost")?;
        let rings = match front_end.queues() {
            [rx, tx] => (rx.layout(), tx.layout()),
            other => bail!("{} virtqueues, expected 2", other.len()),
        };
        // The guest zeroes its rings, so it is made before they run.
        let guest = Guest::new(memory, rings, temperature, frame)?;
        front_end.start().context("starting librte_vhost's virtqueues")?;
        dpdk.wait_ready(&port, 1, Duration::from_secs(10))?;
        Ok(Self {
            _front_end: front_end,
            burst: dpdk.burst(),
            port,
            guest: Arc::new(Mutex::new(guest)),
            dpdk: Rc::clone(dpdk),
            temperature,
        })
    }

    /// What the guest has seen.
    pub fn seen(&self) -> Seen {
        self.guest.lock().unwrap_or_else(PoisonError::into_inner).seen()
    }

    /// Moves one window of packets through; returns the ticks that each cost the core.
    ///
    /// # Errors
    /// When a packet is lost, reordered or changed.
    pub fn turn(&mut self, other: &OtherCore) -> Result<f64> {
        let window = self.temperature.window();
        self.on_guest(other, move |guest| guest.transmit(window))?;
        let start = tsc::now();
        for _ in 0..window / BURST {
            self.dpdk.dequeue(&self.port, 0, &mut self.burst, BURST)?;
            self.burst.rewrite_mac(&PEER_MAC.0, &PORT_MAC.0);
            self.dpdk.enqueue(&self.port, 0, &mut self.burst)?;
        }
        let ticks = tsc::now() - start;
        self.on_guest(other, move |guest| {
            guest.collect()?;
            match guest.outstanding() {
                0 => Ok(()),
                n => bail!("librte_vhost: {n} of {window} packets did not arrive"),
            }
        })?;
        Ok(ticks as f64 / window as f64)
    }

    fn on_guest(
        &mut self,
        other: &OtherCore,
        f: impl FnOnce(&mut Guest) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let guest = Arc::clone(&self.guest);
        let job = move || f(&mut guest.lock().unwrap_or_else(PoisonError::into_inner));
        if self.temperature == Temperature::Hot { job() } else { other.run(job) }
    }
}
