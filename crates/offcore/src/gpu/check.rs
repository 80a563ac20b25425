//! `offcore gpu check`: tests step by step whether a device works correctly, and measures its speed.
//!
//! Each step is a run of this program with a time limit. Its output is written to a directory immediately, so that
//! nothing is lost on a machine that is available for only minutes.

mod judge;
mod step;

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use rustix::process::Signal;
use serde_json::json;

use crate::failure::Failure;
use crate::output::write;
use crate::signals::{is_stopping, stop_on_signals};
use judge::Verdict;
use step::{Ended, Started};

pub(crate) const EXAMPLES: &str = "\
Examples:
  Without a GPU, in a minute:
    offcore gpu check --device host --quick --out without-gpu

  All tests of the first GPU, in at most a quarter of an hour, as root:
    offcore gpu check

If the GPU cannot be used, the check ends early. It also looks for DSA, which is
not required.

The directory of --out contains check.json, with a line for each step, and the
output of each step in STEP.out and STEP.log. The authors would like to have these
files for GPUs that have not been tried yet.

Exit codes: 0 all steps passed, 1 a step failed, 2 usage.";

/// The file of patterns, in the same directory as the output.
const PATTERNS: &str = "patterns.txt";
/// Time limits of a step other than the benchmarks, and of the whole check.
const LIMIT: Duration = Duration::from_secs(60);
const ALL: Duration = Duration::from_secs(15 * 60);

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// The device: cuda:N, or N; host: threads that stand in for a GPU
    #[arg(short = 'g', long, value_name = "NAME", default_value = "cuda:0")]
    pub device: String,

    /// A new directory for the output of the steps
    #[arg(short, long, value_name = "DIR", default_value = "gpu-check")]
    pub out: PathBuf,

    /// Use fewer packets, cells and combinations
    #[arg(long)]
    pub quick: bool,
}

pub(crate) fn run(args: &CheckArgs) -> Result<(), Failure> {
    // An interrupted check stops its running step.
    stop_on_signals().map_err(|error| anyhow!("handling signals: {error}"))?;
    // The value becomes a word of each step's command line.
    if args.device.starts_with('-') || args.device.contains(char::is_whitespace) {
        return Err(format!("--device '{}': expected cuda:N, N or host", args.device).into());
    }
    let out = args.out.display();
    fs::create_dir(&args.out)
        .map_err(|error| anyhow!("--out {out}: {error}: expected the name of a new directory"))?;
    let lines = args.out.join("check.json");
    let lines = File::create_new(&lines).with_context(|| format!("creating {}", lines.display()))?;
    let mut check = Check { args, since: Instant::now(), lines, steps: 0, failed: Vec::new() };
    check.machine()?;
    check.workloads()?;
    check.faults()?;
    check.figures()?;
    match check.failed.len() {
        0 => {
            write(&format!("{} steps passed; their output is in {out}\n", check.steps))?;
            Ok(())
        }
        count => {
            let (steps, failed) = (check.steps, check.failed.join(", "));
            Err(anyhow!("{count} of {steps} steps failed: {failed}; see {out}").into())
        }
    }
}

/// A running check.
struct Check<'a> {
    args: &'a CheckArgs,
    since: Instant,
    /// The output file with a line of JSON for each step.
    lines: File,
    /// Number of steps so far.
    steps: usize,
    /// Names of the steps that failed.
    failed: Vec<String>,
}

