//! `offcore gpu doctor`: checks this machine for packet processing on a GPU.

use std::path::{Path, PathBuf};

use clap::Args;
use offcore_gpu::doctor::{Given, Ptx, examine};
use offcore_gpu::ptx::PTX;
use serde_json::json;

use crate::args::{Format, mbuf_size, within};
use crate::doctor::{check_root, tell};
use crate::failure::Failure;
use crate::output::write;

pub(crate) const EXAMPLES: &str = "\
Examples:
    offcore gpu doctor
    offcore gpu doctor --all --format json

A planned pool, and one network card:
    offcore gpu doctor --mbufs 65536 --mbuf-size 16384 --nic eth0

Environment: LD_LIBRARY_PATH, the directories that are searched first for
libcuda.so.

Exit codes: 0 no problem (there may be warnings), 1 a problem, 2 usage.";

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// A network card to check, by PCI address or interface name; repeat for each [default: all]
    #[arg(long = "nic", value_name = "NAME")]
    pub nics: Vec<String>,

    /// Planned number of packet buffers
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = within(64..=1 << 24))]
    pub mbufs: usize,

    /// Planned bytes per packet buffer, including 256 of headroom: a power of two from 2048 to 32768
    #[arg(long, value_name = "BYTES", default_value_t = 2048, value_parser = mbuf_size)]
    pub mbuf_size: usize,

    /// Show all findings, not only problems, warnings and unknowns
    #[arg(short, long)]
    pub all: bool,

    /// Text, or JSON: an object with the facts, and one per finding
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,

    /// The directory with proc, sys and dev: a copy of another machine's, whose driver cannot be queried
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let root = args.root.as_deref().unwrap_or(Path::new("/"));
    check_root("--root", root)?;
    let (facts, report) = examine(root, &given(args));
    if args.format == Format::Json {
        write(&format!("{}\n", json!({ "facts": facts })))?;
    }
    tell(&report, args.format, args.all, "a GPU, or a network card that was asked for,")
}

/// Returns the input that is not from files: the command line, the kernels, and, for this machine, the CUDA driver.
fn given(args: &DoctorArgs) -> Given {
    let (cuda, cuda_error) = match args.root {
        Some(_) => (None, None),
        None => {
            offcore_gpu::cuda::facts().map_or_else(|error| (None, Some(error)), |facts| (Some(facts), None))
        }
    };
    Given {
        pool_bytes: args.mbufs as u64 * args.mbuf_size as u64,
        nics: args.nics.clone(),
        ptx: Ptx::parse(PTX),
        cuda,
        cuda_error,
        ..Given::default()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::{env, fs};

    use clap::Parser;
    use offcore_stats::finding::{Finding, Report, Verdict};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DoctorArgs,
    }

    fn parse(line: &str) -> Result<DoctorArgs, String> {
        let words = std::iter::once("doctor").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args).map_err(|error| error.to_string())
    }

    /// The files of a machine with a GPU, which are removed when the test ends.
    struct Machine(PathBuf);

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    impl Machine {
        /// Creates the files. `name` must be unique to the test.
        fn new(name: &str) -> Self {
            let root =
                env::temp_dir().join(format!("offcore-gpu-doctor-words-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            let machine = Self(root);
            let gpu = "sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0";
            for (file, text) in [("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2335")] {
                machine.set(&format!("{gpu}/{file}"), text);
            }
            machine.link(&format!("{gpu}/driver"), "/sys/bus/pci/drivers/nvidia");
            machine.link(
                "sys/bus/pci/devices/0000:03:00.0",
                "../../../devices/pci0000:00/0000:00:01.0/0000:03:00.0",
            );
            machine.set(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            );
            let information = "Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n";
            machine.set("proc/driver/nvidia/gpus/0000:03:00.0/information", information);
            machine.set("proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n");
            machine.set("proc/self/limits", "Max locked memory  8388608  unlimited  bytes\n");
            machine
        }

        fn set(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn link(&self, path: &str, target: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            symlink(target, path).unwrap();
        }

        fn args(&self, line: &str) -> DoctorArgs {
            DoctorArgs { root: Some(self.0.clone()), ..parse(line).unwrap() }
        }

        fn report(&self, line: &str) -> Report {
            examine(&self.0, &given(&self.args(line))).1
        }

        fn finding(&self, line: &str, check: &str) -> Finding {
            let findings = self.report(line).findings;
            let found = findings.iter().find(|finding| finding.check == check);
            found.unwrap_or_else(|| panic!("no {check}: {findings:#?}")).clone()
        }
    }

    #[test]
    fn only_problems_end_with_a_failure() {
        let machine = Machine::new("failure");
        assert!(run(&machine.args("--format json")).is_ok(), "there are warnings");
        let Err(Failure::Failed(error)) = run(&machine.args("--nic eth7")) else { panic!("it is not there") };
        assert!(error.to_string().starts_with("1 problem "), "{error}");
        fs::remove_dir_all(machine.0.join("proc/driver")).unwrap();
        let Err(Failure::Failed(error)) = run(&machine.args("--nic eth7")) else {
            panic!("and no kernel driver")
        };
        assert!(error.to_string().starts_with("2 problems "), "{error}");
    }

    #[test]
    fn doctor_knows_pool_and_kernels() {
        let machine = Machine::new("judged");
        let small = machine.finding("--mbufs 1024 --mbuf-size 2048", "locked-memory");
        assert!(small.verdict == Verdict::Ok && small.wanted.contains("2 MiB"), "{small:?}");
        let large = machine.finding("--mbufs 65536 --mbuf-size 4096", "locked-memory");
        assert!(large.verdict == Verdict::Warning && large.found.contains("8 MiB"), "{large:?}");
        let ptx = machine.finding("", "ptx-version");
        assert!(ptx.wanted.contains("CUDA 12.0"), "the embedded kernels: {ptx:?}");
    }

    #[test]
    fn driver_of_another_root_is_not_queried() {
        let machine = Machine::new("asked");
        let args = machine.args("");
        let given = given(&args);
        assert_eq!((given.cuda, given.cuda_error), (None, None));
        assert_eq!(machine.finding("", "cuda").verdict, Verdict::NotKnown);
    }

    #[test]
    fn help_examples_are_accepted() {
        let lines = EXAMPLES.lines().filter_map(|line| line.trim().strip_prefix("offcore gpu doctor"));
        let parsed: Vec<_> = lines.map(|line| parse(line).unwrap()).collect();
        assert_eq!(parsed.len(), 3);
        let refused = parse("--hugepages 2M").err().unwrap();
        assert!(refused.contains("--hugepages"), "a doctor makes no pool: {refused}");
        let refused = parse("--mbuf-size 3000").err().unwrap();
        assert!(refused.contains("the next one is 4096"), "{refused}");
    }
}
