//! Checks the subjects of commits that are not on a remote branch yet: their length, and signs that they are not in the
//! imperative mood.

use std::path::Path;
use std::process::Command;

use super::Finding;

/// Maximum number of characters of a subject.
const LONGEST: usize = 72;
/// The last commit before this rule.
const BEFORE_RULE: &str = "d0d717adef0fc30e7470b2d8c2e9ba3d70584a52";
/// Imperatives that end like a participle.
const VERBS: [&str; 10] =
    ["bring", "embed", "exceed", "feed", "need", "ping", "proceed", "seed", "shed", "speed"];

/// Checks the commits that are neither on a remote branch nor older than this rule. Returns no findings without git or
/// in a shallow clone.
pub(super) fn check(root: &Path) -> Vec<Finding> {
    let output = Command::new("git")
        .args(["log", "--no-merges", "--format=%h %s", "HEAD", "--not", BEFORE_RULE, "--remotes"])
        .current_dir(root)
        .output();
    let Some(output) = output.ok().filter(|output| output.status.success()) else { return Vec::new() };
    let lines = String::from_utf8_lossy(&output.stdout);
    let commits = lines.lines().filter_map(|line| line.split_once(' '));
    commits
        .filter_map(|(commit, subject)| {
            let text = format!("{}: '{subject}'", fault(subject)?);
            Some(Finding { path: format!("commit {commit}").into(), line: 0, text })
        })
        .collect()
}

/// Returns the rule that a subject breaks.
fn fault(subject: &str) -> Option<String> {
    let length = subject.chars().count();
    if length > LONGEST {
        return Some(format!("a subject of {length} characters, at most {LONGEST}"));
    }
    if subject.ends_with('.') {
        return Some("a subject that ends with a period".to_owned());
    }
    let change = subject.split_once(": ").map_or(subject, |(_, change)| change);
    let first = change.split_whitespace().next().unwrap_or_default().to_lowercase();
    let participle = (first.ends_with("ed") || first.ends_with("ing")) && !VERBS.contains(&first.as_str());
    if participle || ["a", "an", "the"].contains(&first.as_str()) {
        return Some(format!("a subject that begins with '{first}', not with an imperative"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_in_the_imperative_pass() {
        for subject in
            ["vhost: publish merged buffers", "Publish buffers", "tcp, docs: feed queues: one each"]
        {
            assert_eq!(fault(subject), None);
        }
        assert_eq!(fault(&"x".repeat(LONGEST)), None);
    }

    #[test]
    fn other_subjects_are_found() {
        let begins = |subject| fault(subject).is_some_and(|text| text.contains("not with an imperative"));
        assert!(begins("vhost: published buffers"));
        assert!(begins("Publishing buffers"));
        assert!(begins("vhost: the buffers"));
        assert!(fault("vhost: publish buffers.").unwrap().contains("period"));
        assert!(fault(&"x".repeat(LONGEST + 1)).unwrap().contains("73 characters"));
    }

    #[test]
    fn directories_without_commits_have_no_findings() {
        assert_eq!(check(Path::new("/proc")), []);
        assert_eq!(check(Path::new("/missing")), []);
    }
}
