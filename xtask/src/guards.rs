//! `cargo xtask guards`: takes each guard out of a copy of the sources, one at a time, and sees its test fail.
//!
//! A guard is a check that holds another party off; [`LIST`] says where each is, and what is there without it. A test that
//! passes with and without its guard proves nothing. The copy is patched, so that no switch for this is in anybody's
//! binary. (cargo-mutants changes what it likes, and tells which changes no test notices; here is said which change which
//! test has to notice.)

mod list;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::project::Project;
use crate::steps::{Outcome, Steps};
use list::LIST;

/// How long one test may take, in seconds: without its guard, it may wait for ever.
const LIMIT: &str = "300";
/// The same of one build.
const BUILD_LIMIT: &str = "900";
/// `timeout`'s exit status when the time was up.
const TIMED_OUT: i32 = 124;

/// A check, and the test that needs it.
struct Guard {
    /// What it holds off.
    name: &'static str,
    file: &'static str,
    /// The code, which is there once, and what takes its place.
    code: &'static str,
    without: &'static str,
    package: &'static str,
    /// The test's executable: `--lib`, or a file or directory of `tests`.
    executable: &'static str,
    test: &'static str,
}

/// Looks at the guards whose names contain `only`; whether all tests failed that should.
pub(crate) fn run(project: &Project, steps: &mut Steps, only: &str) -> Result<()> {
    let guards: Vec<&Guard> = LIST.iter().filter(|guard| guard.name.contains(only)).collect();
    ensure!(!guards.is_empty(), "no guard is called '{only}': xtask/src/guards/list.rs has them");
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

/// A copy of the sources, with a target directory of its own.
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
            // What was removed and not yet committed is listed.
            if !from.is_file() {
                continue;
            }
            fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {name}"))?;
        }
        Ok(Self { root, target: project.target.join("guards/target") })
    }

    /// Builds and runs a guard's test; how it ended.
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
                // Built a lot and run once.
                .envs([("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"), ("CARGO_PROFILE_RELEASE_DEBUG", "0")])
                .envs([("CARGO_INCREMENTAL", "1"), ("PROPTEST_RNG_SEED", "1"), ("RUST_BACKTRACE", "0")])
                .output()
                .context("cannot run cargo")
        };
        // A build that takes long is no guard that is missed.
        let built = test(BUILD_LIMIT, ["--no-run", "--quiet"])?;
        ensure!(built.status.success(), "cargo test --no-run: {}", errors(&built.stderr));
        let output = test(LIMIT, ["--", guard.test])?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.success() {
            ensure!(!out.contains("test result: ok. 0 passed"), "there is no test {}", guard.test);
            return Ok(Ended::Passed);
        }
        // Of a test that ends its process there is no result, but cargo's word.
        let ran = out.contains("test result: FAILED") || err.contains("test failed, to rerun pass");
        if ran || output.status.code() == Some(TIMED_OUT) {
            return Ok(Ended::Failed);
        }
        bail!("cargo test: {}", errors(&output.stderr))
    }
}

/// What cargo calls errors.
fn errors(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    text.lines().filter(|line| line.starts_with("error")).collect::<Vec<_>>().join("; ")
}
