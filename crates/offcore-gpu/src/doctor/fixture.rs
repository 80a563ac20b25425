//! Synthetic machines for tests.

use std::fs;
use std::ops::Deref;

use offcore_mem::testing::TempDir;
use offcore_stats::finding::{Finding, Report};

use super::{CudaDeviceFacts, CudaFacts, Facts, Given, Ptx, examine};

/// The GPU of [`Fake::good`].
pub(super) const GPU: &str = "0000:03:00.0";
/// Its network card, at another port of the same switch.
pub(super) const NIC: &str = "0000:04:00.0";
const GPU_WAY: &str = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0";
const NIC_WAY: &str = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0";

/// A tree of files, and the caller's input. The tree is removed on drop.
pub(super) struct Fake {
    pub(super) dir: TempDir,
    pub(super) given: Given,
}

impl Deref for Fake {
    type Target = TempDir;

    fn deref(&self) -> &TempDir {
        &self.dir
    }
}

impl Fake {
    /// Creates an empty machine.
    pub(super) fn empty() -> Self {
        Self { dir: TempDir::new(), given: Given { has_host_device: true, ..Given::default() } }
    }

    /// Creates a well-configured machine with one GPU and one network card.
    pub(super) fn good() -> Self {
        let mut fake = Self::empty();
        fake.machine();
        fake.device(GPU, GPU_WAY, "0x030200", "0x10de", "nvidia");
        let bars = "0x0000020000000000 0x0000020000ffffff 0x000000000014220c\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                    0x0000024000000000 0x0000027fffffffff 0x000000000014220c\n";
        fake.set(&fake.gpu("resource"), bars);
        fake.link(&fake.gpu("iommu_group"), "../../../../../../../kernel/iommu_groups/7");
        fake.set("sys/kernel/iommu_groups/7/type", "identity\n");
        fake.device(NIC, NIC_WAY, "0x020000", "0x15b3", "mlx5_core");
        fake.set(&fake.nic("net/eth0/mtu"), "1500\n");
        for (way, ports) in [(GPU_WAY, 4), (NIC_WAY, 4)] {
            let parts: Vec<&str> = way.split('/').collect();
            for last in 2..=ports {
                fake.bridge(&parts[..last].join("/"));
            }
        }
        fake.given = Given {
            has_host_device: true,
            pool_bytes: 64 << 20,
            ptx: Some(Ptx { version: (8, 8), target: (7, 0) }),
            cuda: Some(CudaFacts {
                driver_version: 13_000,
                devices: vec![CudaDeviceFacts {
                    address: GPU.into(),
                    name: "NVIDIA H200".into(),
                    memory_bytes: 139 << 30,
                    compute_capability: (9, 0),
                    host_pointers: true,
                    dma_buf: Some(true),
                    gpudirect_rdma: Some(true),
                    kernel_timeout: false,
                }],
            }),
            ..Given::default()
        };
        fake
    }

    /// Creates everything except PCI.
    fn machine(&self) {
        self.set("proc/sys/kernel/osrelease", "6.8.0-60-generic\n");
        self.set("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme sse2\n");
        let status =
            "Name:\toffcore\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0\nCapEff:\t000001ffffffffff\n";
        self.set("proc/self/status", status);
        let version =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC: 13";
        self.set("proc/driver/nvidia/version", version);
        let information =
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 255\nDevice Minor: \t 0\nGPU Excluded:\t No\n";
        self.set(&format!("proc/driver/nvidia/gpus/{GPU}/information"), information);
        self.set("sys/module/nvidia_peermem/refcnt", "1\n");
        self.set("proc/self/limits", "Max locked memory  unlimited  unlimited  bytes\n");
        for file in ["nvidia0", "nvidiactl", "nvidia-uvm"] {
            self.set(&format!("dev/{file}"), "");
            self.mode(&format!("dev/{file}"), 0o666);
        }
        self.set("sys/devices/system/node/node0/distance", "10 21\n");
        self.set("sys/devices/system/node/node1/distance", "21 10\n");
    }

