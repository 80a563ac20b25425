//! Checks that public items have callers: an item whose name occurs in its own crate's tests only is not part of an
//! interface. Names are compared as words, so an item with a common name passes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Ident, ImplItemFn, Item, ItemUse, Visibility};

use super::Finding;
use super::allowed::{Known, beyond_allowed};
use super::source::Source;

/// Files with public items for tests only, and their number, which may only decrease.
const KNOWN: [Known; 5] = [
    ("crates/offcore-flow/src/host/apps/http.rs", 1),
    ("crates/offcore-session/src/arena.rs", 1),
    ("crates/offcore-tcp/src/proto/info.rs", 2),
    ("crates/offcore-vhost/src/backend/device.rs", 3),
    ("crates/offcore-vhost/src/testing.rs", 3),
];

/// Words before the name of an item in its definition.
const KEYWORDS: [&str; 8] = ["const", "enum", "fn", "mod", "static", "struct", "type", "union"];

/// Names in all files.
#[derive(Debug, Default)]
pub(super) struct Names {
    public: Vec<Public>,
    /// Names that occur outside tests.
    used: HashSet<String>,
    /// The crates whose tests contain a name.
    tested: HashMap<String, BTreeSet<PathBuf>>,
}

/// A public item.
#[derive(Debug)]
struct Public {
    name: String,
    path: PathBuf,
    line: usize,
}

impl Names {
    /// Adds the items and the words of one file.
    pub(super) fn add(&mut self, source: &Source, file: &syn::File) {
        let own = is_own_test(&source.path);
        let mut items = Items { source, public: Vec::new(), imports: HashSet::new() };
        items.visit_file(file);
        if !own && source.path.starts_with("crates") && source.path.iter().any(|part| part == "src") {
            self.public.append(&mut items.public);
        }
        let mut before = "";
        for (line, number) in source.lines.iter().zip(1..) {
            if items.imports.contains(&number) {
                continue;
            }
            let part = |c: char| !c.is_alphanumeric() && c != '_';
            for word in line.code.split(part).filter(|word| !word.is_empty()) {
                let defines = KEYWORDS.contains(&std::mem::replace(&mut before, word));
                if defines || word.starts_with(|c: char| c.is_ascii_digit()) {
                    continue;
                }
                if own || line.test {
                    self.tested.entry(word.to_owned()).or_default().insert(package(&source.path));
                } else if !self.used.contains(word) {
                    self.used.insert(word.to_owned());
                }
            }
        }
    }

    /// Returns the public items without a caller.
    pub(super) fn check(&self) -> Vec<Finding> {
        let is_called = |item: &Public| {
            let package = package(&item.path);
            let crates = self.tested.get(&item.name).into_iter().flatten();
            self.used.contains(&item.name) || crates.into_iter().any(|other| *other != package)
        };
        let unused = self.public.iter().filter(|item| !is_called(item));
        let found = unused
            .map(|item| Finding {
                path: item.path.clone(),
                line: item.line,
                text: format!("{} has no caller except tests of its crate: remove it", item.name),
            })
            .collect();
        beyond_allowed(found, &KNOWN)
    }
}

/// Returns the directory of a file's crate.
fn package(path: &Path) -> PathBuf {
    path.iter().take(if path.starts_with("crates") { 2 } else { 1 }).collect()
}

/// Returns whether the file at `path` is a test file of a crate.
fn is_own_test(path: &Path) -> bool {
    path.starts_with("crates") && path.iter().any(|part| part == "tests" || part == "tests.rs")
}

struct Items<'a> {
    source: &'a Source,
    public: Vec<Public>,
    /// Lines of `use` declarations.
    imports: HashSet<usize>,
}

impl Items<'_> {
    fn public(&mut self, visibility: &Visibility, name: &Ident, attributes: &[Attribute]) {
        let line = name.span().start().line;
        let test = self.source.lines.get(line - 1).is_some_and(|line| line.test);
        // An exported symbol has callers in other languages.
        let exported = attributes
            .iter()
            .any(|attribute| attribute.path().is_ident("unsafe") || attribute.path().is_ident("no_mangle"));
        if matches!(visibility, Visibility::Public(_)) && !test && !exported {
            self.public.push(Public { name: name.to_string(), path: self.source.path.clone(), line });
        }
    }
}

impl<'ast> Visit<'ast> for Items<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Fn(item) => self.public(&item.vis, &item.sig.ident, &item.attrs),
            Item::Struct(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Enum(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Const(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Static(item) => self.public(&item.vis, &item.ident, &item.attrs),
            Item::Type(item) => self.public(&item.vis, &item.ident, &item.attrs),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.public(&item.vis, &item.sig.ident, &item.attrs);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.imports.extend(item.span().start().line..=item.span().end().line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused(files: &[(&str, &str)]) -> Vec<String> {
        let mut names = Names::default();
        for (path, text) in files {
            let (source, file) = Source::parse((*path).into(), text).unwrap();
            names.add(&source, &file);
        }
        names.check().into_iter().map(|finding| finding.text.split(' ').next().unwrap().to_owned()).collect()
    }

    const ITEMS: &str = "pub fn a() {}\npub struct B;\nimpl C {\n    pub fn d() {}\n    fn e() {}\n}\npub(crate) fn f() {}\n\
                         #[unsafe(no_mangle)]\npub fn g() {}\n";

    #[test]
    fn items_without_callers_are_found() {
        assert_eq!(unused(&[("crates/x/src/a.rs", ITEMS)]), ["a", "B", "d"]);
        let tests = "use x::{a, B};\nfn t() { a(); B; C::d(); }\n";
        assert_eq!(unused(&[("crates/x/src/a.rs", ITEMS), ("crates/x/tests/t.rs", tests)]), ["a", "B", "d"]);
        let inside = format!("{ITEMS}#[cfg(test)]\nmod tests {{\n    {tests}\n    pub fn h() {{}}\n}}\n");
        assert_eq!(unused(&[("crates/x/src/a.rs", &inside)]), ["a", "B", "d"]);
    }

    #[test]
    fn callers_elsewhere_count() {
        let tests = "use x::{a, B};\nfn t() { a(); C::d(); }\n";
        for path in ["crates/y/tests/t.rs", "crates/x/src/b.rs", "fuzz/t.rs", "tests/src/t.rs"] {
            assert_eq!(unused(&[("crates/x/src/a.rs", ITEMS), (path, tests)]), ["B"], "{path}");
        }
    }
}
