//! The configuration file: one TOML file describes a process, its engines, one system and its ports.
//!
//! * [`read`] and [`parse`] read a file into a [`Plan`], or list all problems with their lines,
//! * [`print()`]: the file that describes the same as a command line,
//! * [`sections`]: the sections of a file, [`ports`]: `[[port]]`,
//! * [`schema()`]: the JSON Schema of files,
//! * [`iface`]: the interface of a host's port, also for the command line,
//! * [`names`]: names of settings in messages.

mod document;
mod engines;
pub mod iface;
pub mod names;
mod plan;
pub mod ports;
mod print;
mod schema;
pub mod sections;
mod service;
pub mod values;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use document::{MAX_FILE, Problem, Problems};
pub use plan::{Plan, System, check_duplicates, free_lcore, parse};
pub use print::print;
pub use schema::schema;
pub use service::ServiceSpec;

/// Reads a file.
///
/// # Errors
/// All problems of the file, or that it cannot be read.
pub fn read(path: &Path) -> Result<Plan, Problems> {
    let file = path.display().to_string();
    let whole = |text: String| Problems {
        file: file.clone(),
        list: vec![Problem { line: None, key: String::new(), text }],
    };
    let mut bytes = Vec::new();
    // A pipe or a device could block.
    let opened = std::fs::metadata(path).and_then(|found| match found.is_file() {
        true => File::open(path)?.take(MAX_FILE + 1).read_to_end(&mut bytes),
        false => Err(std::io::Error::other("not a regular file")),
    });
    opened.map_err(|error| whole(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(whole(format!("longer than {MAX_FILE} bytes, expected a configuration")));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|byte| *byte == b'\n').count();
        Problems {
            file: file.clone(),
            list: vec![Problem {
                line: Some(line),
                key: String::new(),
                text: "not UTF-8, expected text".into(),
            }],
        }
    })?;
    parse(&text, &file)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests;
