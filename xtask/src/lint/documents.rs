//! Checks documents: references to paths in backquotes that begin at the root, links to files, and the width of prose.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{Finding, sentences, width};

/// Prefixes of text in backquotes that is taken for a path.
const ROOTS: [&str; 5] = ["crates/", "docs/", "fuzz/", "tests/", "xtask/"];

/// Checks the documents at the root and in docs/.
pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for dir in ["", "docs"] {
        let entries = fs::read_dir(root.join(dir)).with_context(|| format!("cannot read '{dir}'"))?;
        for entry in entries {
            let path = Path::new(dir).join(entry?.file_name());
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(root.join(&path))
                    .with_context(|| format!("cannot read {}", path.display()))?;
                findings.extend(missing(&path, &text, |named| root.join(named).exists()));
                findings.extend(width::prose(&path, &text));
                // This document lists the phrases.
                if path != Path::new("CONTRIBUTING.md") {
                    findings.extend(sentences::phrases_of_document(&path, &text));
                }
            }
        }
    }
    Ok(findings)
}

fn missing(document: &Path, text: &str, exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let dir = document.parent().unwrap_or(Path::new(""));
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let quoted =
            line.split('`').skip(1).step_by(2).filter(|word| ROOTS.iter().any(|r| word.starts_with(r)));
        let links =
            line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        let linked = links.filter(|target| !target.contains("://") && !target.starts_with('#'));
        let files = linked.map(|target| target.split_once('#').map_or(target, |(file, _)| file));
        let named = quoted.map(PathBuf::from).chain(files.map(|target| dir.join(target)));
        findings.extend(named.filter(|path| !exists(path)).map(|path| Finding {
            path: document.to_owned(),
            line: number,
            text: format!("{} is not there", path.display()),
        }));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_links_are_looked_up() {
        let text =
            "`crates/a.rs` and `crates/b.rs`, `other/c.rs`, [d](../d.md), [e](https://e.org/), [f](f.md#g)\n";
        let there = [Path::new("crates/a.rs"), Path::new("docs/../d.md")];
        let found = missing(Path::new("docs/x.md"), text, |path| there.contains(&path));
        let named: Vec<_> = found.iter().map(|finding| finding.text.as_str()).collect();
        assert_eq!(named, ["crates/b.rs is not there", "docs/f.md is not there"]);
    }
}
