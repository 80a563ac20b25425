//! Checks that payload is copied in one place only, offcore-dma's list of copies. Elsewhere on the data path a call
//! that copies bytes needs a reason: `// copy-ok: REASON` on the same line or the line above. For a whole file that is
//! not on the data path, a line `PATH: REASON` in xtask/copy-allowed.txt is enough.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::source::{Line, Source};
use super::{Finding, has_word};

const ALLOWED: &str = "xtask/copy-allowed.txt";
const MARK: &str = "copy-ok:";

/// The crates on the data path.
const DATA_PATH: [&str; 7] = [
    "offcore-mem",
    "offcore-ring",
    "offcore-session",
    "offcore-vhost",
    "offcore-port",
    "offcore-preload",
    "offcore-flow",
];

/// Functions that copy or fill bytes.
const COPIES: [&str; 14] = [
    "clone_from_slice",
    "copy_from",
    "copy_from_nonoverlapping",
    "copy_from_slice",
    "copy_nonoverlapping",
    "copy_to",
    "copy_to_nonoverlapping",
    "copy_within",
    "extend_from_slice",
    "memcpy",
    "memmove",
    "memset",
    "to_vec",
    "write_bytes",
];

/// Checks the data path's files against the list of exceptions, and the list against the files.
pub(super) fn check(root: &Path, sources: &[Source]) -> Result<Vec<Finding>> {
    let list = fs::read_to_string(root.join(ALLOWED)).with_context(|| format!("cannot read {ALLOWED}"))?;
    Ok(check_against(&list, sources))
}

fn check_against(list: &str, sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut allowed = Vec::new();
    for (entry, line) in list.lines().zip(1..) {
        if entry.trim().is_empty() || entry.starts_with('#') {
            continue;
        }
        let (path, reason) = entry.split_once(':').unwrap_or((entry, ""));
        let copies =
            sources.iter().find(|source| source.path == Path::new(path)).map_or(0, |s| places(s).len());
        let wrong = if reason.trim().is_empty() {
            format!("'{entry}': expected PATH: REASON")
        } else if copies == 0 {
            format!("{path} makes no copies: remove the line")
        } else {
            allowed.push(Path::new(path));
            continue;
        };
        findings.push(Finding { path: ALLOWED.into(), line, text: wrong });
    }
    findings.extend(
        sources
            .iter()
            .filter(|source| on_data_path(&source.path) && !allowed.contains(&source.path.as_path()))
            .flat_map(places),
    );
    findings
}

fn on_data_path(path: &Path) -> bool {
    let in_crate = DATA_PATH.iter().any(|name| path.starts_with(Path::new("crates").join(name).join("src")));
    in_crate && path.file_name().is_some_and(|name| name != "tests.rs")
}

/// Returns the copies of a file that are neither in tests nor marked with a reason.
fn places(source: &Source) -> Vec<Finding> {
    let mut reason_above = false;
    source.find(
        |line| {
            let excused = reason_above || has_reason(line);
            reason_above = has_reason(line) && line.code.trim().is_empty();
            copies(&line.code) && !line.test && !excused
        },
        |line| {
            let call = line.code.trim();
            format!("copies bytes: `{call}`. Hand it to the mover, or say why not in `// {MARK} REASON`")
        },
    )
}

fn copies(code: &str) -> bool {
    COPIES.iter().any(|word| has_word(code, word)) || code.contains("ptr::copy(") || fills(code)
}

/// Returns whether code calls a slice's `fill`. The project's own functions with this name are called on `self` or have
/// more arguments.
fn fills(code: &str) -> bool {
    code.split_once(".fill(").is_some_and(|(of, argument)| !of.ends_with("self") && !argument.contains(','))
}

fn has_reason(line: &Line) -> bool {
    line.comment.split_once(MARK).is_some_and(|(_, reason)| !reason.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        let source = Source::new("crates/offcore-port/src/x.rs", text);
        check_against("", &[source]).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_copy_needs_a_reason() {
        assert_eq!(
            lines(
                "a.copy_from_slice(b);\nunsafe { ptr::copy(a, b, 1) };\na[..2].fill(0);\nburst.fill(c, d);\nself.fill(c);\n"
            ),
            [1, 2, 3]
        );
        assert_eq!(
            lines("a.copy_from_slice(b); // copy-ok: a header\n// copy-ok: too\nc.to_vec();\nc.to_vec();\n"),
            [4]
        );
        assert_eq!(lines("a.copy_from_slice(b); // copy-ok:\n"), [1]);
        let none = "// copy_from_slice\nmy_copy_from_slices();\n#[cfg(test)]\nfn f() { a.copy_within(..) }\n";
        assert!(lines(none).is_empty());
    }

    #[test]
    fn only_data_path_files_are_checked() {
        for (path, looked_at) in [
            ("crates/offcore-vhost/src/enqueue.rs", true),
            ("crates/offcore-vhost/src/message/tests.rs", false),
            ("crates/offcore-vhost/tests/datapath.rs", false),
            ("crates/offcore-dma/src/cpu.rs", false),
        ] {
            assert_eq!(on_data_path(Path::new(path)), looked_at, "{path}");
        }
    }

    #[test]
    fn stale_exceptions_are_reported() {
        let source = || Source::new("crates/offcore-port/src/x.rs", "a.copy_from_slice(b);\n");
        assert_eq!(check_against("# why\ncrates/offcore-port/src/x.rs: it is a codec\n", &[source()]), []);
        for list in
            ["crates/offcore-port/src/x.rs", "crates/offcore-port/src/x.rs: ", "crates/gone.rs: reason"]
        {
            let found = check_against(list, &[source()]);
            assert_eq!(found[0].path, Path::new(ALLOWED), "{list}");
        }
    }
}
