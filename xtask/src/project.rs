//! The checkout on which a task works.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The workspace: its location, and cargo's metadata.
#[derive(Debug)]
pub(crate) struct Project {
    /// The directory of the workspace's Cargo.toml.
    pub(crate) root: PathBuf,
    /// Cargo's target directory.
    pub(crate) target: PathBuf,
    /// The workspace's own packages, as `cargo metadata` describes them.
    pub(crate) packages: Vec<Value>,
}

impl Project {
    /// Returns the workspace from which this program was built.
    pub(crate) fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask is in a directory")?;
        let output = cargo(root)
            .args(["metadata", "--no-deps", "--format-version=1"])
            .output()
            .context("cannot run cargo metadata")?;
        ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata's JSON")?;
        let target = metadata["target_directory"].as_str().context("cargo names a target directory")?;
        let packages = metadata["packages"].as_array().context("cargo names packages")?;
        Ok(Self { root: root.to_owned(), target: target.into(), packages: packages.clone() })
    }

    /// Returns a cargo command that runs at the root.
    pub(crate) fn cargo(&self) -> Command {
        cargo(&self.root)
    }
}

/// Returns the cargo that runs this program, or the one in PATH.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// Returns whether this runs in CI, where a skip is a failure.
pub(crate) fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|ci| ci == "true")
}
