//! Miri on tests of the crates that share memory with other threads and processes.

use std::process::Command;

use crate::project::Project;
use crate::steps::{Outcome, Steps};

/// Crates, and the parts of their unit tests that Miri can run in minutes.
const MIRI: [(&str, &[&str]); 3] = [
    ("offcore-mem", &["device::", "guest::", "lend::", "mapping::", "pool::"]),
    (
        "offcore-ring",
        &["doubles_are", "packed::tests::driver_side", "split::tests::a_chain", "split::tests::a_hostile"],
    ),
    ("offcore-session", &["app::", "arena::"]),
];

/// Runs the listed tests under Miri. Tests that Miri cannot run are marked as ignored.
pub(crate) fn run(project: &Project, steps: &mut Steps) {
    let is_there = nightly(project).args(["miri", "--version"]).output();
    for (package, parts) in MIRI {
        let name = format!("miri {package}");
        if !is_there.as_ref().is_ok_and(|output| output.status.success()) {
            let why = "no Miri: rustup component add miri rust-src --toolchain nightly".to_owned();
            steps.check(&name, || Ok(Outcome::Skipped(why)));
            continue;
        }
        let mut test = nightly(project);
        test.args(["miri", "test", "--no-fail-fast", "--lib", "--package", package, "--"]).args(parts);
        // Files stand for memfds. A backtrace of each expected panic would take minutes.
        test.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance")
            .env("RUST_BACKTRACE", "0")
            .env("CARGO_TARGET_DIR", project.target.join("miri"));
        steps.chosen_tests(&name, &mut test);
    }
}

/// Runs `cargo` of PATH, because the cargo that runs this program has a fixed toolchain.
fn nightly(project: &Project) -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly").current_dir(&project.root);
    command
}
