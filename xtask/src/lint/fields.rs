//! Checks that structs have few named fields. A larger struct of plain counters, figures, settings or a C layout has a
//! line `// fields-ok: REASON` directly above `struct`.

use syn::visit::{self, Visit};
use syn::{Fields, ItemStruct};

use super::Finding;
use super::source::{Line, Source};

/// Maximum number of named fields of a struct.
const MOST: usize = 16;
const MARK: &str = "fields-ok:";

/// Checks the structs of one file.
pub(super) fn check(source: &Source, file: &syn::File) -> Vec<Finding> {
    let mut structs = Structs { source, findings: Vec::new() };
    structs.visit_file(file);
    structs.findings
}

struct Structs<'a> {
    source: &'a Source,
    findings: Vec<Finding>,
}

impl<'ast> Visit<'ast> for Structs<'_> {
    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        visit::visit_item_struct(self, item);
        let Fields::Named(fields) = &item.fields else { return };
        let (name, count, line) =
            (item.ident.to_string(), fields.named.len(), item.struct_token.span.start().line);
        let above = line.checked_sub(2).and_then(|above| self.source.lines.get(above));
        let text = match above.and_then(reason) {
            Some("") => format!("expected a reason: // {MARK} REASON"),
            Some(_) if count <= MOST => format!("{name} has {count} fields: remove the comment {MARK}"),
            None if count > MOST => {
                format!("{name} has {count} fields, at most {MOST}: group related ones in structs")
            }
            _ => return,
        };
        self.findings.push(Finding { path: self.source.path.clone(), line, text });
    }
}

/// Returns the text after the mark.
fn reason(line: &Line) -> Option<&str> {
    let comment = line.comment.trim().strip_prefix("//")?;
    comment.trim().strip_prefix(MARK).map(str::trim).filter(|_| line.code.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(above: &str, count: usize) -> Vec<String> {
        let fields: String = (0..count).map(|number| format!("    f{number}: u8,\n")).collect();
        let text = format!("fn f() {{}}\n{above}struct A {{\n{fields}}}\n");
        let (source, file) = Source::parse("a.rs".into(), &text).unwrap();
        check(&source, &file).into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn large_structs_need_a_reason() {
        let of = findings;
        assert_eq!(of("", MOST), [""; 0]);
        assert!(of("", MOST + 1)[0].contains("A has 17 fields"));
        assert!(of("#[derive(Debug)]\n", MOST + 1)[0].contains("A has 17 fields"));
        assert_eq!(of("/// A.\n#[derive(Debug)]\n// fields-ok: plain counters\n", MOST + 1), [""; 0]);
        assert!(of("// fields-ok:\n", MOST + 1)[0].contains("expected a reason"));
        assert!(of("// fields-ok: plain counters\n", MOST)[0].contains("remove the comment"));
        assert!(of("// fields-ok: plain counters\n#[derive(Debug)]\n", MOST + 1)[0].contains("17 fields"));
    }
}
