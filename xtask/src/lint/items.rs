//! Checks that public items are documented, as rustc's `missing_docs` does, except for fields, variants and associated
//! constants, whose names may be sufficient. Every file must have a module comment.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, TraitItem, Visibility};

use super::Finding;
use super::source::Source;

/// Checks one parsed file of a library or of the binary.
pub(super) fn check(source: &Source, file: &syn::File) -> Vec<Finding> {
    let mut items = Items { source, findings: Vec::new() };
    items.need_docs("the file", &file.attrs, 1);
    items.visit_file(file);
    items.findings
}

/// Returns whether an item is compiled for tests only.
pub(super) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Meta>().is_ok_and(|meta| meta.path().is_ident("test"))
    })
}

struct Items<'a> {
    source: &'a Source,
    findings: Vec<Finding>,
}

impl Items<'_> {
    fn need_docs(&mut self, name: &str, attributes: &[Attribute], line: usize) {
        if !attributes.iter().any(|attribute| attribute.path().is_ident("doc")) {
            let text = format!("{name} has no documentation: say what it is for");
            self.findings.push(Finding { path: self.source.path.clone(), line, text });
        }
    }

    fn public(&mut self, visibility: &Visibility, name: &syn::Ident, attributes: &[Attribute]) {
        if matches!(visibility, Visibility::Public(_)) {
            self.need_docs(&name.to_string(), attributes, name.span().start().line);
        }
    }
}

impl<'ast> Visit<'ast> for Items<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Mod(item) if !is_test(&item.attrs) => visit::visit_item_mod(self, item),
            Item::Fn(item) => self.public(&item.vis, &item.sig.ident, &item.attrs),
            Item::Struct(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Enum(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Const(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Type(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Trait(item) => {
                self.public(&item.vis, &item.ident, &item.attrs);
                for member in &item.items {
                    if let TraitItem::Fn(function) = member {
                        self.public(&item.vis, &function.sig.ident, &function.attrs);
                    }
                }
            }
            Item::Impl(item) if !is_test(&item.attrs) => {
                for member in &item.items {
                    if let ImplItem::Fn(function) = member {
                        self.public(&function.vis, &function.sig.ident, &function.attrs);
                    }
                }
            }
            Item::Macro(item)
                if item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) =>
            {
                if let Some(name) = &item.ident {
                    self.need_docs(&name.to_string(), &item.attrs, item.span().start().line);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_items_without_docs_are_found() {
        let text = "//! A file.\npub fn a() {}\n/// B.\npub struct B { pub c: u8 }\nimpl B {\n    pub fn d() {}\n    fn e() {}\n}\n\
                    /// F.\npub enum F {\n    G,\n}\npub fn h() {}\npub(crate) fn i() {}\n#[cfg(test)]\nmod tests {\n    pub fn j() {}\n}\n";
        let lines = |text: &str| -> Vec<usize> {
            let (source, file) = Source::parse("a.rs".into(), text).unwrap();
            check(&source, &file).iter().map(|finding| finding.line).collect()
        };
        assert_eq!(lines(text), [2, 6, 13]);
        assert_eq!(lines("fn a() {}\n"), [1]);
    }
}
