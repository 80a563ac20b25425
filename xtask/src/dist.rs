//! `cargo xtask dist`: the Debian package, a tarball, and the files of a container image, in `target/dist`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::project::Project;
use crate::tools;

/// Completion scripts: the shell, and the name of its file.
const COMPLETIONS: [(&str, &str); 3] = [("bash", "offcore"), ("zsh", "_offcore"), ("fish", "offcore.fish")];

/// Builds the packages. With `check`, the Debian package is installed into an empty directory, inspected, and removed.
pub(crate) fn run(project: &Project, check: bool) -> Result<()> {
    let dist = project.target.join("dist");
    let release = project.target.join("release");
    for directory in ["man", "completions"] {
        let directory = dist.join(directory);
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        fs::create_dir_all(&directory)?;
    }
    run_checked(project.cargo().args(["build", "--release", "--package", "offcore"]))?;
    let offcore = release.join("offcore");
    run_checked(Command::new(&offcore).arg("man").arg(dist.join("man")))?;
    for (shell, file) in COMPLETIONS {
        let script = Command::new(&offcore).args(["completions", shell]).output()?;
        ensure!(script.status.success(), "offcore completions {shell}: {}", script.status);
        fs::write(dist.join("completions").join(file), script.stdout)?;
    }
    let package = dist.join("offcore.deb");
    let cargo_deb = tools::find(project, tools::DEB).map_err(anyhow::Error::msg)?;
    let mut deb = Command::new(cargo_deb);
    deb.current_dir(&project.root).args(["--no-build", "--package", "offcore", "--output"]).arg(&package);
    run_checked(&mut deb)?;
    let tarball = dist.join("offcore.tar.gz");
    let root = dist.join("root");
    unpack(&package, &root)?;
    run_checked(Command::new("tar").arg("-C").arg(&root).arg("-czf").arg(&tarball).args([
        "--owner=0",
        "--group=0",
        "usr",
    ]))?;
    fs::copy(project.root.join("packaging/Containerfile"), dist.join("Containerfile"))?;
    println!("{}\n{}\n{}", package.display(), tarball.display(), dist.join("Containerfile").display());
    if check { inspect(&package, &root, &dist) } else { Ok(()) }
}

/// Unpacks the package into an empty directory.
fn unpack(package: &Path, root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root)?;
    }
    fs::create_dir_all(root)?;
    run_checked(Command::new("dpkg-deb").arg("-x").arg(package).arg(root))
}

/// Checks the contents of the package, its unit, and that a removal leaves nothing.
fn inspect(package: &Path, root: &Path, dist: &Path) -> Result<()> {
    let offcore = root.join("usr/bin/offcore");
    run_checked(Command::new(&offcore).arg("--version"))?;
    for file in fs::read_dir(root.join("usr/share/doc/offcore/examples"))? {
        let file = file?.path();
        // Users and devices of an example need not exist here; its syntax is right.
        let checked = Command::new(&offcore).arg("check").arg(&file).output()?;
        let text = String::from_utf8_lossy(&checked.stderr);
        let has_wrong_key = text.contains("unknown key") || text.contains("is missing");
        ensure!(!has_wrong_key, "{}: {text}", file.display());
    }
    ensure!(
        root.join("usr/share/man/man1/offcore-run.1.gz").is_file(),
        "the package has no man page of offcore run"
    );
    let verified = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(format!("--root={}", root.display()))
        .arg("offcore@test.service")
        .output()
        .context("systemd-analyze")?;
    ensure!(verified.status.success(), "the unit: {}", String::from_utf8_lossy(&verified.stderr));
    let installed = dist.join("installed");
    if installed.exists() {
        fs::remove_dir_all(&installed)?;
    }
    for directory in ["info", "updates"] {
        fs::create_dir_all(installed.join("var/lib/dpkg").join(directory))?;
    }
    for file in ["status", "available"] {
        fs::write(installed.join("var/lib/dpkg").join(file), "")?;
    }
    let dpkg = || {
        let mut dpkg = Command::new("dpkg");
        dpkg.arg(format!("--root={}", installed.display()));
        dpkg.args(["--force-not-root", "--force-depends", "--force-script-chrootless"]);
        dpkg
    };
    run_checked(dpkg().arg("--install").arg(package))?;
    ensure!(installed.join("usr/bin/offcore").is_file(), "dpkg has not installed the program");
    run_checked(dpkg().args(["--purge", "offcore"]))?;
    let left = files(&installed, &|path| {
        !path.starts_with(installed.join("var")) && !path.starts_with(installed.join("etc"))
    })?;
    ensure!(left.is_empty(), "the removed package leaves {left:?}");
    println!("the package installs, its unit is valid, and its removal leaves nothing");
    Ok(())
}

/// Returns the files below a directory that `wanted` accepts.
fn files(directory: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files(&path, wanted)?);
        } else if wanted(&path) {
            found.push(path);
        }
    }
    Ok(found)
}

fn run_checked(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
