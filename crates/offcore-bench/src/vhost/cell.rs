//! Cells of the measurement: the variants that alternate and the resulting rows.
//!
//! Each workload has up to three cells:
//! - In the first cell the core is measured against itself, which gives the noise floor.
//! - In the second cell only the core and the peer alternate. With several variants, our code would stay warmer in the
//!   caches than the peer's.
//! - In the third cell, our modes and engines alternate.

use std::fmt;

use anyhow::Result;
use offcore_dma::Mode;
use offcore_stats::{named, tsc};

use super::{Options, PUBLISHED, Peers};
use crate::guests::guest::Seen;
use crate::guests::memory::Testbed;
use crate::guests::workload::{Route, Workload};
use crate::method::alternate::{Alternating, Blocks, Cost, Subject, mean};
use crate::method::copier::{Copier, Setup};
use crate::method::lockstep::OtherCore;
use crate::model::rate::{DeviceRate, DsaGroups};
use crate::peer::about::feature_names;
use crate::report::row::{AboutPeer, AutoRatios, OffloadRatio, PeerRatio, Published, Row, Shares};
use crate::report::sample::{Spread, SumRatio};
use crate::vhost::core_cost::OwnVariant;

/// System on which Table 8 was measured.
const PUBLISHED_UNIT: &str = "mpps, Xeon 8471N 1.8 GHz, whole forwarding core";
/// Number of windows over which the shares of Figure 3 are measured.
const BREAKDOWN: usize = 192;

named! {
    /// The variants that alternate in a cell.
    pub(super) enum Kind {
        /// The core against itself.
        Noise = "noise floor",
        /// The core against the peer.
        Peer = "peer",
        /// Modes and engines against each other.
        Modes = "modes",
    }
}

impl Kind {
    /// Returns the cells that `options` selects, in their order.
    pub(super) fn all(options: &Options) -> Vec<Self> {
        let modes = !options.dpdk_lib || options.background || options.setups.len() > 1;
        let ratios = options.dpdk_lib || options.setups.len() > 1;
        let wanted = [
            (Self::Noise, options.noise_floor && ratios),
            (Self::Peer, options.dpdk_lib),
            (Self::Modes, modes),
        ];
        wanted.into_iter().filter_map(|(kind, wanted)| wanted.then_some(kind)).collect()
    }

    /// Returns the number of parts in which the cell is measured.
    pub(super) fn parts(self) -> usize {
        match self {
            Self::Noise | Self::Peer => 2,
            Self::Modes => 1,
        }
    }

    /// Returns our variants.
    fn setups(self, options: &Options) -> Vec<Setup> {
        let all = &options.setups;
        match self {
            Self::Noise => vec![Setup::CPU; 2],
            Self::Peer if all.contains(&Setup::CPU) => vec![Setup::CPU],
            Self::Peer => all.iter().take(1).copied().collect(),
            // In addition to `auto`, the core is measured with the engine's channel attached but unused. The difference
            // between the two is the cost of the decision.
            Self::Modes => {
                let idle = all.iter().filter(|setup| setup.mode == Mode::Auto && all.contains(&Setup::CPU));
                let idle = idle.map(|setup| Setup { mode: Mode::Cpu, ..*setup });
                all.iter().copied().chain(idle).collect()
            }
        }
    }
}

/// A variant that alternates with others.
pub(super) enum Variant {
    Ours {
        setup: Setup,
        background: bool,
        variant: Box<OwnVariant>,
    },
    #[cfg(feature = "dpdk")]
    DpdkLib(Box<crate::peer::variant::PeerVariant>),
}

impl Variant {
    /// Creates a variant of this crate's back end without a background copier.
    fn ours(setup: Setup, bed: &Testbed) -> Result<Self> {
        let variant = OwnVariant::new(bed, setup.mode, setup.open()?)?;
        Ok(Self::Ours { setup, background: false, variant: Box::new(variant) })
    }

    /// Returns mode and engine of our variants, `None` for a peer.
    fn setup(&self) -> Option<Setup> {
        match self {
            Self::Ours { setup, .. } => Some(*setup),
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(_) => None,
        }
    }

    /// Returns the name of a peer, `None` for our variants.
    fn peer_name(&self) -> Option<&'static str> {
        match self {
            Self::Ours { .. } => None,
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(_) => Some("dpdk-lib"),
        }
    }

    /// Returns the packet counters of the guests.
    fn seen(&self) -> Seen {
        match self {
            Self::Ours { variant, .. } => variant.seen(),
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(variant) => variant.seen(),
        }
    }

    fn is(&self, wanted: Setup) -> bool {
        matches!(self, Self::Ours { setup, background: false, .. } if *setup == wanted)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ours { setup: Setup { mode: Mode::Cpu, copier }, background: false, .. }
                if *copier != Copier::Core =>
            {
                write!(f, "cpu cpu +{copier} idle")
            }
            Self::Ours { setup, background, .. } => {
                write!(f, "{setup}{}", if *background { " +copier" } else { "" })
            }
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(_) => f.write_str("cpu dpdk-lib"),
        }
    }
}

