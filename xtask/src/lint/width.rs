//! Checks the width of comments and of prose in documents. rustfmt checks the width of code only.

use std::path::Path;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item};

use super::Finding;
use super::source::Source;

/// Maximum number of columns of a line with a comment.
const COMMENT: usize = 120;
/// Maximum number of columns of a document's line.
const PROSE: usize = 140;

/// Returns the lines of one file whose comments are too wide, except web addresses, which cannot be divided, and doc
/// comments that are error messages.
pub(super) fn comments(source: &Source, file: &syn::File) -> Vec<Finding> {
    let mut found = source.find(
        |line| columns(&line.comment) > COMMENT && !line.comment.contains("://"),
        |line| format!("a comment with {} columns, at most {COMMENT}", columns(&line.comment)),
    );
    if !found.is_empty() {
        let mut messages = Messages::default();
        messages.visit_file(file);
        found.retain(|finding| !messages.lines.contains(&finding.line));
    }
    found
}

/// The lines of types whose documentation is their message.
#[derive(Default)]
struct Messages {
    lines: Vec<usize>,
}

impl<'ast> Visit<'ast> for Messages {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Enum(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if attributes.iter().any(derives_display) {
            self.lines.extend(item.span().start().line..=item.span().end().line);
        }
    }
}

fn derives_display(attribute: &Attribute) -> bool {
    let mut display = false;
    if attribute.path().is_ident("derive") {
        // The closure never fails, and the compiler has checked the syntax.
        let _ = attribute.parse_nested_meta(|meta| {
            display |= meta.path.segments.last().is_some_and(|last| last.ident == "Display");
            Ok(())
        });
    }
    display
}

/// Returns the lines of a document whose prose is too wide, except tables, code and web addresses, which cannot be
/// divided.
pub(super) fn prose(path: &Path, text: &str) -> Vec<Finding> {
    let mut code = false;
    let mut findings = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        code ^= line.trim_start().starts_with("```");
        let whole = ["|", "    ", "#"].iter().any(|start| line.starts_with(start)) || line.contains("://");
        if !code && !whole && columns(line) > PROSE {
            let text = format!("prose with {} columns, at most {PROSE}", columns(line));
            findings.push(Finding { path: path.to_owned(), line: number, text });
        }
    }
    findings
}

fn columns(line: &str) -> usize {
    line.trim_end().chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comments_are_found() {
        let wide = "w".repeat(COMMENT - 3);
        let text = format!(
            "//! {wide}\n// {wide}\n    // {wide}\nfn a() {{}} // {wide}\nconst B: &str = \"{wide}{wide}\"; // b\n\
             // https://{wide}\n#[derive(Debug, displaydoc::Display)]\nenum C {{\n    /// {wide}\n    D,\n}}\n"
        );
        let (source, file) = Source::parse("a.rs".into(), &text).unwrap();
        let lines: Vec<usize> = comments(&source, &file).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 3, 4, 5]);
    }

    #[test]
    fn wide_prose_is_found_outside_tables_and_code() {
        let wide = "ü".repeat(PROSE);
        let text = format!(
            "{wide}\n{wide}.\n| {wide} |\n    {wide}\n```text\n{wide}.\n```\n- {wide}\n[a](https://{wide})\n"
        );
        let lines: Vec<usize> = prose(Path::new("a.md"), &text).iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [2, 8]);
    }
}
