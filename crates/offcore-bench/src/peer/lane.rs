//! librte_vhost as a lane of the core-cost measurement: the same guests, rings and buffers as ours, behind vhost-user
//! sockets in this process.
//!
//! Over packed virtqueues librte_vhost 22.11 has a faster path for four packets at a time, in both directions, with
//! mergeable buffers and without: it wants four available descriptors that begin at a multiple of four, each a whole
//! packet, not indirect. These guests give it that: rings and bursts are multiples of four, and a packet is one buffer.

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::Layout;
use offcore_stats::tsc;
use offcore_vhost::features::{NET_MRG_RXBUF, RING_INDIRECT_DESC};
use offcore_vhost::{FrontEnd, FrontEndConfig, MemoryFd};

use super::about::{AboutPeer, feature_names};
use super::dpdk_lib::{Burst, DpdkLib, Offer, Port};
use crate::core_cost::{BURST, RING};
use crate::guest::{Guests, PEER_MAC, PORT_MAC, Seen, buffers_len};
use crate::lockstep::OtherCore;
use crate::temperature::Temperature;
use crate::workload::{Ring, Route, Workload};

/// The peer's lane.
#[derive(Debug)]
pub struct PeerLane {
    /// The guest that transmits and, unless it is the same, the one that receives.
    sides: Vec<Side>,
    burst: Burst,
    guests: Arc<Mutex<Guests>>,
    dpdk: Rc<DpdkLib>,
    temperature: Temperature,
}

/// A guest's memory and connection.
#[derive(Debug)]
struct Side {
    // Dropped first: the front end goes before the port that it is connected to.
    front_end: FrontEnd,
    port: Port,
    memory: Arc<GuestMemory>,
    /// RX, then TX.
    rings: [Layout; 2],
}

impl Side {
    /// A front end over so many bytes of buffers, connected and not yet started.
    fn connect(dpdk: &DpdkLib, buffers: usize, ring: Ring, hugepages: Hugepages) -> Result<Self> {
        let (mapping, fd) = Mapping::memfd("bench-guest", buffers, hugepages)?;
        let (address, len) = (mapping.base().as_ptr() as u64, mapping.len() as u64);
        let region = GuestRegion::new(address, address, len, mapping, 0)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        let path =
            std::env::temp_dir().join(format!("offcore-bench-{}-{address:x}.sock", std::process::id()));
        let port = dpdk.register(&path, &Offer { packed: ring == Ring::Packed, ..Offer::default() })?;
        let config = FrontEndConfig {
            queue_size: RING,
            features: NET_MRG_RXBUF | RING_INDIRECT_DESC | ring.features(),
            ..FrontEndConfig::new(&path)
        };
        let shared = MemoryFd::new(memory.regions()[0].mapping(), std::os::fd::AsFd::as_fd(&fd));
        let front_end = FrontEnd::connect(&config, &[shared]).context("connecting to librte_vhost")?;
        ensure!(
            front_end.features() & Ring::Packed.features() == ring.features(),
            "librte_vhost does not agree to {ring} virtqueues"
        );
        let rings = match front_end.queues() {
            [rx, tx] => [rx.layout(), tx.layout()],
            other => bail!("{} virtqueues, expected 2", other.len()),
        };
        Ok(Self { front_end, port, memory, rings })
    }
}

impl PeerLane {
    /// A lane.
    ///
    /// # Errors
    /// When memory is short or a front end cannot connect.
    pub fn new(dpdk: &Rc<DpdkLib>, workload: &Workload, hugepages: Hugepages) -> Result<Self> {
        let &Workload { route, ring, temperature, frame, .. } = workload;
        let one_way = buffers_len(temperature);
        let connect = |buffers| Side::connect(dpdk, buffers, ring, hugepages);
        let mut sides = match route {
            Route::Loop => vec![connect(2 * one_way)?],
            Route::GuestToGuest => vec![connect(one_way)?, connect(one_way)?],
        };
        // The guests zero their rings, so they are made before those run.
        let guests = match &sides[..] {
            [from, to] => {
                let ([_, tx], [rx, _]) = (from.rings.clone(), to.rings.clone());
                let (sender, receiver) = ((from.memory.clone(), tx), (to.memory.clone(), rx));
                Guests::two(sender, receiver, temperature, frame)?
            }
            sides => {
                let [rx, tx] = sides[0].rings.clone();
                Guests::looped(sides[0].memory.clone(), (rx, tx), temperature, frame)?
            }
        };
        for side in &mut sides {
            side.front_end.start().context("starting librte_vhost's virtqueues")?;
            dpdk.wait_ready(&side.port, 1, Duration::from_secs(10))?;
        }
        Ok(Self {
            sides,
            burst: dpdk.burst(),
            guests: Arc::new(Mutex::new(guests)),
            dpdk: Rc::clone(dpdk),
            temperature,
        })
    }

    /// What librte_vhost is, here.
    ///
    /// # Errors
    /// When that cannot be found out.
    pub fn about(&self) -> Result<AboutPeer> {
        Ok(AboutPeer {
            peer_features: Some(feature_names(self.sides[0].front_end.features())),
            peer_page_bytes: Some(self.dpdk.page_size()),
            ..AboutPeer::process(std::process::id())?
        })
    }

    /// What the guests have seen.
    pub fn seen(&self) -> Seen {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner).seen()
    }

    /// Moves one window of packets through; returns the ticks that each cost the core.
    ///
    /// # Errors
    /// When a packet is lost, reordered or changed.
    pub fn turn(&mut self, other: &OtherCore) -> Result<f64> {
        let window = self.temperature.window();
        self.on_guests(other, move |guests| guests.transmit(window))?;
        let (from, to) = (&self.sides[0].port, &self.sides[self.sides.len() - 1].port);
        let start = tsc::now();
        for _ in 0..window / BURST {
            self.dpdk.dequeue(from, 0, &mut self.burst, BURST)?;
            self.burst.rewrite_mac(&PEER_MAC.0, &PORT_MAC.0);
            self.dpdk.enqueue(to, 0, &mut self.burst)?;
        }
        let ticks = tsc::now() - start;
        self.on_guests(other, move |guests| {
            guests.collect()?;
            match guests.outstanding() {
                0 => Ok(()),
                n => bail!("librte_vhost: {n} of {window} packets did not arrive"),
            }
        })?;
        Ok(ticks as f64 / window as f64)
    }

    fn on_guests(
        &self,
        other: &OtherCore,
        f: impl FnOnce(&mut Guests) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let guests = Arc::clone(&self.guests);
        let job = move || f(&mut guests.lock().unwrap_or_else(PoisonError::into_inner));
        if self.temperature == Temperature::Hot { job() } else { other.run(job) }
    }
}
