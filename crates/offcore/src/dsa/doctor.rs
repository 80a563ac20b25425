//! `offcore dsa doctor`: finds problems of the configuration.

use offcore_dsa::doctor::{System, examine};

use super::DoctorArgs;
use crate::doctor::{check_root, tell};
use crate::failure::Failure;

pub(super) const EXAMPLES: &str = "\
Examples:
    offcore dsa doctor
    offcore dsa doctor --all --format json

Another machine's files, copied to a directory:
    offcore dsa doctor --root /tmp/machine

Exit codes: 0 no problem (there may be warnings), 1 a problem, 2 usage.";

pub(super) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    if let Some(root) = &args.root {
        check_root("--root", root)?;
    }
    let system = args.root.as_deref().map_or_else(System::default, System::under);
    let report = examine(&system);
    tell(&report, args.format, args.all, "DSA")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Format;
    use crate::dsa::fixtures::Tree;

    fn doctor(tree: &Tree) -> Result<(), Failure> {
        run(&DoctorArgs { root: Some(tree.file("")), all: false, format: Format::Json })
    }

    #[test]
    fn only_problems_end_with_a_failure() {
        let tree = Tree::healthy();
        assert!(doctor(&tree).is_ok());
        tree.set("sys/bus/dsa/devices/dsa0/wq0.0/block_on_fault", 1);
        assert!(doctor(&tree).is_ok(), "a warning");
        tree.set("sys/bus/dsa/devices/dsa0/state", "halted");
        let Err(Failure::Failed(error)) = doctor(&tree) else { panic!("a halted device is a problem") };
        assert!(error.to_string().starts_with("1 problem "), "{error}");
        let Err(Failure::Failed(error)) = doctor(&Tree::new()) else { panic!("no device is a problem") };
        assert!(error.to_string().starts_with("1 problem "), "{error}");
    }
}
