//! Checks that the list, docs/threats.md and the sources agree.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use super::list;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn threats() -> String {
    fs::read_to_string(root().join("docs/threats.md")).unwrap()
}

#[test]
fn guard_code_occurs_once() {
    for guard in list::all() {
        let text = fs::read_to_string(root().join(guard.file)).unwrap();
        assert_eq!(text.matches(guard.code).count(), 1, "{}: `{}` in {}", guard.name, guard.code, guard.file);
        assert_ne!(guard.code, guard.without);
    }
}

#[test]
fn threats_document_lists_every_guard() {
    let text = threats();
    let rows = text.lines().filter(|line| line.starts_with('|'));
    let quoted: HashSet<&str> = rows.flat_map(|row| row.split('"').skip(1).step_by(2)).collect();
    let names: HashSet<&str> = list::all().map(|guard| guard.name).collect();
    assert_eq!(names.len(), list::all().count(), "two guards have the same name");
    let (missing, unknown) =
        (names.difference(&quoted).collect::<Vec<_>>(), quoted.difference(&names).collect::<Vec<_>>());
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "not in docs/threats.md: {missing:?}; no guards: {unknown:?}"
    );
}

/// Collects the names of functions in a directory's sources.
fn functions(dir: &Path, found: &mut HashSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            found.extend(
                text.split("fn ").skip(1).filter_map(|rest| Some(rest.split_once('(')?.0.to_owned())),
            );
        }
    }
}

#[test]
fn threats_document_names_existing_tests() {
    let mut there = HashSet::new();
    ["crates", "tests"].iter().for_each(|dir| functions(&root().join(dir), &mut there));
    let text = threats();
    // Names of several words in code marks, except for flags and files.
    let named = text.split('`').skip(1).step_by(2).filter(|name| {
        name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    });
    let kinds = ["virtio_user", "af_packet", "af_xdp"];
    let missing: Vec<&str> = named.filter(|name| !kinds.contains(name) && !there.contains(*name)).collect();
    assert!(missing.is_empty(), "docs/threats.md names tests that are not there: {missing:?}");
}
