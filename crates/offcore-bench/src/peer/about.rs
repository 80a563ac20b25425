//! Description of a peer: its version, its compilation target, the negotiated features and its page size.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use offcore_vhost::features;

use crate::report::row::AboutPeer;

impl AboutPeer {
    /// Describes the DPDK version that process `id` has loaded.
    ///
    /// # Errors
    /// If it has not loaded DPDK.
    pub fn process(id: u32) -> Result<Self> {
        let library = loaded(id)?;
        let config = library.ancestors().find_map(config_below);
        Ok(Self {
            peer_version: config.as_deref().and_then(version),
            peer_target: config.as_deref().and_then(target),
            ..Self::default()
        })
    }
}

/// Returns the path of the librte_vhost that process `id` has loaded.
pub(super) fn loaded(id: u32) -> Result<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{id}/maps")).context("the peer's memory map")?;
    let path = maps.lines().find_map(|line| {
        let at = line.find('/')?;
        line[at..].contains("/librte_vhost.so").then(|| PathBuf::from(&line[at..]))
    });
    path.context("the peer has not loaded librte_vhost")
}

/// Returns DPDK's configuration header if it is installed below `prefix`.
fn config_below(prefix: &Path) -> Option<String> {
    let arch = format!("include/{}-linux-gnu/dpdk", std::env::consts::ARCH);
    let dirs = ["include", "include/dpdk", &arch];
    dirs.iter().find_map(|dir| fs::read_to_string(prefix.join(dir).join("rte_build_config.h")).ok())
}

fn define<'a>(config: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = config.lines().filter_map(|line| line.strip_prefix("#define "));
    lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::trim)
}

fn version(config: &str) -> Option<String> {
    let [year, month, minor] =
        ["RTE_VER_YEAR", "RTE_VER_MONTH", "RTE_VER_MINOR"].map(|name| define(config, name));
    Some(format!("DPDK {}.{:0>2}.{}", year?, month?, minor?))
}

/// Returns the compiler's name for the CPU, and the best instruction set for which DPDK's headers have code.
fn target(config: &str) -> Option<String> {
    let machine = define(config, "RTE_MACHINE")?.trim_matches('"');
    let flags: Vec<_> = define(config, "RTE_COMPILE_TIME_CPUFLAGS")?.split(',').map(str::trim).collect();
    let sets = [("AVX512F", "AVX-512"), ("AVX2", "AVX2"), ("AVX", "AVX"), ("SSE4_2", "SSE4.2")];
    let best = sets.iter().find(|(flag, _)| flags.contains(&format!("RTE_CPUFLAG_{flag}").as_str()));
    Some(format!("{machine}{}", best.map(|(_, name)| format!(", {name}")).unwrap_or_default()))
}

/// Returns the specification's names of feature bits, without the bits that every vhost-user device has.
pub(crate) fn feature_names(bits: u64) -> String {
    const NAMES: [(u64, &str); 20] = [
        (features::VIRTIO_NET_F_CSUM, "CSUM"),
        (features::VIRTIO_NET_F_GUEST_CSUM, "GUEST_CSUM"),
        (features::VIRTIO_NET_F_MTU, "MTU"),
        (features::VIRTIO_NET_F_GUEST_TSO4, "GUEST_TSO4"),
        (features::VIRTIO_NET_F_GUEST_TSO6, "GUEST_TSO6"),
        (features::VIRTIO_NET_F_GUEST_ECN, "GUEST_ECN"),
        (features::VIRTIO_NET_F_HOST_TSO4, "HOST_TSO4"),
        (features::VIRTIO_NET_F_HOST_TSO6, "HOST_TSO6"),
        (features::VIRTIO_NET_F_HOST_ECN, "HOST_ECN"),
        (features::VIRTIO_NET_F_MRG_RXBUF, "MRG_RXBUF"),
        (features::VIRTIO_NET_F_STATUS, "STATUS"),
        (features::VIRTIO_NET_F_CTRL_VQ, "CTRL_VQ"),
        (features::VIRTIO_NET_F_MQ, "MQ"),
        (features::VIRTIO_F_INDIRECT_DESC, "INDIRECT_DESC"),
        (features::VIRTIO_F_EVENT_IDX, "EVENT_IDX"),
        (features::VIRTIO_F_RING_PACKED, "RING_PACKED"),
        (features::VIRTIO_F_IN_ORDER, "IN_ORDER"),
        (features::VIRTIO_NET_F_GUEST_USO4, "GUEST_USO4"),
        (features::VIRTIO_NET_F_GUEST_USO6, "GUEST_USO6"),
        (features::VIRTIO_NET_F_HOST_USO, "HOST_USO"),
    ];
    let known = NAMES
        .iter()
        .fold(features::VIRTIO_F_VERSION_1 | features::VHOST_USER_F_PROTOCOL_FEATURES, |all, (bit, _)| {
            all | bit
        });
    let named = NAMES.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| (*name).to_owned());
    let others = (bits & !known != 0).then(|| format!("{:#x}", bits & !known));
    named.chain(others).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_names_version_and_isa() {
        let config = |machine, flags| {
            format!(
                "#define RTE_COMPILE_TIME_CPUFLAGS {flags}\n#define RTE_MACHINE {machine}\n#define RTE_VER_MINOR 11\n\
                 #define RTE_VER_MONTH 3\n#define RTE_VER_YEAR 22\n#undef RTE_VER_SUFFIX\n"
            )
        };
        let debian = config("corei7", "RTE_CPUFLAG_SSE,RTE_CPUFLAG_SSE4_2");
        assert_eq!(version(&debian).as_deref(), Some("DPDK 22.03.11"));
        assert_eq!(target(&debian).as_deref(), Some("corei7, SSE4.2"));
        let native = config("\"native\"", "RTE_CPUFLAG_SSE4_2,RTE_CPUFLAG_AVX,RTE_CPUFLAG_AVX2");
        assert_eq!(target(&native).as_deref(), Some("native, AVX2"));
        assert_eq!((version(""), target("")), (None, None));
    }

    #[test]
    fn unnamed_features_are_shown() {
        let bits = features::VIRTIO_F_VERSION_1
            | features::VIRTIO_NET_F_MRG_RXBUF
            | features::VIRTIO_F_RING_PACKED
            | 1 << 60;
        assert_eq!(feature_names(bits), "MRG_RXBUF RING_PACKED 0x1000000000000000");
        assert_eq!(feature_names(features::VIRTIO_F_VERSION_1), "");
    }

    #[test]
    fn process_without_dpdk_is_refused() {
        // The process ID of this test process, which has no DPDK without the feature.
        if cfg!(not(feature = "dpdk")) {
            let error = AboutPeer::process(std::process::id()).unwrap_err().to_string();
            assert!(error.contains("librte_vhost"), "{error}");
        }
    }
}
