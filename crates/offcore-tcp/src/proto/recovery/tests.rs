//! Tests of recovery, by subject.

mod bbr;
mod link;
mod property;
mod rfc;
mod simulation;

use super::*;

#[test]
fn recovery_state_fits_336_bytes() {
    let size = size_of::<Recovery>();
    assert!(size <= 336, "{size}");
    assert_eq!(size_of::<runs::Run>(), 16);
}
