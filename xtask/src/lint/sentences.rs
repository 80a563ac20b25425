//! Checks sentences. In comments, no sentence begins with "Of", and only questions begin with "Who" or "What".
//! Comments, documents and user-facing strings do not contain certain phrases. Names may contain them.

use std::path::Path;

use super::source::Source;
use super::{Finding, has_word};

/// First words of unwanted sentences, and whether questions may begin with them.
const FIRST: [(&str, bool); 3] = [("Who ", true), ("What ", true), ("Of ", false)];

/// Phrases that no sentence contains. Concatenated so that this file does not contain them.
const PHRASES: [(&str, &str); 6] = [
    (concat!("no", "body"), "no process, no reader"),
    (concat!("some", "body"), "a process, a reader"),
    (concat!("an", "ew"), "again"),
    (concat!("goes ", "on"), "continues"),
    (concat!("so ", "many"), "the number"),
    (concat!("all ", "the same"), "nevertheless, or leave it out"),
];

/// Returns the unwanted phrases of one file: in comments, and in texts that are not for tests.
pub(super) fn phrases(source: &Source) -> Vec<Finding> {
    let tests = ["tests", "tests.rs", "examples", "fuzz"];
    let test = source.path.iter().any(|part| tests.iter().any(|name| part == *name));
    let mut findings = Vec::new();
    for (line, number) in source.lines.iter().zip(1..) {
        let text = if test || line.test { "" } else { &line.text };
        if !line.comment.trim().is_empty() || !text.trim().is_empty() {
            findings.extend(contained(&source.path, number, &format!("{} {text}", line.comment)));
        }
    }
    findings
}

/// Returns the unwanted phrases of a document. Text in backquotes is code.
pub(super) fn phrases_of_document(path: &Path, text: &str) -> Vec<Finding> {
    let prose = |line: &str| line.split('`').step_by(2).collect::<String>();
    let numbered = text.lines().zip(1..);
    numbered.flat_map(|(line, number)| contained(path, number, &prose(line))).collect()
}

fn contained(path: &Path, line: usize, text: &str) -> Vec<Finding> {
    let text = text.to_lowercase();
    let found = PHRASES.iter().filter(|(phrase, _)| text.contains(phrase) && has_word(&text, phrase));
    found
        .map(|(phrase, instead)| {
            let text = format!("'{phrase}': write {instead}");
            Finding { path: path.to_owned(), line, text }
        })
        .collect()
}

/// Returns the sentences of one file's comments with an unwanted first word.
pub(super) fn first_words(source: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut paragraph = Vec::new();
    let mut fenced = false;
    for (line, number) in source.lines.iter().zip(1..) {
        let text = content(&line.comment);
        let fence = text.starts_with("```");
        let starts = !line.code.trim().is_empty() || text.starts_with(['-', '*', '#', '|']);
        if text.is_empty() || fence || starts {
            findings.extend(unwanted(source, &paragraph));
            paragraph.clear();
        }
        fenced = fenced != fence && !line.comment.trim().is_empty();
        if !text.is_empty() && !fence && !fenced {
            paragraph.push((text.trim_start_matches(['-', '*', '#', '|']).trim(), number));
        }
    }
    findings.extend(unwanted(source, &paragraph));
    findings
}

/// Returns the text of a comment without its marks.
fn content(comment: &str) -> &str {
    let comment = comment.trim();
    ["///", "//!", "//", "/*"].iter().find_map(|mark| comment.strip_prefix(mark)).map_or("", str::trim)
}

/// Returns the unwanted sentences of a paragraph.
fn unwanted(source: &Source, paragraph: &[(&str, usize)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut first = true;
    for (at, (line, number)) in paragraph.iter().enumerate() {
        let mut rest = *line;
        loop {
            if first && let Some((word, questions)) = FIRST.iter().find(|(word, _)| rest.starts_with(word)) {
                let following = paragraph[at + 1..].iter().map(|(line, _)| *line);
                let end = [rest].into_iter().chain(following).find_map(end);
                if !questions || end.is_none_or(|(mark, _)| mark != '?') {
                    let text =
                        format!("a sentence that begins with '{}': begin with its subject", word.trim());
                    findings.push(Finding { path: source.path.clone(), line: *number, text });
                }
            }
            let Some((_, after)) = end(rest) else {
                first = false;
                break;
            };
            first = true;
            rest = after.trim_start();
            if rest.is_empty() {
                break;
            }
        }
    }
    findings
}

/// Returns the mark at the end of the first sentence that ends in this text, and the text after it.
fn end(text: &str) -> Option<(char, &str)> {
    text.char_indices().find_map(|(at, mark)| {
        let after = &text[at + mark.len_utf8()..];
        let ends = ['.', '?', '!'].contains(&mark) && (after.is_empty() || after.starts_with(' '));
        ends.then_some((mark, after))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        let (source, _) = Source::parse("a.rs".into(), text).unwrap();
        first_words(&source).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn sentences_with_unwanted_first_words_are_found() {
        assert_eq!(lines("// Who reads this waits.\nfn a() {}\n"), [1]);
        assert_eq!(lines("//! A queue. What waits in it\n//! is lost. Of these, one stays.\n"), [1, 2]);
        assert_eq!(lines("/// A queue.\n/// - Of one port\n/// -\nfn a() {} // What ends.\n"), [2, 4]);
        assert_eq!(lines("// A queue.\n//\n// Of all ports: one.\n"), [3]);
        assert_eq!(lines("// It waits\nfn a() {} // Of b.\n"), [2]);
    }

    #[test]
    fn questions_and_other_positions_are_allowed() {
        assert_eq!(lines("// What waits,\n// and for how long? Who reads it? `What `\n"), [0; 0]);
        assert_eq!(lines("// The reader\n// Who waits.\nconst A: &str = \"What waits.\";\n"), [0; 0]);
        assert_eq!(lines("// ```text\n// Of b.\n// ```\n// Whoever and Offcore.\n"), [0; 0]);
        assert_eq!(lines("// What waits\nfn a() {}\n// for whom?\n"), [1]);
    }

    #[test]
    fn phrases_are_found_in_sentences() {
        let text = "// Nobody reads it.\nconst NOBODY: &str = \"It goes on.\";\nfn anew() {} // all the same.\n\
                    #[cfg(test)]\nmod tests {\n    const A: &str = \"somebody\"; // so many\n}\n";
        let lines = |path: &str| -> Vec<usize> {
            phrases(&Source::new(path, text)).iter().map(|finding| finding.line).collect()
        };
        assert_eq!(lines("crates/a/src/b.rs"), [1, 2, 3, 6]);
        assert_eq!(lines("crates/a/tests/b.rs"), [1, 3, 6]);
        let found = phrases_of_document(Path::new("a.md"), "It runs as `nobody`.\nIt starts anew.\n");
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2]);
    }
}
