//! The image that a guest boots: Debian's cloud kernel, and an initramfs with busybox, iperf3, ethtool and the
//! virtio-net driver.
//!
//! Both are built once and kept in a cache directory. Only the first build needs Debian's archive.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use offcore_bench::machine::find_program;

use crate::netns::checked;
use crate::offcore::profile_dir;
use crate::require::lock;

/// The package that depends on Debian's current kernel for virtual machines.
const KERNEL_METAPACKAGE: &str = "linux-image-cloud-amd64";

/// The modules that virtio-net needs, in the order of their dependencies.
const MODULES: [&str; 8] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
];

/// The programs in the guest, in addition to busybox's.
const PROGRAMS: [&str; 2] = ["iperf3", "ethtool"];

/// Process 1 of the guest.
const INIT: &str = include_str!("../../guest/init");

/// The files from which a guest boots.
#[derive(Debug, Clone)]
pub(super) struct Image {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
}

impl Image {
    /// Finds the image in the cache, or builds it there. Other processes wait in the meantime.
    pub(super) fn ready() -> Result<Self> {
        Self::ready_in(&cache_dir()?)
    }

    fn ready_in(cache: &Path) -> Result<Self> {
        fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
        let _lock = lock(&cache.join("lock")).with_context(|| format!("cannot lock {}", cache.display()))?;
        let kernel = match cached_kernel(cache)? {
            Some(kernel) => kernel,
            None => fetch_kernel(cache)
                .with_context(|| format!("no kernel in {} and none to be had", cache.display()))?,
        };
        let initramfs = cache.join(format!("initramfs-{:016x}.cpio", recipe(&kernel)?));
        if !initramfs.exists() {
            build_initramfs(&kernel, &initramfs)
                .with_context(|| format!("cannot build {}", initramfs.display()))?;
        }
        Ok(Self { kernel: kernel.join("vmlinuz"), initramfs })
    }
}

/// Returns the image's directory: `OFFCORE_GUEST_CACHE` from the environment, otherwise `guest-cache` in the target
/// directory.
fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("OFFCORE_GUEST_CACHE") {
        return Ok(dir.into());
    }
    let profile = profile_dir()?;
    Ok(profile.parent().context("the profile's directory is in the target directory")?.join("guest-cache"))
}

/// Returns the newest kernel in the cache: a directory with `vmlinuz` and the modules.
fn cached_kernel(cache: &Path) -> Result<Option<PathBuf>> {
    let mut kernels = Vec::new();
    for entry in fs::read_dir(cache).with_context(|| format!("cannot read {}", cache.display()))? {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with("linux-image-") {
            let changed = fs::metadata(&path)?.modified()?;
            kernels.push((changed, path));
        }
    }
    Ok(kernels.into_iter().max().map(|(_, path)| path))
}

/// Downloads the kernel package and extracts the required files.
fn fetch_kernel(cache: &Path) -> Result<PathBuf> {
    let listed = checked(Command::new("apt-cache").args(["depends", KERNEL_METAPACKAGE]))?;
    let package = listed
        .lines()
        .find_map(|line| {
            line.trim().strip_prefix("Depends: ").filter(|name| name.starts_with("linux-image-"))
        })
        .with_context(|| {
            format!("{KERNEL_METAPACKAGE} names no kernel package: run `apt-get update`\n{listed}")
        })?;
    // Files are created in a temporary directory and moved when they are complete. The lock is held, so existing
    // temporary files were left by a process that was killed.
    let work = cache.join("fetching");
    let _ = fs::remove_dir_all(&work);
    let kept = work.join("kept");
    fs::create_dir_all(&kept)?;
    let fetched = (|| {
        checked(Command::new("apt-get").args(["--quiet", "download", package]).current_dir(&work))?;
        let deb = fs::read_dir(&work)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("apt-get download {package} left no .deb file"))?;
        let tree = work.join("tree");
        checked(Command::new("dpkg-deb").arg("-x").arg(deb).arg(&tree))?;
        let files = files_below(&tree)?;
        let find = |wanted: &dyn Fn(&str) -> bool, what: &str| {
            files
                .iter()
                .find(|path| wanted(&path.file_name().unwrap_or_default().to_string_lossy()))
                .with_context(|| format!("{package} has no {what}"))
        };
        fs::copy(find(&|name| name.starts_with("vmlinuz-"), "vmlinuz")?, kept.join("vmlinuz"))?;
        for module in MODULES {
            let file = format!("{module}.ko");
            fs::copy(find(&|name| name == file, &file)?, kept.join(&file))?;
        }
        let kernel = cache.join(package);
        fs::rename(&kept, &kernel)?;
        Ok(kernel)
    })();
    let _ = fs::remove_dir_all(&work);
    fetched
}

