//! `cargo xtask kernels`: compiles the GPU kernels' PTX from source, assembles it, and compares it with the checked-in
//! file. This needs no GPU and no CUDA toolkit: nvrtc and ptxas are downloaded from PyPI into cargo's target directory.

mod ptxas;
mod tools;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::project::Project;
use crate::steps::Outcome;
use tools::{Found, NVRTC, Tools};

/// Directory of the kernels, relative to the root.
const DIR: &str = "crates/offcore-gpu/kernels";
const SOURCE: &str = "kernels.cu";
const PTX: &str = "kernels.ptx";

/// Compiler options. The architecture is the lowest that the kernels support, because a driver compiles PTX for newer
/// ones. The options must not depend on the machine, or the PTX would.
const OPTIONS: [&str; 2] = ["--gpu-architecture=compute_75", "--std=c++17"];

/// The architectures for which the PTX must assemble: the PTX's own, A100's, and H100's and H200's.
const ARCHITECTURES: [&str; 3] = ["sm_75", "sm_80", "sm_90"];

/// Compiles and assembles the PTX, then compares it with the checked-in file, or replaces that file with `update`.
pub(crate) fn run(project: &Project, update: bool) -> Result<Outcome> {
    let dir = project.root.join(DIR);
    ensure!(dir.join(SOURCE).is_file(), "there is no {DIR}/{SOURCE}, which the kernels are compiled from");
    let work = project.target.join("kernels");
    let tools = match tools::find(&work)? {
        Found::Tools(tools) => tools,
        Found::Missing(why) => return Ok(Outcome::Skipped(why)),
    };
    let compiled = compile(&tools, &dir, &work)?;
    let mut findings = Vec::new();
    if !compiled.log.is_empty() {
        findings.push(format!("nvrtc says of the files in {DIR}:\n{}", compiled.log));
    }
    let Some(code) = compiled.code else { return Ok(Outcome::Failed(findings)) };
    let made = format!("{}{}", head(&sources(&dir)?), without_head(&code));
    let candidate = work.join(PTX);
    write(&candidate, &made)?;
    let refused = assemble(&tools, &candidate)?;
    if !refused.is_empty() {
        findings.extend(refused);
        return Ok(Outcome::Failed(findings));
    }
    let kept = dir.join(PTX);
    if update {
        write(&kept, &made)?;
        println!("wrote {DIR}/{PTX}");
    } else {
        findings.extend(differs(&kept, &made)?);
    }
    Ok(Outcome::of(findings))
}

/// Runs as a step of CI, which may be unable to reach PyPI. A test of offcore-gpu also checks, without the compiler,
/// that the PTX was made from these sources.
pub(crate) fn step(project: &Project) -> Result<Outcome> {
    Ok(tolerate_missing_compiler(run(project, false)?))
}

/// Without a compiler the step passes with a note. A difference is always a failure.
fn tolerate_missing_compiler(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Skipped(why) => {
            println!(
                "NOTE: {PTX} was not rebuilt: {why}; that it belongs to its sources is checked by a test"
            );
            Outcome::Passed
        }
        other => other,
    }
}

struct Compiled {
    /// The PTX, unless compilation failed.
    code: Option<String>,
    /// Errors and warnings with file and line.
    log: String,
}

fn compile(tools: &Tools, dir: &Path, work: &Path) -> Result<Compiled> {
    let script = work.join("nvrtc.py");
    write(&script, include_str!("kernels/nvrtc.py"))?;
    let output = work.join("nvrtc.ptx");
    let ran = Command::new(&tools.python)
        .arg(&script)
        .arg(&tools.nvrtc)
        .args([Path::new(SOURCE), &output])
        .args(OPTIONS)
        .current_dir(dir)
        .output()
        .with_context(|| format!("cannot run {}", tools.python.display()))?;
    let mut log = String::from_utf8_lossy(&ran.stderr).trim_end().to_owned();
    if !ran.status.success() {
        if log.is_empty() {
            log = format!("no PTX: {}", ran.status);
        }
        return Ok(Compiled { code: None, log });
    }
    let code = fs::read_to_string(&output).with_context(|| format!("cannot read {}", output.display()))?;
    Ok(Compiled { code: Some(code), log })
}

