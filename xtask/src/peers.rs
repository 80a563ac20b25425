//! `cargo xtask peers --native`: builds DPDK from Debian's source package for the CPU of this machine.
//!
//! Debian compiles DPDK for any x86-64-v2 CPU. Performance-critical deployments compile it for their own CPU, so
//! benchmarks compare with such a build. It has the version of the installed package, is kept in the user's cache
//! directory, and is built again when the version or the CPU changes.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::setup::{self, Peer};

/// Build requirements in addition to DPDK's own development package.
const TOOLS: [Peer; 6] = [
    Peer::program("dpkg-dev", "dpkg-source"),
    Peer::program("gcc", "gcc"),
    Peer::program("meson", "meson"),
    Peer::program("ninja-build", "ninja"),
    Peer::program("pkg-config", "pkg-config"),
    Peer::file("python3-pyelftools", "/usr/lib/python3/dist-packages/elftools"),
];

/// Drivers for testpmd, the feature `dpdk`, and offcore-dpdk's tests.
const DRIVERS: &str =
    "bus/pci,bus/vdev,mempool/ring,net/af_packet,net/null,net/ring,net/tap,net/vhost,net/virtio,dma/skeleton";

/// Libraries that these drivers do not need.
const WITHOUT: &str =
    "bitratestats,flow_classify,gpudev,jobstats,kni,latencystats,node,pipeline,port,power,table";

/// The signing key of Debian's archive.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Directories of Debian's own programs: meson must find Debian's Python.
const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// A file in the build that identifies its version and CPU. It is written last.
const MARK: &str = "offcore-build.txt";

/// Builds DPDK unless a current build exists, and prints how to use it.
pub(crate) fn native() -> Result<()> {
    let version = packaged_version()?;
    let cpu = Cpu::check_machine_flags()?;
    let prefix = cache()?.join(format!("dpdk-{version}-{}", cpu.name));
    let wanted = format!("dpdk {version}\ndrivers {DRIVERS}\nwithout {WITHOUT}\n{}\n", cpu.flags);
    let mark = prefix.join(MARK);
    if fs::read_to_string(&mark).is_ok_and(|made| made == wanted) {
        println!("DPDK {version} for this CPU ({}) is there", cpu.name);
    } else {
        build(&version, &prefix)?;
        fs::write(&mark, wanted).with_context(|| format!("cannot write {}", mark.display()))?;
        println!("DPDK {version} for this CPU ({}) is built", cpu.name);
    }
    println!("offcore and its shim for it:");
    let pkgconfig = prefix.join("lib/pkgconfig");
    println!("  PKG_CONFIG_PATH={} cargo build --release --features dpdk", pkgconfig.display());
    println!("its dpdk-testpmd, for --peer dpdk:");
    println!("  PATH={}:$PATH", prefix.join("bin").display());
    Ok(())
}

/// Returns the source version of the installed libdpdk-dev.
fn packaged_version() -> Result<String> {
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${source:Version}", "libdpdk-dev"]);
    let version = output(&mut query).context(
        "there is no libdpdk-dev, whose version this builds: on Debian, as root, cargo xtask setup installs it",
    )?;
    ensure!(!version.is_empty() && !version.contains('/'), "libdpdk-dev has the version '{version}'");
    Ok(version)
}

/// The CPU that the compiler selects with `-march=native`.
struct Cpu {
    /// The compiler's name for it, such as `znver3`.
    name: String,
    /// Its feature flags, as the kernel lists them.
    flags: String,
}

impl Cpu {
    fn check_machine_flags() -> Result<Self> {
        let help = output(Command::new("gcc").args(["-march=native", "-Q", "--help=target"]))?;
        let name = march(&help).context("gcc does not say what -march=native is")?.to_owned();
        let info = fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
        let flags = info.lines().find(|line| line.starts_with("flags")).context("a CPU has flags")?;
        Ok(Self { name, flags: flags.to_owned() })
    }
}

/// Returns the value of `-march=` in the output of `gcc --help=target`.
fn march(help: &str) -> Option<&str> {
    let value = help.lines().find_map(|line| line.trim().strip_prefix("-march="))?.trim();
    (!value.is_empty()).then_some(value)
}

/// Returns Offcore's part of the user's cache directory. The EAL loads no drivers from a world-writable directory or
/// from a directory below one.
fn cache() -> Result<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
            .join(".cache"),
    };
    ensure!(cache.is_absolute(), "the cache directory {} has no absolute path", cache.display());
    if let Some(open) = cache.ancestors().find(|dir| is_world_writable(dir)) {
        bail!(
            "all users may write to {}, and DPDK loads no driver from below such a directory: set XDG_CACHE_HOME to \
             another",
            open.display()
        );
    }
    Ok(cache.join("offcore"))
}

fn is_world_writable(dir: &Path) -> bool {
    fs::metadata(dir).is_ok_and(|metadata| metadata.mode() & 0o002 != 0)
}

