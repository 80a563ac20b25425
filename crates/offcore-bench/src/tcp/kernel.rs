//! The common part of the cases that compare our stack with the kernel's: options, the network, and windows that
//! alternate.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use offcore_mem::Hugepages;

use super::link::Side;
use crate::peer::netns::{self, Netns};
use crate::report::progress::Progress;

/// MTU of the pairs, which yields segments of [`SEGMENT`](super::SEGMENT) bytes.
const MTU: &str = "1500";

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// Path of this program: `offcore`. It is also the relay.
    pub binary: PathBuf,
    /// Whether to measure fewer and shorter windows.
    pub quick: bool,
    /// Whether the near end sends or receives, in the cases with one stream.
    pub sides: Vec<Side>,
    pub hugepages: Hugepages,
    /// The core of the stack and its programs.
    pub lcore: usize,
    /// The core of the other end and the relay.
    pub other_lcore: Option<usize>,
}

impl KernelOptions {
    /// Checks the requirements of a case, removes network namespaces of earlier runs, and returns the other core.
    pub(super) fn start(
        &self,
        case: &str,
        programs: &[(&str, &str)],
        missing: impl FnOnce() -> Option<String>,
    ) -> Result<usize> {
        let missing_here = netns::missing(self.lcore, self.other_lcore, programs);
        if let Some(missing) = missing_here.or_else(missing) {
            bail!("{case}: {missing}");
        }
        Netns::sweep()?;
        self.other_lcore.with_context(|| format!("{case}: two lcores are needed"))
    }
}

/// Connects our near end and the kernel's with the far end, directly or through a relay. The kernels use the congestion
/// control `algorithm`. Returns the interfaces of both near ends.
pub(super) fn connect(
    near: [&Netns; 2],
    relay: Option<&Netns>,
    far: &Netns,
    offloads: bool,
    algorithm: &str,
) -> Result<[String; 2]> {
    const NAMES: [&str; 2] = ["ours", "theirs"];
    for ((name, near), address) in NAMES.into_iter().zip(near).zip(["10.77.0.1/24", "10.78.0.1/24"]) {
        match relay {
            None => pair(name, Some(address), near, far, offloads)?,
            Some(relay) => {
                pair(&format!("{name}a"), None, near, relay, offloads)?;
                pair(&format!("{name}b"), Some(address), relay, far, offloads)?;
            }
        }
    }
    let ends = if relay.is_some() { ["a0", "b1"] } else { ["0", "1"] };
    let [near_ends, far_ends] = ends.map(|end| NAMES.map(|name| format!("{name}{end}")));
    near[1].configure(&near_ends[1], "10.78.0.2/24")?;
    congestion_control(near[1], &near_ends[1], far, [&far_ends[1], &far_ends[0]], algorithm)?;
    Ok(near_ends)
}

/// Measures pairs of windows. `window` measures a window of our side (0) or of the kernel's (1). Each side is first in
/// half of the pairs.
pub(super) fn alternate<W>(
    pairs: usize,
    progress: &Progress,
    mut window: impl FnMut(usize) -> Result<W>,
) -> Result<[Vec<W>; 2]> {
    let mut windows = [Vec::new(), Vec::new()];
    for pair in 0..pairs {
        for turn in [pair % 2, 1 - pair % 2] {
            windows[turn].push(window(turn)?);
        }
        progress.step();
    }
    Ok(windows)
}

/// Creates a veth pair NAME0 and NAME1, and sets the address of its far end.
pub(super) fn pair(
    name: &str,
    address: Option<&str>,
    near: &Netns,
    far: &Netns,
    offloads: bool,
) -> Result<()> {
    let ends = [format!("{name}0"), format!("{name}1")];
    near.veth(&ends[0], far, &ends[1])?;
    for (netns, end) in [near, far].into_iter().zip(&ends) {
        // The kernel must not send packets by itself.
        netns.ip(&["link", "set", end, "mtu", MTU, "addrgenmode", "none"])?;
        netns.ip(&["link", "set", end, "up"])?;
        match offloads {
            true => netns.enable_offloads(end)?,
            false => netns.disable_offloads(end)?,
        }
    }
    address.map_or(Ok(()), |address| far.configure(&ends[1], address))
}

/// Sets the congestion control `name` of the kernel at 10.78.0.2 and of the far kernel. Our stack has CUBIC.
pub(super) fn congestion_control(
    theirs: &Netns,
    interface: &str,
    far: &Netns,
    [to_theirs, to_ours]: [&str; 2],
    name: &str,
) -> Result<()> {
    for (netns, interface, network, address) in [
        (theirs, interface, "10.78.0.0/24", "10.78.0.2"),
        (far, to_theirs, "10.78.0.0/24", "10.78.0.1"),
        (far, to_ours, "10.77.0.0/24", "10.77.0.1"),
    ] {
        netns.ip(&["route", "change", network, "dev", interface, "src", address, "congctl", name])?;
    }
    Ok(())
}