/// Returns a hash of everything that an initramfs depends on. An initramfs that was built differently has another name.
fn recipe(kernel: &Path) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    (INIT, MODULES, kernel.file_name()).hash(&mut hasher);
    for program in ["busybox"].iter().chain(&PROGRAMS) {
        let path = program_path(program)?;
        (fs::metadata(&path)?.modified()?, path).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Assembles the initramfs and writes it as an uncompressed cpio archive: decompression would take the emulated guest
/// longer than reading.
fn build_initramfs(kernel: &Path, initramfs: &Path) -> Result<()> {
    let root = initramfs.with_extension("tree");
    let _ = fs::remove_dir_all(&root);
    for dir in ["bin", "modules", "proc", "sys", "dev", "tmp", "run"] {
        fs::create_dir_all(root.join(dir))?;
    }
    let built = (|| {
        let init = root.join("init");
        fs::write(&init, INIT)?;
        make_executable(&init)?;
        let mut libraries = BTreeSet::new();
        for program in ["busybox"].iter().chain(&PROGRAMS) {
            let path = program_path(program)?;
            fs::copy(&path, root.join("bin").join(program))?;
            libraries.extend(shared_libraries(&path)?);
        }
        std::os::unix::fs::symlink("busybox", root.join("bin/sh"))?;
        for library in &libraries {
            let inside = root.join(library.strip_prefix("/").unwrap_or(library));
            fs::create_dir_all(inside.parent().context("a library is in a directory")?)?;
            fs::copy(library, inside)?;
        }
        for module in MODULES {
            let file = format!("{module}.ko");
            fs::copy(kernel.join(&file), root.join("modules").join(&file))
                .with_context(|| format!("{} has no {file}", kernel.display()))?;
        }
        fs::write(root.join("modules/order"), MODULES.join("\n") + "\n")?;

        let archive = initramfs.with_extension("new");
        let pack = "find . -print0 | cpio --null --quiet --create --format=newc --owner=0:0 --file=\"$1\"";
        checked(Command::new("sh").args(["-c", pack, "sh"]).arg(&archive).current_dir(&root))?;
        fs::rename(&archive, initramfs)?;
        Ok(())
    })();
    let _ = fs::remove_dir_all(&root);
    built
}

fn program_path(name: &str) -> Result<PathBuf> {
    find_program(name).with_context(|| format!("no {name} to put into the guest"))
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// Returns the shared libraries that a program loads, including the dynamic linker. A static program has none.
fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if said.contains("not a dynamic executable") || said.contains("statically linked") {
        return Ok(Vec::new());
    }
    if !output.status.success() || said.contains("not found") {
        bail!("ldd {} ended with {}:\n{said}", program.display(), output.status);
    }
    // "libc.so.6 => /lib/… (0x…)" or "/lib64/ld-linux-x86-64.so.2 (0x…)". The vdso has no path.
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(said.lines().filter_map(path).collect())
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                dirs.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Need, TempDir, require};

    /// Builds a complete image from Debian's archive in an empty cache, then finds it in the cache alone.
    #[test]
    fn guest_image_is_cached() {
        let Some(()) = require(&[Need::Guest]) else { return };
        let cache = TempDir::new().unwrap();
        // The kernel from the tests' own cache, if any, saves a download.
        let shared = Image::ready().unwrap();
        let kernel = shared.kernel.parent().unwrap();
        let ours = cache.file(&kernel.file_name().unwrap().to_string_lossy());
        fs::create_dir(&ours).unwrap();
        for file in files_below(kernel).unwrap() {
            fs::copy(&file, ours.join(file.file_name().unwrap())).unwrap();
        }
        let image = Image::ready_in(cache.path()).unwrap();
        assert!(image.kernel.is_file());
        let listed = Command::new("cpio")
            .args(["--list", "--quiet", "--file"])
            .arg(&image.initramfs)
            .output()
            .unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        for file in
            ["init", "bin/busybox", "bin/iperf3", "bin/ethtool", "modules/virtio_net.ko", "modules/order"]
        {
            assert!(listed.lines().any(|line| line == file), "{file} is not in the initramfs:\n{listed}");
        }
        assert!(listed.contains("libc.so.6"), "{listed}");
        let built = fs::metadata(&image.initramfs).unwrap().modified().unwrap();
        let again = Image::ready_in(cache.path()).unwrap();
        assert_eq!(again.initramfs, image.initramfs);
        assert_eq!(fs::metadata(&again.initramfs).unwrap().modified().unwrap(), built);
        // Only complete files remain: the lock, the kernel, the initramfs.
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 3);
    }

    #[test]
    fn libraries_are_found_with_the_linker() {
        let libraries = shared_libraries(Path::new("/bin/sh")).unwrap();
        assert!(
            libraries.iter().any(|library| library.to_string_lossy().contains("ld-linux")),
            "{libraries:?}"
        );
    }
}
