//! Pairs of links that alternate. After half of the blocks both links are opened again, each with the packet buffers of
//! the other one. The ratio of two identical links is the noise floor.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context as _, Result};

use super::link::{Link, Load, Moved, Traffic};
use super::{Options, Rig};
use crate::method::alternate::Alternating;
use crate::method::copier::Setup;
use crate::report::progress::Progress;
use crate::report::sample::Bounds;

/// Number of parts in which a cell is measured.
const PARTS: usize = 2;

/// Result of a cell.
pub(super) struct Pair {
    pub(super) turns: Alternating<Rc<RefCell<Link>>>,
    /// Data moved on each link.
    pub(super) moved: [Moved; 2],
}

/// Measures two links with each of the loads. The ratio shows the effect of their differences.
pub(super) fn measure(
    rig: &mut Rig,
    wanted: [(Setup, Traffic); 2],
    loads: &[Load],
    options: &Options,
    progress: &Progress,
) -> Result<Vec<Pair>> {
    progress.say("tcp, opening connections");
    let pools = [rig.pools[0], rig.pools[1]];
    let open = |index: usize, part: usize| {
        let (setup, traffic) = wanted[index];
        Link::open(setup, traffic, pools[index ^ part])
    };
    let links = [open(0, 0)?, open(1, 0)?].map(|link| Rc::new(RefCell::new(link)));
    let mut pairs: Vec<Pair> = loads
        .iter()
        .map(|_| {
            let mut turns = Alternating::new();
            links.iter().for_each(|link| turns.add(Rc::clone(link)));
            Pair { turns, moved: [Moved::default(); 2] }
        })
        .collect();
    for part in 0..PARTS {
        for (index, link) in links.iter().enumerate().filter(|_| part > 0) {
            *link.borrow_mut() = open(index, part)?;
        }
        for (pair, &load) in pairs.iter_mut().zip(loads) {
            let Load { temperature, chunk } = load;
            let what = format!("{}, {temperature}, chunks of {chunk} bytes", wanted[0].1.side);
            progress.say(&format!("tcp, two links, {what}"));
            pair.turns.renew().for_each(|link| link.borrow_mut().set(load));
            let schedule = options.schedule(load, wanted[0].1.segment).part_of(PARTS);
            pair.turns.measure(schedule, &rig.other, &mut rig.clock, progress).context(what)?;
            for (sum, link) in pair.moved.iter_mut().zip(&links) {
                *sum += link.borrow().moved();
            }
        }
    }
    Ok(pairs)
}

/// Measures the noise floor of each load: the core against itself.
pub(super) fn noise(
    rig: &mut Rig,
    traffic: Traffic,
    loads: &[Load],
    options: &Options,
    progress: &Progress,
) -> Result<Vec<Option<Bounds>>> {
    let pairs = measure(rig, [(Setup::CPU, traffic); 2], loads, options, progress)?;
    Ok(pairs.iter().map(|pair| pair.turns.noise()).collect())
}
