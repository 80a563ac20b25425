//! Checks imports between crates: a crate may only import crates of lower layers.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Finding;

/// The layers from bottom to top. A new crate must be added here.
const FLOORS: [&[&str]; 15] = [
    &["offcore-stats"],
    &["offcore-mem"],
    &["offcore-wire"],
    &["offcore-ring"],
    &["offcore-session"],
    &["offcore-dma"],
    // Subsystems of equal rank: their engines are passed to them, and they do not import each other.
    &["offcore-dsa", "offcore-dpdk", "offcore-vhost", "offcore-gpu", "offcore-tcp"],
    &["offcore-port"],
    &["offcore-flow"],
    &["offcore-preload"],
    &["offcore-config"],
    &["offcore-bench"],
    &["offcore"],
    // Tools and tests of the project, which no crate may import.
    &["offcore-tests"],
    &["xtask"],
];

fn floor(name: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&name))
}

/// Checks the manifests of the workspace's packages.
pub(super) fn check(packages: &[Value], root: &Path) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().context("a package has a name")?;
        let manifest = Path::new(package["manifest_path"].as_str().context("a package has a manifest")?);
        let mut wrong = |text| {
            let path = manifest.strip_prefix(root).unwrap_or(manifest).to_owned();
            findings.push(Finding { path, line: 0, text });
        };
        let Some(here) = floor(name) else {
            wrong(format!("{name} has no floor: give it one in xtask/src/lint/arrows.rs"));
            continue;
        };
        let dependencies = package["dependencies"].as_array().context("a package lists dependencies")?;
        for dependency in dependencies {
            let other = dependency["name"].as_str().context("a dependency has a name")?;
            // A crate may depend on itself to enable a feature for its tests.
            let for_tests = other == name && dependency["kind"] == "dev";
            if for_tests || dependency["path"].is_null() {
                continue;
            }
            match floor(other) {
                Some(there) if there < here => {}
                Some(_) => wrong(format!("{name} imports {other}, which is not below it")),
                None => wrong(format!("{name} imports {other}, which has no floor")),
            }
        }
    }
    ensure!(!packages.is_empty(), "cargo names no packages");
    Ok(findings)
}

/// Returns the crates in [`FLOORS`] that do not exist.
pub(super) fn missing(packages: &[Value]) -> Vec<Finding> {
    let names = FLOORS.iter().flat_map(|floor| floor.iter());
    let missing = names.filter(|name| !packages.iter().any(|package| package["name"] == **name));
    missing
        .map(|name| Finding {
            path: "xtask/src/lint/arrows.rs".into(),
            line: 0,
            text: format!("there is no crate {name}: remove it from FLOORS"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn findings(name: &str, dependencies: &[(&str, Option<&str>)]) -> Vec<String> {
        let dependencies: Vec<Value> = dependencies
            .iter()
            .map(|(name, kind)| json!({ "name": name, "kind": kind, "path": "/x" }))
            .collect();
        let package = json!({ "name": name, "manifest_path": "/x/Cargo.toml", "dependencies": dependencies });
        check(&[package], Path::new("/x")).unwrap().into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn crates_depend_only_downwards() {
        assert!(findings("offcore-vhost", &[("offcore-dma", None), ("offcore-stats", None)]).is_empty());
        assert!(findings("offcore-dma", &[("offcore-dma", Some("dev"))]).is_empty());
        assert!(findings("offcore-ring", &[("offcore-vhost", Some("dev"))])[0].contains("not below"));
        assert!(findings("offcore-vhost", &[("offcore-dsa", None)])[0].contains("not below"), "neighbours");
        assert!(findings("offcore-flow", &[("offcore", None)])[0].contains("not below"));
        assert!(findings("offcore-flow", &[("xtask", None)])[0].contains("not below"));
        assert!(findings("offcore-flow", &[("offcore-new", None)])[0].contains("no floor"));
        assert!(findings("offcore-new", &[])[0].contains("no floor"));
    }

    #[test]
    fn floors_of_missing_crates_are_found() {
        let mut packages: Vec<Value> =
            FLOORS.iter().flat_map(|floor| floor.iter()).map(|name| json!({ "name": name })).collect();
        assert_eq!(missing(&packages), []);
        packages.pop();
        assert_eq!(missing(&packages).len(), 1);
    }
}
