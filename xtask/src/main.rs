//! Development tasks for Offcore: `cargo xtask setup|peers|test|ci|lint|guards|counts|fuzz|dist|kernels`.

mod counts;
mod dependencies;
mod dist;
mod executables;
mod guards;
mod kernels;
mod lint;
mod nightly;
mod peers;
mod project;
mod setup;
mod steps;
mod suite;
mod tools;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use project::{Project, in_ci};
use steps::Outcome;
use suite::Suite;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, checks and measures Offcore while it is developed")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install the programs that tests need and reserve hugepages; without root, list missing ones
    Setup,
    /// Build the peers of benchmarks
    Peers {
        /// DPDK from Debian's source package, for this machine's CPU; kept in the user's cache directory
        #[arg(long, required = true)]
        native: bool,
    },
    /// Run all tests that a commit must pass
    Test {
        /// Also run soaks and the long variants of tests
        #[arg(long)]
        full: bool,
    },
    /// Run all steps of CI: format, clippy, rustdoc, kernels, then `test`
    Ci,
    /// Check the sources against the project's own rules
    Lint,
    /// Remove each guard against other parties from a copy of the sources, and check that its test fails
    Guards {
        /// Only guards whose names contain this
        #[arg(default_value = "")]
        only: String,
    },
    /// Count the instructions of the hot functions and compare them with counts.toml
    Counts {
        /// Write the counts to counts.toml
        #[arg(long)]
        update: bool,
    },
    /// Run each fuzz target with AddressSanitizer: needs a nightly toolchain and cargo-fuzz
    Fuzz {
        /// Seconds per target
        #[arg(long, default_value_t = suite::FUZZ_SECONDS)]
        seconds: u32,
    },
    /// Build a Debian package, a tarball, and the files of a container image in target/dist
    Dist {
        /// Also install the package into an empty directory, check its unit, and remove it
        #[arg(long)]
        check: bool,
    },
    /// Compile the GPU kernels and compare the PTX with the checked-in file
    Kernels {
        /// Write the PTX to kernels.ptx
        #[arg(long)]
        update: bool,
    },
}

fn main() -> ExitCode {
    match run(&Args::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a task. Returns whether all its checks passed.
fn run(task: &Task) -> Result<bool> {
    let project = Project::find()?;
    match task {
        Task::Setup => setup::run().map(|missing| {
            missing.iter().for_each(|line| println!("SKIP: {line}"));
            true
        }),
        Task::Peers { .. } => peers::native().map(|()| true),
        Task::Test { full } => suite::run(&project, Suite::Test { full: *full }),
        Task::Ci => suite::run(&project, Suite::Ci),
        Task::Fuzz { seconds } => Ok(suite::fuzz_alone(&project, *seconds)),
        Task::Lint => {
            let found = lint::run(&project)?;
            found.iter().for_each(|finding| println!("{finding}"));
            println!("{} findings", found.len());
            Ok(found.is_empty())
        }
        Task::Guards { only } => suite::guards_alone(&project, only),
        Task::Counts { update: true } => counts::update(&project).map(|()| true),
        Task::Counts { update: false } => {
            let worse = counts::compare(&project)?;
            worse.iter().for_each(|line| println!("{line}"));
            Ok(worse.is_empty())
        }
        Task::Dist { check } => dist::run(&project, *check).map(|()| true),
        Task::Kernels { update } => Ok(match kernels::run(&project, *update)? {
            Outcome::Passed => true,
            Outcome::Failed(findings) => {
                findings.iter().for_each(|finding| println!("{finding}"));
                false
            }
            Outcome::Skipped(why) => {
                println!("SKIP: {why}");
                !update && !in_ci()
            }
        }),
    }
}
