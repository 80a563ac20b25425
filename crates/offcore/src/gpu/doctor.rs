//! `offcore gpu doctor`: checks this machine for packet processing on a GPU.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::Args;
use offcore_gpu::doctor::{Finding, Given, LockedMemory, Ptx, Report, Verdict, examine};
use offcore_gpu::ptx::PTX;
use serde_json::json;

use crate::Failure;
use crate::args::{Format, mbuf_size, within};
use crate::output::write;

/// The examples of `offcore gpu doctor --help`. A test parses each line that begins with `offcore`.
pub(crate) const EXAMPLES: &str = "\
Examples:
    offcore gpu doctor
    offcore gpu doctor --all --format json

For a pool and frames as they are going to be, and one network card:
    offcore gpu doctor --mbufs 65536 --mbuf-size 16384 --frame 9018 --nic eth0

Environment: CUDA_PATH_L, the directory with libcuda; GDRCOPY_PATH_L, the
directory with libgdrapi.

Exit codes: 0 no problem (there may be warnings), 1 a problem, 2 usage.";

/// FCS bytes, which the network card adds and removes.
const FCS: usize = 4;

/// The arguments of `offcore gpu doctor`.
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

    /// Bytes of the longest frame, FCS included
    #[arg(long, value_name = "BYTES", default_value_t = 1518, value_parser = within(64..=65535))]
    pub frame: usize,

    /// Show all findings, not only problems, warnings and unknowns
    #[arg(short, long)]
    pub all: bool,

    /// Text, or JSON: an object with the facts, and one per finding
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    pub format: Format,

    /// The directory with proc, sys, dev, usr and lib: a copy of another machine's, whose driver cannot be queried
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}

/// Runs the checks and prints the findings.
///
/// # Errors
/// [`Failure::Failed`] if there are problems.
pub(crate) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let root = args.root.as_deref().unwrap_or(Path::new("/"));
    let report = examine(root, &given(args, root));
    write(&text(&report, args.format, args.all)?)?;
    match report.count(Verdict::Problem) {
        0 => Ok(()),
        1 => {
            Err(anyhow!("1 problem keeps a GPU, or a network card that was asked for, from being used")
                .into())
        }
        many => {
            Err(anyhow!("{many} problems keep a GPU, or a network card that was asked for, from being used")
                .into())
        }
    }
}

/// Input beyond files: the command line, the kernels, and, for this machine, the environment and the CUDA driver.
fn given(args: &DoctorArgs, root: &Path) -> Given {
    let limits = fs::read_to_string(root.join("proc/self/limits")).unwrap_or_default();
    let given = Given {
        locked_memory: locked_memory(&limits),
        pool_bytes: args.mbufs as u64 * args.mbuf_size as u64,
        frame_bytes: args.frame - FCS,
        nics: args.nics.clone(),
        ptx: Ptx::parse(PTX),
        ..Given::default()
    };
    if args.root.is_some() {
        return given;
    }
    let directory = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let library_path = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let (cuda, cuda_error) = match offcore_gpu::cuda::facts() {
        Ok(facts) => (Some(facts), None),
        Err(error) => (None, Some(error)),
    };
    Given {
        cuda_path: directory("CUDA_PATH_L"),
        gdrcopy_path: directory("GDRCOPY_PATH_L"),
        library_path: env::split_paths(&library_path).filter(|path| !path.as_os_str().is_empty()).collect(),
        cuda,
        cuda_error,
        ..given
    }
}

/// The soft limit from `/proc/self/limits`: soft, hard, unit after the name.
fn locked_memory(limits: &str) -> Option<LockedMemory> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(LockedMemory::Unlimited),
        bytes => bytes.parse().ok().map(LockedMemory::Bytes),
    }
}

fn text(report: &Report, format: Format, all: bool) -> anyhow::Result<String> {
    match format {
        Format::Json => {
            let mut text = serde_json::to_string(&json!({ "facts": report.facts }))? + "\n";
            for finding in &report.findings {
                text += &(serde_json::to_string(finding)? + "\n");
            }
            Ok(text)
        }
        Format::Table => {
            let shown = report.findings.iter().filter(|f| all || f.verdict >= Verdict::NotKnown);
            let mut text: String = shown.map(words).collect();
            let count = |verdict| report.count(verdict);
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "ok {}, warnings {}, problems {}, not known {}, not applicable {}",
                count(Verdict::Ok),
                count(Verdict::Warning),
                count(Verdict::Problem),
                count(Verdict::NotKnown),
                count(Verdict::NotApplicable)
            );
            Ok(text)
        }
    }
}

