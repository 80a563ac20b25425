//! A Rust file for the lints: code and comment of each line are separated, strings are blanked out, and tests are
//! marked.

use std::path::PathBuf;

use super::Finding;

/// A Rust file.
#[derive(Debug)]
pub(super) struct Source {
    /// The path relative to the root of the workspace.
    pub(super) path: PathBuf,
    pub(super) lines: Vec<Line>,
}

/// One line of a file.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// The line without comments and without the content of strings.
    pub(super) code: String,
    /// The text of the line's comments.
    pub(super) comment: String,
    /// Whether the line is inside an item that is compiled for tests only.
    pub(super) test: bool,
}

impl Source {
    pub(super) fn new(path: PathBuf, text: &str) -> Self {
        let mut lines = split(text);
        mark_tests(&mut lines);
        Self { path, lines }
    }

    /// Returns a finding with the text from `say` for each line that `wanted` accepts.
    pub(super) fn find(
        &self,
        mut wanted: impl FnMut(&Line) -> bool,
        mut say: impl FnMut(&Line) -> String,
    ) -> Vec<Finding> {
        let numbered = self.lines.iter().zip(1..);
        numbered
            .filter(|(line, _)| wanted(line))
            .map(|(line, number)| Finding { path: self.path.clone(), line: number, text: say(line) })
            .collect()
    }
}

/// The state of the parser.
enum Place {
    Code,
    LineComment,
    /// Inside block comments, with the nesting depth.
    BlockComment(u32),
    String,
    /// Inside a raw string that ends with a quote and this number of hashes.
    RawString(usize),
}

/// Splits a file into lines, and each line into code and comment.
fn split(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let next_are =
        |at: usize, wanted: &str| wanted.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    let mut lines = Vec::new();
    let mut line = Line::default();
    let mut place = Place::Code;
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        if c == '\n' {
            if matches!(place, Place::LineComment) {
                place = Place::Code;
            }
            lines.push(std::mem::take(&mut line));
            at += 1;
            continue;
        }
        let mut step = 1;
        match place {
            Place::Code => {
                if next_are(at, "//") {
                    place = Place::LineComment;
                    step = 2;
                } else if next_are(at, "/*") {
                    place = Place::BlockComment(1);
                    step = 2;
                } else if let Some(hashes) = raw_string(&chars, at, &line.code) {
                    line.code.push('"');
                    place = Place::RawString(hashes);
                    step = hashes + 2;
                } else if c == '"' {
                    line.code.push('"');
                    place = Place::String;
                } else if let Some(len) = char_literal(&chars[at..]) {
                    line.code.push_str("' '");
                    step = len;
                } else {
                    line.code.push(c);
                }
            }
            Place::LineComment => line.comment.push(c),
            Place::BlockComment(depth) => {
                if next_are(at, "*/") {
                    place = if depth == 1 { Place::Code } else { Place::BlockComment(depth - 1) };
                    step = 2;
                } else if next_are(at, "/*") {
                    place = Place::BlockComment(depth + 1);
                    step = 2;
                } else {
                    line.comment.push(c);
                }
            }
            // A backslash at the end of a line leaves the line break to the code above.
            Place::String if c == '\\' && chars.get(at + 1) != Some(&'\n') => step = 2,
            Place::String => {
                if c == '"' {
                    line.code.push('"');
                    place = Place::Code;
                }
            }
            Place::RawString(hashes) => {
                if c == '"' && (1..=hashes).all(|i| chars.get(at + i) == Some(&'#')) {
                    line.code.push('"');
                    place = Place::Code;
                    step = hashes + 1;
                }
            }
        }
        at += step;
    }
    if !line.code.is_empty() || !line.comment.is_empty() {
        lines.push(line);
    }
    lines
}

/// Returns the number of hashes of the raw string that starts with the `r` at `at`.
fn raw_string(chars: &[char], at: usize, before: &str) -> Option<usize> {
    // The `r` may follow a `b` or `c`, but must not be part of a name.
    let name = before.trim_end_matches(['b', 'c']);
    if chars[at] != 'r' || name.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    (chars.get(at + 1 + hashes) == Some(&'"')).then_some(hashes)
}

