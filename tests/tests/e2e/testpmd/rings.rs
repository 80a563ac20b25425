//! Every kind of ring of dpdk-testpmd's virtio-user front end: split and packed, in order, with vector instructions,
//! with and without mergeable buffers, with one queue pair and with several.
//!
//! Every commit runs a selection that combines each pair of properties. `OFFCORE_FULL=1` runs all combinations.

use peers::require::note;

use super::{Case, every_pattern, has_packed_vectors};
use crate::switch::{Copies, full};

/// The kinds of ring. DPDK has a separate receive or transmit function for each.
const SPLIT: Kind = Kind { packed: false, in_order: false, vectorized: false };
const SPLIT_IN_ORDER: Kind = Kind { packed: false, in_order: true, vectorized: false };
const SPLIT_VECTORIZED: Kind = Kind { packed: false, in_order: false, vectorized: true };
const PACKED: Kind = Kind { packed: true, in_order: false, vectorized: false };
const PACKED_IN_ORDER: Kind = Kind { packed: true, in_order: true, vectorized: false };
const PACKED_VECTORIZED: Kind = Kind { packed: true, in_order: true, vectorized: true };

#[derive(Clone, Copy)]
struct Kind {
    packed: bool,
    in_order: bool,
    vectorized: bool,
}

/// `(mrg_rxbuf, queue_size, queues, copies)`.
type Shape = (bool, u16, u16, Copies);

/// Runs a kind in each of these shapes, or in all shapes in a full run.
fn in_shapes(kind: Kind, shapes: &[Shape]) {
    let Kind { packed, in_order, vectorized } = kind;
    let run = |&(mrg_rxbuf, queue_size, queues, copies): &Shape| {
        every_pattern(Case { packed, in_order, vectorized, mrg_rxbuf, queue_size, queues, copies });
    };
    if !full() {
        return shapes.iter().for_each(run);
    }
    for mrg_rxbuf in [true, false] {
        for queue_size in [256, 1024] {
            for queues in [1, 2] {
                Copies::ALL.iter().for_each(|&copies| run(&(mrg_rxbuf, queue_size, queues, copies)));
            }
        }
    }
}

use Copies::{Core, Helper};

const SHAPES: [Shape; 6] = [
    (true, 256, 1, Core),
    (true, 1024, 1, Helper),
    (false, 256, 1, Helper),
    (false, 1024, 1, Core),
    (true, 256, 2, Helper),
    (false, 1024, 2, Core),
];
const SHAPES_IN_ORDER: [Shape; 4] =
    [(true, 256, 1, Helper), (false, 1024, 1, Core), (true, 1024, 2, Core), (false, 256, 2, Helper)];

tests! {
    fn split() => in_shapes(SPLIT, &SHAPES);
    fn split_in_order() => in_shapes(SPLIT_IN_ORDER, &SHAPES_IN_ORDER);
}

/// With mergeable buffers DPDK has no vectorised function for split rings.
#[test]
fn split_vectorized() {
    in_shapes(
        SPLIT_VECTORIZED,
        &[(false, 256, 1, Core), (false, 1024, 1, Helper), (false, 256, 2, Helper), (false, 1024, 2, Core)],
    );
}

tests! {
    fn packed() => in_shapes(PACKED, &SHAPES);
    fn packed_in_order() => in_shapes(PACKED_IN_ORDER, &SHAPES_IN_ORDER);
}

/// With mergeable buffers only transmission is vectorised. Without AVX-512 nothing is.
#[test]
fn packed_vectorized() {
    if !has_packed_vectors() {
        note("this CPU has no AVX-512: the path asserted is the one that DPDK takes without");
    }
    in_shapes(
        PACKED_VECTORIZED,
        &[
            (false, 256, 1, Core),
            (false, 1024, 1, Helper),
            (true, 256, 1, Helper),
            (true, 1024, 1, Core),
            (false, 256, 2, Helper),
            (false, 1024, 2, Core),
        ],
    );
}

#[test]
fn eight_queues() {
    every_pattern(Case { queues: 8, ..Case::PLAIN });
    every_pattern(Case { queues: 8, copies: Helper, ..Case::PACKED });
}