/// Formats a finding as text.
fn words(finding: &Finding) -> String {
    let Finding { check, place, verdict, found, wanted, why, advice } = finding;
    let mut text = format!("{verdict:<15} {place} {check}: {found}\n");
    let below = [("wanted", wanted), ("why", why), ("what to do", advice)];
    for (what, words) in below.into_iter().filter(|(_, words)| !words.is_empty()) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:<15} {what}: {words}", "");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::fs::symlink;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DoctorArgs,
    }

    fn parse(line: &str) -> Result<DoctorArgs, String> {
        let words = std::iter::once("doctor").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args).map_err(|error| error.to_string())
    }

    /// The files of a machine with a GPU; removed when the test ends.
    struct Machine(PathBuf);

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    impl Machine {
        /// `name` is unique to the test.
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
            machine.set("sys/module/nvidia_uvm/refcnt", "1\n");
            machine.set("usr/lib64/libcuda.so.1", "");
            machine.set("proc/self/status", "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n");
            machine.set("proc/self/limits", LIMITS);
            machine.set("sys/class/net/veth0/mtu", "1500\n");
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
            examine(&self.0, &given(&self.args(line), &self.0))
        }

        fn finding(&self, line: &str, check: &str) -> Finding {
            let findings = self.report(line).findings;
            let found = findings.iter().find(|finding| finding.check == check);
            found.unwrap_or_else(|| panic!("no {check}: {findings:#?}")).clone()
        }
    }

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         8388608              unlimited            bytes
";

    #[test]
    fn only_problems_end_with_a_failure() {
        let machine = Machine::new("failure");
        assert!(run(&machine.args("--format json")).is_ok(), "there are warnings");
        let Err(Failure::Failed(error)) = run(&machine.args("--nic eth7")) else { panic!("it is not there") };
        assert!(error.to_string().starts_with("1 problem "), "{error}");
        fs::remove_file(machine.0.join("usr/lib64/libcuda.so.1")).unwrap();
        let Err(Failure::Failed(error)) = run(&machine.args("--nic eth7")) else { panic!("and no libcuda") };
        assert!(error.to_string().starts_with("2 problems "), "{error}");
    }

    #[test]
    fn machine_without_gpu_names_the_stand_in() {
        let machine = Machine::new("none");
        fs::remove_dir_all(machine.0.join("sys/bus")).unwrap();
        let report = machine.report("");
        let text = text(&report, Format::Table, false).unwrap();
        assert_eq!(report.count(Verdict::Problem), 1, "{text}");
        assert!(text.starts_with("problem         system gpu: no function of vendor 10de"), "{text}");
        for words in ["wanted: an NVIDIA GPU", "why: kernels are for CUDA", "what to do: "] {
            assert!(text.contains(&format!("\n                {words}")), "{text}");
        }
    }

    #[test]
    fn table_has_problems_only_unless_all() {
        let machine = Machine::new("people");
        let report = machine.report("");
        let short = text(&report, Format::Table, false).unwrap();
        assert!(!short.lines().any(|line| line.starts_with("ok  ")), "{short}");
        let long = text(&report, Format::Table, true).unwrap();
        let of = |text: &str| text.lines().filter(|line| !line.starts_with(' ')).count() - 1;
        assert_eq!(of(&long), report.findings.len(), "{long}");
        assert!(of(&short) < of(&long));
        assert!(long.contains("ok              system gpu: 0000:03:00.0 (NVIDIA H200)\n"), "{long}");
        let last = long.lines().last().unwrap();
        assert!(last.starts_with(&format!("ok {}, ", report.count(Verdict::Ok))), "{last}");
    }

    #[test]
    fn json_has_facts_then_findings() {
        let machine = Machine::new("json");
        let report = machine.report("");
        let text = text(&report, Format::Json, false).unwrap();
        let objects: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects.len(), report.findings.len() + 1);
        assert_eq!(objects[0]["facts"]["gpus"][0]["address"], "0000:03:00.0");
        for object in &objects[1..] {
            for field in ["check", "place", "verdict", "found", "wanted", "why", "advice"] {
                assert!(object[field].is_string(), "{field} of {object}");
            }
        }
    }

    #[test]
    fn command_line_selects_pool_frames_and_cards() {
        let machine = Machine::new("judged");
        let small = machine.finding("--mbufs 1024 --mbuf-size 2048", "locked-memory");
        assert!(small.verdict == Verdict::Ok && small.wanted.contains("2 MiB"), "{small:?}");
        let large = machine.finding("--mbufs 65536 --mbuf-size 4096", "locked-memory");
        assert!(large.verdict == Verdict::Warning && large.found.contains("8 MiB"), "{large:?}");
        assert_eq!(machine.finding("--nic veth0", "mtu").verdict, Verdict::Ok, "1518 bytes, FCS included");
        let long = machine.finding("--nic veth0 --frame 1519", "mtu");
        assert_eq!(long.verdict, Verdict::Problem, "{long:?}");
        assert_eq!(
            machine.finding("", "ptx-version").verdict,
            Verdict::Ok,
            "the embedded kernels, for CUDA 12.0"
        );
    }

    #[test]
    fn driver_of_another_root_is_not_queried() {
        let machine = Machine::new("asked");
        let args = machine.args("");
        let given = given(&args, &machine.0);
        assert_eq!((given.cuda, given.cuda_error, given.cuda_path), (None, None, None));
        assert_eq!(machine.finding("", "cuda").verdict, Verdict::NotKnown);
    }

    #[test]
    fn memlock_limit_is_the_soft_one() {
        assert_eq!(locked_memory(LIMITS), Some(LockedMemory::Bytes(8 << 20)));
        let unlimited = LIMITS.replace("8388608  ", "unlimited");
        assert_eq!(locked_memory(&unlimited), Some(LockedMemory::Unlimited));
        for nothing in ["", "Max locked memory", "Max locked memory     what  0  bytes"] {
            assert_eq!(locked_memory(nothing), None, "{nothing}");
        }
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
        let refused = parse("--frame 63").err().unwrap();
        assert!(refused.contains("--frame") && refused.contains("64 to 65535"), "{refused}");
    }
}
