//! Tests in separate processes, for what is decided once per process or ends it.

use std::process::{Child, Command, Output, Stdio};

use crate::rig::CHILD;

/// Runs a test in a separate process.
pub(crate) fn in_a_process(test: &str, environment: &[(&str, &str)]) -> Output {
    start_process(test, environment).wait_with_output().unwrap()
}

/// The same, without waiting for it.
pub(crate) fn start_process(test: &str, environment: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(CHILD, "1").envs(environment.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}