impl Subject for Variant {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        match self {
            Self::Ours { variant, .. } => variant.window(other),
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(variant) => variant.window(other),
        }
    }
}

/// A cell.
pub(super) struct Cell {
    pub(super) variants: Alternating<Variant>,
    /// Packet counters of the guests of each variant before it was created again.
    earlier: Vec<Seen>,
}

impl Cell {
    /// Creates all variants in the same testbed.
    pub(super) fn new(kind: Kind, options: &Options, peers: &Peers, bed: &Testbed) -> Result<Self> {
        let mut variants = Alternating::new();
        for setup in kind.setups(options) {
            variants.add(Variant::ours(setup, bed)?);
            if kind == Kind::Modes && options.background && setup == Setup::CPU {
                let variant = OwnVariant::new(bed, setup.mode, setup.open()?)?.with_background();
                variants.add(Variant::Ours { setup, background: true, variant: Box::new(variant) });
            }
        }
        if kind == Kind::Peer {
            variants.add(peers.variant(bed)?);
        }
        let earlier = variants.iter().map(|_| Seen::default()).collect();
        Ok(Self { variants, earlier })
    }

    /// Creates all variants again in another testbed and in reverse order, so that each variant gets the memory slot of
    /// another variant.
    pub(super) fn renew(&mut self, peers: &Peers, bed: &Testbed) -> Result<()> {
        for (variant, seen) in self.variants.renew().zip(&mut self.earlier).rev() {
            *seen += variant.seen();
            *variant = match variant.setup() {
                Some(setup) => Variant::ours(setup, bed)?,
                None => peers.variant(bed)?,
            };
        }
        Ok(())
    }

    fn blocks(&self, mode: Mode, copier: Copier) -> Option<&Blocks> {
        self.variants.blocks_of(|variant| variant.is(Setup { mode, copier }))
    }

    /// Returns the description of the peer.
    fn about_peer(&self) -> Result<AboutPeer> {
        #[cfg(feature = "dpdk")]
        for (variant, _) in self.variants.iter() {
            if let Variant::DpdkLib(variant) = variant {
                return variant.about();
            }
        }
        Ok(AboutPeer::default())
    }

    /// Returns the columns that compare several variants.
    fn ratios(&self, variant: &Variant, blocks: &Blocks) -> Row {
        let mut row = Row::new("vhost", "", "core-cost");
        let (mode, copier) = match variant {
            Variant::Ours { setup: Setup { mode, copier }, .. } => (mode, copier),
            #[cfg(feature = "dpdk")]
            Variant::DpdkLib(_) => return row,
        };
        let cpu = self.blocks(Mode::Cpu, Copier::Core);
        let over_cpu = cpu.and_then(|cpu| SumRatio::of(&cpu.core, &blocks.core));
        match (mode, copier) {
            (Mode::Auto, _) => {
                row.ratios.auto = AutoRatios::new(blocks, cpu, self.blocks(Mode::Offload, *copier));
            }
            (Mode::Offload, _) => row.ratios.offload = OffloadRatio::new(over_cpu),
            (Mode::Cpu, Copier::Core) => {}
            (Mode::Cpu, _) => row.core.idle_channel_over_cpu = over_cpu.map(|ratio| ratio.sums),
        }
        let peer = self.variants.iter().find_map(|(variant, blocks)| Some((variant.peer_name()?, blocks)));
        if let Some((name, theirs)) = peer {
            let ratio = SumRatio::of(&theirs.core, &blocks.core);
            row.peer = PeerRatio {
                peer: Some(name.into()),
                peer_median: Some(Spread::of(&theirs.core).median),
                peer_ratio: ratio.map(|ratio| ratio.sums),
                peer_ratio_median: ratio.map(|ratio| ratio.median),
                peer_ratio_lower: self.variants.bounds(theirs, blocks).map(|bounds| bounds.lower),
                ..PeerRatio::default()
            };
            row.core.peer_both_ratio = SumRatio::of(&theirs.both(), &blocks.both()).map(|ratio| ratio.sums);
        }
        row
    }

