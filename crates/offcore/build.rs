//! Tells the binary where a DPDK of one's own is, when the feature `dpdk` asks for DPDK, and what was checked out when it
//! was built, for reports: OFFCORE_COMMIT, where there is git.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // From offcore-dpdk's build script.
    if let Ok(rpath) = std::env::var("DEP_OFFCORE_DPDK_RPATH") {
        println!("cargo:rustc-link-arg={rpath}");
    }
    let git = |args: &[&str]| -> Option<String> {
        let output = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        println!("cargo:rustc-env=OFFCORE_COMMIT={commit}");
    }
}
