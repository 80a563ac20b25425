//! Checks for unwanted words: the words of the table in CONTRIBUTING.md, in code, comments, texts and documents.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::Finding;

/// The file with the table, which is the only place that may contain its words.
const TABLE: &str = "CONTRIBUTING.md";
/// The table's heading.
const HEAD: &str = "| not | but |";

/// Checks the files at these paths, and the documents at the root and in docs/.
pub(super) fn check(root: &Path, sources: impl Iterator<Item = PathBuf>) -> Result<Vec<Finding>> {
    let read = |path: &Path| {
        fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {}", path.display()))
    };
    let words = words(&read(Path::new(TABLE))?);
    ensure!(!words.is_empty(), "{TABLE} has no table that begins with '{HEAD}'");
    let mut paths: Vec<PathBuf> = sources.collect();
    for dir in ["", "docs"] {
        let entries = fs::read_dir(root.join(dir)).with_context(|| format!("cannot read '{dir}'"))?;
        for entry in entries {
            let path = Path::new(dir).join(entry?.file_name());
            // The changelog names renamed things by their old names.
            let may = path == Path::new(TABLE) || path == Path::new("CHANGELOG.md");
            if !may && path.extension().is_some_and(|extension| extension == "md") {
                paths.push(path);
            }
        }
    }
    let mut findings = Vec::new();
    for path in paths {
        findings.extend(found(&path, &read(&path)?, &words));
    }
    Ok(findings)
}

/// Returns the table's rows: the unwanted words in lower case, and their replacements.
fn words(table: &str) -> Vec<(String, String)> {
    let rows =
        table.lines().skip_while(|line| *line != HEAD).skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.trim_matches('|').split_once('|'));
    cells
        .flat_map(|(wrong, right)| {
            let pair = |word: &str| (word.trim().to_lowercase(), right.trim().to_owned());
            wrong.split(',').map(pair).collect::<Vec<_>>()
        })
        .collect()
}

fn found(path: &Path, text: &str, words: &[(String, String)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let line = line.to_lowercase();
        for (wrong, right) in words {
            let has = |(at, _): (usize, &str)| {
                let (before, after) = (&line[..at], &line[at + wrong.len()..]);
                !before.ends_with(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
            };
            if line.match_indices(wrong.as_str()).any(has) {
                let text = format!("'{wrong}': write {right}");
                findings.push(Finding { path: path.to_owned(), line: number, text });
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_whole_in_any_case() {
        let table = format!(
            "text\n\n{HEAD}\n|---|---|\n| zeal, great zeal | effort |\n| is afoot | runs |\n\n| x | y |\n"
        );
        let words = words(&table);
        assert_eq!(words.len(), 3);
        let text = "const ZEAL: u8 = 1;\nzealous\n// a great_zeal\n\"It is afoot.\"\nx\n";
        let lines: Vec<_> = found(Path::new("a.rs"), text, &words).iter().map(|f| f.line).collect();
        assert_eq!(lines, [1, 3, 4]);
    }
}
