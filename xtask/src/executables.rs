//! Test executables. `cargo test --no-run` reports which it has built. They are run without calling cargo again,
//! because another selection of packages may have other features and cause another build.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// A test executable.
#[derive(Clone, Debug)]
pub(crate) struct Executable {
    /// `PACKAGE/TARGET`.
    pub(crate) name: String,
    path: PathBuf,
    /// The package's directory, in which cargo would run it.
    dir: PathBuf,
}

impl Executable {
    /// Returns the executable in a line of `cargo test --no-run --message-format=json`, if any.
    pub(crate) fn of_line(line: &str) -> Option<Self> {
        let message: Value = line.starts_with('{').then(|| serde_json::from_str(line).ok())??;
        let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let path = message["executable"].as_str().filter(|_| is_test)?;
        let mut dir = PathBuf::from(message["manifest_path"].as_str()?);
        dir.pop();
        let package = dir.file_name()?.to_str()?;
        let name = format!("{package}/{}", message["target"]["name"].as_str()?);
        Some(Self { name, path: path.into(), dir })
    }

    /// Returns the command that runs its tests.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.dir);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executables_with_tests_are_taken() {
        let line = |test| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/p/crates/some/Cargo.toml",
                "target":{{"name":"it"}},"profile":{{"test":{test}}},"executable":"/p/target/release/deps/it-1"}}"#
            )
        };
        let found = Executable::of_line(&line(true)).unwrap();
        assert_eq!(
            (found.name.as_str(), found.path.to_str()),
            ("some/it", Some("/p/target/release/deps/it-1"))
        );
        assert_eq!(found.command().get_current_dir(), Some("/p/crates/some".as_ref()));
        for other in
            [line(false).as_str(), r#"{"reason":"build-finished","success":true}"#, "Compiling x", "{"]
        {
            assert!(Executable::of_line(other).is_none(), "{other}");
        }
    }
}
