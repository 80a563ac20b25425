//! Checks that the methods of a type are in few files: a type with inherent `impl` blocks in many files has several
//! responsibilities.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Item, ItemImpl, Type};

use super::Finding;
use super::items::is_test;

/// Maximum number of files with inherent `impl` blocks of a type.
const MOST: usize = 3;

/// Types in more files, by crate and name, and the number of files, which may only decrease.
const KNOWN: [(&str, &str, usize); 9] = [
    ("crates/offcore-dma", "Mover", 4),
    ("crates/offcore-dsa", "SimEngine", 5),
    ("crates/offcore-flow", "Serve", 11),
    ("crates/offcore-flow", "Assembly", 6),
    ("crates/offcore-tcp", "Conn", 4),
    ("crates/offcore-tcp", "Net", 8),
    ("crates/offcore-tcp", "Recovery", 4),
    ("crates/offcore-tcp", "Stack", 25),
    ("crates/offcore-vhost", "FrontEndSession", 5),
];

/// The types of one crate.
#[derive(Debug, Default)]
pub(super) struct Crate {
    /// For each type name, the files that define a type.
    defined: BTreeMap<String, BTreeSet<PathBuf>>,
    /// For each type name, the files with inherent `impl` blocks.
    blocks: BTreeMap<String, BTreeSet<PathBuf>>,
}

impl Crate {
    /// Adds the file at `path`.
    pub(super) fn add(&mut self, path: &Path, file: &syn::File) {
        Collector { path, types: self }.visit_file(file);
    }

    /// Returns the types of the crate in `dir` with blocks in more files than allowed.
    pub(super) fn check(&self, dir: &Path) -> Vec<Finding> {
        self.beyond_allowed(dir, &KNOWN)
    }

    fn beyond_allowed(&self, dir: &Path, known: &[(&str, &str, usize)]) -> Vec<Finding> {
        let mut findings = Vec::new();
        for ((name, path), files) in self.files() {
            let known = known.iter().find(|(place, other, _)| dir.starts_with(place) && *other == name);
            let most = known.map_or(MOST, |(.., most)| *most);
            if files > most {
                let text = format!("{name} has impl blocks in {files} files, at most {most}: split the type");
                findings.push(Finding { path: path.to_owned(), line: 0, text });
            }
        }
        findings
    }

    /// Returns the number of files with blocks of each type, by the type's name and file.
    fn files(&self) -> BTreeMap<(&str, &Path), usize> {
        let mut files = BTreeMap::new();
        for (name, blocks) in &self.blocks {
            let Some(defined) = self.defined.get(name) else { continue };
            for block in blocks {
                // Among types of one name, a block belongs to the one in the nearest module.
                let nearest = defined.iter().max_by_key(|path| shared(path, block));
                if let Some(path) = nearest {
                    *files.entry((name.as_str(), path.as_path())).or_default() += 1;
                }
            }
        }
        files
    }
}

/// Returns the number of modules that two files have in common from the root.
fn shared(one: &Path, other: &Path) -> usize {
    let modules = |path: &Path| -> Vec<String> {
        path.with_extension("")
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .filter(|part| part != "mod")
            .collect()
    };
    modules(one).iter().zip(&modules(other)).take_while(|(a, b)| a == b).count()
}

struct Collector<'a> {
    path: &'a Path,
    types: &'a mut Crate,
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let name = match item {
            Item::Mod(item) if is_test(&item.attrs) => return,
            Item::Struct(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            self.types.defined.entry(name.to_string()).or_default().insert(self.path.to_owned());
        }
        visit::visit_item(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if item.trait_.is_none()
            && !is_test(&item.attrs)
            && let Type::Path(path) = &*item.self_ty
            && let Some(last) = path.path.segments.last()
        {
            self.types.blocks.entry(last.ident.to_string()).or_default().insert(self.path.to_owned());
        }
        visit::visit_item_impl(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[(&str, &str)]) -> Crate {
        let mut all = Crate::default();
        for (path, text) in files {
            all.add(Path::new(path), &syn::parse_file(text).unwrap());
        }
        all
    }

    const FOUR: [(&str, &str); 4] = [
        ("src/a.rs", "struct A; impl A {} impl A {}"),
        ("src/a/b.rs", "impl super::A {}"),
        ("src/a/c.rs", "impl<T> A<T> {}"),
        ("src/a/d.rs", "impl A {}"),
    ];

    #[test]
    fn types_in_many_files_are_found() {
        let dir = Path::new("crates/x");
        assert_eq!(of(&FOUR[..3]).beyond_allowed(dir, &[]), []);
        let found = of(&FOUR).beyond_allowed(dir, &[]);
        assert!(found.len() == 1 && found[0].text.starts_with("A has impl blocks in 4 files"), "{found:?}");
        assert_eq!(of(&FOUR).beyond_allowed(dir, &[("crates/x", "A", 4)]), []);
        assert_eq!(of(&FOUR).beyond_allowed(dir, &[("crates/y", "A", 4)]).len(), 1);
    }

    #[test]
    fn traits_tests_and_other_types_do_not_count() {
        let with = |last: (&'static str, &'static str)| {
            of(&[&FOUR[..3], &[last]].concat()).beyond_allowed(Path::new("crates/x"), &[])
        };
        assert_eq!(with(("src/a/d.rs", "impl Clone for A {}")), []);
        assert_eq!(with(("src/a/d.rs", "#[cfg(test)] mod tests { impl A {} }")), []);
        assert_eq!(with(("src/d.rs", "struct A; impl A {}")), []);
        assert_eq!(with(("src/d.rs", "impl A {}")).len(), 1);
    }
}
