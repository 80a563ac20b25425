//! Files that a port writes, and interfaces, can be used by one port only, whatever their names on the command line
//! are.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use offcore_port::PortError;
use offcore_port::netdev::NetDev;
use offcore_port::pcap::part_of;
use offcore_port::spec::PortSpec;

/// A file or interface, by its identity.
#[derive(Debug, PartialEq, Eq)]
enum ClaimedObject {
    /// Device and inode of a file.
    File(u64, u64),
    /// Device and inode of the directory of a new file, and its name.
    NewFile(u64, u64, std::ffi::OsString),
    /// The index of an interface.
    Interface(u32),
}

/// How a port uses a file or interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Reads,
    Writes,
    Takes,
}

#[derive(Debug)]
struct Claim<'a> {
    port: &'a PortSpec,
    does: Does,
    /// The name on the command line.
    name: String,
    thing: ClaimedObject,
}

/// Checks, before any port is opened, that no two ports claim the same file or interface.
///
/// # Errors
/// The first port with a conflict.
pub(super) fn check(specs: &[PortSpec]) -> Result<(), PortError> {
    check_stdout(specs)?;
    let mut all: Vec<Claim<'_>> = Vec::new();
    for claim in specs.iter().flat_map(claims) {
        let both_read = |other: &Claim<'_>| (claim.does, other.does) == (Does::Reads, Does::Reads);
        if let Some(other) = all.iter().find(|other| other.thing == claim.thing && !both_read(other)) {
            return Err(PortError::Other { port: claim.port.to_string(), reason: claim.refusal(other) });
        }
        all.push(claim);
    }
    Ok(())
}

/// Rejects captures to stdout, because reports are also written there.
fn check_stdout(specs: &[PortSpec]) -> Result<(), PortError> {
    let Ok(stdout) = rustix::fs::fstat(std::io::stdout()) else { return Ok(()) };
    let is_stdout = |path: &Path| {
        let found = fs::metadata(path).ok().filter(|found| found.file_type().is_fifo());
        found.is_some_and(|found| (found.dev(), found.ino()) == (stdout.st_dev, stdout.st_ino))
    };
    let output = |spec: &PortSpec| match spec.bare() {
        PortSpec::Pcap(pcap) => pcap.output.as_deref().is_some_and(is_stdout),
        _ => false,
    };
    match specs.iter().find(|spec| output(spec)) {
        None => Ok(()),
        Some(spec) => {
            let reason =
                "standard output has the reports: expected another pipe, such as /dev/fd/3 (3>&1 >/dev/null)";
            Err(PortError::Other { port: spec.to_string(), reason: reason.into() })
        }
    }
}

/// Checks that no port writes a file that is read.
///
/// # Errors
/// The first port that writes it.
pub(crate) fn check_read(specs: &[PortSpec], path: &Path) -> Result<(), PortError> {
    let Some(read) = file(path) else { return Ok(()) };
    let writes = |claim: &Claim<'_>| claim.does == Does::Writes && claim.thing == read;
    match specs.iter().flat_map(claims).find(writes) {
        None => Ok(()),
        Some(claim) => {
            let reason = format!("it writes file '{}', which is read: expected another file", claim.name);
            Err(PortError::Other { port: claim.port.to_string(), reason })
        }
    }
}

impl Claim<'_> {
    fn refusal(&self, other: &Self) -> String {
        let does = |does| match does {
            Does::Reads => "reads",
            Does::Writes => "writes",
            Does::Takes => "has",
        };
        let whose = match std::ptr::eq(self.port, other.port) {
            true => "it".to_owned(),
            false => format!("port '{}'", other.port),
        };
        match self.does {
            Does::Takes => format!("{whose} has interface '{}' already: expected another one", self.name),
            Does::Reads | Does::Writes => format!(
                "it {} file '{}', which {whose} {}: expected another file",
                does(self.does),
                self.name,
                does(other.does)
            ),
        }
    }
}

/// Returns the claims of a port. Files that do not exist or cannot be examined are skipped, because opening them gives
/// the error.
fn claims(port: &PortSpec) -> Vec<Claim<'_>> {
    let claim = |does, name: String, thing: Option<ClaimedObject>| {
        thing.map(|thing| Claim { port, does, name, thing })
    };
    let file = |does, path: &Path| claim(does, path.display().to_string(), file(path));
    let interface = |name: &str| {
        let index = NetDev::open(name).ok().map(|device| ClaimedObject::Interface(device.index()));
        claim(Does::Takes, name.to_owned(), index)
    };
    let found = match port.bare() {
        PortSpec::Pcap(spec) => {
            let output = spec.output.as_deref().and_then(|output| file(Does::Writes, output));
            // Special files are written directly, without a temporary file.
            let part = spec.output.as_deref().filter(|_| output.is_some()).map(part_of);
            vec![
                spec.input.as_deref().and_then(|input| file(Does::Reads, input)),
                output,
                part.and_then(|part| file(Does::Writes, &part)),
            ]
        }
        PortSpec::AfPacket(spec) => vec![interface(&spec.name)],
        PortSpec::AfXdp(spec) => vec![interface(&spec.name)],
        PortSpec::Tap(spec) => vec![interface(&spec.name)],
        PortSpec::Dpdk(spec) => vec![spec.interface().and_then(interface)],
        _ => vec![],
    };
    found.into_iter().flatten().collect()
}

/// Returns the identity of a file. Pipes and devices can be shared.
fn file(path: &Path) -> Option<ClaimedObject> {
    match fs::metadata(path) {
        Ok(found) => found.is_file().then(|| ClaimedObject::File(found.dev(), found.ino())),
        Err(_) => {
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let found = fs::metadata(directory.unwrap_or(Path::new("."))).ok()?;
            Some(ClaimedObject::NewFile(found.dev(), found.ino(), path.file_name()?.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_of_one_file_are_detected() {
        let dir = std::env::temp_dir().join(format!("offcore-claims-{}", std::process::id()));
        fs::create_dir_all(dir.join("sub")).unwrap();
        let name = |name: &str| dir.join(name).display().to_string();
        fs::write(dir.join("a"), "").unwrap();
        fs::hard_link(dir.join("a"), dir.join("hard")).unwrap();
        std::os::unix::fs::symlink(dir.join("a"), dir.join("soft")).unwrap();
        let refused = |specs: &[String]| {
            let specs: Vec<PortSpec> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
            check(&specs).err().map(|error| error.to_string())
        };
        for other in ["a", "hard", "soft", "sub/../a"] {
            let why = refused(&[format!("pcap:{}", name("a")), format!("pcap:-,{}", name(other))]).unwrap();
            assert!(why.contains("which port 'pcap:") && why.contains("reads"), "{why}");
        }
        assert!(
            refused(&[format!("pcap:{},{}", name("a"), name("hard"))]).unwrap().contains("which it reads")
        );
        assert!(refused(&[name("new"), name("sub/../new")].map(|to| format!("pcap:-,{to}"))).is_some());
        assert!(refused(&[name("b"), name("b.part")].map(|to| format!("pcap:-,{to}"))).is_some());
        for fine in [
            [format!("pcap:{}", name("a")), format!("pcap:{}", name("hard"))],
            ["pcap:-,/dev/null"; 2].map(str::to_owned),
        ] {
            assert_eq!(refused(&fine), None);
        }
        assert!(
            refused(&["af_packet:lo", "af_xdp:lo"].map(str::to_owned))
                .unwrap()
                .contains("has interface 'lo' already")
        );
        fs::remove_dir_all(dir).unwrap();
    }
}