/// Returns the length of the character literal that `chars` starts with, or `None` for a lifetime.
fn char_literal(chars: &[char]) -> Option<usize> {
    match chars {
        ['\'', '\\', _, rest @ ..] => Some(3 + rest.iter().position(|&c| c == '\'')? + 1),
        ['\'', _, '\'', ..] => Some(3),
        _ => None,
    }
}

/// Marks the items after `#[cfg(test)]`, or after another condition that is true in tests.
fn mark_tests(lines: &mut [Line]) {
    let code: Vec<(usize, char)> =
        lines.iter().enumerate().flat_map(|(i, line)| line.code.chars().map(move |c| (i, c))).collect();
    let mut at = 0;
    while at < code.len() {
        let Some(end) = attribute(&code, at) else {
            at += 1;
            continue;
        };
        let text: String = code[at..end].iter().map(|&(_, c)| c).filter(|c| !c.is_whitespace()).collect();
        let begin = at;
        at = end;
        if text.starts_with("#[cfg(") && super::has_word(&text, "test") && !text.contains("not(") {
            at = item_end(&code, end);
            let last = code.get(at.wrapping_sub(1)).map_or(0, |&(line, _)| line);
            for line in &mut lines[code[begin].0..=last] {
                line.test = true;
            }
        }
    }
}

/// Returns the end of the attribute that starts at `at`.
fn attribute(code: &[(usize, char)], at: usize) -> Option<usize> {
    if code[at].1 != '#' || code.get(at + 1)?.1 != '[' {
        return None;
    }
    let mut depth = 0;
    for (i, &(_, c)) in code.iter().enumerate().skip(at + 1) {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

/// Returns the end of the item, statement or field that starts at `at`: after its braces, or at its `;` or `,`.
fn item_end(code: &[(usize, char)], mut at: usize) -> usize {
    let (mut inner, mut braces) = (0, 0);
    while at < code.len() {
        if let Some(end) = attribute(code, at) {
            at = end;
            continue;
        }
        match code[at].1 {
            '(' | '[' => inner += 1,
            ')' | ']' => inner -= 1,
            '{' => braces += 1,
            '}' => {
                braces -= 1;
                if braces <= 0 && inner == 0 {
                    return at + 1;
                }
            }
            ';' | ',' if inner == 0 && braces == 0 => return at + 1,
            _ => {}
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> Vec<String> {
        split(text).into_iter().map(|line| line.code).collect()
    }

    #[test]
    fn comments_and_strings_are_no_code() {
        assert_eq!(code("a // b\nc /* d /* e\n*/ f */ g\n"), ["a ", "c ", " g"]);
        assert_eq!(
            code(r#"f("x \" // y", 'a', '\'', '"', &'static str)"#),
            [r#"f("", ' ', ' ', ' ', &'static str)"#]
        );
        assert_eq!(code("r#\"a\n\"b\"# c bar\"d\"\n"), ["\"", "\" c bar\"\""]);
        assert_eq!(code("\"a\\\nb\" c\n"), ["\"", "\" c"]);
        assert_eq!(split("x(); // copy-ok: y\n")[0].comment, " copy-ok: y");
    }

    #[test]
    fn tests_are_marked() {
        let text = "fn a() {}\n#[cfg(test)]\n#[path = \"x;y\"]\nmod tests {\n  fn b() { [1; 2] }\n}\nfn c() {}\n\
                    #[cfg(test)]\nmod more;\nfn d() {}\n#[cfg(not(test))]\nfn e() {}\n#[cfg(all(loom, test))]\nuse f;\n";
        let source = Source::new("a.rs".into(), text);
        let marked: Vec<usize> =
            source.lines.iter().zip(1..).filter(|(line, _)| line.test).map(|(_, number)| number).collect();
        assert_eq!(marked, [2, 3, 4, 5, 6, 8, 9, 13, 14]);
    }
}
