//! Source files as lines of code and of comments.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};

use super::{Finding, has_word};

/// A source file.
#[derive(Debug)]
pub(super) struct Source {
    /// Its path, relative to the root.
    pub(super) path: PathBuf,
    pub(super) lines: Vec<Line>,
}

/// A line of a source file.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    /// The code, with blanks for comments and for the content of strings and characters.
    pub(super) code: String,
    /// The text of the line's comments, with blanks for code.
    pub(super) comment: String,
    /// The content of the line's strings and characters, with blanks for the rest.
    pub(super) text: String,
    /// Whether the line is inside an item that is compiled for tests only.
    pub(super) test: bool,
}

impl Source {
    /// Splits a file into lines, and each line into code and comment. Also returns the parsed file.
    pub(super) fn parse(path: PathBuf, text: &str) -> Result<(Self, syn::File)> {
        let tokens: TokenStream =
            text.parse().map_err(|error| anyhow!("cannot parse {}: {error}", path.display()))?;
        let parsed = syn::parse2(tokens.clone())
            .map_err(|error| anyhow!("cannot parse {}: {error}", path.display()))?;
        Ok((Self::split(path, text, tokens), parsed))
    }

    /// Splits a text that need not be a whole file.
    #[cfg(test)]
    pub(super) fn new(path: &str, text: &str) -> Self {
        Self::split(path.into(), text, text.parse().unwrap())
    }

    fn split(path: PathBuf, text: &str, tokens: TokenStream) -> Self {
        let mut file = File {
            rest: text.lines().map(|line| line.chars().collect()).collect(),
            code: text.lines().map(|line| vec![' '; line.chars().count()]).collect(),
            text: text.lines().map(|line| vec![' '; line.chars().count()]).collect(),
            tests: Vec::new(),
        };
        file.split(tokens);
        let lines = file.code.iter().zip(&file.rest).zip(&file.text).zip(1..);
        let lines = lines.map(|(((code, comment), text), number)| Line {
            code: code.iter().collect(),
            comment: comment.iter().collect(),
            text: text.iter().collect(),
            test: file.tests.iter().any(|(first, last)| (*first..=*last).contains(&number)),
        });
        Self { path, lines: lines.collect() }
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

/// A file that is being split.
struct File {
    /// The characters of each line that are not part of a token: comments.
    rest: Vec<Vec<char>>,
    /// The characters of each line that are part of a token.
    code: Vec<Vec<char>>,
    /// The characters of each line that are the content of a literal with quotes.
    text: Vec<Vec<char>>,
    /// First and last lines of items for tests.
    tests: Vec<(usize, usize)>,
}

impl File {
    /// Moves tokens to the code, and finds items after `#[cfg(test)]` or another condition that is true in tests.
    /// Such an item, statement or field ends with its braces, or with `;` or `,`.
    fn split(&mut self, tokens: TokenStream) {
        let (mut hash, mut test) = (0, None);
        for token in tokens {
            let (first, last) = (token.span().start().line, token.span().end().line);
            // The tokens of a documentation comment have the position of the comment.
            if self.is_comment(token.span()) {
                continue;
            }
            let mut is_end = false;
            match token {
                TokenTree::Group(group) => {
                    let condition = group.stream().to_string().replace(' ', "");
                    let is_test = condition.starts_with("cfg(") && has_word(&condition, "test");
                    if hash > 0 && is_test && !condition.contains("not(") {
                        test = test.or(Some(hash));
                    }
                    is_end = group.delimiter() == Delimiter::Brace;
                    self.take(group.span_open(), false);
                    self.split(group.stream());
                    self.take(group.span_close(), false);
                    hash = 0;
                }
                TokenTree::Punct(punct) => {
                    is_end = [';', ','].contains(&punct.as_char());
                    hash = if punct.as_char() == '#' { first } else { 0 };
                    self.take(punct.span(), false);
                }
                TokenTree::Ident(ident) => self.take(ident.span(), false),
                TokenTree::Literal(literal) => self.take(literal.span(), true),
            }
            if is_end && let Some(first) = test.take() {
                self.tests.push((first, last));
            }
        }
    }

    fn is_comment(&self, span: Span) -> bool {
        let (line, column) = (span.start().line - 1, span.start().column);
        matches!(self.rest[line].get(column..), Some(['/', '/' | '*', ..]))
    }

    /// Moves a token to the code. Only the quotes of a literal with quotes are moved.
    fn take(&mut self, span: Span, is_literal: bool) {
        let (start, end) = (span.start(), span.end());
        let mut inside = false;
        for line in start.line..=end.line {
            let from = if line == start.line { start.column } else { 0 };
            let rest = &mut self.rest[line - 1];
            let to = if line == end.line { end.column } else { rest.len() };
            for (at, rest) in rest.iter_mut().enumerate().take(to).skip(from) {
                let c = std::mem::replace(rest, ' ');
                let is_code = !inside || line == end.line && at + 1 == to;
                let place = if is_code { &mut self.code } else { &mut self.text };
                place[line - 1][at] = c;
                inside |= is_literal && ['"', '\''].contains(&c);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<Line> {
        Source::new("a.rs", text).lines
    }

    #[test]
    fn comments_and_strings_are_no_code() {
        let code = |text: &str| {
            lines(text)
                .iter()
                .map(|line| line.code.split_whitespace().collect::<String>())
                .collect::<Vec<_>>()
        };
        assert_eq!(code("a // b\nc /* d /* e\n*/ f */ g\n/// h\ni\n"), ["a", "c", "g", "", "i"]);
        assert_eq!(
            code(r#"f("x \" // y", 'a', '\'', '"', &'static str, 7u8)"#),
            [r#"f("",'','','',&'staticstr,7u8)"#]
        );
        assert_eq!(code("r#\"a\n\"b\"# c; bar(\"d\")\n"), ["r#\"", "#c;bar(\"\")"]);
        assert_eq!(code("\"a\\\nb\" c\n"), ["\"", "\"c"]);
        let line = &lines("x(); // copy-ok: y\n")[0];
        assert_eq!((line.code.trim(), line.comment.trim()), ("x();", "// copy-ok: y"));
        let line = &lines("x(\"a // b\") // c\n")[0];
        assert_eq!((line.text.trim(), line.comment.trim()), ("a // b", "// c"));
        assert_eq!(lines("//! x\n")[0].comment, "//! x");
    }

    #[test]
    fn tests_are_marked() {
        let text = "fn a() {}\n#[cfg(test)]\n#[path = \"x;y\"]\nmod tests {\n  fn b() { [1; 2] }\n}\nfn c() {}\n\
                    #[cfg(test)]\nmod more;\nfn d() {}\n#[cfg(not(test))]\nfn e() {}\n#[cfg(all(loom, test))]\nuse f;\n";
        let marked: Vec<usize> =
            lines(text).iter().zip(1..).filter(|(line, _)| line.test).map(|(_, number)| number).collect();
        assert_eq!(marked, [2, 3, 4, 5, 6, 8, 9, 13, 14]);
    }
}
