//! Builds the preload library, which is embedded in the binary for `offcore exec`.
//!
//! It is a separate shared object without the standard library, so it needs another profile and other features than the
//! binary. Therefore this script calls cargo with a separate target directory, because the current build holds the lock
//! of the usual one.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// A cancelled thread is unwound through the library. All its symbols are resolved when it is loaded, it is never
/// unloaded, and its constructor runs before all others.
const FLAGS: [&str; 3] =
    ["force-unwind-tables=yes", "link-arg=-Wl,-z,now,-z,nodelete,-z,initfirst", "link-arg=-nostartfiles"];

fn main() {
    for path in ["../offcore-preload", "../offcore-session/src", "../offcore-session/Cargo.toml", "build.rs"]
    {
        println!("cargo::rerun-if-changed={path}");
    }
    let variable = |name: &str| env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}"));
    let out = PathBuf::from(variable("OUT_DIR")).join("preload");
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("../offcore-preload/Cargo.toml");
    let mut cargo = Command::new(variable("CARGO"));
    cargo.args(["rustc", "--lib", "--crate-type=cdylib", "--profile=preload", "--features=interpose"]);
    cargo.arg("--manifest-path").arg(&manifest).arg("--target-dir").arg(&out).args(["--quiet", "--"]);
    for argument in FLAGS {
        cargo.args(["-C", argument]);
    }
    // Settings of this build, such as a sanitizer, do not apply to the library.
    for name in [
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_BUILD_TARGET",
    ] {
        cargo.env_remove(name);
    }
    let status = cargo.status().unwrap_or_else(|error| panic!("{cargo:?}: {error}"));
    assert!(status.success(), "{cargo:?}: {status}");
    let library = out.join("preload/liboffcore_preload.so");
    println!("cargo::rustc-env=OFFCORE_PRELOAD={}", library.display());
    name_commit();
}

/// Passes the commit to the benchmarks, if this is a clone.
fn name_commit() {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    println!("cargo::rerun-if-changed=..");
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        let changed = git(&["--no-optional-locks", "status", "--porcelain", "--untracked-files=no", ".."])
            .is_some_and(|all| !all.is_empty());
        println!("cargo::rustc-env=OFFCORE_COMMIT={commit}{}", if changed { "+changed" } else { "" });
    }
}
