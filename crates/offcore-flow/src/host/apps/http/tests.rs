#![allow(clippy::unwrap_used, reason = "tests may")]

use std::fs;
use std::ops::Range;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::files::{Missing, Root, content_type};
use super::request::{end_of_head, parse, too_long};
use super::response::{Entity, answer, redirect, refuse};
use super::session::HEAD_LIMIT;
use super::status::Status;
use super::target::Target;

const DATE: &str = "Tue, 15 Nov 1994 12:45:26 GMT";
const LATER: &str = "Tue, 15 Nov 1994 12:45:27 GMT";
const EARLIER: &str = "Tue, 15 Nov 1994 12:45:25 GMT";

fn entity() -> Entity {
    let modified = httpdate::parse_http_date(DATE).unwrap() + Duration::from_millis(300);
    Entity { len: 1000, etag: "\"tag\"".into(), modified, content_type: "text/plain" }
}

/// Returns the answer to a request for a file of 1000 bytes.
fn respond(request: &str) -> (String, Range<u64>) {
    let date = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let (mut to, mut body) = (Vec::new(), 0..0);
    match parse(request.as_bytes()) {
        Ok(request) => body = answer(&request, &entity(), date, &mut to),
        Err(refusal) => refuse(refusal, date, &mut to),
    }
    (String::from_utf8(to).unwrap(), body)
}

/// Returns the status of the answer, and whether the connection stays open.
fn status(request: &str) -> (u16, bool) {
    let (head, _) = respond(request);
    let code = head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
    (code, !head.contains("Connection: close\r\n"))
}

fn get(fields: &str) -> String {
    format!("GET /file HTTP/1.1\r\nHost: a\r\n{fields}\r\n")
}

#[test]
fn file_response_has_entity_headers() {
    let (head, body) = respond(&get(""));
    assert_eq!(
        head,
        "HTTP/1.1 200 OK\r\nDate: Sun, 09 Sep 2001 01:46:40 GMT\r\nContent-Type: text/plain\r\n\
         Content-Length: 1000\r\nAccept-Ranges: bytes\r\nETag: \"tag\"\r\nLast-Modified: Tue, 15 Nov 1994 12:45:26 \
         GMT\r\n\r\n"
    );
    assert_eq!(body, 0..1000);
    let (same, body) = respond("HEAD /file HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1\r\n\r\n");
    assert_eq!((same, body), (head, 0..0), "a range is GET's alone");
}