    /// Creates a machine whose files all contain garbage, except the ones that make a GPU and a network card exist.
    pub(super) fn rubbish() -> Self {
        let fake = Self::good();
        let mut left = vec![fake.0.clone()];
        let mut number = 0;
        while let Some(dir) = left.pop() {
            for entry in fs::read_dir(dir).unwrap().flatten() {
                let (path, kind) = (entry.path(), entry.file_type().unwrap());
                let name = entry.file_name();
                if kind.is_dir() {
                    left.push(path);
                } else if kind.is_file() && !["vendor", "device", "class"].iter().any(|keep| name == *keep) {
                    number += 1;
                    let bytes: [&[u8]; 4] = [
                        b"\xff\xfe\0\x1b[2J\x07what\n\n-1 18446744073709551616 0x",
                        b"-9223372036854775809 . : \n.",
                        &[0x10; 300],
                        b"\n\n",
                    ];
                    fs::write(path, bytes[number % 4]).unwrap();
                }
            }
        }
        fake
    }

    /// Adds a second GPU below another root complex, on another NUMA node.
    pub(super) fn second_gpu(&self) {
        let address = "0000:c1:00.0";
        self.device(address, "pci0000:c0/0000:c0:01.0", "0x030200", "0x10de", "nvidia");
        self.set(&format!("sys/bus/pci/devices/{address}/numa_node"), "1\n");
    }

    /// Adds a PCI function at path `way`, with a link of generation 5 and 16 lanes, on NUMA node 0.
    pub(super) fn device(&self, address: &str, way: &str, class: &str, vendor: &str, driver: &str) {
        let dir = format!("sys/devices/{way}/{address}");
        let files = [("class", class), ("vendor", vendor), ("device", "0x2335"), ("numa_node", "0")];
        let link = [
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_width", "16"),
        ];
        for (file, text) in files.into_iter().chain(link) {
            self.set(&format!("{dir}/{file}"), text);
        }
        self.link(&format!("{dir}/driver"), &format!("/sys/bus/pci/drivers/{driver}"));
        self.on_bus(address, &dir);
    }

    /// Adds a bridge.
    fn bridge(&self, way: &str) {
        let dir = format!("sys/devices/{way}");
        self.set(&format!("{dir}/class"), "0x060400");
        self.set(&format!("{dir}/vendor"), "0x1000");
        self.set(&format!("{dir}/device"), "0xc030");
        self.on_bus(way.rsplit('/').next().unwrap(), &dir);
    }

    fn on_bus(&self, address: &str, dir: &str) {
        let dir = dir.strip_prefix("sys/").unwrap();
        self.link(&format!("sys/bus/pci/devices/{address}"), &format!("../../../{dir}"));
    }

    /// Moves a function to another path.
    pub(super) fn move_device(&self, address: &str, way: &str) {
        let link = format!("sys/bus/pci/devices/{address}");
        let from = fs::canonicalize(self.file(&link)).unwrap();
        let dir = format!("sys/devices/{way}/{address}");
        let to = self.file(&dir);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::rename(from, to).unwrap();
        self.on_bus(address, &dir);
    }

    /// Returns the path of a file of the GPU.
    pub(super) fn gpu(&self, file: &str) -> String {
        format!("sys/devices/{GPU_WAY}/{GPU}/{file}")
    }

    pub(super) fn nic(&self, file: &str) -> String {
        format!("sys/devices/{NIC_WAY}/{NIC}/{file}")
    }

    pub(super) fn report(&self) -> (Facts, Report) {
        examine(&self.dir.0, &self.given)
    }

    /// Returns the finding of a check at a place.
    pub(super) fn finding(&self, check: &str, place: &str) -> Finding {
        let mut findings = self.report().1.findings;
        let at = findings.iter().position(|f| f.check == check && f.place == place);
        findings.swap_remove(at.unwrap_or_else(|| panic!("no {check} at {place}: {findings:#?}")))
    }

    /// Returns the CUDA driver's facts for modification.
    pub(super) fn cuda(&mut self) -> &mut CudaFacts {
        self.given.cuda.as_mut().unwrap()
    }
}
