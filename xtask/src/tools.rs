//! Programs from the crates registry that are built once and kept below `target/`.

use std::path::PathBuf;

use crate::project::Project;
use crate::setup;

/// A crate with a program of the same name, at a fixed version.
#[derive(Clone, Copy)]
pub(crate) struct Tool {
    name: &'static str,
    version: &'static str,
}

pub(crate) const DEB: Tool = Tool { name: "cargo-deb", version: "3.8.0" };
pub(crate) const DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2" };

/// Returns the path of the program, from PATH or from `target/`. Builds it if necessary.
///
/// # Errors
/// The reason if it is not available.
pub(crate) fn find(project: &Project, Tool { name, version }: Tool) -> Result<PathBuf, String> {
    if let Some(path) = setup::find_program(name) {
        return Ok(path);
    }
    let root = project.target.join("tools").join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if program.is_file() {
        return Ok(program);
    }
    println!("building {name} {version}");
    let mut install = project.cargo();
    install.args(["install", "--quiet", "--locked", "--version", version, name, "--root"]).arg(&root);
    match install.status() {
        Ok(status) if status.success() => Ok(program),
        _ => Err(format!("no {name}: cargo install --locked --version {version} {name}")),
    }
}
