//! Checks the crates that the workspace depends on against `deny.toml`.
//!
//! [`check`] is fast: it takes licences and sources from `cargo metadata`. [`deny`] runs cargo-deny, which also checks
//! advisories, duplicates and yanked crates, but takes minutes to build.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::project::Project;
use crate::steps::{Outcome, Steps};
use crate::tools;

const FILE: &str = "deny.toml";

/// Prefix of a source in `cargo metadata`, before the address as in `deny.toml`.
const REGISTRY: &str = "registry+";

/// Finds crates whose licence or source `deny.toml` does not allow.
pub(crate) fn check(project: &Project) -> Result<Outcome> {
    let text = fs::read_to_string(project.root.join(FILE)).context("cannot read deny.toml")?;
    let (licences, registries) = (list(&text, "allow")?, list(&text, "allow-registry")?);
    let output = project
        .cargo()
        .args(["metadata", "--locked", "--all-features", "--format-version=1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .output()
        .context("cannot run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata's JSON")?;
    let packages = metadata["packages"].as_array().context("cargo names packages")?;
    println!("{} crates, {} licences, {} registry", packages.len(), licences.len(), registries.len());
    Ok(Outcome::of(packages.iter().filter_map(|package| wrong(package, &licences, &registries)).collect()))
}

/// Runs cargo-deny. If the advisory database cannot be fetched, a message says that advisories were not checked.
pub(crate) fn deny(project: &Project, steps: &mut Steps) {
    let name = "cargo deny";
    let tool = match tools::find(project, tools::DENY) {
        Ok(tool) => tool,
        Err(why) => return steps.check(name, || Ok(Outcome::Skipped(why))),
    };
    let mut check = cargo_deny(project, &tool);
    check.arg("check");
    if let Err(why) = fetch_advisories(project, &tool) {
        println!("NOTE: advisories were skipped, since their database cannot be fetched: {why}");
        check.args(["bans", "licenses", "sources"]);
    }
    steps.command(name, &mut check);
}

fn cargo_deny(project: &Project, tool: &Path) -> Command {
    let mut command = Command::new(tool);
    command.arg("--workspace").current_dir(&project.root);
    command
}

/// Fetches the advisory database. The error gives the reason.
fn fetch_advisories(project: &Project, tool: &Path) -> Result<(), String> {
    let output = cargo_deny(project, tool).args(["fetch", "db"]).output();
    let output = output.map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    let why = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it does not say why");
    if output.status.success() { Ok(()) } else { Err(why.trim().to_owned()) }
}

/// Returns what `deny.toml` forbids about a crate that `cargo metadata` describes.
fn wrong(package: &Value, licences: &[String], registries: &[String]) -> Option<String> {
    let name = format!("{} {}", package["name"].as_str()?, package["version"].as_str()?);
    let licence = package["license"].as_str().unwrap_or("");
    if !allows(licences, licence) {
        return Some(format!("{name} has licence '{licence}', which {FILE} does not allow"));
    }
    // Crates of the workspace have no source.
    let source = package["source"].as_str()?;
    let known = source.strip_prefix(REGISTRY).is_some_and(|url| registries.iter().any(|known| known == url));
    (!known).then(|| format!("{name} comes from {source}, which {FILE} does not allow"))
}

/// Returns the strings of the list `name`.
fn list(text: &str, name: &str) -> Result<Vec<String>> {
    let start = format!("{name} = [");
    let at = text.lines().position(|line| line.starts_with(&start));
    let at = at.with_context(|| format!("{FILE} has no list '{name}'"))?;
    let lines: Vec<&str> = text.lines().skip(at).collect();
    let list = lines.join("\n");
    let inside = list.strip_prefix(&start).and_then(|rest| rest.split_once(']'));
    let (inside, _) = inside.with_context(|| format!("list '{name}' of {FILE} does not end"))?;
    let entries = inside.split(',').filter_map(|entry| entry.trim().strip_prefix('"')?.strip_suffix('"'));
    Ok(entries.map(str::to_owned).collect())
}

/// Returns whether the allowed licences satisfy an SPDX expression, with the precedence parentheses, WITH, AND, OR. A
/// licence with an exception (WITH) is a separate licence. Old crates write a slash for OR.
fn allows(allowed: &[String], expression: &str) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let result = either(allowed, &mut words);
    result == Some(true) && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// Returns `None` if the expression is malformed.
fn either(allowed: &[String], words: &mut Words<'_>) -> Option<bool> {
    let mut result = both(allowed, words)?;
    while words.next_if_eq(&"OR").is_some() {
        result |= both(allowed, words)?;
    }
    Some(result)
}

fn both(allowed: &[String], words: &mut Words<'_>) -> Option<bool> {
    let mut result = one(allowed, words)?;
    while words.next_if_eq(&"AND").is_some() {
        result &= one(allowed, words)?;
    }
    Some(result)
}

fn one(allowed: &[String], words: &mut Words<'_>) -> Option<bool> {
    let word = words.next().filter(|word| !["OR", "AND", "WITH", ")"].contains(word))?;
    if word == "(" {
        let result = either(allowed, words)?;
        return words.next_if_eq(&")").map(|_| result);
    }
    let licence = match words.next_if_eq(&"WITH") {
        Some(_) => format!("{word} WITH {}", words.next()?),
        None => word.to_owned(),
    };
    Some(allowed.contains(&licence))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[test]
    fn licence_expressions() {
        let allowed = strings(&["MIT", "Unicode-3.0", "ISC"]);
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0/MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "GPL-3.0 AND ISC OR MIT",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        ] {
            assert!(allows(&allowed, good), "{good}");
        }
        for bad in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "MIT WITH LLVM-exception",
            "(MIT OR ISC) AND (GPL-3.0)",
            "MIT AND (GPL-3.0 OR ISC",
            "MIT ISC",
            "MIT OR",
            "OR MIT",
            "MIT)",
        ] {
            assert!(!allows(&allowed, bad), "{bad}");
        }
    }

    #[test]
    fn deny_toml_lists_are_parsed() {
        let text =
            "x = [1]\nallow = [\n    \"MIT\",\n    \"ISC\",\n]\nallow-registry = [\"a\"]\nallow-git = [";
        assert_eq!(list(text, "allow").unwrap(), ["MIT", "ISC"]);
        assert_eq!(list(text, "allow-registry").unwrap(), ["a"]);
        assert!(list(text, "allow-git").is_err() && list(text, "low").is_err());
    }

    #[test]
    fn wrong_crates_are_named() {
        let (licences, registries) = (strings(&["MIT"]), strings(&["https://registry"]));
        let of = |licence: Value, source: Value| {
            let package = json!({"name": "a", "version": "1", "license": licence, "source": source});
            wrong(&package, &licences, &registries)
        };
        assert_eq!(of(json!("MIT"), Value::Null), None);
        assert_eq!(of(json!("MIT"), json!("registry+https://registry")), None);
        for (licence, source, expected) in [
            (json!("GPL-3.0"), Value::Null, "a 1 has licence 'GPL-3.0'"),
            (Value::Null, Value::Null, "a 1 has licence ''"),
            (json!("MIT"), json!("registry+https://other"), "a 1 comes from registry+https://other"),
            (json!("MIT"), json!("git+https://registry"), "a 1 comes from git+https://registry"),
        ] {
            let found = of(licence, source).unwrap();
            assert!(found.starts_with(expected), "{found}");
        }
    }
}