/// Assembles for every architecture and prints each kernel's resources. Returns the assembler's complaints.
fn assemble(tools: &Tools, ptx: &Path) -> Result<Vec<String>> {
    println!("{}", ptxas::HEADING);
    let mut findings = Vec::new();
    for architecture in ARCHITECTURES {
        let ran = Command::new(&tools.ptxas)
            .args(["--verbose", "--gpu-name", architecture, "--output-file"])
            .args([&ptx.with_extension(architecture), ptx])
            .output()
            .with_context(|| format!("cannot run {}", tools.ptxas.display()))?;
        let said = [ran.stdout, ran.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        let kernels = ptxas::kernels(&said);
        kernels.iter().for_each(|kernel| println!("{architecture:<6} {kernel}"));
        let complaints = ptxas::complaints(&said);
        if !ran.status.success() || !complaints.is_empty() {
            findings.push(format!("ptxas for {architecture}: {}\n{}", ran.status, complaints.join("\n")));
        } else if kernels.is_empty() {
            findings.push(format!("ptxas for {architecture}: {SOURCE} has no kernel"));
        }
        findings.extend(kernels.iter().filter_map(|kernel| kernel.too_much(architecture)));
    }
    Ok(findings)
}

/// Returns the PTX file's header, which replaces the compiler's own.
fn head(sources: &str) -> String {
    format!(
        "// Made from {SOURCE} by `cargo xtask kernels --update`: {} {}, {}\n// {sources}\n\n",
        NVRTC.name,
        NVRTC.version,
        OPTIONS.join(" ")
    )
}

/// Returns the names of the kernels' source files, and a hash of names and content, each followed by a zero byte. A
/// test of offcore-gpu (src/ptx.rs) checks this line, so that outdated PTX is also detected without a compiler.
fn sources(dir: &Path) -> Result<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot read {DIR}"))? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        if name.ends_with(".cu") || name.ends_with(".h") {
            names.push(name);
        }
    }
    names.sort();
    let mut bytes = Vec::new();
    for name in &names {
        bytes.extend(name.bytes());
        bytes.push(0);
        bytes.extend(fs::read(dir.join(name)).with_context(|| format!("cannot read {DIR}/{name}"))?);
        bytes.push(0);
    }
    Ok(format!("Sources, with their FNV-1a: {} {:016x}", names.join(" "), fnv1a(&bytes)))
}

/// 64-bit FNV-1a.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Returns PTX from its first directive. The comments above it name the build of the compiler.
fn without_head(ptx: &str) -> &str {
    let mut rest = ptx;
    while let Some((line, below)) = rest.split_once('\n') {
        if !line.trim().is_empty() && !line.starts_with("//") {
            break;
        }
        rest = below;
    }
    rest
}

fn differs(kept: &Path, made: &str) -> Result<Option<String>> {
    let remedy = "`cargo xtask kernels --update` writes it";
    if !kept.exists() {
        return Ok(Some(format!("there is no {DIR}/{PTX}: {remedy}")));
    }
    let kept = fs::read(kept).with_context(|| format!("cannot read {}", kept.display()))?;
    Ok(difference(&String::from_utf8_lossy(&kept), made).map(|difference| {
        format!("{DIR}/{PTX} is not what {SOURCE} compiles to: {difference}; {remedy} again")
    }))
}

/// Describes the first difference between two texts.
fn difference(kept: &str, made: &str) -> Option<String> {
    if kept == made {
        return None;
    }
    let (mut kept, mut made) = (kept.split('\n'), made.split('\n'));
    for number in 1.. {
        let what = match (kept.next(), made.next()) {
            (Some(kept), Some(made)) if kept == made => continue,
            (Some(kept), Some(made)) => format!("has {kept:?}, the compiler makes {made:?}"),
            (Some(kept), None) => format!("has {kept:?}, where the compiler's text has ended"),
            (None, Some(made)) => format!("is missing, the compiler makes {made:?}"),
            (None, None) => break,
        };
        return Some(format!("line {number} {what}"));
    }
    None
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NVRTC_SAYS: &str = "//\n// Generated by NVIDIA NVVM Compiler\n//\n// Compiler Build ID: CL-31968024\n//\n\n\
        .version 8.0\n.target sm_75\n\n\t// .globl\tog_one\n// begin inline asm\n";

    #[test]
    fn only_the_compiler_header_is_removed() {
        assert_eq!(
            without_head(NVRTC_SAYS),
            ".version 8.0\n.target sm_75\n\n\t// .globl\tog_one\n// begin inline asm\n"
        );
        assert_eq!(without_head(".version 8.0"), ".version 8.0");
        assert_eq!(without_head("// nothing else\n"), "");
    }

    #[test]
    fn head_is_a_comment_with_the_compiler() {
        let head = head("Sources: one.cu");
        assert!(head.contains(NVRTC.version) && head.contains("compute_"), "{head}");
        assert!(head.ends_with("\n// Sources: one.cu\n\n"), "{head}");
        assert_eq!(without_head(&format!("{head}.version 8.0\n")), ".version 8.0\n");
    }

    #[test]
    fn fnv1a_matches_published_vectors() {
        // Test vectors of draft-eastlake-fnv, appendix C.
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
        let of = |kept, made| difference(kept, made).unwrap_or_default();
        assert_eq!(of("a\nb\n", "a\nc\n"), "line 2 has \"b\", the compiler makes \"c\"");
        assert_eq!(of("a\n", "a"), "line 2 has \"\", where the compiler's text has ended");
        assert_eq!(of("a", "a\nb"), "line 2 is missing, the compiler makes \"b\"");
        assert_eq!(of("a\r\n", "a\n"), "line 1 has \"a\\r\", the compiler makes \"a\"");
    }

    #[test]
    fn ci_tolerates_only_missing_compiler() {
        assert!(matches!(tolerate_missing_compiler(Outcome::Skipped("no way".into())), Outcome::Passed));
        assert!(matches!(
            tolerate_missing_compiler(Outcome::Failed(vec!["it differs".into()])),
            Outcome::Failed(_)
        ));
        assert!(matches!(tolerate_missing_compiler(Outcome::Passed), Outcome::Passed));
    }

    #[test]
    fn missing_ptx_counts_as_different() {
        let found = differs(Path::new("/there/is/no/such.ptx"), "a").unwrap().unwrap();
        assert!(found.contains("cargo xtask kernels --update"), "{found}");
    }
}
