//! The steps of `cargo xtask test` and `cargo xtask ci`.

use std::process::Command;

use anyhow::Result;

use crate::executables::Executable;
use crate::project::{Project, in_ci};
use crate::steps::{Outcome, Steps};
use crate::{counts, dependencies, guards, kernels, lint, nightly, setup};

/// The directory of the end-to-end tests, which run last.
const PEER_TESTS: &str = "tests/";

/// Number of concurrent end-to-end tests: most of them wait for a core or for both.
const PEER_THREADS: &str = "6";

/// Number of concurrent executables of other tests: most of them wait more than they compute.
const JOBS: usize = 2;

/// Default duration of a fuzz target in seconds.
pub(crate) const FUZZ_SECONDS: u32 = 300;

/// The selected steps.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Suite {
    /// Every test, including long forms if `full` is set.
    Test {
        /// Whether soak tests and long forms run, too.
        full: bool,
    },
    /// Every test, and all other checks for a commit.
    Ci,
}

/// Runs the suite. Returns whether it passed.
pub(crate) fn run(project: &Project, suite: Suite) -> Result<bool> {
    let full = matches!(suite, Suite::Test { full: true });
    let mut steps = Steps::new();
    steps.check("setup", || {
        let missing = setup::run()?;
        missing.iter().for_each(|line| println!("SKIP: {line}"));
        Ok(if in_ci() && !missing.is_empty() { Outcome::Failed(missing) } else { Outcome::Passed })
    });
    // Determined here, because setup may have installed the library.
    let features = setup::features();
    if matches!(suite, Suite::Ci) {
        checks(project, &mut steps, features);
    }
    tests(project, &mut steps, features, full)?;
    Ok(steps.finish(in_ci()))
}

/// Runs the checks for a commit, in addition to its tests.
fn checks(project: &Project, steps: &mut Steps, features: &[&str]) {
    steps.command("format", project.cargo().args(["fmt", "--all", "--check"]));
    let clippy = ["clippy", "--workspace", "--all-targets"];
    steps.command("clippy", project.cargo().args(clippy).args(features).args(["--", "-D", "warnings"]));
    steps.command(
        "rustdoc",
        project
            .cargo()
            .args(["doc", "--workspace", "--no-deps"])
            .args(features)
            .env("RUSTDOCFLAGS", "-D warnings"),
    );
    steps.check("kernels", || kernels::step(project));
}

fn tests(project: &Project, steps: &mut Steps, features: &[&str], full: bool) -> Result<()> {
    // A commit's property tests use the same cases everywhere. A full run tests new ones.
    let mode = if full { ("OFFCORE_FULL", "1") } else { ("PROPTEST_RNG_SEED", "1") };
    let cargo = |args: &[&str]| -> Command {
        let mut command = project.cargo();
        command.args(args).envs([mode]);
        command
    };
    steps.check("lints", || {
        let found = lint::run(project)?;
        Ok(Outcome::of(found.iter().map(ToString::to_string).collect()))
    });
    steps.check("dependencies", || dependencies::check(project));
    // One build is used for everything: the tests, the binary for the peers, and the instruction counts.
    let test = ["test", "--release", "--workspace"];
    let no_run = ["--no-run", "--message-format=json-render-diagnostics"];
    let built = steps.build("build", cargo(&test).args(no_run).args(features));
    let (peers, ours): (Vec<_>, Vec<_>) =
        built.into_iter().partition(|built| built.name.starts_with(PEER_TESTS));
    let programs = |executables: Vec<Executable>| -> Vec<(String, Command)> {
        let program = |executable: Executable| {
            let mut command = executable.command();
            command.envs([mode]);
            (executable.name, command)
        };
        executables.into_iter().map(program).collect()
    };
    // That build contains test switches, unlike a user's build.
    steps.command("check offcore", &mut cargo(&["check", "--package=offcore"]));
    steps.programs("tests", programs(ours), JOBS);
    steps.tests("documented examples", cargo(&test).args(["--doc", "--no-fail-fast"]).args(features));
    // Runs checks that only debug builds have: one owner for each packet buffer, and arithmetic without overflow.
    let small = [
        "--package=offcore-mem",
        "--package=offcore-ring",
        "--package=offcore-session",
        "--package=offcore-dma",
    ];
    steps.tests("tests with debug assertions", cargo(&["test", "--no-fail-fast"]).args(small));
    steps.tests(
        "loom models",
        // Optimising loom would take longer than its models run.
        cargo(&["test", "--package=offcore-ring", "--package=offcore-session", "--lib", "loom"])
            .env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", project.target.join("loom")),
    );
    let mut peers = programs(peers);
    for (_, command) in &mut peers {
        command.env("RUST_TEST_THREADS", PEER_THREADS);
    }
    steps.programs("end to end", peers, 1);
    if full {
        dependencies::deny(project, steps);
        nightly::run(project, steps);
        guards::run(project, steps, "")?;
        fuzz(project, steps, FUZZ_SECONDS);
    }
    steps.check("instruction counts", || {
        if setup::find_program("valgrind").is_none() {
            return Ok(Outcome::Skipped("no valgrind: apt-get install valgrind".to_owned()));
        }
        counts::compare(project).map(Outcome::of)
    });
    Ok(())
}

/// Runs only the guards whose names contain `only`. Returns whether each test fails without its guard.
pub(crate) fn guards_alone(project: &Project, only: &str) -> Result<bool> {
    let mut steps = Steps::new();
    guards::run(project, &mut steps, only)?;
    Ok(steps.finish(in_ci()))
}

/// Runs only the fuzz targets, each for this number of seconds. Returns whether all passed.
pub(crate) fn fuzz_alone(project: &Project, seconds: u32) -> bool {
    let mut steps = Steps::new();
    fuzz(project, &mut steps, seconds);
    steps.finish(in_ci())
}

/// Runs each fuzz target for a while. Its corpus is also replayed by the crates' own tests, on stable, in every run.
fn fuzz(project: &Project, steps: &mut Steps, seconds: u32) {
    let dir = project.root.join("fuzz/fuzz_targets");
    let mut targets: Vec<String> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".rs").map(str::to_owned))
        .collect();
    targets.sort();
    for target in targets {
        // The `cargo` in PATH, because the cargo that runs this program has a fixed toolchain.
        let cargo_fuzz = || {
            let mut command = Command::new("cargo");
            command.args(["+nightly", "fuzz"]).current_dir(&project.root);
            command
        };
        let name = format!("fuzz {target}");
        if !cargo_fuzz().arg("--version").output().is_ok_and(|output| output.status.success()) {
            let why = "no cargo fuzz: rustup toolchain install nightly; cargo install cargo-fuzz".to_owned();
            steps.check(&name, || Ok(Outcome::Skipped(why)));
            continue;
        }
        // New inputs go to the first directory. The corpus in the tree is only read.
        let found = project.target.join("fuzz-corpus").join(&target);
        let kept = project.root.join("fuzz/corpus").join(&target);
        let limit = format!("-max_total_time={seconds}");
        match std::fs::create_dir_all(&found) {
            Ok(()) => {
                let mut run = cargo_fuzz();
                run.args(["run", &target]).args([found, kept]).args(["--", &limit]);
                steps.command(&name, &mut run);
            }
            Err(error) => steps.check(&name, || Err(error.into())),
        }
    }
}
