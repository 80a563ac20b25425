//! Checks that sibling modules of a crate import each other in one direction only. Imports between a module and its
//! children or parents do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Item, UseTree};

use super::Finding;
use super::items::is_test;

/// The module names from the crate's root to an item.
type ItemPath = Vec<String>;

/// The files of one crate, by module.
#[derive(Debug, Default)]
pub(super) struct Crate {
    modules: BTreeMap<ItemPath, (PathBuf, Imports)>,
}

/// References of one file to its own crate.
#[derive(Debug, Default)]
struct Imports {
    paths: Vec<ItemPath>,
    /// Local names that `use` gives to other items of the crate.
    names: BTreeMap<String, ItemPath>,
}

impl Crate {
    /// Adds the file at `path`, which is `inside` the crate's `src`.
    pub(super) fn add(&mut self, path: &Path, inside: &Path, file: &syn::File) {
        let mut module: ItemPath =
            inside.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
        if module.last().is_some_and(|name| ["lib", "main", "mod"].contains(&name.as_str())) {
            module.pop();
        }
        let mut collector = Collector { module: &module, imports: Imports::default() };
        collector.visit_file(file);
        let imports = collector.imports;
        self.modules.insert(module, (path.to_owned(), imports));
    }

    /// Returns the import cycles among its modules.
    pub(super) fn check(&self) -> Vec<Finding> {
        let mut edges: BTreeMap<ItemPath, BTreeSet<ItemPath>> = BTreeMap::new();
        for (module, (_, imports)) in &self.modules {
            for path in &imports.paths {
                let target = self.module_of(path, 8);
                let same = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
                if same < module.len() && same < target.len() {
                    edges.entry(module[..=same].to_vec()).or_default().insert(target[..=same].to_vec());
                }
            }
        }
        let reached = |from: &ItemPath| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(module) = next.pop() {
                for target in edges.get(&module).into_iter().flatten() {
                    if seen.insert(target.clone()) {
                        next.push(target.clone());
                    }
                }
            }
            seen
        };
        let reach: BTreeMap<_, _> = edges.keys().map(|module| (module, reached(module))).collect();
        let mut findings = Vec::new();
        for (&module, targets) in &reach {
            let circle: Vec<_> = targets
                .iter()
                .filter(|&other| reach.get(other).is_some_and(|back| back.contains(module)))
                .collect();
            // Each cycle is reported once, at its first module.
            if circle.len() > 1 && circle.iter().all(|&other| module <= other) {
                let names: Vec<_> = circle.iter().map(|path| path.join("::")).collect();
                let path = self.modules.get(module).map(|(path, _)| path.clone()).unwrap_or_default();
                let text = format!("{} import each other: move what both need below them", names.join(", "));
                findings.push(Finding { path, line: 0, text });
            }
        }
        findings
    }

    /// Returns the module of an item, following up to `hops` `pub use` declarations.
    fn module_of(&self, path: &[String], hops: usize) -> ItemPath {
        let depth = (0..=path.len()).rev().find(|&len| self.modules.contains_key(&path[..len])).unwrap_or(0);
        let (module, rest) = path.split_at(depth);
        let names = self.modules.get(module).map(|(_, imports)| &imports.names);
        match rest.first().and_then(|name| names?.get(name)) {
            Some(origin) if hops > 0 => self.module_of(&[origin, &rest[1..]].concat(), hops - 1),
            _ => module.to_vec(),
        }
    }
}

struct Collector<'a> {
    module: &'a ItemPath,
    imports: Imports,
}

impl Collector<'_> {
    /// Resolves a `path` of this file to a path in the crate. Returns `None` if it belongs to another crate.
    fn place(&self, path: &[String]) -> Option<ItemPath> {
        let ups = path.iter().take_while(|name| *name == "super").count();
        match path.first()?.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([self.module, &path[1..]].concat()),
            "super" => Some([&self.module[..self.module.len().checked_sub(ups)?], &path[ups..]].concat()),
            _ => None,
        }
    }

    fn add_use(&mut self, tree: &UseTree, before: &[String]) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (path, name) = match tree {
            UseTree::Path(path) => return self.add_use(&path.tree, &with(&path.ident)),
            UseTree::Group(group) => return group.items.iter().for_each(|tree| self.add_use(tree, before)),
            UseTree::Name(name) if name.ident == "self" => (before.to_vec(), before.last().cloned()),
            UseTree::Name(name) => (with(&name.ident), Some(name.ident.to_string())),
            UseTree::Rename(rename) => (with(&rename.ident), Some(rename.rename.to_string())),
            UseTree::Glob(_) => (before.to_vec(), None),
        };
        // A child of this module may be named without `self`.
        let child = || [self.module, &path[..]].concat();
        let place = self.place(&path).unwrap_or_else(child);
        if let Some(name) =
            name.filter(|name| place.last() != Some(name) || place.len() != self.module.len() + 1)
        {
            self.imports.names.insert(name, place.clone());
        }
        self.imports.paths.push(place);
    }
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_use(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: ItemPath = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 {
            self.imports.paths.extend(self.place(&names));
        }
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let mut all = Crate::default();
        for (inside, text) in files {
            all.add(Path::new(inside), Path::new(inside), &syn::parse_file(text).unwrap());
        }
        all.check().into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn import_cycles_between_modules_are_found() {
        let one_way =
            [("lib.rs", "mod a; mod b; pub use a::A;"), ("a.rs", "pub struct A;"), ("b.rs", "use crate::A;")];
        assert_eq!(circles(&one_way), [""; 0]);
        let back = [&one_way[..], &[("a/c.rs", "fn f() { super::super::b::g() }")]].concat();
        let found = circles(&back);
        assert!(found.len() == 1 && found[0].starts_with("a, b import each other"), "{found:?}");
        let in_tests = [&one_way[..], &[("a/c.rs", "#[cfg(test)] mod tests { use crate::b::g; }")]].concat();
        assert_eq!(circles(&in_tests), [""; 0]);
    }

    #[test]
    fn parent_child_imports_are_no_cycle() {
        assert_eq!(
            circles(&[("a.rs", "mod b; use b::B;"), ("a/b.rs", "use super::A; use crate::a::C;")]),
            [""; 0]
        );
    }
}
