//! librte_vhost as a variant of the core-cost measurement: the same guests, rings and buffers as for our back end,
//! behind vhost-user sockets in this process.
//!
//! For packed virtqueues librte_vhost 22.11 has a faster path for four packets at a time, in both directions, with and
//! without mergeable buffers. It requires four available descriptors that begin at a multiple of four, each with a
//! whole packet and not indirect. These guests meet the requirement: rings and bursts are multiples of four, and a
//! packet is one buffer.

use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use offcore_ring::Layout;
use offcore_stats::tsc;
use offcore_vhost::features::{
    VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_VERSION_1, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
};
use offcore_vhost::{FrontEnd, FrontEndConfig};

use super::about::feature_names;
use super::dpdk_lib::{Burst, DpdkLib, Offer, Port};
use crate::BURST;
use crate::guests::guest::{Guests, PEER_MAC, PORT_MAC, Seen};
use crate::guests::memory::{GuestSide, RING, Testbed};
use crate::guests::workload::{Ring, Route, Workload};
use crate::method::alternate::{Cost, Subject};
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::report::row::AboutPeer;

/// The peer's variant.
#[derive(Debug)]
pub struct PeerVariant {
    /// The transmitting guest and, unless it is the same, the receiving guest.
    sides: Vec<Side>,
    burst: Burst,
    guests: Arc<Mutex<Guests>>,
    dpdk: Rc<DpdkLib>,
    temperature: Temperature,
}

/// A guest's connection.
#[derive(Debug)]
struct Side {
    // Dropped first: the front end has to disconnect before the port is removed.
    front_end: FrontEnd,
    port: Port,
    /// RX, then TX.
    rings: [Layout; 2],
}

impl Side {
    /// Connects a front end with a guest's memory and its virtqueues in `slot`, without starting it.
    fn connect(dpdk: &DpdkLib, guest: &GuestSide, slot: usize, workload: &Workload) -> Result<Self> {
        let ring = workload.ring;
        let place = guest.ring_place(slot);
        let name = format!("offcore-bench-{}-{:x}.sock", std::process::id(), place.address);
        let path = std::env::temp_dir().join(name);
        let tso = workload.features() & (VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_HOST_TSO6) != 0;
        let port = dpdk.register(&path, &Offer { packed: ring == Ring::Packed, tso, ..Offer::default() })?;
        let config =
            FrontEndConfig { queue_size: RING, features: workload.features(), ..FrontEndConfig::new(&path) };
        let front_end = FrontEnd::connect_with(&config, &[guest.shared()], Some(place))
            .context("connecting to librte_vhost")?;
        let agreed = front_end.features();
        // The features must be the same as for our variant.
        let differs = (agreed ^ workload.features()) & !(VIRTIO_F_VERSION_1 | VHOST_USER_F_PROTOCOL_FEATURES);
        ensure!(
            differs == 0,
            "librte_vhost has agreed to other features than ours, and is not to be compared with it: {} is not the same",
            feature_names(differs)
        );
        let rings = match front_end.queues() {
            [rx, tx] => [rx.layout(), tx.layout()],
            other => bail!("{} virtqueues, expected 2", other.len()),
        };
        Ok(Self { front_end, port, rings })
    }
}

impl PeerVariant {
    /// Creates a variant in `bed`, which it shares with our variant.
    ///
    /// # Errors
    /// If the testbed is full or a front end cannot connect.
    pub fn new(dpdk: &Rc<DpdkLib>, bed: &Testbed) -> Result<Self> {
        let &Workload { route, temperature, .. } = &bed.workload;
        let slot = bed.take_slot()?;
        let mut sides = vec![Side::connect(dpdk, &bed.from, slot, &bed.workload)?];
        if route == Route::GuestToGuest {
            sides.push(Side::connect(dpdk, &bed.to, slot, &bed.workload)?);
        }
        // The guests are created before the virtqueues start, because their creation zeroes the rings.
        let ([_, tx], [rx, _]) = (sides[0].rings.clone(), sides[sides.len() - 1].rings.clone());
        let guests = Guests::new(&bed.traffic, rx, tx, bed.from.tables(slot));
        for side in &mut sides {
            side.front_end.start().context("starting librte_vhost's virtqueues")?;
            dpdk.wait_ready(&side.port, 1, Duration::from_secs(10))?;
            dpdk.touch(&side.port)?;
        }
        Ok(Self {
            sides,
            burst: dpdk.burst(),
            guests: Arc::new(Mutex::new(guests)),
            dpdk: Rc::clone(dpdk),
            temperature,
        })
    }

    /// Describes librte_vhost.
    ///
    /// # Errors
    /// If its version cannot be determined.
    pub fn about(&self) -> Result<AboutPeer> {
        Ok(AboutPeer {
            peer_features: Some(feature_names(self.features())),
            peer_page_bytes: Some(self.dpdk.page_size()),
            ..AboutPeer::process(std::process::id())?
        })
    }

    /// Returns the negotiated virtio feature bits.
    pub fn features(&self) -> u64 {
        self.sides[0].front_end.features()
    }

    /// Returns the packet counters of the guests.
    pub fn seen(&self) -> Seen {
        lock(&self.guests).seen()
    }
}

impl Subject for PeerVariant {
    /// Fails if a packet is lost, reordered or changed.
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        let window = self.temperature.window();
        let before = lock(&self.guests).ticks();
        other.run_on(self.temperature, &self.guests, move |guests| guests.transmit(window))?;
        let (from, to) = (&self.sides[0].port, &self.sides[self.sides.len() - 1].port);
        let start = tsc::now();
        for _ in 0..window / BURST {
            self.dpdk.dequeue(from, 0, &mut self.burst, BURST)?;
            self.burst.rewrite_mac(&PEER_MAC.0, &PORT_MAC.0);
            self.dpdk.enqueue(to, 0, &mut self.burst)?;
        }
        let core = tsc::now() - start;
        other.run_on(self.temperature, &self.guests, move |guests| {
            guests.collect()?;
            match guests.outstanding() {
                0 => Ok(()),
                n => bail!("librte_vhost: {n} of {window} packets did not arrive"),
            }
        })?;
        let guest = lock(&self.guests).ticks() - before;
        Ok(Cost { packets: window as u64, core, guest })
    }
}
