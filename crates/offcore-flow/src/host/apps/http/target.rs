//! The target of a request (RFC 9112, 3.2): a path below the server's directory.

use super::status::Status;

/// A path below the server's directory: decoded, relative, without `.` and `..`, without NUL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Empty for the directory itself.
    pub path: Vec<u8>,
    /// The target ends in a slash: it names a directory.
    pub directory: bool,
}

impl Target {
    /// Reads a target in origin form or absolute form.
    ///
    /// # Errors
    /// [`Status::BadRequest`] for an invalid target; [`Status::NotFound`] for a target that cannot name a file of the
    /// server.
    pub fn parse(target: &str) -> Result<Self, Status> {
        let target = origin_form(target).ok_or(Status::BadRequest)?;
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        if path.contains('#') {
            return Err(Status::BadRequest);
        }
        let mut this = Self::default();
        let mut parts = path.split('/').skip(1).peekable();
        while let Some(part) = parts.next() {
            if part.is_empty() && parts.peek().is_none() {
                this.directory = true;
                break;
            }
            if !this.path.is_empty() {
                this.path.push(b'/');
            }
            let start = this.path.len();
            decode(part, &mut this.path)?;
            let name = &this.path[start..];
            // An encoded slash would be part of a name, and no file has such a name.
            if matches!(name, b"" | b"." | b"..") || name.contains(&b'/') {
                return Err(Status::NotFound);
            }
        }
        Ok(this)
    }

    /// Returns the encoded path with a slash at the end.
    pub fn with_slash(&self) -> String {
        let mut text = String::from("/");
        for &byte in &self.path {
            if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                text.push(char::from(byte));
            } else {
                text.push_str(&format!("%{byte:02X}"));
            }
        }
        text.push('/');
        text
    }
}

/// Returns the path and query of a target. The host of an absolute form is ignored: the server has one site.
fn origin_form(target: &str) -> Option<&str> {
    if target.starts_with('/') {
        return Some(target);
    }
    let (scheme, rest) = target.split_once("://")?;
    if !scheme.eq_ignore_ascii_case("http") {
        return None;
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let path = &rest[end..];
    if end == 0 || path.starts_with('#') {
        return None;
    }
    Some(if path.starts_with('/') { path } else { "/" })
}

/// Appends a part of a path with its `%` decoded.
fn decode(part: &str, to: &mut Vec<u8>) -> Result<(), Status> {
    let mut bytes = part.bytes();
    while let Some(byte) = bytes.next() {
        let byte = if byte == b'%' {
            let mut digit = || char::from(bytes.next()?).to_digit(16);
            let (high, low) = (digit(), digit());
            high.zip(low).map(|(high, low)| (high << 4 | low) as u8).ok_or(Status::BadRequest)?
        } else {
            byte
        };
        if byte == 0 {
            return Err(Status::BadRequest);
        }
        to.push(byte);
    }
    Ok(())
}