impl Check<'_> {
    /// Checks the machine: the GPU with its driver and link, the processor's settings, and the cost of reads and
    /// launches.
    fn machine(&mut self) -> anyhow::Result<()> {
        let needs_gpu = !self.is_host();
        self.step("doctor", "gpu doctor --all --format json", LIMIT, |ended| {
            judge::doctor(ended, needs_gpu)
        })?;
        self.step("dsa", "dsa doctor --all --format json", LIMIT, |ended| judge::doctor(ended, false))?;
        if needs_gpu {
            let line = format!("gpu costs --device {} --format json", self.args.device);
            self.step("costs", &line, LIMIT, judge::costs)?;
            if !self.failed.is_empty() {
                bail!(
                    "{} cannot be used, so the check ends here; see {}",
                    self.args.device,
                    self.args.out.display()
                );
            }
        }
        Ok(())
    }

    /// Checks every workload type, memory, split and number of pipelines, and each kind of work.
    fn workloads(&mut self) -> anyhow::Result<()> {
        let quick = self.args.quick;
        let memories: &[_] = if quick { &["host"] } else { &["host", "gpu"] };
        let patterns = self.args.out.join(PATTERNS);
        // Any patterns are suitable, because packets are compared and not the matches.
        fs::write(&patterns, "\\x00\\x01\\x02\nevil.example\n").context("writing patterns")?;
        // Steps run in that directory.
        let matches = format!("match --patterns {PATTERNS}");
        for workload in ["kernel", "persistent", "graph"] {
            for memory in memories {
                for pipelines in [1, 4] {
                    for split in ["", "--split"].iter().take(if quick { 1 } else { 2 }) {
                        let name =
                            format!("{workload}-{memory}-{pipelines}{}", split.trim_start_matches('-'));
                        self.pass(&name, &format!("-w {workload} -m {memory} -p {pipelines} {split}"))?;
                    }
                }
            }
            for work in ["crc32c", "checksum", &matches] {
                let name = work.split(' ').next().unwrap_or_default();
                self.pass(&format!("{workload}-{name}"), &format!("-w {workload} --work {work}"))?;
            }
        }
        Ok(())
    }

    /// Runs a step in which every packet must come back.
    fn pass(&mut self, name: &str, flags: &str) -> anyhow::Result<()> {
        let line = self.passing(flags);
        self.step(name, &line, LIMIT, judge::packets)
    }

    fn passing(&self, flags: &str) -> String {
        let packets = if self.args.quick { "20k" } else { "500k" };
        format!("{} {flags} --port gen:size=1024,count={packets}", self.pipelines("--until-idle"))
    }

    /// Ends runs in the middle of work, and runs two processes at a time.
    fn faults(&mut self) -> anyhow::Result<()> {
        let running = format!(
            "{} -w persistent -p 4 --port gen:size=1024",
            self.pipelines("--stats-interval 0.2 --duration 120")
        );
        for (name, signal) in [("term", Signal::TERM), ("kill", Signal::KILL)] {
            let ended = self.start(name, &running)?.end_by(signal);
            self.tell(name, &running, ended, |ended| match signal {
                Signal::TERM => judge::packets(ended),
                _ => judge::killed(ended),
            })?;
        }
        self.pass("after-kill", "-w persistent -p 2")?;
        self.pass("eight-pipelines", "-w persistent -p 8")?;
        let line = self.passing("-w persistent -p 2");
        let other = self.start("two-at-once-b", &line)?;
        self.step("two-at-once-a", &line, LIMIT, judge::packets)?;
        self.tell("two-at-once-b", &line, other.wait(LIMIT), judge::packets)
    }

    /// Measures l2fwd-nv's tables, and the smallest burst for which a device outperforms a core.
    fn figures(&mut self) -> anyhow::Result<()> {
        let device = &self.args.device;
        let (cells, limit) = match self.args.quick {
            true => (" --quick --case workload --bursts 64 --pipelines 1", 120),
            false => ("", 420),
        };
        let line = format!("bench gpu --device {device} --format json{cells}");
        self.step("figures", &line, Duration::from_secs(limit), judge::figures)
    }

    fn is_host(&self) -> bool {
        self.args.device == offcore_gpu::host::HOST
    }

    /// Returns the flags of a pipeline run. The timeout is long, because the host device's threads may be preempted for
    /// a second on a busy machine.
    fn pipelines(&self, more: &str) -> String {
        format!("gpu --device {} --timeout 10000 --format json {more}", self.args.device)
    }

    fn start(&self, name: &str, line: &str) -> anyhow::Result<Started> {
        Started::new(&self.args.out, name, line)
    }

    /// Runs a step to its end and judges it.
    fn step(
        &mut self,
        name: &str,
        line: &str,
        limit: Duration,
        judge: impl FnOnce(&Ended) -> Verdict,
    ) -> anyhow::Result<()> {
        let left = ALL.saturating_sub(self.since.elapsed());
        let ended = self.start(name, line)?.wait(limit.min(left));
        self.tell(name, line, ended, judge)
    }

    /// Judges how a step has ended, prints the result, and saves it.
    fn tell(
        &mut self,
        name: &str,
        line: &str,
        ended: Result<Ended, String>,
        judge: impl FnOnce(&Ended) -> Verdict,
    ) -> anyhow::Result<()> {
        if is_stopping() {
            bail!("interrupted: the results so far are in {}", self.args.out.display());
        }
        let seconds = ended.as_ref().map(|ended| ended.took.as_secs_f64()).ok();
        let verdict = ended.and_then(|ended| judge(&ended));
        let (word, text) = match &verdict {
            Ok(text) => ("ok", text),
            Err(text) => ("FAILED", text),
        };
        self.steps += 1;
        if verdict.is_err() {
            self.failed.push(name.to_owned());
        }
        let kept = json!({ "step": name, "command": format!("offcore {line}"), "seconds": seconds,
            "ok": verdict.is_ok(), "result": text });
        writeln!(self.lines, "{kept}").and_then(|()| self.lines.sync_data()).context("saving a result")?;
        write(&format!("{word:<7} {name}: {text}\n"))?;
        Ok(())
    }
}
