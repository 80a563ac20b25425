//! Rules of this project that no compiler checks: where bytes are copied, where `unsafe` is allowed, the size of files,
//! structs and types, the width of comments, tuples as parameters, imports between crates and modules, documentation
//! and callers of public items, references in documents, unwanted words, subjects of commits, and unfinished code.

mod allowed;
mod arrows;
mod blocks;
mod callers;
mod circles;
mod copies;
mod documents;
mod fields;
mod items;
mod sentences;
mod source;
mod subjects;
mod tuples;
mod width;
mod words;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::project::Project;
use source::Source;

/// Maximum number of lines of a file, including tests.
const LONGEST: usize = 600;

/// Paths in which `unsafe` is allowed.
const UNSAFE: [&str; 18] = [
    "crates/offcore-stats/",
    "crates/offcore-mem/",
    "crates/offcore-ring/",
    "crates/offcore-session/",
    "crates/offcore-dma/",
    "crates/offcore-dsa/",
    "crates/offcore-dpdk/",
    "crates/offcore-gpu/",
    "crates/offcore-tcp/src/path/copies.rs",
    "crates/offcore-tcp/src/writes",
    "crates/offcore-vhost/",
    "crates/offcore-port/",
    "crates/offcore-preload/",
    "crates/offcore-bench/src/dma/",
    "crates/offcore-bench/src/model/load.rs",
    "crates/offcore-bench/src/method/flush.rs",
    "crates/offcore-bench/src/peer/",
    "tests/",
];

/// Markers of unfinished code, and tests that never run. Concatenated so that this file does not contain them.
const UNFINISHED_MARKERS: [(&str, &str); 5] = [
    (concat!("to", "do!"), "write the code, or leave the function out"),
    (concat!("un", "implemented!"), "write the code, or leave the function out"),
    (concat!("FIX", "ME"), "mend it, or say in the commit what is left"),
    (concat!("XX", "X"), "mend it, or say in the commit what is left"),
    (concat!("#[ig", "nore"), "a test that never runs proves nothing: make it run, or remove it"),
];

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    path: PathBuf,
    /// Line number from 1, or 0 for the whole file.
    line: usize,
    text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.path.display())?;
        if self.line > 0 {
            write!(f, "{}:", self.line)?;
        }
        write!(f, " {}", self.text)
    }
}

/// Checks every source file, manifest, document and new commit.
pub(crate) fn run(project: &Project) -> Result<Vec<Finding>> {
    let mut tree = Tree::default();
    for dir in ["crates", "tests", "xtask", "fuzz"] {
        tree.read(&project.root, Path::new(dir))?;
    }
    let mut findings = arrows::check(&project.packages, &project.root)?;
    findings.extend(arrows::missing(&project.packages));
    findings.extend(copies::check(&project.root, &tree.sources)?);
    findings.extend(documents::check(&project.root)?);
    findings.extend(words::check(&project.root, tree.sources.iter().map(|source| source.path.clone()))?);
    findings.extend(subjects::check(&project.root));
    findings.extend(tree.check());
    findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
    Ok(findings)
}

/// The source files, and the parts of them that are checked together.
#[derive(Default)]
struct Tree {
    sources: Vec<Source>,
    findings: Vec<Finding>,
    /// Modules and types of each crate, without its tests, by the directory of its sources.
    crates: BTreeMap<PathBuf, (circles::Crate, blocks::Crate)>,
    names: callers::Names,
    tuples: Vec<Finding>,
}

