//! Parses requests (RFC 9110 and 9112). The parser is strict where leniency would allow request smuggling.

use std::str;

use super::status::Status;
use super::target::Target;

/// Maximum number of header fields in a request.
const FIELDS: usize = 64;

/// A request for a file.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The method is HEAD: the answer has no content.
    pub head_only: bool,
    pub target: Target,
    pub session: Session,
    pub conditions: Conditions<'a>,
}

/// Whether more requests may follow on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    pub keep_alive: bool,
    /// The version is HTTP/1.0, for which an answer states that the connection stays open.
    pub old: bool,
}

impl Session {
    /// The connection is closed after this answer.
    pub const LAST: Self = Self { keep_alive: false, old: false };
}

/// Fields that make an answer depend on the file (RFC 9110, 13 and 14). A repeated field counts as a field that never
/// matches, because sending the whole file is always correct.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions<'a> {
    pub if_match: Option<&'a str>,
    pub if_none_match: Option<&'a str>,
    pub if_modified_since: Option<&'a str>,
    pub if_unmodified_since: Option<&'a str>,
    pub if_range: Option<&'a str>,
    pub range: Option<&'a str>,
}

/// The answer to a request that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: Status,
    pub head_only: bool,
    pub session: Session,
}

impl Refusal {
    /// A refusal after which the start of the next request is unknown.
    pub fn last(status: Status) -> Self {
        Self { status, head_only: false, session: Session::LAST }
    }
}

/// Returns the length of the head that `bytes` begins with, including its empty line. The first `seen` bytes were
/// searched before.
pub fn end_of_head(bytes: &[u8], seen: usize) -> Option<usize> {
    let from = seen.saturating_sub(2);
    let mut ends = bytes[from..].iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    ends.find_map(|(at, _)| match bytes[from + at + 1..] {
        [b'\n', ..] => Some(from + at + 2),
        [b'\r', b'\n', ..] => Some(from + at + 3),
        _ => None,
    })
}

/// Returns the refusal for a head that is longer than [`HEAD_LIMIT`](super::session::HEAD_LIMIT) bytes and begins with
/// `bytes`.
pub fn too_long(bytes: &[u8]) -> Refusal {
    Refusal::last(if bytes.contains(&b'\n') { Status::HeadersTooLarge } else { Status::UriTooLong })
}

/// Parses the whole head of a request, including its empty line.
///
/// # Errors
/// Returns the refusal of an invalid or unsupported request.
pub fn parse(head: &[u8]) -> Result<Request<'_>, Refusal> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(head) {
        Ok(httparse::Status::Complete(len)) if len == head.len() => {}
        Ok(_) => return Err(Refusal::last(Status::BadRequest)),
        Err(error) => return Err(Refusal::last(unreadable(error, head))),
    }
    let (Some(method), Some(target), Some(minor)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(Refusal::last(Status::BadRequest));
    };
    let seen = Seen::of(parsed.headers, minor == 0).map_err(Refusal::last)?;
    let head_only = method == "HEAD";
    let refuse = |status| Refusal { status, head_only, session: seen.session };
    match method {
        "GET" | "HEAD" if seen.has_body => return Err(refuse(Status::ContentTooLarge)),
        "GET" | "HEAD" => {}
        "POST" | "PUT" | "DELETE" | "PATCH" | "OPTIONS" | "TRACE" | "CONNECT" => {
            return Err(refuse(Status::MethodNotAllowed));
        }
        _ => return Err(refuse(Status::NotImplemented)),
    }
    let target = Target::parse(target).map_err(refuse)?;
    Ok(Request { head_only, target, session: seen.session, conditions: seen.conditions })
}

/// Returns the status for bytes that the parser rejects.
fn unreadable(error: httparse::Error, head: &[u8]) -> Status {
    match error {
        httparse::Error::TooManyHeaders => Status::HeadersTooLarge,
        httparse::Error::Version if names_other_version(head) => Status::VersionNotSupported,
        _ => Status::BadRequest,
    }
}

/// Whether the first line ends with a version of HTTP that the server does not support.
fn names_other_version(head: &[u8]) -> bool {
    let line =
        head.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty()).unwrap_or_default();
    let word = line.trim_ascii().rsplit(|byte| *byte == b' ').next().unwrap_or_default();
    matches!(word, [b'H', b'T', b'T', b'P', b'/', major, b'.', minor]
        if major.is_ascii_digit() && minor.is_ascii_digit() && !matches!((major, minor), (b'1', b'0' | b'1')))
}

/// The relevant header fields of a request.
struct Seen<'a> {
    session: Session,
    /// Content follows the head. It is not read, and the connection is closed.
    has_body: bool,
    conditions: Conditions<'a>,
}

impl<'a> Seen<'a> {
    fn of(fields: &[httparse::Header<'a>], old: bool) -> Result<Self, Status> {
        let (mut hosts, mut close, mut keep) = (0, false, false);
        let (mut length, mut coded) = (None, false);
        let mut conditions = Conditions::default();
        for field in fields {
            // None of the relevant fields may contain other than ASCII characters.
            let value = str::from_utf8(field.value).unwrap_or("\u{fffd}").trim_matches([' ', '\t']);
            let is = |name: &str| field.name.eq_ignore_ascii_case(name);
            if is("host") {
                hosts += 1;
                check_host(value)?;
            } else if is("connection") {
                close |= value.split(',').any(|word| word.trim().eq_ignore_ascii_case("close"));
                keep |= value.split(',').any(|word| word.trim().eq_ignore_ascii_case("keep-alive"));
            } else if is("content-length") {
                for value in value.split(',') {
                    let value = digits(value.trim_matches([' ', '\t'])).ok_or(Status::BadRequest)?;
                    if length.replace(value).is_some_and(|before| before != value) {
                        return Err(Status::BadRequest);
                    }
                }
            } else if is("transfer-encoding") {
                coded = true;
            } else {
                conditions.note(field.name, value);
            }
        }
        // RFC 9112, 3.2 and 6.1: such a request may be an attempt to make two servers see different requests.
        if hosts > 1 || hosts == 0 && !old || coded && (old || length.is_some()) {
            return Err(Status::BadRequest);
        }
        let has_body = coded || length.is_some_and(|length| length > 0);
        let keep_alive = !close && !has_body && (!old || keep);
        Ok(Self { session: Session { keep_alive, old }, has_body, conditions })
    }
}

impl<'a> Conditions<'a> {
    fn note(&mut self, name: &str, value: &'a str) {
        let place = match () {
            () if name.eq_ignore_ascii_case("if-match") => &mut self.if_match,
            () if name.eq_ignore_ascii_case("if-none-match") => &mut self.if_none_match,
            () if name.eq_ignore_ascii_case("if-modified-since") => &mut self.if_modified_since,
            () if name.eq_ignore_ascii_case("if-unmodified-since") => &mut self.if_unmodified_since,
            () if name.eq_ignore_ascii_case("if-range") => &mut self.if_range,
            () if name.eq_ignore_ascii_case("range") => &mut self.range,
            () => return,
        };
        *place = Some(if place.is_none() { value } else { "" });
    }
}

/// Parses a number that consists of digits only, without sign and space.
pub(super) fn digits(text: &str) -> Option<u64> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

/// Checks the characters of a host. An empty host is valid.
fn check_host(host: &str) -> Result<(), Status> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(&byte);
    if host.bytes().all(fits) { Ok(()) } else { Err(Status::BadRequest) }
}
