//! Tests in separate processes, for behaviour that is fixed once per process or ends it.

use std::process::{Child, Command, Output, Stdio};

use crate::rig::CHILD;

/// Runs a test in a separate process.
pub(crate) fn in_a_process(test: &str, environment: &[(&str, &str)]) -> Output {
    start_process(test, environment).wait_with_output().unwrap()
}

/// Runs a test in a separate process for each of these environments, all at the same time. It has to pass in each.
pub(crate) fn passes_in_processes<'a, const N: usize>(
    test: &str,
    environments: impl IntoIterator<Item = [(&'a str, &'a str); N]>,
) {
    let children: Vec<_> =
        environments.into_iter().map(|environment| start_process(test, &environment)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    }
}

fn start_process(test: &str, environment: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, "1").envs(environment.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
