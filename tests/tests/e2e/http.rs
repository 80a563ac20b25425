//! `offcore tcp --app http:DIR` against curl, wrk and sockets of the kernel.

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;

use peers::{Need, Netns, one_core};

use super::tcp::{NEEDS, OURS, connect, content, host, stop};
use crate::tcp::inside;

pub(super) const PORT: u16 = 8080;
pub(super) const FILES: [(&str, usize); 4] =
    [("none", 0), ("one", 1), ("some.txt", 100_000), ("many.bin", 20_000_000)];

/// A directory with files that is removed when dropped.
pub(super) struct Site(PathBuf);

impl Site {
    pub(super) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("offcore-e2e-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("sub")).unwrap();
        for (name, len) in FILES {
            fs::write(path.join(name), content(len as u64, len)).unwrap();
        }
        fs::write(path.join("sub/index.html"), "<p>").unwrap();
        Self(path)
    }

    /// Returns the argument of `--app`.
    pub(super) fn app(&self) -> String {
        format!("http:{}:{PORT}", self.0.display())
    }

    pub(super) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.0.join(name)).unwrap()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) fn url(address: &str, path: &str) -> String {
    let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
    format!("http://{host}:{PORT}/{path}")
}

/// Returns the output of curl.
pub(super) fn curl(netns: &Netns, args: &[&str]) -> Vec<u8> {
    let mut command = netns.command("curl");
    let output = command.args(["--silent", "--show-error", "--max-time", "60", "--globoff"]).args(args);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn text(netns: &Netns, args: &[&str]) -> String {
    String::from_utf8(curl(netns, args)).unwrap()
}

#[test]
fn files_by_curl() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Curl]].concat()) else { return };
    let (netns, site) = (Netns::new().unwrap(), Site::new("curl"));
    for (port, more) in [("", &["--idle", "sleep"][..]), (",offloads=off", &[])] {
        let offcore = host(&netns, port, &[&["--app", &site.app()], more].concat());
        for address in OURS {
            for (name, len) in FILES {
                let url = url(address, name);
                assert!(curl(&netns, &[&url]) == site.read(name), "{url}");
                let head = text(&netns, &["--head", &url]);
                assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
                assert!(head.contains(&format!("\r\nContent-Length: {len}\r\n")), "{head}");
            }
        }
        let many = url(OURS[0], "many.bin");
        assert!(
            curl(&netns, &["--range", "12345678-19999999", &many]) == site.read("many.bin")[12_345_678..]
        );
        assert!(curl(&netns, &["--range", "-100000", &many]) == site.read("many.bin")[19_900_000..]);
        let code = |args: &[&str]| {
            text(&netns, &[&["--output", "/dev/null", "--write-out", "%{http_code}"], args].concat())
        };
        assert_eq!(code(&["--range", "20000000-", &many]), "416");
        assert_eq!(code(&[&url(OURS[0], "missing")]), "404");
        assert_eq!(code(&["--path-as-is", &url(OURS[0], "../secret")]), "404");
        assert_eq!(code(&["--data", "x=1", &many]), "405");
        let own = site.0.join("many.bin").display().to_string();
        assert_eq!(code(&["--time-cond", &own, &many]), "304");
        assert_eq!(code(&["--http1.0", &url(OURS[0], "one")]), "200");
        assert_eq!(curl(&netns, &["--location", &url(OURS[0], "sub")]), b"<p>");
        stop(offcore);
    }
}

#[test]
fn many_requests_on_one_connection() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Curl]].concat()) else { return };
    let (netns, site) = (Netns::new().unwrap(), Site::new("keep"));
    let offcore = host(&netns, "", &["--app", &site.app(), "--idle", "sleep"]);
    let all = url(OURS[0], "one?[1-300]");
    let args = ["--silent", "--show-error", "--max-time", "60", "--output", "/dev/null"];
    let report =
        netns.run("curl", &[&args[..], &["--write-out", "%{num_connects} ", &all]].concat()).unwrap();
    let connects: Vec<&str> = report.split_whitespace().collect();
    assert_eq!(
        (connects.len(), connects.iter().filter(|count| **count != "0").count()),
        (300, 1),
        "{report}"
    );
    inside(&netns, || {
        // Pipelined requests in one stream, which ends after them.
        let mut stream = connect(OURS[0], PORT);
        let request = "GET /some.txt HTTP/1.1\r\nHost: a\r\n\r\n".repeat(50);
        stream.write_all(request.as_bytes()).unwrap();
        stream.write_all(b"GET /one HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut answers = Vec::new();
        stream.read_to_end(&mut answers).unwrap();
        let file = site.read("some.txt");
        let mut rest = &answers[..];
        for number in 0..50 {
            let end = rest.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
            assert!(rest.starts_with(b"HTTP/1.1 200 OK\r\n"), "answer {number}");
            assert!(rest[end..].starts_with(&file), "answer {number}");
            rest = &rest[end + file.len()..];
        }
        assert!(rest.ends_with(&site.read("one")), "{}", String::from_utf8_lossy(rest));
    });
    stop(offcore);
}

#[test]
fn bad_and_slow_requests_get_errors() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let (netns, site) = (Netns::new().unwrap(), Site::new("bad"));
    let offcore = host(&netns, "", &["--app", &site.app(), "--idle", "sleep"]);
    inside(&netns, || {
        // A client that never ends its request gets an error after ten seconds.
        let mut slow = connect(OURS[0], PORT);
        slow.write_all(b"GET /one HTTP/1.1\r\nHost:").unwrap();
        let ask = |bytes: &[u8]| {
            let mut stream = connect(OURS[1], PORT);
            stream.write_all(bytes).unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            String::from_utf8_lossy(&answer).into_owned()
        };
        let long = |line: &str| format!("{line}{}", "a".repeat(300_000)).into_bytes();
        for (bytes, status) in [
            (b"\x16\x03\x01 nonsense\r\n\r\n".to_vec(), "400 Bad Request"),
            (long("GET /"), "414 URI Too Long"),
            (long("GET / HTTP/1.1\r\nA: "), "431 Request Header Fields Too Large"),
            // The text that follows is the body of the request, not a second request.
            (
                b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 60\r\n\r\nGET /one HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
                "405 Method Not Allowed",
            ),
            (
                b"GET /one HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                    .to_vec(),
                "400 Bad Request",
            ),
            (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n".to_vec(), "505 HTTP Version Not Supported"),
        ] {
            let answer = ask(&bytes);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{status}: {answer}");
            assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        }
        let answer = ask(b"\r\n\r\nGET /one HTTP/1.0\n\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let mut answer = String::new();
        slow.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{answer}");
    });
    stop(offcore);
}

#[test]
fn many_clients_by_wrk() {
    let Some(_core) = one_core(&[&NEEDS[..], &[Need::Wrk]].concat()) else { return };
    let (netns, site) = (Netns::new().unwrap(), Site::new("wrk"));
    let offcore = host(&netns, "", &["--app", &site.app(), "--idle", "sleep"]);
    for name in ["one", "some.txt"] {
        let url = url(OURS[0], name);
        let report =
            netns.run("wrk", &["--threads", "1", "--connections", "50", "--duration", "2s", &url]).unwrap();
        assert!(!report.contains("Socket errors") && !report.contains("Non-2xx"), "{report}");
        let requests = report.lines().find_map(|line| line.trim().split_once(" requests in ")).unwrap().0;
        assert!(requests.parse::<u64>().unwrap() >= 50, "{report}");
    }
    stop(offcore);
}