#[test]
fn connection_persistence_follows_version() {
    assert_eq!(status(&get("")), (200, true));
    assert_eq!(status(&get("Connection: Close\r\n")), (200, false));
    assert_eq!(status(&get("Connection: TE, close\r\n")), (200, false));
    assert_eq!(status("GET / HTTP/1.0\r\n\r\n"), (200, false));
    let (head, _) = respond("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert!(head.contains("Connection: keep-alive\r\n"), "{head}");
    assert_eq!(status("GET / HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n"), (200, false));
}

#[test]
fn ranges() {
    for (range, expected) in [
        ("bytes=0-0", Some(0..1)),
        ("bytes=10-19", Some(10..20)),
        ("Bytes=10-", Some(10..1000)),
        ("bytes=-1", Some(999..1000)),
        ("bytes=-5000", Some(0..1000)),
        ("bytes=999-2000", Some(999..1000)),
        ("bytes=0-18446744073709551615", Some(0..1000)),
        ("bytes=1000-", None),
        ("bytes=1000-1001", None),
        ("bytes=-0", None),
    ] {
        let (head, body) = respond(&get(&format!("Range: {range}\r\n")));
        match expected {
            Some(part) => {
                assert!(head.starts_with("HTTP/1.1 206 "), "{range}: {head}");
                let field = format!("Content-Range: bytes {}-{}/1000\r\n", part.start, part.end - 1);
                assert!(head.contains(&field), "{range}: {head}");
                assert!(head.contains(&format!("Content-Length: {}\r\n", part.end - part.start)), "{head}");
                assert_eq!(body, part, "{range}");
            }
            None => {
                assert!(head.starts_with("HTTP/1.1 416 "), "{range}: {head}");
                assert!(head.contains("Content-Range: bytes */1000\r\n"), "{range}: {head}");
                assert!(body.is_empty());
            }
        }
    }
}

#[test]
fn invalid_range_gets_whole_file() {
    for range in [
        "bytes=0-1,5-6",
        "bytes=9-1",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "lines=0-1",
        "0-1",
        "bytes=+1-2",
        "bytes=0-1\r\nRange: bytes=2-3",
        "bytes=0-1\r\nIf-Range: \"old\"",
        &format!("bytes=0-1\r\nIf-Range: {DATE}"),
    ] {
        assert_eq!(respond(&get(&format!("Range: {range}\r\n"))).1, 0..1000, "{range}");
    }
    assert_eq!(respond(&get("Range: bytes=0-1\r\nIf-Range: \"tag\"\r\n")).1, 0..2);
}

#[test]
fn conditions() {
    for (fields, expected) in [
        ("If-None-Match: \"tag\"", 304),
        ("If-None-Match: \"x\", W/\"tag\"", 304),
        ("If-None-Match: *", 304),
        ("If-None-Match: \"x\"", 200),
        ("If-None-Match: \"tag\"\r\nIf-None-Match: \"x\"", 200),
        (&format!("If-None-Match: \"x\"\r\nIf-Modified-Since: {LATER}"), 200),
        (&format!("If-Modified-Since: {DATE}"), 304),
        (&format!("If-Modified-Since: {LATER}"), 304),
        (&format!("If-Modified-Since: {EARLIER}"), 200),
        ("If-Modified-Since: yesterday", 200),
        ("If-Match: \"tag\"", 200),
        ("If-Match: *", 200),
        ("If-Match: W/\"tag\"", 412),
        ("If-Match: \"x\"", 412),
        (&format!("If-Unmodified-Since: {EARLIER}"), 412),
        (&format!("If-Unmodified-Since: {DATE}"), 200),
        ("Range: bytes=0-1\r\nIf-None-Match: \"tag\"", 304),
    ] {
        let (head, body) = respond(&get(&format!("{fields}\r\n")));
        assert!(head.starts_with(&format!("HTTP/1.1 {expected} ")), "{fields}: {head}");
        assert_eq!(body.is_empty(), expected != 200, "{fields}");
        if expected == 304 {
            assert!(head.contains("ETag: \"tag\"\r\n") && head.ends_with("\r\n\r\n"), "{head}");
            assert!(!head.contains("Content-Length"), "{head}");
        }
    }
}

/// Refused requests, their status, and whether the connection can stay open.
#[test]
fn refusals() {
    for (request, expected) in [
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", (405, true)),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n", (405, false)),
        ("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", (405, true)),
        ("BREW / HTTP/1.1\r\nHost: a\r\n\r\n", (501, true)),
        ("get / HTTP/1.1\r\nHost: a\r\n\r\n", (501, true)),
        ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", (505, false)),
        ("GET /  HTTP/1.1\r\nHost: a\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n", (400, false)),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", (400, false)),
        ("GET /\r\n\r\n", (400, false)),
        ("GET / FTP/1.1\r\n\r\n", (400, false)),
        ("GET file HTTP/1.1\r\nHost: a\r\n\r\n", (400, true)),
        ("GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", (400, true)),
        ("GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", (400, true)),
        ("GET /a%00b HTTP/1.1\r\nHost: a\r\n\r\n", (400, true)),
        ("GET /%2e%2e/x HTTP/1.1\r\nHost: a\r\n\r\n", (404, true)),
        ("GET /\u{1} HTTP/1.1\r\nHost: a\r\n\r\n", (400, false)),
        ("\u{16}\u{3}\u{1} \r\n\r\n", (400, false)),
    ] {
        assert_eq!(status(request), expected, "{request:?}");
    }
    let (head, _) = respond("PUT / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(
        head.contains("Allow: GET, HEAD\r\n") && head.ends_with("\r\n\r\n405 Method Not Allowed\n"),
        "{head}"
    );
    let (head, _) = respond("HEAD /.. HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(head.contains("Content-Length: 14\r\n") && head.ends_with("\r\n\r\n"), "{head}");
}

/// The bytes of a body must never be taken for a request.
#[test]
fn request_body_closes_connection() {
    for (fields, expected) in [
        ("Content-Length: 0", (200, true)),
        ("Content-Length: 0, 0", (200, true)),
        ("Content-Length: 5", (413, false)),
        ("Content-Length: 5\r\nContent-Length: 5", (413, false)),
        ("Content-Length: 0\r\nContent-Length: 5", (400, false)),
        ("Content-Length: 0, 5", (400, false)),
        ("Content-Length: +5", (400, false)),
        ("Content-Length: 0x5", (400, false)),
        ("Content-Length:", (400, false)),
        ("Content-Length: 99999999999999999999999", (400, false)),
        ("Transfer-Encoding: chunked", (413, false)),
        ("Transfer-Encoding: xchunked", (413, false)),
        ("Transfer-Encoding: chunked\r\nContent-Length: 0", (400, false)),
        ("Content-Length: 0\r\nTransfer-Encoding: identity", (400, false)),
    ] {
        assert_eq!(status(&get(&format!("{fields}\r\n"))), expected, "{fields}");
    }
    assert_eq!(status("GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), (400, false));
}

#[test]
fn header_ends_at_empty_line() {
    for (bytes, end) in [
        ("GET / HTTP/1.1\r\n\r\nmore", Some(18)),
        ("GET / HTTP/1.1\n\nmore", Some(16)),
        ("GET / HTTP/1.1\n\r\n\n", Some(17)),
        ("GET / HTTP/1.1\r\n\r", None),
        ("GET / HTTP/1.1\r\nA: b\r\n", None),
        ("", None),
    ] {
        assert_eq!(end_of_head(bytes.as_bytes(), 0), end, "{bytes:?}");
        // The result is the same if the bytes arrive one by one.
        let found = (0..bytes.len()).find_map(|seen| end_of_head(&bytes.as_bytes()[..=seen], seen));
        assert_eq!(found, end, "{bytes:?}");
    }
}

#[test]
fn long_headers_are_rejected() {
    assert_eq!(too_long(&[b'a'; HEAD_LIMIT]).status, Status::UriTooLong);
    assert_eq!(too_long(b"GET / HTTP/1.1\r\nA: aaaaa").status, Status::HeadersTooLarge);
    let many = |fields: usize| get(&"A: b\r\n".repeat(fields));
    assert_eq!(status(&many(63)), (200, true));
    assert_eq!(status(&many(64)), (431, false));
}

#[test]
fn request_targets_map_to_files() {
    let path = |target: &str| {
        let target = Target::parse(target).map_err(Status::code)?;
        Ok((String::from_utf8(target.path).unwrap(), target.directory))
    };
    for (target, expected) in [
        ("/", Ok(("", true))),
        ("/?a=/b", Ok(("", true))),
        ("/a", Ok(("a", false))),
        ("/a/b/", Ok(("a/b", true))),
        ("/a%20b/%c3%A4?x", Ok(("a b/ä", false))),
        ("http://host:1/a", Ok(("a", false))),
        ("HTTP://host", Ok(("", true))),
        ("http://host?x", Ok(("", true))),
        ("/...", Ok(("...", false))),
        ("//a", Err(404)),
        ("/a//b", Err(404)),
        ("/a//", Err(404)),
        ("/..", Err(404)),
        ("/a/../b", Err(404)),
        ("/%2E%2e/", Err(404)),
        ("/./a", Err(404)),
        ("/a%2fb", Err(404)),
        ("/a%", Err(400)),
        ("/a%1", Err(400)),
        ("/a%+1", Err(400)),
        ("/%00", Err(400)),
        ("/a#b", Err(400)),
        ("a", Err(400)),
        ("*", Err(400)),
        ("ftp://host/a", Err(400)),
    ] {
        let expected: Result<(&str, bool), u16> = expected;
        assert_eq!(path(target), expected.map(|(path, directory)| (path.to_owned(), directory)), "{target}");
    }
}

#[test]
fn directory_redirect_adds_slash() {
    let request = parse(b"GET /a%0d%0ab/c?x HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut to = Vec::new();
    redirect(&request, &request.target.with_slash(), SystemTime::UNIX_EPOCH, &mut to);
    let head = String::from_utf8(to).unwrap();
    assert!(head.contains("\r\nLocation: /a%0D%0Ab/c/\r\n"), "{head}");
}

#[test]
fn content_type_follows_suffix() {
    for (name, kind) in [
        ("index.html", "text/html; charset=utf-8"),
        ("a.b/LOGO.PNG", "image/png"),
        ("a.png/b", "application/octet-stream"),
        ("a.tar.gz", "application/gzip"),
        ("a.", "application/octet-stream"),
    ] {
        assert_eq!(content_type(name.as_bytes()), kind, "{name}");
    }
}

/// A temporary directory with a secret file outside of the served one.
struct Site(PathBuf);

impl Site {
    fn new() -> Self {
        let outside = std::env::temp_dir().join(format!("offcore-http-{}", std::process::id()));
        fs::create_dir_all(outside.join("www/sub/empty")).unwrap();
        fs::write(outside.join("secret"), "secret").unwrap();
        fs::write(outside.join("www/sub/index.html"), "<p>").unwrap();
        fs::write(outside.join("www/a.txt"), "text").unwrap();
        for (to, name) in [
            ("../secret", "out"),
            ("/etc/passwd", "absolute"),
            ("..", "up"),
            ("a.txt", "in"),
            ("loop", "loop"),
        ] {
            symlink(to, outside.join("www").join(name)).unwrap();
        }
        Self(outside)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn lookup_stays_below_document_root() {
    let site = Site::new();
    let root = Root::open(&site.0.join("www")).unwrap();
    let find = |target: &str| root.find(&Target::parse(target).unwrap()).map(|found| found.entity.len);
    let missing = |status| Err(Missing::Because(status));
    assert_eq!(find("/a.txt"), Ok(4));
    assert_eq!(find("/in"), Ok(4));
    assert_eq!(find("/sub/"), Ok(3));
    assert_eq!(find("/sub"), Err(Missing::Slash));
    for target in [
        "/out",
        "/absolute",
        "/up",
        "/up/secret",
        "/loop",
        "/none",
        "/",
        "/sub/empty/",
        "/a.txt/",
        "/a.txt/b",
    ] {
        assert_eq!(find(target), missing(Status::NotFound), "{target}");
    }
    // The kernel confines lookups even if the parser accepts a path.
    let up = Target { path: b"../secret".to_vec(), directory: false };
    assert_eq!(root.find(&up).map(|found| found.entity.len), missing(Status::NotFound));
    assert_eq!(find(&format!("/{}", "a".repeat(5000))), missing(Status::NotFound));
    let error = Root::open(&site.0.join("secret")).unwrap_err().to_string();
    assert!(error.contains("secret: Not a directory"), "{error}");
}
