//! Miri and ThreadSanitizer on tests of the crates that share memory with other threads and processes. Both need a
//! nightly toolchain.

use std::path::PathBuf;
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

/// Runs both.
pub(crate) fn run(project: &Project, steps: &mut Steps) {
    miri(project, steps);
    thread_sanitizer(project, steps);
}

/// Runs the tests with two threads that share memory. `--cfg tsan` selects code without assembly, because the
/// sanitizer sees no accesses of assembly. The standard library is built, too: otherwise its synchronization is not
/// seen.
fn thread_sanitizer(project: &Project, steps: &mut Steps) {
    const NAME: &str = "thread sanitizer";
    let sysroot = nightly_rustc(project).args(["--print", "sysroot"]).output();
    let sysroot = sysroot.ok().filter(|output| output.status.success());
    let sysroot = sysroot.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    if !sysroot.is_some_and(|sysroot| sysroot.join("lib/rustlib/src/rust/library").is_dir()) {
        let why = "no sources: rustup component add rust-src --toolchain nightly".to_owned();
        steps.check(NAME, || Ok(Outcome::Skipped(why)));
        return;
    }
    let mut test = nightly(project);
    test.args(["test", "-Zbuild-std", "--target", "x86_64-unknown-linux-gnu", "--no-fail-fast"])
        .args(["--package", "offcore-ring", "--package", "offcore-session", "--test", "two_threads"])
        .env("RUSTFLAGS", "-Zsanitizer=thread --cfg tsan")
        .env("CARGO_TARGET_DIR", project.target.join("tsan"));
    steps.chosen_tests(NAME, &mut test);
}

/// Runs the listed tests under Miri. Tests that Miri cannot run are marked as ignored.
fn miri(project: &Project, steps: &mut Steps) {
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
        // Files stand for memfds. Pools are never freed. A backtrace of each expected panic would take minutes.
        test.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks")
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

fn nightly_rustc(project: &Project) -> Command {
    let mut command = Command::new("rustc");
    command.arg("+nightly").current_dir(&project.root);
    command
}
