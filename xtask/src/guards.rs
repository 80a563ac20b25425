//! `cargo xtask guards`: removes each guard from a copy of the sources, one at a time, and checks that its test fails.
//!
//! A guard is a check that protects against another party. [`list`] has the location of each, and the code without it.
//! A test that passes with and without its guard proves nothing. The copy is patched, so that no binary contains a
//! switch for this. (cargo-mutants makes arbitrary changes and reports the changes that no test detects. This task
//! makes listed changes, each of them with the test that must detect it.)

mod list;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::project::Project;
use crate::steps::{Outcome, Steps};

/// Time limit for one test in seconds: without its guard, it may wait forever.
const LIMIT: &str = "300";
/// Time limit for one build in seconds.
const BUILD_LIMIT: &str = "900";
/// `timeout`'s exit status after a timeout.
pub(crate) const TIMED_OUT: i32 = 124;

/// A check, and the test that depends on it.
struct Guard {
    /// The attack or error that the guard prevents.
    name: &'static str,
    file: &'static str,
    /// The guard's code, which occurs exactly once in the file, and its replacement.
    code: &'static str,
    without: &'static str,
    package: &'static str,
    /// The test's executable: `--lib`, or a file or directory of `tests`.
    executable: &'static str,
    test: &'static str,
}

/// Tests the guards whose names contain `only`.
pub(crate) fn run(project: &Project, steps: &mut Steps, only: &str) -> Result<()> {
    let guards: Vec<&Guard> = list::all().filter(|guard| guard.name.contains(only)).collect();
    ensure!(
        !guards.is_empty(),
        "no guard is called '{only}': they are in xtask/src/guards/list.rs and list/shares.rs"
    );
    let sources = Sources::copy(project)?;
    steps.check("guards in place", || {
        let failed = guards.iter().map(|guard| sources.test(guard));
        let mut findings = Vec::new();
        for (guard, ended) in guards.iter().zip(failed) {
            if ended? != Ended::Passed {
                findings.push(format!("{}: {} fails as it is", guard.name, guard.test));
            }
        }
        Ok(Outcome::of(findings))
    });
    for guard in guards {
        steps.check(&format!("without guard: {}", guard.name), || {
            let path = sources.root.join(guard.file);
            let whole = fs::read_to_string(&path).with_context(|| format!("cannot read {}", guard.file))?;
            ensure!(whole.matches(guard.code).count() == 1, "{} has `{}` not once", guard.file, guard.code);
            fs::write(&path, whole.replace(guard.code, guard.without))?;
            let ended = sources.test(guard);
            fs::write(&path, whole)?;
            Ok(match ended? {
                Ended::Failed => Outcome::Passed,
                Ended::Passed => Outcome::Failed(vec![format!("{} passes without it", guard.test)]),
            })
        });
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Passed,
    Failed,
}

/// A copy of the sources with its own target directory.
struct Sources {
    root: PathBuf,
    target: PathBuf,
}

impl Sources {
    fn copy(project: &Project) -> Result<Self> {
        let root = project.target.join("guards/sources");
        if root.exists() {
            fs::remove_dir_all(&root).context("cannot remove the last copy")?;
        }
        let listed = Command::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
            .current_dir(&project.root)
            .output()
            .context("cannot run git ls-files")?;
        ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
        let names = String::from_utf8(listed.stdout).context("a file's name is not UTF-8")?;
        for name in names.split('\0').filter(|name| !name.is_empty()) {
            let (from, to) = (project.root.join(name), root.join(name));
            // The list contains files whose removal is not committed yet.
            if !from.is_file() {
                continue;
            }
            fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {name}"))?;
        }
        Ok(Self { root, target: project.target.join("guards/target") })
    }

    /// Builds and runs a guard's test. Returns how it ended.
    fn test(&self, guard: &Guard) -> Result<Ended> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let executable = match guard.executable {
            "--lib" => vec!["--lib"],
            name => vec!["--test", name],
        };
        let test = |limit, more: [&str; 2]| {
            Command::new("timeout")
                .args(["--kill-after=5", limit])
                .arg(&cargo)
                .args(["test", "--release", "--package", guard.package])
                .args(&executable)
                .args(more)
                .current_dir(&self.root)
                .env("CARGO_TARGET_DIR", &self.target)
                // Settings for many builds with one run each.
                .envs([("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"), ("CARGO_PROFILE_RELEASE_DEBUG", "0")])
                .envs([("CARGO_INCREMENTAL", "1"), ("PROPTEST_RNG_SEED", "1"), ("RUST_BACKTRACE", "0")])
                .output()
                .context("cannot run cargo")
        };
        // A build that takes too long must not count as a failed test.
        let built = test(BUILD_LIMIT, ["--no-run", "--quiet"])?;
        ensure!(built.status.success(), "cargo test --no-run: {}", errors(&built.stderr));
        let output = test(LIMIT, ["--", guard.test])?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.success() {
            ensure!(!out.contains("test result: ok. 0 passed"), "there is no test {}", guard.test);
            return Ok(Ended::Passed);
        }
        // If a test ends its process, no test result is printed, only cargo's message.
        let ran = out.contains("test result: FAILED") || err.contains("test failed, to rerun pass");
        if ran || output.status.code() == Some(TIMED_OUT) {
            return Ok(Ended::Failed);
        }
        bail!("cargo test: {}", errors(&output.stderr))
    }
}

/// Returns the lines that cargo marks as errors.
fn errors(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    text.lines().filter(|line| line.starts_with("error")).collect::<Vec<_>>().join("; ")
}
