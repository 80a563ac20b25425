//! The head of an answer (RFC 9110), and the selection of the bytes that follow it.

use std::io::Write;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use super::request::{Conditions, Refusal, Request, digits};
use super::status::Status;

/// The properties of a file in answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entity {
    /// Length in bytes.
    pub len: u64,
    /// A strong validator, including its quotes.
    pub etag: String,
    /// When the file was last modified.
    pub modified: SystemTime,
    pub content_type: &'static str,
}

/// Appends the head of the answer to a request for an existing file. Returns the range of the file that follows.
pub fn answer(request: &Request<'_>, entity: &Entity, date: SystemTime, to: &mut Vec<u8>) -> Range<u64> {
    let (status, range) = select(&request.conditions, request.head_only, entity);
    let mut head = Head::begin(status, date, to);
    let len = range.end - range.start;
    match status {
        Status::RangeNotSatisfiable => {
            head.field("Content-Range", format_args!("bytes */{}", entity.len));
            head.end(request.session, Some(status), request.head_only);
            return 0..0;
        }
        Status::PreconditionFailed => {
            head.end(request.session, Some(status), request.head_only);
            return 0..0;
        }
        Status::NotModified => {}
        _ => {
            head.field("Content-Type", format_args!("{}", entity.content_type));
            head.field("Content-Length", format_args!("{len}"));
        }
    }
    if status == Status::PartialContent {
        let (first, last) = (range.start, range.end - 1);
        head.field("Content-Range", format_args!("bytes {first}-{last}/{}", entity.len));
    }
    head.field("Accept-Ranges", format_args!("bytes"));
    head.field("ETag", format_args!("{}", entity.etag));
    // The field must not be later than the date of the answer (RFC 9110, 8.8.2.1).
    head.field("Last-Modified", format_args!("{}", http_date(entity.modified.min(date))));
    head.end(request.session, None, request.head_only);
    if request.head_only || status == Status::NotModified { 0..0 } else { range }
}

/// Appends a complete answer with an error status.
pub fn refuse(refusal: Refusal, date: SystemTime, to: &mut Vec<u8>) {
    let mut head = Head::begin(refusal.status, date, to);
    if refusal.status == Status::MethodNotAllowed {
        head.field("Allow", format_args!("GET, HEAD"));
    }
    head.end(refusal.session, Some(refusal.status), refusal.head_only);
}

/// Appends a complete answer that redirects the client to another location on this server.
pub fn redirect(request: &Request<'_>, location: &str, date: SystemTime, to: &mut Vec<u8>) {
    let status = Status::MovedPermanently;
    let mut head = Head::begin(status, date, to);
    head.field("Location", format_args!("{location}"));
    head.end(request.session, Some(status), request.head_only);
}

/// A head that is being written.
struct Head<'a>(&'a mut Vec<u8>);

impl<'a> Head<'a> {
    fn begin(status: Status, date: SystemTime, to: &'a mut Vec<u8>) -> Self {
        let mut this = Self(to);
        this.line(format_args!("HTTP/1.1 {} {}", status.code(), status.reason()));
        this.field("Date", format_args!("{}", http_date(date)));
        this
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a vector never fails.
        let _ = write!(self.0, "{line}\r\n");
    }

    fn field(&mut self, name: &str, value: std::fmt::Arguments<'_>) {
        self.line(format_args!("{name}: {value}"));
    }

    /// Ends the head, and appends the text of a status, if any.
    fn end(&mut self, session: super::request::Session, text: Option<Status>, head_only: bool) {
        let text = text.map(|status| format!("{} {}\n", status.code(), status.reason()));
        if let Some(text) = &text {
            self.field("Content-Type", format_args!("text/plain; charset=utf-8"));
            self.field("Content-Length", format_args!("{}", text.len()));
        }
        if !session.keep_alive {
            self.field("Connection", format_args!("close"));
        } else if session.old {
            self.field("Connection", format_args!("keep-alive"));
        }
        self.0.extend(b"\r\n");
        if let Some(text) = text.filter(|_| !head_only) {
            self.0.extend(text.bytes());
        }
    }
}

/// Evaluates the conditions of a request (RFC 9110, 13.2.2). Returns the status and the bytes to send.
fn select(conditions: &Conditions<'_>, head_only: bool, entity: &Entity) -> (Status, Range<u64>) {
    let whole = 0..entity.len;
    let modified = seconds(entity.modified);
    let since = |date: &str| httpdate::parse_http_date(date).ok().map(seconds);
    let failed = match (conditions.if_match, conditions.if_unmodified_since) {
        (Some(tags), _) => !lists(tags, &entity.etag, false),
        (None, Some(date)) => since(date).is_some_and(|date| modified > date),
        (None, None) => false,
    };
    if failed {
        return (Status::PreconditionFailed, 0..0);
    }
    let unchanged = match (conditions.if_none_match, conditions.if_modified_since) {
        (Some(tags), _) => lists(tags, &entity.etag, true),
        (None, Some(date)) => since(date).is_some_and(|date| modified <= date),
        (None, None) => false,
    };
    if unchanged {
        return (Status::NotModified, 0..0);
    }
    // A date in If-Range is never precise enough, so the whole file is sent.
    let same = conditions.if_range.is_none_or(|tag| tag == entity.etag);
    match conditions.range.filter(|_| same && !head_only).map(|range| one_range(range, entity.len)) {
        None | Some(Asked::Whole) => (Status::Ok, whole),
        Some(Asked::Nothing) => (Status::RangeNotSatisfiable, 0..0),
        Some(Asked::Part(part)) => (Status::PartialContent, part),
    }
}

/// Whether a list of entity tags contains this tag, or is `*`. Weak tags match only if `weak` is set.
fn lists(tags: &str, etag: &str, weak: bool) -> bool {
    tags == "*"
        || tags.split(',').map(str::trim).any(|tag| {
            let tag = if weak { tag.strip_prefix("W/").unwrap_or(tag) } else { tag };
            tag == etag
        })
}

enum Asked {
    Whole,
    Nothing,
    Part(Range<u64>),
}

/// Parses a Range field (RFC 9110, 14.1.2). Multiple ranges and invalid ones are ignored.
fn one_range(field: &str, len: u64) -> Asked {
    let Some((unit, set)) = field.split_once('=') else { return Asked::Whole };
    if !unit.eq_ignore_ascii_case("bytes") {
        return Asked::Whole;
    }
    let Some((first, last)) = set.trim().split_once('-') else { return Asked::Whole };
    let part = match (digits(first), digits(last)) {
        (Some(first), Some(last)) if first <= last => first..last.saturating_add(1).min(len),
        (Some(first), None) if last.is_empty() => first..len,
        (None, Some(last)) if first.is_empty() => len - last.min(len)..len,
        _ => return Asked::Whole,
    };
    if part.start < part.end { Asked::Part(part) } else { Asked::Nothing }
}

/// Seconds since 1970. Dates in HTTP have no fractions of seconds.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Converts a time to an HTTP date. Its year has four digits, so later times become the last such date.
fn http_date(time: SystemTime) -> httpdate::HttpDate {
    const LAST: u64 = 253_402_300_799;
    httpdate::HttpDate::from(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds(time).min(LAST)))
}
