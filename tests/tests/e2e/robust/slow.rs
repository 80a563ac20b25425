//! Slow applications beside a fast one: `tests/programs/slow.c`.

use peers::programs::lines;
use peers::require;

use super::{Beside, NEEDS, TIMEOUT};

#[test]
fn unread_streams_block_no_neighbour() {
    let Some(()) = require(&NEEDS) else { return };
    let mut beside = Beside::new("never");
    let mut slow = beside.stack.start("slow", &[], &["never"]);
    slow.wait_for(0, TIMEOUT, "full FIFOs", |text| text.contains("full: ").then_some(())).unwrap();
    // The slow application's FIFOs are full, and its peer keeps sending. Only the neighbour makes progress now.
    for _ in 0..5 {
        beside.goes_on();
    }
    slow.write_line("go on").unwrap();
    let said = lines(slow).unwrap();
    let expected =
        ["is all there: no", "is something there: yes", "full: none", "the peer has all: yes", "empty: OUT"];
    assert_eq!(said, expected);
    beside.stop();
}

#[test]
fn slow_application_blocks_no_neighbour() {
    let Some(()) = require(&NEEDS) else { return };
    let mut beside = Beside::new("slow");
    let mut slow = beside.stack.start("slow", &[], &["little"]);
    let mut turns = 0;
    while slow.exit_status(std::time::Duration::ZERO).is_none() {
        beside.goes_on();
        turns += 1;
    }
    assert_eq!(lines(slow).unwrap(), [""; 0]);
    assert!(turns >= 5, "the neighbour has made {turns} turns in 4 s");
    beside.stop();
}
