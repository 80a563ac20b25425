//! nvrtc and ptxas from PyPI, in a Python virtual environment that is made once and kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::setup;

/// A wheel of a fixed version and content.
pub(super) struct Wheel {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    sha256: &'static str,
}

/// The compiler. A driver takes no PTX of a version newer than itself, so this is the oldest of CUDA 12: it writes
/// PTX 8.0, which drivers take from CUDA 12.0 on (Linux: 525.60.13).
pub(super) const NVRTC: Wheel = Wheel {
    name: "nvidia-cuda-nvrtc-cu12",
    version: "12.0.76",
    sha256: "8dd4458a7d8bf8fd2b01a34a9069856d53a9b4c0af2037b77c12b270daf9c828",
};

/// The assembler of the same version, which refuses PTX that those drivers would.
const NVCC: Wheel = Wheel {
    name: "nvidia-cuda-nvcc-cu12",
    version: "12.0.76",
    sha256: "c989c1d8f52b4f52016dcdd702d62ae4969d4fc349517eeb9fecae652a3d1388",
};

/// The processors that the wheels are for.
const ARCHITECTURE: &str = "x86_64";

/// Programs and libraries, by path.
#[derive(Debug)]
pub(super) struct Tools {
    /// A Python of its own.
    pub(super) python: PathBuf,
    /// The library libnvrtc.
    pub(super) nvrtc: PathBuf,
    /// The program ptxas.
    pub(super) ptxas: PathBuf,
}

/// Whether there are tools.
pub(super) enum Found {
    Tools(Tools),
    /// There are none, for this reason.
    Missing(String),
}

/// The tools, which are installed below `work` unless they are there.
pub(super) fn find(work: &Path) -> Result<Found> {
    if std::env::consts::ARCH != ARCHITECTURE {
        return Ok(Found::Missing(format!("the wheels of nvrtc are for {ARCHITECTURE}")));
    }
    let venv = work.join("venv");
    // Written last, so that what was interrupted is made again.
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

/// The wheels as pip reads them: nothing but these very files.
fn requirements(wheels: &[Wheel]) -> String {
    wheels
        .iter()
        .map(|Wheel { name, version, sha256 }| format!("{name}=={version} --hash=sha256:{sha256}\n"))
        .collect()
}

/// Makes the environment anew; returns why the wheels cannot be had, where they cannot.
fn install(venv: &Path, requirements: &Path) -> Result<Option<String>> {
    let made = Command::new("python3").args(["-m", "venv", "--clear"]).arg(venv).output();
    let made = made.context("cannot run python3")?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "python3 -m venv: {}: {}", made.status, said.trim_end());
    let got = Command::new(python(venv))
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=2"])
        .args(["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement"])
        .arg(requirements)
        .output()
        .context("cannot run pip")?;
    if got.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&got.stderr);
    if said.contains("DO NOT MATCH THE HASHES") {
        bail!("pip: {}", said.trim_end());
    }
    Ok(Some(format!("pip cannot install {} and {}: {}", NVRTC.name, NVCC.name, first_error(&said))))
}

/// What pip says first, apart from retries.
fn first_error(said: &str) -> &str {
    let error = said.lines().find_map(|line| line.strip_prefix("ERROR: "));
    error.or_else(|| said.lines().last()).unwrap_or("it does not say why")
}

fn python(venv: &Path) -> PathBuf {
    venv.join("bin/python3")
}

/// The tools in an environment that has the wheels, and whose Python still runs.
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
    fn pips_error_is_told_from_its_retries() {
        let said = "WARNING: Retrying (Retry(total=0)) after\nERROR: Could not find a version\nERROR: No\n";
        assert_eq!(first_error(said), "Could not find a version");
        assert_eq!(first_error("Traceback\nOSError: full\n"), "OSError: full");
        assert_eq!(first_error(""), "it does not say why");
    }

    #[test]
    fn an_environment_that_is_not_there_has_no_tools() {
        assert!(installed(Path::new("/there/is/no/venv")).is_err());
    }
}
