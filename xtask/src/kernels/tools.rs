//! Installs nvrtc and ptxas from PyPI in a Python virtual environment that is created once and kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::guards::TIMED_OUT;
use crate::setup;

/// A wheel with a fixed version and content.
pub(super) struct Wheel {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    sha256: &'static str,
}

/// The compiler. A driver accepts only PTX whose version it supports, so this is the oldest compiler of CUDA 12. It
/// writes PTX 8.0, which drivers accept since CUDA 12.0 (Linux: 525.60.13).
pub(super) const NVRTC: Wheel = Wheel {
    name: "nvidia-cuda-nvrtc-cu12",
    version: "12.0.76",
    sha256: "8dd4458a7d8bf8fd2b01a34a9069856d53a9b4c0af2037b77c12b270daf9c828",
};

/// The assembler of the same version, which rejects the same PTX as those drivers.
const NVCC: Wheel = Wheel {
    name: "nvidia-cuda-nvcc-cu12",
    version: "12.0.76",
    sha256: "c989c1d8f52b4f52016dcdd702d62ae4969d4fc349517eeb9fecae652a3d1388",
};

/// The processor architecture of the wheels.
const ARCHITECTURE: &str = "x86_64";

/// Time limit for pip in seconds. If the server does not answer, pip gives up by itself. This limit is for very slow
/// answers.
const TIMEOUT: &str = "120";

/// Paths of programs and libraries.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) python: PathBuf,
    /// The library libnvrtc.
    pub(super) nvrtc: PathBuf,
    pub(super) ptxas: PathBuf,
}

/// The result of a search for the tools.
pub(super) enum Found {
    Tools(Tools),
    /// The tools are not available, for this reason.
    Missing(String),
}

/// Finds the tools, or installs them below `work`.
pub(super) fn find(work: &Path) -> Result<Found> {
    if std::env::consts::ARCH != ARCHITECTURE {
        return Ok(Found::Missing(format!("the wheels of nvrtc are for {ARCHITECTURE}")));
    }
    let venv = work.join("venv");
    // Written last, so that an interrupted installation is repeated.
    let mark = work.join("wheels.txt");
    let wanted = requirements(&[NVRTC, NVCC]);
    if fs::read_to_string(&mark).is_ok_and(|there| there == wanted)
        && let Ok(tools) = installed(&venv)
    {
        return Ok(Found::Tools(tools));
    }
    if !setup::has_python_venv() {
        return Ok(Found::Missing(
            "no python3 that makes virtual environments: apt-get install python3-venv".to_owned(),
        ));
    }
    fs::create_dir_all(work).with_context(|| format!("cannot make {}", work.display()))?;
    println!("installing {} and {} below {}", NVRTC.name, NVCC.name, work.display());
    let asked = work.join("wanted.txt");
    fs::write(&asked, &wanted).with_context(|| format!("cannot write {}", asked.display()))?;
    if let Some(why) = install(&venv, &asked)? {
        return Ok(Found::Missing(why));
    }
    let tools = installed(&venv)?;
    fs::rename(&asked, &mark).with_context(|| format!("cannot write {}", mark.display()))?;
    Ok(Found::Tools(tools))
}

/// Returns the requirements file for pip, which allows only files with these hashes.
fn requirements(wheels: &[Wheel]) -> String {
    wheels
        .iter()
        .map(|Wheel { name, version, sha256 }| format!("{name}=={version} --hash=sha256:{sha256}\n"))
        .collect()
}

/// Creates the environment again. Returns the reason if the wheels cannot be downloaded. Wheels with other content are
/// an error.
fn install(venv: &Path, requirements: &Path) -> Result<Option<String>> {
    let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv).output();
    let made = made.context("cannot run python3")?;
    if !made.status.success() {
        let said = [made.stdout, made.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let why = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("it does not say why");
        return Ok(Some(format!("python3 -m venv: {}: {why}", made.status)));
    }
    let pip = Command::new("timeout")
        .args(["--kill-after=5", TIMEOUT])
        .arg(python(venv))
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"])
        .args(["--timeout=15", "--retries=1"])
        .args(["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement"])
        .arg(requirements)
        .output()
        .context("cannot run pip")?;
    let said = String::from_utf8_lossy(&pip.stderr);
    let why = match pip.status.code() {
        Some(0) => return Ok(None),
        _ if said.contains("DO NOT MATCH THE HASHES") => bail!("pip: {}", said.trim_end()),
        Some(TIMED_OUT) => format!("it had not ended after {TIMEOUT} s"),
        _ => first_error(&said),
    };
    Ok(Some(format!("pip cannot install {} and {}: {why}", NVRTC.name, NVCC.name)))
}

/// Returns pip's first error, or the cause of a failed connection that precedes it.
fn first_error(said: &str) -> String {
    let error = said.lines().find_map(|line| line.strip_prefix("ERROR: "));
    let error = error.or_else(|| said.lines().last()).unwrap_or("it does not say why");
    let broken = said.lines().rev().find_map(|line| line.split_once("connection broken by "));
    let Some((_, broken)) = broken else { return error.to_owned() };
    // 'NewConnectionError('<... object at 0x7f19>: Failed to establish a new connection: ...')': /simple/...
    let reason = broken.rsplit_once(">: ").map_or(broken, |(_, reason)| reason);
    let reason = reason.split_once(")'").map_or(reason, |(reason, _)| reason);
    format!("{error}; {}", reason.trim_matches(['\'', '"']))
}

fn python(venv: &Path) -> PathBuf {
    venv.join("bin/python3")
}

/// Returns the tools in an environment with the wheels, if its Python still runs.
fn installed(venv: &Path) -> Result<Tools> {
    let python = python(venv);
    let asked = Command::new(&python)
        .args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        .output()
        .with_context(|| format!("cannot run {}", python.display()))?;
    ensure!(asked.status.success(), "{}: {}", python.display(), asked.status);
    let packages = PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim());
    let nvrtc = packages.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    let ptxas = packages.join("nvidia/cuda_nvcc/bin/ptxas");
    for file in [&nvrtc, &ptxas] {
        ensure!(file.is_file(), "the wheels did not bring {}", file.display());
    }
    Ok(Tools { python, nvrtc, ptxas })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_pinned_by_their_content() {
        let text = requirements(&[NVRTC, NVCC]);
        assert_eq!(text.lines().count(), 2);
        for line in text.lines() {
            let (_, hash) = line.split_once("==12.0.76 --hash=sha256:").unwrap();
            assert!(hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{line}");
        }
    }

    #[test]
    fn pip_error_and_reason_are_extracted() {
        let said = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor object \
                    at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/x/\n\
                    ERROR: Could not find a version\nERROR: No\n";
        let reason = "Failed to establish a new connection: [Errno 111] Connection refused";
        assert_eq!(first_error(said), format!("Could not find a version; {reason}"));
        assert_eq!(first_error("WARNING: A\nERROR: Could not find a version\n"), "Could not find a version");
        assert_eq!(first_error("Traceback\nOSError: full\n"), "OSError: full");
        assert_eq!(first_error(""), "it does not say why");
    }

    #[test]
    fn missing_venv_is_an_error() {
        assert!(installed(Path::new("/there/is/no/venv")).is_err());
    }
}
