//! Allowed findings: a list states their number for each path. More findings are errors.

use super::Finding;

/// Number of allowed findings below a path. If a file is below several paths, the first counts.
pub(super) type Known = (&'static str, usize);

/// Removes the findings of each path that does not have more findings than allowed.
pub(super) fn beyond_allowed(found: Vec<Finding>, known: &[Known]) -> Vec<Finding> {
    let place = |finding: &Finding| known.iter().position(|(dir, _)| finding.path.starts_with(dir));
    let mut counts = vec![0; known.len()];
    found.iter().filter_map(place).for_each(|at| counts[at] += 1);
    let mut findings = Vec::new();
    for mut finding in found {
        if let Some(at) = place(&finding) {
            let ((dir, most), count) = (known[at], counts[at]);
            if count <= most {
                continue;
            }
            finding.text = format!("{} ({dir} has {count} of these, at most {most})", finding.text);
        }
        findings.push(finding);
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_findings_cannot_grow() {
        let found = || -> Vec<Finding> {
            let paths = ["crates/a/b.rs", "crates/a/c.rs"];
            paths.iter().map(|path| Finding { path: path.into(), line: 1, text: "x".to_owned() }).collect()
        };
        assert_eq!(beyond_allowed(found(), &[]).len(), 2);
        assert_eq!(beyond_allowed(found(), &[("crates/a", 2)]), []);
        assert_eq!(beyond_allowed(found(), &[("crates/a", 3)]), []);
        assert_eq!(beyond_allowed(found(), &[("crates/a/b.rs", 1), ("crates/a", 1)]), []);
        assert_eq!(beyond_allowed(found(), &[("crates/d", 2)]).len(), 2);
        let more = beyond_allowed(found(), &[("crates/a", 1)]);
        assert!(more.len() == 2 && more[0].text == "x (crates/a has 2 of these, at most 1)", "{more:?}");
    }
}