impl Tree {
    /// Reads the Rust files below `dir`, which need not exist.
    fn read(&mut self, root: &Path, dir: &Path) -> Result<()> {
        let Ok(entries) = fs::read_dir(root.join(dir)) else { return Ok(()) };
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot read {}", dir.display()))?;
            let path = dir.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                if entry.file_name() != "target" {
                    self.read(root, &path)?;
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(root.join(&path))
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let (source, file) = Source::parse(path, &text)?;
                self.add(source, &file);
            }
        }
        Ok(())
    }

    /// Checks one file, and adds it to the parts that are checked together.
    fn add(&mut self, source: Source, file: &syn::File) {
        self.findings.extend(length(&source));
        self.findings.extend(unsafe_places(&source));
        self.findings.extend(unfinished_markers(&source));
        self.findings.extend(fields::check(&source, file));
        self.findings.extend(sentences::first_words(&source));
        self.findings.extend(sentences::phrases(&source));
        self.tuples.extend(tuples::find(&source, file));
        self.findings.extend(width::comments(&source, file));
        self.names.add(&source, file);
        let src = source.path.ancestors().find(|dir| dir.ends_with("src"));
        if let Some((src, inside)) = src.and_then(|src| Some((src, source.path.strip_prefix(src).ok()?)))
            && !inside.iter().any(|part| part == "tests" || part == "tests.rs")
        {
            self.findings.extend(items::check(&source, file));
            let (modules, types) = self.crates.entry(src.to_owned()).or_default();
            modules.add(&source.path, inside, file);
            types.add(&source.path, file);
        }
        self.sources.push(source);
    }

    /// Returns the findings in all files.
    fn check(self) -> Vec<Finding> {
        let mut findings = self.findings;
        findings.extend(tuples::check(self.tuples));
        findings.extend(self.names.check());
        for (dir, (modules, types)) in &self.crates {
            findings.extend(modules.check());
            findings.extend(types.check(dir));
        }
        findings
    }
}

fn length(source: &Source) -> Option<Finding> {
    let lines = source.lines.len();
    (lines > LONGEST).then(|| Finding {
        path: source.path.clone(),
        line: 0,
        text: format!("{lines} lines, at most {LONGEST}: it is asking to be two files"),
    })
}

fn unsafe_places(source: &Source) -> Vec<Finding> {
    let path = source.path.to_string_lossy();
    // A crate's own tests and examples emulate the other party with raw memory.
    let outside = path.starts_with("crates/") && (path.contains("/tests/") || path.contains("/examples/"));
    if outside || UNSAFE.iter().any(|dir| path.starts_with(dir)) {
        return Vec::new();
    }
    source.find(
        |line| has_word(&line.code, "unsafe"),
        |_| format!("unsafe code; it may be in {} and in tests only", UNSAFE.join(", ")),
    )
}

fn unfinished_markers(source: &Source) -> Vec<Finding> {
    UNFINISHED_MARKERS
        .iter()
        .flat_map(|(word, remedy)| {
            source.find(
                |line| line.code.contains(word) || line.comment.contains(word),
                |_| format!("{word}: {remedy}"),
            )
        })
        .collect()
}

/// Returns whether `text` contains `word` as a whole identifier.
fn has_word(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source::new(path, text)
    }

    #[test]
    fn unsafe_is_found_where_it_may_not_be() {
        let text =
            "fn f() {\n    // unsafe in a comment\n    unsafe_fn(\"unsafe\");\n    unsafe { g() }\n}\n";
        let found = unsafe_places(&source("crates/offcore-flow/src/lib.rs", text));
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [4]);
        assert_eq!(unsafe_places(&source("crates/offcore-mem/src/lib.rs", text)), []);
        assert_eq!(unsafe_places(&source("crates/offcore-flow/tests/x.rs", text)), []);
        assert_eq!(unsafe_places(&source("crates/offcore-bench/src/peer/x.rs", text)), []);
        assert_eq!(unsafe_places(&source("crates/offcore-bench/src/run.rs", text)).len(), 1);
    }

    #[test]
    fn unfinished_markers_are_found_outside_strings() {
        let text = format!(
            "// {}: later\nlet s = \"{}\";\n{}()\n",
            UNFINISHED_MARKERS[2].0, UNFINISHED_MARKERS[0].0, UNFINISHED_MARKERS[1].0
        );
        let lines: Vec<_> =
            unfinished_markers(&source("xtask/src/x.rs", &text)).iter().map(|f| f.line).collect();
        assert_eq!(lines, [3, 1]);
    }

    #[test]
    fn long_files_are_found() {
        assert!(length(&source("a.rs", &"\n".repeat(LONGEST))).is_none());
        assert!(length(&source("a.rs", &"\n".repeat(LONGEST + 1))).is_some());
    }
}