    /// Returns the rows of all variants. If `breakdown` is given, the shares of Figure 3 are measured on that core.
    pub(super) fn rows(&mut self, workload: &Workload, breakdown: Option<&OtherCore>) -> Result<Vec<Row>> {
        let hz = tsc::hz();
        let ratios: Vec<_> =
            self.variants.iter().map(|(variant, blocks)| self.ratios(variant, blocks)).collect();
        let names: Vec<_> = self.variants.iter().map(|(variant, _)| variant.to_string()).collect();
        let about_peer = self.about_peer()?;
        let (names, steadiness) = (names.join(", "), self.variants.steadiness());
        let mut rows = Vec::new();
        for (((variant, blocks), mut row), mut seen) in
            self.variants.iter_mut().zip(ratios).zip(self.earlier.iter().copied())
        {
            seen += variant.seen();
            let &Workload { ring, temperature, frame, guest, .. } = workload;
            row.head.case = workload.case().into();
            (row.head.frame, row.head.ring, row.head.guest) = (frame, ring.name(), Some(guest.name()));
            (row.head.temperature, row.head.window) = (temperature.name().into(), temperature.window());
            row.peer.variants = Some(names.clone());
            if row.peer.peer.is_some() {
                row.ends.about_peer = about_peer.clone();
            }
            blocks.enter(&mut row, hz);
            row.clock = steadiness;
            row.core.guest_ns_per_packet = mean(&blocks.guest).map(tsc_ns);
            row.core.both_ns_per_packet = mean(&blocks.both()).map(tsc_ns);
            variant.enter(&mut row, workload)?;
            row.counts = seen.counts();
            if let (Variant::Ours { variant, .. }, Some(other)) = (variant, breakdown) {
                let [share_switching, share_virtqueue, share_copy] =
                    variant.breakdown(other, BREAKDOWN)?.map(Some);
                row.shares = Shares { share_switching, share_virtqueue, share_copy };
            }
            rows.push(row);
        }
        Ok(rows)
    }
}

impl Variant {
    /// Enters the variant's identity and its own figures into `row`.
    fn enter(&mut self, row: &mut Row, workload: &Workload) -> Result<()> {
        match self {
            Self::Ours { setup: Setup { mode, copier }, background, variant } => {
                let idle = *mode == Mode::Cpu && *copier != Copier::Core;
                let copier = if idle { Copier::Core } else { *copier };
                row.core.empty_poll_cycles = Some(variant.empty_poll());
                Setup { mode: *mode, copier }.describe(row);
                row.core.background = *background;
                row.core.background_copies_per_packet = variant.background_copies();
                row.core.copied_bytes_per_packet = Some(variant.copied_bytes());
                row.core.copy_routine = variant.copy_routine();
                row.published = Published::new(published(workload, *mode).filter(|_| !idle), PUBLISHED_UNIT);
                let engine_ns = match copier.simulated() {
                    // Windows are too short to keep a device busy, so its rate under full load is measured separately.
                    true => {
                        let groups = DsaGroups { count: 1, queues: 1, engines: 4 };
                        Some(1e3 / DeviceRate::of(workload.frame, groups, copier.batch())?.mcopies)
                    }
                    false => variant.engine_ns_per_copy().filter(|_| !idle),
                };
                if let Some(ns) = engine_ns {
                    row.set_engine(ns, variant.copies());
                }
                row.head.features = Some(feature_names(workload.features()));
            }
            #[cfg(feature = "dpdk")]
            Self::DpdkLib(variant) => {
                (row.head.mode, row.head.engine) = ("cpu".into(), "dpdk-lib".into());
                row.head.features = Some(feature_names(variant.features()));
            }
        }
        if let Self::Ours { setup: Setup { mode: Mode::Cpu, copier }, .. } = self {
            row.core.idle_channel = (*copier != Copier::Core).then(|| copier.name());
        }
        Ok(())
    }
}

fn tsc_ns(ticks: f64) -> f64 {
    ticks * 1e9 / tsc::hz() as f64
}

/// Returns the published figure. The guide has no figure for `auto`.
fn published(workload: &Workload, mode: Mode) -> Option<f64> {
    let (_, core, dsa) = PUBLISHED.into_iter().find(|(frame, ..)| *frame == workload.frame)?;
    match mode {
        _ if workload.route != Route::Loop => None,
        Mode::Cpu => Some(core),
        Mode::Offload => Some(dsa),
        Mode::Auto => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guests::workload::{GuestKind, Ring};
    use crate::method::alternate::Extent;
    use crate::method::temperature::Temperature;
    use crate::report::golden;
    use crate::report::progress::Progress;

    #[test]
    fn rows_name_their_variant() {
        let options = Options {
            route: Route::Loop,
            rings: vec![Ring::Split],
            guests: vec![GuestKind::Simple],
            one_copy: true,
            frames: vec![64],
            imix: false,
            temperatures: vec![Temperature::Remote],
            setups: Setup::combine(&[Mode::Cpu, Mode::Offload, Mode::Auto], &[Copier::Core, Copier::Helper]),
            background: true,
            breakdown: false,
            dpdk_lib: false,
            noise_floor: true,
            extent: Extent::short(2),
        };
        let mut rows = Vec::new();
        crate::vhost::run(&options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
        assert_eq!(rows.len(), 5);
        for row in &rows {
            let beside = if row.core.background { ", background" } else { "" };
            let idle = if row.core.idle_channel.is_some() { ", idle channel" } else { "" };
            golden::check(&format!("vhost, core-cost, {}{beside}{idle}", row.head.mode), row);
        }
    }
}
