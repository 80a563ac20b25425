//! Applications overwrite all memory that they share with the stack with nonsense, as described in
//! `tests/programs/scribble.c`.

use peers::programs::lines;
use peers::require;

use super::{Beside, NEEDS, full, served, until};

#[test]
fn corrupted_session_memory_harms_only_owner() {
    let Some(()) = require(&NEEDS) else { return };
    let mut beside = Beside::new("scribbled");
    let seconds = if full() { "60" } else { "5" };
    let mut scribbler = beside.stack.start("scribble", &[], &[seconds]);
    while scribbler.exit_status(std::time::Duration::ZERO).is_none() {
        beside.goes_on();
    }
    let said = lines(scribbler).unwrap();
    let number = |label: &str| {
        let line =
            said.iter().find_map(|line| line.strip_prefix(label)).unwrap_or_else(|| panic!("{said:?}"));
        line.trim_start_matches(": ").parse::<u32>().unwrap()
    };
    assert!(number("generations") >= 5, "{said:?}");
    assert_eq!(number("without what was to be spoiled"), 0, "{said:?}");
    let misused = || served(&beside.stack.stack, "misused");
    until("what means nothing to be counted", || misused() > 0, || beside.stack.stack.tail());
    beside.stop();
}