/// Downloads, compiles and installs DPDK. Temporary files are removed, but kept after a failure.
fn build(version: &str, prefix: &Path) -> Result<()> {
    setup::install_missing(&TOOLS)?;
    let name = prefix.file_name().context("the prefix has a name")?.to_string_lossy();
    let work = prefix.with_file_name(format!("{name}.build"));
    remove(&work)?;
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    println!("fetching the source package dpdk {version}");
    let source = fetch(version, &work)?;
    println!("compiling DPDK for this CPU: some minutes (log: {})", work.join("log").display());
    let mut meson = Command::new("meson");
    meson.arg("setup").arg(work.join("objects")).arg(&source);
    meson.arg(format!("--prefix={}", prefix.display())).args(["--libdir=lib", "--default-library=shared"]);
    // The run path makes the libraries and testpmd use each other and not Debian's.
    meson.arg(format!("-Dc_link_args=-Wl,-rpath,{}", prefix.join("lib").display()));
    meson.args(["-Dcpu_instruction_set=native", "-Dtests=false", "-Denable_apps=test-pmd"]);
    meson.args([format!("-Denable_drivers={DRIVERS}"), format!("-Ddisable_libs={WITHOUT}")]);
    logged(&mut meson, &work)?;
    let ninja = |target: &[&str]| {
        logged(Command::new("ninja").arg("-C").arg(work.join("objects")).args(target), &work)
    };
    ninja(&[])?;
    // Removed as late as possible, because the old build may be in use.
    remove(prefix)?;
    ninja(&["install"])?;
    remove(&work)
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Downloads and unpacks the source package with apt, from the Debian mirrors that this machine uses but with separate
/// package lists, because the system's lists may lack source packages. Returns the directory.
fn fetch(version: &str, work: &Path) -> Result<PathBuf> {
    let format = "--format=$(ORIGIN) deb-src [signed-by=KEYRING] $(REPO_URI) $(RELEASE) $(COMPONENT)";
    let known = output(Command::new("apt-get").args(["indextargets", format, "Created-By: Packages"]))?;
    let sources: Vec<_> = known.lines().filter_map(|line| line.strip_prefix("Debian ")).collect();
    ensure!(
        !sources.is_empty(),
        "apt-get indextargets names no archive of Debian's: this builds Debian's source"
    );
    let list = work.join("sources.list");
    fs::write(&list, sources.join("\n").replace("KEYRING", KEYRING) + "\n")
        .with_context(|| format!("cannot write {}", list.display()))?;
    fs::create_dir_all(work.join("lists/partial")).context("cannot make a directory for apt's lists")?;
    let apt = |args: &[&str]| {
        let mut apt = Command::new("apt-get");
        apt.current_dir(work).arg("--quiet");
        apt.arg("-o").arg(format!("Dir::Etc::SourceList={}", list.display()));
        apt.arg("-o").arg(format!("Dir::State::Lists={}", work.join("lists").display()));
        apt.args(["-o", "Dir::Etc::SourceParts=-"]);
        apt.args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="]);
        logged(apt.args(args), work)
    };
    apt(&["update"])?;
    apt(&["source", &format!("dpdk={version}")]).context(
        "where the archive has a newer version, apt-get update && apt-get install libdpdk-dev dpdk-dev comes first",
    )?;
    let unpacked = fs::read_dir(work)?.flatten().map(|entry| entry.path());
    let source = unpacked.into_iter().find(|path| path.join("meson.build").is_file());
    source.context("apt-get source has unpacked no DPDK")
}

/// Runs a program whose output goes to the log in `work`. An error contains the end of the log.
fn logged(command: &mut Command, work: &Path) -> Result<()> {
    let path = work.join("log");
    let log = File::options().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("cannot write {}", path.display()))?;
    let name = command.get_program().to_string_lossy().into_owned();
    command.env("PATH", SYSTEM_PATH).env("LC_ALL", "C").stdin(Stdio::null());
    command.stdout(log.try_clone()?).stderr(log);
    let status = command.status().with_context(|| format!("cannot run {name}"))?;
    if status.success() {
        return Ok(());
    }
    let said = fs::read(&path).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let end: Vec<_> = said.lines().rev().take(10).collect();
    let end: Vec<_> = end.into_iter().rev().collect();
    bail!("{name}: {status}; the end of {}:\n{}", path.display(), end.join("\n"))
}

/// Returns the output of a program.
fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}: {}", output.status, said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_name_for_the_cpu_is_read() {
        let help = "  -mavx2   \t[enabled]\n  -march=                     \t\tznver3\n  -masm=  att\n";
        assert_eq!(march(help), Some("znver3"));
        assert_eq!(march("  -march=   \n"), None);
        assert_eq!(march("  -mtune=  generic\n"), None);
    }

    #[test]
    fn world_writable_directories_are_found() {
        assert!(is_world_writable(Path::new("/tmp")));
        assert!(!is_world_writable(Path::new("/usr")));
    }

    #[test]
    fn failed_program_shows_its_logs_end() {
        let work = std::env::temp_dir().join(format!("offcore-xtask-peers-{}", std::process::id()));
        fs::create_dir_all(&work).unwrap();
        let mut bad = Command::new("sh");
        let error = logged(bad.args(["-c", "for i in $(seq 20); do echo line$i; done; exit 3"]), &work);
        let error = error.unwrap_err().to_string();
        fs::remove_dir_all(&work).unwrap();
        assert!(error.contains("exit status: 3") && error.ends_with("line19\nline20"), "{error}");
        assert!(!error.contains("line10\n"), "{error}");
    }
}
