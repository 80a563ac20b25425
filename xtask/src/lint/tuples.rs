//! Checks that no function destructures a tuple in its parameters: `(a, b): (A, B)`. Such values are separate
//! parameters or the fields of a struct. Closures are excepted, because iterators pass tuples to them.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{FnArg, Pat, Signature};

use super::Finding;
use super::allowed::{Known, beyond_allowed};
use super::source::Source;

/// Paths with such parameters, and their number, which may only decrease.
const KNOWN: [Known; 1] = [("crates/offcore-tcp", 1)];

/// Returns the parameters of one file whose pattern is a tuple.
pub(super) fn find(source: &Source, file: &syn::File) -> Vec<Finding> {
    let mut signatures = Signatures { source, findings: Vec::new() };
    signatures.visit_file(file);
    signatures.findings
}

/// Returns the findings of paths with more tuple parameters than allowed.
pub(super) fn check(found: Vec<Finding>) -> Vec<Finding> {
    beyond_allowed(found, &KNOWN)
}

struct Signatures<'a> {
    source: &'a Source,
    findings: Vec<Finding>,
}

impl<'ast> Visit<'ast> for Signatures<'_> {
    fn visit_signature(&mut self, signature: &'ast Signature) {
        for input in &signature.inputs {
            if let FnArg::Typed(typed) = input
                && is_tuple(&typed.pat)
            {
                let text = format!(
                    "{} destructures a tuple parameter: use separate parameters or a struct",
                    signature.ident
                );
                let line = typed.pat.span().start().line;
                self.findings.push(Finding { path: self.source.path.clone(), line, text });
            }
        }
        visit::visit_signature(self, signature);
    }
}

fn is_tuple(pattern: &Pat) -> bool {
    match pattern {
        Pat::Tuple(tuple) => tuple.elems.len() > 1,
        Pat::Reference(reference) => is_tuple(&reference.pat),
        Pat::Paren(paren) => is_tuple(&paren.pat),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuple_parameters_are_found() {
        let text = "fn a((b, c): (u8, u8)) {}\nfn d(e: (u8, u8), f: u8) {}\nimpl G {\n    fn h(&self, &(i, j): &(u8, u8)) {}\n}\n\
                    trait K {\n    fn l((m,): (u8,));\n}\nfn n() {\n    let o = |(p, q): (u8, u8)| p + q;\n}\n";
        let (source, file) = Source::parse("a.rs".into(), text).unwrap();
        let found = find(&source, &file);
        let lines: Vec<usize> = found.iter().map(|finding| finding.line).collect();
        assert_eq!(lines, [1, 4]);
    }
}
